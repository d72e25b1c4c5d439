"""`zbsolve solve`: find a schedule and prove how good it is."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..util.text import exact_time, times_note
from .frontier import POINTS, solve_frontier
from .solve_many import repeated_step, solve_repeated
from .solve_race import race
from .step_options import AUTO, PROFILE_OR_SCHEDULE, add_step_options, step_or_problem
from .tools import add_search_limits, add_workers, method_of, print_json, saving, search_limits, searching, workers_of

if TYPE_CHECKING:
    from ..problem import Problem
    from ..profile.profile import Profile
    from ..schedule import Schedule
    from ..search.auto import Tried
    from ..search.least_peak import LeastPeak
    from ..show.solved_text import Solved
    from ..step import Step
    from ..systems.exchange_gain import AttentionGain

PARTITION, CHOICE, SLICES = "partition", "choice", "slicing"  # which bounds hold for all
LONGER = "longer_from"  # so many slices or more
AUTO_SLICES = "auto"


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
    from ..show.solved_text import Solved
    from ..systems.steps import usual_schedule

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
    bounds = {} if isinstance(given, Problem) else _bounds_of_all(*given, tried)
    usual = None if isinstance(given, Problem) else usual_schedule(*given, schedule.problem.layers)
    copies = None if isinstance(given, Problem) else _copy_ratio(*given, schedule)
    gain = _attention_gain(given, schedule.problem)
    solved = Solved(
        schedule, usual, peaks[-1] if peaks else None, options.effort is None, copies, _fused_saves(given, schedule), gain
    )
    with saving(*[partial(schedule.save, path) for path in options.output]):
        _print_solved(options, solved, tried, bounds)
    if not isinstance(given, Problem):
        for note in _notes(*given, schedule.problem, gain):
            print(f"zbsolve solve: {note}", file=sys.stderr)
    return 0


def _notes(profile: Profile, step: Step, problem: Problem, gain: AttentionGain | None) -> list[str]:
    """What is to be known of the profile's numbers in this step, a line each."""
    from ..profile.rounding import rounding_note
    from ..profile.slice_errors import stage_errors_note

    fused = "BW" in problem.passes.kinds
    far = stage_errors_note(profile, problem.layers, fused) if problem.slices > 1 else ""
    notes = (rounding_note(profile, problem.layers), step.group_note(profile), far, gain.note if gain else "")
    return [note for note in notes if note]


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


def _fused_saves(given: tuple[Profile, Step] | Problem, schedule: Schedule) -> float:
    """By which share one pass BW is shorter than B and W, where a profile has both and the schedule runs them apart."""
    if not isinstance(given, tuple) or "W" not in schedule.problem.passes.kinds:
        return 0.0
    apart, fused = (sum(one) for one in zip(*((c.B + c.W, c.BW) for c in given[0].layers), strict=True))
    return max(0.0, 1 - fused / apart) if apart and fused else 0.0


def _bounds_of_all(profile: Profile, step: Step, tried: tuple[Tried, ...]) -> dict[str, dict[str, int]]:
    """What bounds hold for, and placement → µs, where partitions or what stages keep were tried: other bounds hold for
    their own."""
    from ..partition.lower_bound import least_step
    from ..search.choice_bound import bound_of_every_choice, bound_of_every_vocabulary
    from ..search.choices import vocabularies

    if step.slices == AUTO_SLICES:
        return _bounds_of_slices(profile, step, tried)
    if step.slices != 1:
        return {}  # slices of unlike times have no bound of their own here
    placed = dict.fromkeys(one.placement.split()[0] for one in tried if one.layers)
    steps = {one: replace(step, placement=one) for one in placed}
    if step.partition == "auto":
        places = {place: [where.costs(profile) for _, where in vocabularies(one)] for place, one in steps.items()}
        return {PARTITION: {place: min(least_step(one, step.objective) for one in all_) for place, all_ in places.items()}}
    if step.gathers == "auto":
        return {}
    if step.keeping_open:
        return {CHOICE: {place: bound_of_every_choice(profile, one) for place, one in steps.items()}}
    if step.vocabulary == "auto":
        known = {one.placement: one.bound for one in tried if one.bound}
        named = {place: {name.removeprefix(place): bound for name, bound in known.items()} for place in steps}
        return {CHOICE: {place: bound_of_every_vocabulary(profile, one, named[place]) for place, one in steps.items()}}
    return {}


