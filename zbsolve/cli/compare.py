"""`zbsolve compare`: measured against predicted, and against a baseline."""

from __future__ import annotations

import argparse

from .tools import print_json


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("schedule", help="schedule.json")
    parser.add_argument("trace", help="trace.json of a run of it")
    parser.add_argument("--baseline", nargs=2, metavar=("SCHEDULE", "TRACE"), help="a baseline's schedule and run (1F1B)")
    parser.add_argument("--json", action="store_true", help="the numbers as JSON on standard output")
    parser.add_argument("-o", "--output", help="x.html: predicted and measured as a page (or another ending of show)")


def command(options: argparse.Namespace) -> int:
    """Where the measured step differs from the predicted one."""
    from ..schedule import Schedule
    from ..show.comparison import compare
    from ..show.comparison_text import comparison_as_text
    from ..trace import Trace

    schedule, trace = Schedule.load(options.schedule), Trace.load(options.trace)
    baseline = None
    if options.baseline:
        baseline = (Schedule.load(options.baseline[0]), Trace.load(options.baseline[1]))
    result = compare(schedule, trace, baseline)
    if options.output:
        from ..show.schedule_file import save_schedule_picture

        save_schedule_picture(schedule, options.output, trace)
    if options.json:
        print_json(result.to_json())
    else:
        print(comparison_as_text(result), end="")
    return 0
