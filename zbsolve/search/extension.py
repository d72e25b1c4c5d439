"""The source "fewer microbatches": solve a problem of fewer microbatches, then repeat its steady state up to all of them.

Between warm-up and cool-down a pipeline repeats itself every few microbatches. A search with few microbatches costs a
fraction, and the ramps are the same. The repeated times are only targets, which decoding repairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from ..greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph
from ..greedy.blocks.block_arms import RULES
from ..greedy.blocks.building_block import microbatches_in_flight
from ..greedy.decoding import SECONDS_PER_DECODED_PASS, decode, to_schedule
from ..problem import Ints, Problem
from ..schedule import Schedule
from .state import State

# Microbatches of small problems, as multiples of the ranks, or of twice the microbatches in flight if that is less. LEAST is
# for steps of more than SHORT_STEP passes in which none of SIZES is small enough.
SIZES, LEAST, SHORT_STEP = (2.5, 2.0, 3.0, 2.25), (1.5,), 400
MAX_SIZE_SHARE = 0.85  # of the microbatches: a larger problem saves too little
SEARCH_SHARE = 0.08  # of all time, for one small problem
MIN_DECODINGS = 2_000  # if the time allows fewer decodings, it is better spent on blocks
CUTS = 16  # parts of a small schedule that are tried as the steady state; the first few are usually the best
CUT_RULES = (RULES[2], RULES[1], RULES[0])
MAX_REPEATED, MOMENTS = 16, 38  # the most microbatches of a repeated part; moments at which a schedule is cut
PAUSE = 2.0  # the small search runs for this many times the cost of repeating before its schedule is repeated again

Search = Callable[[State], Iterator[None]]


def sizes_of(problem: Problem) -> list[int]:
    """Sizes, in microbatches, of small problems that are worth solving first. There are none if microbatches differ or take
    several routes, or if passes run on side streams."""
    graph = None if len(problem.side_stream) else microbatch_graph(problem)
    if graph is None or not problem.alike or graph.microbatches != problem.microbatches:
        return []
    most = min(problem.ranks, 2 * microbatches_in_flight(graph))
    numbers = (dict.fromkeys(round(times * most) for times in sizes) for sizes in (SIZES, LEAST))
    usual, least = ([n for n in some if 2 < n <= MAX_SIZE_SHARE * problem.microbatches] for some in numbers)
    return usual or (least if len(problem.passes) > SHORT_STEP else [])


def extended(state: State, search: Search) -> Iterator[None]:
    """Offer schedules of small problems with their steady states repeated, one size after the other as long as that gains.
    search: solves a small problem, step by step."""
    total = state.clock.left
    few_decodings = total < MIN_DECODINGS * len(state.problem.passes) * SECONDS_PER_DECODED_PASS
    for few in [] if few_decodings else sizes_of(state.problem):
        before = state.value
        yield from _repeated(state, few, SEARCH_SHARE * total, search)
        if state.done or state.value == before:
            break


def _repeated(state: State, few: int, seconds: float, search: Search) -> Iterator[None]:
    """Search the problem of `few` microbatches for so many seconds. Now and then, and at the end, repeat the steady state of
    its best schedule and offer the result."""
    g = microbatch_graph(state.problem)
    if g is None:
        return
    pause = PAUSE * CUTS * len(CUT_RULES) * g.passes.size * SECONDS_PER_DECODED_PASS
    last, when, small = -1, 0.0, None
    for small in state.beside(state.problem.head(few), seconds, search):
        if small.value != last and small.clock.used - when > pause:
            last, when = small.value, small.clock.used
            _offer_repeated(state, g, small.schedule)
        yield
    if small is not None and small.value != last and not state.done:
        _offer_repeated(state, g, small.schedule)


def _offer_repeated(state: State, g: MicrobatchGraph, small: Schedule | None) -> None:
    """Repeat the steady state of a small schedule in several ways, and offer the shortest result, if there is one."""
    small_graph = None if small is None else microbatch_graph(small.problem)
    if small is None or small_graph is None:
        return
    start, best = np.asarray(small.timeline().start)[small_graph.passes], None
    targets = targets_cut_by_time(start, g.microbatches, state.bound.value, microbatches_in_flight(g))
    for target in islice(targets, CUTS):
        for rule in CUT_RULES:
            decoded = decode(g, target, rule)
            state.clock.spend(g.passes.size * SECONDS_PER_DECODED_PASS)
            if decoded is not None and (best is None or decoded.value < best.value):
                best = decoded
    if best is not None:
        state.offer(to_schedule(state.problem, g, best.order), "extension")


def targets_cut_by_time(start: Ints, microbatches: int, least: float = 0.0, flight: int = 1) -> Iterator[Ints]:
    """Target starts, µs, shape (lanes, microbatches), from start times of fewer microbatches, cut at a moment.

    At a moment of the steady state, lanes have begun different numbers of microbatches. So each lane's passes up to the
    moment stay, its next q are repeated until there are enough, a period later each time, and the rest comes behind.
    least: a lower bound for so many microbatches, µs. flight: microbatches in flight at once; in little memory a steady
    state repeats so many. The most promising parts come first: those that would not beat `least` (ramps would), then those
    with all lanes, then those whose slowest lane is fastest.
    """
    few, steady = start.shape[1], {}
    further, span = microbatches - few, float(start.max() - start.min())
    for moment in np.linspace(start.min(), start.max(), MOMENTS + 2)[1:-1]:
        begun = (start < moment).sum(axis=1)
        for q in sorted({*range(1, MAX_REPEATED + 1), flight}):
            step = _steps(start, begun, q)
            if 2 * len(step) >= len(start):
                no_steady_state = span + further * float(np.median(step)) / q < least
                score = no_steady_state, len(step) < len(start), float(step.max()) / q
                steady[q, begun.tobytes()] = score, q, begun
    for _, q, begun in sorted(steady.values(), key=lambda entry: entry[:2]):
        yield _with_part_repeated(start, begun, q, further, float(np.median(_steps(start, begun, q))))


def _steps(start: Ints, begun: Ints, q: int) -> Ints:
    """For lanes with more than q passes left: µs from the first pass that has not begun to the q-th one after it."""
    lanes = np.flatnonzero(begun + q < start.shape[1])
    return start[lanes, begun[lanes] + q] - start[lanes, begun[lanes]]


def _with_part_repeated(start: Ints, begun: Ints, q: int, more: int, period: float) -> Ints:
    """Repeat the q passes of each lane behind its begun ones, a period (µs) later each time, until there are `more` further
    passes. A lane with fewer than q left repeats its last q, behind its end."""
    few = start.shape[1]
    ends = begun + q > few
    cut = np.where(ends, few, begun)[:, None]
    first = np.where(ends, few - q, begun)[:, None]
    j = np.arange(few + more)[None]
    turn = (j - cut) // q + ends[:, None]
    middle, before = (j >= cut) & (j < cut + more), j < cut
    source = np.where(before, j, np.where(middle, first + (j - cut) % q, j - more))
    shift = np.where(before, 0.0, np.where(middle, turn * period, more / q * period))
    return (np.take_along_axis(start, source, axis=1) + shift).astype(np.int64)
