"""Vocabulary parallelism: output layer, loss and embedding split over all ranks (arXiv 2411.05288, sections 4 and 5).

Every rank has a shard of the vocabulary. A shard is a stage of its own, numbered after the model's stages: shard r is stage
L + r of a model of L stages, on rank r. For each microbatch it has these passes:

    VB  takes the last hidden states, which are broadcast
    S   logits of the shard, their maximum and sum of exponentials, and with one barrier the shard's part of the gradients
    VR  reduces maxima and sums, and with one barrier the input gradient too: the barrier, which waits for S of all shards
    T   gradients of the shard's weights, and with two barriers of its input: it may wait as W may
    VG  with two barriers alone: the sum of the input gradient
    VE  sums the embedding's output; each shard has the rows of its own words
    VS  takes the gradient of the embedding's output, which is scattered

S and T compute, and searches treat T as they treat W. The others run on `comm:<rank>`. Those of one kind and microbatch are
one collective; all ranks run all their collectives in the same order, across kinds (see `Problem.collective`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..kinds import VOCABULARY
from ..problem import Problem
from ..problem.tables import Edges, Ints, Passes
from ..util.errors import BadInput
from .numbers import Numbers, check_before, whole_numbers

BARRIERS = (1, 2)  # algorithm 2 and algorithm 1 of the paper


class Vocabulary(NamedTuple):
    """The costs of a sharded vocabulary, one number or one a rank.

    S, T: µs of a shard's passes.
    broadcast: µs of VB.
    reduce: µs of summing the input gradient.
    statistics: µs of exchanging all shards' maxima and sums. With one barrier VR takes both; with two, VR takes statistics
        and VG reduce.
    lookup: µs of VE and of VS if the input embedding is sharded too; None: it is not.
    held_shard: bytes that S keeps for T (computed from the logits).
    held_hidden: bytes of the hidden states of one microbatch, from VB to T's end. The input gradient of a shard has as many,
        from S (with two barriers from T) to the end of its reduction.
    barriers: 1 or 2 (algorithm 2 or algorithm 1 of the paper).
    """

    S: Numbers
    T: Numbers
    broadcast: Numbers = 0
    reduce: Numbers = 0
    lookup: Numbers | None = None
    held_shard: Numbers = 0
    held_hidden: Numbers = 0
    barriers: int = 1
    statistics: Numbers = 0

    def checked(self, ranks: int) -> Vocabulary:
        """The same with integers, one for each rank. Raises BadInput."""
        if self.barriers not in BARRIERS:
            raise BadInput(f"vocabulary: barriers: {self.barriers}: 1 (the paper's algorithm 2) or 2 (algorithm 1)")
        known = {name: value for name, value in self._asdict().items() if name != "barriers" and value is not None}
        whole: dict[str, Any] = {name: whole_numbers(value, f"vocabulary: {name}", ranks) for name, value in known.items()}
        return self._replace(**whole)


def with_vocabulary(problem: Problem, costs: Vocabulary) -> Problem:
    """`problem` with the output layer and the loss on all ranks (arXiv 2411.05288, sections 4 and 5).

    problem: its last stage ends with the last hidden states, and its backward then waits for the reduction.
    costs: of shards and collectives, see `Vocabulary`. What shards hold counts against the capacity.

    Apply it before what `kinds.LATER` lists. Raises BadInput for numbers that make no sense, for a step that has it
    already, and for one without a backward of its last stage.
    """
    if not isinstance(costs, Vocabulary):
        raise BadInput(f"vocabulary: {costs}: a `Vocabulary` is needed, which says what shards cost")
    check_before(problem, VOCABULARY)
    costs = costs.checked(problem.ranks)
    own = {kinds: problem.grid(*kinds) for kinds in (("F",), ("B", "BW"))}
    for stage in (problem.stages - 1, 0):
        for kinds, lanes in own.items():
            if problem.slices > 1 or (lanes[stage] < 0).any():
                raise BadInput(f"vocabulary: stage {stage} has no {' or '.join(kinds)} of each microbatch")
    forward, backward = own.values()
    passes, rows = _with_shards(problem, costs)
    edges = problem.edges + _output(passes.rank, rows, forward[-1], backward[-1], costs)
    if costs.lookup is not None:
        edges += _embedding(passes.rank, rows, forward[0], backward[0], costs)
    return replace(problem, passes=passes, edges=edges)


def barriers_of(problem: Problem) -> int:
    """The number of barriers of each microbatch (see `Vocabulary`); 0 if the vocabulary is not sharded."""
    kinds = problem.passes.kinds
    return 0 if "VR" not in kinds else 2 if "VG" in kinds else 1


def _with_shards(problem: Problem, costs: Vocabulary) -> tuple[Passes, dict[str, Ints]]:
    """The table with the passes of all shards; and their rows by kind, shape (ranks, microbatches)."""
    ranks, count, passes = problem.ranks, problem.microbatches, problem.passes
    barrier = np.add(costs.statistics, costs.reduce if costs.barriers == 1 else 0)
    table = [("VB", "comm", costs.broadcast), ("S", "compute", costs.S), ("VR", "comm", barrier)]
    table += [("T", "compute", costs.T)]
    table += [("VG", "comm", costs.reduce)] if costs.barriers == 2 else []
    table += [] if costs.lookup is None else [("VE", "comm", costs.lookup), ("VS", "comm", costs.lookup)]
    rank = np.repeat(np.arange(ranks), count)
    rows: dict[str, Ints] = {}
    for kind, stream, time in table:
        rows[kind] = len(passes) + np.arange(ranks * count).reshape(ranks, count)
        columns = {"stage": problem.stages + rank, "microbatch": np.tile(np.arange(count), ranks), "rank": rank}
        passes = passes.more(kind, stream, **columns, duration=np.asarray(time)[rank])
    return passes, rows


def _output(rank: Ints, rows: dict[str, Ints], forward: Ints, backward: Ints, costs: Vocabulary) -> Edges:
    """The edges of the passes of the output layer and the loss, with the bytes held. rank: of each pass; forward, backward:
    rows of the last stage, one for each microbatch."""
    ranks, count = rows["S"].shape
    shard, hidden = (np.repeat(np.asarray(held, np.int64), count) for held in (costs.held_shard, costs.held_hidden))
    flat = {kind: array.ravel() for kind, array in rows.items()}
    home = rank[forward], np.arange(count)
    edges = Edges.of(np.tile(forward, ranks), flat["VB"])
    edges += Edges.of(flat["VB"], flat["S"]) + Edges.of(flat["VB"], flat["T"], bytes=hidden)
    edges += Edges.of(flat["S"], flat["T"], bytes=shard) + Edges.of(flat["VR"], flat["T"])
    partial = hidden if costs.barriers == 1 else 0
    edges += Edges.of(flat["S"], flat["VR"], bytes=partial)
    before, after = (array.ravel() for array in np.broadcast_arrays(rows["S"][:, None], rows["VR"][None]))
    other = np.flatnonzero(rank[before] != rank[after])
    edges += Edges.of(before[other], after[other])
    if costs.barriers == 1:
        return edges + Edges.of(rows["VR"][home], backward)
    edges += Edges.of(flat["T"], flat["VG"], bytes=hidden)
    root = np.tile(rows["VG"][home], ranks)
    other = np.flatnonzero(rank[flat["T"]] != rank[root])
    return edges + Edges.of(flat["T"][other], root[other]) + Edges.of(root[:count], backward)


def _embedding(rank: Ints, rows: dict[str, Ints], forward: Ints, backward: Ints, costs: Vocabulary) -> Edges:
    """The edges of the input embedding's passes, with the bytes of its output and gradient on the first stage's rank;
    arguments as in `_output`, for the first stage."""
    ranks, count = rows["VE"].shape
    same_rank = np.repeat(np.arange(ranks), count) == np.tile(rank[forward], ranks)
    own = np.where(same_rank, np.repeat(np.asarray(costs.held_hidden, np.int64), count), 0)
    edges = Edges.of(rows["VE"].ravel(), np.tile(forward, ranks), bytes=own)
    return edges + Edges.of(np.tile(backward, ranks), rows["VS"].ravel(), bytes=own)
