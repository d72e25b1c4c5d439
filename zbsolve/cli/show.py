"""`zbsolve show`: draw a schedule in the terminal, as a page or as a picture."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import TYPE_CHECKING

from ..util.errors import BadInput
from .picture_options import add_picture_options, style_from

if TYPE_CHECKING:
    from ..schedule import Schedule
    from ..trace import Trace


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "schedule", help="schedule.json, or trace.json of a run (it holds its schedule); - for standard input"
    )
    parser.add_argument("--trace", help="trace.json of a run of it: predicted and measured on one time axis")
    parser.add_argument("--width", type=int, help="columns in the terminal; default: as wide as it is")
    parser.add_argument("-o", "--output", help="x.html, x.svg, x.pdf, x.png or x.trace.json; in the terminal without")
    add_picture_options(parser)


def command(options: argparse.Namespace) -> int:
    """Draw a schedule, or a run with its schedule."""
    from ..schedule import Schedule
    from ..trace import Trace
    from ..util.files import read_one_of

    if options.output and options.width is not None:
        raise BadInput(f"--width {options.width}: it is for the terminal: leave it out with -o (--size is for pictures)")
    style = style_from(options, options.output or "")
    kind, body = read_one_of(options.schedule, ("schedule", "trace"))
    trace = Trace.load(options.trace) if options.trace else None
    if kind == "trace":
        if trace is not None:
            raise BadInput(f"{options.schedule}: holds a trace, and --trace names another: give the schedule in its place")
        trace = Trace.from_json(body, options.schedule)
    schedule = Schedule.from_json(body, options.schedule) if kind == "schedule" or trace is None else trace.planned()
    if options.output:
        from ..show.pictures.files import save_schedule_picture

        save_schedule_picture(schedule, options.output, trace, style)
        return 0
    draw(schedule, trace, options.width)
    return 0


def draw(schedule: Schedule, trace: Trace | None = None, width: int | None = None) -> None:
    """The schedule in the terminal, as wide as that is or `width` columns."""
    from ..show.schedule_text import schedule_as_text

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(schedule_as_text(schedule, trace, width or shutil.get_terminal_size((100, 24)).columns, colour), end="")
