"""What is risky in single rules and files: shared and mistyped hosts, uploads, unread tunnels, many ports, no end, no owner.

Rules that come from a service are its reviewers' to judge (`egressd services lint`); here is what profiles and groups write.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass

from egressd.policy.effective import EffectiveEntry
from egressd.policy.paths import Target
from egressd.policy.requests import RequestPattern
from egressd.rulefiles.catalogue import hosts_of
from egressd.rulefiles.load import Rules
from egressd.rulefiles.lookalikes import near_ones
from egressd.rulefiles.narrowing import request_patterns
from egressd.rulefiles.origins import DEFAULT, Origins
from egressd.rulefiles.problems import Code, Findings, Place
from egressd.rulefiles.source import GROUPS, ORGANISATION, PROFILES, SERVICES
from egressd.rulefiles.tenancy import names_owner, shares_paths

MOST_PORTS = 8

_UPLOADS = {
    "api.anthropic.com": ("POST", "/v1/files"),
    "api.openai.com": ("POST", "/v1/files"),
    "generativelanguage.googleapis.com": ("POST", "/upload/v1beta/files"),
    "www.googleapis.com": ("POST", "/upload/drive/v3/files"),
    "content.dropboxapi.com": ("POST", "/2/files/upload"),
    "graph.microsoft.com": ("PUT", "/v1.0/me/drive/root:/x:/content"),
    "slack.com": ("POST", "/api/files.upload"),
    "discord.com": ("POST", "/api/v10/channels/1/messages"),
    "api.telegram.org": ("POST", "/bot1/sendDocument"),
    "api.github.com": ("POST", "/gists"),
    "uploads.github.com": ("POST", "/repos/a/b/releases/1/assets"),
    "gitlab.com": ("POST", "/api/v4/snippets"),
    "api.bitbucket.org": ("POST", "/2.0/snippets"),
    "huggingface.co": ("POST", "/api/repos/create"),
    "upload.pypi.org": ("POST", "/legacy/"),
    "registry.npmjs.org": ("PUT", "/x"),
    "api.notion.com": ("POST", "/v1/file_uploads"),
    "storage.googleapis.com": ("POST", "/upload/storage/v1/b/x/o"),
}
"""Where anybody's account takes files or texts: host, method, and a path that uploads."""

_FRONTS = (
    *("cloudfront.net", "akamaized.net", "akamaiedge.net", "edgekey.net", "fastly.net", "fastlylb.net"),
    *("azureedge.net", "azurefd.net", "cdn.cloudflare.net", "workers.dev", "pages.dev", "r2.dev"),
    *("googleapis.com", "googleusercontent.com", "appspot.com", "run.app", "web.app", "firebaseapp.com"),
    *("vercel.app", "netlify.app", "herokuapp.com", "github.io", "b-cdn.net", "cdn77.org", "amazonaws.com"),
)
"""Front ends where a TLS name and the site behind it need not be one."""


