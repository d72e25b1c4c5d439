"""Offload in a profile's step: what is copied to host memory, and how long copies take (PipeOffload, arXiv 2503.01328)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..build.mixing import one_microbatch_needs
from ..build.numbers import check_room
from ..build.offload import Host, checked_fractions, kept_bytes, with_offload
from ..kinds import OFFLOAD as NAME
from ..partition.layer import HostLink
from ..problem import Problem
from ..problem.tables import Bools, Ints
from ..util.errors import BadInput, Infeasible, Unfit
from ..util.text import exact_bytes, numbers_in
from .feature import Feature, Field, is_auto
from .sides import has_sides

NO_OFFLOAD, FULL, HALF = "none", "full", "half"
NAMED = (NO_OFFLOAD, FULL, HALF)
# A name, "0:0.5,1:1", or fractions or booleans of shape (stages,) or (stages, microbatches).
Offload = str | Sequence[float] | Sequence[bool] | Sequence[Sequence[bool]] | Sequence[Sequence[float]]


def is_none(offload: Offload) -> bool:
    """Is it the name for no offload?"""
    return isinstance(offload, str) and offload.strip() == NO_OFFLOAD


def offloaded_step(problem: Problem, host: HostLink | None, offload: Offload, left: Sequence[int] | None) -> Problem:
    """`problem`, a profile's step without a memory limit, in which stages copy what their F keeps to host memory and back,
    within `left` bytes for each rank (None: no limit).

    offload: "full": everything that stages keep (PO-F). "half" (PO-H): of each rank's v stages the first ⌈v/2⌉, whose
    activations live longest, as the F of a later stage lies between F and B of an earlier one; a rank with one stage
    offloads half of its bytes, since ⌈1/2⌉ would be all. "0:0.5,1:1" or one number for each stage: these fractions of what
    stages keep. Booleans of shape (stages,) or (stages, microbatches): all of these. Numbers of shape (stages,
    microbatches): a stage's fraction, or 0 for its microbatches that are not offloaded.

    A copy takes latency + bytes / bandwidth (see `HostLink.rates`). Raises BadInput, also where the host link is not known
    or a named stage keeps nothing; Infeasible where a rank has less memory than one microbatch needs.
    """
    host = known_host(host)
    most = kept_bytes(problem).max(axis=1)
    fraction, which = _chosen(problem, offload, most > 0)
    # `with_offload` takes this fraction of the times: so all the bytes, and so much latency that one latency is left.
    latency = host.latency / np.where(fraction > 0, fraction, 1.0)
    times = (np.asarray(np.rint(latency + most / rate), np.int64) for rate in host.rates)
    node = Host(host.memory, host.ranks, min(host.shared_bus, problem.ranks))
    offloaded = with_offload(problem, *times, fraction=fraction, which=which, host=node)
    if left is None:
        return offloaded
    check_room(_least_needs(offloaded), left, also=", also with this offload")
    return replace(offloaded, capacity=tuple(left))


def copy_ratio(step: Any, profile: Any) -> float | None:
    """k = T_offload / T_compute (PipeOffload, arXiv 2503.01328, Figure 1): µs that a microbatch occupies the busiest copy
    stream when all activations are offloaded, over µs that it occupies the busiest rank. None if the profile knows no host
    link, or nothing can be offloaded. Raises BadInput, Infeasible."""
    if profile.host is None or has_sides(profile):
        return None
    kept = ("ranks", "placement", "partition", "objective", "fused", "blocking", "recompute", "vocabulary")
    words = {name: getattr(step.closed, name) for name in kept}
    free = replace(profile, capacity=None, host=replace(profile.host, memory=None), microbatch_factors=())
    try:
        problem = type(step)(microbatches=len(step.routes), offload=FULL, **words).problem(free)
    except Unfit:
        return None
    length = np.where(problem.passes.are("O", "R"), problem.passes.duration, 0)
    return max(int(length[rows].sum()) for rows in problem.members.values()) / problem.work


def known_host(host: HostLink | None) -> HostLink:
    """The link to host memory. Raises BadInput where it is not known."""
    if host is None:
        raise BadInput("offload: the profile knows no host link: give its field 'host', or zbsolve numbers host-bandwidth=…")
    return host


def within_host(problem: Problem, staged: Any) -> Problem:
    """The problem itself. Raises Infeasible where a node's host memory is less than one microbatch needs there."""
    limited = any(pool.capacity is not None for pool in problem.pools)
    need = _least_needs(problem) if limited else ()
    for pool in range(problem.ranks, len(need)):
        if need[pool] > problem.room[pool]:
            need_and_room = f"needs {exact_bytes(need[pool])} for one microbatch, but has {exact_bytes(problem.room[pool])}"
            raise Infeasible(f"offload: host memory '{problem.pool_name(pool)}' {need_and_room}: no schedule exists")
    return problem


