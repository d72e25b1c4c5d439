"""Named schedules of one direction: GPipe, 1F1B, interleaved, the zero-bubble ones, grouped interleaving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import numpy as np

from ..greedy.list_scheduler import list_schedule
from ..greedy.policy_annealing import starting_policies
from ..placement import describe
from ..problem import Problem
from ..schedule import Schedule
from ..tables import KINDS, Ints
from ..util.errors import BadInput
from .plain_step import WrongPlacement, plain_stages


def gpipe(problem: Problem) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965)."""
    return single(problem, "gpipe", lambda rank, ranks, m: m, lambda rank: 0)


def one_f_one_b(problem: Problem) -> Schedule:
    """1F1B (DAPPLE, arXiv 2007.01045; PipeDream-Flush, arXiv 2006.09503): rank r starts with p − r forwards."""
    return single(problem, "1f1b", lambda rank, ranks, m: ranks - rank, lambda rank: 0)


def one_f_one_b_split(problem: Problem) -> Schedule:
    """1F1B with a split backward: each W directly behind its B, so that the rank before waits for B alone. It is ZB-H1
    (arXiv 2401.10241, section 2.3) without weight gradients left for later."""
    if not plain_stages(problem, "1f1b-split")[1]:
        raise BadInput("1f1b-split: needs B and W apart; with one backward BW the same order is 1f1b")
    return single(problem, "1f1b-split", lambda rank, ranks, m: ranks - rank, lambda rank: 0)


def zb_h1(problem: Problem) -> Schedule:
    """ZB-H1 (arXiv 2401.10241, section 2.3): the warm-up of 1F1B; rank r leaves r weight gradients for later."""
    return single(problem, "zb-h1", lambda rank, ranks, m: ranks - rank, lambda rank: rank)


def zb_h2(problem: Problem) -> Schedule:
    """ZB-H2 (arXiv 2401.10241, section 2.3): 2(p − r) − 1 forwards in warm-up; rank r leaves 2r weight gradients."""
    return single(problem, "zb-h2", lambda rank, ranks, m: 2 * (ranks - rank) - 1, lambda rank: 2 * rank)


