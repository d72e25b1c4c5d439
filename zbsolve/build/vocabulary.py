"""Vocabulary parallelism: output layer, loss and embedding split over all ranks (arXiv 2411.05288, sections 4 and 5).

Every rank has a shard of the vocabulary. A shard is a stage of its own behind the model's stages: shard r is stage L + r of
a model of L stages, on rank r. Of each microbatch it has these passes:

    VB  takes the last hidden states, which are broadcast
    S   logits of the shard, their maximum and sum of exponentials, and with one barrier the shard's part of the gradients
    VR  reduces maxima and sums, and with one barrier the input gradient too: the barrier, which waits for S of all shards
    T   gradients of the shard's weights, and with two barriers of its input: it may wait as W may
    VG  with two barriers alone: the sum of the input gradient
    VE  sums the embedding's output, of which each shard has the rows of its own words
    VS  takes the gradient of the embedding's output, which is scattered

S and T compute, and what a search does with W it does with T. The others run on `comm:<rank>`. Those of one kind and
microbatch are one collective: ranks come to all collectives in one order, whatever their kinds (see `Problem.collective`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..kinds import OFFLOAD, SHARDING, UPDATES, VOCABULARY
from ..problem import Problem
from ..tables import Edges, Ints, Passes
from ..util.errors import BadInput
from .numbers import Numbers, check_before, whole_numbers

BARRIERS = (1, 2)  # algorithm 2 and algorithm 1 of the paper


class Vocabulary(NamedTuple):
    """What a sharded vocabulary costs, one number or one a rank.

    S, T: µs of a shard's passes.
    broadcast: µs of VB.
    reduce: µs of summing the input gradient.
    statistics: µs of telling all shards' maxima and sums. VR takes both with one barrier; with two, VR takes statistics and
        VG reduce.
    lookup: µs of VE and of VS, where the input embedding is sharded too; None: it is not.
    held_shard: bytes that S keeps for T (what it made of the logits).
    held_hidden: bytes of the hidden states of one microbatch, from VB to T's end. The input gradient of a shard is as large,
        from S (with two barriers from T) to the end of its reduction.
    barriers: 1 or 2, algorithm 2 and algorithm 1 of the paper.
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
        """The same with whole numbers, one a rank. Raises BadInput."""
        if self.barriers not in BARRIERS:
            raise BadInput(f"vocabulary: barriers: {self.barriers}: 1 (the paper's algorithm 2) or 2 (algorithm 1)")
        said = {name: one for name, one in self._asdict().items() if name != "barriers" and one is not None}
        whole: dict[str, Any] = {name: whole_numbers(one, f"vocabulary: {name}", ranks) for name, one in said.items()}
        return self._replace(**whole)


class _Step(NamedTuple):
    """The table of passes as it grows, rows of each microbatch's pass on each rank by kind, shape (ranks, microbatches)."""

    passes: Passes
    rows: dict[str, Ints]


def with_vocabulary(problem: Problem, costs: Vocabulary) -> Problem:
    """`problem` with the output layer and the loss on all ranks (arXiv 2411.05288, sections 4 and 5).

    problem: its last stage ends with the last hidden states, and its backward then waits for the reduction.
    costs: of shards and collectives, see `Vocabulary`. Capacity counts what shards hold.

    Put it in behind `pipeline` and recompute, before offload, updates and sharding. Raises BadInput for numbers that make no
    sense, for a step that has its vocabulary sharded, updates or shards already, and for one without a backward of its last
    stage.
    """
    if not isinstance(costs, Vocabulary):
        raise BadInput(f"vocabulary: {costs}: a `Vocabulary` is needed, which says what shards cost")
    check_before(problem, VOCABULARY, UPDATES, SHARDING, OFFLOAD)
    costs = costs.checked(problem.ranks)
    last, first = (_of_stage(problem, stage) for stage in (problem.stages - 1, 0))
    step = _with_shards(problem, costs)
    edges = problem.edges + _output(step, last, costs)
    if costs.lookup is not None:
        edges += _embedding(step, first, costs)
    return replace(problem, passes=step.passes, edges=edges)


