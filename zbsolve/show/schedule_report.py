"""A schedule as one HTML page: a chart to zoom into, memory below it, the certificate, and a measured run if given. And as
text for the terminal: a row for each stream, with peak memory, bubble and certificate."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kinds import KINDS, TABLE
from ..problem import Ints
from ..schedule import Schedule
from ..schedule.timeline import Timeline
from ..schedule.trace import Trace
from ..util.text import format_bytes, format_time, plural, printable
from .comparison import NOT_COUNTED, Comparison, check_trace, compare, comparison_as_text, step_time
from .pages import packed, render
from .sentences import certificate_lines, headline, pool_lines, value_line, without_notes
from .tracks import Track, brightness, cell_kinds, letters, levels, shades, tracks_of

TENTHS = 10  # units of a µs in measured columns; predicted times are whole µs


def schedule_as_page(schedule: Schedule, trace: Trace | None = None, title: str | None = None) -> str:
    """The page as text; it loads no other file. With a `trace` its median step is drawn below the prediction, on one axis.

    Raises BadInput for a trace of another schedule, Deadlock for a schedule that deadlocks.
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
    """The chart's content in sentences, for readers who cannot see it."""
    lines = [headline(schedule), value_line(schedule), *pool_lines(schedule), *certificate_lines(schedule)]
    if comparison is not None:
        steps = [format_time(time) for time in (comparison.measured, min(comparison.steps), max(comparison.steps))]
        median = f"median of {plural(step=len(comparison.steps))} from {steps[1]} to {steps[2]}"
        lines.append(f"measured {comparison.objective} {steps[0]}, {median}")
    return lines


def _figures(schedule: Schedule, comparison: Comparison | None) -> list[tuple[str, str, str]]:
    """The key figures at the top: (label, value, note)."""
    timeline, certificate, problem = schedule.timeline(), schedule.certificate, schedule.problem
    figures = [(problem.objective, format_time(timeline.value), "predicted")]
    if comparison is not None:
        share = f"{comparison.difference / comparison.predicted:+.2%}" if comparison.predicted else ""
        figures.append((problem.objective, format_time(comparison.measured), f"measured, {share}"))
    figures.append(("bubble", f"{timeline.bubble_rate:.2%}", f"work {format_time(problem.work)}"))
    if certificate is not None:
        if certificate.objective != problem.objective:  # of the whole step, if the schedule is a part of one
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
    head = ["rank"]
    for run, timeline in runs:
        unsure = f" ({NOT_COUNTED})" if run == "measured" and timeline.held is None else ""
        head += [f"{what}, {run}" for what in ("first start", "last end", "idle", f"peak memory{unsure}")]
    columns = [column for _, timeline in runs for column in _rank_columns(timeline)]
    return [head, *([f"rank {rank}", *(column[rank] for column in columns)] for rank in range(schedule.problem.ranks))]


def _rank_columns(timeline: Timeline) -> list[list[str]]:
    (first, last), origin, problem = timeline.windows, timeline.start.min(), timeline.problem
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
    tracks, chunks = tracks_of(problem), int(problem.chunks.max()) + 1
    timeline = schedule.timeline()
    runs = [_run("predicted", timeline, timeline.value, 1)]
    columns = {
        **{what: getattr(p, what) for what in ("kind", "stage", "microbatch", "slice", "rank")},
        "chunk": problem.chunks,
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
        "tracks": [{"stream": track.stream, "rank": track.rank, "passes": len(track.rows)} for track in tracks],
        "runs": runs,
        "packed": packed(columns),
    }


def _run(name: str, timeline: Timeline, value: float, scale: int) -> dict[str, Any]:
    """Name, value and peaks of one timeline. scale: units of its columns in a µs."""
    counted = "counted after passes" if timeline.held is not None else name if name == "predicted" else NOT_COUNTED
    return {"name": name, "value": value, "scale": scale, "peaks": list(timeline.peak_bytes), "memory": counted}


def _times(timeline: Timeline, run: int, scale: int, ready: NDArray[Any] | None = None) -> dict[str, Ints]:
    """One timeline's columns; their names end in `run`. start, length: of each pass, since the first start, in `scale` units
    a µs; ready: when it had its inputs; turn: its place in the order, if passes have length 0; held: counted bytes."""
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


# --- In the terminal ---


IDLE = "·"
TERMINAL_LEVELS = (0, 95, 135, 175, 215, 255)  # of red, green and blue in a terminal's 256 colours


def schedule_as_text(schedule: Schedule, trace: Trace | None = None, width: int = 100, colour: bool = False) -> str:
    """The chart as text of at most `width` columns (at least 40), and sentences below it.

    With a `trace` every stream has a second row, from its median step. colour: use ANSI colours. Raises BadInput for a trace
    of another schedule, Deadlock for a schedule that deadlocks.
    """
    predicted = schedule.timeline()
    runs = [("", predicted)]
    if trace is not None:
        check_trace(schedule, trace)
        runs = [("plan", predicted), ("run", trace.median())]
    begin = {id(t): float(t.start.min()) for _, t in runs}
    longest = max(float(t.end.max()) - begin[id(t)] for _, t in runs) or 1.0
    rows = [
        (_label(track, name), track, t, "" if name == "run" and t.held is None else _memory(schedule, track, t))
        for track in tracks_of(schedule.problem)
        for name, t in runs
    ]
    left = max(len(label) for label, *_ in rows)
    right = max(len(memory) for *_, memory in rows)
    columns = max(10, max(width, 40) - left - right - 4)
    paint = Painter(schedule, columns, longest / columns, colour)
    body = [
        f"{label.ljust(left)} │{paint.row(track, t, begin[id(t)])}│ {memory.rjust(right)}".rstrip()
        for label, track, t, memory in rows
    ]
    title = f"{'':{left}}  {'0':<{columns - 12}}{format_time(longest):>12}{'peak' if right else '':>{right + 2}}".rstrip()
    taken = [f"{schedule.problem.objective} {format_time(step_time(timeline))}" for _, timeline in runs[1:]]
    measured = [f"measured {name} (median step)" for name in taken]
    below = [headline(schedule), value_line(schedule), *pool_lines(schedule), *measured, *certificate_lines(schedule)]
    return "\n".join([title, *body, paint.legend(), "", *below]) + "\n"


