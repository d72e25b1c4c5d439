"""The Gantt chart of one timeline: a row for each stream with peak memory, the time axis, and memory over time below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...kinds import KINDS, TABLE
from ...problem import Ints
from ...schedule.timeline import Timeline
from ...util.text import format_bytes, format_time
from ..tracks import Track, cell_kinds, ink, shades, tracks_of
from .drawing import GRID, LIMIT, LINE, SOFT, TICK, TRACK, Area, Box, Line, Mark, Row, Style, Words, text_width

LEAST_TYPICAL_WIDTH = 1.5  # pixels; if the median pass is narrower, cells are drawn in place of passes
MESSAGE = "#5c5c5c"  # the part of a pass in which it sends its message
LEAST_LABEL, LEAST_SIDE_LABEL = 0.75, 0.55  # of the font size: the smallest label of compute and of other streams
LABEL_PITCH = 1.05  # distance of labels, in their font size; labels that would be closer are left out
LEAST_LETTERS = 5.5  # pixels, four points: smaller labels are left out

MOST_STRIPS = 8  # of more ranks only the first, the last, the fullest and some others have strips
NARROW_PICTURE, MOST_IN_NARROW = 500.0, 4  # pixels of width; strips
AREA, EDGE = "#9db7d6", "#41658f"
RESOLUTION = 0.4  # pixels: the largest value within this width is drawn


@dataclass(frozen=True)
class Axis:
    """A horizontal time axis, from `first` to `last` µs, between `left` and `right` pixels."""

    first: float
    last: float
    left: float
    right: float

    @property
    def scale(self) -> float:
        """Pixels of a µs."""
        return (self.right - self.left) / (self.last - self.first)

    def x(self, time: float) -> float:
        """The position of a time in µs, in pixels from the left, clipped to the axis."""
        return min(self.right, max(self.left, self.left + (time - self.first) * self.scale))

    def marks(self, top: float, y: float, size: float) -> Iterator[Mark]:
        """Ticks at round times below height `y`, as many as their texts leave room for, with grid lines up to `top`."""
        unit, us = ("µs", 1.0) if self.last < 1e4 else ("ms", 1e3) if self.last < 1e7 else ("s", 1e6)
        widest = text_width(f"{self.last / us:,.1f} {unit}", size * 0.92)
        wanted = max(widest + 1.5 * size, 6 * size) / self.scale
        base = 10 ** np.floor(np.log10(wanted))
        step = float(next(base * m for m in (1, 2, 5, 10) if base * m >= wanted))
        for i in range(int(np.ceil(self.first / step - 1e-9)), int(self.last / step + 1e-9) + 1):
            x, text = self.x(i * step), f"{i * step / us:,g} {unit}"
            yield Line(((x, top), (x, y)), GRID, 0.5)
            yield Line(((x, y), (x, y + 0.4 * size)), TICK, 0.8)
            yield Words(x, y + size, text, 0.92 * size, SOFT, "middle")


class Gantt:
    """All tracks of one timeline, a row each. Time 0 of the axis is the first start."""

    def __init__(self, timeline: Timeline, style: Style) -> None:
        problem = timeline.problem
        self.timeline, self.style, self.size = timeline, style, style.size
        self.tracks, self.chunks = tracks_of(problem), problem.chunks
        self.shades = {kind: shades(kind, int(self.chunks.max()) + 1) for kind in problem.passes.kinds}
        self.begin = float(timeline.start.min())
        self.holds = bool(problem.edges.bytes.any())
        # In a measured run it is not known which part of a pass was its message.
        self.sent = problem.sending if timeline.turn is not None else np.zeros_like(problem.sending)
        self.label_width = max(text_width(_label(track), self.size) for track in self.tracks)

    @property
    def units(self) -> float:
        """The height of all rows, in heights of a compute stream's row."""
        return sum(_share(track) for track in self.tracks)

    def peak_texts(self) -> list[str]:
        """The peak memory of each rank as text; [] if no edge holds memory, or the style has no notes."""
        return [f"peak {format_bytes(peak)}" for peak in self.timeline.peak_bytes] if self.holds and self.style.notes else []

    def marks(self, axis: Axis, y: float, row: float, peaks: bool) -> Iterator[Mark]:
        """All marks, from height `y` down. row: pixels of a compute stream's row. peaks: print peaks at the right."""
        end = axis.x(float(self.timeline.end.max()) - self.begin)
        texts, free = self.peak_texts() if peaks else [], -np.inf
        for track in self.tracks:
            tall = row * _share(track)
            middle, inner = y + tall / 2, tall - min(1.0, 0.15 * tall)
            least = LEAST_LABEL if track.kind == "compute" else LEAST_SIDE_LABEL
            letters = min(self.size, max(least * self.size, LEAST_LETTERS, tall / LABEL_PITCH))
            yield Box(axis.left, y, max(end - axis.left, 0.1), inner, TRACK)
            if middle - LABEL_PITCH * letters / 2 >= free - 1e-6:
                yield Words(axis.left - 0.6 * self.size, middle, _label(track), letters, anchor="end")
                free = middle + LABEL_PITCH * letters / 2
                if track.first and texts:
                    yield Words(axis.right + 0.6 * self.size, middle, texts[track.rank], 0.92 * letters, SOFT)
            yield from self._row(track, axis, y, inner)
            y += tall

    def _row(self, track: Track, axis: Axis, y: float, tall: float) -> Iterator[Mark]:
        """The passes of a track that are on the axis, or cells if passes are too narrow."""
        start, end = (times[track.rows] - self.begin for times in (self.timeline.start, self.timeline.end))
        rows = track.rows[(end >= axis.first) & (start <= axis.last)]
        if not len(rows):
            return
        lengths = (self.timeline.end[rows] - self.timeline.start[rows]) * axis.scale
        narrow = np.median(lengths) < LEAST_TYPICAL_WIDTH
        yield from self._cells(rows, axis, y, tall) if narrow else self._passes(rows, axis, y, tall)

    def _cells(self, rows: Ints, axis: Axis, y: float, tall: float) -> Iterator[Mark]:
        """Cells of half a pixel (two dots of a print), in the colour of the kind that fills most of each; a `Row` a kind."""
        cell = 0.5 if self.style.unit == "px" else 0.64
        count = int(np.ceil((axis.right - axis.left) / cell))
        edges = self.begin + axis.first + np.arange(count + 1) * cell / axis.scale
        kinds = cell_kinds(self.timeline, rows, edges)
        cuts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), count]
        spans: dict[int, list[tuple[float, float]]] = {}
        for a, b in zip(cuts, cuts[1:], strict=False):
            spans.setdefault(int(kinds[a]), []).append((axis.left + a * cell, (b - a) * cell))
        for kind in sorted(spans.keys() - {-1}):
            yield Row(y, tall, self.shades[KINDS[kind]][0], tuple(spans[kind]))

    def _passes(self, rows: Ints, axis: Axis, y: float, tall: float) -> Iterator[Mark]:
        """A box for each pass, with its microbatch if that fits; the message that blocks its sender is at its end."""
        p, timeline, names = self.timeline.problem.passes, self.timeline, self.timeline.problem.names
        digits = len(str(int(p.microbatch.max())))
        sent = self.sent.tolist()
        largest, labels = min(0.92 * self.size, tall * 0.62), list[Mark]()
        for row in rows.tolist():
            start, end = float(timeline.start[row]) - self.begin, float(timeline.end[row]) - self.begin
            x, stop = axis.x(start), axis.x(end)
            wide = stop - x
            colour = self.shades[KINDS[p.kind[row]]][self.chunks[row]]
            title = f"{names[row]}: {format_time(start)} to {format_time(end)}" if self.style.hover else ""
            yield Box(x, y, max(wide - (0.6 if wide > 3 else 0), 0.3), tall, colour, said=title)
            message = min(wide, sent[row] * axis.scale)
            if message:
                yield Box(stop - message, y + tall / 3, max(message - (0.6 if wide > 3 else 0), 0.3), tall / 3, MESSAGE)
                wide -= message
            letters = min(largest, (wide - 1.5) / (0.64 * digits))
            if letters >= max(LEAST_LETTERS, 0.6 * largest):
                middle = x + wide / 2 - 0.3
                labels.append(Words(middle, y + tall / 2, str(p.microbatch[row]), letters, ink(colour), "middle"))
        yield from labels


