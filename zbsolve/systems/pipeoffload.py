"""PipeOffload (arXiv 2503.01328): a uniform interleaved order, with copies to host memory and back beside its passes.

Microbatches start at equal intervals, so the lifespan of a chunk is the same for all of them; it is longest for the first
chunks. A rank alternates copies out and back: out as early as possible after F, back as late as possible before the
backward. Two ranks share a host bus, so ranks are paired: one copies out while the other copies back.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..build.numbers import Numbers, whole_numbers
from ..greedy.lists.list_scheduler import schedule_by_start
from ..greedy.side_stream import without_side_streams
from ..problem import Problem
from ..problem.placement import describe
from ..problem.tables import Bools, Edges, Ints
from ..schedule import Schedule
from ..schedule.timeline import Timeline, simulate
from ..util.errors import BadInput
from .plain_step import WrongPlacement, order_of, plain_stages

SLOTS = 3  # of a chunk of one microbatch: F, B and W
PAIR = 2  # ranks


class Block(NamedTuple):
    """Slots of a microbatch, repeated every `period`. forward, backward: of each stage's F and B. length: of a slot, µs."""

    forward: Ints
    backward: Ints
    period: int
    length: float

    @property
    def gap(self) -> Ints:
        """Slots between F and the backward, for each stage."""
        return self.backward - self.forward - 1


class Turns(NamedTuple):
    """When a rank may copy. A copy out takes `out` µs; copies out start at `first` and then every `cycle` µs. A copy back
    takes `back` µs and starts `behind` µs after a start of a copy out."""

    first: int
    cycle: int
    out: int
    back: int
    behind: int

    @property
    def least(self) -> int:
        """The time between F and the backward, µs, that is always enough for both copies: three turns out and back, if one
        stream has both. The paper's code (`add_send_recv`) does not offload chunks with less time."""
        return 2 * self.cycle + self.out + self.back


@order_of("po-f")
def po_full(problem: Problem) -> Schedule:
    """PO-F (arXiv 2503.01328): all chunks are offloaded, except those whose backward is too soon. A device holds about four
    chunks, for any number of ranks and chunks."""
    if not _beyond_half(problem, _offloaded(problem, "po-f")).any():
        raise BadInput("po-f: the step offloads nothing but of the first half of the chunks, which is po-h")
    return _schedule(problem, "po-f")


@order_of("po-h")
def po_half(problem: Problem) -> Schedule:
    """PO-H (arXiv 2503.01328): the chunks with the longest lifespan are offloaded, the first ⌈v/2⌉ of each rank. A device
    holds (v + 2)/(8v)·M, and the bytes that are being copied."""
    if _beyond_half(problem, _offloaded(problem, "po-h")).any():
        raise BadInput("po-h: the step offloads more than the first half of the chunks, which is po-f")
    return _schedule(problem, "po-h")


def full_copies(step: Problem, O: Numbers, R: Numbers) -> Bools:  # noqa: E741 (as in `with_offload`)
    """Which stages PO-F offloads, shape (stages,): those with enough time between F and the backward for both copies.
    step: without offload. O, R: µs of copies out and back, for each stage."""
    return _in_time(step, O, R, "po-f")


def half_copies(step: Problem, O: Numbers, R: Numbers) -> Bools:  # noqa: E741
    """Which stages PO-H offloads: as `full_copies`, but of the first half of the chunks only."""
    return _in_time(step, O, R, "po-h") & ~_beyond_half(step, np.arange(step.stages))


def _in_time(step: Problem, O: Numbers, R: Numbers, name: str) -> Bools:  # noqa: E741
    block = _block(without_side_streams(step), name)
    times = (whole_numbers(us, what, step.stages).tolist() for us, what in ((O, "O"), (R, "R")))
    least = [Turns(0, out + back, out, back, out).least for out, back in zip(*times, strict=True)]
    return block.gap * block.length >= least


def _beyond_half(problem: Problem, stages: Ints) -> Bools:
    """Which of the stages are not in the first ⌈v/2⌉ chunks of their rank."""
    chunks = problem.stages // problem.ranks
    return stages >= (chunks + 1) // 2 * problem.ranks


def _offloaded(problem: Problem, name: str) -> Ints:
    """The stages that offload. Raises BadInput if there are none."""
    stages = np.unique(problem.passes.stage[problem.rows("O")])
    if not len(stages):
        raise BadInput(f"{name}: the step offloads nothing; it is defined where passes O and R copy activations")
    return stages


def _schedule(problem: Problem, name: str) -> Schedule:
    """The order. Syncs limit each device to its planned peak: copies back are late, and forwards wait for copies out."""
    plain, p = without_side_streams(problem), problem.passes
    cycles, start = _turns(problem, np.zeros(problem.ranks, np.int64)), np.zeros(len(p), np.int64)
    start[problem.computing] = _starts(plain, _with_time_to_copy(_block(plain, name), problem, cycles))
    start = _after_inputs(problem, start)
    begun = np.array([start[problem.rows("F", rank=rank)].min() for rank in range(problem.ranks)])
    for rank, turns in _turns(problem, begun).items():
        _put_copies(problem, start, rank, turns, name)
    peaks = Timeline(problem, start, start + p.duration).peak_bytes
    schedule = schedule_by_start(replace(problem, capacity=peaks), start)
    return Schedule(problem, schedule.order, schedule.syncs)


