"""`solve_many`: a schedule for very many microbatches, from one of few and its steady state, and a bound for the whole.

A search with few microbatches finds the ramps. Cut at a moment, its steady state is repeated (see
`greedy.blocks.steady_state`) to an order that is still short, but long enough to show that it repeats: then as many rounds
as are wanted go in between, each a period longer (`long_steps.check` says why). The bound needs one microbatch
(`ilp.bounds.many`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import numpy as np

from ..build.mixing import with_microbatches
from ..greedy.annealing import justified
from ..greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph, of_length, rank_work
from ..greedy.blocks.block_arms import RULES, SECONDS_PER_DECODED_PASS, SECONDS_PER_PLACED_LANE
from ..greedy.blocks.building_block import BuildingBlock, earliest_offsets, shorter_blocks
from ..greedy.blocks.packing import least_packed
from ..greedy.blocks.period_search import anneal_block
from ..greedy.blocks.steady_state import microbatches_in_flight, targets_cut_by_time
from ..greedy.decoding import DecodeRule, decode, repeated_targets, serial_order
from ..handover import lacking
from ..ilp.bounds.bound import Bound
from ..ilp.bounds.many import bound_of_many, check_plain
from ..long_steps.check import earliest_starts, peaks, value_of
from ..long_steps.files import MAX_PASSES
from ..long_steps.repeated import RepeatedSchedule, Round, find_round
from ..problem import Ints, Problem
from ..schedule import Certificate
from ..systems.table import LongSystem, lane_order, long_systems_of, presets_of
from ..util.clock import Clock
from ..util.errors import BadInput, Infeasible, NotFound, interruption
from .extension import CUT_RULES
from .solver import ready, solve

EVERY = (1, 2, 3, 4, 6, 8, 12)  # microbatches of a round that are looked for
MULTIPLE = 24  # what all of them divide: microbatches that are left for rounds
MAX_MULTIPLE = 512  # microbatches that are left for rounds of as many as there are ranks at most: beyond, none are
SECONDS_PER_SHOWN_PASS = 2e-6  # that decoding may take at the worst: with less time left it does not begin

Progress = Callable[[str], None]


@dataclass
class FewFound:
    """An order with rounds: microbatches, the lanes of each rank, the round, and what the whole takes, µs."""

    few: int
    order: tuple[Ints, ...]
    round: Round
    value: int


@dataclass
class ManySearch:
    """What the search has: the step of one microbatch, how many there are, the bound, the time; and its best so far."""

    one: Problem
    microbatches: int
    graph: MicrobatchGraph
    bound: Bound
    clock: Clock
    seed: int
    progress: Progress
    best: FewFound | None = None
    solver: str = ""
    shown: int = 0  # offers that had rounds

    @property
    def done(self) -> bool:
        """Whether nothing is left to find, or no time."""
        return self.clock.left <= 0 or (self.best is not None and self.best.value <= self.bound.value)

    @cached_property
    def every(self) -> tuple[int, ...]:
        """Microbatches of a round that are looked for: few, as many as are in flight at once, and as many as ranks."""
        return (*EVERY, microbatches_in_flight(self.graph), self.one.ranks)

    def length(self, wanted: float) -> int:
        """About so many microbatches, as many as leave whole rounds."""
        few, groups = max(MULTIPLE, round(wanted)), lcm(MULTIPLE, self.one.ranks)
        return few + (self.microbatches - few) % (groups if groups <= MAX_MULTIPLE else MULTIPLE)

    def time_to_show(self, few: int) -> bool:
        """Whether decoding so many microbatches ends about in time, or nothing was found yet."""
        return self.best is None or self.clock.left > few * self.graph.rank.size * SECONDS_PER_SHOWN_PASS

    def offer(self, few: int, lanes: Ints, solver: str, rounds: tuple[int, ...] = ()) -> None:
        """Keep an order of `few` microbatches, rank after rank, where it has rounds, is better, and its messages fit.
        rounds: how many microbatches these may have; empty: any number that is looked for."""
        ends = np.cumsum(np.bincount(self.one.passes.rank, minlength=self.one.ranks) * few)[:-1]
        order = tuple(np.split(lanes, ends))
        start = earliest_starts(self.one, few, order)
        self.clock.spend(lanes.size * SECONDS_PER_DECODED_PASS)
        round = self._round_of(order, start, rounds or self.every)
        if round is None:
            return
        self.shown += 1
        value = value_of(self.one, start) + (self.microbatches - few) // round.every * round.period
        if self.best is not None and value >= self.best.value:
            return
        long = RepeatedSchedule(self.one, self.microbatches, few, order, round)
        # Rounds repeat, so messages of few microbatches show whether those that wait fit.
        if self.one.messages is None or not lacking(long.sample()).any():
            self.best, self.solver = FewFound(few, order, round, value), solver
            gap = 1 - self.bound.value / value
            self.progress(f"{value / 1e3:,.3f} ms, gap {gap:.2%}: {few} microbatches, rounds of {round.every}")

    def _round_of(self, order: tuple[Ints, ...], start: Ints, rounds: tuple[int, ...]) -> Round | None:
        """The order's round of fewest microbatches; None where it has none. start: µs, shape (lanes, few)."""
        left = self.microbatches - start.shape[1]
        if start.min() < 0 or left < 0:
            return None
        repeats = (find_round(self.one, order, start, every) for every in rounds if left % every == 0)
        return next((round for round in repeats if round is not None), None)


