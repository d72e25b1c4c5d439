"""Schedules side by side, as text."""

from __future__ import annotations

from ..schedule import relative_gap
from ..util.text import aligned, counted, format_bytes, format_gap, format_time, printable
from .schedule_comparison import ComparedSchedule, ScheduleComparison

MAX_DIFFERENCES = 4  # ranks whose first difference is shown


def schedules_as_text(comparison: ScheduleComparison) -> str:
    """Tables: what each takes, proves and holds; where the busiest rank's time goes; then what differs, and which cannot be
    with their reasons."""
    c = comparison
    first, best = c.rows[0], c.best
    lines = [
        *_sources(c),
        *_values(c),
        "",
        "where the busiest rank's time goes",
        *_shares(c),
    ]
    if any(max(row.peaks) for row in c.rows):
        lines += ["", "most activations held, rank by rank", *_peaks(c)]
    different = [line for row in c.rows[1:] for line in _difference(row, first)]
    lines += ["", *different] if different else []
    lines += ["", *(f"{printable(name)}: cannot be: {printable(why)}" for name, why in c.absent)] if c.absent else []
    return "\n".join([*lines, "", _verdict(first, best)]) + "\n"


def _sources(c: ScheduleComparison) -> list[str]:
    """Where times come from, where they were not measured or differ."""
    found = list(dict.fromkeys(row.schedule.problem.source for row in c.rows))
    if len(found) > 1:
        return [f"times of {printable(row.name)}: {printable(row.schedule.problem.source or 'given')}" for row in c.rows]
    return [f"times are {printable(found[0])}, not measured"] if found[0] and not found[0].startswith("measured") else []


def _values(c: ScheduleComparison) -> list[str]:
    head = ("schedule", "ranks", "stages", c.objective, "to the first", "bubble", "bound", "gap", "peak")
    rows: list[tuple[str, ...]] = [head]
    for row in c.rows:
        p, proven = row.schedule.problem, row.certificate
        bound = ("–", "–")
        if proven is not None:
            bound = (format_time(proven.bound), format_gap(relative_gap(row.value, proven.bound)))
        change = "" if row is c.rows[0] else f"{row.ratio - 1:+.2%}"
        numbers = (format_time(row.value), change, f"{row.bubble:.2%}", *bound, format_bytes(max(row.peaks)))
        rows.append((printable(row.name), str(p.ranks), str(p.stages), *numbers))
    return aligned(rows)


def _shares(c: ScheduleComparison) -> list[str]:
    rows: list[tuple[str, ...]] = [("schedule", "rank", "work", "idle in warm-up", "in between", "in cool-down")]
    for row in c.rows:
        one = row.shares[row.busiest]
        times = (format_time(time) for time in (one.work, one.warm_up, one.steady, one.cool_down))
        rows.append((printable(row.name), str(row.busiest), *times))
    return aligned(rows)


def _peaks(c: ScheduleComparison) -> list[str]:
    return aligned([(printable(row.name), counted([format_bytes(peak) for peak in row.peaks])) for row in c.rows], (0, 1))


def _difference(row: ComparedSchedule, first: ComparedSchedule) -> list[str]:
    """What is different in the order of `row`, in lines."""
    found, names = row.difference, f"{printable(row.name)} and {printable(first.name)}"
    if found is None:
        a, b = (one.schedule.problem for one in (row, first))
        if a.passes.kinds != b.passes.kinds:
            return [f"{names} run other passes: {' '.join(a.passes.kinds)} and {' '.join(b.passes.kinds)}"]
        return [f"{names} run other passes: {a.stages} and {b.stages} stages"] if a.stages != b.stages else []
    if not found.first:
        return [f"{names} have the same order"]
    shown = [f"rank {r}, place {i + 1}: {here} in place of {there}" for r, i, there, here in found.first[:MAX_DIFFERENCES]]
    more = len(found.first) - len(shown)
    tail = f"; and on {more} more ranks" if more else ""
    return [f"{names}: {found.moved} passes follow another pass; first differences: {'; '.join(shown)}{tail}"]


def _verdict(first: ComparedSchedule, best: ComparedSchedule) -> str:
    """Which is best, by how much, and how much better one could be."""
    if best is first:
        said = f"{printable(first.name)} is the shortest of them"
    else:
        said = f"{printable(best.name)} takes {1 - best.ratio:.2%} less time than {printable(first.name)}"
    proven = best.certificate
    if proven is None:
        return f"{said}; nothing is proven about it"
    gap = relative_gap(best.value, proven.bound)
    least = f"takes more than {gap:.2%} less" if gap > 0 else "is shorter"
    return f"{said}; proven: no order of its passes {least}"
