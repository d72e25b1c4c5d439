"""What charts share: a track a stream, stages by number, colours of kinds, which kind of pass fills a cell of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kinds import TABLE
from ..problem import Ints, Problem
from ..timeline import Timeline

PALEST = 0.6  # the share of white in the colour of the last of three stages or more


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


def letters(present: Sequence[str]) -> dict[str, str]:
    """The letter of every kind that a schedule has: a fused backward is B where no other pass is."""
    taken: dict[str, str] = {}
    for kind in present:
        free = (letter for letter in TABLE[kind].letters if letter not in taken.values())
        taken[kind] = next(free, TABLE[kind].letters[-1])
    return taken


def levels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`, 0 to 255."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def brightness(colour: str) -> float:
    """How light a colour looks, 0 to 255 (luma, ITU-R BT.601)."""
    red, green, blue = levels(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def shades(kind: str, chunks: int) -> tuple[str, ...]:
    """The colour of a kind on each of a rank's `chunks` stages: the later the stage, the paler, so that they can be told
    apart."""
    full = levels(TABLE[kind].colour)
    shares = (PALEST * chunk / max(chunks - 1, 2) for chunk in range(chunks))
    return tuple(_hex([level + (255 - level) * share for level in full]) for share in shares)


def _hex(values: Sequence[float]) -> str:
    return "#" + "".join(f"{round(level):02x}" for level in values)


def ink(colour: str) -> str:
    """Black or white, whichever reads better on `colour`."""
    return "#111" if brightness(colour) > 125 else "#fff"
