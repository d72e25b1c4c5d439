"""Three ways from the best step of a race to better ones: one change at a time, as long as the schedule gets shorter; other
numbers of parts, if a feature has a `Ladder`; and layers moved together with the order.

A number of parts is doubled from the best, for each kind of parts, as long as the step gets shorter by enough. Then numbers
between the best and its neighbours are tried, twice. Each number is a run of the race; one more run names those not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..features.feature import Ladder
from ..greedy.annealing import Annealing, Layers, anneal_targets
from ..greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph
from ..greedy.blocks.building_block import shift_lengths
from ..greedy.decoding import SECONDS_PER_DECODED_PASS, decode, to_schedule
from ..partition.layer import layer_cuts
from ..partition.stage_costs import StageCosts
from ..profile.profile import Profile
from ..profile.step import Step
from ..schedule import Schedule
from ..util.clock import Clock
from ..util.errors import Infeasible, Unfit
from ..util.text import rows_of_numbers
from .race import Job, Race, Run
from .task_runner import ROUND

LOOK_EFFORT = 0.05  # effort of a quick look at one run
CLOSE_EFFORT, MAX_CLOSE_EFFORT, CLOSE_RUNS = 0.5, 4.0, 8  # effort of a longer look, doubled up to the second; runs at most


def built(profile: Profile, run: Run) -> Run:
    """The run after its layers and its problem are built, or with `failed` if there is none."""
    try:
        run.layers = run.step.counts(profile) or ()
        run.problem = run.step.problem(profile)
    except (Infeasible, Unfit) as error:  # such as a stage that keeps nothing which it could copy
        run.failed = str(error)
    return run


@dataclass
class Way:
    """One way to change a step (see `features.feature.Moves`). near: gives the changed runs of one, not built. breadth: how
    many of them are looked at even after a better one. looked: all runs so far, by name and layers."""

    name: str
    near: Callable[[Run], Iterable[Run]]
    breadth: int = 1
    looked: dict[tuple[str, tuple[int, ...]], Run] = field(default_factory=dict)


def move(race: Race, profile: Profile, way: Way, amount: float) -> None:
    """Change steps one by one, from the best run of each place. The best place comes first, with half of the amount."""
    starts = {run.place: run for run in reversed(race.ranked())}.values()
    for run, keep in _in_turn(race, sorted(starts, key=lambda run: run.value), amount):
        # A quick look at the changed steps, then longer and longer looks at those that may still be better.
        while (better := _quicker(race, profile, way, run, keep) or _closer(race, way, run, keep)) is not None:
            run = better
        if run not in race.runs:
            race.runs = [other for other in race.runs if (other.place, other.moved) != (run.place, way.name)] + [run]


def _in_turn(race: Race, starts: Sequence[Run], amount: float) -> Iterator[tuple[Run, float]]:
    """The starts that may still win, each with the time to leave: each may use half of what is left, the last all of it."""
    until = max(0.0, race.left - amount)
    for i, start in enumerate(starts):
        best = race.best()
        if best is not None and (start is best or start.problem is None or start.problem.work < best.value):
            yield start, max(until, until if i == len(starts) - 1 else (race.left + until) / 2)


def _quicker(race: Race, profile: Profile, way: Way, run: Run, keep: float) -> Run | None:
    """A changed run that is better than `run` after a quick look, or None. keep: the time to leave."""
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
                # By effort even if time is the limit, so that looks are comparable however busy the machine is.
                yield Job(tried, LOOK_EFFORT, run.schedule, race.look(LOOK_EFFORT))

    for other_run in race.solve_each(looks(), size=min(ROUND, way.breadth)):
        best = other_run if other_run.beats(best) else best
    return None if best is run else best


def _closer(race: Race, way: Way, run: Run, keep: float) -> Run | None:
    """A changed run that is better than `run` after a longer look, or None. keep: the time to leave."""
    if race.order:  # a longer look finds no other order
        return None
    effort, at_place = CLOSE_EFFORT, [other_run for other_run in way.looked.values() if other_run.place == run.place]
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
        near = [other for other in at_place if other.schedule is not None and other.bound < run.value and other is not run]
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
    """Whether no more time than `keep` is left, or the race stops."""
    race.settle()
    return race.left <= keep or race.stop()


# --- Numbers of parts ---


WORTH_DOUBLING = 0.001  # numbers double as long as that saves this share of a step
ROUNDS, BETWEEN = 2, 3  # rounds of numbers between neighbours; numbers for each kind on each side
NOT_TRIED = "not tried"

Parts = tuple[int, str]  # how many, and of which kind


def try_more(race: Race, profile: Profile, open_step: Step, ladder: Ladder, amount: float) -> None:
    """Try further numbers of parts, from the best run of each choice of all else; the best comes first, with half of the
    amount. open_step: the step in which the number is open. Adds a run that names the numbers which were not tried."""
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
    """Runs sorted by their numbers of parts, grouped by all other choices; unchanged if all have the same parts."""
    if len({ladder.of(run.step) for run in runs}) == 1:
        return list(runs)
    others = list(dict.fromkeys(_others(run, ladder) for run in runs))

    def place(run: Run) -> tuple[Any, ...]:
        return run.failed.startswith(NOT_TRIED), others.index(_others(run, ladder)), *ladder.of(run.step)

    return sorted(runs, key=place)


def _named(run: Run, ladder: Ladder) -> str:
    """The words for a run's parts in its name."""
    return ladder.at(run.step, *ladder.of(run.step))[0]


