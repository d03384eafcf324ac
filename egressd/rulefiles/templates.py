"""Many paths in few patterns: the narrowest that say what was seen, in bounded memory.

Segments that look made up for one object (numbers, long hexadecimals, UUIDs) become `*` at once. Where several paths differ in
one segment alone, that one becomes `*`. Only a crowd that still does not fit is cut to its first segments and `**`. A pattern
of nothing but stars is none: what would need one is lost.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from egressd.policy.paths import PathPattern, Target, parse_path_pattern

MOST_TEMPLATES = 64
ALIKE = 4
"""So many paths that differ in one segment alone are told as one pattern."""
CROWD = 8
"""So many different texts in one place, of too many paths, are told as `*`."""

_OBJECT = re.compile(r"[0-9]+|[0-9a-f]{8,}|[0-9a-f]{8}-[0-9a-f-]{20,}|[A-Za-z0-9_-]{33,}")

type Segments = tuple[str, ...]


@dataclass(slots=True)
class Templates:
    """Collects the paths of one method on one host; `lost` counts those that no narrow pattern would hold."""

    seen: Counter[Segments] = field(default_factory=Counter)
    samples: dict[Segments, str] = field(default_factory=dict)
    lost: int = 0
    wide: dict[Segments, None] = field(default_factory=dict)
    """Patterns that a crowd was made into; what comes later and lies in one is counted there."""

    def add(self, path: str, times: int) -> None:
        """Take one path, as sent; one with a second reading could not be allowed anyway, and is lost."""
        target = Target(path)
        if not (target.is_origin_form and target.is_canonical and len(path) <= 512):
            self.lost += times
            return
        segments = tuple("*" if _is_object(part) else part for part in path[1:].split("/"))
        if self.wide:
            segments = next((one for one in self.wide if _holds(one, segments)), segments)
        self.seen[segments] += times
        self.samples.setdefault(segments, path)
        if len(self.seen) > MOST_TEMPLATES:
            self._crowded()

    def patterns(self) -> list[tuple[str, int, str]]:
        """Return path patterns, each with how often it was seen and one path that shows it; each checked to be a pattern."""
        self._merge()
        found = []
        for segments, times in sorted(self.seen.items()):
            text, sample = "/" + "/".join(segments), self.samples[segments]
            parsed = parse_path_pattern(text)
            if (
                _names_something(segments)
                and isinstance(parsed, PathPattern)
                and parsed.allows(Target(sample))
            ):
                found.append((text, times, sample))
            else:
                self.lost += times
        return found

    def _merge(self) -> None:
        """Tell paths that differ in one segment alone as one, the largest family first."""
        while True:
            families: dict[Segments, dict[Segments, None]] = defaultdict(dict)
            for segments in self.seen:
                for index in range(len(segments)) if "**" not in segments else ():
                    made = (*segments[:index], "*", *segments[index + 1 :])
                    if made != segments and segments[index] and _names_something(made):
                        families[made][segments] = None
            size, made = max(((len(members), made) for made, members in families.items()), default=(0, ()))
            if size < ALIKE:
                return
            self._replace([*families[made], *([made] if made in self.seen else [])], made)

    def _crowded(self) -> None:
        """Make room: segments with many different texts become `*`; if that is not enough, the ends are cut to `**`."""
        lengths: dict[int, list[Segments]] = defaultdict(list)
        for segments in self.seen:
            if "**" not in segments:
                lengths[len(segments)].append(segments)
        for members in lengths.values():
            texts = [len({segments[index] for segments in members}) for index in range(len(members[0]))]
            for segments in members if max(texts) > CROWD else ():
                made = tuple(
                    "*" if part and texts[index] > CROWD else part for index, part in enumerate(segments)
                )
                self._replace([segments], made)
                self.wide[made] = None
        for depth in (3, 2, 1):
            if len(self.seen) <= MOST_TEMPLATES // 2:
                break
            for segments in [one for one in self.seen if len(one) > depth]:
                if _names_something(segments[:depth]):
                    made = (*segments[:depth], "**")
                    self._replace([segments], made)
                    self.wide[made] = None
        self.wide = {one: None for one in self.wide if one in self.seen}
        for segments, times in self.seen.most_common()[MOST_TEMPLATES - 1 :]:
            self.lost += times
            del self.seen[segments], self.samples[segments]
            self.wide.pop(segments, None)

    def _replace(self, members: list[Segments], made: Segments) -> None:
        times = sum(self.seen.pop(member) for member in members)
        samples = [self.samples.pop(member) for member in members]
        self.seen[made] += times
        self.samples.setdefault(made, samples[0])


def template_of(path: str) -> str | None:
    """Return one path with what looks made up for one object as `*`; None where nothing but stars would be left."""
    segments = tuple("*" if _is_object(part) else part for part in path[1:].split("/"))
    return "/" + "/".join(segments) if _names_something(segments) else None


def _names_something(segments: Segments) -> bool:
    """Whether a pattern says anything but how many segments there are."""
    return any(part not in ("*", "**", "") for part in segments) or segments == ("",)


def _holds(wide: Segments, segments: Segments) -> bool:
    if wide[-1] == "**":
        return (
            len(segments) >= len(wide) and _holds(wide[:-1], segments[: len(wide) - 1])
            if len(wide) > 1
            else True
        )
    pairs = zip(wide, segments, strict=False)
    return len(wide) == len(segments) and all(one == two or (one == "*" and two) for one, two in pairs)


def _is_object(segment: str) -> bool:
    return "*" in segment or _OBJECT.fullmatch(segment) is not None