def legend_entries(gantts: Sequence[Gantt]) -> list[tuple[tuple[str, ...], str]]:
    """The legend of these timelines: (colours, text) of each entry."""
    colours: dict[str, tuple[str, ...]] = {}
    for gantt in gantts:
        for kind, own in gantt.shades.items():
            colours[kind] = max(colours.get(kind, ()), own, key=len)
    entries = [((colours[kind][0],), f"{kind} {TABLE[kind].words}") for kind in KINDS if kind in colours]
    stages = max(colours.values(), key=len)
    if any(gantt.sent.any() for gantt in gantts):
        entries.append(((MESSAGE,), "message that blocks its sender"))
    return entries + ([(stages, "a rank's stages, first to last")] if len(stages) > 1 else [])


def rows_height(style: Style, rows: float) -> float:
    """Pixels of a compute stream's row. `rows` rows share about 640 pixels at font size 12, and no more than the width."""
    scale = style.size / 12
    return min(26.0, max(4.0, min(640.0, style.width / scale) / rows)) * scale


def _share(track: Track) -> float:
    """The height of a track, relative to a compute stream's."""
    return 1.0 if track.kind == "compute" else 0.6


def _label(track: Track) -> str:
    return f"rank {track.rank}" if track.kind == "compute" else track.kind