def _others(run: Run, ladder: Ladder) -> str:
    """The name of a run without the words for its parts."""
    return run.name.partition(f" {ladder.name}")[0] + run.name.partition(_named(run, ladder))[2]


@dataclass
class _Near:
    """Runs that differ from `start` only in their parts, tried while more time than `keep` is left. kinds: kind of parts →
    words. most: the largest number of parts."""

    race: Race
    profile: Profile
    ladder: Ladder
    start: Run
    keep: float
    kinds: Mapping[str, str]
    most: int

    def double(self) -> None:
        """Double the number as long as that saves enough and time allows. Twice as many parts take four times as long."""
        while True:
            best, before = self._best(), self.race.left
            self._look((2 * self.ladder.of(best.step)[0], kind) for kind in self.kinds)
            slow = not self.race.runner.counted and 4 * (before - self.race.left) > self.race.left - self.keep
            if slow or self._best().value > (1 - WORTH_DOUBLING) * best.value:
                return

    def look_between(self) -> None:
        """Look at some numbers between the best and its neighbours, for each kind."""
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
        """For each kind a run without a schedule that names the numbers which were not tried."""
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
        """The numbers of a kind that were tried."""
        parts = (self.ladder.of(run.step) for run in self._alike())
        return {count for count, of in parts if of == kind and count > 1}

    def _best(self) -> Run:
        return min((run for run in self._alike() if run.schedule is not None), key=lambda run: run.value)

    def _changed(self, count: int, kind: str) -> Run:
        """`start` in other parts, not built."""
        now, (then, step) = _named(self.start, self.ladder), self.ladder.at(self.start.step, count, kind)
        name, place = (text.replace(now, then) for text in (self.start.name, self.start.place))
        return Run(step, name, self.start.partition, place=place, moved=self.ladder.name)

    def _look(self, wanted: Iterable[Parts]) -> None:
        """A quick look at each of these parts that was not tried yet, by effort as in `_quicker`."""

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

TURNS = ((True, 1.0), (False, 1.0), (False, 0.5), (False, 0.3))  # whether only layers move; temperature in layer times


class Moved(NamedTuple):
    """layers: of each stage. schedule: one of another split, whose order is meant for these layers. value: µs of the step
    with both."""

    layers: tuple[int, ...]
    schedule: Schedule
    value: int


def moved_layers(schedule: Schedule, costs: StageCosts, target: int, clock: Clock, seed: int) -> Moved | None:
    """Layers and an order that make a shorter step than `schedule`; None if none are found, or passes are of more kinds than
    layers have times of. costs: of the step. target: µs at which to stop.

    A split that is solved by itself must be solved well before its value is known. Here a trial costs one decoding. First
    only layers move and ranks keep their order; then start times too. Each goes on from the best, at a lower temperature."""
    problem = schedule.problem
    graph = microbatch_graph(problem)
    if graph is None or len(np.unique(problem.passes.kind[graph.passes])) > len(costs.layer_totals[0]):
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
    """Times and bytes of single layers for annealing, from the costs of stages."""
    problem, first = schedule.problem, graph.passes[:, 0]
    counts, cuts, stage = np.array(problem.layers), np.array(layer_cuts(problem.layers)), problem.passes.stage[first]
    time, held = costs.layer_totals
    row = np.unique(problem.passes.kind[first], return_inverse=True)[1]
    room = graph.capacity + np.bincount(costs.routes[0], np.diff(held[2][cuts])).astype(np.int64)
    beside = graph.duration - (time[row, cuts[stage + 1]] - time[row, cuts[stage]])
    return Layers(counts, stage.astype(np.int64), row.ravel(), time, held, room, beside, alone=False)