def _bounds_of_slices(profile: Profile, step: Step, tried: tuple[Tried, ...]) -> dict[str, dict[str, int]]:
    """`_bounds_of_all` of any slices, and from how many on they are longer than the best, where their number is open and
    layers of stages are given."""
    from ..search.slice_bound import bound_of_any_slices

    value = min(one.value for one in tried if one.value is not None)
    if step.partition == "auto":
        return {}
    found: dict[str, dict[str, int]] = {SLICES: {}, LONGER: {}}
    for place in dict.fromkeys(one.placement.split()[0] for one in tried if one.layers):
        on_it = replace(step, placement=place)
        layers = {one.layers for one in tried if one.layers and one.placement.split()[0] == place}
        each = [bound_of_any_slices(profile, on_it, one, value) for one in layers]
        if any(one is None for one in each):
            return {}
        found[SLICES][place] = min(one.bound for one in each if one is not None)
        if all(one is not None and one.longer_from for one in each):
            found[LONGER][place] = max(one.longer_from or 0 for one in each if one is not None)
    return {what: every for what, every in found.items() if every}


def _copy_ratio(profile: Profile, step: Step, schedule: Schedule) -> float | None:
    """`Step.copy_ratio` on the stages that were solved, of a step that offloads."""
    from ..build.vocabulary import model_routes
    from ..partition.file import Partition
    from ..profile.offload import is_none
    from ..profile.sharded_vocabulary import vocabulary_of

    if is_none(step.offload):
        return None
    problem = schedule.problem
    layers = step.partition if isinstance(step.partition, Partition) else problem.layers or None
    routes, vocabulary = model_routes(problem), vocabulary_of(problem)
    return replace(step, placement=routes, partition=layers, vocabulary=vocabulary).copy_ratio(profile)


def _attention_gain(given: tuple[Profile, Step] | Problem, problem: Problem) -> AttentionGain | None:
    """What ranks make of each other's attention, where that was asked for."""
    from ..systems.exchange_gain import attention_gain, attention_gain_of

    if isinstance(given, tuple):
        return attention_gain_of(*given, problem) if given[1].attention_exchange else None
    found = attention_gain(problem)
    return found if found.handed else None


def _search_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What `solve` is told, from the command line."""
    method, solver = method_of(options.method)
    arguments = {"method": method, "solver": solver, "prefer": options.prefer, **search_limits(options)}
    if options.hint:
        from ..schedule import Schedule

        arguments["hint"] = Schedule.load(options.hint)
    return arguments


def _print_solved(
    options: argparse.Namespace, solved: Solved, tried: tuple[Tried, ...], bounds: dict[str, dict[str, int]]
) -> None:
    """What was found; `bounds`: see `_bounds_of_all`."""
    from ..show.solved_text import solved_as_text

    schedule, certificate = solved.schedule, solved.schedule.certificate
    assert certificate is not None
    if options.json:
        print_json(
            certificate.to_json()
            | {"source": schedule.problem.source}
            | solved.to_json()
            | ({"tried": [one.to_json() for one in tried]} if tried else {})
            | {what if what == LONGER else f"bound_of_every_{what}": every for what, every in bounds.items()}
        )
        return
    if "-" in options.output:
        return
    if tried:
        from ..show.search_text import tried_as_text

        print(tried_as_text(tried, certificate.objective), end="")
    if note := times_note(schedule.problem.source):
        print(note)
    print(solved_as_text(solved), end="")
    for what, every in bounds.items():
        if what == LONGER:
            said = ", ".join(f"{count} on {placement}" for placement, count in every.items())
            print(f"more slices take longer than the best, however long they are: proven from {said}")
            continue
        least = ", ".join(f"{exact_time(bound)} on {placement}" for placement, bound in every.items())
        print(f"each bound is for its own {what}; for every {what}: at least {least}; no certificate says that")
