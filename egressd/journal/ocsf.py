"""A record as an event of the Open Cybersecurity Schema Framework, for a SIEM that speaks it. Pure, and total on any record.

OCSF 1.8.0, https://schema.ocsf.io: 4001 Network Activity for connections and packets, 4002 HTTP Activity, 4003 DNS Activity, 5019
Device Config State Change for rules, sandboxes and approvals, 2004 Detection Finding for alerts and for records that are missing;
the profile Security Control says what was decided.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

VERSION: Final = "1.8.0"

_NETWORK, _HTTP, _DNS, _CONFIG, _FINDING = 4001, 4002, 4003, 5019, 2004
_INFORMATIONAL, _LOW, _MEDIUM, _HIGH = 1, 2, 3, 4
_METHODS: Final = {
    name: number
    for number, name in enumerate(
        ["CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "POST", "PUT", "TRACE", "PATCH"], 1
    )
}
_OTHER, _UNKNOWN = 99, 0
_OUTBOUND = 2
_TITLES: Final = {
    "metadata": "A sandbox tried a metadata endpoint",
    "dns_tunnel": "A sandbox asks for names that look like data",
    "placeholder": "A placeholder of a credential went where it does not belong",
    "key": "A sandbox sent a key of its own where egressd attaches one",
    "lost": "Attempts without a record of their own",
    "journal": "What became of the journal's file",
}
_HIDDEN = re.compile(r"<\d+>")
REDACTED: Final = "REDACTED"


def event_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event of a record; fields that say nothing are left out."""
    event, layer = fields.get("event"), fields.get("layer")
    if event in ("alert", "lost", "journal"):
        return _base(fields, _FINDING, 1) | _finding(fields)
    if event not in ("decision", "end"):
        return _base(fields, _CONFIG, 1) | {
            "device": {"type_id": _OTHER, "type": "sandbox", "uid": _sandbox(fields)}
        }
    ends = _ends(fields)
    match layer:
        case "request":
            return _base(fields, _HTTP, _METHODS.get(_text(fields, "method"), _OTHER)) | ends | _http(fields)
        case "dns":
            asked = {"hostname": _host(fields) or "-", "type": fields.get("qtype")}
            return _base(fields, _DNS, 1) | ends | {"query": _set(asked)}
        case _:
            return _base(fields, _NETWORK, _course(fields)) | ends


@cache
def own_version() -> str:
    """Return egressd's version, as far as it is installed as a package."""
    try:
        return version("egressd")
    except PackageNotFoundError:
        return "unknown"


def url_of(fields: Mapping[str, Any]) -> str:
    """Return the URL of a request; the values of its query, which no record holds, are REDACTED."""
    scheme, port = _text(fields, "scheme") or "http", fields.get("port")
    usual = {"https": 443, "http": 80}.get(scheme)
    authority = _host(fields) + (f":{port}" if type(port) is int and port != usual else "")
    query = f"?{_HIDDEN.sub(REDACTED, _text(fields, 'query'))}" if "query" in fields else ""
    return f"{scheme}://{authority}{_text(fields, 'path')}{query}"


def milliseconds(fields: Mapping[str, Any]) -> int:
    """Return when it happened, Unix milliseconds; 0 where the record does not say."""
    try:
        return int(dt.datetime.fromisoformat(fields["time"]).timestamp() * 1000)
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0


def _base(fields: Mapping[str, Any], class_uid: int, activity: int) -> dict[str, Any]:
    verdict = fields.get("verdict")
    action = {"allow": 1, "deny": 2, "ask": 2}.get(str(verdict), _UNKNOWN)
    rule = _set({"uid": fields.get("rule"), "name": fields.get("rule"), "desc": fields.get("place")})
    policy = _set({"uid": fields.get("policy"), "name": fields.get("profile")})
    return _set(
        {
            "class_uid": class_uid,
            "category_uid": class_uid // 1000,
            "activity_id": activity,
            "type_uid": class_uid * 100 + activity,
            "time": milliseconds(fields),
            "severity_id": _severity(fields),
            "action_id": action,
            "disposition_id": {1: 1, 2: 2}.get(action, _UNKNOWN),
            "status_id": _status(fields, class_uid, action),
            "status_code": fields.get("reason"),
            "status_detail": fields.get("detail"),
            "message": fields.get("detail"),
            "count": fields.get("count"),
            "is_alert": True if fields.get("event") == "alert" else None,
            "firewall_rule": rule or None,
            "policy": policy or None,
            "metadata": _metadata(fields),
            "unmapped": _unmapped(fields) or None,
        }
    )


