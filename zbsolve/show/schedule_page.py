"""A schedule as one HTML page: a chart to zoom into, memory under it, the certificate, and a run if there is one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import KINDS, Problem
from ..schedule import Schedule
from ..timeline import Timeline
from ..trace import Trace
from ..util.text import format_bytes, format_time, printable
from .comparison import Comparison, compare
from .comparison_text import comparison_as_text
from .kinds import LOOKS
from .pages import render
from .sentences import certificate_lines, headline, value_line
from .tracks import chunk_numbers, tracks_of


def schedule_as_page(schedule: Schedule, trace: Trace | None = None, title: str | None = None) -> str:
    """The page as text; it loads nothing. With a `trace` its median step is drawn under the prediction, on one axis.

    Raises BadInput for a trace of another schedule, Deadlock for a schedule that has no times.
    """
    comparison = None if trace is None else compare(schedule, trace)
    return render(
        "schedule.html",
        title=printable(title or f"Schedule: {headline(schedule)}"),
        figures=_figures(schedule, comparison),
        sentences=_sentences(schedule, comparison),
        comparison="" if comparison is None else comparison_as_text(comparison),
        ranks=_rank_rows(schedule, trace, comparison),
        data=_data(schedule, trace, comparison),
    )


def _sentences(schedule: Schedule, comparison: Comparison | None) -> list[str]:
    """The page in words, for readers who do not see the chart."""
    lines = [headline(schedule), value_line(schedule), *certificate_lines(schedule)]
    if comparison is not None:
        lines.append(
            f"measured {comparison.objective} {format_time(comparison.measured)}, median of {len(comparison.steps)} steps "
            f"from {format_time(min(comparison.steps))} to {format_time(max(comparison.steps))}"
        )
    return lines


def _figures(schedule: Schedule, comparison: Comparison | None) -> list[tuple[str, str, str]]:
    """What stands large at the top: (label, value, note)."""
    timeline, certificate, problem = schedule.timeline(), schedule.certificate, schedule.problem
    figures = [(problem.objective, format_time(timeline.value), "predicted")]
    if comparison is not None:
        share = f"{comparison.difference / comparison.predicted:+.2%}" if comparison.predicted else ""
        figures.append((problem.objective, format_time(comparison.measured), f"measured, {share}"))
    figures.append(("bubble", f"{timeline.bubble_rate:.2%}", f"work {format_time(problem.work)}"))
    if certificate is not None:
        proven = "optimal" if certificate.status == "optimal" else f"{certificate.gap:.2%} gap"
        figures.append(("proven bound", format_time(certificate.bound), proven))
    if problem.edges.bytes.any():
        rank = int(np.argmax(timeline.peak_bytes))
        figures.append(("peak memory", format_bytes(timeline.peak_bytes[rank]), f"on rank {rank}"))
    return figures


def _rank_rows(schedule: Schedule, trace: Trace | None, comparison: Comparison | None) -> list[list[str]]:
    """A header and every rank as a row of text: window, work, share idle, peak memory."""
    runs = [("predicted", schedule.timeline())]
    if trace is not None and comparison is not None:
        runs.append(("measured", trace.steps[comparison.median_step]))
    head = ["rank", *(f"{what}, {run}" for run, _ in runs for what in ("first start", "last end", "idle", "peak memory"))]
    columns = [column for _, timeline in runs for column in _rank_columns(timeline)]
    return [head, *([f"rank {rank}", *(column[rank] for column in columns)] for rank in range(schedule.problem.ranks))]


def _rank_columns(timeline: Timeline) -> list[list[str]]:
    first, last = timeline.windows
    origin = timeline.start.min()
    problem = timeline.problem
    busy = np.where(problem.computing, timeline.end - timeline.start, 0)
    work = np.bincount(problem.passes.rank, busy, problem.ranks)
    value = timeline.value or 1
    return [
        [format_time(t) for t in (first - origin).tolist()],
        [format_time(t) for t in (last - origin).tolist()],
        [f"{1 - w / value:.1%}" for w in work.tolist()],
        [format_bytes(size) for size in timeline.peak_bytes],
    ]


def _data(schedule: Schedule, trace: Trace | None, comparison: Comparison | None) -> dict[str, Any]:
    """Everything the script draws, as columns in the problem's table order; times in µs since the step's start."""
    problem, p, e = schedule.problem, schedule.problem.passes, schedule.problem.edges
    timeline = schedule.timeline()
    runs = [_run("predicted", timeline, timeline.value, None)]
    if trace is not None and comparison is not None:
        step = comparison.median_step
        runs.append(_run("measured", trace.steps[step], comparison.measured, trace.ready[step]))
    syncs = [[problem.index[a], problem.index[b]] for a, b in schedule.syncs]
    return {
        "ranks": problem.ranks,
        "kinds": list(KINDS),
        "present": problem.passes.kinds,
        "colours": {kind: look.colour for kind, look in LOOKS.items()},
        "meaning": {kind: look.meaning for kind, look in LOOKS.items()},
        "objective": problem.objective,
        "capacity": None if problem.capacity is None else list(problem.capacity),
        "tracks": [{"stream": one.stream, "rank": one.rank, "rows": one.rows.tolist()} for one in tracks_of(problem)],
        **{what: getattr(p, what).tolist() for what in ("kind", "stage", "microbatch", "slice", "rank")},
        "chunk": chunk_numbers(problem).tolist(),
        "taken": problem.taken.tolist(),
        "freed": problem.freed.tolist(),
        "edges": {"before": e.before.tolist(), "after": e.after.tolist(), "lag": e.lag.tolist()},
        "syncs": syncs,
        "runs": runs,
    }


def _run(name: str, timeline: Timeline, value: float, ready: NDArray[Any] | None) -> dict[str, Any]:
    """One timeline of the data: µs since its first start; ready: when each pass had its inputs, where that was measured."""
    origin = float(timeline.start.min())

    def since(times: NDArray[Any]) -> list[float]:
        return [round(t, 1) for t in np.nan_to_num(np.asarray(times, float) - origin).tolist()]

    return {
        "name": name,
        "value": value,
        "start": since(timeline.start),
        "end": since(timeline.end),
        "ready": None if ready is None else since(ready),
        "memory": _curves(timeline.problem, timeline, origin),
    }


def _curves(problem: Problem, timeline: Timeline, origin: float) -> list[dict[str, list[float]]]:
    """Per rank: times and the bytes held from each on, only where they change; nothing where no edge holds memory."""
    if not problem.edges.bytes.any():
        return []
    curves = []
    for rank in range(problem.ranks):
        times, held = timeline.memory(rank)
        # Of several changes at one time the last holds, but the most matters too: a peak of no length is still a peak.
        keep = np.append(np.diff(held) != 0, True)
        keep = np.concatenate([[True], keep[:-1]])
        moments = np.maximum(np.asarray(times[keep], float) - origin, 0)
        curves.append({"time": [round(t, 1) for t in moments.tolist()], "held": held[keep].tolist()})
    return curves
