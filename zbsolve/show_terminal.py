"""A schedule in the terminal: a row a stream, scaled to the width, with peak memory, bubble and certificate."""

from __future__ import annotations

import numpy as np

from .compare import check_trace, step_time
from .problem import KINDS, Ints
from .schedule import Schedule
from .show_style import (
    COLOURS,
    MEANING,
    Lane,
    cells,
    certificate_lines,
    chunks,
    format_time,
    headline,
    lanes,
    present_kinds,
    printable,
    value_line,
)
from .text import format_bytes
from .timeline import Timeline
from .trace import Trace

IDLE = "·"
LEVELS = (0, 95, 135, 175, 215, 255)  # of red, green and blue in the 256 colours of terminals


def terminal(schedule: Schedule, trace: Trace | None = None, width: int = 100, colour: bool = False) -> str:
    """The picture as text of at most `width` columns (at least 40) and the sentences under it.

    With a `trace` every stream has a second row, its median step. `colour`: ANSI colours, else plain letters. Raises
    BadInput for a trace of another schedule, Deadlock for a schedule that has no times.
    """
    predicted = schedule.timeline()
    runs = [("", predicted)]
    if trace is not None:
        check_trace(schedule, trace)
        runs = [("plan", predicted), ("run", trace.steps[trace.median_step])]
    begin = {id(t): float(t.start.min()) for _, t in runs}
    longest = max(float(t.end.max()) - begin[id(t)] for _, t in runs) or 1.0
    rows = [
        (_label(lane, name), lane, t, _memory(schedule, lane, t)) for lane in lanes(schedule.problem) for name, t in runs
    ]
    left = max(len(label) for label, *_ in rows)
    right = max(len(memory) for *_, memory in rows)
    columns = max(10, max(width, 40) - left - right - 4)
    paint = Painter(schedule, columns, longest / columns, colour)
    body = [
        f"{label.ljust(left)} │{paint.row(lane, t, begin[id(t)])}│ {memory.rjust(right)}".rstrip()
        for label, lane, t, memory in rows
    ]
    title = f"{'':{left}}  {'0':<{columns - 12}}{format_time(longest):>12}{'peak':>{right + 2}}".rstrip()
    measured = (
        []
        if trace is None
        else [f"measured {schedule.problem.objective} {format_time(step_time(runs[1][1]))} (median step)"]
    )
    below = [headline(schedule), value_line(schedule), *measured, *certificate_lines(schedule)]
    return "\n".join([title, *body, paint.legend(), "", *below]) + "\n"


def _label(lane: Lane, run: str) -> str:
    stream = "" if lane.kind == "compute" else f" {printable(lane.kind)}"
    rank = f"{lane.rank:>3}" if lane.first and run != "run" else "   "
    return f"{rank}{stream}{' ' if run else ''}{run}"


def _memory(schedule: Schedule, lane: Lane, timeline: Timeline) -> str:
    """Peak memory beside the first row of a rank."""
    if not lane.first or not schedule.problem.edges.bytes.any():
        return ""
    peak, capacity = timeline.peak_bytes[lane.rank], schedule.problem.capacity
    return format_bytes(peak) if capacity is None else f"{format_bytes(peak)} / {format_bytes(capacity[lane.rank])}"


