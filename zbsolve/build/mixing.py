"""A step of many microbatches, all equal or of several kinds, from problems of one; and the memory that one alone needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from graphlib import TopologicalSorter
from math import inf
from typing import Any

import numpy as np

from ..kinds import KINDS
from ..problem import MessageRoom, Problem
from ..problem.form import NOTES
from ..problem.tables import IDENTITY, Edges, Ints, Passes
from ..util.errors import BadInput
from .numbers import check_room


def one_microbatch_needs(problem: Problem, microbatch: int = 0) -> Ints:
    """Bytes that each pool needs at least for the passes of this microbatch, shape (pools,): the ranks' devices, then
    `problem.pools`.

    While a pass runs, its rank holds the bytes of all edges around it in the graph, in any order of passes: those that it or
    a pass before it takes, and it or a pass after it frees. `least_room` is the closed form for a plain step that is not
    built yet.
    """
    own = np.flatnonzero(problem.in_microbatch & (problem.passes.microbatch == microbatch))
    first = problem.only(own)
    before, after = first.edges.before, first.edges.after
    upstream = _upstream(len(own), before.tolist(), after.tolist())
    around = upstream[:, before] & upstream.T[:, after]  # [pass, edge]
    needs = np.zeros(len(problem.room), np.int64)
    for pool in range(len(needs)):
        rows = first.edges_in(pool)
        needs[pool] = (around[:, rows] @ first.edges.bytes[rows]).max(initial=0)
    return needs


def checked_room(problem: Problem) -> Problem:
    """The problem, a step whose microbatches differ only in size, if each of them fits. Raises Infeasible."""
    for microbatch in _largest(problem):
        check_room(one_microbatch_needs(problem, microbatch), problem.capacity, f"microbatch {microbatch} alone")
    return problem


def _largest(problem: Problem) -> list[int]:
    """Of all microbatches with the same passes on the same ranks, the one that holds most."""
    p, inside = problem.passes, problem.in_microbatch
    table = np.zeros((len(KINDS) * problem.stages, problem.microbatches), np.int64)
    np.add.at(table, (p.kind[inside] * problem.stages + p.stage[inside], p.microbatch[inside]), 1 + p.rank[inside])
    before = problem.edges.before
    held = np.bincount(p.microbatch[before], problem.edges.bytes * inside[before], problem.microbatches)
    order = np.argsort(-held, kind="stable")
    _, first = np.unique(table[:, order], axis=1, return_index=True)
    return sorted(order[first].tolist())


def _upstream(count: int, before: list[int], after: list[int]) -> np.ndarray:
    """[i, j]: is pass j pass i, or before it in the graph? Shape (count, count)."""
    waits: dict[int, list[int]] = {i: [] for i in range(count)}
    for a, b in zip(before, after, strict=True):
        waits[b].append(a)
    upstream = np.eye(count, dtype=bool)
    for i in TopologicalSorter(waits).static_order():
        upstream[i] |= upstream[waits[i]].any(axis=0)
    return upstream


def with_microbatches(problem: Problem, count: int) -> Problem:
    """The step of `count` microbatches that are all like the only one of `problem`.

    Row r of it becomes rows r · count to r · count + count − 1, and so do its edges. Raises BadInput where it has
    further microbatches, or passes that belong to none.
    """
    if problem.microbatches != 1 or not problem.in_microbatch.all():
        raise BadInput("microbatches: a step of one microbatch alone can be repeated")
    if count < 1:
        raise BadInput(f"microbatches: at least 1 is needed, got {count}")
    p, e, each = problem.passes, problem.edges, np.arange(count)
    columns = {name: np.repeat(getattr(p, name), count) for name in (*IDENTITY, "rank", "duration", "streams")}
    columns["microbatch"] = np.tile(each, len(p))
    passes = Passes(**columns, stream_sets=p.stream_sets)
    ends = {name: (getattr(e, name)[:, None] * count + each).ravel() for name in ("before", "after")}
    further = {name: np.repeat(getattr(e, name), count) for name in ("lag", "bytes", "carries", "sent", "pool")}
    return replace(problem, passes=passes, edges=Edges(**ends, **further))


SAME_PASSES = (*IDENTITY, "rank", "streams")
SAME_EDGES = ("before", "after", "carries", "pool")


def mixed(problems: Sequence[Problem], kinds: Sequence[int]) -> Problem:
    """The step in which microbatch i is as in `problems[kinds[i]]`: its times, messages and bytes.

    problems: steps of one kind of microbatch each, alike in all but numbers.
    kinds: shape (microbatches,), an index of `problems` for each.

    Passes and edges of no microbatch have the largest numbers of all problems, and ranks have the least memory. Raises
    BadInput, and Infeasible where a microbatch alone does not fit.
    """
    first = problems[0]
    for number, other in enumerate(problems):
        for what, same in _same(first, other).items():
            if not same:
                raise BadInput(f"problems: number {number} has other {what} than number 0")
    count = first.microbatches
    if len(kinds) != count or not set(kinds) <= set(range(len(problems))):
        text = f"names not one of {len(problems)} problems for each of {count} microbatches"
        raise BadInput(f"kinds: {list(kinds)} {text}")
    passes, edges, repeated = first.passes, first.edges, first.in_microbatch
    kind = np.where(repeated, np.asarray(kinds)[np.where(repeated, passes.microbatch, 0)], -1)
    inside = repeated[edges.after] & (passes.microbatch[edges.before] == passes.microbatch[edges.after])
    kept = np.where(inside, kind[edges.before], -1)
    numbers = {name: _picked([getattr(step.edges, name) for step in problems], kept) for name in ("lag", "bytes", "sent")}
    limits = [problem.capacity for problem in problems if problem.capacity is not None]
    rooms = zip(*(p.messages for p in problems if p.messages is not None), strict=True)  # sizes, and what is reserved
    messages = [tuple(map(max, zip(*each, strict=True))) for each in rooms]
    least = partial(min, key=lambda pool: inf if pool.capacity is None else pool.capacity)
    mixture = replace(
        first,
        passes=replace(passes, duration=_picked([problem.passes.duration for problem in problems], kind)),
        edges=replace(edges, **numbers),
        capacity=tuple(map(min, zip(*limits, strict=True))) if limits else None,
        pools=tuple(map(least, zip(*(problem.pools for problem in problems), strict=True))),
        messages=MessageRoom(*messages) if messages else None,
        source="; ".join(dict.fromkeys(problem.source for problem in problems)),
    )
    return checked_room(mixture)


def _same(problem: Problem, other: Problem) -> dict[str, bool]:
    """For each property, by its name: is it the same in the other problem?"""

    def columns(a: Any, b: Any, names: Sequence[str]) -> bool:
        return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)

    return {
        "passes (ranks, placement, microbatches)": columns(problem.passes, other.passes, SAME_PASSES),
        "streams": problem.passes.stream_sets == other.passes.stream_sets,
        "edges": columns(problem.edges, other.edges, SAME_EDGES),
        "layers a stage": problem.layers == other.layers,
        "pools of memory": [pool.name for pool in problem.pools] == [pool.name for pool in other.pools],
        **{words: getattr(problem, name) == getattr(other, name) for name, words in NOTES.items()},
        "objective": problem.objective == other.objective,
    }


def _picked(columns: Sequence[Ints], kind: Ints) -> Ints:
    """For each row, the value of its kind; for kind −1 the largest of all."""
    table = np.stack(columns)
    return np.asarray(np.where(kind < 0, table.max(0), table[kind, np.arange(len(kind))]))
