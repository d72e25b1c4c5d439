"""`solve_many`: a schedule for very many microbatches, made from a short order whose middle repeats, and its lower bound.

A *round* is a part of the order that repeats with a fixed period. Every source here makes a short order of `few`
microbatches: a named schedule, a repeated building block, or a small step that was solved and whose steady state was
repeated (`search.extension`). If the short order has rounds, further copies of the round stretch it to all
microbatches. Each copy adds one period (proof: `long_steps.check`). The bound needs one microbatch (`ilp.bounds.many`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

import numpy as np

from ..build.mixing import with_microbatches
from ..greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph, of_length
from ..greedy.blocks.building_block import microbatches_in_flight
from ..greedy.blocks.meshed import MeshedBlock, meshed_blocks, meshing_seconds
from ..greedy.blocks.packing import least_packed
from ..greedy.decoding import SECONDS_PER_DECODED_PASS, decode, repeated_targets, serial_order
from ..ilp.bounds.bound import AREA, Bound
from ..ilp.bounds.many import bound_of_many, check_plain
from ..long_steps.check import earliest_starts, peaks, value_of
from ..long_steps.files import MAX_PASSES
from ..long_steps.repeated import RepeatedSchedule, Round, find_round, times_apart
from ..problem import Ints, Problem
from ..schedule import Certificate
from ..schedule.handover import lacking
from ..systems.table import LongSystem, lane_order, long_systems_of, presets_of
from ..util.clock import Clock
from ..util.errors import BadInput, Infeasible, NotFound, interruption
from .extension import CUT_RULES, targets_cut_by_time
from .solver import ready, solve

EVERY = (1, 2, 3, 4, 6, 8, 12)  # round sizes that are tried, in microbatches
MULTIPLE = 24  # a multiple of all these sizes
MAX_MULTIPLE = 512  # where the common multiple of MULTIPLE and the ranks is larger, lengths are chosen by MULTIPLE alone
NEAR = 2e-4  # of a round's period: starts that drift by more may drift less in a longer order
SECONDS_PER_SHOWN_PASS = 2e-6  # the worst time of decoding; with less time left it does not begin

Progress = Callable[[str], None]


@dataclass
class ManySearch:
    """The state of `solve_many`: what is searched, how much time is left, and the best order so far."""

    one: Problem  # the step of one microbatch
    microbatches: int  # of the whole step
    graph: MicrobatchGraph  # of `one`
    bound: Bound  # of the whole step
    clock: Clock
    seed: int
    progress: Progress
    best: RepeatedSchedule | None = None
    value: int = 0  # of the best, µs
    solver: str = ""
    shown: int = 0  # how many offered orders had rounds that hardly drift

    @property
    def done(self) -> bool:
        """Whether the best order meets the bound, or the time is up."""
        return self.clock.left <= 0 or (self.best is not None and self.value <= self.bound.value)

    @cached_property
    def every(self) -> tuple[int, ...]:
        """Round sizes that are tried, in microbatches: `EVERY`, those in flight at once, and one a rank."""
        return (*EVERY, microbatches_in_flight(self.graph), self.one.ranks)

    def length(self, wanted: float) -> int:
        """The length of a short order, in microbatches: about `wanted`, and so that whole rounds make up the rest."""
        few, groups = max(MULTIPLE, round(wanted)), lcm(MULTIPLE, self.one.ranks)
        return few + (self.microbatches - few) % (groups if groups <= MAX_MULTIPLE else MULTIPLE)

    def worth(self, block: MeshedBlock, few: int) -> bool:
        """Whether so many microbatches of a meshed block may be shorter than the best order, with time to show it."""
        return self.best is None or (block.estimate * self.microbatches < self.value and self.time_to_show(few))

    def time_to_show(self, few: int) -> bool:
        """Whether the time left is enough to decode `few` microbatches; always while there is no order yet."""
        return self.best is None or self.clock.left > few * self.graph.rank.size * SECONDS_PER_SHOWN_PASS

    def offer(self, few: int, lanes: Ints, solver: str, rounds: tuple[int, ...] = ()) -> None:
        """Keep a short order if it has rounds, is better than the best, and the messages that wait fit the memory.

        few: its microbatches. lanes: its order, rank after rank. rounds: the round sizes to try; (): all of `every`."""
        ends = np.cumsum(np.bincount(self.one.passes.rank, minlength=self.one.ranks) * few)[:-1]
        order = tuple(np.split(lanes, ends))
        start = earliest_starts(self.one, few, order)
        self.clock.spend(lanes.size * SECONDS_PER_DECODED_PASS)
        round = self._round_of(order, start, rounds or self.every)
        if round is None:
            return
        apart = times_apart(round, start)
        self.shown += int(apart.mean() >= (1 - NEAR) * round.period)
        if (apart != round.period).any():
            start = earliest_starts(self.one, few, order, round)
            if (times_apart(round, start) != round.period).any():
                return
        value = value_of(self.one, start) + (self.microbatches - few) // round.every * round.period
        if self.best is not None and value >= self.value:
            return
        long = RepeatedSchedule(self.one, self.microbatches, few, order, round)
        # Rounds repeat, so the short order holds as many waiting messages at once as the whole step. Where starts drift, a
        # run may leave out the waits between rounds.
        both = () if self.one.messages is None else (long.sample(), long.sample(start))
        if not any(lacking(sample).any() for sample in both):
            self.best, self.value, self.solver = long, value, solver
            gap = 1 - self.bound.value / value
            self.progress(f"{value / 1e3:,.3f} ms, gap {gap:.2%}: {few} microbatches, rounds of {round.every}")

    def _round_of(self, order: tuple[Ints, ...], start: Ints, rounds: tuple[int, ...]) -> Round | None:
        """The order's round of fewest microbatches whose starts repeat, else the fastest; or None. start: earliest starts,
        µs, shape (lanes, few)."""
        left = self.microbatches - start.shape[1]
        best: Round | None = None
        for every in rounds if start.min() >= 0 and left >= 0 else ():
            round = find_round(self.one, order, start, every) if left % every == 0 else None
            if round is not None and (best is None or round.period * best.every < best.period * every):
                best = round
            if round is not None and (times_apart(round, start) == round.period).all():
                return round
        return best


# Lengths of short orders, as multiples of the depth (the microbatches in flight at once):
NAMED = (6.0, 3.5)  # named schedules
LONG_NAMED = (2.1, 4.1, 6.1)  # named schedules that are made lane by lane: their rounds may begin close to the ramps
GROUPS = (4, 5, 6)  # those of groups: here multiples of the ranks
BLOCK_LENGTHS = (4.0, 2.5)  # packed blocks
MESHED_LENGTHS = (2, 3, 5)  # meshed blocks; here multiples of the microbatches in flight
MESHED_ROUNDS = (1, 2, 3)  # rounds of meshed blocks, as multiples of the microbatches that repeat together
MAX_MESHED = 6  # meshed blocks that are offered
SMALL = 2.5  # the small step that is solved
LONGER = (2.0, 3.5, 6.0)  # how much longer than the small step its repeated steady state is
MIN_DEPTHS = 4  # a step shorter than this has no rounds
MIN_PASSES = 200_000  # of a whole step: below, a search pass by pass finds as good a schedule
MAX_SOLVED = 400_000  # passes of the small step: beyond, its tables take more than half a GB
MAX_NAMED = 1_200_000  # passes of a step whose named schedules are made
MAX_DECODED = 3  # named schedules that are decoded
MAX_SHOWN = 16_000_000  # passes of an order that is decoded, at 100 bytes each
MAX_LONG_NAMED = MAX_PASSES  # passes of a named order that is made lane by lane, at 40 bytes each
SECONDS_PER_NAMED_PASS = 2e-6  # effort that is counted for making and simulating a named schedule
BOUND_SHARE = 0.15  # of the time: for a higher bound
SOLVE_SHARE = 0.45  # of the time left: for the small step


def worth_repeating(problem: Problem, microbatches: int, passes: int | None = None) -> bool:
    """Whether `solve_many` suits a step: its microbatches can be repeated, it is too long for a search pass by pass, and it
    is long enough to have rounds. problem: the step of one microbatch. microbatches: of the whole step. passes: from which
    a step is too long; None: `MIN_PASSES`."""
    try:
        check_plain(problem)
    except BadInput:
        return False
    graph = microbatch_graph(problem)
    if graph is None or microbatches * len(problem.passes) < (MIN_PASSES if passes is None else passes):
        return False
    return microbatches >= MIN_DEPTHS * max(microbatches_in_flight(graph), problem.ranks) + MULTIPLE


def solve_many(
    problem: Problem,
    microbatches: int,
    *,
    seconds: float = 60.0,
    effort: float | None = None,
    seed: int = 0,
    progress: Progress = lambda line: None,
) -> RepeatedSchedule:
    """A schedule of a step of very many equal microbatches, with a certificate of the whole step.

    problem: the step with one microbatch.
    microbatches: of the whole step.
    seconds: the time limit.
    effort: work in place of seconds (one is about a second of a core), for the same answer on every machine.
    seed: of the search.
    progress: called with a line of text whenever a better order was found.

    Raises BadInput for a step whose microbatches cannot be repeated (see `long_steps.check`), NotFound if no order is found.
    """
    bound = bound_of_many(problem, microbatches)
    graph = microbatch_graph(problem)
    if graph is None:
        raise BadInput("many microbatches: each rank of the step needs one stream")
    ready()
    clock = Clock(seconds, effort)
    bound = _higher(problem, microbatches, bound, clock)
    search = ManySearch(problem, microbatches, graph, bound, clock, seed, progress)
    try:
        for _ in _steps(search):
            if search.done:
                break
    except (KeyboardInterrupt, SystemError) as error:
        if interruption(error) is None or search.best is None:
            raise
    if search.best is None:
        raise NotFound("many microbatches: no order that repeats was found in this time; others may exist")
    used = 0.0 if search.clock.counted else round(search.clock.used, 3)
    proven = bound.value, bound.kind, bound.ranks, bound.proof
    certificate = Certificate(problem.objective, search.value, *proven, search.solver, used, seed, problem.digest)
    return replace(search.best, certificate=certificate)


def _higher(problem: Problem, microbatches: int, bound: Bound, clock: Clock) -> Bound:
    """The bound, higher by a search in a share of the time, if memory gives it."""
    if bound.kind != AREA:
        return bound
    from ..ilp.steady.windows import higher_in_a_row  # it needs CP-SAT, which takes a second to load

    part = clock.apart(BOUND_SHARE * clock.left)
    higher = higher_in_a_row(problem, microbatches, bound, part)
    clock.spend(part.used)
    return higher


def _steps(search: ManySearch) -> Iterator[None]:
    """The sources in turn: named schedules, blocks that repeat, and a small step with its steady state repeated."""
    depth = max(microbatches_in_flight(search.graph), search.one.ranks)
    yield from _named_in_lanes(search, depth)
    yield from _meshed(search)
    yield from _named(search, depth)
    yield from _packed(search, depth)
    few = search.length(SMALL * depth)
    if few * search.graph.rank.size <= MAX_SOLVED:
        yield from _from_small(search, few, depth)


def _named_in_lanes(search: ManySearch, depth: int) -> Iterator[None]:
    """Offer named schedules whose order can be made lane by lane, without a search and without a table of passes. Each is
    made in the fewest microbatches that have rounds."""
    problem = search.one
    for system in long_systems_of(problem):
        for few in _lengths_of(search, system, depth):
            order = lane_order(problem, few, system)
            if (peaks(problem, order) > problem.room[: problem.ranks]).any():
                break
            offers = search.shown
            search.offer(few, np.concatenate(order), system.name, (problem.ranks if system.grouped else 1,))
            yield
            if search.shown > offers:
                break


def _lengths_of(search: ManySearch, system: LongSystem, depth: int) -> list[int]:
    """Lengths, in microbatches, at which a system's order may have rounds; ascending."""
    if system.grouped:
        remainder = search.microbatches % search.one.ranks
        lengths = [times * search.one.ranks + remainder for times in GROUPS]
    else:
        lengths = [search.length(times * depth) for times in LONG_NAMED]
    most = min(search.microbatches, MAX_LONG_NAMED // len(search.one.passes))
    return [few for few in lengths if few <= most]


def _named(search: ManySearch, depth: int) -> Iterator[None]:
    """Offer the other named schedules, then orders that are decoded from the starts of the shortest ones."""
    lengths = [search.length(times * depth) for times in NAMED]
    few = next((length for length in lengths if length * search.graph.rank.size <= MAX_NAMED), None)
    if few is None or few > search.microbatches:
        return
    g = of_length(search.graph, few)
    lanes, made = g.passes[:, 0] // few, list[tuple[int, str, Ints]]()
    for name, named in presets_of(with_microbatches(search.one, few), searched=False):
        order = [rows // few for rows in named.sequences.values()]
        search.clock.spend(g.passes.size * SECONDS_PER_NAMED_PASS)
        start = earliest_starts(search.one, few, order)
        if (peaks(search.one, order) <= search.one.room[: search.one.ranks]).all():
            search.offer(few, np.concatenate(order), name)
        made.append((value_of(search.one, start), name, start[lanes]))
        yield
    for _, name, target in sorted(made, key=lambda entry: entry[0])[:MAX_DECODED]:
        yield from _decoded(search, g, target, name)


def _meshed(search: ManySearch) -> Iterator[None]:
    """Offer the shortest meshed blocks, each in the fewest microbatches in which it has rounds."""
    search.clock.spend(meshing_seconds(search.graph))
    for block in meshed_blocks(search.graph)[:MAX_MESHED]:
        rounds = tuple(times * block.together for times in MESHED_ROUNDS)
        for times in MESHED_LENGTHS:
            few = times * block.flight + 4 * block.together
            few += (search.microbatches - few) % lcm(*rounds)
            g = of_length(search.graph, few)
            if few > search.microbatches or g.passes.size > MAX_LONG_NAMED or not search.worth(block, few):
                break
            offers, order = search.shown, serial_order(g, block.targets(few))
            if order is None:
                break
            search.offer(few, g.passes[order // few, 0] // few, "meshed block", rounds)
            yield
            if search.shown > offers:
                break


def _packed(search: ManySearch, depth: int) -> Iterator[None]:
    """Offer the shortest packed block, repeated, and the orders that are decoded from it."""
    lengths = [search.length(times * depth) for times in BLOCK_LENGTHS]
    few = next((length for length in lengths if length * search.graph.rank.size <= MAX_SHOWN), None)
    if few is not None and few <= search.microbatches and search.time_to_show(few):
        g = of_length(search.graph, few)
        yield from _decoded(search, g, repeated_targets(g, *least_packed(search.graph)), "packed block")


def _from_small(search: ManySearch, few: int, depth: int) -> Iterator[None]:
    """Solve a small step of `few` microbatches. Then repeat its steady state until the order has rounds."""
    small = with_microbatches(search.one, few)
    amount = SOLVE_SHARE * search.clock.left
    try:
        schedule = solve(small, **search.clock.limit(amount), seed=search.seed, prefer=None)
    except (Infeasible, NotFound):
        if search.best is None:
            raise
        return
    search.clock.spend(amount)
    search.offer(few, np.concatenate(list(schedule.sequences.values())) // few, "a small step")
    yield
    g, flight = of_length(search.graph, few), microbatches_in_flight(search.graph)
    start = np.asarray(schedule.timeline().start)[g.passes]
    for times in LONGER:
        longer = of_length(search.graph, search.length(few + times * depth))
        if longer.passes.size > MAX_SHOWN:
            return
        least = search.bound.value / search.microbatches * longer.microbatches
        for target in targets_cut_by_time(start, longer.microbatches, least, flight):
            yield from _decoded(search, longer, target, "a small step's steady state")


def _decoded(search: ManySearch, g: MicrobatchGraph, target: Ints, solver: str) -> Iterator[None]:
    """Offer the order of the target starts, and those that decoding makes of them. target: µs, shape (lanes,
    microbatches)."""
    lanes = g.passes[:, 0] // g.microbatches  # rows of the step of one microbatch
    order = serial_order(g, target)
    if order is None:
        return
    search.offer(g.microbatches, lanes[order // g.microbatches], solver)
    yield
    for rule in CUT_RULES:
        decoded = decode(g, target, rule) if search.time_to_show(g.microbatches) else None
        search.clock.spend(target.size * SECONDS_PER_DECODED_PASS)
        if decoded is None:
            return
        search.offer(g.microbatches, lanes[decoded.order // g.microbatches], solver)
        yield