def _block(plain: Problem, name: str) -> Block:
    """The uniform block. A microbatch starts every 3v slots. Its chunks start 3k slots after each other; from rank to rank
    it takes one slot forwards and two backwards, so that F, B and W fill all slots. k: the least number from ⌈p/2⌉ on with
    which a chunk has time to go through all ranks (the paper's code: `get_optimal_building_block`). Raises BadInput."""
    stages, split = plain_stages(plain, name)
    ranks, chunks = plain.ranks, len(stages) // plain.ranks
    if chunks == 1 or describe(stages) != ("loop" if chunks == 2 else f"loop{chunks}"):
        raise WrongPlacement(f"{name}: is defined for placement loop only")
    total = {kind: int(plain.passes.duration[plain.rows(kind)].sum()) for kind in plain.passes.kinds}
    chains = max(total["F"], total["B"] if split else 0)
    k = max((ranks + 1) // 2, math.ceil(ranks * chains / max(sum(total.values()), 1)))
    chunk, rank = np.divmod(np.arange(len(stages)), ranks)
    turn = np.arange(chunks)
    at = SLOTS * (k * turn + turn * math.gcd(chunks, k) // chunks)  # no two chunks in one slot modulo 3v
    late = np.minimum(rank, max(0, 2 * ranks - SLOTS * k))  # else gradients would come back to rank 0 too late
    backward = at[-1] + SLOTS * ranks - 2 - 2 * rank + at[chunks - 1 - chunk]
    length = plain.work / (plain.microbatches * chunks * SLOTS)
    return Block(at[chunk] + rank + late, backward + late, SLOTS * chunks, length)


def _with_time_to_copy(block: Block, problem: Problem, turns: dict[int, Turns]) -> Block:
    """The block with backwards delayed until all offloaded chunks can be copied back in time."""
    stages = _offloaded(problem, "")
    least = np.array([turns[rank].least for rank in (stages % problem.ranks).tolist()])
    short = least / max(block.length, 1e-9) - block.gap[stages]
    return block._replace(backward=block.backward + SLOTS * max(0, math.ceil(short.max() / SLOTS)))


def _starts(plain: Problem, block: Block) -> Ints:
    """The start of each pass of a step without side streams, µs, shape (passes,): passes run in the order of their slots,
    and none starts before the time of its slot."""
    p, source = plain.passes, int(plain.rows("F", stage=0)[0])
    slot = np.where(p.are("F"), block.forward[p.stage], block.backward[p.stage] + p.are("W")) + block.period * p.microbatch
    orders = [rows[np.argsort(slot[rows])] for rows in plain.members.values()]
    others = np.flatnonzero(np.arange(len(p)) != source)
    wait = np.rint(slot[others] * block.length).astype(np.int64) - p.duration[source]
    waits = Edges.of(np.full(len(others), source), others, lag=np.maximum(wait, 0))
    return simulate(replace(plain, edges=plain.edges + waits), orders).start


def _after_inputs(problem: Problem, start: Ints) -> Ints:
    """`start` with passes on side streams as early as their inputs allow."""
    e, side = problem.edges, np.zeros(len(start), bool)
    side[problem.side_stream] = True
    into = np.flatnonzero(side[e.after])
    while True:
        ready = np.where(side, 0, start)
        np.maximum.at(ready, e.after[into], start[e.before[into]] + problem.passes.duration[e.before[into]] + e.lag[into])
        if (ready == start).all():
            return ready
        start = ready


def _turns(problem: Problem, begun: Ints) -> dict[int, Turns]:
    """rank → its turns, for ranks that copy. If each direction has its own stream, copies out and back run at the same time.
    begun: when each rank may start, µs; ranks that share a stream, and pairs, use the time of their first rank."""
    p, turns = problem.passes, {}
    every, returns = problem.rows("O"), problem.rows("R")
    for stream in sorted({p.stream_sets[i] for i in np.unique(p.streams[every]).tolist()}):
        on_it = np.array([streams == stream for streams in p.stream_sets])[p.streams]
        copies_out = every[on_it[every]]
        ranks = np.unique(p.rank[copies_out]).tolist()
        copies_back = returns[np.isin(p.rank[returns], ranks)]
        out, back = int(p.duration[copies_out].max()), int(p.duration[copies_back].max())
        shared = bool(on_it[copies_back].all())
        turn = max(out + back if shared else max(out, back), 1)
        for place, rank in enumerate(ranks):
            lead = ranks[0] if len(ranks) > 1 else rank - rank % PAIR
            shift = place * turn if len(ranks) > 1 else rank % PAIR * out
            turns[rank] = Turns(int(begun[lead]) + shift, len(ranks) * turn, out, back, out if shared else 0)
    return turns


def _put_copies(problem: Problem, start: Ints, rank: int, turns: Turns, name: str) -> None:
    """Set the starts of a rank's copies in `start`, a turn each. Raises BadInput if a copy back would come too early."""
    p, e = problem.passes, problem.edges
    end = start + p.duration
    out, back = problem.rows("O", rank=rank), problem.rows("R", rank=rank)
    left, wanted = np.zeros(len(p), np.int64), np.full(len(p), end.max())
    np.maximum.at(left, e.after, end[e.before])
    np.minimum.at(wanted, e.before, start[e.after])
    out, back = out[np.argsort(left[out])], back[np.argsort(-wanted[back])]
    place = np.arange(len(out))
    first = np.maximum.accumulate(-((turns.first - left[out]) // turns.cycle) - place) + place
    last = np.minimum.accumulate((wanted[back] - turns.back - turns.behind - turns.first) // turns.cycle + place) - place
    start[out] = turns.first + turns.cycle * first
    start[back] = turns.first + turns.cycle * last + turns.behind
    pairs = np.flatnonzero(np.isin(e.after, back))
    early = pairs[start[e.after[pairs]] < start[e.before[pairs]] + p.duration[e.before[pairs]]]
    if len(early):
        stage = int(p.stage[e.after[early[0]]])
        raise BadInput(f"{name}: copies of rank {rank} take too long: stage {stage} would come back before it has gone out")
