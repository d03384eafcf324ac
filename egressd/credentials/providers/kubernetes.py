"""Tokens of a Kubernetes service account by the TokenRequest API, short-lived and for named audiences.

They cannot be taken back before they expire: Kubernetes revokes a token only with the account or the object it is bound to.
"""

from __future__ import annotations

import os
from typing import Final

from pydantic import SecretStr

from egressd.credentials.lease import Token
from egressd.credentials.providers.base import For, Minted, SourceFailed, read_secret
from egressd.credentials.providers.endpoint import Endpoint, deadline
from egressd.policy.credential import KubernetesSource, SecretRef

IN_CLUSTER: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where a pod finds its own token and the authority of its API server."""


def provider(_name: str, source: KubernetesSource, ca_bundle: str | None) -> Kubernetes:
    """Return the provider of one credential."""
    return Kubernetes(source, ca_bundle)


class Kubernetes:
    """A client of one API server: the operator's, or the one of the cluster that egressd itself runs in.

    `own` is where that cluster's token and authority lie. They are used for that cluster alone: its token, sent to a server that
    the operator names, would be given away.
    """

    def __init__(
        self, source: KubernetesSource, ca_bundle: str | None = None, *, own: str = IN_CLUSTER
    ) -> None:
        self._source = source
        self._ca_bundle = ca_bundle
        self._own = own
        self._endpoint: Endpoint | None = None

    async def mint(self, for_: For) -> Minted:  # noqa: ARG002 -- an account is the same for everybody
        """Return a token of the service account; raises SourceFailed."""
        source = self._source
        async with deadline():
            endpoint = self._reached()
            token = source.token
            if token is None:
                if source.server is not None:
                    raise SourceFailed("`server` needs `token`: the cluster's own is not for other servers")
                token = SecretRef(file=f"{self._own}/token")
            spec: dict[str, object] = {"expirationSeconds": source.duration}
            if source.audiences is not None:
                spec["audiences"] = source.audiences
            answer = await endpoint.ask(
                "POST",
                f"api/v1/namespaces/{source.namespace}/serviceaccounts/{source.service_account}/token",
                fields={"Authorization": f"Bearer {await read_secret(token)}"},
                document={"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
            )
            if answer.status != 201:
                raise answer.refused()
            status = answer.document().get("status")
            if not isinstance(status, dict):
                raise SourceFailed(f"{answer.origin}: the answer holds no credential")
            value = answer.secret(status.get("token"))
            return Minted(Token(value=SecretStr(value)), answer.at(status.get("expirationTimestamp")))

    async def close(self) -> None:
        """Nothing is kept."""

    def _reached(self) -> Endpoint:
        if self._endpoint is None:
            source = self._source
            if source.server is not None:
                self._endpoint = Endpoint(source.server, source.ca or self._ca_bundle)
            else:
                self._endpoint = Endpoint(_own_server(), source.ca or f"{self._own}/ca.crt")
        return self._endpoint


def _own_server() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise SourceFailed("outside a cluster `server` is needed: KUBERNETES_SERVICE_HOST is not set")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"
