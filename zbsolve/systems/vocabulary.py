"""Named schedules with a sharded vocabulary (arXiv 2411.05288, section 5): S and T of all shards among the other passes.

The building block is that of the same schedule without them. Its backwards come one period later for each barrier (a
microbatch more is held on every rank), and all ranks run S of one microbatch at one time between its last F and its last
backward. S and T take no slot: where all ranks stop for them at once, what they stop between stays as it was.
"""

from __future__ import annotations

import numpy as np

from ..problem import Problem
from ..schedule import Schedule
from ..tables import Ints
from ..util.errors import BadInput
from .plain_step import check_plain
from .vee import Block, squeezed, v_half_block

SLOT = 4  # ticks, so that S and T have places of their own between two slots
AT_S, AT_T = 2, 3  # ticks behind the start of a slot


def one_f_one_b_vocabulary(problem: Problem) -> Schedule:
    """1F1B with a sharded vocabulary (arXiv 2411.05288, figure 10): rank r starts with p − r + 1 forwards where there is one
    barrier (algorithm 2), with p − r + 2 where there are two (algorithm 1); 1F1B's bubble."""
    ranks = np.arange(problem.ranks)
    slots = {("F", rank): rank for rank in ranks.tolist()}
    slots |= {("BW", rank): 3 * problem.ranks - 2 - 2 * rank for rank in ranks.tolist()}
    return _with_shards(problem, "1f1b-vocab", "single", Block(slots, 3, (problem.ranks - ranks).tolist()), 1, fused=True)


def zb_h1_vocabulary(problem: Problem) -> Schedule:
    """ZB-H1 with a sharded vocabulary: the block of 1F1B with B and W apart, where rank r leaves r weight gradients for
    later; p + 1 or p + 2 microbatches. The paper has no such order (derived as the others)."""
    p = problem.ranks
    slots = {("F", rank): rank for rank in range(p)}
    slots |= {("B", rank): 3 * p - 2 - 2 * rank for rank in range(p)}
    slots |= {("W", rank): 3 * p - 1 + rank for rank in range(p)}
    return _with_shards(problem, "zb-h1-vocab", "single", Block(slots, 3, [p] * p), 1)


def v_half_vocabulary(problem: Problem) -> Schedule:
    """V-Half with a sharded vocabulary (arXiv 2411.05288, section 6.3): one or two microbatches more than V-Half."""
    return _with_shards(problem, "v-half-vocab", "vee", v_half_block(problem.ranks), 2)


def _with_shards(problem: Problem, name: str, shape: str, block: Block, chunks: int, *, fused: bool = False) -> Schedule:
    """The order of `block` with S and T. chunks: of a rank. Raises BadInput where the vocabulary is not sharded."""
    p, shards = problem.passes, problem.passes.are("S", "T")
    if not shards.any():
        raise BadInput(f"{name}: the vocabulary is not sharded: name --vocabulary sharded or two-barriers")
    rest = np.flatnonzero(~shards)
    step = problem.only(rest)
    check_plain(step, name, shape, fused)
    barriers = 1 + int(p.are("T")[problem.edges.before].any())  # with one, nothing waits for T
    room = [held + barriers * chunks for held in block.room]
    late = {key: slot + (0 if key[0] == "F" else barriers * block.period) for key, slot in block.slots.items()}
    # The last slot of a period is left to the ramps, which then do not wait so long for B; what is repeated stays.
    wait = block.period - 1
    graph, found = squeezed(step, name, Block(late, block.period, room), barriers * wait)
    tick = np.zeros(len(p), np.int64)
    tick[rest[graph.passes]] = SLOT * found.start
    ends, S, T = problem.rows("F", stage=step.stages - 1), problem.rows("S"), problem.rows("T")
    behind = np.zeros(problem.microbatches, np.int64)
    behind[p.microbatch[ends]] = tick[ends] + SLOT
    tick[S] = behind[p.microbatch[S]] + AT_S
    tick[T] = behind[p.microbatch[T]] + AT_T + SLOT * (wait if barriers == 2 else block.period)
    return Schedule.of(problem, {f"compute:{rank}": _in_turn(problem, rank, tick) for rank in range(problem.ranks)})


def _in_turn(problem: Problem, rank: int, tick: Ints) -> Ints:
    """The rows of a rank's passes by their ticks."""
    rows = np.flatnonzero(problem.passes.rank == rank)
    return rows[np.argsort(tick[rows], kind="stable")]
