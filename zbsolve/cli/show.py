"""`zbsolve show`: a schedule, a run, a plan, a profile or the literature's schedules, in the terminal or as a picture."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from ..profile.profile import Profile
from ..profile.step import Step
from ..schedule import Schedule
from ..schedule.trace import Trace
from ..show.pictures.drawing import Style
from ..util.errors import BadInput
from ..util.files import checked, document_kind, read_one_of, write_text
from ..util.text import format_times
from .tools import print_json, run_of, tell

SYSTEMS = "systems"  # the word for the schedules of the literature


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "what",
        metavar="FILE",
        help="schedule.json; a run, which has its schedule: trace.json, or another engine's (see profile --from-trace); "
        "plan.json; - for standard input; profile.json; or systems: the named schedules of the literature",
    )
    parser.add_argument("--trace", help="for a schedule: a run of it; both are drawn on one time axis")
    parser.add_argument("--with-memory", action="store_true", help="in pictures: also what ranks hold over time")
    parser.add_argument("--ranks", type=int, help="of the step of systems (4), or of the pipeline for a profile")
    parser.add_argument("--microbatches", type=int, help="of that step (8; for a profile: four a rank)")
    parser.add_argument("--json", action="store_true", help="for systems, and a profile with --ranks: the table as JSON")
    parser.add_argument(
        "-o",
        "--output",
        help="x.html, x.svg, x.pdf, x.png or x.trace.json (Perfetto); a profile, systems and the space of a plan: x.html; "
        "in the terminal without",
    )


def command(options: argparse.Namespace) -> int:
    """Show the file's content, by its kind."""
    kind = SYSTEMS if options.what == SYSTEMS else document_kind(options.what)
    if kind in (SYSTEMS, "profile"):
        _refuse(options, "trace", "with_memory")
        return _systems(options) if kind == SYSTEMS else _profile(options)
    _refuse(options, "ranks", "microbatches", "json")
    if kind != "plan" or not (options.output or "").endswith(".html"):
        return _schedule(options)
    from ..planner.plan_file import read_space
    from ..show.plan_report import plan_as_page

    write_text(options.output, plan_as_page(read_space(options.what)))
    return 0


def _refuse(options: argparse.Namespace, *names: str) -> None:
    """Raise BadInput if one of these options was given: this kind of file does not use them."""
    for name in names:
        if getattr(options, name):
            raise BadInput(f"--{name.replace('_', '-')}: is of no use for {options.what}")


def _schedule(options: argparse.Namespace) -> int:
    opened, note = _opened(options.what)
    trace: Trace | None
    if isinstance(opened, Trace):
        if options.trace:
            raise BadInput(f"{options.what}: holds a trace, and --trace names another: give the schedule in its place")
        schedule, trace = opened.planned(), opened
    else:
        schedule, trace = opened, (run_of(opened, options.trace) if options.trace else None)
    if options.output:
        from ..show.pictures.files import save_schedule_picture

        save_schedule_picture(schedule, options.output, trace, Style(memory=options.with_memory))
        return 0
    draw(schedule, trace)
    print(note, end="")
    return 0


def _systems(options: argparse.Namespace) -> int:
    """Show the systems of the literature: published formulas, and bubble and peak of each on one step."""
    from ..show.gallery import exhibits, gallery_as_page, gallery_as_text

    _check_page(options.output)
    sizes = {name: value for name in ("ranks", "microbatches") if (value := getattr(options, name)) is not None}
    shown, absent = exhibits(**sizes)
    if options.output:
        write_text(options.output, gallery_as_page(shown, absent))
    body = [*(exhibit.to_json() for exhibit in shown), *(absent_system.to_json() for absent_system in absent)]
    tell(options, lambda: body, lambda: gallery_as_text(shown, absent))
    return 0


def _profile(options: argparse.Namespace) -> int:
    """Show a profile; with --ranks also its stages, what it means for a schedule, and partitions by name."""
    from ..partition.by_name import named_partitions
    from ..show.profile_meaning import stages
    from ..show.profile_report import partitions_as_text, profile_as_page, profile_as_text, stages_as_text
    from ..show.profile_rows import units_of

    _check_page(options.output)
    profile, ranks = Profile.load(options.what), options.ranks
    microbatches = options.microbatches or 4 * max(1, ranks or 1)
    if options.output:
        page = profile_as_page(profile, ranks or min(4, len(profile.layers)), options.microbatches)
        write_text(options.output, page)
        return 0
    if ranks is None:
        _refuse(options, "json")
        print(profile_as_text(profile), end="")
        return 0
    costs = Step(ranks, microbatches).costs(profile)
    if not options.json:
        print(profile_as_text(profile, ranks, microbatches))
    splits = named_partitions(costs)
    if options.json:
        limit = costs.limit[0] if costs.limit and len(set(costs.limit)) == 1 else costs.limit
        rows = [asdict(partitioned) for partitioned in splits]
        print_json({"source": profile.source, "microbatches": microbatches, "limit": limit, "partitions": rows})
        return 0
    alpa, units = next(split for split in splits if split.name == "alpa"), units_of(profile, stages(profile, ranks))
    print(partitions_as_text(costs, splits, units, profile.source), stages_as_text(costs, alpa, units), sep="\n", end="")
    return 0


def _check_page(path: str | None) -> None:
    """Raise BadInput for a file that is no page."""
    if path not in (None, "-") and not path.endswith(".html"):
        raise BadInput(f"{path}: it is a page: name a file that ends in .html")


def _opened(path: str) -> tuple[Schedule | Trace, str]:
    """The schedule or trace in the file, and a line to print below its chart. Raises BadInput."""
    from ..interchange.traces.reading import others_trace
    from ..long_steps.files import KIND, load, schedule_to_show
    from ..search.certify import from_file

    foreign = others_trace(path)
    if foreign is not None:
        return foreign, ""
    if path != "-" and document_kind(path) == KIND:
        return from_file(schedule_to_show(load(path), path)), ""
    kind, body = read_one_of(path, ("schedule", "trace", "plan"))
    if kind == "trace":
        return Trace.from_json(body, path), ""
    schedule = from_file(Schedule.from_json(body if kind == "schedule" else body.get("schedule", {}), path))
    return schedule, "" if kind == "schedule" else _plan_line(body, schedule, path)


def _plan_line(body: Mapping[str, Any], schedule: Schedule, path: str) -> str:
    """A line with the step time of a plan: its schedule is only the pipeline's part of the step. Raises BadInput."""
    from ..planner.plan_file import PlanForm

    form = checked(body, PlanForm, path)
    if not (isfinite(form.step) and isfinite(form.bound)):
        raise BadInput(f"{path}: fields 'step' and 'bound' are {form.step} and {form.bound}; finite numbers are needed")
    behind, step, bound = format_times(form.step - schedule.timeline().makespan, form.step, form.bound)
    return (
        f"plan: with what follows these passes (update and constant, {behind}) the step takes {step}; no layout's "
        f"takes less than {bound}, as the file says (check proves it, -o x.html draws the space)\n"
    )


def draw(schedule: Schedule, trace: Trace | None = None) -> None:
    """The schedule in the terminal, as wide as that is."""
    from ..show.schedule_report import schedule_as_text

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(schedule_as_text(schedule, trace, shutil.get_terminal_size((100, 24)).columns, colour), end="")
