"""Offload: activations that are copied to host memory after F, and back before the backward (PipeOffload, arXiv 2503.01328).

A pass `O` copies what a stage's F keeps of a microbatch to the host, on `d2h:<rank>`; a pass `R` copies it back, on
`h2d:<rank>`. The bytes are on the device from F's start to O's end, and from R's start to the end of the backward that needs
them; in host memory they are from O's start to R's end. For all other code O and R are two more kinds of passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..kinds import OFFLOAD
from ..problem import Pool, Problem
from ..problem.tables import Bools, Edges, Ints, Passes
from ..schedule import Schedule
from ..schedule.timeline import Floats
from ..util.errors import BadInput, Unfit
from ..util.text import exact_bytes
from .numbers import Numbers, check_before, whole_numbers


class Host(NamedTuple):
    """Host memory for offload.

    capacity: bytes of each node; None: unlimited.
    ranks: of the pipeline on a node; None: all of them.
    shared_bus: how many ranks of a node share one stream for both directions of copies; 0: each rank has two.
    """

    capacity: int | None = None
    ranks: int | None = None
    shared_bus: int = 0


def with_offload(
    problem: Problem,
    O: Numbers,  # noqa: E741 (the name of the pass, as F, B, W and X elsewhere)
    R: Numbers,
    *,
    fraction: Numbers = 1.0,
    which: Any = None,
    host: Host = Host(),  # noqa: B008 (immutable)
) -> Problem:
    """`problem` where stages copy what their F keeps to host memory (PipeOffload, arXiv 2503.01328).

    problem: a step of F, B, W (or BW).
    O, R: µs a stage to copy out, and back, all that it keeps of one microbatch.
    fraction: how much of it is offloaded, 0 to 1, one number or one a stage. Copies take that part of their time; bytes are
        rounded down edge by edge.
    which: booleans of shape (stages,) or (stages, microbatches); None: all passes F with a fraction above 0.
    host: see `Host`; the pools are called `host:<node>`.

    F → O → R → B: bytes that F keeps for B are on an edge R → B, those for W on an edge R → W, and all passes of the stage
    that wait for F wait for R. Bytes that are not offloaded stay on their edges. A stage that keeps nothing in between (its
    X computes it again) offloads none of that. The capacity of devices does not change; to build a step that fits only with
    offload, leave out its capacity, and set it afterwards.

    Apply it before what `kinds.LATER` lists. Raises BadInput for numbers that make no sense, for a step
    that offloads already, and for a stage that should offload but keeps nothing that a later pass frees.
    """
    check_before(problem, OFFLOAD)
    shares = checked_fractions(fraction, problem.stages)
    chosen = _chosen(problem, which, shares)
    if host.ranks is not None and not host.ranks >= 1:
        raise BadInput(f"offload: host: {host.ranks} ranks a node")
    if not 0 <= host.shared_bus <= problem.ranks:
        raise BadInput(f"offload: host: {host.shared_bus} of {problem.ranks} ranks share a bus")
    if host.capacity is not None and host.capacity < 0:
        raise BadInput(f"offload: host: its capacity is negative ({host.capacity})")
    moved = np.floor(problem.edges.bytes * shares[problem.passes.stage[problem.edges.before]]).astype(np.int64)
    kept = np.flatnonzero(_kept(problem) & chosen[problem.edges.before])
    fs = np.unique(problem.edges.before[kept[moved[kept] > 0]])
    own = kept[np.isin(problem.edges.before[kept], fs)]
    _check_all_move(problem, np.flatnonzero(chosen), fs, kept, shares)
    if not len(fs):
        return problem
    times = [whole_numbers(us, name, problem.stages) for us, name in ((O, "O"), (R, "R"))]
    return _with_copies(problem, own, moved[own], [np.rint(time * shares).astype(np.int64) for time in times], host)


def _with_copies(problem: Problem, own: Ints, size: Ints, times: Sequence[Ints], host: Host) -> Problem:
    """The problem with copies of `size` bytes from the edges `own`. times: µs of O and of R for each stage."""
    passes, edges, count = problem.passes, problem.edges, len(problem.passes)
    fs, of = np.unique(edges.before[own], return_inverse=True)
    stage, rank = passes.stage[fs], passes.rank[fs]
    table = passes.like(fs, "O", "d2h", times[0][stage]).like(fs, "R", "h2d", times[1][stage])
    table = _on_one_bus(table, host.shared_bus)
    out, back = count + np.arange(len(fs)), count + len(fs) + np.arange(len(fs))
    total = np.bincount(of, size, len(fs)).astype(np.int64)
    node = rank // (host.ranks or problem.ranks)
    pools = tuple(Pool(f"host:{i}", host.capacity) for i in range(int(rank.max()) // (host.ranks or problem.ranks) + 1))
    left = edges.bytes.copy()
    left[own] -= size
    chain = Edges.of(fs, out, bytes=total)
    chain += Edges.of(out, back, bytes=total, pool=len(problem.pools) + 1 + node)
    chain += Edges.of(back[of], edges.after[own], bytes=size)
    return replace(problem, passes=table, edges=replace(edges, bytes=left) + chain, pools=(*problem.pools, *pools))


def _on_one_bus(passes: Passes, ranks: int) -> Passes:
    """The table with the copies, in both directions, of `ranks` neighbouring ranks on one stream (0: no change)."""
    if ranks == 0:
        return passes

    def bus(stream: str) -> str:
        where, _, rank = stream.partition(":")
        return f"bus:{int(rank) // ranks}" if where in ("d2h", "h2d") else stream

    return replace(passes, stream_sets=tuple(tuple(bus(name) for name in streams) for streams in passes.stream_sets))


def kept_bytes(problem: Problem) -> Ints:
    """Bytes that a stage's F keeps of each microbatch and that offload may move, shape (stages, microbatches)."""
    kept, rows = np.zeros((problem.stages, problem.microbatches), np.int64), np.flatnonzero(_kept(problem))
    before = problem.edges.before[rows]
    np.add.at(kept, (problem.passes.stage[before], problem.passes.microbatch[before]), problem.edges.bytes[rows])
    return kept


