"""The frontier over memory in words and numbers: as text, as a page with its picture, and as files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

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


def save_frontier(frontier: Frontier, path: str | os.PathLike[str], style: Style = USUAL) -> None:
    """Write the frontier as `.json`, `.html`, or in this style as `.svg`, `.pdf` or `.png`; `-` is JSON on standard output.
    Raises BadInput otherwise."""
    save_report(path, lambda: _drawing(frontier, style), lambda: frontier_as_page(frontier), frontier.save)


def save_report(
    path: str | os.PathLike[str],
    drawing: Callable[[], Drawing],
    page: Callable[[], str],
    save: Callable[[str | os.PathLike[str]], None],
) -> None:
    """Write a picture, a page, or else what `save` writes, by the ending of `path`. Raises BadInput for others."""
    check_frontier_path(path)
    if str(path).endswith(tuple(PICTURES)):
        save_drawing(drawing(), path)
    elif str(path).endswith(".html"):
        write_text(path, page())
    else:
        save(path)


def check_frontier_path(path: str | os.PathLike[str]) -> None:
    """Raise BadInput for a path that `save_frontier` cannot write, before any time is spent."""
    if str(path) != "-" and not str(path).endswith(ENDINGS):
        raise BadInput(f"{path}: unknown ending; one of {' '.join(ENDINGS)}")


def frontier_as_svg(frontier: Frontier, width: int = 1200) -> str:
    """A well-formed SVG document `width` pixels wide: memory to the right, time lost to bubbles upwards."""
    return to_svg(_drawing(frontier, Style(width)))


def _drawing(frontier: Frontier, style: Style) -> Drawing:
    return frontier_drawing(frontier, frontier_headline(frontier), _sentence(frontier), style)


def frontier_as_page(frontier: Frontier) -> str:
    """The picture and its table as one HTML page that loads nothing."""
    return report_page(frontier_headline(frontier), _sentence(frontier), _drawing(frontier, INSIDE), _rows(frontier))


def report_page(headline: str, sentence: str, drawing: Drawing, rows: Sequence[tuple[str, ...]]) -> str:
    """A page with a picture in the style INSIDE, whose words stand around it."""
    return render("frontier.html", title=headline, picture=picture(to_svg(drawing)), sentence=sentence, rows=rows)


def frontier_as_text(frontier: Frontier) -> str:
    """The table as text, and what it says."""
    return _as_text(frontier, _rows(frontier), _sentence(frontier))


def _as_text(frontier: Frontier, rows: Sequence[tuple[str, ...]], sentence: str) -> str:
    note = printable(times_note(frontier.source))
    return "\n".join([*filter(None, [note]), *aligned(rows, left=(-1,)), sentence]) + "\n"


def frontier_headline(frontier: Frontier) -> str:
    """One line: model, ranks, microbatches, placement, objective."""
    return (
        f"{printable(frontier.model)}: {frontier.objective} over memory a rank, {frontier.ranks} ranks, "
        f"{frontier.microbatches} microbatches, placement {printable(frontier.placement)}"
    )


def _sentence(frontier: Frontier) -> str:
    """What the picture says, in words."""
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


def save_curves(curves: Curves, path: str | os.PathLike[str], style: Style = USUAL) -> None:
    """Write the frontiers as `.json`, `.html`, or in this style as `.svg`, `.pdf` or `.png`; `-` is JSON on standard output.
    Raises BadInput otherwise."""
    save_report(path, lambda: _curves_drawing(curves, style), lambda: curves_as_page(curves), curves.save)


def curves_as_page(curves: Curves) -> str:
    """The picture and its table as one HTML page that loads nothing."""
    return report_page(
        frontier_headline(curves.first), _curves_sentence(curves), _curves_drawing(curves, INSIDE), _curve_rows(curves)
    )


def curves_as_text(curves: Curves) -> str:
    """The table as text, and what it says."""
    return _as_text(curves.first, _curve_rows(curves), _curves_sentence(curves))


def _curves_drawing(curves: Curves, style: Style) -> Drawing:
    return curves_drawing(curves, frontier_headline(curves.first), _curves_sentence(curves), style)


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
