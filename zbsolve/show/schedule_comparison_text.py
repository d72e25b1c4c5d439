"""A comparison of schedules (see `schedule_comparison`) as text, as a page, and in files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..schedule import relative_gap
from ..util.files import write_text
from ..util.text import aligned, counted, format_bytes, format_gap, in_one_unit, printable, time_unit, times_note
from .pages import picture, render
from .pictures.drawing import Style, to_svg
from .pictures.files import PICTURES as STILL
from .pictures.files import checked_ending, save_drawing
from .pictures.schedule import comparison_drawing
from .schedule_comparison import ComparedSchedule, OrderDifference, ScheduleComparison
from .sentences import by_microbatch, certificate_lines, headline, placed, without_notes

if TYPE_CHECKING:
    from ..noise import UnderNoise

MAX_DIFFERENCES = 4  # ranks whose first difference is shown
MAX_PEAKS = 16  # of more ranks only the largest and the smallest peak are shown
MAX_PARTS = 3  # parts of critical paths that are shown
MAX_PLACEMENT = 12  # letters; longer placements are shown by their number of stages
PICTURE_WIDTH = 1000.0  # pixels; in a wider picture the text would be too small on paper
PICTURES = (".html", *STILL)  # endings

Show = Callable[[float], str]
Rows = list[tuple[str, ...]]


def schedules_as_text(comparison: ScheduleComparison) -> str:
    """Tables of values, the busiest rank's time and memory; then differences in order, what cannot be, and the best."""
    tables = [[*([title] if title else []), *aligned(rows, (0, 1))] for title, rows in comparison_tables(comparison)]
    lines = change_lines(comparison), absent_lines(comparison), [verdict_line(comparison)]
    parts = [[*source_lines(comparison), *tables[0]], *tables[1:], *lines]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def comparison_tables(c: ScheduleComparison) -> list[tuple[str, Rows]]:
    """(title, rows), header first: values (no title), the busiest rank's time, memory, times under noise; in one unit."""
    unit, show = time_unit(max(row.value for row in c.rows))
    tables = [("", _values(c, unit, show)), (f"where the busiest rank's time goes, {unit}", _shares(c, show))]
    if any(max(row.peaks) for row in c.rows):
        tables.append(("most activations held", _peaks(c)))
    return tables if c.noise is None else [*tables, _noise(c.noise)]


def source_lines(c: ScheduleComparison) -> list[str]:
    """Lines on the source of the times, if they were not measured or sources differ; and on schedules with other times."""
    first, sources = printable(c.rows[0].name), {row.schedule.problem.source for row in c.rows}
    lines = [f"times of {printable(row.name)}: {printable(row.schedule.problem.source or 'given')}" for row in c.rows]
    if len(sources) == 1:
        lines = [printable(note)] if (note := times_note(*sources)) else []
    return lines + [
        f"{printable(row.name)} has other times than {first}: {printable(row.other_times)}; so what it takes more or "
        "less is not its order's alone (--profile times all by one profile)"
        for row in c.rows
        if row.other_times
    ]


def _values(c: ScheduleComparison, unit: str, show: Show) -> Rows:
    head = ("schedule", "placement", f"{c.objective}, {unit}", "to the first", "bubble", "own bound", "own gap", "peak")
    rows: Rows = [head]
    for row in c.rows:
        proven = row.certificate
        bound = ("–", "–")
        if proven is not None:
            bound = (show(proven.bound), format_gap(relative_gap(row.value, proven.bound)))
        change = "" if row is c.rows[0] else f"{row.ratio - 1:+.2%}"
        numbers = (show(row.value), change, f"{row.bubble:.2%}", *bound, format_bytes(max(row.peaks)))
        rows.append((printable(row.name), _placement(row, MAX_PLACEMENT), *numbers))
    return rows


def _placement(row: ComparedSchedule, most: int) -> str:
    """The placement as options name it, or its number of stages if that has more than `most` letters."""
    name = placed(row.schedule.problem)["placement"] or ""
    return name if 0 < len(name) <= most else f"{row.schedule.problem.stages} stages"


def _shares(c: ScheduleComparison, show: Show) -> Rows:
    rows: Rows = [("schedule", "rank", "work", "idle in warm-up", "in between", "in cool-down")]
    for row in c.rows:
        time_shares = row.shares[row.busiest]
        times = (show(time) for time in (time_shares.work, time_shares.warm_up, time_shares.steady, time_shares.cool_down))
        rows.append((printable(row.name), str(row.busiest), *times))
    return rows


def _peaks(c: ScheduleComparison) -> Rows:
    """The peaks of all ranks, or of many ranks the largest and the smallest."""
    rows: Rows = [("schedule", "rank by rank")]
    for row in c.rows:
        unit, shown = in_one_unit(row.peaks)
        ends = (f"{format_bytes(peak)} on rank {row.peaks.index(peak)}" for peak in (max(row.peaks), min(row.peaks)))
        rows.append((printable(row.name), f"{counted(shown)} {unit}" if len(shown) <= MAX_PEAKS else " to ".join(ends)))
    return rows


def change_lines(c: ScheduleComparison) -> list[str]:
    """A line for each other schedule: how it differs from the first one."""
    first = c.rows[0]
    return [f"{printable(row.name)} against {printable(first.name)}: {_change(first, row)}" for row in c.rows[1:]]


def _change(first: ComparedSchedule, row: ComparedSchedule) -> str:
    """How two schedules differ: in their order if they have the same passes, otherwise in placement, kinds or layers."""
    if row.difference is not None:
        return _difference(row.difference)
    there, here = (
        {
            "placement": _placement(compared_schedule, 4 * MAX_PLACEMENT),
            "passes": " ".join(compared_schedule.schedule.problem.passes.kinds),
            "layers a stage": counted(compared_schedule.schedule.problem.layers or ()),
        }
        for compared_schedule in (first, row)
    )
    changed = [f"{what} {there[what]} → {here[what]}" for what in there if there[what] != here[what]]
    return "; ".join(changed) or "other passes"


