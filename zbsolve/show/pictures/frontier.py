"""Pictures of frontiers: the step time and its lower bound over the memory of a rank; one frontier, or several curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

from ...features.keeping import BOTH as FIELDS
from ...search.keeping import BOTH, KEPT, Curves
from ...search.memory_limits import Named, Point
from ...search.pareto import Frontier
from ...util.text import format_bytes, format_gap, format_time, printable
from .drawing import (
    GRID,
    LINE,
    PAPER,
    SOFT,
    TICK,
    USUAL,
    Area,
    Dot,
    Drawing,
    Line,
    Mark,
    Style,
    Words,
    paragraph,
    text_width,
    wrapped,
)

VALUE_COLOUR, BOUND_COLOUR, NAMED_COLOUR, BETWEEN_COLOUR = "#1a5a9c", "#2fa583", "#d2623a", "#eef0f4"


@dataclass(frozen=True)
class Look:
    """The style of a curve. mark: corners of its marker, relative to its centre, for readers who do not see colours."""

    colour: str
    thickness: float
    dashes: tuple[float, ...]
    mark: tuple[tuple[float, float], ...]


# In drawing order: where curves overlap, thin and dashed ones are drawn over wide ones.
LOOKS = {
    BOTH: Look(VALUE_COLOUR, 5.0, (), ((0, -8), (8, 0), (0, 8), (-8, 0))),
    KEPT: Look(SOFT, 2.0, (), ((-4.5, -4.5), (4.5, -4.5), (4.5, 4.5), (-4.5, 4.5))),
    FIELDS[0]: Look(NAMED_COLOUR, 2.4, (9.0, 6.0), ((0, -6), (5.5, 4), (-5.5, 4))),
    FIELDS[1]: Look(BOUND_COLOUR, 2.4, (3.0, 4.0), ((0, 6), (5.5, -4), (-5.5, -4))),
}


def curves_drawing(curves: Curves, headline: str, sentence: str, style: Style = USUAL) -> Drawing:
    """The picture of several frontiers, a curve each, with the headline above and the sentence below."""
    every = sorted((point for way in curves.frontiers.values() for point in way.points), key=lambda point: point.memory)
    entries: list[Entry] = [(name, partial(_sample, LOOKS[name])) for name in curves.frontiers]
    entries.append(("filled: proven optimal", lambda x, y: [*_mark(x + 7, y, LOOKS[KEPT], True)]))
    entries.append(("proven: no choice is shorter", lambda x, y: [Line(((x, y), (x + 14, y)), TICK, 1.6, (1.5, 2.5))]))

    def inside(chart: Chart) -> Iterator[Mark]:
        floor = chart.y(curves.bound)
        yield Line(((chart.x(chart.low), floor), (chart.x(chart.high), floor)), TICK, 1.6, (1.5, 2.5))
        for name, look in LOOKS.items():
            if name in curves.frontiers and curves.frontiers[name].points:
                yield from _curve(chart, name, curves.frontiers[name].points, look)
        yield from chart.device()

    return chart_drawing(replace(curves.first, points=tuple(every), named=()), entries, inside, (headline, sentence), style)


def _sample(look: Look, x: float, y: float) -> list[Mark]:
    """A piece of a curve for the legend."""
    return [Line(((x, y), (x + 14, y)), look.colour, look.thickness, look.dashes), *_mark(x + 7, y, look, True)]


def _curve(chart: Chart, name: str, points: tuple[Point, ...], look: Look) -> Iterator[Mark]:
    """A falling step curve, with a marker at the least memory of each shorter schedule; filled markers are optimal."""
    corners: Corners = chart.steps(points)
    yield Line(tuple(corners), look.colour, look.thickness, look.dashes)
    firsts = [(points[0].memory, points[0])]
    firsts += [(max(point.peak, before.memory), point) for before, point in pairwise(points) if point.value < before.value]
    for memory, point in firsts:
        title = f"{name}, {format_bytes(memory)}: {format_time(point.value)}{f', {point.choice}' if point.choice else ''}"
        yield from _mark(chart.x(memory), chart.y(point.value), look, point.bound >= point.value, title)


def _mark(x: float, y: float, look: Look, filled: bool, title: str = "") -> Iterator[Mark]:
    """The marker of a curve at (x, y), filled or hollow."""
    yield Area(tuple((x + a, y + b) for a, b in look.mark), look.colour, title)
    if not filled:
        yield Area(tuple((x + a / 2, y + b / 2) for a, b in look.mark), PAPER)


LEFT, RIGHT, LETTERS = 66.0, 78.0, 12.0  # pixels

# The least vertical distance of a text's middle from another text, from a diamond and from a line, pixels.
TEXT_GAP, DIAMOND_GAP, LINE_GAP = 13.0, 12.0, 7.0

Corners = list[tuple[float, float]]
Entry = tuple[str, Callable[[float, float], list[Mark]]]  # of a legend: its text, and a function (x, y) → its sample
Boxes = list[tuple[float, float, float, float]]  # left, right, middle height, least distance of a text's middle from it


def bubble_rate(frontier: Frontier, value: float) -> float:
    """1 − work / value: the share of a step of `value` µs in which the busiest rank is idle."""
    return 1 - frontier.work / value if value else 0.0


def excess(frontier: Frontier, named: Named) -> str:
    """How much longer a named schedule is than the best point with at most its memory; "" if there is none."""
    best = min((point.value for point in frontier.points if point.memory <= named.memory), default=0)
    return f"{named.value / best - 1:+.1%}" if best else ""


def frontier_drawing(frontier: Frontier, headline: str, sentence: str, style: Style = USUAL) -> Drawing:
    """The picture of one frontier, with the headline above and the sentence below."""
    entries: list[Entry] = [
        ("optimal", lambda x, y: [Dot(x + 6, y, 4, VALUE_COLOUR, VALUE_COLOUR, 1.6)]),
        ("best found", lambda x, y: [Dot(x + 6, y, 4, PAPER, VALUE_COLOUR, 1.6)]),
        ("proven bound: nothing is shorter", lambda x, y: [Line(((x, y), (x + 14, y)), BOUND_COLOUR, 2)]),
    ]
    if frontier.named:
        entries.append(("named schedules, against the best in their memory", lambda x, y: [_diamond(x + 6, y)]))

    def inside(chart: Chart) -> Iterator[Mark]:
        yield from (*chart.curves(), *chart.device(), *chart.named())

    return chart_drawing(frontier, entries, inside, (headline, sentence), style)


def chart_drawing(
    frontier: Frontier,
    entries: Sequence[Entry],
    inside: Callable[[Chart], Iterable[Mark]],
    texts: tuple[str, str],
    style: Style,
) -> Drawing:
    """A chart over memory. frontier: for scales. entries: of the legend. inside: makes marks. texts: headline, sentence."""
    headline, sentence = texts
    scale = style.size / LETTERS  # the layout is for a font size of 12 pixels, and scaled at the end
    width = style.width / scale
    title = headline if style.title is None else printable(style.title)
    heading = wrapped(title, 15, width - LEFT - 12, bold=True)
    keys, top = _legend(entries, 10 + 15 * LINE * len(heading), width)
    below = wrapped(sentence, 12, width - LEFT - 12) if style.notes else []
    foot = 50 + 12 * LINE * len(below) + 10
    height = top + 40 + min(374.0, 0.62 * width) + foot
    chart = Chart(frontier, width, top + 34, height - foot)
    words = (
        *paragraph(heading, LEFT, 10, Words(0, 0, "", 15, bold=True)),
        *paragraph(below, LEFT, height - foot + 50, Words(0, 0, "", 12, SOFT)),
    )
    marks = tuple(_scaled(mark, scale) for mark in (*words, *keys, *chart.grid(), *inside(chart)))
    return Drawing(width * scale, height * scale, title or headline, sentence, marks, style.unit)


class Chart:
    """The coordinates of a frontier's picture: memory to the right, bubble rate 1 − work/value upwards. On this scale both
    serial schedules (many times the work) and nearly perfect ones are visible. Times are printed at the right."""

    def __init__(self, frontier: Frontier, width: float, top: float, floor: float) -> None:
        self.frontier, self.right, self.top, self.floor = frontier, width - RIGHT, top, floor
        points, named = frontier.points, frontier.named
        memory = [float(size) for p in points for size in (p.memory, p.peak)] + [float(limit.memory) for limit in named]
        # A named schedule that needs far more memory (GPipe) is drawn at the right edge, and its memory is printed.
        ceiling = max(1.25 * points[-1].memory, 1.0)
        self.low, self.high = min(memory), max(size for size in memory if size <= ceiling)
        pad = 0.04 * (self.high - self.low or self.high or 1.0)
        self.low, self.high = max(0.0, self.low - pad), self.high + 2 * pad
        rates = [bubble_rate(frontier, v) for v in (*(p.value for p in points), *(limit.value for limit in named))]
        self.highest_rate = min(1.0, 1.08 * max(*rates, 0.05))

    def x(self, memory: float) -> float:
        """Pixels from the left of a memory size, at most those of the right edge."""
        return LEFT + (self.right - LEFT) * min(1.0, max(0.0, (memory - self.low) / (self.high - self.low)))

    def y(self, value: float) -> float:
        """Pixels from the top of a value in µs."""
        return self.height_of(max(0.0, bubble_rate(self.frontier, value)))

    def height_of(self, rate: float) -> float:
        """Pixels from the top of a bubble rate."""
        return self.floor - (self.floor - self.top) * rate / self.highest_rate

    def grid(self) -> Iterator[Mark]:
        """Grid lines at round bubble rates, with the step time at the right; ticks at round memory sizes."""
        step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2) if self.highest_rate / s <= 8)
        for i in range(int(self.highest_rate / step) + 1):
            rate = i * step
            y = self.height_of(rate)
            yield Line(((LEFT, y), (self.right, y)), GRID)
            yield Words(LEFT - 8, y, f"{rate:.0%}", 11, SOFT, "end")
            if rate < 1:
                yield Words(self.right + 8, y, _three_digits(self.frontier.work / (1 - rate)), 11, SOFT)
        yield Words(LEFT - 8, self.top - 16, "bubble", 11, SOFT, "end")
        yield Words(self.right + 8, self.top - 16, self.frontier.objective, 11, SOFT)
        free = LEFT - 20.0
        for size in _round_sizes(self.low, self.high):
            x = self.x(size)
            half = text_width(format_bytes(size), 11) / 2
            if x - half < free:
                continue
            free = x + half + 8
            yield Line(((x, self.floor), (x, self.floor + 5)), TICK)
            yield Words(x, self.floor + 15, format_bytes(size), 11, SOFT, "middle")
        what = "memory a rank, parameters and optimizer state included"
        if text_width(what, 12) > self.right + RIGHT - 12:
            what = "memory a rank"
        yield Words((LEFT + self.right) / 2, self.floor + 36, what, 12, SOFT, "middle")

    def curves(self) -> Iterator[Mark]:
        """Value and bound as step curves, the area between them, and a dot for every point."""
        upper, lower = (self.steps(self.frontier.points, what) for what in ("value", "bound"))
        yield Area((*upper, *reversed(lower)), BETWEEN_COLOUR)
        yield Line(tuple(lower), BOUND_COLOUR, 1.6)
        yield Line(tuple(upper), VALUE_COLOUR, 2.2)
        for point in self.frontier.points:
            fill = VALUE_COLOUR if point.bound >= point.value else PAPER
            title = f"{format_bytes(point.memory)}: {format_time(point.value)}, bound {format_time(point.bound)}, "
            title += f"{format_gap(point.gap)}, by {point.solver}"
            yield Dot(self.x(point.memory), self.y(point.value), 4, fill, VALUE_COLOUR, 1.6, title)

    def steps(self, points: Sequence[Point], what: str = "value") -> Corners:
        """The corners of a step curve through points. A value holds from the schedule's peak memory on, a "bound" up to the
        memory limit that it was proven for."""
        heights = [self.y(getattr(point, what)) for point in points]
        corners = [(self.x(points[0].memory), heights[0])]
        for i, (before, point) in enumerate(pairwise(points)):
            at = self.x(max(point.peak, before.memory) if what == "value" else before.memory)
            corners += [(at, heights[i]), (at, heights[i + 1])]
        return [*corners, (self.x(self.high), heights[-1])]

    def device(self) -> Iterator[Mark]:
        """A vertical line at the profiled device's memory, if it is on the scale."""
        size = self.frontier.device
        if size is not None and self.low <= size <= self.high:
            x = self.x(size)
            yield Line(((x, self.top), (x, self.floor)), TICK, dashes=(4, 4))
            side, anchor = (-6, "end") if x > (LEFT + self.right) / 2 else (6, "start")
            yield Words(x + side, self.top + 6, f"device: {format_bytes(size)}", 11, SOFT, anchor)

    def named(self) -> Iterator[Mark]:
        """A diamond for each named schedule, with a text: how much longer it is than the best one with its memory. Texts
        do not cover each other, diamonds or curves. A line leads to a diamond that is not next to its text. Of diamonds
        above each other, the upper one has the upper text."""
        diamonds = [(self.x(limit.memory), self.y(limit.value)) for limit in self.frontier.named]
        taken = [(x - 6, x + 6, y, DIAMOND_GAP) for x, y in diamonds]
        lines = [
            (x, right, (y + lower) / 2, abs(lower - y) / 2 + LINE_GAP)
            for what in ("value", "bound")
            for (x, y), (right, lower) in pairwise(self.steps(self.frontier.points, what))
        ]
        for limit in sorted(self.frontier.named, key=lambda named: (named.memory, -named.value)):
            x, y = self.x(limit.memory), self.y(limit.value)
            over = excess(self.frontier, limit)
            more = f", needs {format_bytes(limit.memory)}" if limit.memory > self.high else ""
            text = f"{limit.name}{f' {over}' if over else ''}{more}"
            hint = f"{limit.name}: {format_time(limit.value)} with {format_bytes(limit.memory)}{f', {over}' if over else ''}"
            wide = text_width(text, 12)
            place = self._place(x, y, wide, taken, lines)
            if abs(place[1] - y) > 20:
                nearest = min(max(x, place[0]), place[0] + wide)
                yield Line(((x, y), (nearest, place[1])), TICK, 0.6)
            yield _diamond(x, y, hint)
            yield Words(*place, text, 12, NAMED_COLOUR, halo=True)

    def _place(self, x: float, y: float, wide: float, taken: Boxes, lines: Boxes) -> tuple[float, float]:
        """The position of a text of `wide` pixels near (x, y): the nearest one inside the chart that covers nothing in
        `taken`, and, if possible nearby, nothing in `lines`; the default position if all are taken."""
        sides = [left for left in (x + 10, x - 10 - wide) if left >= LEFT and left + wide <= self.right]
        sides = sides or [max(4.0, self.right - wide)]
        near = range(2 if self.right > 700 else 1)  # in a narrow chart texts would not keep the order of their diamonds
        for step, others in (*((step, [*taken, *lines]) for step in near), *((step, taken) for step in range(24))):
            for left, at in product(sides, (y - 12 - 15 * step, y + 12 + 15 * step)):
                clear = all(b < left or a > left + wide or abs(at - middle) >= gap for a, b, middle, gap in others)
                if clear and self.top - 4 <= at <= self.floor - 8:
                    taken.append((left, left + wide, at, TEXT_GAP))
                    return left, at
        return sides[0], y - 12