NAMED = (6.0, 3.5)  # times what is in flight: microbatches of named schedules
LONG_NAMED = (2.1, 4.1, 6.1)  # the same of those that are made by lanes, whose first rounds need not be far from the ramps
GROUPS = (4, 5, 6)  # groups of as many microbatches as ranks that show rounds of them
BLOCK_LENGTHS = (4.0, 2.5)  # the same of blocks repeated
SMALL = 2.5  # times what is in flight: microbatches of the small step
LONGER = (2.0, 3.5, 6.0)  # times what is in flight: how many more microbatches show rounds
MIN_PASSES = 200_000  # of a whole step: below, a search pass by pass finds as much
MIN_DEPTHS = 4  # times what is in flight: fewer microbatches show no rounds
MAX_SOLVED = 400_000  # passes of a small step that is solved as a problem: beyond, its tables take more than half a GB
MAX_NAMED = 1_200_000  # passes of a step whose named schedules are made
MAX_DECODED = 3  # named schedules that are decoded
MAX_SHOWN = 16_000_000  # passes of an order that is decoded to show rounds: 100 bytes each
MAX_LONG_NAMED = MAX_PASSES  # passes of a named order made by lanes: 40 bytes each
SECONDS_PER_NAMED_PASS = 2e-6  # of work that making and simulating a named schedule count for
BLOCK_SHARE = 0.25  # of the time is for blocks
SOLVE_SHARE = 0.45  # of the time is for the small step
BLOCK_ROUNDS, MAX_BLOCK_LANES = 300, 1500  # of annealing a block; lanes of steps whose blocks are searched
JUSTIFIED = RULES[2]  # with which most justified orders show rounds


def worth_repeating(problem: Problem, microbatches: int, passes: int | None = None) -> bool:
    """Whether a step of so many microbatches like the only one of `problem` is too long to be searched pass by pass, and
    long enough to show rounds; and microbatches can be repeated at all. passes: of such a step; None: `MIN_PASSES`."""
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
    """A schedule of so many microbatches that are all like the only one of `problem`, with a certificate of the whole.

    problem: the step with one microbatch.
    effort: in place of seconds, for the same answer on every machine.
    progress: called with a line whenever something better was found.

    Raises BadInput for a step whose microbatches cannot be repeated (see `long_steps.check`); NotFound where no steady state
    was found.
    """
    bound = bound_of_many(problem, microbatches)
    graph = microbatch_graph(problem)
    if graph is None:
        raise BadInput("many microbatches: each rank of the step needs one stream")
    ready()
    search = ManySearch(problem, microbatches, graph, bound, Clock(seconds, effort), seed, progress)
    try:
        for _ in _steps(search):
            if search.done:
                break
    except (KeyboardInterrupt, SystemError) as error:
        if interruption(error) is None or search.best is None:
            raise
    if search.best is None:
        raise NotFound("many microbatches: no order that repeats was found in this time; others may exist")
    best, used = search.best, 0.0 if search.clock.counted else round(search.clock.used, 3)
    proven = bound.value, bound.kind, bound.ranks, bound.proof
    certificate = Certificate(problem.objective, best.value, *proven, search.solver, used, seed, problem.digest)
    return RepeatedSchedule(problem, microbatches, best.few, best.order, best.round, certificate)


def _steps(search: ManySearch) -> Iterator[None]:
    """Named schedules, blocks repeated, then a small step and its steady state."""
    depth = max(microbatches_in_flight(search.graph), search.one.ranks)
    yield from _named_in_lanes(search, depth)
    yield from _named(search, depth)
    yield from _blocks(search, depth)
    few = search.length(SMALL * depth)
    if few * search.graph.rank.size <= MAX_SOLVED:
        yield from _from_small(search, few, depth)


