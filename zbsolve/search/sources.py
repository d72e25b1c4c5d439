"""Where schedules come from: a row for each source, in five tables. The search takes the tables in turn.

FIRST: sources that give a schedule at once. AHEAD: searches of smaller problems, one after the other. TURNS: sources that
share most of the time, a step each in turn. ANEW: another seed. LAST: what has the rest of the time (docs/sources.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, takewhile
from math import inf

import numpy as np

from ..greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph
from ..greedy.blocks.block_search import block_schedules
from ..greedy.blocks.building_block import plain_block
from ..greedy.blocks.period_search import paced_schedules
from ..greedy.decoding import SECONDS_PER_DECODED_PASS, DecodeRule, decode, repeated_targets, to_schedule
from ..greedy.lists.list_scheduler import Policy, deepest_first, one_after_another
from ..greedy.lists.policy_annealing import improve_policies, starting_policies
from ..greedy.orders.many_starts import better_orders
from ..greedy.orders.rank_orders import SECONDS_PER_MOVED_PASS, annealed_orders, ordered_by_rank
from ..greedy.side_stream import held_by_others
from ..greedy.syncs import pools_with_syncs
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..systems.table import presets_of
from ..util.clock import Clock
from .extension import extended
from .state import BLOCK_SOLVER, LARGE_PASSES, TABU_SOLVER, State

SECONDS_PER_SERIAL_PASS = 4e-5
# Another seed: share of the time; decodings that it must allow; passes at least (fewer were not measured); between seeds.
ANEW_SHARE, ANEW_DECODINGS, ANEW_PASSES, APART = 0.25, 2_000, 1_000, 104_729
ANEW_SOLVER, SERIAL_SOLVER = "another seed", "one microbatch after the other"
ORDERS_SOLVER, MOVES_PER_PASS, FEW_TURNS, TURNS_SHARE = "annealed orders", 40, 0.3, 0.7  # see `turns_seconds`
PACED_SOLVER, SECONDS_PER_PACED_PASS, SECONDS_PER_PACED_LANE = "paced block", 1e-5, 6e-5
# Paced blocks run where the best value is more than POOR times the bound: for a share of the time, and so many at least. In
# a step of many passes, where they take long, it must be more than POOR_OF_MANY times.
POOR, POOR_OF_MANY, PACED_SHARE, PACED_TRIES = 1.08, 1.15, 0.4, 4
BLOCKS_SHARE = 0.1  # of the time: building blocks before paced ones
# Above MANY_PASSES named orders come before policies, and for a part of the time their starts are decoded by these rules.
MANY_PASSES, TIMES_SHARE = 4_000, 0.25
TIMES_RULES = (DecodeRule(2, 0, 2), DecodeRule(2, 8, 1), DecodeRule(1, 8, 2))

Arm = Iterator[None]  # one run of a source: each `next` searches for a while and offers what it finds to the state


@dataclass(eq=False)
class Search:
    """One search as its sources see it.

    seed: of random choices. small: searches a smaller problem, or one with another seed, step by step. early: try starting
    policies among the first sources. policies: those that were tried. seconds: the time of TURNS together. anew: seconds for
    a search with another seed. kept: seconds at the end that are not this search's."""

    state: State
    seed: int
    small: Callable[..., Arm]
    early: bool = True
    policies: list[Policy] = field(default_factory=list)
    seconds: float = 0.0
    anew: float = 0.0
    kept: float = 0.0

    @property
    def problem(self) -> Problem:
        """The problem to solve."""
        return self.state.problem

    @property
    def clock(self) -> Clock:
        """The state's."""
        return self.state.clock

    @property
    def left(self) -> float:
        """Seconds left for this search."""
        return max(0.0, self.clock.left - self.kept)

    @cached_property
    def pools(self) -> bool:
        """Whether some memory is not bounded by one stream's order, since passes of several streams take from it."""
        return bool(pools_with_syncs(self.problem))

    @cached_property
    def by_rank(self) -> bool:
        """Whether one order for each rank decides the step."""
        return ordered_by_rank(self.problem)

    @cached_property
    def careful(self) -> bool:
        """Whether the list scheduler would leave too much memory free, since it plans for all streams."""
        return held_by_others(self.problem)

    @cached_property
    def moves(self) -> Arm:
        """The tabu search, which LAST continues where TURNS stopped it."""
        return _moved(self.state, self.seed)


@dataclass(frozen=True)
class Source:
    """name: its row in docs/sources.md. arms: makes its arms for a search; none where it has no use. late: whether it comes
    behind the sources of its table that are not late."""

    name: str
    arms: Callable[[Search], list[Arm]]
    late: Callable[[Search], bool] = lambda search: False


