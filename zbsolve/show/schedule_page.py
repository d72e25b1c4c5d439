"""A schedule as one HTML page: a chart to zoom into, memory under it, the certificate, and a run if there is one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kinds import KINDS, TABLE
from ..problem import Ints
from ..schedule import Schedule
from ..timeline import Timeline
from ..trace import Trace
from ..util.text import format_bytes, format_time, printable
from .comparison import NOT_COUNTED, Comparison, compare, comparison_as_text
from .pages import packed, render
from .sentences import certificate_lines, headline, pool_lines, value_line, without_notes
from .tracks import chunk_numbers, shades, tracks_of

TENTHS = 10  # measured times are kept to a tenth of a µs; predicted ones are whole


def schedule_as_page(schedule: Schedule, trace: Trace | None = None, title: str | None = None) -> str:
    """The page as text; it loads nothing. With a `trace` its median step is drawn under the prediction, on one axis.

    Raises BadInput for a trace of another schedule, Deadlock for a schedule that has no times.
    """
    comparison = None if trace is None else compare(schedule, trace)
    return render(
        "schedule.html",
        title=printable(title or f"Schedule: {without_notes(headline(schedule))}"),
        figures=_figures(schedule, comparison),
        sentences=_sentences(schedule, comparison),
        comparison="" if comparison is None else comparison_as_text(comparison),
        ranks=_rank_rows(schedule, trace, comparison),
        data=_data(schedule, trace, comparison),
    )


def _sentences(schedule: Schedule, comparison: Comparison | None) -> list[str]:
    """The page in words, for readers who do not see the chart."""
    lines = [headline(schedule), value_line(schedule), *pool_lines(schedule), *certificate_lines(schedule)]
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
        if certificate.objective != problem.objective:  # of the step that this is a part of
            figures.append((certificate.objective, format_time(certificate.value), "predicted"))
        what, more = ("proven bound", "") if certificate.checked else ("bound", ", as a file says")
        gap = "optimal" if certificate.status == "optimal" else f"{certificate.gap:.2%} gap"
        figures.append((what, format_time(certificate.bound), gap + more))
    if problem.edges.bytes.any():
        rank = int(np.argmax(timeline.peak_bytes))
        figures.append(("peak memory", format_bytes(timeline.peak_bytes[rank]), f"on rank {rank}"))
    return figures


def _rank_rows(schedule: Schedule, trace: Trace | None, comparison: Comparison | None) -> list[list[str]]:
    """A header and every rank as a row of text: window, work, share idle, peak memory."""
    runs = [("predicted", schedule.timeline())]
    if trace is not None and comparison is not None:
        runs.append(("measured", trace.median()))
    head = ["rank", *(f"{what}, {run}" for run, timeline in runs for what in _columns(run, timeline))]
    columns = [column for _, timeline in runs for column in _rank_columns(timeline)]
    return [head, *([f"rank {rank}", *(column[rank] for column in columns)] for rank in range(schedule.problem.ranks))]


def _columns(run: str, timeline: Timeline) -> tuple[str, ...]:
    """Their heads; a run whose bytes nobody counted says so."""
    unsure = f" ({NOT_COUNTED})" if run == "measured" and timeline.held is None else ""
    return "first start", "last end", "idle", f"peak memory{unsure}"


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
    """Everything the script draws: words, and packed columns in the problem's table order."""
    problem, p, e = schedule.problem, schedule.problem.passes, schedule.problem.edges
    syncs = np.array([[problem.index[name] for name in pair] for pair in schedule.syncs], np.int64).reshape(-1, 2)
    tracks, chunk = tracks_of(problem), chunk_numbers(problem)
    chunks = int(chunk.max()) + 1
    timeline = schedule.timeline()
    runs = [_run("predicted", timeline, timeline.value, 1)]
    columns = {
        **{what: getattr(p, what) for what in ("kind", "stage", "microbatch", "slice", "rank")},
        "chunk": chunk,
        "taken": problem.taken,
        "freed": problem.freed,
        "rows": np.concatenate([track.rows for track in tracks]),
        "before": np.concatenate([e.before, syncs[:, 0]]),
        "after": np.concatenate([e.after, syncs[:, 1]]),
        **_times(timeline, 0, 1),
    }
    if trace is not None and comparison is not None:
        measured = trace.median()
        runs.append(_run("measured", measured, comparison.measured, TENTHS))
        columns.update(_times(measured, 1, TENTHS, trace.ready[comparison.median_step]))
    return {
        "ranks": problem.ranks,
        "kinds": list(KINDS),
        "present": problem.passes.kinds,
        "shades": {kind: shades(kind, chunks) for kind in problem.passes.kinds},
        "meaning": {kind: TABLE[kind].words for kind in problem.passes.kinds},
        "objective": problem.objective,
        "capacity": None if problem.capacity is None else list(problem.capacity),
        "memory": bool(e.bytes.any()),
        "tracks": [{"stream": one.stream, "rank": one.rank, "passes": len(one.rows)} for one in tracks],
        "runs": runs,
        "packed": packed(columns),
    }


def _run(name: str, timeline: Timeline, value: float, scale: int) -> dict[str, Any]:
    """One timeline's words. scale: units of its columns in a µs."""
    counted = "counted after passes" if timeline.held is not None else name if name == "predicted" else NOT_COUNTED
    return {"name": name, "value": value, "scale": scale, "peaks": list(timeline.peak_bytes), "memory": counted}


def _times(timeline: Timeline, run: int, scale: int, ready: NDArray[Any] | None = None) -> dict[str, Ints]:
    """One timeline's columns, named by its number: start and length of each pass since the first start, in `scale` units a
    µs; when it had its inputs, where that was measured; its turn, where passes without length need one; bytes counted."""
    origin = float(timeline.start.min())

    def since(times: NDArray[Any]) -> Ints:
        return np.rint(np.nan_to_num(np.asarray(times, float) - origin) * scale).astype(np.int64)

    start, end = since(timeline.start), since(timeline.end)
    columns = {f"start{run}": start, f"length{run}": end - start}
    if ready is not None:
        columns[f"ready{run}"] = since(ready)
    if timeline.turn is not None and (start == end).any():
        columns[f"turn{run}"] = timeline.turn
    if timeline.held is not None:
        columns[f"held{run}"] = timeline.held.astype(np.int64)
    return columns
