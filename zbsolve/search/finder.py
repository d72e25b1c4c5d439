"""The finder: a schedule at once, then better ones, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, product, takewhile
from math import inf

import numpy as np

from ..greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph
from ..greedy.blocks.block_arms import SECONDS_PER_DECODED_PASS
from ..greedy.blocks.block_search import block_schedules
from ..greedy.blocks.building_block import plain_block
from ..greedy.blocks.paced import paced_schedules
from ..greedy.blocks.period_search import annealing_seconds
from ..greedy.lists.list_scheduler import Policy, deepest_first, list_schedule
from ..greedy.lists.policy_annealing import improve_policies, starting_policies
from ..greedy.lists.serial_microbatches import one_after_another
from ..greedy.lists.serial_orders import serial_schedule, serial_targets
from ..greedy.orders.many_starts import better_orders
from ..greedy.side_streams.side_stream import held_by_others, rooms_beside, with_room_for_them, with_side_streams
from ..greedy.side_streams.syncs import pools_with_syncs
from ..greedy.targets.decoding import DecodeRule, decode, repeated_targets, to_schedule
from ..problem import Ints
from ..schedule import Schedule
from ..systems.table import presets_of
from ..util.errors import NotFound
from .extension import extended, repeated
from .state import BLOCK_SOLVER, LARGE_PASSES, LNS_SOLVER, TABU_SOLVER, State

TRIED_BESIDE = 8  # starting policies that are tried with side streams put in behind
# By how many mean passes what needs a new gather is put off, and starts are shifted at random.
PUT_OFF, SHIFTS = (0.0, 1.0, 4.0, 1e9), (0.3, 1.0, 3.0)
SECONDS_PER_SERIAL_PASS = 4e-5
SERIAL_SHARE = 0.3  # of the time is for serial generation at most, where there is a schedule
SOURCES_SHARE = 0.7  # of the time: what is left is for neighbourhoods of the best
MAKESPAN_SHARE, MIN_DECODINGS = 0.1, 10_000  # of the time is for the makespan's search, where it has so many decodings
MAKESPAN_SOLVER = "makespan search"
SERIAL_SOLVER = "serial generation"
PACED_SOLVER, SECONDS_PER_PACED_PASS, SECONDS_PER_PACED_LANE = "paced block", 1e-5, 6e-5
# Where what is there takes so many times its bound, a share of the time is for paced blocks; so many come until one holds.
POOR, PACED_SHARE, PACED_TRIES = 1.15, 0.4, 4
PACED_ROUNDS_SHARE, MAX_PACED_ROUNDS = 0.3, 2000  # of the time is for annealing blocks; moves for each period
# Of a step of more passes named orders come first, each also decoded by its times with these rules, for a part of the time.
MANY_PASSES, TIMES_SHARE = 4_000, 0.25
TIMES_RULES = (DecodeRule(2, 0, 2), DecodeRule(2, 8, 1), DecodeRule(1, 8, 2))


def quick(state: State, starts: list[Policy], policies: bool) -> Iterator[None]:
    """A schedule at once; then, where asked for, the best of the starting policies (kept in `starts`); and named ones. Where
    none holds, one microbatch after the other."""
    state.offer_policy(deepest_first(state.problem), "greedy")
    yield
    several = bool(pools_with_syncs(state.problem))
    careful = several and held_by_others(state.problem)
    # Named orders are better than policies that are careful, and no dearer; of a large step policies take long.
    first = several or len(state.problem.passes) > MANY_PASSES
    if first:
        yield from _named(state)
    if several and (state.lean is None or (not careful and state.lean_value > POOR * state.bound.value)):
        yield from _paced(state)
    if several and not careful:
        yield from _serial(state)
    if policies and not careful:
        yield from _policies(state, starts)
    if not first:
        yield from _named(state)
    if state.schedule is None:  # very long, but it needs the least memory
        state.clock.spend(len(state.problem.passes) * SECONDS_PER_SERIAL_PASS)
        found = one_after_another(state.problem)
        if found is not None:
            state.offer(found, SERIAL_SOLVER)
        yield


def _policies(state: State, starts: list[Policy]) -> Iterator[None]:
    problem, clock = state.problem, state.clock
    starts += starting_policies(problem, clock, 0.1 * clock.left)
    for policy in starts[:2]:
        clock.spend(len(problem.passes) * 1e-6)
        state.offer_policy(policy, "greedy")
        yield


def _named(state: State) -> Iterator[None]:
    """Named orders. They take next to no time: of a step that is not large they come even where none is left. Of one of many
    passes their times are followed at once, and those of a block too."""
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
    """Offer the best schedule that target starts, µs, shape (lanes, microbatches), are decoded to."""
    state.clock.spend(len(TIMES_RULES) * target.size * SECONDS_PER_DECODED_PASS)
    found = [one for one in (decode(g, target, rule) for rule in TIMES_RULES) if one is not None]
    best = min(found, key=lambda one: one.value, default=None)
    if best is not None and (state.schedule is None or best.value < state.value):
        state.offer(to_schedule(state.problem, g, best.order), BLOCK_SOLVER)


def find(state: State, seed: int, starts: list[Policy]) -> Iterator[None]:
    """Better schedules: those of fewer microbatches extended, then annealed policies and building blocks in turn, then
    neighbourhoods of the best."""
    problem, clock = state.problem, state.clock
    share = clock.part(SOURCES_SHARE)
    moved, few = _moved(state, seed), 0
    if state.enough is None:
        search = partial(_search_small, seed=seed)
        yield from _of_makespan(state, search)
        few = yield from extended(state, search)
    yield from _sources(state, seed, starts, share.left, moved, few)
    if state.schedule is not None and state.enough is None:
        # A question about memory has no use for neighbourhoods: near what is just possible CP-SAT counts little of the time
        # that it takes.
        near = [_neighbours(state, seed)] if len(problem.passes) <= LARGE_PASSES else []
        yield from _in_turns(state, [*near, moved])


def _in_turns(state: State, arms: list[Iterator[None]]) -> Iterator[None]:
    """Arms until all end or nothing is left to gain, always the one that has had the least time so far: none waits for
    another that gains little by little."""
    used = [0.0] * len(arms)
    while arms and not state.done:
        turn, began = int(np.argmin(used)), state.clock.used
        try:
            next(arms[turn])
            used[turn] += state.clock.used - began
        except StopIteration:
            del arms[turn], used[turn]
        yield


def _neighbours(state: State, seed: int) -> Iterator[None]:
    """Neighbourhoods of the best schedule."""
    from ..ilp.neighbourhood_search import better_neighbours

    first = state.schedule
    assert first is not None
    for schedule in better_neighbours(lambda: state.schedule or first, state.clock, seed, lambda: state.target):
        if schedule is not None:
            state.offer(schedule, LNS_SOLVER)
        yield


def _moved(state: State, seed: int) -> Iterator[None]:
    """Moves along critical paths of the best schedule and of others."""
    first = state.schedule
    if first is None:
        return
    for schedule in better_orders(lambda: state.schedule or first, state.starts, state.clock, seed, lambda: state.target):
        if schedule is not None:
            state.offer(schedule, TABU_SOLVER)
        yield


def _of_makespan(state: State, search: Callable[[State], Iterator[None]]) -> Iterator[None]:
    """For the span, what a short search for the makespan finds: no rank's window is longer than all of them together, and
    now and then the searches of the span end where windows are longer than there."""
    problem, total = state.problem, state.clock.left
    if problem.objective == "span" and total > MIN_DECODINGS * len(problem.passes) * SECONDS_PER_DECODED_PASS:
        found: Schedule | None = None
        for other in state.beside(replace(problem, objective="makespan"), MAKESPAN_SHARE * total, search):
            found = other.schedule
            yield
        if found is not None:
            state.offer(Schedule(problem, found.order, found.syncs), MAKESPAN_SOLVER)


def _search_small(state: State, seed: int) -> Iterator[None]:
    """A search for a problem with fewer microbatches, without neighbourhoods: one of them takes as long as all of it."""
    starts: list[Policy] = []
    yield from quick(state, starts, policies=True)
    yield from _sources(state, seed, starts, state.clock.left, _moved(state, seed))


def _sources(
    state: State, seed: int, starts: list[Policy], seconds: float, moved: Iterator[None], few: int = 0
) -> Iterator[None]:
    """Annealed policies, building blocks, moves, and what else the problem asks for, in turn, for so many seconds. few:
    microbatches of a small problem whose steady state is repeated; 0: of none."""
    problem = state.problem
    # Shares of the room are for what passes on side streams take; with pools they free it too.
    plainly = held_by_others(problem)
    rooms = rooms_beside(problem)[: 1 if problem.pools or plainly else None]
    sources = [_blocks(state, seed, seconds, room) for room in rooms]
    # Of a larger step blocks gain more; then moves come behind them.
    if len(problem.passes) <= LARGE_PASSES and state.schedule is not None:
        share = state.clock.share(seconds)
        sources.append(takewhile(lambda _: not share.over, moved))
    if several := bool(pools_with_syncs(problem)):
        sources += [_beside(state, seed, seconds, room) for room in rooms]
    if not (several and plainly):
        annealed = _annealed(state, seed, seconds, starts)
        annealed = annealed if starts else chain(_policies(state, starts), annealed)
        sources += [_shifted(state, seed, seconds)] if several else []
        # Trying policies takes long on a large problem: blocks need not wait for them, but they do not know of pools.
        sources.insert(0 if problem.pools else len(sources), annealed)
    if few:
        sources.append(repeated(state, few, seconds / (1 + len(sources)), partial(_search_small, seed=seed)))
    yield from _in_turns(state, sources)


def _annealed(state: State, seed: int, seconds: float, starts: list[Policy]) -> Iterator[None]:
    for policy in improve_policies(state.problem, starts, state.clock, seed, seconds):
        if policy is not None:
            state.offer_policy(policy, "annealed policy")
        yield


def _blocks(state: State, seed: int, seconds: float, room: float) -> Iterator[None]:
    others = (state.problem, state.clock, seconds, seed, state.target, lambda: state.leads, room)
    for schedule in block_schedules(*others):
        state.offer(schedule, BLOCK_SOLVER)
        yield


def _beside(state: State, seed: int, seconds: float, room: float) -> Iterator[None]:
    """Policies for the passes of compute streams alone, with so much of the memory left for side streams; these come in
    behind. The list scheduler, which knows all streams, is too careful where little memory is left."""
    problem, clock = state.problem, state.clock
    plain = with_room_for_them(problem, room)
    if plain is None:
        return
    starts = starting_policies(plain, clock, 0.1 * clock.left)
    for policy in chain(starts[:TRIED_BESIDE], improve_policies(plain, starts, clock, seed, seconds)):
        if policy is not None:
            clock.spend(len(problem.passes) * 1e-6)
            with suppress(NotFound):
                state.offer(with_side_streams(problem, list_schedule(plain, policy)), "annealed policy")
        yield


def _paced(state: State) -> Iterator[None]:
    """Blocks on all streams: a few, and more for a part of the time."""
    problem, clock = state.problem, state.clock
    lanes = len(problem.passes) // max(1, problem.microbatches)
    rounds = min(MAX_PACED_ROUNDS, int(PACED_ROUNDS_SHARE * clock.left / annealing_seconds(lanes)))
    clock.spend(rounds * annealing_seconds(lanes) + lanes * SECONDS_PER_PACED_LANE)
    share = clock.part(PACED_SHARE)

    def best() -> float:
        return inf if state.lean is None else state.lean_value

    for tries, found in enumerate(paced_schedules(problem, best, rounds), 1):
        clock.spend(len(problem.passes) * SECONDS_PER_PACED_PASS)
        state.offer(found, PACED_SOLVER)
        yield
        if state.settled or (share.over and tries >= PACED_TRIES):
            return


def _serial(state: State) -> Iterator[None]:
    """Orders made pass by pass, for however little memory; of a large problem until there is one, else for a part of the
    time."""
    problem, clock = state.problem, state.clock
    mean, large = float(problem.passes.duration.mean()), len(problem.passes) > LARGE_PASSES
    if large and state.schedule is not None:
        return
    share = clock.part(SERIAL_SHARE)
    for put_off, begin in product(reversed(PUT_OFF), serial_targets(problem)):  # the longest one is the best as a rule
        if state.schedule is not None and (large or share.over):
            return
        clock.spend(len(problem.passes) * SECONDS_PER_SERIAL_PASS)
        found = serial_schedule(problem, begin, mean * put_off)
        if found is not None:
            state.offer(found, SERIAL_SOLVER)
        yield


def _shifted(state: State, seed: int, seconds: float) -> Iterator[None]:
    """The same from the best schedule's starts, shifted at random."""
    problem, clock = state.problem, state.clock
    share, rng = clock.share(seconds), np.random.default_rng(seed)
    mean, begins = float(problem.passes.duration.mean()), serial_targets(problem)
    while not share.over:
        best = state.schedule
        begin = begins[int(rng.integers(len(begins)))] if best is None else best.timeline().start
        shifts = mean * float(rng.choice(SHIFTS)) * rng.standard_normal(len(problem.passes))
        clock.spend(len(problem.passes) * SECONDS_PER_SERIAL_PASS)
        found = serial_schedule(problem, begin + shifts, mean * float(rng.choice(PUT_OFF)))
        if found is not None:
            state.offer(found, SERIAL_SOLVER)
        yield
