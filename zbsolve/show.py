"""Pictures as files: the ending of the path says which."""

from __future__ import annotations

import os
from collections.abc import Callable

from .errors import BadInput
from .files import write_text
from .schedule import Schedule
from .show_events import events
from .show_page import page
from .show_svg import svg
from .trace import Trace

Picture = Callable[[Schedule, Trace | None], str]

ENDINGS: dict[str, Picture] = {".html": page, ".svg": svg, ".trace.json": events}


def save(schedule: Schedule, path: str | os.PathLike[str], trace: Trace | None = None) -> None:
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