def _named_in_lanes(search: ManySearch, depth: int) -> Iterator[None]:
    """The literature's schedules that repeat by themselves, in as few microbatches as show it; they need no search, and no
    table of passes."""
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
    """Numbers of microbatches that may show a system's rounds, ascending."""
    if system.grouped:
        remainder = search.microbatches % search.one.ranks
        lengths = [times * search.one.ranks + remainder for times in GROUPS]
    else:
        lengths = [search.length(times * depth) for times in LONG_NAMED]
    most = min(search.microbatches, MAX_LONG_NAMED // len(search.one.passes))
    return [few for few in lengths if few <= most]


def _named(search: ManySearch, depth: int) -> Iterator[None]:
    """The literature's schedules of a step: they repeat by themselves; then what decoding makes of the shortest."""
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
        yield from _decoded(search, g, target, CUT_RULES, name)


def _blocks(search: ManySearch, depth: int) -> Iterator[None]:
    """Blocks, repeated: packed ones; the passes of one microbatch as early as they can be; ever shorter legal ones; and ones
    near those of a shorter period, which decoding mends."""
    lengths = [search.length(times * depth) for times in BLOCK_LENGTHS]
    few = next((length for length in lengths if length * search.graph.rank.size <= MAX_SHOWN), None)
    if few is None or few > search.microbatches or not search.time_to_show(few):
        return
    g, share = search.graph, search.clock.part(BLOCK_SHARE)
    work = int(rank_work(g).max())
    best, rounds = least_packed(g), BLOCK_ROUNDS
    yield from _repeated(search, best, few)
    yield from _repeated(search, BuildingBlock(earliest_offsets(g), work), few)
    while g.rank.size <= MAX_BLOCK_LANES and not share.over:

        def near(start: Ints, period: int, rounds: int = rounds) -> tuple[BuildingBlock, bool]:
            search.clock.spend(rounds * g.rank.size * SECONDS_PER_PLACED_LANE)
            return anneal_block(g, start, period, rounds, search.seed)

        building_blocks = list(shorter_blocks(g, best, near, lambda: not share.over))
        if building_blocks:
            best = building_blocks[-1]
            yield from _repeated(search, best, few)
        for period in dict.fromkeys((work, (work + best.period) // 2)):
            if period < best.period and not share.over:
                yield from _repeated(search, near(best.offset, period)[0], few)
        if best.period <= work:
            return
        rounds *= 4


def _repeated(search: ManySearch, block: BuildingBlock, few: int) -> Iterator[None]:
    """A block repeated, in an order of so many microbatches."""
    g = of_length(search.graph, few)
    targets = repeated_targets(g, block.offset, block.period)
    yield from _decoded(search, g, targets, RULES, "building block", justify=True)


def _from_small(search: ManySearch, few: int, depth: int) -> Iterator[None]:
    """A small step solved, its steady state cut by time and repeated until it shows rounds."""
    small = with_microbatches(search.one, few)
    amount = SOLVE_SHARE * search.clock.left
    try:
        schedule = solve(small, **search.clock.limit(amount), seed=search.seed, prefer=None)
    except (Infeasible, NotFound):
        if search.best is None:
            raise
        return
    search.clock.spend(amount)
    by_rank = [rows // few for rows in schedule.sequences.values()]
    search.offer(few, np.concatenate(by_rank), "a small step")
    yield
    g, flight = of_length(search.graph, few), microbatches_in_flight(search.graph)
    start = np.asarray(schedule.timeline().start)[g.passes]
    for times in LONGER:
        longer = of_length(search.graph, search.length(few + times * depth))
        if longer.passes.size > MAX_SHOWN:
            return
        least = search.bound.value / search.microbatches * longer.microbatches
        for target in targets_cut_by_time(start, longer.microbatches, least, flight):
            yield from _decoded(search, longer, target, CUT_RULES, "a small step's steady state")


def _decoded(
    search: ManySearch, g: MicrobatchGraph, target: Ints, rules: tuple[DecodeRule, ...], solver: str, justify: bool = False
) -> Iterator[None]:
    """Offer what target starts are decoded to: in their own order, and as each of the rules has it; and that justified,
    where asked for."""
    lanes = g.passes[:, 0] // g.microbatches  # rows of the step of one microbatch
    order = serial_order(g, target)
    if order is None:
        return
    search.offer(g.microbatches, lanes[order // g.microbatches], solver)
    yield
    for rule in rules:
        decoded = decode(g, target, rule) if search.time_to_show(g.microbatches) else None
        search.clock.spend(target.size * SECONDS_PER_DECODED_PASS)
        if decoded is None:
            return
        search.offer(g.microbatches, lanes[decoded.order // g.microbatches], solver)
        yield
        decoded = justified(g, decoded.start, JUSTIFIED) if justify and search.time_to_show(2 * g.microbatches) else None
        if decoded is not None:
            search.clock.spend(2 * target.size * SECONDS_PER_DECODED_PASS)
            search.offer(g.microbatches, lanes[decoded.order // g.microbatches], solver)
            yield
