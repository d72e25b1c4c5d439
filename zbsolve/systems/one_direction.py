"""Named schedules in one direction: GPipe, 1F1B, interleaved and grouped ones, zero-bubble ones, and PipeDream's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import numpy as np

from ..greedy.lists.list_scheduler import list_schedule
from ..greedy.lists.policy_annealing import starting_policies
from ..greedy.side_stream import with_side_streams, without_side_streams
from ..problem import Ints, Problem
from ..problem.placement import describe
from ..schedule import Schedule
from ..util.errors import BadInput
from .plain_step import PlainStep, Rows, WrongPlacement, check_plain, order_of, plain_stages, rows_of, step_in_rows


@rows_of("gpipe")
def gpipe(step: PlainStep) -> Rows:
    """All forwards, then all backwards (arXiv 1811.06965)."""
    return single(step, lambda rank: step.microbatches)


@rows_of("1f1b")
def one_f_one_b(step: PlainStep) -> Rows:
    """1F1B (DAPPLE, arXiv 2007.01045; PipeDream-Flush, arXiv 2006.09503): rank r starts with p − r forwards."""
    return single(step, lambda rank: step.ranks - rank)


@rows_of("1f1b-split")
def one_f_one_b_split(step: PlainStep) -> Rows:
    """1F1B with a split backward: each W directly follows its B, so the previous rank only waits for B. It is ZB-H1 (arXiv
    2401.10241, section 2.3) without deferred weight gradients."""
    if not step.split:
        raise BadInput("1f1b-split: needs B and W apart; with one backward BW the same order is 1f1b")
    return single(step, lambda rank: step.ranks - rank)


@rows_of("zb-h1")
def zb_h1(step: PlainStep) -> Rows:
    """ZB-H1 (arXiv 2401.10241, section 2.3): the warm-up of 1F1B; rank r leaves r weight gradients for later."""
    return single(step, lambda rank: step.ranks - rank, lambda rank: rank)


@rows_of("zb-h2")
def zb_h2(step: PlainStep) -> Rows:
    """ZB-H2 (arXiv 2401.10241, section 2.3): 2(p − r) − 1 forwards in warm-up; rank r leaves 2r weight gradients."""
    return single(step, lambda rank: 2 * (step.ranks - rank) - 1, lambda rank: 2 * rank)


@rows_of("interleaved")
def interleaved(step: PlainStep) -> Rows:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2): groups of p microbatches go through one chunk after the other.

    Rank r starts with 2(p − r − 1) + (v − 1)p + 1 chunk forwards. The paper needs m divisible by p. Here the first group
    also has the remainder: it has g microbatches, and g replaces p in the warm-up. A short last group would deadlock.
    """
    ranks, m = step.ranks, step.microbatches
    first = m if m < ranks else ranks + m % ranks
    groups = [first, *[ranks] * ((m - first) // ranks)]
    return grouped(step, groups, lambda rank, chunks: 2 * (ranks - rank - 1) + (chunks - 1) * first + 1)


@rows_of("breadth-first")
def breadth_first(step: PlainStep) -> Rows:
    """Breadth-first (arXiv 2211.05953, section 4): all forwards of one chunk, then of the next one; then all backwards."""
    return grouped(step, [step.microbatches], lambda rank, chunks: chunks * step.microbatches)


def interleaved_in_groups(problem: Problem, size: int) -> Schedule:
    """Interleaved 1F1B as Megatron runs it (`get_schedule_table`): groups of `size` microbatches, the last one may be
    smaller; rank r starts with 2(p − r − 1) + (v − 1)·size + 1 chunk forwards. Raises BadInput for other groups."""
    count, left = divmod(problem.microbatches, size)
    if not takes_groups(problem, size):
        raise BadInput(
            f"interleaved:{size}: groups have {problem.ranks} to {problem.microbatches} microbatches, the last one at least "
            f"{problem.ranks}, one a rank"
        )
    groups = [size] * count + [left] * (left > 0)
    warm = (problem.ranks - 1) * 2 + 1
    step = step_in_rows(problem, "interleaved")
    return Schedule.of(problem, grouped(step, groups, lambda rank, chunks: warm - 2 * rank + (chunks - 1) * size))


def takes_groups(problem: Problem, size: int) -> bool:
    """Whether Megatron takes groups of `size` microbatches: each group, also the last, has at least one for each rank."""
    left = problem.microbatches % size if size else 0
    return problem.ranks <= size <= problem.microbatches and not 0 < left < problem.ranks


@rows_of("gis")
def gis(step: PlainStep) -> Rows:
    """Grouped interleaving (GIS, arXiv 2503.01328): groups of p microbatches go through one chunk after the other. Between
    ranks the warm-up changes by half as much as in interleaved 1F1B: (v − 1)p + p − r chunk forwards; pv chunks are held."""
    return _gis(step, step.ranks)


@rows_of("interleaved-zb")
def interleaved_zb(step: PlainStep) -> Rows:
    """The interleaved zero-bubble order of torch.distributed.pipelining: GIS, but rank r leaves r weight gradients of its
    chunks for later, as ZB-H1 does (arXiv 2401.10241)."""
    return _gis(step, step.ranks, lambda rank: rank)


@rows_of("gis-h")
def gis_h(step: PlainStep) -> Rows:
    """GIS-H (arXiv 2503.01328): groups of ⌈p/2⌉ microbatches; with v chunks a rank (v + 1)/(2v) of GIS's activations."""
    return _gis(step, -(-step.ranks // 2))


@order_of("zb-1p")
def zb_1p(problem: Problem) -> Schedule:
    """The automatic zero-bubble schedule in 1F1B's memory (arXiv 2401.10241, section 3.1): see `_automatic`."""
    return _automatic(problem, "zb-1p", 1)


@order_of("zb-2p")
def zb_2p(problem: Problem) -> Schedule:
    """The automatic zero-bubble schedule in twice 1F1B's memory (arXiv 2401.10241, section 3.1): see `_automatic`."""
    return _automatic(problem, "zb-2p", 2)


def _automatic(problem: Problem, name: str, times: int) -> Schedule:
    """The automatic zero-bubble schedule (arXiv 2401.10241, section 3.1) with memory for `times` · p microbatches a rank: as
    many forwards first as fit, then one forward one backward, and W in gaps or if memory is full. It is the best over a grid
    of parameters. Raises BadInput if the problem does not say how much memory a microbatch holds."""
    check_plain(problem, name, "single")
    each = np.bincount(problem.passes.rank, problem.taken, problem.ranks) / problem.microbatches
    if not each.all():
        raise BadInput(f"{name}: rank {int(each.argmin())} holds no memory, and the schedule is defined by it")
    room = tuple(int(times * problem.ranks * size) for size in each)
    limited = replace(problem, capacity=room)
    schedule = list_schedule(limited, starting_policies(limited)[0])
    return Schedule(problem, schedule.order, schedule.syncs)


def single(
    step: PlainStep, warm: Callable[[int], int], pending: Callable[[int], int] = lambda rank: 0, back: Ints | None = None
) -> Rows:
    """An order on placement single: forwards first, then one backward one forward. warm: rank → forwards before its first
    backward. pending: rank → number of deferred weight gradients. back: the order of backwards; None: as forwards."""
    m = step.microbatches
    if describe(step.stages) != "single":
        raise WrongPlacement(f"{step.name}: is defined for placement single only")
    rows, back = {}, np.arange(m) if back is None else back
    for rank in range(step.ranks):
        forward, backward = (np.stack([np.full(m, rank), numbers]) for numbers in (np.arange(m), back))
        rows[f"compute:{rank}"] = alternate(step, forward, backward, min(warm(rank), m), pending(rank))
    return rows


def _gis(step: PlainStep, size: int, pending: Callable[[int], int] = lambda rank: 0) -> Rows:
    """GIS with groups of `size` microbatches; remaining ones are distributed over the first groups."""
    ranks, m = step.ranks, step.microbatches
    count = max(1, m // size)
    groups = [m // count + (k < m % count) for k in range(count)]
    return grouped(step, groups, lambda rank, chunks: (chunks - 1) * groups[0] + ranks - rank, pending)


def grouped(
    step: PlainStep,
    sizes: list[int],
    warm: Callable[[int, int], int],
    pending: Callable[[int], int] = lambda rank: 0,
    back: Ints | None = None,
) -> Rows:
    """An order on placement loop: a group of microbatches goes through all chunks of a rank before the next group; backwards
    go through the chunks in reverse. sizes: of groups. warm: (rank, chunks) → chunk forwards before the first backward.
    pending: rank → number of deferred weight gradients. back: the order of backwards; None: as forwards."""
    ranks = step.ranks
    chunks = len(step.stages) // ranks
    if chunks == 1 or describe(step.stages) != ("loop" if chunks == 2 else f"loop{chunks}"):
        raise WrongPlacement(f"{step.name}: is defined for placement loop only")
    ends, forth = list(accumulate(sizes)), np.arange(step.microbatches)
    rows = {}
    for rank in range(ranks):
        both = []
        for turn, order in ((range(chunks), forth), (range(chunks)[::-1], forth if back is None else back)):
            groups = [order[end - size : end] for end, size in zip(ends, sizes, strict=True)]
            parts = [np.stack([np.full(len(g), k * ranks + rank), g]) for g in groups for k in turn]
            both.append(np.concatenate(parts, axis=1))
        warm_up = min(warm(rank, chunks), both[0].shape[1])
        rows[f"compute:{rank}"] = alternate(step, both[0], both[1], warm_up, pending(rank))
    return rows


def alternate(step: PlainStep, forward: Ints, backward: Ints, warm: int, pending: int) -> Ints:
    """A rank's rows: `warm` forwards, then one backward one forward. Each W follows its B, or the B `pending` later.
    forward, backward: stages and microbatches in order, shape (2, passes)."""
    count = forward.shape[1]
    turns = {"F": 3 * (np.arange(count) - warm) + 2, "B" if step.split else "BW": 3 * np.arange(count)}
    turns["F"][:warm] = -1
    if step.split:
        turns["W"] = 3 * (np.arange(count) + pending) + 1
    rows = [step.find(kind, *(forward if kind == "F" else backward)) for kind in turns]
    return np.concatenate(rows)[np.argsort(np.concatenate(list(turns.values())), kind="stable")]


@order_of("pipedream", "pipedream-2bw")
def pipedream(problem: Problem) -> Schedule:
    """PipeDream and PipeDream-2BW: 1F1B in rounds (see `in_rounds`)."""
    return in_rounds(problem, one_f_one_b)


def in_flight(problem: Problem, most: int) -> Schedule:
    """1F1B with at most `most` microbatches in flight (and p − r on rank r); updates as in PipeDream. Raises BadInput."""

    def flushed(plain: Problem) -> Schedule:
        step = step_in_rows(plain, "1f1b")
        return Schedule.of(plain, single(step, lambda rank: min(most, step.ranks - rank)))

    plain = without_side_streams(problem)
    return with_side_streams(problem, in_rounds(plain, flushed) if problem.round else flushed(plain))


def in_rounds(problem: Problem, flushed: Callable[[Problem], Schedule]) -> Schedule:
    """PipeDream (arXiv 1806.03377) and PipeDream-2BW (arXiv 2006.09503). Both have the same order: 1F1B over all
    microbatches, and each update as soon as its gradients are complete. They differ in the problem (see
    `build.with_updates`). flushed: makes 1F1B on the problem without updates."""
    plain, waits = _without_updates(problem)
    stages, _ = plain_stages(plain, "pipedream")
    if stages != tuple(range(problem.ranks)):
        raise WrongPlacement("pipedream: is defined for placement single only")
    order = {}
    for stream, names in flushed(plain).order.items():
        order[stream] = tuple(each for name in names for each in (name, *waits.get(name, ())))
    place = {name: i for names in order.values() for i, name in enumerate(names)}
    e, name_of = problem.edges, problem.names
    for a in np.flatnonzero(problem.passes.are("U")[e.before]).tolist():
        update, user = name_of[e.before[a]], name_of[e.after[a]]
        if place[user] < place[update]:
            raise BadInput(f"pipedream: pass {user} would wait for {update} for ever: the delay of updates is too short")
    return Schedule(problem, order)


def _without_updates(problem: Problem) -> tuple[Problem, dict[str, list[str]]]:
    """The problem without its updates, and for each pass the updates whose last gradient it makes."""
    p, e, names = problem.passes, problem.edges, problem.names
    update = p.are("U")
    if not update.any():
        raise BadInput("pipedream: needs a problem with updates U (zbsolve.updates)")
    waits: dict[str, list[str]] = {}
    for row in np.flatnonzero(update).tolist():
        gradients = e.before[(e.after == row) & ~update[e.before]]
        last = int(gradients[np.argmax(p.microbatch[gradients])])
        waits.setdefault(names[last], []).append(names[row])
    return problem.only(np.flatnonzero(~update)), waits