def _least_needs(problem: Problem) -> Ints:
    """Bytes that each pool needs for any one microbatch, at least; one is asked of those with equal copies and ranks."""
    rows, passes = problem.rows("F", "O"), problem.passes
    table = np.zeros((2, problem.stages, problem.microbatches), np.int64)
    copies = passes.are("O")[rows].astype(np.int64)
    table[copies, passes.stage[rows], passes.microbatch[rows]] = 1 + passes.rank[rows]
    _, different = np.unique(table.reshape(-1, problem.microbatches), axis=1, return_index=True)
    return np.asarray(np.max([one_microbatch_needs(problem, i) for i in different.tolist()], axis=0), np.int64)


def _chosen(problem: Problem, offload: Offload, keeping: Bools) -> tuple[Any, Bools | None]:
    """The fraction of each stage, shape (stages,), and which stages or microbatches are offloaded (None: all). keeping:
    stages that keep something, shape (stages,); "full" and "half" leave out the others. Shards of a vocabulary, numbered
    after the model's stages, offload nothing. Raises BadInput."""
    stages = problem.model_stages
    if isinstance(offload, str):
        name, shares = offload.strip(), _with_shards(stage_fractions(offload, problem.stage_ranks[:stages]), problem)
        if name in NAMED and not keeping.any():
            raise Unfit("offload: no stage keeps anything from its F that a later pass frees")
        return (shares, keeping) if name == HALF else (shares * keeping if name in NAMED else shares, None)
    table = _table(offload)
    if table.ndim == 1 and table.dtype != bool:
        return _with_shards(checked_fractions(table, stages), problem), None
    if table.dtype == bool:
        return 1.0, _with_shards(table, problem) if len(table) == stages else table
    if table.shape != (stages, problem.microbatches):
        raise BadInput(f"offload: shape {table.shape}, not ({stages}, {problem.microbatches}): a row a stage")
    share = checked_fractions(table.max(axis=1), stages)
    unlike = np.flatnonzero(((table != 0) & (table != share[:, None])).any(axis=1))
    if len(unlike):
        raise BadInput(f"offload: stage {unlike[0]} has several fractions: one a stage, and 0 for microbatches that stay")
    return _with_shards(share, problem), _with_shards(table > 0, problem)


def _with_shards(table: Any, problem: Problem) -> Any:
    """A row for each stage of the model, then zeros for the shards of a vocabulary; (stages, …)."""
    return np.concatenate([table, np.zeros((problem.stages - len(table), *table.shape[1:]), table.dtype)])


