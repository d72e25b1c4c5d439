"""Schedules side by side as one HTML page: what was asked, the first and the best of them, what to change, the proof, and
all of them on one axis of time."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..util.files import write_text
from ..util.text import format_bytes, format_gap, printable, time_unit
from .pages import picture, render
from .pictures.files import PICTURES as STILL
from .pictures.files import checked_ending, save_drawing
from .pictures.schedule import comparison_drawing
from .pictures.style import Style
from .pictures.svg import to_svg
from .schedule_comparison import ScheduleComparison
from .schedule_comparison_text import (
    absent_lines,
    change_lines,
    comparison_tables,
    source_lines,
    verdict_line,
)
from .sentences import certificate_lines, headline_of_all, without_notes

PICTURE_WIDTH = 1000.0  # pixels; wider ones have letters that are too small on a sheet of paper


PICTURES = (".html", *STILL)  # endings


def save_comparison(comparison: ScheduleComparison, path: str | os.PathLike[str], doubts: Sequence[str] = ()) -> None:
    """Write the page, or a picture of all on one axis of time, by the ending. Raises BadInput for another."""
    if checked_ending(path, PICTURES) == ".html":
        write_text(path, comparison_as_page(comparison, doubts))
    else:
        save_drawing(comparison_drawing([(row.name, row.schedule) for row in comparison.rows]), path)


def comparison_as_page(comparison: ScheduleComparison, doubts: Sequence[str] = ()) -> str:
    """The page as text; it loads nothing. doubts: what a reader must know of its numbers."""
    c = comparison
    named = [(row.name, row.schedule) for row in c.rows]
    changes = change_lines(c)
    return render(
        "comparison.html",
        title=printable(verdict_line(c).partition(";")[0]),
        figures=_figures(c),
        asked=[f"The shortest {c.objective} of {without_notes(headline_of_all(named[0][1]))}.", *source_lines(c)],
        change=next((line for line, row in zip(changes, c.rows[1:], strict=True) if row is c.best), ""),
        doubts=doubts,
        proof=certificate_lines(c.best.schedule),
        chart=picture(to_svg(comparison_drawing(named, Style(PICTURE_WIDTH, title="", hover=True)))),
        tables=comparison_tables(c),
        notes=[*(line for line, row in zip(changes, c.rows[1:], strict=True) if row is not c.best), *absent_lines(c)],
    )


def _figures(c: ScheduleComparison) -> list[tuple[str, str, str]]:
    """What stands large at the top: (label, value, note) of the first, and of the best where that is another."""
    unit, show = time_unit(max(row.value for row in c.rows))
    found = []
    for row in c.rows[:1] if c.best is c.rows[0] else (c.rows[0], c.best):
        against = "the first" if row is c.rows[0] else f"{row.ratio - 1:+.2%}"
        held = f", peak {format_bytes(max(row.peaks))}" if max(row.peaks) else ""
        found.append((printable(row.name), f"{show(row.value)} {unit}", f"{against}, bubble {row.bubble:.2%}{held}"))
    if c.best.certificate is not None:
        gap = format_gap(c.best.certificate.gap)
        found.append(("proven bound", f"{show(c.best.certificate.bound)} {unit}", gap if gap == "optimal" else f"gap {gap}"))
    return found
