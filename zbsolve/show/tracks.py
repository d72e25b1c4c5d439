"""Shared by charts: a track for each stream, colours of kinds and chunks, the kind of pass that fills a cell of time; and a
schedule as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kinds import KINDS, TABLE
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..schedule.timeline import Timeline
from ..schedule.trace import Trace
from ..util.text import printable
from .comparison import check_trace

PALEST = 0.6  # the share of white in the colour of the last of three stages or more


@dataclass(frozen=True, eq=False)
class Track:
    """One stream in a chart. rows: its passes, as rows of the problem's table. first: it is the first track of its rank."""

    stream: str
    rank: int
    rows: Ints
    first: bool

    @property
    def kind(self) -> str:
        """The part of the stream's name before the colon: `compute`, `d2h`, …"""
        return self.stream.split(":")[0]


def tracks_of(problem: Problem) -> list[Track]:
    """A track for every stream, by rank, compute streams first. A stream of several ranks is with the lowest of them, but
    `in:<rank>` (receiving) with its own rank."""
    ranks = {stream: int(problem.passes.rank[rows].min()) for stream, rows in problem.members.items() if len(rows)}
    ranks |= {stream: int(stream.removeprefix("in:")) for stream in ranks if stream.startswith("in:")}
    lanes = sorted((rank, not stream.startswith("compute:"), stream) for stream, rank in ranks.items())
    first = {i for i, (rank, *_) in enumerate(lanes) if i == 0 or lanes[i - 1][0] != rank}
    return [Track(stream, rank, problem.members[stream], i in first) for i, (rank, _, stream) in enumerate(lanes)]


def cell_kinds(timeline: Timeline, rows: Ints, edges: NDArray[Any]) -> Ints:
    """The kind (an index into KINDS) that fills most of each cell, or −1 where more than half is idle.

    rows: the passes on one stream, as rows of the problem's table. edges: ascending times, µs, shape (cells + 1,). Returns
    shape (cells,).
    """
    kind = timeline.problem.passes.kind[rows]
    present = np.unique(kind)
    filled = np.stack([_busy(timeline, rows[kind == k], edges) for k in present])
    idle = filled.sum(axis=0) < 0.5 * np.diff(edges)
    return np.where(idle, -1, present[filled.argmax(axis=0)]).astype(np.int64)


def _busy(timeline: Timeline, rows: Ints, edges: NDArray[Any]) -> NDArray[np.float64]:
    """µs that these passes fill of each cell: the busy time until each edge, interpolated linearly, and its differences."""
    order = rows[np.argsort(timeline.start[rows], kind="stable")]
    times = np.stack([timeline.start[order], timeline.end[order]], axis=1).ravel().astype(np.float64)
    busy = np.repeat(np.cumsum(timeline.end[order] - timeline.start[order]), 2).astype(np.float64)
    busy[::2] -= timeline.end[order] - timeline.start[order]
    return np.diff(np.interp(edges, np.maximum.accumulate(times), busy))


def letters(present: Sequence[str]) -> dict[str, str]:
    """Kind → its letter, for the kinds that a schedule has. A fused backward is B if no other kind has that letter."""
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
    """The colour of a kind for each of a rank's `chunks` stages; later stages are paler, so that they differ."""
    full = levels(TABLE[kind].colour)
    shares = (PALEST * chunk / max(chunks - 1, 2) for chunk in range(chunks))
    return tuple("#" + "".join(f"{round(level + (255 - level) * share):02x}" for level in full) for share in shares)


def ink(colour: str) -> str:
    """Black or white: the one with more contrast to `colour`."""
    return "#111" if brightness(colour) > 125 else "#fff"


Event = dict[str, Any]


def schedule_as_trace(schedule: Schedule, trace: Trace | None = None) -> str:
    """The JSON text (Trace Event Format). Ranks are processes, streams their threads, times µs. With a `trace` the ranks of
    its median step follow; each pass has its wait for inputs, the host time before it, and the bytes held after it.

    Raises BadInput for a trace of another schedule, Deadlock for a schedule that deadlocks.
    """
    timeline, ranks = schedule.timeline(), schedule.problem.ranks
    events = _run(schedule, timeline, "predicted", 0) + _memory(timeline, 0)
    if trace is not None:
        check_trace(schedule, trace)
        step = trace.median_step
        extra: dict[str, list[Any]] = {"wait": trace.waits(step).round(3).tolist()}
        if trace.host:
            extra["host"] = trace.host[step].round(3).tolist()
        if trace.held is not None:
            extra["held"] = trace.held.tolist()
        measured = trace.median()
        events += _run(schedule, measured, "measured", ranks, extra) + _memory(measured, ranks)
    body = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"digest": schedule.problem.digest}}
    return json.dumps(body, separators=(",", ":")) + "\n"


