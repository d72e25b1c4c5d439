"""Pictures in files: the ending of a name says how."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ...schedule import Schedule
from ...trace import Trace
from ...util.errors import BadInput
from ...util.files import write_bytes, write_text
from ..schedule_page import schedule_as_page
from ..schedule_trace import schedule_as_trace
from .drawing import Drawing
from .figure import to_pdf, to_png
from .schedule import schedule_drawing
from .style import USUAL, Style
from .svg import to_svg

PICTURES: dict[str, Callable[[Drawing], str | bytes]] = {".svg": to_svg, ".pdf": to_pdf, ".png": to_png}
SCHEDULES = (".html", *PICTURES, ".trace.json")


def save_drawing(drawing: Drawing, path: str | os.PathLike[str]) -> None:
    """Write a drawing as `.svg`, `.pdf` or `.png`, whole or not at all. Raises BadInput for other endings, and where the
    library for the last two is missing."""
    ending = checked_ending(path, tuple(PICTURES))
    written = PICTURES[ending](drawing)
    if isinstance(written, str):
        write_text(path, written)
    else:
        write_bytes(path, written)


def checked_ending(path: str | os.PathLike[str], known: Sequence[str]) -> str:
    """Which of the endings the path has: worth knowing before any time is spent. Raises BadInput for none, and for `-`."""
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
    """Draw `schedule` (and a run of it) into `path`, whole or not at all.

    `.html` is a page to explore, `.svg`, `.pdf` and `.png` are still pictures in this style, `.trace.json` opens in Perfetto
    and Chrome. Raises BadInput for other endings and for a trace of another schedule.
    """
    ending = checked_ending(path, SCHEDULES)
    if ending in PICTURES:
        save_drawing(schedule_drawing(schedule, trace, style), path)
    elif ending == ".html":
        write_text(path, schedule_as_page(schedule, trace, style.title))
    else:
        write_text(path, schedule_as_trace(schedule, trace))