@dataclass(slots=True)
class Nose:
    """Goes over every rule of every profile; what several profiles share is told once."""

    rules: Rules
    origins: Origins
    findings: Findings
    today: dt.date
    soon: dt.timedelta

    def search(self) -> None:
        """Add a warning for everything found."""
        self._owners()
        written: dict[tuple[str, str | None], EffectiveEntry] = {}
        for profile in self.rules.profiles:
            policy = self.rules.effective(profile)
            self._apexes(policy.entries)
            last = policy.observe_until
            if policy.mode == "observe" and last is not None and self._is_soon(last):
                place = self.origins.of_profile(profile, "observe_until")
                self._note(place, Code.EXPIRES_SOON, f"observing ends on {last}", "enforce it, or renew it")
            written |= {(entry.place, entry.via): entry for entry in policy.entries}
        for entry in written.values():
            if entry.expires is not None and self._is_soon(entry.expires):
                place = self.origins.of(entry, "expires")
                self._note(
                    place,
                    Code.EXPIRES_SOON,
                    f"{entry.id!r} ends on {entry.expires}",
                    "renew it, or let it go",
                )
            if entry.observe_until is not None and self._is_soon(entry.observe_until):
                place = self.origins.of(entry, "observe_until")
                message = f"observing by {entry.id!r} ends on {entry.observe_until}"
                self._note(place, Code.EXPIRES_SOON, message, "enforce it, or renew it")
            if entry.effect != "deny" and not (entry.via or "").startswith(f"{SERVICES}/"):
                self._entry(entry)
        self._typos([entry for entry in written.values() if not (entry.via or "").startswith(f"{SERVICES}/")])

    def _owners(self) -> None:
        ownerless = [name for name in self.rules.profiles if self.rules.effective(name).owner is None]
        profiles = [f"{PROFILES}/{name}.yaml" for name in ownerless]
        for path in (ORGANISATION, *self.rules.source.below(GROUPS), *profiles):
            document = self.origins.document(path)
            if document is not None and "owner" not in document.root.keys:
                place = document.key_place("profile" if path.startswith(PROFILES) else "group")
                self._note(
                    f"{path}:{place.line}", Code.NO_OWNER, "the file has no owner", "owner: the team to ask"
                )

    def _entry(self, entry: EffectiveEntry) -> None:
        if len(entry.ports) > MOST_PORTS:
            place = self.origins.of(entry, "ports")
            self._note(
                place, Code.WIDE_PORTS, f"{len(entry.ports)} ports in one rule", "name the ones that are used"
            )
        parsed = request_patterns(entry)
        for text in entry.hosts:
            self._tenants(entry, text, parsed)
            self._uploads(entry, text, parsed)
            if entry.treatment != "tunnel":
                continue
            front = next((front for front in _FRONTS if f".{text}".endswith(f".{front}")), None)
            if front or text.startswith("*."):
                which = f"a front end of {front}" if front else "a wildcard"
                place = self._host(entry, text)
                self._note(
                    place, Code.TUNNEL_FRONTING, f"{text} is {which}, and unread", "inspect it if you can"
                )

    def _tenants(self, entry: EffectiveEntry, text: str, parsed: list[RequestPattern]) -> None:
        if entry.credential is not None or entry.effect == "ask" or not shares_paths(text):
            return  # where a person says yes each time, or the account says whose it is
        open_to = [one.text for one in parsed if not names_owner(text, one.path.text)]
        if open_to or entry.treatment != "inspect":
            what = f'"{open_to[0]}"' if open_to else f"a {entry.treatment}"
            message = f"{what} on {text} is for everybody who has a place there"
            self._note(
                self._host(entry, text),
                Code.MULTI_TENANT,
                message,
                "spell the owner in the path, or attach a credential",
            )

    def _uploads(self, entry: EffectiveEntry, text: str, parsed: list[RequestPattern]) -> None:
        if text in _UPLOADS:
            hosts = [text]
        else:
            hosts = [host for host in _UPLOADS if host.endswith(text[1:])] if text.startswith("*.") else []
        for host in hosts:
            method, path = _UPLOADS[host]
            target = Target(path)
            takes = any(one.refuses(method, None, target) is None for one in parsed)
            if takes and any(one.methods is None or "GET" in one.methods for one in parsed):
                message = f"{entry.id!r} reads from {host} and uploads to it ({method} {path})"
                self._note(
                    self._host(entry, text), Code.UPLOAD_API, message, "name the requests that are needed"
                )
                return

    def _apexes(self, entries: tuple[EffectiveEntry, ...]) -> None:
        """Find denials of `*.name` where nothing denies the name."""
        denied = {host for entry in entries if entry.effect == "deny" for host in entry.hosts}
        wild = {host[2:] for host in denied if host.startswith("*.")}
        for entry in entries:
            if entry.effect != "deny":
                continue
            for text in entry.hosts:
                apex = text.removeprefix("*.")
                if apex == text or apex in denied or any(parent in wild for parent in _above(apex)):
                    continue
                message = f"{text} is denied and {apex} is not"
                self._note(
                    self._host(entry, text),
                    Code.DENY_WITHOUT_APEX,
                    message,
                    f"add {apex}, if it is meant too",
                )

    def _typos(self, entries: list[EffectiveEntry]) -> None:
        known = {host.removeprefix("*.") for host in hosts_of(self.rules.library) if "{" not in host}
        where: dict[str, tuple[EffectiveEntry, str]] = {}
        for entry in entries:
            if entry.effect != "deny":
                for text in entry.hosts:
                    where.setdefault(text.removeprefix("*."), (entry, text))
        for name, other in near_ones(where, known):
            if _without_digits(name) == _without_digits(other):
                continue  # mirror1 and mirror2
            entry, text = where[name]
            message = f"{text} is spelled nearly like {other}, which a service names"
            self._note(self._host(entry, text), Code.HOST_TYPO, message, f"write {other}, if that is meant")

    def _host(self, entry: EffectiveEntry, text: str) -> str:
        return self.origins.of_items(entry, "hosts", (text,))[0]

    def _is_soon(self, day: dt.date) -> bool:
        return self.today <= day <= self.today + self.soon

    def _note(self, place: str, code: Code, message: str, hint: str) -> None:
        path, _, line = place.rpartition(":") if place != DEFAULT else ("", "", "1")
        self.findings.add(path, Place(int(line)), code, message, hint)


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _without_digits(name: str) -> str:
    return "".join(letter for letter in name if not letter.isdigit())
