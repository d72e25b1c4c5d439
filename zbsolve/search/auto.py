"""`--placement auto`, `--partition auto`, `--gathers auto`: the same layers on the same ranks, split, placed and gathered
differently; the best wins.

Which partition is best no sum of times decides: a stage's F delays the first microbatch, its B the last, its W fills gaps
or not, its memory limits how far ahead it may run. So partitions are solved: some by name, then, from the best, single
layers moved between stages for as long as the schedule gets shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..partition.by_name import SEARCHED, ordered_neighbours
from ..partition.file import Partition
from ..placement import parse
from ..profile.profile import Profile
from ..schedule import Schedule
from ..step import AUTO, Step
from ..util.errors import BadInput, Infeasible
from .least_peak import PREFER_TIME, memory_clock, value_clock
from .race import Race, Run
from .solver import check_options, less_memory, ready
from .state import State

LEAST_SECONDS = 0.01  # that are left for the search, however long building took
CANDIDATES = ("single", "loop", "loop4", "vee")
GATHERS = (1, 2, 4, 8)
LOOK_SHARE = 0.2  # the share of the time in which everything is looked at; the rest goes to those that can still win
MOVE_SHARE = 0.3  # the share for partitions that differ from the best by single layers
LOOK_EFFORT = 0.05  # effort for one of these
CLOSE_EFFORT, MAX_CLOSE_EFFORT, CLOSE_RUNS = 0.5, 4.0, 8  # effort for one that came close, doubled until; how many of them

Moved = dict[tuple[str, tuple[int, ...]], Run]  # by placement and layers


@dataclass(frozen=True, slots=True)
class Tried:
    """What one placement (and number of gathers, where several are tried) and partition reached: value and proven bound in
    µs (None where there is no schedule), for this partition alone; `why` it lost, "" for the winner. `seconds` were spent on
    it (0 where effort was the limit)."""

    placement: str
    partition: str
    layers: tuple[int, ...]
    value: int | None
    bound: int | None
    seconds: float
    why: str

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def solve_auto(
    profile: Profile,
    step: Step,
    *,
    seconds: float = 30.0,
    effort: float | None = None,
    hint: Schedule | None = None,
    progress: Callable[[str, State], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> tuple[Schedule, tuple[Tried, ...]]:
    """The best schedule over the step's placements and partitions, and what became of each.

    Placement "auto" is single, loop with 2 and 4 chunks and vee (those with as many stages as the partition has, where that
    is layers a stage); partition "auto" is all names, and single layers moved from the best of them; gathers "auto" is once
    a step and 2, 4 and 8 times. Each is looked at for an equal part of a fifth of `seconds` (or `effort`); up to three
    tenths go to moved layers; the rest to those whose bound does not rule them out: half of it to the best so far, half of
    what is left to the next, and so on; what nobody needs then goes to moved layers. Further `options` go to `solve`;
    `progress` is called with a name too; `stop` is asked between two solves. Of equal schedules the one with the least peak
    wins, and `prefer` and `peaks`, as in `solve`, are for the winner alone. Raises Infeasible where nothing fits the memory,
    BadInput where nothing can be built.
    """
    if effort is None and not seconds > 0:
        raise BadInput(f"seconds: {seconds:g} is not a positive time")
    step = replace(step, partition=step.partition or "balanced")
    began, every = time.monotonic(), step.partition == AUTO
    placed = [one for place in _placements(step) for one in _gathering(replace(step, placement=place), step.gathers == AUTO)]
    runs = [run for one, name in placed for run in _runs(profile, one, name, one is placed[0][0])]
    seconds = max(LEAST_SECONDS, seconds - (time.monotonic() - began))  # building took its part
    ready()
    prefer, peaks = options.pop("prefer", PREFER_TIME), options.pop("peaks", lambda found: None)
    check_options(options.get("method", "auto"), options.get("solver", "cbc"), prefer)
    amount = value_clock(seconds, effort, prefer).left
    race = Race(runs, amount, effort is None, options, hint, progress, stop, every)
    _look(race, amount)
    if every:
        moved: Moved = {}
        _move(race, profile, MOVE_SHARE * amount, moved)
        _spend(race)
        _move(race, profile, race.left, moved)
    _spend(race)
    best = race.leanest()
    if best is None:
        names: dict[str, list[str]] = {}
        for run in runs:
            names.setdefault(run.failed, []).append(race.label(run))
        what = "placement" if step.placement == AUTO else "partition" if step.partition == AUTO else "number of gathers"
        raise Infeasible(f"no {what} fits: " + "; ".join(f"{why} ({', '.join(of)})" for why, of in names.items()))
    assert best.schedule is not None
    plain = options.get("method", "auto") == "auto" and prefer is not None and not stop()
    left = None if not plain else memory_clock(seconds, effort, prefer, amount - race.left)
    tried = tuple(_tried(race, run, best) for run in race.runs)
    return less_memory(best.schedule, prefer or "", left, peaks), tried


def _placements(step: Step) -> list[Any]:
    """Those to try. Raises BadInput where none has as many stages as the partition says."""
    if step.placement != AUTO:
        return [step.placement]
    wanted = list(CANDIDATES if step.ranks > 1 else CANDIDATES[:1])
    if isinstance(step.partition, str):
        return wanted
    stages = len(step.partition.layers if isinstance(step.partition, Partition) else step.partition or ())
    wanted = [one for one in wanted if len(parse(one, step.ranks)) == stages]
    if not wanted:
        raise BadInput(f"layers: no placement of {step.ranks} ranks that is tried has {stages} stages")
    return wanted


def _gathering(step: Step, every: bool) -> list[tuple[Step, str]]:
    """The step and what it is called; where how often it gathers is left open, one for each number that is tried."""
    if not every:
        return [(step, step.title)]
    most = step.microbatches // len(step.routes)
    counts = [one for one in GATHERS if one == 1 or (one <= most and step.shards > 1)]
    return [(replace(step, gathers=one), f"{step.title} gathers={one}") for one in counts]


def _runs(profile: Profile, step: Step, place: str, first: bool) -> list[Run]:
    """One for each different partition; where there are too few layers, one that says so (an error for the first)."""
    why = step.too_few_layers(profile)
    if why and not first:
        return [Run(step, place, failed=why)]
    named: dict[tuple[int, ...], list[str]] = {}
    failed = []
    for one in SEARCHED if step.partition == AUTO else (step.partition,):
        name = one if isinstance(one, str) else "given"
        try:
            named.setdefault(replace(step, partition=one).counts(profile) or (), []).append(name)
        except Infeasible as error:
            failed.append(Run(step, place, name, failed=str(error)))
    return [_run(profile, replace(step, partition=c), place, "=".join(names)) for c, names in named.items()] + failed


def _run(profile: Profile, step: Step, place: str, name: str) -> Run:
    """The step with these layers a stage, built."""
    counts = step.counts(profile) or ()
    try:
        return Run(step, place, name, counts, step.problem(profile))
    except Infeasible as error:
        return Run(step, place, name, counts, failed=str(error))


def _look(race: Race, amount: float) -> None:
    """A short look at everything that can be built."""
    open_runs = [run for run in race.runs if run.problem is not None]
    for run in open_runs:
        if race.stop() and race.best() is not None:
            run.failed = "not tried: interrupted"
        else:
            race.solve(run, LOOK_SHARE * amount / len(open_runs))


def _move(race: Race, profile: Profile, amount: float, moved: Moved) -> None:
    """Layers moved one by one from the best run of each placement, the best placement first and with half of the time."""
    until = race.left - amount
    ranked = sorted((run for run in race.runs if run.schedule is not None), key=lambda run: run.value)
    starts = list({run.placement: run for run in reversed(ranked)}.values())
    starts.sort(key=lambda run: run.value)
    for i, start in enumerate(starts):
        best = race.best()
        if best is not None and (start is best or start.problem is None or start.problem.work < best.value):
            keep = until if i == len(starts) - 1 else (race.left + until) / 2
            end = _climb(race, profile, start, max(until, keep), moved)
            if end not in race.runs:
                race.runs = [run for run in race.runs if (run.placement, run.partition) != (end.placement, "moved")] + [end]


def _climb(race: Race, profile: Profile, run: Run, keep: float, moved: Moved) -> Run:
    """From `run`, one layer moved at a time, as long as a quick look at the moved partition is better, or longer and longer
    ones at those that came close and are not ruled out; until nothing is, or no more than `keep` is left. moved: all that
    was looked at, here and earlier."""
    costs = run.step.costs(profile)

    def ended() -> bool:
        return race.left <= keep or race.stop()

    def quicker() -> Run | None:
        for counts in ordered_neighbours(costs, run.layers):
            if (run.placement, counts) not in moved:
                if ended():
                    return None
                one = moved[run.placement, counts] = _run(
                    profile, replace(run.step, partition=counts), run.placement, "moved"
                )
                if one.problem is not None and one.problem.work < run.value:
                    # By effort also where time is the limit: alike looks, however busy the machine is.
                    race.solve(one, LOOK_EFFORT, run.schedule, method="greedy", effort=LOOK_EFFORT)
            if moved[run.placement, counts].beats(run):
                return moved[run.placement, counts]
        return None

    def closer() -> Run | None:
        effort, here = CLOSE_EFFORT, [one for (placement, _), one in moved.items() if placement == run.placement]
        while effort <= MAX_CLOSE_EFFORT and not ended():
            near = [one for one in here if one.schedule is not None and one.bound < run.value and one is not run]
            for one in (run, *sorted(near, key=lambda one: one.value)[:CLOSE_RUNS]) if near else ():
                if ended() or race.left - keep < effort:
                    return None
                if one.bound < one.value:
                    race.solve(one, effort, effort=effort)
                if one.beats(run):
                    return one
            effort *= 2
        return None

    while (better := quicker() or closer()) is not None:
        run = better
    return run


def _spend(race: Race) -> None:
    """The rest, to those that can still win, the best first."""
    order = sorted((run for run in race.runs if run.schedule is not None), key=lambda run: run.value)
    for i, run in enumerate(order):
        best = race.best()
        if best is None or race.stop() or race.left <= 0:
            return
        if run.bound < best.value:
            race.solve(run, race.left if i == len(order) - 1 else race.left / 2)


def _tried(race: Race, run: Run, best: Run) -> Tried:
    where, name = (run.placement, run.partition, run.layers), race.label(best)
    if run.schedule is None:
        return Tried(*where, None, None, round(run.seconds, 3), run.failed)
    why = ""
    if run is not best:
        why = f"{run.value / best.value - 1:.2%} longer than {name}" if run.value > best.value else f"equals {name}"
        if run.bound >= best.value:
            why += "; proven: no schedule there beats it"
    return Tried(*where, run.value, run.bound, round(run.seconds, 3), why)
