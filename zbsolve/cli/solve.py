"""`zbsolve solve`: find a schedule and prove how good it is; race methods; value and bound over memory."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..features.feature import is_auto
from ..features.keeping import BOTH
from ..problem import Problem
from ..profile.doubtful import doubts
from ..profile.profile import Profile
from ..profile.step import OPEN, Step
from ..schedule import Schedule
from ..show.schedule_comparison import compare_schedules
from ..util.errors import BadInput, ZbsolveError
from ..util.files import document_kind
from ..util.text import counted, plural
from . import tools
from .solve_many import repeated_step, solve_repeated
from .step_options import AUTO, OPTIONS, add_step_options, step_from, step_or_problem

if TYPE_CHECKING:
    from ..build.work import Work
    from ..search.auto import Tried
    from ..search.keeping import Curves
    from ..search.least_peak import LeastPeak
    from ..search.memory_limits import Point
    from ..search.noisy import LeastUnderNoise
    from ..search.pareto import Frontier

    Given = tuple[Profile, Step] | Problem

POINTS = 12  # memory limits of a frontier; the peaks of named schedules are added
NOT_HERE = ("memory", "hint")  # options that --frontier does not take, since it sets them for each point
PREFERENCES = ("time", "memory")


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "profile",
        help="profile.json; or a schedule.json or problem.json, whose problem is solved anew, so that only the search has "
        "options; - for standard input",
    )
    add_step_options(parser, *OPTIONS, placement=AUTO)
    parser.add_argument(
        "--method",
        default="auto",
        help="auto, greedy, cp, milp (milp:highs, milp:gurobi, or another solver that PuLP knows), or a named schedule (see "
        "zbsolve show systems; interleaved:16 is Megatron's in groups of 16 microbatches); several, such as 1f1b,zb-v,auto, "
        "are compared, also with the file's schedule if it has one; a named one has its own placement and backward",
    )
    tools.add_search_limits(parser, 30.0, "seconds to search at most", "schedule")
    tools.add_workers(parser)
    parser.add_argument(
        "--prefer",
        default="time",
        metavar="WHAT",
        help="time: the least value, and for equal values the least peak of activations; memory: the least peak within 1 %% "
        "of that value; p95:NOISE (or mean, p50, p99): the best order if times vary; NOISE as in compare --noise",
    )
    parser.add_argument("--hint", help="an earlier schedule.json to start from, also of slightly different times")
    parser.add_argument(
        "--frontier",
        nargs="?",
        type=int,
        const=POINTS,
        metavar="POINTS",
        help=f"value and bound over memory, at POINTS limits ({POINTS}) and the peaks of named schedules, within --seconds",
    )
    tools.add_outputs(
        parser,
        "the certificate, table or frontier",
        "schedule.json, or - for standard output; x.html, .svg, .pdf or .png: a picture, of several methods of all; of a "
        "frontier these, or x.json, or folder/ for the schedules of all points",
    )


def command(options: argparse.Namespace) -> int:
    """Find a schedule, write it, say how good it is."""
    from ..search.auto import solve_auto, splits_differ
    from ..search.idle_room import is_open, with_open_work
    from ..show.solved_step import solved
    from ..show.solved_text import WorkBeside, solved_as_text
    from ..systems.table import is_named

    options.loading = time.monotonic() - options.began
    methods = options.method.split(",")
    if ":" in options.prefer and (options.frontier is not None or len(methods) > 1):
        raise BadInput(f"--prefer {options.prefer}: is for one schedule by one method; compare --noise takes several")
    if options.frontier is not None:
        return solve_frontier(options)
    if len(methods) > 1:
        return race(options, methods)
    asked = _given(options)
    if joined := _joined(options, asked):
        print(f"zbsolve solve: {joined}", file=sys.stderr)
    if not isinstance(asked, Problem) and (each_problem := repeated_step(options, *asked)) is not None:
        return solve_repeated(options, each_problem, asked[1].microbatches)
    works: tuple[Work, ...] = ()
    if isinstance(asked, tuple) and is_open(asked[1].work) and not is_named(options.method):
        asked, works = (asked[0], replace(asked[1], work=())), asked[1].work
    tried: tuple[Tried, ...] = ()
    peaks: list[LeastPeak | LeastUnderNoise] = []
    with tools.searching("solve", options.method) as (search, pressed):
        arguments = _search_arguments(options) | {"peaks": peaks.append}
        half: dict[str, Any] = {name: arguments[name] / 2 for name in ("seconds", "effort") if works and name in arguments}
        arguments |= half
        if not isinstance(asked, Problem) and (asked[1].auto or splits_differ(*asked)):
            with tools.workers_of(options, "solve", threads=2) as workers:
                arguments |= {"progress": search.show, "stop": pressed, "workers": workers}
                schedule, tried = solve_auto(*asked, **arguments)
        else:
            from ..search.solver import solve as solve_problem

            problem = asked if isinstance(asked, Problem) else asked[1].problem(asked[0])
            schedule = solve_problem(problem, progress=lambda state: search.show("", state), **search.rest(arguments))
        alone, work = schedule, None
        if works:
            how = {name: arguments[name] for name in ("method", "solver", "seed")}
            work = with_open_work(alone, works, stop=pressed, **half, **how)
            schedule = work.schedule
    beside = None if work is None else WorkBeside(alone, work)
    result = solved(asked, schedule, tried, peaks[-1] if peaks and not works else None, options.effort is None, beside)
    saves = [partial(tools.save_found, schedule, path) for path in options.output]
    tools.tell(options, result.to_json, lambda: solved_as_text(result), *saves)
    for note in result.notes:
        print(f"zbsolve solve: {note}", file=sys.stderr)
    return 0


def _given(options: argparse.Namespace) -> tuple[Profile, Step] | Problem:
    """What is to be solved. With a named schedule the step gets its placement and backward, unless options say others."""
    from ..profile.named_steps import check_backward, step_for
    from ..search.auto import splits_differ
    from ..systems.table import is_named, system

    if not is_named(options.method):
        return step_or_problem(options, partition="balanced")
    named = system(options.method)
    asked = step_or_problem(options, partition="balanced", placement=named.placement)
    if options.fused not in (None, named.fused):
        return asked
    if isinstance(asked, Problem):
        check_backward(named.name, asked, options.profile)
        return asked
    step = step_for(named.name, *asked)
    return asked[0], replace(step, partition=asked[1].partition) if splits_differ(*asked) else step


def _joined(options: argparse.Namespace, asked: tuple[Profile, Step] | Problem) -> str:
    """A line if layers whose numbers were given one by one are joined into stages without an option that asks for it."""
    if not isinstance(asked, tuple) or {options.placement, options.partition} != {None}:
        return ""
    from ..systems.table import is_named

    profile, step = asked
    layers, stages = len(profile.layers), len(step.routes[0])
    chunks, left = divmod(layers, step.ranks)
    if not profile.source.startswith("given") or layers == stages:
        return ""
    counts = step.counts(profile) or ()
    each = counts[0] if len(set(counts)) == 1 else counted(counts)
    shapes = ("vee", "loop") if not is_named(options.method) else ("loop",) if step.placement == "loop" else ()
    own = " or ".join(f"{shape}{'' if chunks == 2 else chunks}" for shape in shapes)
    advice = f"; --placement {own} gives each layer its own stage" if own and not left else ""
    return f"{plural(layer=layers)} on {plural(stage=stages)}: neighbours are joined, {each} a stage{advice}"


def _search_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `solve`, from the options."""
    from ..profile.noise import Aim

    method, solver = tools.method_of(options.method)
    prefer = options.prefer if options.prefer in PREFERENCES else Aim.read(options.prefer, tools.noise_of)
    arguments = {"method": method, "solver": solver, "prefer": prefer, **tools.search_limits(options)}
    if options.hint:
        arguments["hint"] = Schedule.load(options.hint)
    return arguments


