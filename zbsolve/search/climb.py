"""From the best step of a race to better ones, one change at a time, for as long as the schedule gets shorter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ..build.offload import NothingKept
from ..features.cuts import NotSliced
from ..profile.profile import Profile
from ..util.errors import Infeasible
from .race import Job, Race, Run
from .task_runner import ROUND

LOOK_EFFORT = 0.05  # effort for one of these
CLOSE_EFFORT, MAX_CLOSE_EFFORT, CLOSE_RUNS = 0.5, 4.0, 8  # effort for one that came close, doubled until; how many of them


def built(profile: Profile, run: Run) -> Run:
    """The run with the layers of its stages and its problem, or with why there is none."""
    try:
        run.layers = run.step.counts(profile) or ()
        run.problem = run.step.problem(profile)
    except (Infeasible, NothingKept, NotSliced) as error:  # what recomputes has nothing left to offload
        run.failed = str(error)
    return run


@dataclass
class Moves:
    """One way to change a step: `near` gives the runs beside one, unbuilt; of the first `breadth` the best is taken, of
    others the first that is better. All that were looked at are kept."""

    name: str
    near: Callable[[Run], Iterable[Run]]
    breadth: int = 1
    looked: dict[tuple[str, tuple[int, ...]], Run] = field(default_factory=dict)


def move(race: Race, profile: Profile, moves: Moves, amount: float) -> None:
    """Changes one by one from the best run of each placement, the best placement first and with half of the amount."""
    until = max(0.0, race.left - amount)
    ranked = sorted((run for run in race.runs if run.schedule is not None), key=lambda run: run.value)
    starts = list({run.place: run for run in reversed(ranked)}.values())
    starts.sort(key=lambda run: run.value)
    for i, start in enumerate(starts):
        best = race.best()
        if best is not None and (start is best or start.problem is None or start.problem.work < best.value):
            keep = until if i == len(starts) - 1 else (race.left + until) / 2
            end = _climb(race, profile, moves, start, max(until, keep))
            if end not in race.runs:
                race.runs = [run for run in race.runs if (run.place, run.moved) != (end.place, moves.name)] + [end]


def _climb(race: Race, profile: Profile, moves: Moves, run: Run, keep: float) -> Run:
    """From `run`, one change at a time, as long as a quick look at the changed step is better, or longer and longer ones at
    those that came close and are not ruled out; until nothing is, or no more than `keep` is left."""
    while (better := _quicker(race, profile, moves, run, keep) or _closer(race, moves, run, keep)) is not None:
        run = better
    return run


def _quicker(race: Race, profile: Profile, moves: Moves, run: Run, keep: float) -> Run | None:
    """What is better than `run` after a quick look."""
    best, known = run, moves.looked

    def looks() -> Iterator[Job]:
        nonlocal best
        for i, one in enumerate(moves.near(run)):
            if i >= moves.breadth and best is not run:
                return
            if (one.name, one.layers) in known:
                one = known[one.name, one.layers]
                best = one if one.beats(best) else best
                continue
            if _ended(race, keep):
                return
            known[one.name, one.layers] = built(profile, one)
            if one.problem is not None and one.problem.work < run.value:
                # By effort also where time is the limit: alike looks, however busy the machine is.
                yield Job(one, LOOK_EFFORT, run.schedule, {"method": "greedy", "effort": LOOK_EFFORT})

    for one in race.solve_each(looks(), size=min(ROUND, moves.breadth)):
        best = one if one.beats(best) else best
    return None if best is run else best


def _closer(race: Race, moves: Moves, run: Run, keep: float) -> Run | None:
    """What is better than `run` after a longer look."""
    effort, here = CLOSE_EFFORT, [one for one in moves.looked.values() if one.place == run.place]
    found: list[Run] = []

    def searches(near: list[Run]) -> Iterator[Job]:
        for one in (run, *sorted(near, key=lambda one: one.value)[:CLOSE_RUNS]):
            if one.beats(run):
                found.append(one)
            if found or _ended(race, keep) or race.left - keep < effort:
                return
            if one.bound < one.value:
                yield Job(one, effort, None, {"effort": effort})

    while effort <= MAX_CLOSE_EFFORT and not _ended(race, keep) and race.left - keep >= effort:
        near = [one for one in here if one.schedule is not None and one.bound < run.value and one is not run]
        if not near:
            return None
        for one in race.solve_each(searches(near), size=1):
            if one.beats(run):
                found.append(one)
        if found:
            return min(found, key=lambda one: one.value)
        effort *= 2
    return None


def _ended(race: Race, keep: float) -> bool:
    """Whether no more than `keep` is left. Building took time too."""
    race.settle()
    return race.left <= keep or race.stop()
