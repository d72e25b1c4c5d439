"""From the best step of a race to better ones, one change at a time, for as long as the schedule gets shorter; and how many
parts of which kind, where a feature has a `Ladder` (`--slices auto`); and layers moved together with the order.

Numbers double from the best, of every kind, for as long as the step gets shorter by a share worth it. Then numbers
between the best and its neighbours are tried, twice. Each is a row of the race, and so are the numbers that were not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..features.feature import Ladder
from ..greedy.annealing import Annealing, Layers, anneal_targets
from ..greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph
from ..greedy.blocks.block_arms import SECONDS_PER_DECODED_PASS
from ..greedy.blocks.building_block import shift_lengths
from ..greedy.decoding import decode, to_schedule
from ..layer import layer_cuts
from ..partition.stage_costs import StageCosts
from ..profile.profile import Profile
from ..schedule import Schedule
from ..step import Step
from ..util.clock import Clock
from ..util.errors import Infeasible, Unfit
from ..util.text import rows_of_numbers
from .race import Job, Race, Run
from .task_runner import ROUND

LOOK_EFFORT = 0.05  # effort for one of these
CLOSE_EFFORT, MAX_CLOSE_EFFORT, CLOSE_RUNS = 0.5, 4.0, 8  # effort for one that came close, doubled until; how many of them


def built(profile: Profile, run: Run) -> Run:
    """The run with the layers of its stages and its problem, or with why there is none."""
    try:
        run.layers = run.step.counts(profile) or ()
        run.problem = run.step.problem(profile)
    except (Infeasible, Unfit) as error:  # what recomputes has nothing left to offload
        run.failed = str(error)
    return run


@dataclass
class Way:
    """One way to change a step (see `features.feature.Moves`), with all that were looked at. `near` gives the runs beside
    one, unbuilt."""

    name: str
    near: Callable[[Run], Iterable[Run]]
    breadth: int = 1
    looked: dict[tuple[str, tuple[int, ...]], Run] = field(default_factory=dict)


def move(race: Race, profile: Profile, way: Way, amount: float) -> None:
    """Changes one by one from the best run of each placement, the best placement first and with half of the amount."""
    starts = {run.place: run for run in reversed(race.ranked())}.values()
    for run, keep in _in_turn(race, sorted(starts, key=lambda run: run.value), amount):
        # A quick look at the changed steps, then longer and longer ones at those that came close and are not ruled out.
        while (better := _quicker(race, profile, way, run, keep) or _closer(race, way, run, keep)) is not None:
            run = better
        if run not in race.runs:
            race.runs = [other for other in race.runs if (other.place, other.moved) != (run.place, way.name)] + [run]


def _in_turn(race: Race, starts: Sequence[Run], amount: float) -> Iterator[tuple[Run, float]]:
    """Of these runs those that may still win, and what each is to leave: the first has half of the amount, the next half of
    the rest, and the last what there is."""
    until = max(0.0, race.left - amount)
    for i, start in enumerate(starts):
        best = race.best()
        if best is not None and (start is best or start.problem is None or start.problem.work < best.value):
            yield start, max(until, until if i == len(starts) - 1 else (race.left + until) / 2)


def _quicker(race: Race, profile: Profile, way: Way, run: Run, keep: float) -> Run | None:
    """What is better than `run` after a quick look."""
    best, known = run, way.looked

    def looks() -> Iterator[Job]:
        nonlocal best
        for i, tried in enumerate(way.near(run)):
            if i >= way.breadth and best is not run:
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

    for other_run in race.solve_each(looks(), size=min(ROUND, way.breadth)):
        best = other_run if other_run.beats(best) else best
    return None if best is run else best


def _closer(race: Race, way: Way, run: Run, keep: float) -> Run | None:
    """What is better than `run` after a longer look."""
    if race.order:  # a longer look finds no other order
        return None
    effort, here = CLOSE_EFFORT, [other_run for other_run in way.looked.values() if other_run.place == run.place]
    runs: list[Run] = []

    def searches(near: list[Run]) -> Iterator[Job]:
        for other_run in (run, *sorted(near, key=lambda start: start.value)[:CLOSE_RUNS]):
            if other_run.beats(run):
                runs.append(other_run)
            if runs or _ended(race, keep) or race.left - keep < effort:
                return
            if other_run.bound < other_run.value:
                yield Job(other_run, effort, None, {"effort": effort})

    while effort <= MAX_CLOSE_EFFORT and not _ended(race, keep) and race.left - keep >= effort:
        near = [other for other in here if other.schedule is not None and other.bound < run.value and other is not run]
        if not near:
            return None
        for other_run in race.solve_each(searches(near), size=1):
            if other_run.beats(run):
                runs.append(other_run)
        if runs:
            return min(runs, key=lambda other: other.value)
        effort *= 2
    return None


def _ended(race: Race, keep: float) -> bool:
    """Whether no more than `keep` is left. Building took time too."""
    race.settle()
    return race.left <= keep or race.stop()


# --- Numbers of parts ---


WORTH_DOUBLING = 0.001  # of a step: as long as twice as many parts save so much, twice as many again are tried
ROUNDS, BETWEEN = 2, 3  # how often numbers between neighbours are looked at; how many of each kind on each side
NOT_TRIED = "not tried"

Parts = tuple[int, str]  # how many, and of which kind


def try_more(race: Race, profile: Profile, open_step: Step, ladder: Ladder, amount: float) -> None:
    """Further numbers, from the best run of each other choice, the best choice first and with half of the amount. open_step:
    leaves them open. At the end the race has a run for the numbers that were not tried, too."""
    starts = dict[str, Run]()
    for run in race.ranked():
        starts.setdefault(_others(run, ladder), run)
    for start, keep in _in_turn(race, [*starts.values()], amount):
        of_parts = ladder.kinds(start.step, open_step), ladder.most(start.step, profile)
        near = _Near(race, profile, ladder, start, keep, *of_parts)
        near.double()
        for _ in range(ROUNDS):
            near.look_between()
        race.runs += near.left_out()


def by_number(runs: Sequence[Run], ladder: Ladder) -> list[Run]:
    """Runs in the order of their numbers of parts, those of one other choice together; as they are where none differs."""
    if len({ladder.of(run.step) for run in runs}) == 1:
        return list(runs)
    others = list(dict.fromkeys(_others(run, ladder) for run in runs))

    def place(run: Run) -> tuple[Any, ...]:
        return run.failed.startswith(NOT_TRIED), others.index(_others(run, ladder)), *ladder.of(run.step)

    return sorted(runs, key=place)


def _named(run: Run, ladder: Ladder) -> str:
    """What a run's parts are called in its name."""
    return ladder.at(run.step, *ladder.of(run.step))[0]