def stage_fractions(text: str, stage_ranks: Sequence[Sequence[int]]) -> Any:
    """The fraction of each stage, shape (stages,), from a name (see `offloaded_step`) or text such as "0:0.5,1:1".
    stage_ranks: the ranks of each stage; "half" is the smallest fraction among these. Raises BadInput."""
    name, stages = text.strip(), len(stage_ranks)
    if name not in NAMED:
        return _fractions_in(text, stages)
    if name != HALF:
        return np.full(stages, float(name == FULL))
    half = np.full(stages, np.inf)
    for rank in range(1 + max(map(max, stage_ranks))):
        here = [stage for stage, ranks in enumerate(stage_ranks) if rank in ranks]
        first = -(-len(here) // 2)
        half[here] = np.minimum(half[here], [1.0] * first + [0.0] * (len(here) - first) if len(here) > 1 else 0.5)
    return half


def _fractions_in(text: str, stages: int) -> Any:
    """A number for each stage, shape (stages,), from "0:0.5,1:1" or "0-3:1"; 0 for stages not named. Raises BadInput."""
    shares, named = np.zeros(stages), set[int]()
    for part in text.split(","):
        stage, _, share = part.partition(":")
        try:
            numbers, fraction = numbers_in(stage), float(share)
        except ValueError:
            raise BadInput(f"offload '{part.strip()[:40]}': none, full, half, or fractions such as 0:0.5,1:1") from None
        for number in numbers:
            if not 0 <= number < stages:
                raise BadInput(f"offload: there is no stage {number} (they are 0 to {stages - 1})")
            if number in named:
                raise BadInput(f"offload: stage {number} is named twice")
            named.add(number)
            shares[number] = fraction
    return checked_fractions(shares, stages)


def _table(offload: Any) -> Any:
    """Booleans or numbers as an array of one or two dimensions. Raises BadInput."""
    try:
        table = np.asarray(offload)
    except ValueError:
        table = np.zeros(0, object)
    if table.dtype.kind not in "biuf" or table.ndim not in (1, 2):
        raise BadInput("offload: a name, or fractions or booleans of shape (stages,) or (stages, microbatches)")
    return table


def _check(step: Any) -> None:
    """Raise BadInput for values that make no sense with any profile and any number of microbatches."""
    if not step.stages or is_auto(step.offload):
        return
    if isinstance(step.offload, str):
        if step.offload.strip() not in NAMED:
            _fractions_in(step.offload, step.stages)
        return
    table = _table(step.offload)
    if table.dtype != bool:
        checked_fractions(table if table.ndim == 1 else table.max(axis=1), step.stages)


def _build(problem: Problem, staged: Any) -> Problem:
    offload = staged.step.offload
    return problem if is_none(offload) else offloaded_step(problem, staged.profile.host, offload, staged.room)


def _told(problem: Problem) -> list[list[float]] | None:
    """The share of what each stage keeps of each microbatch that goes to host memory, shape (stages, microbatches)."""
    p, e, copies = problem.passes, problem.edges, problem.rows("O")
    if not len(copies):
        return None
    moved = np.bincount(e.before, np.where(e.pool > 0, e.bytes, 0), len(p))[copies]
    kept = np.flatnonzero((e.pool == 0) & np.isin(e.after, copies))
    held = np.bincount(e.after[kept], problem.taken[e.before[kept]], len(p))[copies]
    shares = np.zeros((len(problem.layers), problem.microbatches))
    share = moved / np.maximum(held, 1)
    largest = np.zeros(problem.stages)  # where microbatches differ, shares are rounded to whole bytes
    np.maximum.at(largest, p.stage[copies], share)
    shares[p.stage[copies], p.microbatch[copies]] = np.minimum(largest[p.stage[copies]], 1)
    return shares.tolist()


OFFLOAD = Feature(
    NAME,
    (
        Field(
            "offload",
            NO_OFFLOAD,
            "full, half, or a fraction a stage such as 0:0.5,1-3:1: activations that go to host memory after F and come "
            "back before the backward; auto: the search decides (default: none)",
            "WHAT",
            closed=NO_OFFLOAD,
            told=_told,
            fixed="is offloaded",
            offered=(FULL, HALF),
        ),
    ),
    _check,
    _build,
    usual=False,
    holds={NAME: lambda seen: not is_none(seen.step.offload)},
)
