"""Attention of late slices computed by ranks that run early ones (SlimPipe, arXiv 2504.14519, attention context exchange).

With causal attention the last of n even slices takes 2n − 1 times the attention of the first. Ranks run different slices at
the same time, so all wait for the one with the latest. A pass that hands over attention is cut into parts:

    FQ  the forward up to queries, keys and values              BQ  the backward down to the gradient of attention's output
    FA  the attention that stays                                BA  its gradients
    FH  the helper's attention                                  BH  its gradients
    F   merges both by their softmax statistics, and goes on    B, BW  adds them up, and goes on

FH and BH run on the helper's rank, with the stage's number, after a pass of the helper's own. At the start of that pass the
helper allocates memory for what it receives and computes, and frees it at FH's end. If there are several after one pass,
they run one after the other, with memory for the running one and the next. FA runs while the helper computes; and a rank
that still waits may run other passes. F and B (or BW) keep their names, and pass on what they did before; what came before
them now comes before FQ and BQ.

`exec.attention` runs this: at each call of attention F sends queries, and keys of the blocks to hand over, FH sends back
their `partial_attention`, and F merges it; B sends the gradient, the whole output and its statistics, and BH sends back
`partial_gradients`. If a stage has several layers of attention, each part stands for their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..kinds import ATTENTION
from ..problem import Problem
from ..problem.tables import Bools, Edges, Ints
from ..schedule import Schedule
from ..util.errors import BadInput
from .attention_balance import Handing, balanced, one_forward_one_backward
from .attention_costs import AttentionExchange, Parts, parts_of, traffic
from .links import without_links
from .numbers import check_apart


def with_attention_exchange(
    problem: Problem, costs: AttentionExchange, handings: Sequence[Handing] | None = None
) -> Problem:
    """`problem`, a step in even sequence slices, where passes hand attention to other ranks (SlimPipe, arXiv 2504.14519).

    costs: µs and bytes of attention between slices.
    handings: which passes hand how many blocks to which rank; None: as ranks that run one forward one backward would wait
        (see `balanced`).

    Apply it after slices; `with_links` before it, and again after it for its own messages. Raises BadInput for numbers that
    make no sense, a step without slices or already with an exchange, and for handings of other passes, to the pass's own
    rank, or of more blocks than it has.
    """
    if not isinstance(costs, AttentionExchange):
        raise BadInput(f"attention exchange: {costs}: an `AttentionExchange` is needed, which says what attention takes")
    check_exchangeable(problem)
    costs = costs.checked(problem.stages)
    handed = balanced(one_forward_one_backward(without_links(problem)), costs) if handings is None else list(handings)
    _check_handings(problem, costs, handed)
    if not handed:
        return problem
    columns = np.array(handed, np.int64).T
    cut = _cut(problem, columns[0], parts_of(problem, costs, columns[0]))
    return _with_helpers(cut, costs, columns, len(problem.passes))


def _cut(problem: Problem, rows: Ints, parts: Parts) -> Problem:
    """`problem` with these passes cut: first new rows for the parts before their attention, then for all of their attention;
    the rest keeps the old name. The first part gets the inputs of the pass, and all that waited for the pass wait for its
    last part. Its bytes are held from the first part to the last."""
    p, e = problem.passes, problem.edges
    duration, forward = p.duration.copy(), p.are("F")[rows]
    duration[rows] = parts.behind
    passes = replace(p, duration=duration)
    for kinds, time in ((("FQ", "BQ"), parts.before), (("FA", "BA"), parts.attention)):
        passes = passes.like(rows, np.where(forward, *kinds), "compute", time)
    begin, first = np.arange(len(p)), len(p) + np.arange(len(rows))
    begin[rows] = first
    early = np.flatnonzero(begin[e.after] != e.after)  # what precedes a pass must precede its first part
    held = np.flatnonzero((begin[e.before] != e.before) & (e.bytes > 0))
    edges = replace(e, bytes=np.where(begin[e.before] != e.before, 0, e.bytes))
    edges += Edges.of(e.before[early], begin[e.after[early]], lag=e.lag[early])
    edges += Edges.of(begin[e.before[held]], e.after[held], bytes=e.bytes[held], pool=e.pool[held])
    edges += Edges.of(first, first + len(rows)) + Edges.of(first + len(rows), rows)
    return replace(problem, passes=passes, edges=edges)


def _with_helpers(problem: Problem, costs: AttentionExchange, handed: Ints, first: int) -> Problem:
    """`problem`, with these passes cut, and the helpers' passes. handed: `Handing` in columns, shape (4, n); first: the row
    of the first part of the first pass."""
    p, (rows, blocks, behind, ahead) = problem.passes, handed
    count, forward, stage, begin = len(rows), p.are("F")[rows], p.stage[rows], first + np.arange(len(rows))
    unit = np.where(forward, np.asarray(costs.forward)[stage], np.asarray(costs.backward)[stage])
    away = np.rint(blocks * unit / costs.blocks).astype(np.int64)
    duration = p.duration.copy()
    duration[begin + count] -= away
    late, own, helpers = behind >= 0, np.where(behind >= 0, behind, ahead), begin + 2 * count
    passes = replace(p, duration=duration).like(rows, np.where(forward, "FH", "BH"), "compute", away, rank=p.rank[own])
    forth, back = traffic(costs, stage, p.slice[rows], blocks, ~forward)
    neighbour = _neighbours(own, late, helpers)
    chained = np.flatnonzero(neighbour != own)  # a further edge tells the own pass, as the neighbour is another helper
    edges = problem.edges + Edges.of(begin + count, rows, bytes=back)
    edges += Edges.of(begin, helpers, lag=costs.message(stage, forth))
    edges += Edges.of(helpers, rows, lag=costs.message(stage, back))
    edges += Edges.of(np.where(late, neighbour, helpers), np.where(late, helpers, neighbour), bytes=forth + back)
    edges += Edges.of(np.where(late, own, helpers)[chained], np.where(late, helpers, own)[chained])
    return replace(problem, passes=passes, edges=edges)


def _neighbours(own: Ints, late: Bools, helpers: Ints) -> Ints:
    """For each helper, the pass next to it on its rank: its own pass, or another helper of that. Memory of a late helper is
    held from the start of this pass, that of an early one until its end. late: does a helper run after its own pass?"""
    neighbour, last = own.copy(), dict[tuple[int, bool], int]()
    for i, place in enumerate(zip(own.tolist(), late.tolist(), strict=True)):
        previous = last.get(place)
        if previous is not None and late[i]:
            neighbour[i] = helpers[previous]
        elif previous is not None:
            neighbour[previous] = helpers[i]
        last[place] = i
    return neighbour


def check_exchangeable(problem: Problem) -> None:
    """Raise BadInput unless this is a step in even slices, on one route, without an exchange."""
    if problem.slices == 1:
        raise BadInput("attention exchange: the problem has no slices: put slices in before")
    if len(set(problem.slice_lengths)) > 1:
        raise BadInput("attention exchange: the problem's slices are uneven, and the exchange is of even ones")
    check_apart(problem, ATTENTION)
    if problem.passes.that(away=True).any():
        raise BadInput("attention exchange: the problem has one already")
    if len(problem.routes) > 1:
        raise BadInput("attention exchange: microbatches take several routes")


def _check_handings(problem: Problem, costs: AttentionExchange, handed: Sequence[Handing]) -> None:
    p, known, seen = problem.passes, problem.passes.are("F", "B", "BW"), set[int]()
    for i, handing in enumerate(handed):
        if not 0 <= handing.row < len(p) or not known[handing.row]:
            raise BadInput(f"attention exchange: handing {i}: row {handing.row} is no forward and no backward")
        name, most = problem.names[handing.row], int(p.slice[handing.row]) * costs.blocks
        if handing.row in seen:
            raise BadInput(f"attention exchange: pass {name} hands over twice")
        own = handing.behind if handing.behind >= 0 else handing.ahead
        if not 0 <= own < len(p) or p.rank[own] == p.rank[handing.row]:
            raise BadInput(f"attention exchange: pass {name}: row {own} is no pass of another rank")
        if not 1 <= handing.blocks <= most:
            raise BadInput(f"attention exchange: pass {name}: {handing.blocks} blocks of the {most} that it could hand over")
        seen.add(handing.row)


def without_exchange(problem: Problem) -> Problem:
    """The step's passes without parts and helpers, and the edges between these: names for an order. The problem itself if
    it has no exchange."""
    parts = problem.passes.that(feature=ATTENTION)
    return problem.only(np.flatnonzero(~parts)) if parts.any() else problem


def with_parts(problem: Problem, schedule: Schedule) -> Schedule:
    """The order of `problem` from one of `without_exchange(problem)`: parts come right before their pass, and helpers next
    to their rank's own pass as in the graph, in the order of the table. The schedule itself if there is no exchange."""
    if schedule.problem is problem:
        return schedule
    index, before = problem.index, dict[int, list[int]]()
    for kinds, last in ((("FQ", "FA"), ("F",)), (("BQ", "BA"), ("B", "BW"))):
        rows = problem.rows(*kinds)  # FQ and BQ come before FA and BA in the table
        for row, whole in zip(rows.tolist(), _matching(problem, rows, problem.rows(*last)).tolist(), strict=True):
            before.setdefault(whole, []).append(row)
    first, behind = _helpers(problem)

    def around(row: int) -> tuple[int, ...]:
        return (*first.get(row, ()), *before.get(row, ()), row, *behind.get(row, ()))

    orders = {stream: [around(index[name]) for name in names] for stream, names in schedule.order.items()}
    return Schedule.of(problem, {stream: list(chain.from_iterable(order)) for stream, order in orders.items()})


