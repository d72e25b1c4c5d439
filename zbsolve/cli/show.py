"""`zbsolve show`: draw a schedule in the terminal, as a page or as a picture."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

from ..util.errors import BadInput
from .picture_options import add_picture_options, style_from
from .tools import run_of

if TYPE_CHECKING:
    from ..schedule import Schedule
    from ..trace import Trace


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "schedule",
        help="schedule.json, or a run, which holds its schedule: trace.json, or another engine's (see profile "
        "--from-trace); - for standard input",
    )
    parser.add_argument("--trace", help="a run of it, as above: predicted and measured on one time axis")
    parser.add_argument("--width", type=int, help="columns in the terminal; default: as wide as it is")
    parser.add_argument("-o", "--output", help="x.html, x.svg, x.pdf, x.png or x.trace.json; in the terminal without")
    parser.add_argument(
        "--html",
        nargs="?",
        const="-",
        metavar="SPACE.HTML",
        help="of a plan: a page of its space of layouts, as plan --html writes it; on standard output without a name",
    )
    add_picture_options(parser)


def command(options: argparse.Namespace) -> int:
    """Draw a schedule, or a run with its schedule."""
    from ..trace import Trace

    if options.output and options.width is not None:
        raise BadInput(f"--width {options.width}: it is for the terminal: leave it out with -o (--size is for pictures)")
    if options.html:
        return _space(options)
    style = style_from(options, options.output or "")
    given, note = _opened(options.schedule)
    trace: Trace | None
    if isinstance(given, Trace):
        if options.trace:
            raise BadInput(f"{options.schedule}: holds a trace, and --trace names another: give the schedule in its place")
        schedule, trace = given.planned(), given
    else:
        schedule, trace = given, (run_of(given, options.trace) if options.trace else None)
    if options.output:
        from ..show.pictures.files import save_schedule_picture

        save_schedule_picture(schedule, options.output, trace, style)
        return 0
    draw(schedule, trace, options.width)
    print(note, end="")
    return 0


def _space(options: argparse.Namespace) -> int:
    """Write the page of a plan's space."""
    from ..planner.plan_file import read_space
    from ..show.plan_page import plan_as_page
    from ..util.files import write_text

    for name in ("output", "trace", "width"):
        if getattr(options, name) is not None:
            raise BadInput(f"--{name}: it draws the schedule of a plan, --html its space: give one of them")
    write_text(options.html, plan_as_page(read_space(options.schedule)))
    return 0


def _opened(path: str) -> tuple[Schedule | Trace, str]:
    """What the file holds, and a line to say below its picture. Raises BadInput."""
    from ..interchange.traces.reading import others_trace
    from ..long_steps.files import KIND, load_unrolled
    from ..schedule import Schedule
    from ..trace import Trace
    from ..util.files import document_kind, read_one_of

    foreign = others_trace(path)
    if foreign is not None:
        return foreign, ""
    if path != "-" and document_kind(path) == KIND:
        return load_unrolled(path), ""
    kind, body = read_one_of(path, ("schedule", "trace", "plan"))
    if kind == "trace":
        return Trace.from_json(body, path), ""
    if kind == "schedule":
        return Schedule.from_json(body, path), ""
    schedule = Schedule.from_json(body.get("schedule", {}), path)
    if schedule.certificate is not None:
        schedule = schedule.certified(schedule.certificate.unchecked())
    return schedule, _plan_line(body, schedule, path)


def _plan_line(body: Mapping[str, Any], schedule: Schedule, path: str) -> str:
    """How long the step of a plan is, whose pipeline alone the schedule is. Raises BadInput."""
    from ..planner.plan_file import PlanForm
    from ..util.files import checked
    from ..util.text import format_time

    form = checked(body, PlanForm, path)
    if not (isfinite(form.step) and isfinite(form.bound)):
        raise BadInput(f"{path}: fields 'step' and 'bound' are {form.step} and {form.bound}; finite numbers are needed")
    behind, step, bound = (format_time(one) for one in (form.step - schedule.timeline().makespan, form.step, form.bound))
    return (
        f"plan: with what comes behind these passes (update and constant, {behind}) the step takes {step}; no layout's "
        f"takes less than {bound}, as the file says (check proves it, --html draws the space)\n"
    )


def draw(schedule: Schedule, trace: Trace | None = None, width: int | None = None) -> None:
    """The schedule in the terminal, as wide as that is or `width` columns."""
    from ..show.schedule_text import schedule_as_text

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(schedule_as_text(schedule, trace, width or shutil.get_terminal_size((100, 24)).columns, colour), end="")
