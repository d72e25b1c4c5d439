"""Sequence slices: a microbatch's sequence is cut, and its slices run one after the other (SlimPipe, arXiv 2504.14519;
Seq1F1B, arXiv 2406.03488; TeraPipe, arXiv 2102.07988).

With causal attention a slice needs keys and values of the slices before it. So on every stage the forwards of a microbatch
run in the order of its slices, and the backwards in reverse order: a slice's gradients of keys and values are complete
when the backwards of all later slices have run. For all other code slices are more passes, in lanes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..kinds import SLICES
from ..problem import Problem
from ..problem.tables import Edges, Ints
from ..util.errors import BadInput
from .mixing import one_microbatch_needs
from .numbers import Table, check_before, check_room, whole_table
from .untrained import untrained_stages

MAX_CHECKED = 4000  # passes of a microbatch: a check of all pairs takes a second


def with_slices(
    problem: Problem, slices: int, *, held_keys: Table = 0, held_gradients: Table = 0, lengths: Sequence[float] = ()
) -> Problem:
    """`problem`, a step with a microbatch for each slice, where every `slices` of them in a row are one microbatch.

    slices: how many a microbatch has.
    held_keys: bytes a stage of a slice's keys and values, in addition to what the problem holds, and never recomputed. They
        are held from its F's start to the end of its own backward, which is the last that needs them.
    held_gradients: bytes a stage of their gradients, from the start of the microbatch's first backward on the stage to the
        end of the slice's own; none for the last slice, whose backward comes first.
    lengths: of each slice, in proportion, for the executor; (): even.

    Bytes are one number, one a stage, or rows of one a slice. Apply slices after everything else. Capacity does not change.

    Raises BadInput for numbers that make no sense, a number of microbatches that slices do not divide, updates, shards, and
    a step that is sliced already; Infeasible where a rank has less than the microbatch with the most bytes needs.
    """
    _check(problem, slices, lengths)
    p, count = problem.passes, problem.microbatches // slices
    inside = problem.in_microbatch
    number = np.where(inside, p.microbatch // slices, p.microbatch)
    passes = replace(p, microbatch=number, slice=np.where(inside, p.microbatch % slices, 0))
    keys = whole_table(held_keys, "held_keys", problem.stages, slices)
    gradients = whole_table(held_gradients, "held_gradients", problem.stages, slices)
    front = untrained_stages(problem)  # they hold keys and values until the microbatch's last F
    ahead, forward = (_rows(problem, ("F",), (count, slices), *ends) for ends in ((0, front), (front, problem.stages)))
    backward = _rows(problem, ("B", "BW"), (count, slices), front, problem.stages)
    edges = problem.edges + Edges.of(forward[..., :-1].ravel(), forward[..., 1:].ravel())
    edges += Edges.of(ahead[..., :-1].ravel(), ahead[..., 1:].ravel())
    edges += Edges.of(backward[..., 1:].ravel(), backward[..., :-1].ravel())
    edges += _kept(ahead, np.broadcast_to(ahead[..., -1:], ahead.shape), keys[p.stage[ahead[:, 0, 0]]])
    stage = p.stage[forward[:, 0, 0]]
    first = np.broadcast_to(backward[..., -1:], backward.shape)
    edges += _kept(forward, backward, keys[stage]) + _kept(first, backward, gradients[stage])
    sliced = replace(problem, passes=passes, edges=edges, slice_lengths=tuple(map(float, lengths)))
    rows = np.flatnonzero(inside)
    if problem.capacity is not None and len(rows) <= MAX_CHECKED * count:  # for very large microbatches a search finds out
        most = int(np.bincount(number[rows], sliced.taken[rows]).argmax())
        check_room(one_microbatch_needs(sliced, most), problem.capacity, "the slices of one microbatch")
    return sliced


def of_slices(table: Any, slices: int, microbatches: int) -> Any:
    """Rows of one number a slice, repeated for each microbatch; other tables unchanged. Raises BadInput below 1 slice."""
    _check_count(slices)
    if slices == 1 or not isinstance(table, Sequence | np.ndarray) or isinstance(table, str):
        return table
    return [list(row) * microbatches if np.shape(row) == (slices,) else row for row in table]


def _kept(before: Ints, after: Ints, size: Ints) -> Edges:
    """Edges with `size` bytes, shape (stages, slices), between rows of shape (stages, microbatches, slices); none from a
    pass to itself, and none without bytes."""
    held = np.broadcast_to(size[:, None], before.shape)
    rows = np.flatnonzero((held.ravel() > 0) & (before.ravel() != after.ravel()))
    return Edges.of(before.ravel()[rows], after.ravel()[rows], bytes=held.ravel()[rows])


def _rows(problem: Problem, kinds: tuple[str, ...], shape: tuple[int, int], begin: int, end: int) -> Ints:
    """Rows of the passes of these kinds, of stages from `begin` up to `end`, shape (stages that have any, microbatches,
    slices). Raises BadInput where one is missing."""
    own, forwards = (problem.grid(*those)[begin:end] for those in (kinds, ("F",)))
    own = own[(forwards >= 0).any(axis=1)]
    if (own < 0).any():
        raise BadInput(f"slices: a stage has no {' or '.join(kinds)} of each microbatch")
    return own.reshape(len(own), *shape)


def _check_count(slices: Any) -> None:
    if not isinstance(slices, int | np.integer) or isinstance(slices, bool) or slices < 1:
        raise BadInput(f"slices: at least 1 is needed, got {slices}")


def _check(problem: Problem, slices: Any, lengths: Sequence[float]) -> None:
    _check_count(slices)
    if len(lengths) not in (0, slices):
        raise BadInput(f"slices: {len(lengths)} lengths for {slices} slices")
    check_before(problem, SLICES)
    if problem.microbatches % slices:
        raise BadInput(f"slices: {problem.microbatches} microbatches are no multiple of {slices} slices")