class MemoryStrips:
    """Memory over time, a strip for each rank (for some of them if there are many), all with the same scale."""

    def __init__(self, timeline: Timeline, style: Style) -> None:
        self.timeline, self.size = timeline, style.size
        strips = MOST_STRIPS if style.width >= NARROW_PICTURE else MOST_IN_NARROW
        self.begin = float(timeline.start.min())
        self.capacity = timeline.problem.capacity
        peaks, count = timeline.peak_bytes, len(timeline.peak_bytes)
        some = np.linspace(0, count - 1, min(count, strips)).round().astype(int).tolist()
        self.ranks = sorted({*some[:-1], int(np.argmax(peaks)), count - 1}) if count > strips else list(range(count))
        most, limit = max(peaks), max(self.capacity or (0,))
        self.top = 1.08 * (most if limit > 3 * most else max(most, limit)) or 1.0  # a far larger capacity is not drawn
        self._strip = 2.6 * self.size
        self.height = LINE * self.size + len(self.ranks) * self._strip  # of all strips with their heading

    def marks(self, axis: Axis, y: float, peaks: bool) -> Iterator[Mark]:
        """All marks, from height `y` down. peaks: print peaks at the right, otherwise within the strips."""
        limits = sorted(set(self.capacity or ()))
        room = format_bytes(limits[0]) if len(limits) == 1 else f"{format_bytes(limits[0])} or more" if limits else ""
        drawn = f", dashed: capacity {room}" if limits and limits[-1] <= self.top else f", capacity {room}" if limits else ""
        yield Words(axis.left, y + LINE * self.size / 2, f"memory held{drawn}", self.size, bold=True)
        y += LINE * self.size
        for rank in self.ranks:
            floor = y + 0.9 * self._strip
            yield from self._curve(rank, axis, y, floor)
            if self.capacity is not None and self.capacity[rank] <= self.top:
                height = floor - self.capacity[rank] / self.top * (floor - y)
                yield Line(((axis.left, height), (axis.right, height)), LIMIT, 0.09 * self.size, dashes=(4, 3))
            middle = (y + floor) / 2
            yield Words(axis.left - 0.6 * self.size, middle, f"rank {rank}", self.size, anchor="end")
            text = f"peak {format_bytes(self.timeline.peak_bytes[rank])}"
            if peaks:
                yield Words(axis.right + 0.6 * self.size, middle, text, 0.92 * self.size, SOFT)
            else:
                yield Words(axis.right - 0.3 * self.size, middle, text, 0.92 * self.size, anchor="end", halo=True)
            y += self._strip

    def _curve(self, rank: int, axis: Axis, y: float, floor: float) -> Iterator[Mark]:
        """The curve of one rank's memory and the area below it, in steps of RESOLUTION."""
        yield Box(axis.left, y, axis.right - axis.left, floor - y, TRACK)
        times, held = self.timeline.memory(rank)
        count = int(np.ceil((axis.right - axis.left) / RESOLUTION))
        edges = self.begin + axis.first + np.arange(count + 1) * RESOLUTION / axis.scale
        first = np.searchsorted(times, edges[:-1], side="right") - 1  # the value at the begin of each step
        last = np.maximum(np.searchsorted(times, edges[1:], side="left"), first + 1)
        most = np.maximum.reduceat(np.append(held, 0), np.stack([np.maximum(first, 0), last], axis=1).ravel())[::2]
        heights = floor - most / self.top * (floor - y)
        cuts = [0, *(np.flatnonzero(np.diff(heights)) + 1).tolist(), count]
        corners = []
        for a, b in zip(cuts, cuts[1:], strict=False):
            corners += [(min(axis.right, axis.left + i * RESOLUTION), float(heights[a])) for i in (a, b)]
        yield Area(((axis.left, floor), *corners, (axis.right, floor)), AREA)
        yield Line(tuple(corners), EDGE, 0.07 * self.size)
