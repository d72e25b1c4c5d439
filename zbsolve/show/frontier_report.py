"""The frontier over memory in words and numbers: as text, as a page with its picture, and as files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ..search.keeping import Curves
from ..search.pareto import Frontier
from ..util.errors import BadInput
from ..util.files import write_text
from ..util.text import aligned, format_bytes, format_gap, format_time, printable, time_unit, times_note
from .pages import picture, render
from .pictures.drawing import Drawing, to_svg
from .pictures.files import PICTURES, save_drawing
from .pictures.frontier import bubble_rate, curves_drawing, excess, frontier_drawing
from .pictures.style import USUAL, Style

ENDINGS = (".json", *PICTURES, ".html")
INSIDE = Style(title="", notes=False)  # of a picture inside a page, which says the words
NEAR_BEST = 1.01  # times the best value: memory beyond that buys little


class Report(NamedTuple):
    """What is said of frontiers: one line of model, ranks, microbatches, placement and objective; a sentence;
    the table with its header; and the picture in a style."""

    headline: str
    sentence: str
    rows: Sequence[tuple[str, ...]]
    drawing: Callable[[Style], Drawing]


def report_of(found: Frontier | Curves) -> Report:
    """The frontier over memory, or one for each way to keep activations, in words and numbers."""
    one = found.first if isinstance(found, Curves) else found
    headline = (
        f"{printable(one.model)}: {one.objective} over memory a rank, {one.ranks} ranks, {one.microbatches} microbatches, "
        f"placement {printable(one.placement)}"
    )
    if isinstance(found, Curves):
        sentence = _curves_sentence(found)
        return Report(headline, sentence, _curve_rows(found), partial(curves_drawing, found, headline, sentence))
    sentence = _sentence(found)
    return Report(headline, sentence, _rows(found), partial(frontier_drawing, found, headline, sentence))


def save_frontier(found: Frontier | Curves, path: str | os.PathLike[str], style: Style = USUAL) -> None:
    """Write frontiers as `.json`, `.html`, or in this style as `.svg`, `.pdf` or `.png`; `-` is JSON on standard output.
    Raises BadInput otherwise."""
    check_frontier_path(path)
    if str(path).endswith(tuple(PICTURES)):
        save_drawing(report_of(found).drawing(style), path)
    elif str(path).endswith(".html"):
        write_text(path, frontier_as_page(found))
    else:
        found.save(path)


def check_frontier_path(path: str | os.PathLike[str]) -> None:
    """Raise BadInput for a path that `save_frontier` cannot write, before any time is spent."""
    if str(path) != "-" and not str(path).endswith(ENDINGS):
        raise BadInput(f"{path}: unknown ending; one of {' '.join(ENDINGS)}")


def frontier_as_svg(found: Frontier | Curves, width: int = 1200) -> str:
    """A well-formed SVG document `width` pixels wide: memory to the right, time lost to bubbles upwards."""
    return to_svg(report_of(found).drawing(Style(width)))


def frontier_as_page(found: Frontier | Curves) -> str:
    """The picture and its table as one HTML page that loads nothing."""
    headline, sentence, rows, drawing = report_of(found)
    return render("frontier.html", title=headline, picture=picture(to_svg(drawing(INSIDE))), sentence=sentence, rows=rows)


def frontier_as_text(found: Frontier | Curves) -> str:
    """The table as text, and what it says."""
    report, one = report_of(found), found.first if isinstance(found, Curves) else found
    note = printable(times_note(one.source))
    return "\n".join([*filter(None, [note]), *aligned(report.rows, left=(-1,)), report.sentence]) + "\n"


def _sentence(frontier: Frontier) -> str:
    first, last = frontier.points[0], frontier.points[-1]
    limit = NEAR_BEST * last.value
    near = min(point.peak for point in frontier.points if point.value <= limit)
    short = max((point.memory for point in frontier.points if point.bound > limit), default=None)
    proven_short = "" if short is None else f", {format_bytes(short)} are proven too little"
    proven = sum(point.bound >= point.value for point in frontier.points)
    return (
        f"From {format_bytes(first.memory)} a rank ({format_time(first.value)}) to {format_bytes(last.peak)} "
        f"({format_time(last.value)}); {format_bytes(near)} are enough for 1 % more than that{proven_short}. "
        f"{proven} of {len(frontier.points)} points are optimal; the largest gap is "
        f"{max(point.gap for point in frontier.points):.2%}."
    )


def _rows(frontier: Frontier) -> list[tuple[str, ...]]:
    """The table: a header, then points and named schedules by rising memory."""
    found: list[tuple[int, tuple[str, ...]]] = []
    unit, show = time_unit(max(*(one.value for one in frontier.points), *(one.value for one in frontier.named), 0))
    for point in frontier.points:
        numbers = (format_bytes(point.peak), show(point.value), show(point.bound), format_gap(point.gap))
        bubble = f"{bubble_rate(frontier, point.value):.2%}"
        found.append((point.memory, (format_bytes(point.memory), *numbers, bubble, point.solver)))
    for one in frontier.named:
        value = (show(one.value), "", excess(frontier, one), f"{1 - one.work / one.value:.2%}")
        found.append((one.memory, ("", format_bytes(one.memory), *value, one.name)))
    head = ("memory", "needed", f"{frontier.objective}, {unit}", f"bound, {unit}", "gap", "bubble", "by")
    return [head, *(row for _, row in sorted(found, key=lambda row: row[0]))]


def _best(frontier: Frontier, memory: int) -> tuple[int, str] | None:
    """The least value within so much memory, and what was chosen for it."""
    fitting = [(point.value, point.choice) for point in frontier.points if point.memory <= memory]
    return min(fitting, default=None, key=lambda row: row[0])


def _curve_rows(curves: Curves) -> list[tuple[str, ...]]:
    """The table: a header, then a row a memory limit; the last column says what the shortest of the row chose."""
    limits = sorted({point.memory for one in curves.frontiers.values() for point in one.points})
    found: list[tuple[str, ...]] = [("memory", *curves.frontiers, "chosen")]
    for memory in limits:
        row = [_best(one, memory) for one in curves.frontiers.values()]
        least = min((one for one in row if one is not None), key=lambda one: one[0])
        found.append((format_bytes(memory), *(format_time(one[0]) if one else "–" for one in row), least[1] or "–"))
    return found


def _curves_sentence(curves: Curves) -> str:
    """What the picture says, in words: where each begins, and the price on the device's memory."""
    parts = [
        f"{name} from {format_bytes(one.points[0].memory)} ({format_time(one.points[0].value)})"
        for name, one in curves.frontiers.items()
        if one.points
    ]
    first = curves.first
    at = first.device if first.device is not None else first.points[0].memory
    found = {name: _best(one, at) for name, one in curves.frontiers.items()}
    prices = [
        f"{name} does not fit" if best is None else f"{name} {format_time(best[0])} ({best[0] / curves.bound - 1:+.1%})"
        for name, best in found.items()
    ]
    prices = prices if any(found.values()) else ["none of them fits"]
    where = f"On the device's {format_bytes(at)}" if first.device is not None else f"With {format_bytes(at)}"
    return (
        f"Least memory a rank: {'; '.join(parts)}. {where}: {', '.join(prices)}; the bound for every choice and any memory "
        f"is {format_time(curves.bound)}."
    )
