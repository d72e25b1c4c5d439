"""Several frontiers of one step in words and numbers: as text, as a page with their picture, and as files."""

from __future__ import annotations

import os

from ..search.keeping import Curves
from ..search.pareto import Frontier
from ..util.text import aligned, format_bytes, format_time, printable, times_note
from .frontier_report import INSIDE, frontier_headline, report_page, save_report
from .pictures.drawing import Drawing
from .pictures.frontier_curves import curves_drawing
from .pictures.style import USUAL, Style


def save_curves(curves: Curves, path: str | os.PathLike[str], style: Style = USUAL) -> None:
    """Write the frontiers as `.json`, `.html`, or in this style as `.svg`, `.pdf` or `.png`; `-` is JSON on standard output.
    Raises BadInput otherwise."""
    save_report(path, lambda: _drawing(curves, style), lambda: curves_as_page(curves), curves.save)


def curves_as_page(curves: Curves) -> str:
    """The picture and its table as one HTML page that loads nothing."""
    return report_page(frontier_headline(curves.first), _sentence(curves), _drawing(curves, INSIDE), _rows(curves))


def curves_as_text(curves: Curves) -> str:
    """The table as text, and what it says."""
    note = [one for one in (printable(times_note(curves.first.source)),) if one]
    return "\n".join([*note, *aligned(_rows(curves), left=(-1,)), _sentence(curves)]) + "\n"


def _drawing(curves: Curves, style: Style) -> Drawing:
    return curves_drawing(curves, frontier_headline(curves.first), _sentence(curves), style)


def _best(frontier: Frontier, memory: int) -> tuple[int, str] | None:
    """The least value within so much memory, and what was chosen for it."""
    fitting = [(point.value, point.choice) for point in frontier.points if point.memory <= memory]
    return min(fitting, default=None, key=lambda row: row[0])


def _rows(curves: Curves) -> list[tuple[str, ...]]:
    """The table: a header, then a row a memory limit; the last column says what the shortest of the row chose."""
    limits = sorted({point.memory for one in curves.frontiers.values() for point in one.points})
    found: list[tuple[str, ...]] = [("memory", *curves.frontiers, "chosen")]
    for memory in limits:
        row = [_best(one, memory) for one in curves.frontiers.values()]
        least = min((one for one in row if one is not None), key=lambda one: one[0])
        found.append((format_bytes(memory), *(format_time(one[0]) if one else "–" for one in row), least[1] or "–"))
    return found


def _sentence(curves: Curves) -> str:
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
