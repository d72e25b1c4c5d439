"""The frontier over memory in words and numbers: as text, as a page with its picture, and as files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ..search.keeping import Curves
from ..search.memory_limits import Point
from ..search.pareto import Frontier
from ..util.files import ending_of, write_text
from ..util.text import aligned, format_bytes, format_gap, format_time, plural, printable, time_unit, times_note
from .pages import picture, render
from .pictures.drawing import USUAL, Drawing, Style, to_svg
from .pictures.files import save_drawing
from .pictures.frontier import bubble_rate, curves_drawing, excess, frontier_drawing
from .sentences import by_microbatch

INSIDE = Style(title="", notes=False)  # of a picture inside a page: the page has the title and the sentence itself
NEAR_BEST = 1.01  # times the best value: more memory than such a step needs saves little


class Report(NamedTuple):
    """A report of frontiers. headline: model, ranks, microbatches, placement and objective in one line. sentence: what the
    picture shows. rows: the table, header first. drawing: style → picture."""

    headline: str
    sentence: str
    rows: Sequence[tuple[str, ...]]
    drawing: Callable[[Style], Drawing]


def report_of(frontier: Frontier | Curves) -> Report:
    """The report of a frontier over memory, or of `Curves`: a frontier for each way to keep activations."""
    first = frontier.first if isinstance(frontier, Curves) else frontier
    headline = (
        f"{printable(first.model)}: {first.objective} over memory a rank, {plural(rank=first.ranks)}, "
        f"{plural(microbatch=first.microbatches)}, placement {printable(first.placement)}"
    )
    if isinstance(frontier, Curves):
        sentence = _curves_sentence(frontier)
        return Report(headline, sentence, _curve_rows(frontier), partial(curves_drawing, frontier, headline, sentence))
    sentence = _sentence(frontier)
    return Report(headline, sentence, _rows(frontier), partial(frontier_drawing, frontier, headline, sentence))


def save_frontier(frontier: Frontier | Curves, path: str | os.PathLike[str], style: Style = USUAL) -> None:
    """Write frontiers as `.json`, `.html`, or in this style as a picture; `-`: JSON on standard output. Raises BadInput."""
    if str(path).endswith(".html"):
        write_text(path, frontier_as_page(frontier))
    elif ending_of(str(path)) in ("", ".json"):
        frontier.save(path)
    else:
        save_drawing(report_of(frontier).drawing(style), path)


def frontier_as_page(frontier: Frontier | Curves) -> str:
    """The picture and its table as one HTML page that loads no other file."""
    headline, sentence, rows, drawing = report_of(frontier)
    return render("frontier.html", title=headline, picture=picture(to_svg(drawing(INSIDE))), sentence=sentence, rows=rows)


def frontier_as_text(frontier: Frontier | Curves) -> str:
    """The table as text, and the sentence below it."""
    report, first = report_of(frontier), frontier.first if isinstance(frontier, Curves) else frontier
    note = printable(times_note(first.source))
    return "\n".join([*filter(None, [note]), *aligned(report.rows, left=(-1,)), report.sentence]) + "\n"


def _sentence(frontier: Frontier) -> str:
    first, last = frontier.points[0], frontier.points[-1]
    limit = NEAR_BEST * last.value
    near = min(point.peak for point in frontier.points if point.value <= limit)
    short = max((point.memory for point in frontier.points if point.bound > limit), default=None)
    proven_short = "" if short is None else f", {format_bytes(short)} are proven too little"
    proven = sum(point.bound >= point.value for point in frontier.points)
    by = max(by_microbatch(point.proof) for point in frontier.points)
    return (
        f"From {format_bytes(first.memory)} a rank ({format_time(first.value)}) to {format_bytes(last.peak)} "
        f"({format_time(last.value)}); {format_bytes(near)} are enough for 1 % more than that{proven_short}. "
        f"{proven} of {len(frontier.points)} points are optimal{by}; the largest gap is "
        f"{max(point.gap for point in frontier.points):.2%}."
    )


def _rows(frontier: Frontier) -> list[tuple[str, ...]]:
    """The table: a header, then points and named schedules by rising memory."""
    rows: list[tuple[int, tuple[str, ...]]] = []
    values = *(point.value for point in frontier.points), *(named.value for named in frontier.named)
    unit, show = time_unit(max(values))
    for point in frontier.points:
        numbers = (format_bytes(point.peak), show(point.value), show(point.bound), format_gap(point.gap))
        bubble = f"{bubble_rate(frontier, point.value):.2%}"
        rows.append((point.memory, (format_bytes(point.memory), *numbers, bubble, point.solver)))
    for named in frontier.named:
        value = (show(named.value), "", excess(frontier, named), f"{1 - named.work / named.value:.2%}")
        rows.append((named.memory, ("", format_bytes(named.memory), *value, named.name)))
    head = ("memory", "needed", f"{frontier.objective}, {unit}", f"bound, {unit}", "gap", "bubble", "by")
    return [head, *(row for _, row in sorted(rows, key=lambda row: row[0]))]


def _best(frontier: Frontier, memory: int) -> Point | None:
    """The point with the least value that fits into `memory` bytes."""
    fitting = [point for point in frontier.points if point.memory <= memory]
    return min(fitting, default=None, key=lambda point: point.value)


def _curve_rows(curves: Curves) -> list[tuple[str, ...]]:
    """The table: a header, then a row for each memory limit; the last column names the choice of the row's shortest step."""
    frontiers = curves.frontiers.values()
    rows: list[tuple[str, ...]] = [("memory", *curves.frontiers, "chosen")]
    for memory in sorted({point.memory for frontier in frontiers for point in frontier.points}):
        points = [_best(frontier, memory) for frontier in frontiers]
        least = min(filter(None, points), key=lambda point: point.value)
        values = (format_time(point.value) if point else "–" for point in points)
        rows.append((format_bytes(memory), *values, least.choice or "–"))
    return rows


def _curves_sentence(curves: Curves) -> str:
    """The picture in words: the least memory of each curve, and its step time with the device's memory."""
    begins = [
        f"{name} from {format_bytes(frontier.points[0].memory)} ({format_time(frontier.points[0].value)})"
        for name, frontier in curves.frontiers.items()
        if frontier.points
    ]
    device = curves.first.device
    memory = curves.first.points[0].memory if device is None else device
    best = {name: _best(frontier, memory) for name, frontier in curves.frontiers.items()}
    prices = [
        f"{name} {format_time(point.value)} ({point.value / curves.bound - 1:+.1%})" if point else f"{name} does not fit"
        for name, point in best.items()
    ]
    by_name = ", ".join(prices) if any(best.values()) else "none of them fits"
    where = f"With {format_bytes(memory)}" if device is None else f"On the device's {format_bytes(memory)}"
    return (
        f"Least memory a rank: {'; '.join(begins)}. {where}: {by_name}; the bound for every choice and any memory is "
        f"{format_time(curves.bound)}."
    )
