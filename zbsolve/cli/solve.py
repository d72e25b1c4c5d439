"""`zbsolve solve`: find a schedule and prove how good it is."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from .frontier import POINTS, solve_frontier
from .solve_many import repeated_step, solve_repeated
from .solve_race import race
from .step_options import AUTO, PROFILE_OR_SCHEDULE, add_step_options, step_or_problem
from .tools import add_search_limits, add_workers, method_of, print_json, saving, search_limits, searching, workers_of

if TYPE_CHECKING:
    from ..problem import Problem
    from ..profile.profile import Profile
    from ..search.auto import Tried
    from ..search.least_peak import LeastPeak
    from ..step import Step


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_step_options(parser, file=PROFILE_OR_SCHEDULE, placement=AUTO)
    parser.add_argument(
        "--method",
        default="auto",
        help="auto, greedy, cp, milp (milp:highs, milp:gurobi, or another solver that PuLP knows), or a named schedule (see "
        "zbsolve show systems; interleaved:16 is Megatron's in groups of 16 microbatches); several, such as 1f1b,zb-v,auto, "
        "are compared, with the schedule that the file holds: a named one on its own placement with its own backward",
    )
    add_search_limits(parser, 30.0, "seconds to search at most", "schedule")
    add_workers(parser)
    parser.add_argument(
        "--prefer",
        choices=("time", "memory"),
        default="time",
        help="time: the least value, and of equal values the least peak of activations; memory: the least peak within 1 %% "
        "of that value",
    )
    parser.add_argument("--hint", help="an earlier schedule.json to start from, also of slightly different times")
    parser.add_argument(
        "--frontier",
        nargs="?",
        type=int,
        const=POINTS,
        metavar="POINTS",
        help=f"value and bound over memory, at so many limits ({POINTS}) and the peaks of named schedules, within --seconds",
    )
    parser.add_argument("--json", action="store_true", help="the certificate, table or frontier as JSON on standard output")
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        help="schedule.json, or - for standard output; of several methods also x.html, .svg, .pdf or .png; of a frontier "
        "these, or x.json, or folder/ for the schedules of all points; may be given more than once",
    )


def command(options: argparse.Namespace) -> int:
    """Find a schedule, write it, say how good it is."""
    from ..problem import Problem
    from ..show.solved_step import solved
    from ..show.solved_text import solved_as_text

    if options.frontier is not None:
        return solve_frontier(options)
    if len(methods := options.method.split(",")) > 1:
        return race(options, methods)
    given = _given(options)
    if joined := _joined(options, given):
        print(f"zbsolve solve: {joined}", file=sys.stderr)
    if not isinstance(given, Problem) and (one := repeated_step(options, *given)) is not None:
        return solve_repeated(options, one, given[1].microbatches)
    tried: tuple[Tried, ...] = ()
    peaks: list[LeastPeak] = []
    with searching("solve", options.method) as (search, pressed):
        arguments = _search_arguments(options) | {"peaks": peaks.append}
        if not isinstance(given, Problem) and given[1].auto:
            from ..search.auto import solve_auto

            with workers_of(options, "solve", threads=2) as workers:
                arguments |= {"progress": search.show, "stop": pressed, "workers": workers}
                schedule, tried = solve_auto(*given, **arguments)
        else:
            from ..search.solver import solve as solve_problem

            problem = given if isinstance(given, Problem) else given[1].problem(given[0])
            schedule = solve_problem(problem, progress=lambda state: search.show("", state), **search.rest(arguments))
    found = solved(given, schedule, tried, peaks[-1] if peaks else None, options.effort is None)
    with saving(*[partial(schedule.save, path) for path in options.output]):
        if options.json:
            print_json(found.to_json())
        elif "-" not in options.output:
            print(solved_as_text(found), end="")
    for note in found.notes:
        print(f"zbsolve solve: {note}", file=sys.stderr)
    return 0


def _given(options: argparse.Namespace) -> tuple[Profile, Step] | Problem:
    """What is to be solved. For a named schedule the step has its placement and its backward, unless options say others."""
    from ..problem import Problem
    from ..systems.steps import check_backward, step_for
    from ..systems.table import is_named, system

    if not is_named(options.method):
        return step_or_problem(options, partition="balanced")
    named = system(options.method)
    given = step_or_problem(options, partition="balanced", placement=named.placement)
    if options.fused not in (None, named.fused):
        return given
    if isinstance(given, Problem):
        check_backward(named.name, given, options.profile)
        return given
    return given[0], step_for(named.name, *given)


def _joined(options: argparse.Namespace, given: tuple[Profile, Step] | Problem) -> str:
    """A line where stages that somebody gave one by one are joined, and nothing on the command line says so; else ""."""
    if not isinstance(given, tuple) or {options.placement, options.partition} != {None}:
        return ""
    from ..systems.table import is_named

    profile, step = given
    layers, stages = len(profile.layers), len(step.routes[0])
    chunks, rest = divmod(layers, step.ranks)
    if not profile.source.startswith("given") or layers == stages or layers % stages or rest:
        return ""
    shapes = ("vee", "loop") if not is_named(options.method) else ("loop",) if step.placement == "loop" else ()
    own = " or ".join(f"{one}{'' if chunks == 2 else chunks}" for one in shapes)
    advice = f"; --placement {own} gives each layer its own stage" if own else ""
    return f"{layers} layers on {stages} stages: neighbours are joined, {layers // stages} a stage{advice}"


def _search_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What `solve` is told, from the command line."""
    method, solver = method_of(options.method)
    arguments = {"method": method, "solver": solver, "prefer": options.prefer, **search_limits(options)}
    if options.hint:
        from ..schedule import Schedule

        arguments["hint"] = Schedule.load(options.hint)
    return arguments
