"""Named schedules of sequence slices: SlimPipe (arXiv 2504.14519), Seq1F1B (arXiv 2406.03488), TeraPipe (arXiv 2102.07988).

They are orders of `one_direction` with slices in place of microbatches, except that backwards run in reverse order of a
microbatch's slices.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..build.attention_balance import one_forward_one_backward
from ..build.attention_exchange import with_parts, without_exchange
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..util.errors import BadInput
from .one_direction import grouped, single
from .plain_step import order_of, plain_stages, step_in_rows


@order_of("slimpipe")
def slimpipe(problem: Problem) -> Schedule:
    """SlimPipe (arXiv 2504.14519, section 4.1): rank r starts with forwards of n + p − r − 1 slices, then one backward one
    forward; it holds as many slices (n: slices of a microbatch). With its attention context exchange (see
    `with_attention_exchange`), helper passes follow the passes that the problem names, in the order for which the exchange
    was planned: SlimPipe's on placement single, and a similar one otherwise."""
    home = without_exchange(problem)
    return _slim(home, "slimpipe", 0) if home is problem else with_parts(problem, one_forward_one_backward(home))


@order_of("seq1f1b")
def seq1f1b(problem: Problem) -> Schedule:
    """Seq1F1B (arXiv 2406.03488, section 3.2): SlimPipe's order, for slices with equal times (section 3.3)."""
    return _slim(problem, "seq1f1b", 0)


@order_of("seq1f1b-zb")
def seq1f1b_zb(problem: Problem) -> Schedule:
    """Seq1F1B with B and W as in ZB-H1 (arXiv 2401.10241, section 2.3): rank r defers W of r slices and holds n + p − 1."""
    if not plain_stages(one_microbatch_a_slice(problem, "seq1f1b-zb"), "seq1f1b-zb")[1]:
        raise BadInput("seq1f1b-zb: needs B and W apart")
    return _slim(problem, "seq1f1b-zb", 1)


@order_of("seq1f1b-i")
def seq1f1b_i(problem: Problem) -> Schedule:
    """Seq1F1B-I (arXiv 2406.03488, section 3.2): interleaved 1F1B of slices. Groups of at least p slices go through one
    chunk after the other. A group is whole microbatches, or a part of one if all groups are then equal.

    With g slices in a group, rank r starts with 2(p − r − 1) + (v − 1)g + n chunk forwards, as in the paper, if a microbatch
    fits into a group. Otherwise its first backward needs all nv chunk forwards of the first microbatch.
    """
    flat, n = one_microbatch_a_slice(problem, "seq1f1b-i"), problem.slices
    sizes = _groups(problem.ranks, problem.microbatches, n)
    before, inside = divmod(n - 1, sizes[0])

    def warm(rank: int, chunks: int) -> int:
        return 2 * (problem.ranks - rank - 1) + (before * chunks + chunks - 1) * sizes[0] + inside + 1

    step = step_in_rows(flat, "seq1f1b-i")
    return Schedule.of(problem, grouped(step, sizes, warm, back=_backwards(flat, n)))


@order_of("terapipe")
def terapipe(problem: Problem) -> Schedule:
    """TeraPipe (arXiv 2102.07988): the forwards of all slices of all microbatches, then all backwards."""
    flat = one_microbatch_a_slice(problem, "terapipe")
    order = _backwards(flat, problem.slices)
    step = step_in_rows(flat, "terapipe")
    return Schedule.of(problem, single(step, lambda rank: step.microbatches, back=order))


def one_microbatch_a_slice(problem: Problem, name: str) -> Problem:
    """The step with each slice as a microbatch, in the same rows. Raises BadInput, naming `name`, if there are no slices."""
    p = problem.passes
    if problem.slices == 1:
        raise BadInput(f"{name}: the step has no slices, and the schedule is defined by them")
    number = np.where(problem.in_microbatch, problem.parts, p.microbatch)
    return replace(problem, passes=replace(p, microbatch=number, slice=0 * p.slice), slice_lengths=())


def _slim(problem: Problem, name: str, pending: int) -> Schedule:
    """One backward one forward; rank r defers `pending` · r weight gradients."""
    flat, n = one_microbatch_a_slice(problem, name), problem.slices
    step = step_in_rows(flat, name)
    rows = single(step, lambda rank: n + step.ranks - rank - 1, lambda rank: pending * rank, _backwards(flat, n))
    return Schedule.of(problem, rows)


def _backwards(flat: Problem, slices: int) -> Ints:
    """The order of backwards: each microbatch's slices in reverse."""
    return np.arange(flat.microbatches).reshape(-1, slices)[:, ::-1].ravel()


def _groups(ranks: int, microbatches: int, slices: int) -> list[int]:
    """The number of slices in each group, at least p: whole microbatches, with the remainder in the first group; or, if a
    microbatch has more than p slices, the smallest part of it that divides it."""
    if slices > ranks:
        size = next(count for count in range(ranks, slices + 1) if slices % count == 0)
        return [size] * (microbatches * slices // size)
    each = -(-ranks // slices)
    first = microbatches if microbatches < each else each + microbatches % each
    return [first * slices, *[each * slices] * ((microbatches - first) // each)]
