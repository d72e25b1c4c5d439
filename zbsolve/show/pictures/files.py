"""Writes pictures to files, in the format of the name's ending. matplotlib writes PDF and PNG, since it embeds fonts."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...schedule import Schedule
from ...schedule.trace import Trace
from ...util.errors import BadInput
from ...util.files import write_bytes, write_text
from ...util.text import printable
from ..schedule_report import schedule_as_page
from ..tracks import schedule_as_trace
from .drawing import PAPER, USUAL, Area, Box, Dot, Drawing, Line, Mark, Row, Style, Words, to_svg
from .schedule import schedule_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


DOTS = {"px": 96.0}  # dots an inch of a PNG whose size was given in this unit: one dot a pixel
PRINTED_DOTS = 300.0  # dots an inch, for sizes in other units
POINTS = 72 / 96  # points of a pixel
# Type 42 embeds TrueType fonts: publishers refuse Type 3.
SETTINGS: Any = {"pdf.fonttype": 42, "font.family": "DejaVu Sans", "svg.fonttype": "none"}


def _written(drawing: Drawing, form: str) -> bytes:
    """The file's bytes. A "pdf" is one page of the drawing's size, with text that can be selected; a "png" has one dot a
    pixel if the size was given in pixels, otherwise 300 an inch. Raises BadInput where matplotlib is missing."""
    facts: dict[str, str | None] = {"Title": printable(drawing.title)}
    facts |= {"Subject": printable(drawing.description), "CreationDate": None} if form == "pdf" else {"Software": None}
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput("PDF and PNG need matplotlib: pip install matplotlib (3.8 or newer); an SVG does not") from None
    stream = io.BytesIO()
    with rc_context(SETTINGS):
        figure = Figure(figsize=(drawing.width / 96, drawing.height / 96), facecolor=PAPER)
        axes = figure.add_axes((0, 0, 1, 1), frameon=False)
        axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0), xticks=[], yticks=[])
        # Consecutive boxes are drawn as one collection, in a tenth of the time that single boxes take.
        for i, (kind, marks) in enumerate(groupby(drawing.marks, key=lambda mark: type(mark) is Box and not mark.radius)):
            (_boxes if kind else _each)(axes, list(marks), i + 1.0)
        figure.savefig(stream, format=form, dpi=DOTS.get(drawing.unit, PRINTED_DOTS), metadata=facts)
    return stream.getvalue()


def _boxes(axes: Axes, boxes: list[Any], order: float) -> None:
    """Boxes without antialiasing: narrow neighbours would blur into each other."""
    from matplotlib.collections import PolyCollection

    corners = [[(b.x, b.y), (b.x + b.width, b.y), (b.x + b.width, b.y + b.height), (b.x, b.y + b.height)] for b in boxes]
    axes.add_collection(
        PolyCollection(corners, facecolors=[b.fill for b in boxes], linewidths=0, antialiased=False, zorder=order),
        autolim=False,
    )


def _each(axes: Axes, marks: list[Mark], order: float) -> None:
    for i, mark in enumerate(marks):
        if isinstance(mark, Row):
            _boxes(axes, [Box(x, mark.y, wide, mark.height, mark.fill) for x, wide in mark.spans], order + i / len(marks))
        else:
            _add(axes, mark, order + i / len(marks))


def _add(axes: Axes, mark: Box | Area | Line | Dot | Words, order: float) -> None:
    """Add one mark to the axes. order: marks with a higher number are drawn over those with a lower one."""
    from matplotlib.patches import Circle, FancyBboxPatch, Polygon

    match mark:
        case Box(x, y, width, height, fill, radius):
            shape = f"round,pad=0,rounding_size={radius}"
            axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=fill, linewidth=0, zorder=order))
        case Area(points, fill):
            axes.add_patch(Polygon(points, facecolor=fill, linewidth=0, zorder=order))
        case Line(points, colour, thickness, dashes):
            style: Any = (0, [d / thickness for d in dashes]) if dashes else "solid"
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, color=colour, linewidth=thickness * POINTS, linestyle=style, zorder=order)
        case Dot(x, y, radius, fill, outline, thickness):
            circle = Circle((x, y), radius, facecolor=fill, edgecolor=outline, linewidth=thickness * POINTS, zorder=order)
            axes.add_patch(circle)
        case Words():
            _text(axes, mark, order)


def _text(axes: Axes, words: Words, order: float) -> None:
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3 * POINTS, foreground=PAPER)] if words.halo else []
    side = {"start": "left", "middle": "center", "end": "right"}[words.anchor]
    axes.text(
        words.x,
        words.y,
        printable(words.text),
        fontsize=words.size * POINTS,
        color=words.colour,
        ha=side,
        va="center_baseline",
        weight="bold" if words.bold else "normal",
        path_effects=halo,
        parse_math=False,
        zorder=order,
    )


PICTURES = (".svg", ".pdf", ".png")
SCHEDULES = (".html", *PICTURES, ".trace.json")


def save_drawing(drawing: Drawing, path: str | os.PathLike[str]) -> None:
    """Write a drawing as `.svg`, `.pdf` or `.png`; after an error no partial file is left. Raises BadInput for other
    endings, and for the last two where matplotlib is missing."""
    ending = checked_ending(path, PICTURES)
    if ending == ".svg":
        write_text(path, to_svg(drawing))
    else:
        write_bytes(path, _written(drawing, ending[1:]))


def checked_ending(path: str | os.PathLike[str], known: Sequence[str]) -> str:
    """The ending of the path. Commands check it before they compute. Raises BadInput for an unknown one, and for `-`."""
    name = str(path)
    if name == "-":
        raise BadInput(f"-: standard output has no ending that says what to draw; name a file: x{', x'.join(known)}")
    ending = next((ending for ending in known if name.endswith(ending)), None)
    if ending is None:
        raise BadInput(f"{name}: unknown ending; one of {' '.join(known)}")
    return ending


def save_schedule_picture(
    schedule: Schedule, path: str | os.PathLike[str], trace: Trace | None = None, style: Style = USUAL
) -> None:
    """Draw `schedule`, and with `trace` a run of it, into the file `path`; after an error no partial file is left.

    `.html` is an interactive page, `.svg`, `.pdf` and `.png` are pictures in this style, `.trace.json` opens in Perfetto
    and Chrome. Raises BadInput for other endings and for a trace of another schedule.
    """
    ending = checked_ending(path, SCHEDULES)
    if ending in PICTURES:
        save_drawing(schedule_drawing(schedule, trace, style), path)
    elif ending == ".html":
        write_text(path, schedule_as_page(schedule, trace, style.title))
    else:
        write_text(path, schedule_as_trace(schedule, trace))