def _label(track: Track, run: str) -> str:
    stream = "" if track.kind == "compute" else f" {printable(track.kind)}"
    rank = f"{track.rank:>3}" if track.first and run != "run" else "   "
    return f"{rank}{stream}{' ' if run else ''}{run}"


def _memory(schedule: Schedule, track: Track, timeline: Timeline) -> str:
    """Peak memory and capacity of a rank, for its first track; "" for the others."""
    if not track.first or not schedule.problem.edges.bytes.any():
        return ""
    peak, capacity = timeline.peak_bytes[track.rank], schedule.problem.capacity
    return format_bytes(peak) if capacity is None else f"{format_bytes(peak)} / {format_bytes(capacity[track.rank])}"


class Painter:
    """Draws one row at a time: with labels such as `F12` if nearly all fit into their passes, otherwise a letter a cell.

    columns: cells of a row. cell: µs of a cell. colour: use ANSI colours.
    """

    def __init__(self, schedule: Schedule, columns: int, cell: float, colour: bool) -> None:
        problem = schedule.problem
        self.columns, self.cell, self.colour = columns, cell, colour
        self.letter = letters(problem.passes.kinds)
        self.chunk = problem.chunks
        passes = zip(problem.passes.kind_names, self.chunk.tolist(), problem.passes.microbatch.tolist(), strict=True)
        cased = ((self.letter[kind], chunk % 2, microbatch) for kind, chunk, microbatch in passes)
        self.labels = [f"{letter.lower() if small else letter}{microbatch}" for letter, small, microbatch in cased]
        room = problem.passes.duration / cell
        fitting = np.array([len(label) for label in self.labels]) <= room
        self.labelled = bool(fitting[room > 0].mean() >= 0.95) if (room > 0).any() else False

    def row(self, track: Track, timeline: Timeline, begin: float) -> str:
        """One stream's cells. begin: the start of the first cell, µs."""
        text, kinds = self._labels(track, timeline, begin) if self.labelled else self._letters(track, timeline, begin)
        if not self.colour:
            return "".join(text)
        cuts = [0, *(i for i in range(1, self.columns) if kinds[i] != kinds[i - 1]), self.columns]
        return "".join(
            _painted("".join(text[a:b]), KINDS[kinds[a]]) if kinds[a] >= 0 else "".join(text[a:b]) for a, b in pairwise(cuts)
        )

    def _letters(self, track: Track, timeline: Timeline, begin: float) -> tuple[list[str], list[int]]:
        edges = begin + self.cell * np.arange(self.columns + 1)
        kinds = cell_kinds(timeline, track.rows, edges).tolist()
        # In colour, only the first of neighbouring cells of a kind has the letter.
        again = [self.colour and i > 0 and kinds[i - 1] == kind for i, kind in enumerate(kinds)]
        idle, pairs = " " if self.colour else IDLE, zip(kinds, again, strict=True)
        return [idle if kind < 0 else " " if skip else self.letter[KINDS[kind]] for kind, skip in pairs], kinds

    def _labels(self, track: Track, timeline: Timeline, begin: float) -> tuple[list[str], list[int]]:
        text, kinds = [" " if self.colour else IDLE] * self.columns, [-1] * self.columns
        rows: Ints = track.rows[np.argsort(timeline.start[track.rows], kind="stable")]
        first = np.rint((timeline.start[rows] - begin) / self.cell).astype(int).tolist()
        last = np.rint((timeline.end[rows] - begin) / self.cell).astype(int).tolist()
        for row, a, b in zip(rows.tolist(), first, last, strict=True):
            label, room = self.labels[row], min(b, self.columns) - a
            shown = label if len(label) <= room else label[:1]
            for i, letter in enumerate(shown.ljust(max(room, 0), " " if self.colour else "-")[: max(room, 0)]):
                text[a + i], kinds[a + i] = letter, int(timeline.problem.passes.kind[row])
        return text, kinds

    def legend(self) -> str:
        """The meaning of letters and colours."""
        parts = [
            (_painted(f" {letter} ", kind) if self.colour else letter) + f" {TABLE[kind].words}"
            for kind, letter in self.letter.items()
        ]
        second = "; small letters: every second stage of a rank" if self.labelled and self.chunk.max() > 0 else ""
        wide = format_time(self.cell) if self.cell >= 10 else f"{self.cell:.2g} µs"
        cell = "" if self.labelled else f"; a cell is {wide} and shows what fills most of it"
        return "  ".join(parts) + ("" if self.colour else f"  {IDLE} idle") + second + cell


def _painted(text: str, kind: str) -> str:
    """Text on its kind's colour, from the 256 that terminals share."""
    colour = TABLE[kind].colour
    red, green, blue = (int(np.abs(np.subtract(TERMINAL_LEVELS, level)).argmin()) for level in levels(colour))
    ink = 16 if brightness(colour) > 140 else 231
    return f"\x1b[48;5;{16 + 36 * red + 6 * green + blue}m\x1b[38;5;{ink}m{text}\x1b[0m"