class HandedOver(NamedTuple):
    """What a pass hands over: the helping rank, and the share of the earlier tokens whose keys are sent there."""

    rank: int
    share: float


def handed_over(problem: Problem) -> dict[tuple[int, int, bool], HandedOver]:
    """(stage, part, is it a backward?) → what its pass hands over. Attention to one earlier slice takes twice as long as
    to the slice itself, so the share follows from durations."""
    p, handed = problem.passes, {}
    for kind, own in (("FH", "FA"), ("BH", "BA")):
        rows = problem.rows(kind)
        for row, kept in zip(rows.tolist(), _matching(problem, rows, problem.rows(own)).tolist(), strict=True):
            away, stays, earlier = int(p.duration[row]), int(p.duration[kept]), int(p.slice[row])
            share = away * (2 * earlier + 1) / (2 * earlier * (away + stays)) if away + stays else 0.5
            key = int(p.stage[row]), int(problem.parts[row]), kind == "BH"
            handed[key] = HandedOver(int(p.rank[row]), min(1.0, share))
    return handed


def _helpers(problem: Problem) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Row of a rank's own pass → rows of the helpers before it, and of those after it."""
    p, e = problem.passes, problem.edges
    helps, same_rank = p.that(away=True), p.rank[e.before] == p.rank[e.after]
    first, behind = dict[int, list[int]](), dict[int, list[int]]()
    for helper, own, rows_of in ((e.before, e.after, first), (e.after, e.before, behind)):
        rows = np.flatnonzero(same_rank & helps[helper] & ~helps[own])
        for i in rows[np.argsort(helper[rows], kind="stable")].tolist():
            rows_of.setdefault(int(own[i]), []).append(int(helper[i]))
    return first, behind


def _matching(problem: Problem, rows: Ints, others: Ints) -> Ints:
    """For each of `rows`, the one of `others` with the same stage, microbatch and slice."""
    key = problem.passes.stage * (int(problem.parts.max()) + 1) + problem.parts
    order = np.argsort(key[others], kind="stable")
    return np.asarray(others[order][np.searchsorted(key[others][order], key[rows])])
