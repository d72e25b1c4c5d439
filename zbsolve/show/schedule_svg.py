"""A schedule as a Gantt chart that stands still, for documents: a row a stream, time to the right, peak memory beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..problem import KINDS
from ..schedule import Schedule
from ..timeline import Timeline
from ..trace import Trace
from ..util.text import format_bytes, format_time
from .comparison import check_trace, step_time
from .drawing import Box, Drawing, Line, Mark, Row, Words
from .kinds import LOOKS, ink, shades
from .sentences import certificate_lines, headline, value_line
from .svg import to_svg
from .tracks import Track, cell_kinds, chunk_numbers, tracks_of

LEFT, RIGHT, TOP = 78.0, 112.0, 58.0  # pixels around the chart
LEAST_TYPICAL_WIDTH = 1.5  # pixels; where the median pass is narrower, cells take the place of passes


def schedule_as_svg(
    schedule: Schedule, trace: Trace | None = None, *, width: int = 1200, longest: float | None = None, notes: bool = True
) -> str:
    """The chart as an SVG document. See `schedule_drawing`, which takes the same arguments and raises the same."""
    return to_svg(schedule_drawing(schedule, trace, width=width, longest=longest, notes=notes))


def schedule_drawing(
    schedule: Schedule, trace: Trace | None = None, *, width: int = 1200, longest: float | None = None, notes: bool = True
) -> Drawing:
    """The chart, `width` pixels wide; with a `trace` its median step under the prediction, on one axis.

    longest: µs that the width stands for (default: this schedule's own). notes: the lines about value and certificate.

    Raises BadInput for a trace of another schedule, Deadlock for a schedule that has no times.
    """
    runs = [("predicted", schedule.timeline())]
    if trace is not None:
        check_trace(schedule, trace)
        runs.append(("measured", trace.steps[trace.median_step]))
    longest = longest or max(float(t.end.max() - t.start.min()) for _, t in runs) or 1.0
    scale = (width - LEFT - RIGHT) / longest
    height = _row_height(len(tracks_of(schedule.problem)) * len(runs))
    marks: list[Mark] = [Words(LEFT, 22, headline(schedule), 15, bold=True), *_legend(schedule)]
    y = TOP
    for name, timeline in runs:
        if len(runs) > 1:
            marks.append(Words(LEFT, y + 12, f"{name}: {format_time(step_time(timeline))}", 12, bold=True))
            y += 20
        panel = _Panel(schedule, timeline, scale)
        marks += panel.marks(y, height)
        y += panel.height(height) + 6
    marks += _axis(longest, scale, y)
    said = [value_line(schedule), *certificate_lines(schedule)]
    below = said if notes else []
    marks += [Words(LEFT, y + 44 + 18 * i, line, 12, "#444") for i, line in enumerate(below)]
    return Drawing(width, round(y + 44 + 18 * len(below)), headline(schedule), " ".join(said), tuple(marks))


def _row_height(rows: int) -> float:
    """Rows share about 640 pixels, between 6 and 26 each."""
    return float(min(26, max(6, 640 // rows)))


class _Panel:
    """All tracks of one timeline, a row each."""

    def __init__(self, schedule: Schedule, timeline: Timeline, scale: float) -> None:
        self.timeline, self.scale = timeline, scale
        self.tracks = tracks_of(schedule.problem)
        self.chunks: Sequence[int] = chunk_numbers(schedule.problem).tolist()
        self.shades = {kind: shades(kind, max(self.chunks) + 1) for kind in schedule.problem.passes.kinds}
        self.begin = float(timeline.start.min())
        self.holds = bool(schedule.problem.edges.bytes.any())
        self.width = (float(timeline.end.max()) - self.begin) * scale

    def height(self, row: float) -> float:
        """Pixels of all rows together, where a compute stream's row has `row`."""
        return sum(_tall(track, row) for track in self.tracks)

    def marks(self, y: float, row: float) -> Iterator[Mark]:
        """Everything, from `y` down."""
        for track in self.tracks:
            tall = _tall(track, row)
            middle = y + tall / 2
            yield Box(LEFT, y, self.width, tall - 1, "#f1f2f4")
            if row >= 9 or track.rank % 4 == 0:
                label = f"rank {track.rank}" if track.kind == "compute" else track.kind
                yield Words(LEFT - 8, middle, label, min(12, max(8, tall)), anchor="end")
            if track.first and self.holds and row >= 9:
                peak = format_bytes(self.timeline.peak_bytes[track.rank])
                yield Words(LEFT + self.width + 8, middle, f"peak {peak}", 11, "#444")
            lengths = (self.timeline.end[track.rows] - self.timeline.start[track.rows]) * self.scale
            narrow = np.median(lengths) < LEAST_TYPICAL_WIDTH
            yield from self._cells(track, y, tall) if narrow else self._passes(track, lengths.tolist(), y, tall)
            y += tall

    def _cells(self, track: Track, y: float, tall: float) -> Iterator[Mark]:
        """Cells of half a pixel, each in the colour of the kind that fills most of it; one row of marks a kind."""
        count = int(np.ceil(self.width * 2))
        kinds = cell_kinds(self.timeline, track.rows, self.begin + np.arange(count + 1) / (2 * self.scale))
        cuts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), count]
        spans: dict[int, list[tuple[float, float]]] = {}
        for a, b in zip(cuts, cuts[1:], strict=False):
            spans.setdefault(int(kinds[a]), []).append((LEFT + a / 2, (b - a) / 2))
        for kind in sorted(spans.keys() - {-1}):
            yield Row(y, tall - 1, LOOKS[KINDS[kind]].colour, tuple(spans[kind]))

    def _passes(self, track: Track, lengths: Sequence[float], y: float, tall: float) -> Iterator[Mark]:
        """A box a pass, with its microbatch where there is room."""
        p = self.timeline.problem.passes
        digits = len(str(int(p.microbatch.max())))
        size = min(11.0, tall * 0.6)
        for row, wide in zip(track.rows.tolist(), lengths, strict=True):
            colour = self.shades[KINDS[p.kind[row]]][self.chunks[row]]
            x = LEFT + (float(self.timeline.start[row]) - self.begin) * self.scale
            yield Box(x, y, max(wide - (0.6 if wide > 3 else 0), 0.3), tall - 1, colour)
            if size >= 7 and wide > 0.62 * size * digits + 2:
                label = str(p.microbatch[row])
                yield Words(x + wide / 2 - 0.3, y + tall / 2 - 0.5, label, size, ink(colour), "middle")


def _tall(track: Track, row: float) -> float:
    """Pixels of a track's row: other streams than compute are lower."""
    return row if track.kind == "compute" else max(4.0, row * 0.6)


def _axis(longest: float, scale: float, y: float) -> Iterator[Mark]:
    """Ticks at round times, about one every 110 pixels."""
    unit, size = ("µs", 1.0) if longest < 1e4 else ("ms", 1e3) if longest < 1e7 else ("s", 1e6)
    wanted = 110 / scale
    base = 10 ** np.floor(np.log10(wanted))
    step = float(next(base * m for m in (1, 2, 5, 10) if base * m >= wanted))
    for i in range(int(longest / step) + 1):
        x = LEFT + i * step * scale
        yield Line(((x, y - 4), (x, y + 2)), "#888")
        yield Words(x, y + 12, f"{i * step / size:g} {unit}", 11, "#444", "middle")


def _legend(schedule: Schedule) -> Iterator[Mark]:
    x = LEFT
    for kind in schedule.problem.passes.kinds:
        label = f"{kind} {LOOKS[kind].meaning}"
        yield Box(x, 34, 12, 12, LOOKS[kind].colour, radius=2)
        yield Words(x + 17, 41, label, 12)
        x += 34 + 6.6 * len(label)
