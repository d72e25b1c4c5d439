"""A schedule drawn into a file: the ending of its name says how."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..schedule import Schedule
from ..trace import Trace
from ..util.errors import BadInput
from ..util.files import write_text
from .schedule_page import schedule_as_page
from .schedule_svg import schedule_as_svg
from .schedule_trace import schedule_as_trace

ENDINGS: dict[str, Callable[[Schedule, Trace | None], str]] = {
    ".html": schedule_as_page,
    ".svg": schedule_as_svg,
    ".trace.json": schedule_as_trace,
}


def save_schedule_picture(schedule: Schedule, path: str | os.PathLike[str], trace: Trace | None = None) -> None:
    """Draw `schedule` (and a run of it) into `path`, whole or not at all.

    `.html` is a page to explore, `.svg` a still picture, `.trace.json` opens in Perfetto and Chrome. Raises BadInput for
    other endings and for a trace of another schedule.
    """
    name = str(path)
    if name.endswith(".png"):
        raise BadInput(f"{name}: no PNG is drawn here; write {name[:-4]}.svg or {name[:-4]}.html and convert it")
    ending = next((ending for ending in ENDINGS if name.endswith(ending)), None)
    if name == "-":
        raise BadInput(f"-: standard output has no ending that says what to draw; name a file: x{', x'.join(ENDINGS)}")
    if ending is None:
        raise BadInput(f"{name}: unknown ending; one of {' '.join(ENDINGS)}")
    write_text(path, ENDINGS[ending](schedule, trace))
