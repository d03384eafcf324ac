"""egressd's policy for a stock mitmproxy: `mitmdump -s addons/egress.py --set egress_rules=rules --set egress_profile=NAME`.

For trying rules in a lab; the boundary around a sandbox is `egressd run`, which does not use this file. What is judged, and how
it is refused, is the same code as there. mitmproxy differs where it matters most: an exception in a hook is logged, and then
the request goes on. So every hook here writes the denial first and takes it back last, and `server_connect`, which every dial
has to pass, opens nothing but an address that was judged for a request that was admitted.

Without rules and a profile everything is refused. addons/README.md says what a stock mitmproxy cannot do.
"""

# mypy: allow-untyped-calls
# (mitmproxy's options, exceptions and flows are not annotated throughout)

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from mitmproxy import addonmanager, ctx, exceptions
from mitmproxy.addonmanager import Loader
from mitmproxy.connection import Client
from mitmproxy.flow import Flow
from mitmproxy.http import HTTPFlow, Response
from mitmproxy.proxy.layer import NextLayer
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from egressd.gate.connection import Services
from egressd.gate.denials import Remembering
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.dns.upstream import Resolver
from egressd.gate.inspector.addon import EXCHANGE, HOOK_TIMEOUT, PolicyAddon, as_response, exchange_of
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.head import BadHead, parse_request_head
from egressd.gate.inspector.messages import request_head_of
from egressd.gate.inspector.stock.addresses import Addresses
from egressd.gate.inspector.stock.flows import (
    authority_of,
    bare_response,
    counted,
    has_long_body,
    held_exchange,
)
from egressd.gate.inspector.stock.opening import Refuse, layer_for
from egressd.gate.inspector.stock.options import SET, end_process, unguarded
from egressd.gate.inspector.stock.visitor import Visitor
from egressd.gate.limits import Budget
from egressd.gate.recorder import AuditUnavailable
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.journal.record import Record, clip, to_line
from egressd.journal.writer import BadRecord, Journal, JournalUnavailable
from egressd.policy.attempt import Address, Decision
from egressd.policy.compile import CompiledPolicy, compile_policy
from egressd.policy.effective import EffectivePolicy
from egressd.policy.names import BadHost, parse_authority
from egressd.policy.reasons import Reason
from egressd.rulefiles.load import load_rules
from egressd.rulefiles.problems import Problems

if TYPE_CHECKING:
    from egressd.gate.dialer import Dialer
    from egressd.gate.tls.leaves import Leaves

logger = logging.getLogger("egressd")

_NOBODY: Final = compile_policy(EffectivePolicy(profile="none"))


class Book:
    """The recorder: a journal if there is one, else mitmproxy's event log."""

    def __init__(self) -> None:
        """Nothing is opened before `journal` is set."""
        self.journal: Journal | None = None

    def put(self, record: Record) -> None:
        """See `Recorder.put`."""
        try:
            self._write(record)
        except AuditUnavailable as error:
            logger.error("the journal cannot be written: %s", error)

    async def commit(self, record: Record) -> None:
        """See `Recorder.commit`."""
        self._write(record)

    def _write(self, record: Record) -> None:
        if self.journal is None:
            logger.info(to_line(record.as_dict()).decode("ascii").rstrip())
            return
        try:
            self.journal.append([record.as_dict()])
        except (JournalUnavailable, BadRecord, OSError) as error:
            raise AuditUnavailable(str(error)) from error