def race(options: argparse.Namespace, methods: Sequence[str]) -> int:
    """Solve with each method, compare the schedules (with the file's own, if it has one), and write the best."""
    from ..search.certify import proven
    from ..search.solver import check_options
    from ..show.schedule_comparison_text import save_comparison, schedules_as_text

    for method in methods:
        check_options(*tools.method_of(method), None)
    asked = step_or_problem(options, partition="balanced")
    named, absent = list[tuple[str, Schedule]](), list[tuple[str, str]]()
    if document_kind(options.profile) == "schedule":
        named.append((options.profile, proven(Schedule.load(options.profile))))
    with tools.workers_of(options, "solve", threads=2) as workers, tools.searching("solve") as (search, pressed):
        limits = {**tools.search_limits(options), "progress": search.show, "stop": pressed, "workers": workers}
        for method in methods:
            try:
                named.append((method, _solved(asked, method, limits, options.profile)))
            except ZbsolveError as error:
                absent.append((method, str(error).removeprefix(f"{method}: ")))
    result = compare_schedules(named, absent)
    doubted = doubts(asked[0]) if isinstance(asked, tuple) else []
    drawn, best = partial(save_comparison, result, doubts=doubted), result.best.schedule.save
    saves = [partial(drawn if path.endswith(tools.PICTURES) else best, path) for path in options.output]
    tools.tell(options, result.to_json, lambda: schedules_as_text(result), *saves)
    return 0


