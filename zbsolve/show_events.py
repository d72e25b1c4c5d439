"""A schedule in the Chrome and Perfetto trace format: a track a stream, arrows for messages, counters for memory."""

from __future__ import annotations

import json
from typing import Any

from .compare import check_trace
from .problem import KINDS
from .schedule import Schedule
from .show_style import Lane, lanes, printable
from .timeline import Timeline
from .trace import Trace

Event = dict[str, Any]


def events(schedule: Schedule, trace: Trace | None = None) -> str:
    """The JSON text. Ranks are processes, streams their threads, times µs; with a `trace` the median step's ranks follow.

    Raises BadInput for a trace of another schedule, Deadlock for a schedule that has no times.
    """
    found = _run(schedule, schedule.timeline(), "predicted", 0)
    if trace is not None:
        check_trace(schedule, trace)
        found += _run(schedule, trace.steps[trace.median_step], "measured", schedule.problem.ranks)
    body = {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"digest": schedule.problem.digest}}
    return json.dumps(body, separators=(",", ":")) + "\n"


def _run(schedule: Schedule, timeline: Timeline, run: str, offset: int) -> list[Event]:
    """One timeline's events; process numbers from `offset` on."""
    found: list[Event] = []
    home: dict[int, tuple[int, int]] = {}
    for rank in range(schedule.problem.ranks):
        found.append(_name("process_name", offset + rank, 0, f"rank {rank} {run}"))
        found.append({"ph": "M", "name": "process_sort_index", "pid": offset + rank, "args": {"sort_index": offset + rank}})
    for thread, lane in enumerate(lanes(schedule.problem)):
        found.append(_name("thread_name", offset + lane.rank, thread, printable(lane.stream)))
        found += _slices(timeline, lane, offset, thread)
        for row in lane.rows.tolist():
            home.setdefault(row, (offset + int(schedule.problem.passes.rank[row]), thread))
    return found + _messages(timeline, home, run) + _memory(timeline, offset)


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _slices(timeline: Timeline, lane: Lane, offset: int, thread: int) -> list[Event]:
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
            "args": {"stage": int(p.stage[i]), "microbatch": int(p.microbatch[i]), "slice": int(p.slice[i])},
        }
        for i in lane.rows.tolist()
    ]


def _messages(timeline: Timeline, home: dict[int, tuple[int, int]], run: str) -> list[Event]:
    """An arrow for every edge between two ranks. It must begin inside its slice, so a little before the end."""
    problem, found = timeline.problem, list[Event]()
    rank = problem.passes.rank
    pairs = zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True)
    for i, (a, b) in enumerate(pairs):
        if rank[a] == rank[b]:
            continue
        length = (timeline.end[a] - timeline.start[a]).item()
        leaves = timeline.end[a].item() - min(0.001, length / 2)
        common = {"cat": "message", "name": "message", "id": f"{run}{i}"}
        found.append({"ph": "s", **common, "pid": home[a][0], "tid": home[a][1], "ts": leaves})
        found.append({"ph": "f", "bp": "e", **common, "pid": home[b][0], "tid": home[b][1], "ts": timeline.start[b].item()})
    return found


def _memory(timeline: Timeline, offset: int) -> list[Event]:
    if not timeline.problem.edges.bytes.any():
        return []
    found = []
    for rank in range(timeline.problem.ranks):
        times, held = timeline.memory(rank)
        for time, size in zip(times.tolist(), held.tolist(), strict=True):
            found.append({"ph": "C", "name": "memory", "pid": offset + rank, "ts": time, "args": {"bytes": size}})
    return found