def absent_lines(c: ScheduleComparison) -> list[str]:
    """A line for each impossible schedule, with the reason."""
    return [f"{printable(name)}: cannot be: {printable(why)}" for name, why in c.absent]


def _noise(under_noise: UnderNoise) -> tuple[str, Rows]:
    """Step times where times of passes vary, with bounds; the rank, kinds and stages most often on the critical path."""
    from ..noise import SHARES

    first = next(iter(under_noise.spreads.values()))
    unit, show = time_unit(max(spread.at(SHARES[-1])[0] for spread in under_noise.spreads.values()))
    quantiles = [f"p{100 * share:.0f}" for share in SHARES]
    least = "no mean below", "no p95 below"
    rows: Rows = [("schedule", f"as given, {unit}", "mean", *quantiles, *least, "shorter in", "most critical")]
    for name, row in under_noise.spreads.items():
        middle, off, *below = (show(us) for us in (*row.mean, row.bound[0], row.bound_at(0.95)[0]))
        ranked = [show(row.at(share)[0]) for share in SHARES]
        often = "" if row is first else f"{row.shorter(first):.1%}"
        parts = ", ".join(f"{part} {share:.0%}" for part, share in list(row.parts.items())[:MAX_PARTS])
        critical = f"rank {row.critical.argmax()}, {row.critical.max():.0%}: {parts}"
        rows.append((printable(name), show(row.given), f"{middle} ± {off}", *ranked, *below, often, critical))
    few = f"; too few for an upper end of {' and '.join(under_noise.unbounded)}" if under_noise.unbounded else ""
    return f"{under_noise.draws:,} steps where times vary: {under_noise.noise}{few}", rows


def _difference(order: OrderDifference) -> str:
    if not order.first:
        return "the same order"
    shown = [f"rank {r}, place {i + 1}: {here} in place of {there}" for r, i, there, here in order.first[:MAX_DIFFERENCES]]
    more = len(order.first) - len(shown)
    tail = f"; and on {more} more ranks" if more else ""
    return f"{order.moved} passes follow another pass; first differences: {'; '.join(shown)}{tail}"


def verdict_line(c: ScheduleComparison) -> str:
    """The shortest schedule, its difference to the first one, and how much shorter another order could be."""
    first, best = c.rows[0], c.best
    if best is first:
        text = f"{printable(first.name)} is the shortest of them"
    else:
        text = f"{printable(best.name)} takes {1 - best.ratio:.2%} less time than {printable(first.name)}"
    if best.other_times:
        text = f"{printable(best.name)} is the shortest of them, by other times than {printable(first.name)}'s"
    proven = best.certificate
    if proven is None:
        return f"{text}; nothing is proven about it"
    gap = relative_gap(best.value, proven.bound)
    least = f"takes more than {gap:.2%} less" if gap > 0 else "is shorter"
    says = "proven" if proven.checked else "not proven here, but a file says"
    return f"{text}; {says}: no order of its passes{by_microbatch(proven.proof)} {least}"


def save_comparison(comparison: ScheduleComparison, path: str | os.PathLike[str], doubts: Sequence[str] = ()) -> None:
    """Write the comparison as a page (`.html`) or as a picture. Raises BadInput for other endings."""
    if checked_ending(path, PICTURES) == ".html":
        write_text(path, comparison_as_page(comparison, doubts))
    else:
        save_drawing(comparison_drawing([(row.name, row.schedule) for row in comparison.rows]), path)


def comparison_as_page(comparison: ScheduleComparison, doubts: Sequence[str] = ()) -> str:
    """The page as text; it loads no other file. doubts: warnings about its numbers."""
    c = comparison
    named = [(row.name, row.schedule) for row in c.rows]
    changes = change_lines(c)
    return render(
        "comparison.html",
        title=printable(verdict_line(c).partition(";")[0]),
        figures=_figures(c),
        asked=[f"The shortest {c.objective} of {without_notes(headline(named[0][1], of_all=True))}.", *source_lines(c)],
        change=next((line for line, row in zip(changes, c.rows[1:], strict=True) if row is c.best), ""),
        doubts=doubts,
        proof=certificate_lines(c.best.schedule),
        chart=picture(to_svg(comparison_drawing(named, Style(PICTURE_WIDTH, title="", hover=True)))),
        tables=comparison_tables(c),
        notes=[*(line for line, row in zip(changes, c.rows[1:], strict=True) if row is not c.best), *absent_lines(c)],
    )


def _figures(c: ScheduleComparison) -> list[tuple[str, str, str]]:
    """The key figures at the top, (label, value, note): the first schedule, the best one, and its proven bound."""
    unit, show = time_unit(max(row.value for row in c.rows))
    shown = []
    for row in c.rows[:1] if c.best is c.rows[0] else (c.rows[0], c.best):
        against = "the first" if row is c.rows[0] else f"{row.ratio - 1:+.2%}"
        held = f", peak {format_bytes(max(row.peaks))}" if max(row.peaks) else ""
        shown.append((printable(row.name), f"{show(row.value)} {unit}", f"{against}, bubble {row.bubble:.2%}{held}"))
    if c.best.certificate is not None:
        gap = format_gap(c.best.certificate.gap)
        what = "proven bound" if c.best.certificate.checked else "bound, as a file says"
        shown.append((what, f"{show(c.best.certificate.bound)} {unit}", gap if gap == "optimal" else f"gap {gap}"))
    return shown
