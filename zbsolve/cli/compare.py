"""`zbsolve compare`: schedules side by side; or a run, measured against predicted and against a baseline."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..step import NAMED
from ..util.errors import BadInput
from ..util.files import check_writable, write_text
from ..util.text import printable
from .picture_options import add_picture_options, style_from
from .step_options import add_some_step_options, check_useful
from .tools import add_search_limits, print_json, run_of

if TYPE_CHECKING:
    from ..schedule import Schedule
    from ..show.schedule_comparison import ScheduleComparison
    from ..trace import Trace

STEP = (
    *("ranks", "microbatches", "placement", "partition", "memory", "objective", "recompute", "blocking", "offload"),
    *("vocabulary", "replicas"),
)
COUNTED = {"ranks": "of the pipeline", "microbatches": "of a step"}


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "what",
        nargs="+",
        metavar="WHAT",
        help="schedules: a schedule.json, a file as import takes it, a name (see zbsolve systems), or best, which solve "
        "finds; or a schedule.json and a run of it: a trace.json, or another engine's trace (see profile --from-trace); or "
        "another engine's trace alone, against its own medians",
    )
    parser.add_argument(
        "--profile",
        help="profile.json: times for all, also for the order of a schedule.json (default: the first schedule's)",
    )
    counted = {name: {"help": f"{what} (default: as in the first file)"} for name, what in COUNTED.items()}
    placed = {"help": f"of best: {NAMED}, ranks such as 0,2,1,3, or auto: the best of some (default: auto)"}
    add_some_step_options(parser, *STEP, **counted, placement=placed)
    add_search_limits(parser, 30.0, "seconds to search for best at most", "schedule")
    parser.add_argument("--baseline", nargs=2, metavar=("SCHEDULE", "TRACE"), help="a baseline's schedule and run (1F1B)")
    parser.add_argument("--json", action="store_true", help="the numbers as JSON on standard output")
    parser.add_argument(
        "-o", "--output", help="x.html, a page; or x.svg, x.pdf or x.png: schedules on one axis of time, or a run"
    )
    add_picture_options(parser)


def command(options: argparse.Namespace) -> int:
    """Where a measured step differs from the predicted one; or what schedules take and hold."""
    run = _run(options)
    if run is not None:
        check_useful(options, STEP, "a run's schedule says what its step is")
        return _against_run(options, *run)
    if options.baseline:
        raise BadInput("--baseline is for a run: compare schedule.json trace.json")
    from ..show.schedule_comparison_text import schedules_as_text

    draw = _picture(options)
    result, note, doubted = _side_by_side(options)
    if draw is not None:
        draw(result, [*doubted, *filter(None, [note])])
    if options.json:
        print_json(result.to_json())
    else:
        print(schedules_as_text(result), end="")
        if note:
            print(printable(note))
    return 0


def _picture(options: argparse.Namespace) -> Callable[[ScheduleComparison, list[str]], None] | None:
    """What draws the schedules into the file that was asked for. Raises BadInput before any search."""
    style = style_from(options, options.output or "")
    if not options.output:
        return None
    from ..show.pictures.files import PICTURES, checked_ending, save_drawing
    from ..show.pictures.schedule import comparison_drawing
    from ..show.schedule_comparison_page import comparison_as_page

    ending = checked_ending(options.output, (".html", *PICTURES))
    check_writable(options.output)
    if ending == ".html":
        return lambda found, notes: write_text(options.output, comparison_as_page(found, style.title, notes))
    return lambda found, _: save_drawing(
        comparison_drawing([(one.name, one.schedule) for one in found.rows], style), options.output
    )


def _run(options: argparse.Namespace) -> tuple[Schedule, Trace] | None:
    """A schedule and a run of it, where these are named; None: schedules are. Raises BadInput."""
    from ..interchange.traces.reading import others_trace
    from ..long_steps.files import load_unrolled
    from ..trace import Trace
    from ..util.files import document_kind

    *planned, ran = options.what
    if len(planned) > 1:
        return None
    foreign = others_trace(ran)
    if not planned:
        return None if foreign is None else (foreign.planned(), foreign)
    if foreign is None and ran != "-" and document_kind(ran) != "trace":
        return None
    mine = others_trace(planned[0])
    schedule = load_unrolled(planned[0]) if mine is None else mine.planned()
    return schedule, Trace.load(ran) if foreign is None else foreign.of_problem(schedule.problem, ran)


def _side_by_side(options: argparse.Namespace) -> tuple[ScheduleComparison, str, list[str]]:
    """The schedules, what a reader must know of them, and what is to be doubted of the profile."""
    from ..profile.doubtful import doubts
    from ..show.schedule_comparison import compare_schedules
    from .contenders import Contenders

    contenders = Contenders.of(options, STEP)
    doubted = [] if contenders.profile is None else doubts(contenders.profile)
    return compare_schedules(*contenders.schedules(options.what)), contenders.note(options.what), doubted


def _against_run(options: argparse.Namespace, schedule: Schedule, trace: Trace) -> int:
    """A run of a schedule beside its prediction."""
    from ..schedule import Schedule
    from ..show.comparison import compare
    from ..show.comparison_text import comparison_as_text

    baseline = None
    if options.baseline:
        base = Schedule.load(options.baseline[0])
        baseline = (base, run_of(base, options.baseline[1]))
    result = compare(schedule, trace, baseline)
    if options.output:
        from ..show.pictures.files import save_schedule_picture

        save_schedule_picture(schedule, options.output, trace, style_from(options, options.output))
    if options.json:
        print_json(result.to_json())
    else:
        print(comparison_as_text(result), end="")
    return 0