def _scaled(mark: Mark, scale: float) -> Mark:
    """A mark with all its lengths times `scale`."""
    lengths = ("x", "y", "width", "height", "radius", "size", "thickness")
    changed: dict[str, Any] = {name: getattr(mark, name) * scale for name in lengths if hasattr(mark, name)}
    if isinstance(mark, Area | Line):
        changed["points"] = tuple((x * scale, y * scale) for x, y in mark.points)
    if isinstance(mark, Line):
        changed["dashes"] = tuple(length * scale for length in mark.dashes)
    return replace(mark, **changed)


def _legend(entries: Sequence[Entry], y: float, width: float) -> tuple[list[Mark], float]:
    """The legend, from height `y` down in as many rows as needed, and the height at which it ends."""
    marks, x, row = list[Mark](), LEFT, y + 9
    for text, sample in entries:
        wide = 19 + text_width(text, 12)
        if x > LEFT and x + wide > width - 8:
            x, row = LEFT, row + 12 * LINE
        marks += sample(x, row)
        marks.append(Words(x + 19, row, text, 12))
        x += wide + 20
    return marks, row + 9


def _diamond(x: float, y: float, title: str = "") -> Area:
    return Area(((x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)), NAMED_COLOUR, title)


def _three_digits(us: float) -> str:
    """A time with at most three significant digits."""
    number, unit = format_time(us).split(" ")
    rounded = float(f"{float(number.replace(',', '')):.3g}")
    return f"{rounded:,g} {unit}"


def _round_sizes(low: float, high: float) -> list[float]:
    """About eight sizes between `low` and `high` that are round in the unit in which `high` is printed; bytes."""
    unit = 1024 ** max(0, next((i for i in range(5) if high < 1024 ** (i + 1)), 4))
    wanted = (high - low) / unit / 8
    base = 10.0 ** (len(f"{int(wanted)}") - 1) if wanted >= 1 else 1.0
    while base > wanted:
        base /= 10
    step = next(base * m for m in (1, 2, 5, 10) if base * m >= wanted) * unit
    first = int(low / step) + 1
    return [i * step for i in range(first, int(high / step) + 1)]