def arms_of(table: Sequence[Source], search: Search) -> Iterator[Arm]:
    """The arms of a table in their order. A source makes its arms when all before it have been handed out."""
    for source in sorted(table, key=lambda row: row.late(search)):
        if source.name not in search.state.without:
            yield from source.arms(search)


def _offered(state: State, schedules: Iterable[Schedule | None], solver: str) -> Arm:
    """Offer each schedule as it comes; None: nothing yet."""
    for schedule in schedules:
        if schedule is not None:
            state.offer(schedule, solver)
        yield


# --- At once ---


def _listed(search: Search) -> Arm:
    search.state.offer_policy(deepest_first(search.problem), "greedy")
    yield


def _one_by_one(state: State) -> Arm:
    """If there is no schedule yet: one microbatch after the other, which is very long but needs the least memory."""
    if state.schedule is None:
        state.clock.spend(len(state.problem.passes) * SECONDS_PER_SERIAL_PASS)
        yield from _offered(state, [one_after_another(state.problem)], SERIAL_SOLVER)


def _policies(search: Search) -> Arm:
    problem, clock = search.problem, search.clock
    search.policies += starting_policies(problem, clock, 0.1 * clock.left)
    for policy in search.policies[:2]:
        clock.spend(len(problem.passes) * 1e-6)
        search.state.offer_policy(policy, "greedy")
        yield


def _named(state: State) -> Arm:
    """Named orders. They cost next to nothing, so unless the step is large they come even when the time is up. For a step of
    many passes, orders decoded from their start times, and from those of a plain block, are offered too."""
    problem, clock = state.problem, state.clock
    large, many = len(problem.passes) > LARGE_PASSES, len(problem.passes) > MANY_PASSES
    g = microbatch_graph(problem) if many and not len(problem.side_stream) else None
    share = clock.part(TIMES_SHARE)
    if g is not None:
        _follow(state, g, repeated_targets(g, *plain_block(g)))
        yield
    for name, named in presets_of(problem, searched=False):
        if state.settled or (large and state.done):
            return
        if g is not None and not share.over:
            _follow(state, g, named.timeline().start[g.passes])
        room = problem.capacity
        if room is None or all(np.less_equal(named.timeline().peak_bytes, room)):
            state.offer(named, name)
        if state.schedule is not named:
            state.leads.append(named)
        yield


def _follow(state: State, g: MicrobatchGraph, target: Ints) -> None:
    """Offer the best schedule that decoding makes of target starts, µs, shape (lanes, microbatches)."""
    state.clock.spend(len(TIMES_RULES) * target.size * SECONDS_PER_DECODED_PASS)
    decodings = [decoded for decoded in (decode(g, target, rule) for rule in TIMES_RULES) if decoded is not None]
    best = min(decodings, key=lambda decoded: decoded.value, default=None)
    if best is not None and (state.schedule is None or best.value < state.value):
        state.offer(to_schedule(state.problem, g, best.order), BLOCK_SOLVER)


def _near(state: State) -> bool:
    """Whether the best schedule so far is so near to the bound that paced blocks are not needed."""
    poor = POOR_OF_MANY if len(state.problem.passes) > MANY_PASSES else POOR
    return state.lean is not None and state.lean_value <= poor * state.bound.value