def _others(run: Run, ladder: Ladder) -> str:
    """What a run is called but for its parts."""
    return run.name.partition(f" {ladder.name}")[0] + run.name.partition(_named(run, ladder))[2]


@dataclass
class _Near:
    """Runs that differ from `start` in their parts alone, while more than `keep` is left to spend. kinds: with words; most:
    parts at most."""

    race: Race
    profile: Profile
    ladder: Ladder
    start: Run
    keep: float
    kinds: Mapping[str, str]
    most: int

    def double(self) -> None:
        """Twice as many, for as long as that saves what is worth it, and time allows: looks at twice as many take
        about four times as long."""
        while True:
            best, before = self._best(), self.race.left
            self._look((2 * self.ladder.of(best.step)[0], kind) for kind in self.kinds)
            slow = not self.race.runner.counted and 4 * (before - self.race.left) > self.race.left - self.keep
            if slow or self._best().value > (1 - WORTH_DOUBLING) * best.value:
                return

    def look_between(self) -> None:
        """Some numbers between the best and its neighbours, of each kind."""
        best, wanted = self.ladder.of(self._best().step)[0], list[Parts]()
        for kind in self.kinds:
            known = self._known(kind)
            below = max((number for number in known if number < best), default=1)
            above = min((number for number in known if number > best), default=2 * best)
            for low, high in ((below, best), (best, above)):
                inside = np.linspace(low, high, BETWEEN + 2)[1:-1].round().astype(int).tolist()
                wanted += [(number, kind) for number in (best, *inside) if low < number < high or number == best]
        self._look(dict.fromkeys(wanted))

    def left_out(self) -> list[Run]:
        """A run without a schedule for each kind, which says what numbers were not tried."""
        runs, most = [], self.most
        for kind, words in self.kinds.items():
            known = self._known(kind)
            skipped = sorted(set(range(2, max(known, default=1))) - known)
            larger = [f"{max(known, default=1) + 1} or more"] * (max(known, default=1) < most)
            if skipped or larger:
                run = self._changed(skipped[0] if skipped else max(known, default=1) + 1, kind)
                run.name = run.name.replace(_named(run, self.ladder), f" {self.ladder.name} {words}")
                run.failed = f"{NOT_TRIED}: {', '.join([*rows_of_numbers(skipped), *larger])}"
                runs.append(run)
        return runs

    def _alike(self) -> list[Run]:
        choice = _others(self.start, self.ladder)
        return [run for run in self.race.runs if _others(run, self.ladder) == choice]

    def _known(self, kind: str) -> set[int]:
        """Numbers that were tried of a kind."""
        parts = (self.ladder.of(run.step) for run in self._alike())
        return {count for count, of in parts if of == kind and count > 1}

    def _best(self) -> Run:
        return min((run for run in self._alike() if run.schedule is not None), key=lambda run: run.value)

    def _changed(self, count: int, kind: str) -> Run:
        """The start in other parts, not built."""
        now, (then, step) = _named(self.start, self.ladder), self.ladder.at(self.start.step, count, kind)
        name, place = (text.replace(now, then) for text in (self.start.name, self.start.place))
        return Run(step, name, self.start.partition, place=place, moved=self.ladder.name)

    def _look(self, wanted: Iterable[Parts]) -> None:
        """A quick look at each of these that was not tried yet. By effort also where time is the limit: alike looks, however
        busy the machine is."""

        def looks() -> Iterator[Job]:
            for count, kind in wanted:
                if _ended(self.race, self.keep):
                    return
                if 1 < count <= self.most and count not in self._known(kind):
                    self.race.runs.append(run := built(self.profile, self._changed(count, kind)))
                    if run.problem is not None:
                        yield Job(run, LOOK_EFFORT, None, self.race.look(LOOK_EFFORT))

        for _ in self.race.solve_each(looks()):
            pass
        self.race.settle()


