"""Named schedules of the V placement: rank r holds stages r and 2p − 1 − r (arXiv 2401.10241, 2405.15362), and those with a
sharded vocabulary (arXiv 2411.05288, section 5).

A building block (arXiv 2405.15362) says in which slots one microbatch's passes run; a pass takes one slot, and the block is
repeated every period (here six slots). With equal pass times this leaves no bubble. Squeezing, and re-ordering of warm-up
and cool-down (section 3.3 there), use equal times and the memory of the block itself, so an order depends only on p and m.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from ..greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph, with_mean_microbatches
from ..greedy.decoding import Decoded, DecodeRule, decode, repeated_targets, to_schedule
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..util.errors import BadInput
from .plain_step import PlainStep, Rows, check_plain, check_shape, order_of, rows_of

RAMPS = (DecodeRule(early=1), DecodeRule(early=2))


class Block(NamedTuple):
    """A building block. slots: (kind, stage) → the slot in which one microbatch's pass starts; F, B and W take one slot, BW
    two. period: slots between microbatches. room: the number of chunks whose activations each rank may hold."""

    slots: Mapping[tuple[str, int], int]
    period: int
    room: Sequence[int]


def repeated(problem: Problem, name: str, block: Block) -> Schedule:
    """The block repeated, squeezed and its ramps re-ordered. Raises BadInput where microbatches differ."""
    graph, decoded = squeezed(problem, name, block)
    return to_schedule(problem, graph, decoded.order)


def squeezed(problem: Problem, name: str, block: Block, wait: int = 0) -> tuple[MicrobatchGraph, Decoded]:
    """The graph of one microbatch of the problem, and the block's schedule with equal pass times. wait: the least number of
    slots between the last stage's forward and its backward. Raises BadInput if microbatches differ."""
    graph = microbatch_graph(with_mean_microbatches(_unit_times(problem, wait)))
    if graph is None:
        raise BadInput(f"{name}: microbatches differ in what they wait for")
    passes, first = problem.passes, graph.passes[:, 0]
    graph = graph._replace(
        taken=passes.are("F")[first].astype(np.int64),
        freed=passes.are("W", "BW")[first].astype(np.int64),
        capacity=np.array(block.room, np.int64),
        span=False,
    )
    offset = np.array([block.slots[passes.kind_names[row], int(passes.stage[row])] for row in first], np.int64)
    # The shorter result of the two ways to fill warm-up and cool-down (see `DecodeRule`); both keep within the memory.
    decoded = [decode(graph, repeated_targets(graph, offset, block.period), rule) for rule in RAMPS]
    return graph, min((each for each in decoded if each is not None), key=lambda each: each.value)


def _unit_times(problem: Problem, wait: int) -> Problem:
    """The problem with passes of length 1 (BW 2), and no lags but `wait`, from the last F to the last backward."""
    p, e, last = problem.passes, problem.edges, problem.stages - 1
    turns = p.are("F")[e.before] & p.are("B", "BW")[e.after] & (p.stage[e.before] == last) & (p.stage[e.after] == last)
    duration: Ints = 1 + p.are("BW").astype(np.int64)
    edges = replace(e, lag=np.where(turns, wait, 0), sent=np.zeros_like(e.sent))
    return replace(problem, passes=replace(p, duration=duration), edges=edges)


PERIOD = 6  # slots: F, B and W of two chunks
Slots = tuple[int, int, int, int]  # of a rank: F of its first stage, F and B of its second, B of its first