def _solved(asked: Given, method: str, limits: dict[str, Any], path: str) -> Schedule:
    """The schedule of a method. A named schedule has its own placement and backward, and balanced layers. Raises BadInput,
    Infeasible, NotFound."""
    from ..profile.named_steps import check_backward, step_for
    from ..search.auto import solve_auto, splits_differ
    from ..search.solver import solve
    from ..systems.table import is_named, system

    name, solver = tools.method_of(method)
    how: dict[str, Any] = {"method": name, "solver": solver}
    if isinstance(asked, tuple):
        profile, step = asked
        if is_named(method):
            partition = "balanced" if step.partition == "auto" else step.partition
            step = step_for(method, profile, replace(step.closed, placement=system(method).placement, partition=partition))
        elif step.auto or splits_differ(profile, step):
            return solve_auto(profile, step, **how, **limits)[0]
        asked = step.problem(profile)
    elif is_named(method):
        check_backward(method, asked, path)
    others = {name: limit for name, limit in limits.items() if name not in ("progress", "stop", "workers")}
    return solve(asked, **how, **others, progress=lambda state: limits["progress"](method, state))


def solve_frontier(options: argparse.Namespace) -> int:
    """Value and bound over memory, as a table, JSON, pictures, and schedules in a folder."""
    from ..show.frontier_report import frontier_as_text, save_frontier

    folders = [path for path in options.output if Path(path).is_dir() or path.endswith("/")]
    for name in NOT_HERE:
        if getattr(options, name) is not None:
            raise BadInput(f"--{name}: is not for a frontier, which searches at many limits of memory")
    if options.method != "auto":
        raise BadInput(f"--method {options.method}: a frontier is found by auto")
    profile, step = tools.profile_from(options.profile, "solve"), step_from(options)
    for name in OPEN:
        if name not in BOTH and is_auto(getattr(step, name)):
            raise BadInput(f"--frontier: {name} 'auto' has no frontier: name one")
    limits = tools.search_limits(options) | {"points": options.frontier}
    for folder in folders:  # before any time is spent
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{folder}: cannot make this folder: {error.strerror}") from None
    with tools.workers_of(options, "solve", threads=2) as workers, tools.searching("solve") as (search, pressed):
        limits |= {"progress": search.show, "stop": pressed, "workers": workers}
        result, points = _searched(profile, step, limits)
    saves = [partial(save_frontier, result, path) for path in options.output if path not in folders]
    for folder in folders:
        saves += [partial(point.schedule.save, Path(folder) / f"schedule-{name}.json") for name, point in points]
    tools.tell(options, result.to_json, lambda: frontier_as_text(result), *saves)
    return 0


def _searched(profile: Profile, step: Step, limits: dict[str, Any]) -> tuple[Frontier | Curves, list[tuple[str, Point]]]:
    """Search one frontier, or a curve for each way to keep activations if the step leaves that open. Returns it, and its
    points by the names of their files."""
    from ..search.keeping import curves
    from ..search.pareto import frontier

    if not step.auto:
        single = frontier(profile, step, **limits)
        return single, [(f"{point.memory}", point) for point in single.points]
    several = curves(profile, step, **limits)
    named = ((name.replace(" ", "-"), frontier) for name, frontier in several.frontiers.items())
    return several, [(f"{name}-{point.memory}", point) for name, frontier in named for point in frontier.points]
