"""From the best step of a race to better ones, one change at a time, for as long as the schedule gets shorter; and how many
slices, of which kind (`--slices auto`).

Numbers of slices double from the best, of every kind, for as long as the step gets shorter by a share worth it. Then numbers
between the best and its neighbours are tried, twice. Each is a row of the race, and so are the numbers that were not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..build.offload import NothingKept
from ..features.cuts import EVEN_WORK, MAX_SLICES, SEQUENCE, NotSliced, said_of, tokens_of
from ..features.feature import is_auto
from ..profile.profile import Profile
from ..step import Step
from ..util.errors import Infeasible
from ..util.text import rows_of_numbers
from .choices import EVEN, EXCHANGE, in_slices, kinds_of_slices, most_slices
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
        for i, tried in enumerate(moves.near(run)):
            if i >= moves.breadth and best is not run:
                return
            if (tried.name, tried.layers) in known:
                tried = known[tried.name, tried.layers]
                best = tried if tried.beats(best) else best
                continue
            if _ended(race, keep):
                return
            known[tried.name, tried.layers] = built(profile, tried)
            if tried.problem is not None and tried.problem.work < run.value:
                # By effort also where time is the limit: alike looks, however busy the machine is.
                yield Job(tried, LOOK_EFFORT, run.schedule, race.look(LOOK_EFFORT))

    for one in race.solve_each(looks(), size=min(ROUND, moves.breadth)):
        best = one if one.beats(best) else best
    return None if best is run else best


def _closer(race: Race, moves: Moves, run: Run, keep: float) -> Run | None:
    """What is better than `run` after a longer look."""
    if race.order:  # a longer look finds no other order
        return None
    effort, here = CLOSE_EFFORT, [one for one in moves.looked.values() if one.place == run.place]
    runs: list[Run] = []

    def searches(near: list[Run]) -> Iterator[Job]:
        for one in (run, *sorted(near, key=lambda start: start.value)[:CLOSE_RUNS]):
            if one.beats(run):
                runs.append(one)
            if runs or _ended(race, keep) or race.left - keep < effort:
                return
            if one.bound < one.value:
                yield Job(one, effort, None, {"effort": effort})

    while effort <= MAX_CLOSE_EFFORT and not _ended(race, keep) and race.left - keep >= effort:
        near = [one for one in here if one.schedule is not None and one.bound < run.value and one is not run]
        if not near:
            return None
        for one in race.solve_each(searches(near), size=1):
            if one.beats(run):
                runs.append(one)
        if runs:
            return min(runs, key=lambda one: one.value)
        effort *= 2
    return None


def _ended(race: Race, keep: float) -> bool:
    """Whether no more than `keep` is left. Building took time too."""
    race.settle()
    return race.left <= keep or race.stop()


# --- Numbers of slices ---


WORTH_DOUBLING = 0.001  # of a step: as long as twice as many slices save so much, twice as many again are tried
ROUNDS, BETWEEN = 2, 3  # how often numbers between neighbours are looked at; how many of each kind on each side
NOT_TRIED, OF_EQUAL_WORK = "not tried", "of equal work"

Sliced = tuple[int, str]  # how many slices, and of which kind


def try_more(race: Race, profile: Profile, said: Step, amount: float) -> None:
    """Further numbers of slices, from the best run of each other choice, the best choice first and with half of the amount.
    said: the step; nothing is tried where it does not leave them open. At the end the race has a run for the numbers that
    were not tried, too."""
    until, starts = max(0.0, race.left - amount), _best_of_each(race) if is_auto(said.slices) else []
    for i, start in enumerate(starts):
        best = race.best()
        if best is None or (start is not best and start.problem is not None and start.problem.work >= best.value):
            continue
        keep = until if i == len(starts) - 1 else (race.left + until) / 2
        near = _Near(race, profile, said, start, max(until, keep))
        near.double()
        for _ in range(ROUNDS):
            near.look_between()
        race.runs += near.left_out()


def by_slices(runs: Sequence[Run]) -> list[Run]:
    """Runs in the order of their numbers of slices, those of one other choice together; as they are where none differs."""
    if len({_sliced(run) for run in runs}) == 1:
        return list(runs)
    others = list(dict.fromkeys(map(_others, runs)))
    return sorted(runs, key=lambda run: (run.failed.startswith(NOT_TRIED), others.index(_others(run)), *_sliced(run)))


def _sliced(run: Run) -> Sliced:
    said = said_of(run.step.slices)
    return said.number, EVEN_WORK if said.even_work else EXCHANGE if run.step.attention_exchange else EVEN


def _named(run: Run) -> str:
    """What a run's slices are called in its name."""
    return in_slices(run.step, *_sliced(run))[0]