def _run(
    schedule: Schedule, timeline: Timeline, run: str, offset: int, extra: Mapping[str, list[Any]] | None = None
) -> list[Event]:
    """One timeline's events. offset: the process number of rank 0. extra: name of an argument → a value for each pass."""
    events: list[Event] = []
    home: dict[int, tuple[int, int]] = {}
    for rank in range(schedule.problem.ranks):
        events.append(_name("process_name", offset + rank, 0, f"rank {rank} {run}"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": offset + rank, "args": {"sort_index": offset + rank}})
    for thread, track in enumerate(tracks_of(schedule.problem)):
        for rank in np.unique(schedule.problem.passes.rank[track.rows]).tolist():  # several ranks may share a bus
            events.append(_name("thread_name", offset + rank, thread, printable(track.stream)))
        events += _bars(timeline, track, offset, thread, extra or {})
        for row in track.rows.tolist():
            home.setdefault(row, (offset + int(schedule.problem.passes.rank[row]), thread))
    return events + _messages(timeline, home, offset)


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _bars(timeline: Timeline, track: Track, offset: int, thread: int, extra: Mapping[str, list[Any]]) -> list[Event]:
    p, names = timeline.problem.passes, timeline.problem.names
    return [
        {
            "ph": "X",
            "name": names[i],
            "cat": KINDS[p.kind[i]],
            "pid": offset + int(p.rank[i]),
            "tid": thread,
            "ts": timeline.start[i].item(),
            "dur": (timeline.end[i] - timeline.start[i]).item(),
            "args": {
                "stage": int(p.stage[i]),
                "microbatch": int(p.microbatch[i]),
                "slice": int(p.slice[i]),
                **{what: column[i] for what, column in extra.items()},
            },
        }
        for i in track.rows.tolist()
    ]


def _messages(timeline: Timeline, home: dict[int, tuple[int, int]], offset: int) -> list[Event]:
    """An arrow for every edge between two ranks. Its ends must lie inside the events of both passes: shortly before the end
    of the first and after the start of the second. Perfetto needs ids that are numbers: it drops arrows with others."""
    problem, events = timeline.problem, list[Event]()
    rank = problem.passes.rank
    pairs = zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True)
    first = offset * len(problem.edges)
    for i, (a, b) in enumerate(pairs):
        if rank[a] == rank[b]:
            continue
        common = {"cat": "message", "name": "message", "id": first + i}
        leaves = timeline.end[a].item() - _within(timeline, a)
        events.append({"ph": "s", **common, "pid": home[a][0], "tid": home[a][1], "ts": leaves})
        comes = timeline.start[b].item() + _within(timeline, b)
        events.append({"ph": "f", "bp": "e", **common, "pid": home[b][0], "tid": home[b][1], "ts": comes})
    return events


def _within(timeline: Timeline, row: int) -> float:
    """A tenth of a µs, or half of a shorter pass: viewers truncate each time to whole nanoseconds."""
    length: float = (timeline.end[row] - timeline.start[row]).item()
    return min(0.1, length / 2)


def _memory(timeline: Timeline, offset: int) -> list[Event]:
    if timeline.held is None and not timeline.problem.edges.bytes.any():
        return []
    problem, events = timeline.problem, list[Event]()
    homes = [(rank, "memory") for rank in range(problem.ranks)]
    for pool in range(problem.ranks, problem.ranks + len(problem.pools)):  # shown with the lowest rank that has bytes there
        users = problem.passes.rank[problem.edges.before[problem.edges_in(pool)]]
        homes.append((int(users.min(initial=problem.ranks - 1)), printable(problem.pool_name(pool))))
    for pool, (rank, name) in enumerate(homes):
        times, held = timeline.memory(pool)
        for time, size in zip(times.tolist(), held.tolist(), strict=True):
            events.append({"ph": "C", "name": name, "pid": offset + rank, "ts": time, "args": {"bytes": size}})
    return events
