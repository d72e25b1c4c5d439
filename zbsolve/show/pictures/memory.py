"""What ranks hold over time, as strips under the rows of a timeline, with the line of their capacity."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...timeline import Timeline
from ...util.text import format_bytes
from .drawing import LIMIT, SOFT, TRACK, Area, Box, Line, Mark, Words
from .gantt import Axis
from .style import Style
from .words import LINE

MOST_STRIPS = 8  # more ranks are thinned out: first, last, fullest, and some between
NARROW_PICTURE, MOST_IN_NARROW = 500.0, 4  # pixels of width; strips
AREA, EDGE = "#9db7d6", "#41658f"
RESOLUTION = 0.4  # pixels: of what changes within, the most is drawn


class MemoryStrips:
    """A strip a rank, some of the ranks where they are many; one scale for all."""

    def __init__(self, timeline: Timeline, style: Style) -> None:
        self.timeline, self.size = timeline, style.size
        strips = MOST_STRIPS if style.width >= NARROW_PICTURE else MOST_IN_NARROW
        self.begin = float(timeline.start.min())
        self.capacity = timeline.problem.capacity
        peaks = timeline.peak_bytes
        count = len(peaks)
        some = np.linspace(0, count - 1, min(count, strips)).round().astype(int).tolist()
        self.ranks = sorted({*some[:-1], int(np.argmax(peaks)), count - 1}) if count > strips else list(range(count))
        most, limit = max(peaks), max(self.capacity or (0,))
        self.top = 1.08 * (most if limit > 3 * most else max(most, limit)) or 1.0  # a capacity far above is said, not drawn

    @property
    def height(self) -> float:
        """Pixels of all strips with their heading."""
        return LINE * self.size + len(self.ranks) * self._strip

    @property
    def _strip(self) -> float:
        return 2.6 * self.size

    def marks(self, axis: Axis, y: float, peaks: bool) -> Iterator[Mark]:
        """Everything, from `y` down; peaks stand at the right where `peaks`, else within the strips."""
        yield Words(axis.left, y + LINE * self.size / 2, self._heading(), self.size, bold=True)
        y += LINE * self.size
        for rank in self.ranks:
            floor = y + 0.9 * self._strip
            yield from self._curve(rank, axis, y, floor)
            yield from self._limit(rank, axis, y, floor)
            middle = (y + floor) / 2
            yield Words(axis.left - 0.6 * self.size, middle, f"rank {rank}", self.size, anchor="end")
            text = f"peak {format_bytes(self.timeline.peak_bytes[rank])}"
            if peaks:
                yield Words(axis.right + 0.6 * self.size, middle, text, 0.92 * self.size, SOFT)
            else:
                yield Words(axis.right - 0.3 * self.size, middle, text, 0.92 * self.size, anchor="end", halo=True)
            y += self._strip

    def _heading(self) -> str:
        limits = sorted(set(self.capacity or ()))
        said = format_bytes(limits[0]) if len(limits) == 1 else f"{format_bytes(limits[0])} or more" if limits else ""
        drawn = f", dashed: capacity {said}" if limits and limits[-1] <= self.top else f", capacity {said}" if limits else ""
        return f"memory held{drawn}"

    def _curve(self, rank: int, axis: Axis, y: float, floor: float) -> Iterator[Mark]:
        """The area under the curve, in steps; within a step of RESOLUTION the most counts."""
        yield Box(axis.left, y, axis.right - axis.left, floor - y, TRACK)
        times, held = self.timeline.memory(rank)
        count = int(np.ceil((axis.right - axis.left) / RESOLUTION))
        edges = self.begin + axis.first + np.arange(count + 1) * RESOLUTION / axis.scale
        first = np.searchsorted(times, edges[:-1], side="right") - 1  # what holds as a step begins
        last = np.maximum(np.searchsorted(times, edges[1:], side="left"), first + 1)
        most = np.maximum.reduceat(np.append(held, 0), np.stack([np.maximum(first, 0), last], axis=1).ravel())[::2]
        heights = floor - most / self.top * (floor - y)
        cuts = [0, *(np.flatnonzero(np.diff(heights)) + 1).tolist(), count]
        corners = []
        for a, b in zip(cuts, cuts[1:], strict=False):
            corners += [(min(axis.right, axis.left + i * RESOLUTION), float(heights[a])) for i in (a, b)]
        yield Area(((axis.left, floor), *corners, (axis.right, floor)), AREA)
        yield Line(tuple(corners), EDGE, 0.07 * self.size)

    def _limit(self, rank: int, axis: Axis, y: float, floor: float) -> Iterator[Mark]:
        if self.capacity is not None and self.capacity[rank] <= self.top:
            height = floor - self.capacity[rank] / self.top * (floor - y)
            yield Line(((axis.left, height), (axis.right, height)), LIMIT, 0.09 * self.size, dashes=(4, 3))
