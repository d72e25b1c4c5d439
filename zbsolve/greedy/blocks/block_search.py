"""Schedules from building blocks: for several stages a rank and for tight memory, where list scheduling is weak.

A block is repeated, squeezed, and its ramps are filled, after arXiv 2405.15362, section 3. Blocks of several periods are
tried: with many microbatches a short period is best, with few a short time in which memory is held. Annealing improves
patterns of target starts, and then single target starts of the best schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...problem import Problem
from ...schedule import Schedule
from ...util.clock import Clock
from ..arrays.microbatch import least_value, microbatch_graph, with_mean_microbatches
from ..decoding import Decoded, decode, repeated_targets, to_schedule
from ..side_stream import with_room_for_them, with_side_streams
from .block_arms import RULES, BlockSearch
from .building_block import block_peaks
from .meshed import meshed_blocks

PATTERN_SHARE, MAX_PATTERN_SECONDS = 0.1, 3.0  # of the time, for annealing one pattern; at most, since it cannot be stopped
PATTERNS_SHARE = 0.45  # of the time: when the first turn of patterns ends
DECODINGS_PER_SCHEDULE = 20  # making and verifying a schedule takes about as long as so many decodings
EXPLORATION = 0.4  # how often a random arm is tried in place of the best
LEAST_COST = 1e-7  # seconds: the least time that work counts
MIN_TURN, TURN_SHARE = 0.05, 0.02  # seconds of an arm's turn at least; and as a share of the time left


def block_schedules(
    problem: Problem,
    clock: Clock,
    seconds: float,
    seed: int = 0,
    target: int = 0,
    others: Callable[[], Sequence[Schedule]] = tuple,
) -> Iterator[Schedule]:
    """Better and better schedules of `problem` for `seconds` of the clock, the first at once.

    If microbatches differ in numbers, mean microbatches are searched, and schedules that are better for those are yielded.
    There are none if they differ in more, or if passes occupy several streams.

    target: the value, µs, at which the search ends.
    others: schedules that other sources have found so far. Each is decoded by its start times, repaired if it exceeds the
      memory, and improved here.
    """
    plain = with_room_for_them(problem)
    g = None if plain is None else microbatch_graph(with_mean_microbatches(plain))
    if g is None:
        return
    g = g._replace(passes=np.flatnonzero(problem.computing)[g.passes])
    target = max(target, least_value(g)) if problem.alike else 0  # values with mean microbatches are not the problem's
    random = np.random.default_rng(seed)
    search = BlockSearch(g, clock.share(seconds), target, random, others)
    for best in _improvements(search):
        yield with_side_streams(problem, to_schedule(problem, g, best.order))


def try_each_annealing(problem: Problem) -> None:
    """Run one trial of each annealing, to compile its kernels: `block_schedules` needs some only on hard problems."""
    g = microbatch_graph(problem)
    if g is None:
        return
    search = BlockSearch(g, Clock(1.0, 100.0).part(1.0), 0, np.random.default_rng(0), tuple)
    block_peaks(g, search.block)
    meshed_blocks(g)
    search.settled(*search.block)
    search.cost = 1.0  # so high that the time allows one trial at a time
    for _ in search.decode_block(search.block, RULES[:1]):
        pass
    for arm in (search.pattern_arm(1.0), search.target_arm()):
        next(arm)


def _improvements(search: BlockSearch) -> Iterator[Decoded]:
    """Better and better decoded schedules; not all, since using one costs about `DECODINGS_PER_SCHEDULE` decodings."""
    shown, when = -1, 0.0
    for _ in _steps(search):
        better = search.pool and (shown < 0 or search.pool[0].value < shown)
        ended = search.left <= 0 or (search.pool and search.pool[0].value <= search.target)
        if better and (shown < 0 or ended or search.clock.used - when > DECODINGS_PER_SCHEDULE * search.cost):
            shown, when = search.pool[0].value, search.clock.used
            yield search.pool[0]
        if ended:
            return
    if search.pool and search.pool[0].value < shown:
        yield search.pool[0]


def _steps(search: BlockSearch) -> Iterator[None]:
    """The search, step by step: blocks at once, then patterns, then all arms by their gains."""
    began, total = search.clock.used, search.left
    search.shorten()
    yield from search.decode_block(search.block, RULES[:1])
    at = search.clock.used
    decode(search.g, repeated_targets(search.g, *search.block))
    search.clock.spend(search.seconds_of(1, search.g.microbatches))
    search.cost = max(LEAST_COST, search.clock.used - at)
    yield from search.packed()
    yield from search.meshed()
    yield from search.adopt()
    patterns = search.pattern_arm(min(MAX_PATTERN_SECONDS, PATTERN_SHARE * total))
    for _ in patterns:
        yield
        if search.clock.used - began > PATTERNS_SHARE * total:
            break
    yield from _take_turns(search, [patterns, search.target_arm()])


def _take_turns(search: BlockSearch, arms: list[Iterator[None]]) -> Iterator[None]:
    """Step the arm with the highest recent gain a second, sometimes a random one, until all have ended."""
    gain = np.full(len(arms), np.inf)
    while search.pool and arms:
        yield from search.adopt()
        explores = search.random.random() < EXPLORATION
        arm = int(search.random.integers(len(arms))) if explores else int(np.argmax(gain))
        began, before = search.clock.used, search.pool[0].value
        ended = False
        while not ended and search.clock.used - began < max(MIN_TURN, TURN_SHARE * search.left):
            ended = next(arms[arm], search) is search
            yield
        if ended:
            del arms[arm]
            gain = np.delete(gain, arm)
            continue
        rate = (before - search.pool[0].value) / max(LEAST_COST, search.clock.used - began)
        gain[arm] = rate if np.isinf(gain[arm]) else 0.6 * gain[arm] + 0.4 * rate
