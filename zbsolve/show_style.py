"""What all pictures share: colours and words of the kinds, lanes, cells, and the sentences under a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .problem import KINDS, Ints, Problem
from .schedule import Schedule
from .timeline import Timeline

MEANING = {
    "F": "forward",
    "B": "gradient of the input",
    "W": "gradient of the weights",
    "BW": "both gradients, fused",
    "X": "recompute",
    "O": "offload to the host",
    "R": "reload from the host",
    "S": "vocabulary, forward",
    "T": "vocabulary, gradients",
    "C": "collective",
    "U": "optimizer update",
    "AF": "all-to-all of the forward",
    "AB": "all-to-all of the backward",
}

# After Okabe and Ito's set for colour-blind readers, moved apart in lightness (CIE L* from 28 to 90) so that the kinds
# can also be told apart in grey. No two come closer than a CIE ΔE of 7 under any of the three simulated deficiencies;
# F, B and W, which meet most, are farthest apart.
COLOURS = {
    "F": "#1a5a9c",
    "B": "#f3b04b",
    "W": "#2fa583",
    "BW": "#d2623a",
    "X": "#f2e57c",
    "O": "#6fb7ee",
    "R": "#e08cb0",
    "S": "#9c58b4",
    "T": "#e3d3f4",
    "C": "#4b4d52",
    "U": "#6a3414",
    "AF": "#a6db9b",
    "AB": "#7d35ef",
}


@dataclass(frozen=True, eq=False)
class Lane:
    """One stream of one rank: the problem's rows on it. `first` marks the first lane of its rank."""

    stream: str
    rank: int
    rows: Ints
    first: bool

    @property
    def kind(self) -> str:
        """What the stream is: `compute`, `d2h`, …"""
        return self.stream.split(":")[0]


def lanes(problem: Problem) -> list[Lane]:
    """Every stream, ordered by rank, compute streams first."""
    found = [(int(problem.passes.rank[rows].min()), stream, rows) for stream, rows in problem.members.items() if len(rows)]
    found.sort(key=lambda one: (one[0], not one[1].startswith("compute:"), one[1]))
    return [Lane(stream, rank, rows, i == 0 or found[i - 1][0] != rank) for i, (rank, stream, rows) in enumerate(found)]


def chunks(problem: Problem) -> Ints:
    """Which of its rank's stages each pass belongs to (0 for the lowest stage), shape (passes,)."""
    p = problem.passes
    pairs = np.unique(np.stack([p.rank, p.stage]), axis=1)
    first = np.searchsorted(pairs[0], np.arange(problem.ranks))
    width = int(p.stage.max()) + 1
    row = np.searchsorted(pairs[0] * width + pairs[1], p.rank * width + p.stage)
    return np.asarray(row - first[p.rank], np.int64)


def cells(timeline: Timeline, rows: Ints, edges: NDArray[Any]) -> Ints:
    """The kind (an index into KINDS) that fills most of each cell, or −1 where more than half is idle.

    `edges`: ascending times in µs, shape (cells + 1,). Returns shape (cells,).
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


def present_kinds(problem: Problem) -> list[str]:
    """The kinds that the problem has, in the order of KINDS."""
    return [KINDS[k] for k in np.unique(problem.passes.kind)]


def printable(text: str) -> str:
    """`text` on one line without control characters: files are written by others, and terminals obey what they print."""
    return "".join(c if c.isprintable() else " " for c in text)


def format_time(us: float) -> str:
    """µs as a person reads them: `850 µs`, `12.4 ms`, `3.21 s`."""
    if abs(us) < 10_000:
        return f"{us:,.0f} µs"
    return f"{us / 1e3:,.2f} ms" if abs(us) < 1e7 else f"{us / 1e6:,.2f} s"


def headline(schedule: Schedule) -> str:
    """One line: ranks, stages, microbatches, passes, and where the times come from."""
    p = schedule.problem.passes
    counts = (
        (schedule.problem.ranks, "rank"),
        (len(np.unique(p.stage)), "stage"),
        (len(np.unique(p.microbatch)), "microbatch"),
        (len(p), "pass"),
    )
    words = [f"{n:,} {word}{'' if n == 1 else 'es' if word.endswith(('s', 'h')) else 's'}" for n, word in counts]
    source = f" ({printable(schedule.problem.source)})" if schedule.problem.source else ""
    return ", ".join(words) + source


def value_line(schedule: Schedule) -> str:
    """One line: the objective's value, both step times and the bubble."""
    timeline, objective = schedule.timeline(), schedule.problem.objective
    other = "span" if objective == "makespan" else "makespan"
    rest = timeline.span if other == "span" else timeline.makespan
    return (
        f"{objective} {format_time(timeline.value)}, bubble {timeline.bubble_rate:.2%} of it "
        f"({other} {format_time(rest)}, work {format_time(schedule.problem.work)})"
    )


def certificate_lines(schedule: Schedule) -> list[str]:
    """What is proven about the schedule, and how; one line saying so where nothing is."""
    c = schedule.certificate
    if c is None:
        return ["no certificate comes with this (a trace keeps none): nothing is proven here"]
    verdict = "optimal" if c.status == "optimal" else f"at most {c.gap:.2%} could still be saved"
    return [
        f"certificate: {c.objective} {format_time(c.value)}, proven bound {format_time(c.bound)}: {verdict}",
        f"bound by {printable(c.proof)}; found by {printable(c.solver)} in {c.seconds:.1f} s, seed {c.seed}, "
        f"problem {printable(c.digest)}",
    ]