def model_stages(problem: Problem) -> int:
    """The number of stages that run forwards: all but the shards of a vocabulary, which come behind them. All where nothing
    runs forwards."""
    return int(problem.passes.stage[problem.rows("F")].max(initial=-1)) + 1 or problem.stages


def model_routes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """`Problem.routes` through the stages that run forwards. Raises BadInput as that does."""
    stages = model_stages(problem)
    return tuple(route[:stages] for route in problem.routes)


def barriers_of(problem: Problem) -> int:
    """The barriers of each microbatch (see `Vocabulary`); 0 where the vocabulary is not sharded."""
    kinds = problem.passes.kinds
    return 0 if "VR" not in kinds else 2 if "VG" in kinds else 1


class _Ends(NamedTuple):
    """F and backward (B or BW) of a stage and their rank, one a microbatch, shape (microbatches,) each."""

    forward: Ints
    backward: Ints
    rank: Ints


def _of_stage(problem: Problem, stage: int) -> _Ends:
    """Those of a stage. Raises BadInput where one is missing."""
    p = problem.passes
    found = []
    for kinds in (("F",), ("B", "BW")):
        rows = problem.rows(*kinds, stage=stage)
        rows = rows[np.argsort(p.microbatch[rows], kind="stable")]
        if not np.array_equal(p.microbatch[rows], np.arange(problem.microbatches)):
            raise BadInput(f"vocabulary: stage {stage} has no {' or '.join(kinds)} of each microbatch")
        found.append(rows)
    forward, backward = found
    return _Ends(forward, backward, p.rank[forward])


def _with_shards(problem: Problem, costs: Vocabulary) -> _Step:
    """The table with the passes of all shards."""
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
    return _Step(passes, rows)


def _output(step: _Step, last: _Ends, costs: Vocabulary) -> Edges:
    """What the passes of the output layer and the loss wait for, and what they hold."""
    rows, (ranks, count) = step.rows, step.rows["S"].shape
    shard, hidden = (np.repeat(np.asarray(one, np.int64), count) for one in (costs.held_shard, costs.held_hidden))
    flat = {kind: one.ravel() for kind, one in rows.items()}
    here = np.arange(count)
    edges = Edges.of(np.tile(last.forward, ranks), flat["VB"])
    edges += Edges.of(flat["VB"], flat["S"]) + Edges.of(flat["VB"], flat["T"], bytes=hidden)
    edges += Edges.of(flat["S"], flat["T"], bytes=shard) + Edges.of(flat["VR"], flat["T"])
    partial = hidden if costs.barriers == 1 else 0
    edges += Edges.of(flat["S"], flat["VR"], bytes=partial)
    before, after = (one.ravel() for one in np.broadcast_arrays(rows["S"][:, None], rows["VR"][None]))
    other = np.flatnonzero(step.passes.rank[before] != step.passes.rank[after])
    edges += Edges.of(before[other], after[other])
    if costs.barriers == 1:
        return edges + Edges.of(rows["VR"][last.rank, here], last.backward)
    edges += Edges.of(flat["T"], flat["VG"], bytes=hidden)
    root = np.tile(rows["VG"][last.rank, here], ranks)
    other = np.flatnonzero(step.passes.rank[flat["T"]] != step.passes.rank[root])
    return edges + Edges.of(flat["T"][other], root[other]) + Edges.of(root[:count], last.backward)


def _embedding(step: _Step, first: _Ends, costs: Vocabulary) -> Edges:
    """What the passes of the input embedding wait for, and what the first stage's rank holds of its output and gradient."""
    ranks, count = step.rows["VE"].shape
    place = np.repeat(np.arange(ranks), count)
    own = np.where(place == np.tile(first.rank, ranks), np.repeat(np.asarray(costs.held_hidden, np.int64), count), 0)
    edges = Edges.of(step.rows["VE"].ravel(), np.tile(first.forward, ranks), bytes=own)
    return edges + Edges.of(np.tile(first.backward, ranks), step.rows["VS"].ravel(), bytes=own)
