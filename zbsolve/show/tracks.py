"""What charts share: a track a stream, a rank's stages by number, and which kind of pass fills a cell of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Ints, Problem
from ..timeline import Timeline


@dataclass(frozen=True, eq=False)
class Track:
    """One stream of one rank. rows: of the problem's table, the passes on it. first: whether it is its rank's first one."""

    stream: str
    rank: int
    rows: Ints
    first: bool

    @property
    def kind(self) -> str:
        """What the stream is: `compute`, `d2h`, …"""
        return self.stream.split(":")[0]


def tracks_of(problem: Problem) -> list[Track]:
    """A track for every stream, ordered by rank, compute streams first."""
    found = [(int(problem.passes.rank[rows].min()), stream, rows) for stream, rows in problem.members.items() if len(rows)]
    found.sort(key=lambda one: (one[0], not one[1].startswith("compute:"), one[1]))
    return [Track(stream, rank, rows, i == 0 or found[i - 1][0] != rank) for i, (rank, stream, rows) in enumerate(found)]


def chunk_numbers(problem: Problem) -> Ints:
    """Which of its rank's stages each pass belongs to (0 for the lowest stage), shape (passes,)."""
    p = problem.passes
    width = int(p.stage.max()) + 1
    pairs, row = np.unique(p.rank * width + p.stage, return_inverse=True)  # of rank and stage, in their order
    first = np.searchsorted(pairs, np.arange(problem.ranks) * width)
    return np.asarray(row - first[p.rank], np.int64)


def cell_kinds(timeline: Timeline, rows: Ints, edges: NDArray[Any]) -> Ints:
    """The kind (an index into KINDS) that fills most of each cell, or −1 where more than half is idle.

    rows: of the problem's table, the passes on one stream. edges: ascending times in µs, shape (cells + 1,). Returns shape
    (cells,).
    """
    kind = timeline.problem.passes.kind[rows]
    present = np.unique(kind)
    filled = np.stack([_busy(timeline, rows[kind == k], edges) for k in present])
    idle = filled.sum(axis=0) < 0.5 * np.diff(edges)
    return np.where(idle, -1, present[filled.argmax(axis=0)]).astype(np.int64)


def _busy(timeline: Timeline, rows: Ints, edges: NDArray[Any]) -> NDArray[np.float64]:
    """µs of each cell that these passes fill: differences of the busy time up to each edge, linear in between."""
    order = rows[np.argsort(timeline.start[rows], kind="stable")]
    times = np.stack([timeline.start[order], timeline.end[order]], axis=1).ravel().astype(np.float64)
    busy = np.repeat(np.cumsum(timeline.end[order] - timeline.start[order]), 2).astype(np.float64)
    busy[::2] -= timeline.end[order] - timeline.start[order]
    return np.diff(np.interp(edges, np.maximum.accumulate(times), busy))
