"""All-to-all of expert parallelism: what F and B of a stage send between devices, on a stream of its own.

Where experts live on other devices, a pass dispatches tokens to them and combines what they give back (arXiv 2412.19437,
section 3.2.1). Both are one pass here, behind the computation that they belong to: `AF` after F, `AB` after B or BW, on
`comm:<rank>`. What the stage gives on is there when it has ended, so a microbatch waits for each of its all-to-alls, and
others may compute meanwhile: that is what DualPipe's overlapped F and B do.
"""

from __future__ import annotations

import numpy as np

from .problem import KINDS, Edges, Ints, Passes

F, B, BW, AF, AB = (KINDS.index(kind) for kind in ("F", "B", "BW", "AF", "AB"))


def comm_streams(passes: Passes) -> tuple[tuple[tuple[str, ...], ...], int]:
    """The passes' sets of streams with `comm:<rank>` of every rank, and where those begin."""
    ours = tuple((f"comm:{rank}",) for rank in range(int(passes.rank.max()) + 1))
    if passes.stream_sets[-len(ours) :] == ours:
        return passes.stream_sets, len(passes.stream_sets) - len(ours)
    return (*passes.stream_sets, *ours), len(passes.stream_sets)


def with_all_to_all(passes: Passes, edges: Edges, forward: Ints, backward: Ints) -> tuple[Passes, Edges]:
    """A step with `<stage>AF<microbatch>` of `forward[stage]` µs after each F, and `<stage>AB<microbatch>` of
    `backward[stage]` µs after each B or BW; none where that is 0.

    What waited for the F or B of another stage waits for its all-to-all, as does the last stage's own backward; W does not.
    passes: F and B (or BW) of every stage and microbatch, and others.
    """
    backs = np.isin(passes.kind, (B, BW))
    times = np.where(passes.kind == F, forward[passes.stage], np.where(backs, backward[passes.stage], 0))
    own = np.flatnonzero(times)
    place = np.full(len(passes), -1, np.int64)  # F or B → its all-to-all
    place[own] = len(passes) + np.arange(len(own))
    sets, first = comm_streams(passes)
    table = Passes(
        kind=np.concatenate([passes.kind, np.where(passes.kind[own] == F, AF, AB)]),
        duration=np.concatenate([passes.duration, times[own]]),
        streams=np.concatenate([passes.streams, first + passes.rank[own]]),
        stream_sets=sets,
        **{what: np.concatenate([column := getattr(passes, what), column[own]]) for what in _COPIED},
    )
    before, after = edges.before, edges.after
    output = (place[before] >= 0) & (passes.kind[before] == passes.kind[after])  # to the F or B of another stage
    turn = np.flatnonzero((passes.kind[before] == F) & backs[after] & (passes.stage[before] == passes.stage.max()))
    turn = turn[place[before[turn]] >= 0]
    return table, Edges(
        np.concatenate([np.where(output, place[before], before), own, place[before[turn]]]),
        np.concatenate([after, place[own], after[turn]]),
        np.concatenate([edges.lag, np.zeros(len(own) + len(turn), np.int64)]),
        np.concatenate([edges.bytes, np.zeros(len(own) + len(turn), np.int64)]),
    )


_COPIED = ("stage", "microbatch", "slice", "rank")