class Painter:
    """Draws one row at a time. Labels such as `F12` where nearly all of them fit their pass, else a letter a cell."""

    def __init__(self, schedule: Schedule, columns: int, cell: float, colour: bool) -> None:
        problem = schedule.problem
        self.columns, self.cell, self.colour = columns, cell, colour
        self.kinds = present_kinds(problem)
        self.chunk = chunks(problem)
        self.letters = [self._letter(kind) for kind in KINDS]
        self.labels = [
            self._cased(k, c) + str(m)
            for k, c, m in zip(
                problem.passes.kind.tolist(), self.chunk.tolist(), problem.passes.microbatch.tolist(), strict=True
            )
        ]
        room = problem.passes.duration / cell
        fitting = np.array([len(label) for label in self.labels]) <= room
        self.labelled = bool(fitting[room > 0].mean() >= 0.95) if (room > 0).any() else False

    def _letter(self, kind: str) -> str:
        """One letter a kind: a fused backward is B where nothing else is, all-to-alls are A and Z."""
        return {"BW": "D" if "B" in self.kinds else "B", "AF": "A", "AB": "Z"}.get(kind, kind)

    def _cased(self, kind: int, chunk: int) -> str:
        return self.letters[kind].lower() if chunk % 2 else self.letters[kind]

    def row(self, lane: Lane, timeline: Timeline, begin: float) -> str:
        """One stream's cells."""
        text, kinds = self._labels(lane, timeline, begin) if self.labelled else self._letters(lane, timeline, begin)
        if not self.colour:
            return "".join(text)
        cuts = [0, *(i for i in range(1, self.columns) if kinds[i] != kinds[i - 1]), self.columns]
        return "".join(_painted("".join(text[a:b]), kinds[a]) for a, b in zip(cuts, cuts[1:], strict=False))

    def _letters(self, lane: Lane, timeline: Timeline, begin: float) -> tuple[list[str], list[int]]:
        edges = begin + self.cell * np.arange(self.columns + 1)
        kinds = cells(timeline, lane.rows, edges).tolist()
        # In colour the letter stands once, where a run of its kind begins.
        again = [self.colour and i > 0 and kinds[i - 1] == kind for i, kind in enumerate(kinds)]
        return [self._cell(kind, skip) for kind, skip in zip(kinds, again, strict=True)], kinds

    def _cell(self, kind: int, skip: bool) -> str:
        if kind < 0:
            return " " if self.colour else IDLE
        return " " if skip else self.letters[kind]

    def _labels(self, lane: Lane, timeline: Timeline, begin: float) -> tuple[list[str], list[int]]:
        text, kinds = [" " if self.colour else IDLE] * self.columns, [-1] * self.columns
        rows: Ints = lane.rows[np.argsort(timeline.start[lane.rows], kind="stable")]
        first = np.rint((timeline.start[rows] - begin) / self.cell).astype(int).tolist()
        last = np.rint((timeline.end[rows] - begin) / self.cell).astype(int).tolist()
        for row, a, b in zip(rows.tolist(), first, last, strict=True):
            label, room = self.labels[row], min(b, self.columns) - a
            shown = label if len(label) <= room else label[:1]
            for i, letter in enumerate(shown.ljust(max(room, 0), " " if self.colour else "-")[: max(room, 0)]):
                text[a + i], kinds[a + i] = letter, int(timeline.problem.passes.kind[row])
        return text, kinds

    def legend(self) -> str:
        """What letters and colours mean."""
        parts = [
            (_painted(f" {self._letter(k)} ", KINDS.index(k)) if self.colour else self._letter(k)) + f" {MEANING[k]}"
            for k in self.kinds
        ]
        second = "; small letters: every second stage of a rank" if self.labelled and self.chunk.max() > 0 else ""
        cell = "" if self.labelled else f"; a cell is {self._width()} and shows what fills most of it"
        return "  ".join(parts) + ("" if self.colour else f"  {IDLE} idle") + second + cell

    def _width(self) -> str:
        return format_time(self.cell) if self.cell >= 10 else f"{self.cell:.2g} µs"


def _painted(text: str, kind: int) -> str:
    """Text on its kind's colour, from the 256 that terminals share; -1 stays as it is."""
    if kind < 0:
        return text
    red, green, blue = (int(COLOURS[KINDS[kind]][i : i + 2], 16) for i in (1, 3, 5))
    code = 16 + 36 * _nearest(red) + 6 * _nearest(green) + _nearest(blue)
    ink = 16 if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else 231
    return f"\x1b[48;5;{code}m\x1b[38;5;{ink}m{text}\x1b[0m"


def _nearest(level: int) -> int:
    return min(range(len(LEVELS)), key=lambda i: abs(LEVELS[i] - level))
