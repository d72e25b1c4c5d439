"""`zbsolve compare`: several schedules; a measured run with its prediction and with a baseline; or two profiles."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from ..profile.changes import drift
from ..profile.doubtful import doubts
from ..profile.profile import Profile
from ..schedule import Schedule
from ..schedule.trace import Trace
from ..show.comparison import check_trace, compare, comparison_as_text
from ..show.schedule_comparison import compare_schedules
from ..util.errors import BadInput, CannotRead, ZbsolveError
from ..util.files import document_kind
from ..util.text import parse_share
from .tools import noise_of, profile_from, run_of, tell, tell_other_model


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "what",
        nargs="+",
        metavar="FILE",
        help="schedules: schedule.json …, compared with the first; with --profile also other engines' files, as import "
        "takes them. Or a schedule.json and a run of it: a trace.json, or another engine's trace (see profile "
        "--from-trace), which alone is compared with its own medians. Or two profiles",
    )
    parser.add_argument("--profile", help="profile.json: times for the orders of all schedules (default: each file's own)")
    parser.add_argument(
        "--noise",
        help="for schedules: their steps if times vary: by rank=1%%,microbatch=20%%,pass=3%%,stall=0.1%%x8, or as in a "
        "trace",
    )
    parser.add_argument("--baseline", nargs=2, metavar=("SCHEDULE", "TRACE"), help="for a run: a schedule and its run")
    parser.add_argument("--within", metavar="SHARE", help="for two profiles: exit 1 if anything changed more, such as 5%%")
    parser.add_argument("--json", action="store_true", help="the numbers as JSON on standard output")
    parser.add_argument(
        "-o", "--output", help="x.html, a page; or x.svg, x.pdf or x.png: schedules on one axis of time, or a run"
    )


def command(options: argparse.Namespace) -> int:
    """Compare profiles, a run with its schedule, or schedules, by the kinds of the files."""
    kinds = [document_kind(path) for path in options.what]
    if "profile" in kinds:
        return _profiles(options, kinds)
    if options.within is not None:
        raise BadInput("--within is for two profiles")
    run = None if options.noise is not None else _run(options.what)
    if run is not None:
        return _against_run(options, *run)
    if options.baseline:
        raise BadInput("--baseline is for a run: compare schedule.json trace.json")
    return _side_by_side(options)


def _profiles(options: argparse.Namespace, kinds: list[str | None]) -> int:
    from ..show.run_text import drift_as_text

    if len(kinds) != 2 or not {"profile", "plan"}.issuperset(kinds):
        raise BadInput("two profiles are compared, and nothing else with them; --profile names one that says times")
    if options.output is not None:
        raise BadInput("-o: nothing is drawn of two profiles")
    if options.noise is not None:
        raise BadInput("--noise is for schedules")
    share = None if options.within is None else parse_share(options.within, "--within")
    changes = drift(*(Profile.load(path) for path in options.what))
    tell(options, changes.to_json, lambda: drift_as_text(changes))
    return int(share is not None and not changes.within(share))


def _run(what: list[str]) -> tuple[Schedule, Trace] | None:
    """A schedule and a run of it, where these are named; None: schedules are. Raises BadInput."""
    from ..interchange.traces.reading import others_trace
    from ..long_steps.files import load_unrolled

    *planned, ran = what
    if len(planned) > 1:
        return None
    foreign = others_trace(ran)
    if not planned:
        return None if foreign is None else (foreign.planned(), foreign)
    if foreign is None and ran != "-" and document_kind(ran) != "trace":
        return None
    run = others_trace(planned[0])
    schedule = load_unrolled(planned[0]) if run is None else run.planned()
    return schedule, Trace.load(ran) if foreign is None else foreign.of_problem(schedule.problem, ran)


def _side_by_side(options: argparse.Namespace) -> int:
    """Compare schedules, each with its certificate; impossible ones are listed with the reason."""
    from ..show.pictures.files import checked_ending
    from ..show.schedule_comparison_text import PICTURES, save_comparison, schedules_as_text

    if options.output:
        checked_ending(options.output, PICTURES)
    profile = profile_from(options.profile, "compare") if options.profile else None
    named, absent = list[tuple[str, "Schedule"]](), list[tuple[str, str]]()
    for path in options.what:
        try:
            named.append((path, _schedule(path, profile)))
        except CannotRead:
            raise
        except ZbsolveError as error:
            absent.append((path, str(error).removeprefix(f"{path}: ")))
    result = compare_schedules(named, absent)
    if options.noise is not None:
        from ..profile.noise import under_noise

        result = replace(result, noise=under_noise({row.name: row.schedule for row in result.rows}, noise_of(options.noise)))
    if options.output:
        save_comparison(result, options.output, [] if profile is None else doubts(profile))
    tell(options, result.to_json, lambda: schedules_as_text(result))
    return 0


def _schedule(path: str, profile: Profile | None) -> Schedule:
    """The schedule in a file or of a run, certified, with the profile's times if given. Raises BadInput if not valid."""
    from ..interchange.importing import import_schedule, read_order
    from ..interchange.traces.reading import others_trace
    from ..long_steps.files import load_unrolled
    from ..search.certify import certified, proven
    from ..search.today import timed_again
    from ..systems.table import is_named

    if is_named(path) and not Path(path).exists():
        raise BadInput(f"a name, not a file: solve --method {path},auto compares schedules by name")
    run, kind = others_trace(path), document_kind(path)
    if run is None and kind is None and path != "-":
        order = read_order(path)
        if profile is None:
            raise BadInput("it says no times: add --profile profile.json")
        imported = import_schedule(order, profile, partition="balanced")
        if imported.violations:
            raise BadInput(imported.told()[0])
        return certified(imported.schedule, imported.solver)
    run = Trace.load(path) if kind == "trace" else run
    schedule = load_unrolled(path) if run is None else run.planned()
    if profile is None:
        return proven(schedule)
    tell_other_model(schedule, profile, "compare")
    return proven(timed_again(schedule, profile))


def _against_run(options: argparse.Namespace, schedule: Schedule, trace: Trace) -> int:
    if options.profile:
        raise BadInput("--profile: a run's schedule says its times")
    baseline = None
    if options.baseline:
        base = Schedule.load(options.baseline[0])
        baseline = (base, run_of(base, options.baseline[1]))
    check_trace(schedule, trace, options.what[-1])
    result = compare(schedule, trace, baseline)
    if options.output:
        from ..show.pictures.files import save_schedule_picture

        save_schedule_picture(schedule, options.output, trace)
    tell(options, result.to_json, lambda: comparison_as_text(result))
    return 0