def _kept(problem: Problem) -> Bools:
    """Which edges go from an F to a later computing pass of its stage, which may use what F keeps: shape (edges,)."""
    p, e = problem.passes, problem.edges
    same = (p.stage[e.before] == p.stage[e.after]) & (p.microbatch[e.before] == p.microbatch[e.after])
    return np.asarray(p.are("F")[e.before] & problem.computing[e.after] & same & (e.pool == 0))


def _chosen(problem: Problem, which: Any, shares: Any) -> Bools:
    """The passes F to offload, shape (passes,). Raises BadInput."""
    p, shape = problem.passes, (problem.stages, problem.microbatches)
    table = np.repeat((shares > 0)[:, None], shape[1], axis=1)
    if which is not None:
        chosen = np.asarray(which)
        if chosen.dtype != bool or chosen.shape not in (shape, shape[:1]):
            needed = f"booleans of shape {shape[:1]} or {shape} are needed"
            raise BadInput(f"offload: which: {needed}, got {chosen.dtype} {chosen.shape}")
        table &= chosen if chosen.ndim == 2 else chosen[:, None]
    copied: Bools = p.are("F")
    rows = np.flatnonzero(copied)
    copied[rows] = table[p.stage[rows], p.microbatch[rows]]
    return copied


def checked_fractions(fraction: Numbers, stages: int) -> Any:
    """One number from 0 to 1 a stage, shape (stages,). Raises BadInput naming the stage."""
    try:
        row = np.asarray(fraction, np.float64)
    except (TypeError, ValueError):
        raise BadInput(f"offload: fraction: not numbers: {fraction!r}") from None
    if row.ndim > 1 or (row.ndim == 1 and len(row) != stages):
        raise BadInput(f"offload: fraction: shape {row.shape}, not one for each of {stages} stages")
    shares = np.broadcast_to(row, stages)
    wrong = np.flatnonzero(~((shares >= 0) & (shares <= 1)))
    if len(wrong):
        raise BadInput(f"offload: fraction of stage {wrong[0]} is {shares[wrong[0]]:g}, not from 0 to 1")
    return shares


def _check_all_move(problem: Problem, wanted: Ints, moving: Ints, kept: Ints, shares: Any) -> None:
    """Raise Unfit for a stage that should offload but keeps nothing, or less than a byte of each of the edges `kept`."""
    passes, edges = problem.passes, problem.edges
    for stage in np.setdiff1d(passes.stage[wanted], passes.stage[moving])[:1].tolist():
        most = int(edges.bytes[kept[passes.stage[edges.before[kept]] == stage]].max(initial=0))
        if most:
            share = f"the fraction {shares[stage]:g} of the {exact_bytes(most)} that its F keeps for a later pass"
            raise Unfit(f"offload: stage {stage}: {share} is less than one byte")
        raise Unfit(f"offload: stage {stage} keeps nothing from its F that a later pass frees")


def time_away(schedule: Schedule) -> Floats:
    """µs from the start of a copy out to the end of the copy back, shape (stages, microbatches); infinite without copies."""
    problem, timeline = schedule.problem, schedule.timeline()
    p, away = problem.passes, np.full((problem.stages, problem.microbatches), np.inf)
    for kind, times, sign in (("R", timeline.end, 1), ("O", timeline.start, -1)):
        rows = problem.rows(kind)
        at = p.stage[rows], p.microbatch[rows]
        away[at] = np.where(np.isinf(away[at]), 0, away[at]) + sign * times[rows]
    return away
