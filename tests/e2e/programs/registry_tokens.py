"""Hands out tokens for a container registry to who knows the password (Docker's token authentication specification).

registry_tokens.py PORT KEY.pem CERTIFICATE.pem USER:PASSWORD
"""

import base64
import json
import secrets
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import jwt
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

port, key_file, certificate_file, account = sys.argv[1:]
KEY = Path(key_file).read_bytes()
CERTIFICATE = x509.load_pem_x509_certificate(Path(certificate_file).read_bytes())
CHAIN = [base64.b64encode(CERTIFICATE.public_bytes(Encoding.DER)).decode()]
RIGHT = "Basic " + base64.b64encode(account.encode()).decode()


class Tokens(BaseHTTPRequestHandler):
    """`GET /token?service=…&scope=repository:NAME:ACTIONS`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.headers.get_all("Authorization", []) != [RIGHT]:
            self._say(401, {"errors": [{"code": "UNAUTHORIZED"}]})
            return
        asked = parse_qs(urlsplit(self.path).query)
        access = []
        for scope in asked.get("scope", []):
            kind, name, actions = (
                scope.rsplit(":", 1)[0].partition(":")[0],
                scope.split(":")[1],
                scope.split(":")[-1],
            )
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        now = int(time.time())
        claims = {
            "iss": "lab-tokens",
            "sub": "lab",
            "aud": asked.get("service", [""])[0],
            "exp": now + 300,
            "nbf": now - 10,
            "iat": now,
            "jti": secrets.token_hex(8),
            "access": access,
        }
        token = jwt.encode(claims, KEY, algorithm="ES256", headers={"x5c": CHAIN})
        self._say(200, {"token": token, "expires_in": 300})

    def _say(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: nobody reads it."""


ThreadingHTTPServer(("127.0.0.1", int(port)), Tokens).serve_forever()