@order_of("v-min")
def v_min(problem: Problem) -> Schedule:
    """V-Min (arXiv 2405.15362, appendix): a third of 1F1B's activations, at most ⌊(p + 4)/3⌋ microbatches."""
    d = problem.ranks
    shift = 2 if d % 3 == 0 else 0
    return _repeated(problem, "v-min", lambda i: (i, 2 * d - i - 1, 2 * d + shift + i, 4 * d + shift - i - 1), (d + 4) // 3)


@order_of("v-half")
def v_half(problem: Problem) -> Schedule:
    """V-Half (arXiv 2405.15362, appendix): half of 1F1B's activations, at most ⌊(p + 2)/2⌋ microbatches."""
    check_plain(problem, "v-half", "vee")
    return repeated(problem, "v-half", v_half_block(problem.ranks))


def v_half_block(d: int) -> Block:
    """The block of V-Half on `d` ranks."""
    shift = 3 if d % 2 == 0 else 0
    return _block(d, lambda i: (2 * i, 3 * d - i - 2, 3 * d + shift + 2 * i - 1, 6 * d + shift - i - 2), (d + 2) // 2)


@order_of("v-zb")
def v_zb(problem: Problem) -> Schedule:
    """V-ZB (arXiv 2405.15362): V-Half's block with lifespans of 12p − 2 in all; p microbatches, no bubble at unit times."""
    d = problem.ranks
    return _repeated(problem, "v-zb", lambda i: (4 * i, 6 * d - 2 * i - 5, 6 * d + 4 * i - 4, 12 * d - 2 * i - 9), d)


@rows_of("zb-v")
def zb_v(step: PlainStep) -> Rows:
    """ZB-V (arXiv 2401.10241, section 6): 2p − 1 chunk forwards before the first backward on every rank, then one forward
    one backward of either chunk. The pattern needs 2p − 1 microbatches; with fewer microbatches, passes are left out."""
    ranks, m, rows = step.ranks, step.microbatches, {}
    check_shape(step, "vee")
    for rank in range(ranks):
        lanes = _v_row(rank, ranks, max(m, 2 * ranks - 1))
        own = np.empty(len(lanes), np.int64)
        for lane, (place, kind) in enumerate(product((rank, 2 * ranks - 1 - rank), "FBW")):
            positions = np.flatnonzero(lanes == lane)
            own[positions[:m]] = step.find(kind, np.full(m, place), np.arange(m))
            own[positions[m:]] = -1
        rows[f"compute:{rank}"] = own[own >= 0]
    return rows


def _v_row(rank: int, ranks: int, m: int) -> Ints:
    """One rank's order for m ≥ 2p − 1, as numbers: F, B, W of its first stage are 0, 1, 2, those of its second 3, 4, 5."""
    later = ranks - rank
    parts = (
        ([0], 2 * later - 1),
        ([3, 0], rank),
        ([3, 4, 5], later),
        ([0, 1, 2, 3, 4, 5], m - later - ranks + 1),
        ([1, 2, 3, 4, 5], later - 1),
        ([1, 4], rank),
        ([1, 2], later),
        ([5], rank),
        ([2], rank),
    )
    return np.concatenate([np.tile(np.array(part, np.int64), times) for part, times in parts])


@order_of("1f1b-v")
def one_f_one_b_v(problem: Problem) -> Schedule:
    """1F1B-V (arXiv 2405.15362): the V placement with a fused backward, about two thirds of 1F1B's activations.

    The paper does not print the block; this one is derived. F takes one slot and BW two, at positions modulo six that differ
    for all passes of a rank: rank i has F at i and 1 − i, and BW at i + 2 + (i mod 3) and at i + 4, i + 1 or i + 1 for i mod
    3 = 0, 1 or 2. Each pass runs at the first slot with its position after the pass that it waits for.
    """
    d = problem.ranks
    near = list(range(d))
    far = _chain([(1 - i) % PERIOD for i in reversed(range(d))], d, 1)[::-1]
    back = _chain([(i + 2 + i % 3) % PERIOD for i in range(d)], far[0] + 1, 2)
    last = _chain([(i + (4, 1, 1)[i % 3]) % PERIOD for i in reversed(range(d))], back[-1] + 2, 2)[::-1]
    held = ((last[i] + 2 - near[i], back[i] + 2 - far[i]) for i in range(d))
    peak = max(-(-first // PERIOD) - (-other // PERIOD) for first, other in held)
    return _repeated(problem, "1f1b-v", lambda i: (near[i], far[i], back[i], last[i]), peak / 2, fused=True)


def _chain(places: list[int], begin: int, apart: int) -> list[int]:
    """For each position in `places` (modulo six) the next slot with it, at least `apart` slots after the one before."""
    slots: list[int] = []
    for place in places:
        least = slots[-1] + apart if slots else begin
        slots.append(least + (place - least) % PERIOD)
    return slots


def _repeated(problem: Problem, name: str, slots: Callable[[int], Slots], peak: float, *, fused: bool = False) -> Schedule:
    """The block repeated every six slots, squeezed and its ramps re-ordered within `peak` microbatches' activations."""
    check_plain(problem, name, "vee", fused)
    return repeated(problem, name, _block(problem.ranks, slots, peak, fused=fused))


def _block(ranks: int, slots: Callable[[int], Slots], peak: float, *, fused: bool = False) -> Block:
    """The block of these slots, with W in the first free slots after B, and memory for `peak` microbatches."""
    backward = "BW" if fused else "B"
    block: dict[tuple[str, int], int] = {}
    for rank in range(ranks):
        near, far = rank, 2 * ranks - 1 - rank
        keys = (("F", near), ("F", far), (backward, far), (backward, near))
        at = dict(zip(keys, slots(rank), strict=True))
        taken = {slot % PERIOD for slot in at.values()}
        for stage in () if fused else (far, near):
            slot = next(s for s in range(at["B", stage] + 1, at["B", stage] + PERIOD + 1) if s % PERIOD not in taken)
            taken.add(slot % PERIOD)
            at["W", stage] = slot
        block |= at
    return Block(block, PERIOD, [round(2 * peak)] * ranks)


SLOT = 4  # ticks of a slot, so that S and T can be placed between two slots
AT_S, AT_T = 2, 3  # ticks after the start of a slot


@order_of("1f1b-vocab")
def one_f_one_b_vocabulary(problem: Problem) -> Schedule:
    """1F1B with a sharded vocabulary (arXiv 2411.05288, figure 10): rank r starts with p − r + 1 forwards with one barrier
    (algorithm 2), and with p − r + 2 with two barriers (algorithm 1). The bubble is 1F1B's."""
    ranks = np.arange(problem.ranks)
    slots = {("F", rank): rank for rank in ranks.tolist()}
    slots |= {("BW", rank): 3 * problem.ranks - 2 - 2 * rank for rank in ranks.tolist()}
    return _with_shards(problem, "1f1b-vocab", "single", Block(slots, 3, (problem.ranks - ranks).tolist()), 1, fused=True)


@order_of("zb-h1-vocab")
def zb_h1_vocabulary(problem: Problem) -> Schedule:
    """ZB-H1 with a sharded vocabulary: the block of 1F1B with B and W, where rank r defers r weight gradients; it holds p +
    1 or p + 2 microbatches. The paper does not have this order; it is derived in the same way."""
    p = problem.ranks
    slots = {("F", rank): rank for rank in range(p)}
    slots |= {("B", rank): 3 * p - 2 - 2 * rank for rank in range(p)}
    slots |= {("W", rank): 3 * p - 1 + rank for rank in range(p)}
    return _with_shards(problem, "zb-h1-vocab", "single", Block(slots, 3, [p] * p), 1)


@order_of("v-half-vocab")
def v_half_vocabulary(problem: Problem) -> Schedule:
    """V-Half with a sharded vocabulary (arXiv 2411.05288, section 6.3): one or two microbatches more than V-Half."""
    return _with_shards(problem, "v-half-vocab", "vee", v_half_block(problem.ranks), 2)


def _with_shards(problem: Problem, name: str, shape: str, block: Block, chunks: int, *, fused: bool = False) -> Schedule:
    """The order of `block` with passes S and T. chunks: of a rank. Raises BadInput if the vocabulary is not sharded."""
    p, shards = problem.passes, problem.passes.are("S", "T")
    if not shards.any():
        raise BadInput(f"{name}: the vocabulary is not sharded: name --vocabulary sharded or two-barriers")
    plain = np.flatnonzero(~shards)
    step = problem.only(plain)
    check_plain(step, name, shape, fused)
    barriers = 1 + int(p.are("T")[problem.edges.before].any())  # with one, nothing waits for T
    room = [held + barriers * chunks for held in block.room]
    late = {key: slot + (0 if key[0] == "F" else barriers * block.period) for key, slot in block.slots.items()}
    # One slot less than a period: the steady state stays the same, and warm-up and cool-down wait less for B.
    wait = block.period - 1
    graph, decoded = squeezed(step, name, Block(late, block.period, room), barriers * wait)
    tick = np.zeros(len(p), np.int64)
    tick[plain[graph.passes]] = SLOT * decoded.start
    ends, S, T = problem.rows("F", stage=step.stages - 1), problem.rows("S"), problem.rows("T")
    behind = np.zeros(problem.microbatches, np.int64)
    behind[p.microbatch[ends]] = tick[ends] + SLOT
    tick[S] = behind[p.microbatch[S]] + AT_S
    tick[T] = behind[p.microbatch[T]] + AT_T + SLOT * (wait if barriers == 2 else block.period)
    orders = {stream: rows[np.argsort(tick[rows], kind="stable")] for stream, rows in problem.members.items()}
    return Schedule.of(problem, orders)
