"""What fuzzing has shown, at the end of the run."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each target that was fuzzed."""
    rows = [
        shown
        for kind in ("passed", "failed")
        for report in terminalreporter.stats.get(kind, ())
        for name, shown in getattr(report, "user_properties", ())
        if name == "fuzz" and report.when == "call"
    ]
    if not rows:
        return
    terminalreporter.section("what fuzzing has shown")
    terminalreporter.write_line(
        f"{'target':16} {'seconds':>7} {'inputs':>12} {'covered':>15} {'kept':>6}  found"
    )
    for row in sorted(rows, key=lambda row: str(row["target"])):
        first, last = row["covered"]
        found = ", ".join(row["found"]) or "nothing"
        terminalreporter.write_line(
            f"{row['target']:16} {row['seconds']:7} {row['inputs']:12,} {f'{first:,} > {last:,}':>15} {row['kept']:6}  {found}"
        )
    total = sum(row["inputs"] for row in rows)
    terminalreporter.write_line(
        f"{len(rows)} targets, {total:,} inputs, by {', '.join(sorted({row['driver'] for row in rows}))}"
    )
