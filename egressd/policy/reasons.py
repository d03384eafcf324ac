"""The closed list of reason codes, each with the words that an agent and an operator read.

A code is frozen once released: records, tests, rules and clients rely on its spelling. `WORDS` holds for each code one
sentence that says what happened and one that says what to do next; neither may carry an address, a secret or another
sandbox's business (law 10).
"""

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why an attempt was decided, or ended, as it was."""

    # allowed
    RULE = "rule"
    GRANT = "grant"
    OBSERVED = "observed"
    EXPLAINED = "explained"
    INTERNAL_PAGE = "internal_page"
    # the rules said no
    NOT_ALLOWED = "not_allowed"
    DENIED_BY_RULE = "denied_by_rule"
    DENIED_BY_ORGANISATION = "denied_by_organisation"
    DENIED_BY_INSPECTION = "denied_by_inspection"
    APPROVAL_REQUIRED = "approval_required"
    PORT_NOT_ALLOWED = "port_not_allowed"
    SCHEME_NOT_ALLOWED = "scheme_not_allowed"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    PATH_NOT_ALLOWED = "path_not_allowed"
    QUERY_NOT_ALLOWED = "query_not_allowed"
    PATH_AMBIGUOUS = "path_ambiguous"
    BODY_NOT_ALLOWED = "body_not_allowed"
    BODY_MISMATCH = "body_mismatch"
    TARGET_TOO_LONG = "target_too_long"
    UPGRADE_NOT_ALLOWED = "upgrade_not_allowed"
    # the floor
    FLOOR_METADATA = "floor_metadata"
    FLOOR_LOOPBACK = "floor_loopback"
    FLOOR_LINK_LOCAL = "floor_link_local"
    FLOOR_UNSPECIFIED = "floor_unspecified"
    FLOOR_MULTICAST = "floor_multicast"
    FLOOR_OWN_ADDRESS = "floor_own_address"
    FLOOR_NAME = "floor_name"
    # addresses
    SPECIAL_ADDRESS = "special_address"
    ADDRESS_OUTSIDE_RULE = "address_outside_rule"
    IP_LITERAL = "ip_literal"
    SYNTHETIC_UNMAPPED = "synthetic_unmapped"
    NO_ORIGINAL_DST = "no_original_dst"
    # names and their agreement
    BAD_HOST = "bad_host"
    NON_ASCII_HOST = "non_ascii_host"
    USERINFO_IN_AUTHORITY = "userinfo_in_authority"
    BAD_PORT = "bad_port"
    DUPLICATE_HOST = "duplicate_host"
    SNI_MISMATCH = "sni_mismatch"
    AUTHORITY_MISMATCH = "authority_mismatch"
    NO_SNI = "no_sni"
    ECH = "ech"
    # protocol
    BAD_TLS = "bad_tls"
    UNKNOWN_PROTOCOL = "unknown_protocol"
    BAD_REQUEST = "bad_request"
    BAD_HEADER = "bad_header"
    BAD_FRAMING = "bad_framing"
    NESTED_CONNECT = "nested_connect"
    MISDIRECTED_REQUEST = "misdirected_request"
    FLOOD = "flood"
    CLIENT_REJECTED_CA = "client_rejected_ca"
    PROTOCOL_NOT_ALLOWED = "protocol_not_allowed"
    # DNS
    BAD_DNS = "bad_dns"
    DNS_TYPE = "dns_type"
    DNS_CLASS = "dns_class"
    DNS_OPCODE = "dns_opcode"
    DNS_BUDGET = "dns_budget"
    DOH = "doh"
    # limits
    HEAD_TIMEOUT = "head_timeout"
    HEAD_TOO_LARGE = "head_too_large"
    IDLE_TIMEOUT = "idle_timeout"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    RATE_LIMITED = "rate_limited"
    # credentials
    CREDENTIAL_NEEDS_TLS = "credential_needs_tls"
    CREDENTIAL_UNAVAILABLE = "credential_unavailable"
    CREDENTIAL_SLOT_MISSING = "credential_slot_missing"
    CLIENT_CREDENTIALS = "client_credentials"
    PLACEHOLDER_LEAK = "placeholder_leak"
    TOKEN_REQUEST = "token_request"  # noqa: S105 -- the name of a reason
    UNSIGNABLE = "unsignable"
    UNSCANNABLE = "unscannable"
    # upstream
    UPSTREAM_DNS = "upstream_dns"
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    UPSTREAM_TLS = "upstream_tls"
    UPSTREAM_WANTS_CLIENT_CERTIFICATE = "upstream_wants_client_certificate"
    UPSTREAM_PROTOCOL = "upstream_protocol"
    UPSTREAM_CLOSED = "upstream_closed"
    UPSTREAM_NO_HTTP2 = "upstream_no_http2"
    UPSTREAM_PROXY = "upstream_proxy"
    # how an attempt ended
    COMPLETED = "completed"
    CLIENT_CLOSED = "client_closed"
    REVOKED = "revoked"
    POLICY_CHANGED = "policy_changed"
    WORKER_DIED = "worker_died"
    SHUTDOWN = "shutdown"
    CONNTRACK_FULL = "conntrack_full"
    # egressd itself
    UNKNOWN_SANDBOX = "unknown_sandbox"
    BAD_PROXY_TOKEN = "bad_proxy_token"  # noqa: S105 -- the name of a reason
    TOKEN_SOURCE_MISMATCH = "token_source_mismatch"  # noqa: S105 -- the name of a reason
    SPOOFED_SOURCE = "spoofed_source"
    BAD_HOP = "bad_hop"
    AUDIT_UNAVAILABLE = "audit_unavailable"
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class Words:
    """What a person or an agent is told: `says` is the fact, `hint` the next step (may be empty), `status` the HTTP code."""

    says: str
    hint: str
    status: int = 403


_ASK = "Ask the operator for a rule; do not retry or look for another way out."
_FIX = "Correct the request; retrying it unchanged cannot work."
_LATER = "Try again later; if it persists, tell the operator."

WORDS: dict[Reason, Words] = {
    Reason.RULE: Words("a rule allows this", "", 200),
    Reason.GRANT: Words("an approval allows this for a while", "", 200),
    Reason.OBSERVED: Words("nothing in force allows this; it is only observed", "", 200),
    Reason.EXPLAINED: Words("the name is denied and leads to a page that says so", "", 200),
    Reason.INTERNAL_PAGE: Words("egressd itself answers this, for this sandbox alone", "", 200),
    Reason.NOT_ALLOWED: Words("no rule of this sandbox allows this destination", _ASK),
    Reason.DENIED_BY_RULE: Words(
        "a rule of this sandbox denies this destination", "Use another source; this one is denied on purpose."
    ),
    Reason.DENIED_BY_ORGANISATION: Words(
        "the organisation denies this destination for every sandbox",
        "Use another source; this one is denied on purpose.",
    ),
    Reason.DENIED_BY_INSPECTION: Words(
        "an inspection that the operator runs refuses this request",
        "Look at what the request carries; retrying it unchanged cannot work.",
    ),
    Reason.APPROVAL_REQUIRED: Words(
        "this destination needs a person's approval",
        "Ask for it at http://egressd.internal/access, then try again.",
    ),
    Reason.PORT_NOT_ALLOWED: Words("this port of the host is not allowed", _ASK),
    Reason.SCHEME_NOT_ALLOWED: Words(
        "this scheme is not allowed for the host", "Use https if the host offers it."
    ),
    Reason.METHOD_NOT_ALLOWED: Words("this method is not allowed on this path", _ASK),
    Reason.PATH_NOT_ALLOWED: Words("this path of the host is not allowed", _ASK),
    Reason.QUERY_NOT_ALLOWED: Words("these query parameters are not allowed on this path", _ASK),
    Reason.PATH_AMBIGUOUS: Words(
        "the path can be read in more than one way",
        "Send it without dot segments, double slashes, backslashes, semicolons or needless escapes.",
    ),
    Reason.BODY_NOT_ALLOWED: Words("a GET or HEAD request may not carry a body", _FIX),
    Reason.BODY_MISMATCH: Words(
        "the body is not the JSON that this rule asks for",
        "Send one small JSON object in UTF-8, not compressed, with the values that the operator's rule names.",
    ),
    Reason.TARGET_TOO_LONG: Words("the request target is longer than this rule allows", _FIX, 414),
    Reason.UPGRADE_NOT_ALLOWED: Words("this protocol upgrade is not allowed", _ASK),
    Reason.FLOOR_METADATA: Words(
        "metadata endpoints are never reachable from a sandbox", "No rule can allow this; do not retry."
    ),
    Reason.FLOOR_LOOPBACK: Words(
        "loopback addresses are never reached through egressd", "No rule can allow this; do not retry."
    ),
    Reason.FLOOR_LINK_LOCAL: Words(
        "link-local addresses are never reachable from a sandbox", "No rule can allow this; do not retry."
    ),
    Reason.FLOOR_UNSPECIFIED: Words(
        "the unspecified address is no destination", "No rule can allow this; do not retry."
    ),
    Reason.FLOOR_MULTICAST: Words(
        "multicast and broadcast addresses are never reachable from a sandbox",
        "No rule can allow this; do not retry.",
    ),
    Reason.FLOOR_OWN_ADDRESS: Words(
        "egressd's own host is never reachable from a sandbox", "No rule can allow this; do not retry."
    ),
    Reason.FLOOR_NAME: Words(
        "this name is never resolved for a sandbox", "No rule can allow this; do not retry."
    ),
    Reason.SPECIAL_ADDRESS: Words(
        "the destination lies in a non-public address range", "A rule must name the range; ask the operator."
    ),
    Reason.ADDRESS_OUTSIDE_RULE: Words("the name resolves outside the addresses that its rule names", _ASK),
    Reason.IP_LITERAL: Words("connections to bare addresses are not allowed", "Use the host's name."),
    Reason.SYNTHETIC_UNMAPPED: Words(
        "this address stands for no name of this sandbox", "Look the name up again and connect to the answer."
    ),
    Reason.NO_ORIGINAL_DST: Words("the connection has no original destination", _FIX),
    Reason.BAD_HOST: Words("the host is not a valid name", _FIX, 400),
    Reason.NON_ASCII_HOST: Words(
        "the host holds characters outside ASCII", "Send the name in its xn-- form.", 400
    ),
    Reason.USERINFO_IN_AUTHORITY: Words("the authority holds user information", "Send the host alone.", 400),
    Reason.BAD_PORT: Words("the port is not a number from 1 to 65535", _FIX, 400),
    Reason.DUPLICATE_HOST: Words("the request has more than one Host field", _FIX, 400),
    Reason.SNI_MISMATCH: Words("the TLS server name is not the name that was connected to", _FIX),
    Reason.AUTHORITY_MISMATCH: Words(
        "the request names another host than its connection", "Open a connection of its own for each host."
    ),
    Reason.NO_SNI: Words("the TLS hello names no server", "Send a server name (SNI)."),
    Reason.ECH: Words("the TLS hello hides its server name", "Turn Encrypted Client Hello off."),
    Reason.BAD_TLS: Words("the TLS hello is malformed", _FIX, 400),
    Reason.UNKNOWN_PROTOCOL: Words(
        "the connection speaks neither TLS nor HTTP",
        "Only TLS and HTTP pass here; ask the operator for a relay rule.",
    ),
    Reason.BAD_REQUEST: Words("the request is malformed", _FIX, 400),
    Reason.BAD_HEADER: Words("a header field is malformed", _FIX, 400),
    Reason.BAD_FRAMING: Words("the length of the message is ambiguous", _FIX, 400),
    Reason.NESTED_CONNECT: Words("CONNECT is not accepted inside a connection", _FIX),
    Reason.MISDIRECTED_REQUEST: Words(
        "the request is for another host than its connection",
        "Open a connection of its own for this host; the rules allow it.",
        421,
    ),
    Reason.FLOOD: Words("the connection asks for work and carries nothing", _FIX, 429),
    Reason.CLIENT_REJECTED_CA: Words(
        "the client does not trust egressd's certificate authority",
        "Point the client at the CA bundle (SSL_CERT_FILE and its kin).",
    ),
    Reason.PROTOCOL_NOT_ALLOWED: Words(
        "only TCP and DNS leave a sandbox", "Use TCP; UDP, QUIC and ICMP are refused."
    ),
    Reason.BAD_DNS: Words("the DNS message is malformed", _FIX),
    Reason.DNS_TYPE: Words("this DNS record type is not answered", "Only address records are answered."),
    Reason.DNS_CLASS: Words("only the Internet class is answered", _FIX),
    Reason.DNS_OPCODE: Words("only standard DNS queries are answered", _FIX),
    Reason.DNS_BUDGET: Words("this sandbox has asked for too many names", _LATER, 429),
    Reason.DOH: Words(
        "DNS over HTTPS passes only where a rule spells its path",
        "Use the system's resolver: egressd answers it.",
    ),
    Reason.HEAD_TIMEOUT: Words("the first bytes did not arrive in time", _FIX, 408),
    Reason.HEAD_TOO_LARGE: Words("the request head is too large", _FIX, 431),
    Reason.IDLE_TIMEOUT: Words("the connection was idle for too long", _LATER, 408),
    Reason.TOO_MANY_CONNECTIONS: Words(
        "this sandbox has too many open connections", "Close some and try again.", 429
    ),
    Reason.RATE_LIMITED: Words(
        "this sandbox is over a limit of its rules", "Slow down and try again later.", 429
    ),
    Reason.CREDENTIAL_NEEDS_TLS: Words("a credential is attached over verified https only", "Use https."),
    Reason.CREDENTIAL_UNAVAILABLE: Words(
        "the credential for this destination cannot be had now", _LATER, 502
    ),
    Reason.CREDENTIAL_SLOT_MISSING: Words(
        "the request leaves no place for the credential of this destination",
        "Put the placeholder that the operator gives where the key belongs.",
        400,
    ),
    Reason.CLIENT_CREDENTIALS: Words(
        "this destination takes no key of the sandbox's own", "Send the request without any key; it gets one."
    ),
    Reason.PLACEHOLDER_LEAK: Words(
        "a placeholder of a credential goes where it does not belong",
        "Send it in its own slot, to the host of its credential, and nowhere else.",
    ),
    Reason.TOKEN_REQUEST: Words("requests that issue tokens are not authenticated for a sandbox", _ASK),
    Reason.UNSIGNABLE: Words(
        "the body is too large, or framed in a way, to be signed for this destination",
        "Send it in smaller parts, or without signing chunks.",
        413,
    ),
    Reason.UNSCANNABLE: Words(
        "the host's answer could hide a credential: it is coded in a way that is not read",
        "Ask for it without compression, or with gzip alone.",
        502,
    ),
    Reason.UPSTREAM_DNS: Words("the host's name could not be resolved", _LATER, 502),
    Reason.UPSTREAM_UNREACHABLE: Words("the host could not be reached", _LATER, 502),
    Reason.UPSTREAM_TIMEOUT: Words("the host did not answer in time", _LATER, 504),
    Reason.UPSTREAM_TLS: Words(
        "the host's certificate or TLS handshake was not acceptable",
        "Tell the operator; this is not retried.",
        502,
    ),
    Reason.UPSTREAM_WANTS_CLIENT_CERTIFICATE: Words(
        "the host asks for a client certificate", "Ask the operator for a tunnel rule.", 502
    ),
    Reason.UPSTREAM_PROTOCOL: Words("the host's answer is malformed", _LATER, 502),
    Reason.UPSTREAM_CLOSED: Words("the host closed the connection", _LATER, 502),
    Reason.UPSTREAM_NO_HTTP2: Words(
        "the host does not speak HTTP/2, and the client offered nothing else",
        "Let the client offer HTTP/1.1 as well.",
        502,
    ),
    Reason.UPSTREAM_PROXY: Words("the proxy that leads outside refused or failed", _LATER, 502),
    Reason.COMPLETED: Words("it ran to its end", "", 200),
    Reason.CLIENT_CLOSED: Words("the sandbox closed the connection", ""),
    Reason.REVOKED: Words("the sandbox was revoked", "Stop; nothing leaves this sandbox any more."),
    Reason.POLICY_CHANGED: Words("the rules changed and no longer allow this", _ASK),
    Reason.WORKER_DIED: Words("the process that carried this connection died", "Try again.", 502),
    Reason.SHUTDOWN: Words("egressd is shutting down", "", 503),
    Reason.CONNTRACK_FULL: Words("the host's table of connections is full", _LATER, 503),
    Reason.UNKNOWN_SANDBOX: Words("the connection belongs to no known sandbox", "Tell the operator."),
    Reason.BAD_PROXY_TOKEN: Words(
        "the proxy credentials are not those of a sandbox",
        "Use the proxy URL exactly as the operator gave it; do not guess.",
    ),
    Reason.TOKEN_SOURCE_MISMATCH: Words(
        "these proxy credentials belong to another source address",
        "Each sandbox uses its own, from where it first did; tell the operator.",
    ),
    Reason.SPOOFED_SOURCE: Words(
        "this came with the source address of another sandbox",
        "Use the address that was given to this sandbox; tell the operator.",
    ),
    Reason.BAD_HOP: Words(
        "the PROXY protocol header is missing, malformed or from nobody who may send one", "", 400
    ),
    Reason.AUDIT_UNAVAILABLE: Words("the record could not be written, so nothing leaves", _LATER, 503),
    Reason.INTERNAL_ERROR: Words(
        "egressd failed while judging this, so it is denied", "Tell the operator the attempt id.", 502
    ),
}