class Egress:
    """The addon. One sandbox stands for everybody who connects."""

    def __init__(self) -> None:
        """Everybody is refused until rules are loaded."""
        settings = Settings()
        self._book = Book()
        self._sandbox = Sandbox("mitmproxy", _NOBODY, SyntheticNames(1), Budget(settings))
        recorder = Remembering(self._book, self._sandbox.denials)
        self._services = Services(settings, recorder, cast("Dialer", None), cast("Leaves", None))
        self._addresses = Addresses()
        self._visitors: dict[str, Visitor] = {}

    # options

    def load(self, loader: Loader) -> None:
        """Add our options and set mitmproxy's."""
        asyncio.get_running_loop().call_soon(self._must_be_loaded)
        loader.add_option("egress_rules", str, "", "egressd: the rules folder (or EGRESSD_RULES).")
        loader.add_option("egress_profile", str, "", "egressd: the profile (or EGRESSD_PROFILE).")
        loader.add_option(
            "egress_dns", str, "system", "egressd: where names are resolved, as `--dns-upstream`."
        )
        loader.add_option("egress_journal", str, "", "egressd: a file for records; else the event log.")
        ctx.options.update(**SET)

    def _must_be_loaded(self) -> None:
        """End mitmproxy if it has not kept this addon.

        What raises OptionsError while a script is loaded, such as one of its options given twice, ends mitmproxy's task of
        loading it and nothing else: it would go on as an open proxy.
        """
        if not any(addon is self for addon in addonmanager.traverse(ctx.master.addons.chain)):
            end_process("the policy could not be loaded (is one of its options given twice?)")

    def configure(self, updated: set[str]) -> None:
        """Take changed options, whole or not at all; raises OptionsError, upon which a start fails and a change is undone."""
        problem = unguarded(ctx.options)
        if problem is not None:
            raise exceptions.OptionsError(f"egressd does not run with {problem}")
        if "egress_dns" in updated:
            try:
                self._addresses.resolver = Resolver(
                    ctx.options.egress_dns, self._services.settings.dns_timeout
                )
            except (ValueError, OSError) as error:
                raise exceptions.OptionsError(f"egress_dns: {error}") from None
        if "egress_journal" in updated:
            self._open_journal(ctx.options.egress_journal)
        if {"egress_rules", "egress_profile"} & updated:
            self._sandbox.policy = _policy_of(
                ctx.options.egress_rules or os.environ.get("EGRESSD_RULES", ""),
                ctx.options.egress_profile or os.environ.get("EGRESSD_PROFILE", ""),
            )

    def _open_journal(self, path: str) -> None:
        try:
            journal = Journal(Path(path)) if path else None
        except JournalUnavailable as error:
            raise exceptions.OptionsError(f"egress_journal: {error}") from None
        if self._book.journal is not None:
            self._book.journal.close()
        self._book.journal = journal

    def running(self) -> None:
        """Say who is judged by what, and offer the certificate that clients must trust."""
        policy = self._sandbox.policy
        logger.info("egressd: profile %s, policy %s", policy.profile, policy.digest)
        if policy is _NOBODY:
            logger.warning(
                "egressd: no rules and profile (egress_rules, egress_profile): everything is refused"
            )
        try:
            path = Path(ctx.options.confdir).expanduser() / "mitmproxy-ca-cert.pem"
            self._services.certificate = path.read_bytes()
        except OSError as error:
            logger.info("egressd: no certificate to offer: %s", error)

    def done(self) -> None:
        """Take mitmproxy down where only this addon was removed: a changed or deleted file must not leave an open proxy."""
        if not ctx.master.should_exit.is_set():
            end_process("the policy was unloaded")

    # connections

    def client_connected(self, client: Client) -> None:
        """Refuse whom the hooks below could not judge."""
        client.error = "egressd: denied"
        try:
            problem = unguarded(ctx.options)
            if problem is None and client.transport_protocol != "tcp":
                problem = client.transport_protocol
            if problem is not None:
                logger.error("egressd: refused a connection: %s", problem)
                return
            self._visitors[client.id] = Visitor(self._sandbox, self._services)
        except Exception:  # law 1: the error above stays
            logger.exception("egressd: client_connected")
            return
        client.error = None

    def client_disconnected(self, client: Client) -> None:
        """Write the ends that are owed."""
        visitor = self._visitors.pop(client.id, None)
        if visitor is not None:
            visitor.leave()

    def http_connect(self, flow: HTTPFlow) -> None:
        """Judge a CONNECT by its authority; what is inside is judged again by its first bytes."""
        flow.response = bare_response()
        try:
            visitor = self._visitors[flow.client_conn.id]
            authority = parse_authority(flow.request.data.authority, None)
            if visitor.tunnel:
                nested = visitor.exchange = flow.metadata[EXCHANGE] = Exchange(visitor.connection, "CONNECT")
                nested.deny(Decision("deny", Reason.NESTED_CONNECT))
                flow.kill()  # mitmproxy has no way to answer this one
                return
            if isinstance(authority, BadHost):
                flow.response = self._refuse_connect(visitor, Decision("deny", authority.reason), flow)
                return
            visitor.lead_to(authority)
            decisions = [visitor.judge(scheme) for scheme in ("https", "http")]
            if not any(decision.allowed for decision in decisions):
                flow.response = self._refuse_connect(visitor, decisions[0], flow)
                return
        except Exception:  # law 1: the response above stays
            logger.exception("egressd: http_connect")
            return
        flow.response = None

    def _refuse_connect(self, visitor: Visitor, decision: Decision, flow: HTTPFlow) -> Response:
        visitor.decide(decision)
        refused = Exchange(visitor.connection)
        refused.accept = flow.request.headers.get("accept")
        refused.attempt_id = visitor.connection.attempt_id
        return as_response(refused.refuse(decision.reason))

    # first bytes

    def next_layer(self, nextlayer: NextLayer) -> None:
        """Say what is spoken on a connection: plain proxy requests, TLS or HTTP in a tunnel, and nothing else."""
        try:
            chosen = layer_for(self._visitors[nextlayer.context.client.id], nextlayer)
        except Exception:  # law 1: refused
            logger.exception("egressd: next_layer")
            chosen = Refuse(nextlayer.context)  # not made before: a layer enters its name in the context
        if chosen is None:
            raise exceptions.AddonHalt  # and nobody else decides it from half a hello
        nextlayer.layer = chosen

    # requests

    async def requestheaders(self, flow: HTTPFlow) -> None:
        """Judge a request, and pin the address that may be dialled for it."""
        flow.request.stream = False
        flow.response = bare_response()
        visitor = self._visitors.get(flow.client_conn.id)
        try:
            if visitor is not None:
                visitor.exchange = visitor.pin = None
                async with asyncio.timeout(HOOK_TIMEOUT):
                    await self._request(flow, visitor)
        except Exception:  # law 1: refused, whatever was decided
            logger.exception("egressd: requestheaders")
            flow.request.stream = False
            flow.response = bare_response()
            if visitor is not None:
                visitor.pin = None
            if (exchange := held_exchange(flow)) is not None:
                flow.response = as_response(exchange.refuse(Reason.INTERNAL_ERROR))
        if flow.response is not None:
            flow.request.headers.pop("expect", None)
            if flow.killable and has_long_body(flow):
                flow.kill()

    async def _request(self, flow: HTTPFlow, visitor: Visitor) -> None:
        connection, data = visitor.connection, flow.request.data
        if bool(flow.client_conn.tls_established) != connection.tls:
            raise RuntimeError("mitmproxy and the policy disagree on what is spoken")
        if not visitor.tunnel:  # mitmproxy has taken the target apart; it is judged beside Host
            data.authority = authority_of(data.host, data.port)
        head = parse_request_head(request_head_of(flow.request, data.path, flow.request.headers.fields))
        if isinstance(head, BadHead):
            exchange = visitor.exchange = flow.metadata[EXCHANGE] = Exchange(connection)
            exchange.method, exchange.target = flow.request.method, flow.request.path
            flow.response = as_response(exchange.deny(Decision("deny", head.reason), head.detail))
            return
        work = PolicyAddon(connection).requestheaders(flow)
        exchange = visitor.exchange = exchange_of(flow)
        if work is not None:
            await work
        visitor.note(exchange)
        if not exchange.admitted:
            return
        assert exchange.bound is not None
        address: Address | Reason = Reason.UPGRADE_NOT_ALLOWED  # a WebSocket's messages would pass unseen
        if exchange.offer is None:
            address = await self._addresses.of(exchange)
        if isinstance(address, Reason):
            flow.request.stream = False
            flow.response = as_response(exchange.refuse(address))
            return
        exchange.upstream = address
        visitor.pin = (flow.request.host, flow.request.port), address
        flow.request.stream = counted(exchange, "up")

    def server_connect(self, data: ServerConnectionHookData) -> None:
        """Let one dial pass for each admitted request, to its pinned address."""
        server = data.server
        server.error = "egressd: denied"
        try:
            visitor = self._visitors[data.client.id]
            pin, visitor.pin = visitor.pin, None
            exchange = visitor.exchange
            if pin is None or exchange is None or not exchange.admitted:
                raise RuntimeError("a dial that no admitted request asked for")
            if server.address != pin[0] or server.via or server.transport_protocol != "tcp":
                raise RuntimeError("a dial to another place than the request's")
            server.address = (str(pin[1]), pin[0][1])
        except Exception:  # law 1: the error above stays
            logger.exception("egressd: server_connect")
            return
        server.error = None

    def responseheaders(self, flow: HTTPFlow) -> None:
        """Make a response fit for the client, and let it stream."""
        try:
            exchange = exchange_of(flow)
            if not exchange.admitted:
                return
            PolicyAddon(exchange.connection).responseheaders(flow)
            assert flow.response is not None
            flow.response.stream = counted(exchange, "down")
        except Exception:  # nothing goes on unlooked-at
            logger.exception("egressd: responseheaders")
            if flow.killable:
                flow.kill()

    # ends

    def response(self, flow: HTTPFlow) -> None:
        """Write the end of a request that was answered."""
        self._end(flow, Reason.COMPLETED)

    def error(self, flow: HTTPFlow) -> None:
        """Write the end of a request that was not."""
        begun = flow.response is not None
        gone = not flow.client_conn.connected
        reason = Reason.UPSTREAM_CLOSED if begun else Reason.UPSTREAM_UNREACHABLE
        self._end(flow, Reason.CLIENT_CLOSED if gone else reason, flow.error.msg if flow.error else None)

    def _end(self, flow: Flow, reason: Reason, detail: str | None = None) -> None:
        exchange = held_exchange(flow)
        if exchange is None:
            return
        if exchange.refusal is not None:  # what was refused ends by that, however it was told
            reason = exchange.ending
        exchange.end(reason, clip(detail, 256) if detail else None)

    # what is never carried

    def tcp_start(self, flow: Flow) -> None:
        """Raw bytes are refused."""
        flow.kill()

    def udp_start(self, flow: Flow) -> None:
        """So are datagrams."""
        flow.kill()

    def dns_request(self, flow: Flow) -> None:
        """And queries."""
        flow.kill()


def _policy_of(rules: str, profile: str) -> CompiledPolicy:
    """Return a profile's policy, that of nobody where either is not given; raises OptionsError with every problem."""
    if not rules or not profile:
        return _NOBODY
    loaded = load_rules(Path(rules))
    if isinstance(loaded, Problems):
        raise exceptions.OptionsError(f"egress_rules:\n{loaded}")
    if profile not in loaded.profiles:
        known = ", ".join(loaded.profiles) or "none"
        raise exceptions.OptionsError(f"egress_profile: there is no profile {profile!r}; there are: {known}")
    return loaded.compiled(profile)


addons = [Egress()]