# --- Layers moved together with the order ---

TURNS = ((True, 1.0), (False, 1.0), (False, 0.5), (False, 0.3))  # layers alone; heat, in times of a layer


class Moved(NamedTuple):
    """Layers of each stage, a schedule of another split whose order is for them, and what a step takes with both, µs."""

    layers: tuple[int, ...]
    schedule: Schedule
    value: int


def moved_layers(schedule: Schedule, costs: StageCosts, target: int, clock: Clock, seed: int) -> Moved | None:
    """Layers and an order that make a shorter step than `schedule`; None where none are found. costs: of the step; target:
    µs at which to stop.

    A split that is looked at alone has to be solved well before it shows what it is worth. Here a trial costs one decoding:
    first only layers move, and ranks take passes as they did; then starts move too. Each turn goes on from the best, with
    less heat."""
    problem = schedule.problem
    graph = microbatch_graph(problem)
    if graph is None:
        return None
    graph = graph._replace(**{name: getattr(graph, name).copy() for name in ("duration", "taken", "freed", "capacity")})
    layers = _layers_of(graph, schedule, costs)
    decoded = decode(graph, np.asarray(schedule.timeline().start, np.int64)[graph.passes])
    mean, shifts = layers.time[:, -1].sum() / layers.counts.sum(), shift_lengths(graph)
    cost = problem.microbatches * len(graph.rank) * SECONDS_PER_DECODED_PASS
    for turn, (alone, heat) in enumerate(TURNS):
        if decoded is None or decoded.value <= target or clock.left <= 0:
            break
        rounds, at = max(1, int(clock.left / (len(TURNS) - turn) / cost)), clock.used
        how = Annealing(shifts, target, rounds, heat * mean, seed + turn, clock.ended)
        decoded = anneal_targets(graph, decoded, how, layers._replace(alone=alone))
        clock.spend(rounds * cost)
        cost = cost if clock.counted else max(1e-7, (clock.used - at) / rounds)
    if decoded is None or decoded.value >= schedule.timeline().value:
        return None
    return Moved(tuple(layers.counts.tolist()), to_schedule(problem, graph, decoded.order), decoded.value)


def _layers_of(graph: MicrobatchGraph, schedule: Schedule, costs: StageCosts) -> Layers:
    """What layers take and hold, whatever stages they are on."""
    problem, first = schedule.problem, graph.passes[:, 0]
    counts, cuts, stage = np.array(problem.layers), np.array(layer_cuts(problem.layers)), problem.passes.stage[first]
    time, held = costs.layer_totals
    row = np.unique(problem.passes.kind[first], return_inverse=True)[1]
    room = graph.capacity + np.bincount(costs.routes[0], np.diff(held[2][cuts])).astype(np.int64)
    beside = graph.duration - (time[row, cuts[stage + 1]] - time[row, cuts[stage]])
    return Layers(counts, stage.astype(np.int64), row.ravel(), time, held, room, beside, alone=False)
