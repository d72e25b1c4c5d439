"""Recompute: stages that drop their activations after F and make them again in a pass X before B (arXiv 1604.06174).

Here is written what X waits for and what it holds; to everybody else it is one more pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .errors import BadInput
from .problem import KINDS, Edges, Ints, Passes

Recompute = Sequence[int] | str
F, W, X = (KINDS.index(kind) for kind in "FWX")


def chosen(recompute: Recompute, stages: int) -> Ints:
    """The stages named by "all", by "0,2", or by their numbers; sorted, each once. Raises BadInput."""
    if isinstance(recompute, str):
        if recompute == "all":
            return np.arange(stages)
        parts: Sequence[int | str] = [part.strip() for part in recompute.split(",")] if recompute.strip() else []
    else:
        parts = list(recompute)
    found = set()
    for part in parts:
        try:
            number = int(part)
        except (TypeError, ValueError):
            raise BadInput(f"recompute: '{part}' is neither 'all' nor a stage") from None
        if not 0 <= number < stages:
            raise BadInput(f"recompute: there is no stage {number} (they are 0 to {stages - 1})")
        found.add(number)
    return np.array(sorted(found), np.int64)


def with_recompute(passes: Passes, edges: Edges, stages: Ints, times: Ints, inputs: Ints) -> tuple[Passes, Edges]:
    """A step whose `stages` recompute, from one that keeps everything.

    passes, edges: F, B, W (or BW) of every stage and microbatch, F first, by stage and microbatch. times: µs of X a stage.
    inputs: bytes a stage that F keeps for X, its input. They are part of what B and W free: after F only they are held,
    and from X's start what B and W free, in all as much as without recompute; what of the input is more than that goes
    when X ends. X may run as soon as F has ended, and must before B.
    """
    count, m = len(passes), int(passes.microbatch.max()) + 1
    fs = np.flatnonzero((passes.kind == F) & np.isin(passes.stage, stages))
    place = np.full(count, -1, np.int64)  # F → its X
    place[fs] = count + np.arange(len(fs))
    more = {what: np.concatenate([getattr(passes, what), getattr(passes, what)[fs]]) for what in _COPIED}
    kinds, durations = np.full(len(fs), X, np.int64), times[passes.stage[fs]]
    table = Passes(
        kind=np.concatenate([passes.kind, kinds]),
        duration=np.concatenate([passes.duration, durations]),
        stream_sets=passes.stream_sets,
        **more,
    )
    assert len(fs) == m * len(stages)
    own = np.flatnonzero((place[edges.before] >= 0) & (passes.stage[edges.before] == passes.stage[edges.after]))
    before, after, held = edges.before[own], edges.after[own], edges.bytes[own]
    left = np.zeros(count, np.int64)
    left[fs] = inputs[passes.stage[fs]]
    kept = np.zeros(len(own), np.int64)
    for late in (False, True):  # the input is part of what B frees, what is more of what W frees
        rows = np.flatnonzero((passes.kind[after] == W) == late)
        kept[rows] = np.minimum(left[before[rows]], held[rows])
        left[before[rows]] -= kept[rows]
    rest = edges.bytes.copy()
    rest[own] = kept
    none = np.zeros(len(own), np.int64)
    edges = replace(edges, bytes=rest)
    return table, _joined(edges, (fs, place[fs], none[: len(fs)], left[fs]), (place[before], after, none, held - kept))


_COPIED = ("stage", "microbatch", "slice", "rank", "streams")


def _joined(edges: Edges, *parts: tuple[Ints, Ints, Ints, Ints]) -> Edges:
    columns = zip((edges.before, edges.after, edges.lag, edges.bytes), *parts, strict=True)
    return Edges(*(np.concatenate(column).astype(np.int64) for column in columns))


def least_room(ranks_of: Sequence[int], held: Ints, from_b: Ints, stages: Ints, inputs: Ints, ranks: int) -> Ints:
    """Bytes a rank that one microbatch needs on the route `ranks_of`: its first B waits for all F; the B of a rank's stages
    run one after the other, and only that of the moment needs what it takes and, where the others recompute, activations."""
    need, below = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    base = held.copy()
    base[stages] = inputs[stages]
    for stage, rank in enumerate(ranks_of):
        need[rank] = max(need[rank], below[rank] + max(base[stage], held[stage] + from_b[stage]))
        below[rank] += base[stage]
    return need