def interleaved(problem: Problem) -> Schedule:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2): chunks in turn, groups of p microbatches.

    Rank r starts with 2(p − r − 1) + (v − 1)p + 1 chunk forwards. The paper needs m divisible by p. Here the first group
    takes the remainder too, g microbatches with g in place of p in the warm-up: a short last group would deadlock.
    """
    ranks, m = problem.ranks, problem.microbatches
    first = m if m < ranks else ranks + m % ranks
    groups = [first, *[ranks] * ((m - first) // ranks)]
    return _grouped(problem, "interleaved", groups, lambda rank, chunks: 2 * (ranks - rank - 1) + (chunks - 1) * first + 1)


def interleaved_in_groups(problem: Problem, size: int) -> Schedule:
    """Interleaved 1F1B as Megatron runs it (`get_schedule_table`): groups of `size` microbatches, the last one smaller where
    they do not divide, and 2(p − r − 1) + (v − 1)·size + 1 chunk forwards of rank r first."""
    count, rest = divmod(problem.microbatches, size)
    groups = [size] * count + [rest] * (rest > 0)
    warm = (problem.ranks - 1) * 2 + 1
    return _grouped(problem, "interleaved", groups, lambda rank, chunks: warm - 2 * rank + (chunks - 1) * size)


def gis(problem: Problem) -> Schedule:
    """Grouped interleaving (GIS, arXiv 2503.01328): the chunks in turn over groups of p microbatches, half the slope of
    interleaved 1F1B's warm-up: (v − 1)p + p − r chunk forwards before rank r's first backward, pv chunks held."""
    return _gis(problem, "gis", problem.ranks)


def interleaved_zb(problem: Problem) -> Schedule:
    """The interleaved zero-bubble order of torch.distributed.pipelining: GIS, but rank r leaves r weight gradients of its
    chunks for later, as ZB-H1 does (arXiv 2401.10241)."""
    return _gis(problem, "interleaved-zb", problem.ranks, lambda rank: rank)


def gis_h(problem: Problem) -> Schedule:
    """GIS-H (arXiv 2503.01328): groups of ⌈p/2⌉ microbatches; with v chunks a rank (v + 1)/(2v) of GIS's activations."""
    return _gis(problem, "gis-h", -(-problem.ranks // 2))


def zb_1p(problem: Problem) -> Schedule:
    """The automatic zero-bubble schedule in 1F1B's memory (arXiv 2401.10241, section 3.1): see `_automatic`."""
    return _automatic(problem, "zb-1p", 1)


def zb_2p(problem: Problem) -> Schedule:
    """The automatic zero-bubble schedule in twice 1F1B's memory (arXiv 2401.10241, section 3.1): see `_automatic`."""
    return _automatic(problem, "zb-2p", 2)


def _automatic(problem: Problem, name: str, times: int) -> Schedule:
    """The automatic zero-bubble schedule (arXiv 2401.10241, section 3.1) within `times` p microbatches a rank: as many
    forwards first as fit, then one forward one backward, W where a gap or the memory asks for it; the best of a grid of
    its choices. Raises BadInput where nothing says what a microbatch holds."""
    stages, split = plain_stages(problem, name)
    if describe(stages) != "single":
        raise WrongPlacement(f"{name}: is defined for placement single only")
    if not split:
        raise BadInput(f"{name}: needs B and W apart")
    one = np.bincount(problem.passes.rank, problem.taken, problem.ranks) / problem.microbatches
    if not one.all():
        raise BadInput(f"{name}: rank {int(one.argmin())} holds no memory, and the schedule is defined by it")
    room = tuple(int(times * problem.ranks * size) for size in one)
    limited = replace(problem, capacity=room)
    found = list_schedule(limited, starting_policies(limited)[0])
    return Schedule(problem, found.order, found.syncs)


def single(problem: Problem, name: str, warm: Callable[[int, int, int], int], pending: Callable[[int], int]) -> Schedule:
    """Placement single: `warm` forwards, of rank, ranks and microbatches, before the first backward, then one backward one
    forward; `pending` weight gradients, of rank, are left for later."""
    return Schedule.of(problem, single_rows(problem, name, warm, pending, np.arange(problem.microbatches)))


def single_rows(
    problem: Problem, name: str, warm: Callable[[int, int, int], int], pending: Callable[[int], int], back: Ints
) -> dict[str, Ints]:
    """The rows of each stream of `single`, with the backwards in the order `back`."""
    stages, split = plain_stages(problem, name)
    ranks, m = problem.ranks, problem.microbatches
    if describe(stages) != "single":
        raise WrongPlacement(f"{name}: is defined for placement single only")
    rows = {}
    for rank in range(ranks):
        forward, backward = (np.stack([np.full(m, rank), one]) for one in (np.arange(m), back))
        first = min(warm(rank, ranks, m), m)
        rows[f"compute:{rank}"] = alternate(problem, forward, backward, first, pending(rank), split)
    return rows


def _gis(problem: Problem, name: str, size: int, pending: Callable[[int], int] = lambda rank: 0) -> Schedule:
    """Groups of `size` microbatches, what is left over shared among the first ones."""
    ranks, m = problem.ranks, problem.microbatches
    count = max(1, m // size)
    groups = [m // count + (k < m % count) for k in range(count)]
    return _grouped(problem, name, groups, lambda rank, chunks: (chunks - 1) * groups[0] + ranks - rank, pending)


def _grouped(
    problem: Problem,
    name: str,
    sizes: list[int],
    warm: Callable[[int, int], int],
    pending: Callable[[int], int] = lambda rank: 0,
) -> Schedule:
    """The schedule of `grouped_rows`, backwards in the order of forwards."""
    return Schedule.of(problem, grouped_rows(problem, name, sizes, warm, pending, np.arange(problem.microbatches)))


def grouped_rows(
    problem: Problem,
    name: str,
    sizes: list[int],
    warm: Callable[[int, int], int],
    pending: Callable[[int], int],
    back: Ints,
) -> dict[str, Ints]:
    """Loop placement, the rows of each stream: each group of microbatches goes through all chunks of a rank before the next
    one, backwards, in the order `back`, through them the other way round; `warm` chunk forwards, of rank and chunks, come
    before the first backward, and `pending` weight gradients, of rank, are left for later."""
    ranks, (stages, split) = problem.ranks, plain_stages(problem, name)
    chunks = len(stages) // ranks
    if chunks == 1 or describe(stages) != ("loop" if chunks == 2 else f"loop{chunks}"):
        raise WrongPlacement(f"{name}: is defined for placement loop only")
    ends = list(accumulate(sizes))
    rows = {}
    for rank in range(ranks):
        both = []
        for turn, order in ((range(chunks), np.arange(len(back))), (range(chunks)[::-1], back)):
            groups = [order[end - size : end] for end, size in zip(ends, sizes, strict=True)]
            parts = [np.stack([np.full(len(g), k * ranks + rank), g]) for g in groups for k in turn]
            both.append(np.concatenate(parts, axis=1))
        warm_up = min(warm(rank, chunks), both[0].shape[1])
        rows[f"compute:{rank}"] = alternate(problem, both[0], both[1], warm_up, pending(rank), split)
    return rows


def alternate(problem: Problem, forward: Ints, backward: Ints, warm: int, pending: int, split: bool) -> Ints:
    """The rows of `warm` forwards, then one backward one forward; W follows its B, `pending` of them later. forward,
    backward: stages and microbatches in order, shape (2, passes)."""
    count = forward.shape[1]
    turns = {"F": 3 * (np.arange(count) - warm) + 2, "B" if split else "BW": 3 * np.arange(count)}
    turns["F"][:warm] = -1
    if split:
        turns["W"] = 3 * (np.arange(count) + pending) + 1
    rows = []
    for kind in turns:
        found = problem.passes.find(np.full(count, KINDS.index(kind)), *(forward if kind == "F" else backward))
        assert found is not None  # a plain step has all of them
        rows.append(found)
    order: Ints = np.concatenate(rows)[np.argsort(np.concatenate(list(turns.values())), kind="stable")]
    return order