def _others(run: Run) -> str:
    """What a run is called but for its slices."""
    return run.name.partition(" slices")[0] + run.name.partition(_named(run))[2]


def _best_of_each(race: Race) -> list[Run]:
    """The best run of each other choice, the best of all first."""
    ranked = sorted((run for run in race.runs if run.schedule is not None), key=lambda run: run.value)
    found: dict[str, Run] = {}
    for run in ranked:
        found.setdefault(_others(run), run)
    return list(found.values())


class _Near:
    """Runs that differ from `start` in their slices alone, while more than `keep` is left to spend."""

    def __init__(self, race: Race, profile: Profile, said: Step, start: Run, keep: float) -> None:
        self.race, self.profile, self.start, self.keep = race, profile, start, keep
        self.kinds = kinds_of_slices(replace(start.step, attention_exchange=said.attention_exchange))
        self.most = min(tokens_of(profile.facts.get(SEQUENCE)) or MAX_SLICES, most_slices(start.step))

    def double(self) -> None:
        """Twice as many slices, for as long as that saves what is worth it, and time allows: looks at twice as many take
        about four times as long."""
        while True:
            best, before = self._best(), self.race.left
            self._look((2 * _sliced(best)[0], kind) for kind in self.kinds)
            slow = not self.race.runner.counted and 4 * (before - self.race.left) > self.race.left - self.keep
            if slow or self._best().value > (1 - WORTH_DOUBLING) * best.value:
                return

    def look_between(self) -> None:
        """Some numbers between the best and its neighbours, of each kind."""
        best, wanted = _sliced(self._best())[0], list[Sliced]()
        for kind in self.kinds:
            known = self._known(kind)
            below = max((one for one in known if one < best), default=1)
            above = min((one for one in known if one > best), default=2 * best)
            for low, high in ((below, best), (best, above)):
                inside = np.linspace(low, high, BETWEEN + 2)[1:-1].round().astype(int).tolist()
                wanted += [(one, kind) for one in (best, *inside) if low < one < high or one == best]
        self._look(dict.fromkeys(wanted))

    def left_out(self) -> list[Run]:
        """A run without a schedule for each kind, which says what numbers were not tried."""
        found = []
        for kind in self.kinds:
            known = self._known(kind)
            rest = sorted(set(range(2, max(known, default=1))) - known)
            larger = [f"{max(known, default=1) + 1} or more"] * (max(known, default=1) < self.most)
            if rest or larger:
                run = self._changed(rest[0] if rest else max(known, default=1) + 1, kind)
                run.name = run.name.replace(_named(run), f" slices {OF_EQUAL_WORK if kind == EVEN_WORK else kind}")
                run.failed = f"{NOT_TRIED}: {', '.join([*rows_of_numbers(rest), *larger])}"
                found.append(run)
        return found

    def _alike(self) -> list[Run]:
        choice = _others(self.start)
        return [run for run in self.race.runs if _others(run) == choice]

    def _known(self, kind: str) -> set[int]:
        """Numbers that were tried of a kind."""
        return {count for count, of in map(_sliced, self._alike()) if of == kind and count > 1}

    def _best(self) -> Run:
        return min((run for run in self._alike() if run.schedule is not None), key=lambda run: run.value)

    def _changed(self, count: int, kind: str) -> Run:
        """The start in other slices, not built."""
        now, (then, step) = _named(self.start), in_slices(self.start.step, count, kind)
        name, place = (said.replace(now, then) for said in (self.start.name, self.start.place))
        return Run(step, name, self.start.partition, place=place, moved="slices")

    def _look(self, wanted: Iterable[Sliced]) -> None:
        """A quick look at each of these that was not tried yet. By effort also where time is the limit: alike looks, however
        busy the machine is."""

        def looks() -> Iterator[Job]:
            for count, kind in wanted:
                self.race.settle()
                if self.race.left <= self.keep or self.race.stop():
                    return
                if 1 < count <= self.most and count not in self._known(kind):
                    self.race.runs.append(one := built(self.profile, self._changed(count, kind)))
                    if one.problem is not None:
                        yield Job(one, LOOK_EFFORT, None, self.race.look(LOOK_EFFORT))

        for _ in self.race.solve_each(looks()):
            pass
        self.race.settle()
