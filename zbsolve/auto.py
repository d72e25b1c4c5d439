"""`--placement auto` and `--partition auto`: the same layers on the same ranks, split and placed differently; the best wins.

Which partition is best no sum of times decides: a stage's F delays the first microbatch, its B the last, its W fills gaps
or not, its memory limits how far ahead it may run. So partitions are solved: some by name, then, from the best, single
layers moved between stages for as long as the schedule gets shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import placement as placements
from .assign import NAMES, Job, ordered_shifts, partition_of
from .errors import BadInput, Infeasible
from .graphs_recompute import Recompute
from .profile import Profile, parse_bytes
from .race import Race, Run
from .schedule import Schedule
from .search import ready
from .state import State

CANDIDATES = ("single", "loop", "loop4", "vee")
PARTITIONS = (*NAMES, "F+B")
LOOK = 0.2  # the share of the time in which everything is looked at; the rest goes to those that can still win
SHIFT = 0.3  # the share for partitions that differ from the best by single layers
QUICK = 0.05  # effort for one of these
LONGER, LONGEST, NEAR = 0.5, 4.0, 8  # effort for one that came close, doubled until; how many of them

Moved = dict[tuple[str, tuple[int, ...]], Run]  # by placement and layers


@dataclass(frozen=True, slots=True)
class Tried:
    """What one placement and partition reached: value and proven bound in µs (None where there is no schedule), for this
    partition alone; `why` it lost, "" for the winner. `seconds` were spent on it (0 where effort was the limit)."""

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
    ranks: int,
    microbatches: int,
    *,
    placement: str = "auto",
    partition: str | Sequence[int] = "balanced",
    memory: str | int | None = None,
    objective: str = "makespan",
    fused: bool = False,
    recompute: Recompute = (),
    seconds: float = 30.0,
    effort: float | None = None,
    hint: Schedule | None = None,
    progress: Callable[[str, State], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> tuple[Schedule, tuple[Tried, ...]]:
    """The best schedule over placements and partitions, and what became of each.

    placement: one, or "auto" for single, loop with 2 and 4 chunks and vee (those with as many stages as `partition` has,
    where that is layers a stage). partition: a name, layers a stage, or "auto"
    for all names and single layers moved from the best of them. Each is looked at for an equal part of a fifth of `seconds`
    (or `effort`); up to three tenths go to moved layers; the rest to those whose bound does not rule them out: half of it
    to the best so far, half of what is left to the next, and so on; what nobody needs then goes to moved layers. Further
    `options` go to `solve`; `progress` is called with a name too; `stop` is asked between two solves. Raises Infeasible
    where nothing fits the memory, BadInput where nothing can be built.
    """
    if effort is None and not seconds > 0:
        raise BadInput(f"seconds: {seconds} is not a positive time")
    if ranks < 1:
        raise BadInput(f"ranks: at least 1 is needed, got {ranks}")
    build = _Builder(profile, ranks, microbatches, memory, objective, fused, recompute)
    chosen = PARTITIONS if partition == "auto" else (partition,)
    wanted = [placement] if placement != "auto" else list(CANDIDATES if ranks > 1 else CANDIDATES[:1])
    if placement == "auto" and not isinstance(partition, str):
        wanted = [one for one in wanted if len(placements.parse(one, ranks)) == len(partition)]
        if not wanted:
            raise BadInput(f"layers: no placement of {ranks} ranks that is tried has {len(partition)} stages")
    runs = [run for one in wanted for run in build.runs(one, chosen, one == wanted[0])]
    ready()
    amount = seconds if effort is None else effort
    race = Race(runs, amount, effort is None, options, hint, progress, stop, partition == "auto")
    _look(race, amount)
    if partition == "auto":
        moved: Moved = {}
        _shift(race, build, SHIFT * amount, moved)
        _spend(race)
        _shift(race, build, race.left, moved)
    _spend(race)
    best = race.best()
    if best is None:
        names: dict[str, list[str]] = {}
        for run in runs:
            names.setdefault(run.failed, []).append(race.label(run))
        what = "partition" if placement != "auto" else "placement"
        raise Infeasible(f"no {what} fits: " + "; ".join(f"{why} ({', '.join(of)})" for why, of in names.items()))
    assert best.schedule is not None
    return best.schedule, tuple(_tried(race, run, best) for run in race.runs)


@dataclass(frozen=True)
class _Builder:
    """What all runs have in common."""

    profile: Profile
    ranks: int
    microbatches: int
    memory: str | int | None
    objective: str
    fused: bool
    recompute: Recompute

    def job(self, placement: str) -> Job:
        limit = self.profile.capacity if self.memory is None else parse_bytes(self.memory)
        return Job(self.profile, placements.parse_routes(placement, self.ranks), self.microbatches, limit, self.fused)

    def runs(self, placement: str, partitions: Sequence[str | Sequence[int]], first: bool) -> list[Run]:
        """One for each different partition; where there are too few layers, one that says so (an error for the first)."""
        job, found = self.job(placement), dict[tuple[int, ...], list[str]]()
        if not first and len(self.profile.layers) < job.stages:
            text = f"partition: {len(self.profile.layers)} layers do not make {job.stages} stages"
            return [Run(placement, failed=text)]
        failed = []
        for one in partitions:
            try:
                counts = partition_of(job, one) if isinstance(one, str) else tuple(one)
                found.setdefault(counts, []).append(one if isinstance(one, str) else "given")
            except Infeasible as error:
                failed.append(Run(placement, str(one), failed=str(error)))
        return [self.run(placement, "=".join(names), counts) for counts, names in found.items()] + failed

    def run(self, placement: str, partition: str, counts: tuple[int, ...]) -> Run:
        routes = placements.parse_routes(placement, self.ranks)
        step = (self.ranks, self.microbatches, routes, self.memory, self.objective)
        try:
            return Run(placement, partition, counts, self.profile.problem(*step, counts, self.fused, self.recompute))
        except Infeasible as error:
            return Run(placement, partition, counts, failed=str(error))


def _look(race: Race, amount: float) -> None:
    """A short look at everything that can be built."""
    open_runs = [run for run in race.runs if run.problem is not None]
    for run in open_runs:
        if race.stop() and race.best() is not None:
            run.failed = "not tried: interrupted"
        else:
            race.solve(run, LOOK * amount / len(open_runs))


def _shift(race: Race, build: _Builder, amount: float, moved: Moved) -> None:
    """Layers moved one by one from the best run of each placement, the best placement first and with half of the time."""
    until = race.left - amount
    ranked = sorted((run for run in race.runs if run.schedule is not None), key=lambda run: run.value)
    starts = list({run.placement: run for run in reversed(ranked)}.values())
    starts.sort(key=lambda run: run.value)
    for i, start in enumerate(starts):
        best = race.best()
        if best is not None and (start is best or start.problem is None or start.problem.work < best.value):
            keep = until if i == len(starts) - 1 else (race.left + until) / 2
            end = _climb(race, build, start, max(until, keep), moved)
            if end not in race.runs:
                race.runs = [run for run in race.runs if (run.placement, run.partition) != (end.placement, "moved")] + [end]


def _climb(race: Race, build: _Builder, run: Run, keep: float, moved: Moved) -> Run:
    """From `run`, one layer moved at a time, as long as a quick look at the moved partition is better, or longer and longer
    ones at those that came close and are not ruled out; until nothing is, or no more than `keep` is left. moved: all that
    was looked at, here and earlier."""
    job = build.job(run.placement)

    def ended() -> bool:
        return race.left <= keep or race.stop()

    def quicker() -> Run | None:
        for counts in ordered_shifts(job, run.layers):
            if (run.placement, counts) not in moved:
                if ended():
                    return None
                one = moved[run.placement, counts] = build.run(run.placement, "moved", counts)
                if one.problem is not None and one.problem.work < run.value:
                    # By effort also where time is the limit: alike looks, however busy the machine is.
                    race.solve(one, QUICK, run.schedule, method="greedy", effort=QUICK)
            if moved[run.placement, counts].beats(run):
                return moved[run.placement, counts]
        return None

    def closer() -> Run | None:
        effort, here = LONGER, [one for (placement, _), one in moved.items() if placement == run.placement]
        while effort <= LONGEST and not ended():
            near = [one for one in here if one.schedule is not None and one.bound < run.value and one is not run]
            for one in (run, *sorted(near, key=lambda one: one.value)[:NEAR]) if near else ():
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