def _paced(search: Search) -> Arm:
    """Blocks on all streams, if the best schedule so far is poor: a few at least, and more for a part of the time."""
    state, problem, clock = search.state, search.problem, search.clock
    if _near(state) or (state.lean is not None and search.careful):
        return
    clock.spend(len(problem.passes) // max(1, problem.microbatches) * SECONDS_PER_PACED_LANE)
    share = clock.part(PACED_SHARE)
    schedules = paced_schedules(problem, lambda: inf if state.lean is None else state.lean_value)
    for tries, schedule in enumerate(schedules, 1):
        clock.spend(len(problem.passes) * SECONDS_PER_PACED_PASS)
        state.offer(schedule, PACED_SOLVER)
        yield
        if state.settled or (share.over and tries >= PACED_TRIES):
            return


def _blocks_at_once(search: Search) -> list[Arm]:
    """For a step of many passes, whose paced blocks take longer than all of a short search."""
    if not search.pools or len(search.problem.passes) <= MANY_PASSES or _near(search.state):
        return []
    return [_blocks(search, BLOCKS_SHARE * search.clock.left)]


# --- In turns ---


def _annealed_arms(search: Search) -> list[Arm]:
    if search.pools and search.careful:
        return []
    annealed = _annealed(search)
    return [annealed if search.policies else chain(_policies(search), annealed)]


def _annealed(search: Search) -> Arm:
    for policy in improve_policies(search.problem, search.policies, search.clock, search.seed, search.seconds):
        if policy is not None:
            search.state.offer_policy(policy, "annealed policy")
        yield


def _blocks(search: Search, seconds: float) -> Arm:
    state = search.state
    schedules = block_schedules(state.problem, state.clock, seconds, search.seed, state.target, lambda: state.leads)
    yield from _offered(state, schedules, BLOCK_SOLVER)


def _moves_in_turn(search: Search) -> list[Arm]:
    """Tabu search in turn with the others. On a large step blocks gain more in the time, so moves come in LAST alone."""
    if len(search.problem.passes) > LARGE_PASSES or search.state.schedule is None:
        return []
    share = search.clock.share(search.seconds)
    return [takewhile(lambda _: not share.over, search.moves)]


# --- The rest of the time ---


def anew_seconds(search: Search) -> float:
    """Seconds for another search; 0 if they are too few, for small and large steps, where orders are annealed, and where one
    only asks for a value."""
    seconds, passes = ANEW_SHARE * search.clock.left, len(search.problem.passes)
    enough = seconds > ANEW_DECODINGS * passes * SECONDS_PER_DECODED_PASS and not search.by_rank
    return seconds if enough and ANEW_PASSES <= passes <= LARGE_PASSES and search.state.enough is None else 0.0


def _anew(search: Search, seconds: float) -> Arm:
    """Offer what a search with another seed finds that knows nothing of this one."""
    schedule: Schedule | None = None
    for other in search.state.beside(search.problem, seconds, partial(search.small, seed=search.seed + APART)):
        schedule = other.schedule
        yield
    yield from _offered(search.state, [schedule], ANEW_SOLVER)


def _moved(state: State, seed: int) -> Arm:
    """Moves along critical paths of the best schedule and of others."""
    if (first := state.schedule) is None:
        return
    schedules = better_orders(lambda: state.schedule or first, state.starts, state.clock, seed, lambda: state.target)
    yield from _offered(state, schedules, TABU_SOLVER)


def _ordered(search: Search) -> list[Arm]:
    """Annealing of orders by rank, for all of the time left."""
    state = search.state
    if (first := state.schedule) is None or len(state.problem.passes) > LARGE_PASSES or not search.by_rank:
        return []
    orders = annealed_orders(lambda: state.schedule or first, state.clock, search.left, search.seed, lambda: state.target)
    return [_offered(state, orders, ORDERS_SOLVER)]


def turns_seconds(search: Search) -> float:
    """Seconds for AHEAD, TURNS and ANEW. The rest is for LAST, of which annealed orders gain more than the others if there
    is time for many moves."""
    passes, few = len(search.problem.passes), FEW_TURNS * search.left
    moves = (search.left - few) / (SECONDS_PER_MOVED_PASS * passes)
    return few if search.by_rank and moves > MOVES_PER_PASS * passes else TURNS_SHARE * search.clock.left


# --- The tables ---

GREEDY = Source("list scheduling", lambda search: [_listed(search)])
POLICIES = Source(
    "annealed policies",
    lambda search: [_policies(search)] if search.early and not (search.pools and search.careful) else [],
    # Where policies must be careful, named orders are better at the same cost; for a large step policies take long.
    late=lambda search: search.pools or len(search.problem.passes) > MANY_PASSES,
)
NAMED = Source("named orders", lambda search: [_named(search.state)])
BLOCKS_AT_ONCE = Source("building blocks", _blocks_at_once)
PACED = Source("paced blocks", lambda search: [_paced(search)] if search.pools else [])
ONE_BY_ONE = Source("one microbatch after the other", lambda search: [_one_by_one(search.state)], late=lambda search: True)
FIRST = (GREEDY, POLICIES, NAMED, BLOCKS_AT_ONCE, PACED, ONE_BY_ONE)

FEWER = Source("fewer microbatches", lambda search: [extended(search.state, search.small)])
AHEAD = (FEWER,)

# Trying policies takes long on a large problem, so blocks come before them; but not with pools, which blocks do not count.
ANNEALED = Source("annealed policies", _annealed_arms, late=lambda search: not search.problem.pools)
BLOCKS = Source("building blocks", lambda search: [_blocks(search, search.seconds)])
MOVES = Source("tabu search", _moves_in_turn)
TURNS = (ANNEALED, BLOCKS, MOVES)

ANEW = (Source("another seed", lambda search: [_anew(search, search.anew)] if search.anew else []),)
LAST = (
    Source("tabu search", lambda search: [search.moves]),
    Source("annealed orders", _ordered),
)