def _metadata(fields: Mapping[str, Any]) -> dict[str, Any]:
    labels = fields.get("labels")
    told = {
        "version": VERSION,
        "product": {"name": "egressd", "vendor_name": "egressd", "version": own_version()},
        "profiles": ["security_control"],
        "log_name": "journal",
        "log_version": _text(fields, "schema") or str(fields.get("schema", "")) or None,
        "uid": f"{_text(fields, 'attempt_id')}:{_text(fields, 'event')}",
        "correlation_uid": fields.get("root_id"),
        "sequence": fields.get("seq"),
        "original_time": fields.get("time"),
        "labels": [f"{name}:{text}" for name, text in labels.items()] if isinstance(labels, dict) else None,
    }
    return _set(told)


def _unmapped(fields: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "channel",
        "treatment",
        "would_deny",
        "traceparent",
        "credential",
        "lease",
        "grant",
        "sandbox",
        "alert",
    )
    found = {name: fields[name] for name in names if fields.get(name) is not None}
    if (method := _text(fields, "method")) and method not in _METHODS:
        found["method"] = method
    return found


def _ends(fields: Mapping[str, Any]) -> dict[str, Any]:
    host, address, port = _host(fields), _text(fields, "address"), fields.get("port")
    dialled = _text(fields, "upstream")
    to = _set(
        {"hostname": host or None, "ip": dialled if dialled[:1].isdigit() else address or None, "port": port}
    )
    traffic = _set({"bytes_out": fields.get("bytes_up"), "bytes_in": fields.get("bytes_down")})
    duration = fields.get("duration_ms")
    protocol = _text(fields, "protocol") or ("udp" if fields.get("channel") == "dns-udp" else "tcp")
    return _set(
        {
            "src_endpoint": _set({"uid": _sandbox(fields), "ip": fields.get("source")}),
            "dst_endpoint": to if to.keys() - {"port"} else None,
            "connection_info": {"direction_id": _OUTBOUND, "protocol_name": protocol},
            "traffic": traffic or None,
            "duration": int(duration)
            if isinstance(duration, int | float) and not isinstance(duration, bool)
            else None,
        }
    )


def _http(fields: Mapping[str, Any]) -> dict[str, Any]:
    url = {
        "url_string": url_of(fields),
        "hostname": _host(fields) or None,
        "path": fields.get("path"),
        "port": fields.get("port"),
        "scheme": fields.get("scheme"),
    }
    status, method = fields.get("status"), _text(fields, "method")
    return _set(
        {
            "http_request": _set({"http_method": method if method in _METHODS else None, "url": _set(url)}),
            "http_response": {"code": status} if type(status) is int else None,
        }
    )


def _finding(fields: Mapping[str, Any]) -> dict[str, Any]:
    what = _text(fields, "alert") or _text(fields, "event")
    info = {
        "uid": _text(fields, "attempt_id") or "-",
        "title": _TITLES.get(what, what),
        "desc": fields.get("detail"),
        "types": [what],
    }
    place = _set({"uid": _sandbox(fields), "type": "sandbox"})
    return {"finding_info": _set(info), "resources": [place]}


def _course(fields: Mapping[str, Any]) -> int:
    """Return Open, Close or Refuse."""
    if fields.get("event") == "end":
        return 2
    return 1 if fields.get("verdict") == "allow" else 5


def _severity(fields: Mapping[str, Any]) -> int:
    if fields.get("event") == "alert":
        return _HIGH
    if fields.get("event") == "lost" or fields.get("verdict") in ("deny", "ask"):
        return _MEDIUM
    return _LOW if fields.get("would_deny") is True else _INFORMATIONAL


def _status(fields: Mapping[str, Any], class_uid: int, action: int) -> int | None:
    if class_uid == _FINDING:  # there it is how far somebody has looked at it: New
        return 1
    if action == _UNKNOWN:
        return 1 if fields.get("reason") in (None, "completed") else _UNKNOWN
    return action


def _host(fields: Mapping[str, Any]) -> str:
    return _text(fields, "host") or _text(fields, "host_raw") or _text(fields, "address")


def _sandbox(fields: Mapping[str, Any]) -> str:
    return _text(fields, "sandbox") or "unknown"


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _set(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
