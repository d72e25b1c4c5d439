"""The frontier as a picture: what a step takes, and could take at least, over the memory of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ...search.memory_limits import Named
from ...search.pareto import Frontier
from ...util.text import format_bytes, format_time
from .drawing import Area, Dot, Drawing, Line, Mark, Words

LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 78.0, 112.0, 76.0, 110.0, 560.0  # pixels
VALUE_COLOUR, BOUND_COLOUR, NAMED_COLOUR, BETWEEN_COLOUR = "#1a5a9c", "#2fa583", "#d2623a", "#eef0f4"

Corners = list[tuple[float, float]]


def bubble_rate(frontier: Frontier, value: float) -> float:
    """1 − work / value: the share of a step of `value` µs in which the busiest rank does nothing."""
    return 1 - frontier.work / value if value else 0.0


def excess(frontier: Frontier, named: Named) -> str:
    """How much longer a named schedule is than the best point within its memory; "" where there is none."""
    best = min((point.value for point in frontier.points if point.memory <= named.memory), default=0)
    return f"{named.value / best - 1:+.1%}" if best else ""


def frontier_drawing(frontier: Frontier, headline: str, sentence: str, width: int) -> Drawing:
    """The picture, `width` pixels wide, with its headline above and its sentence below."""
    chart = _Chart(frontier, width)
    words = (Words(LEFT, 22, headline, 15, bold=True), Words(LEFT, HEIGHT - 24, sentence, 12, "#444"))
    marks = (*words, *chart.grid(), *chart.curves(), *chart.device(), *chart.named(), *_legend(bool(frontier.named)))
    return Drawing(width, HEIGHT, headline, sentence, marks)


class _Chart:
    """Where memory and value lie in the picture. Upwards: the bubble rate 1 − work/value, which keeps serial schedules
    (many times the work) and near-perfect ones in one picture; times stand at the right."""

    def __init__(self, frontier: Frontier, width: int) -> None:
        self.frontier, self.right, self.floor = frontier, width - RIGHT, HEIGHT - BOTTOM
        points, named = frontier.points, frontier.named
        memory = [float(size) for p in points for size in (p.memory, p.peak)] + [float(one.memory) for one in named]
        # A named schedule that needs far more than the best one (GPipe) stands at the edge, with its memory in words.
        ceiling = max(1.25 * points[-1].memory, 1.0)
        self.low, self.high = min(memory), max(size for size in memory if size <= ceiling)
        pad = 0.04 * (self.high - self.low or self.high or 1.0)
        self.low, self.high = max(0.0, self.low - pad), self.high + 2 * pad
        rates = [bubble_rate(frontier, v) for v in (*(p.value for p in points), *(one.value for one in named))]
        self.highest_rate = min(1.0, 1.08 * max(*rates, 0.05))

    def x(self, memory: float) -> float:
        """Pixels from the left, at most the right edge."""
        return LEFT + (self.right - LEFT) * min(1.0, max(0.0, (memory - self.low) / (self.high - self.low)))

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return self.height_of(max(0.0, bubble_rate(self.frontier, value)))

    def height_of(self, rate: float) -> float:
        """Pixels from the top of a bubble rate."""
        return self.floor - (self.floor - TOP) * rate / self.highest_rate

    def grid(self) -> Iterator[Mark]:
        """Lines at round bubble rates, with the time at the right; ticks at round memory sizes."""
        step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2) if self.highest_rate / s <= 8)
        for i in range(int(self.highest_rate / step) + 1):
            rate = i * step
            y = self.height_of(rate)
            yield Line(((LEFT, y), (self.right, y)), "#e3e5e9")
            yield Words(LEFT - 8, y, f"{rate:.0%}", 11, "#444", "end")
            if rate < 1:
                yield Words(self.right + 8, y, _three_digits(self.frontier.work / (1 - rate)), 11, "#444")
        yield Words(LEFT - 8, TOP - 16, "bubble", 11, "#444", "end")
        yield Words(self.right + 8, TOP - 16, self.frontier.objective, 11, "#444")
        for size in _round_sizes(self.low, self.high):
            x = self.x(size)
            yield Line(((x, self.floor), (x, self.floor + 5)), "#888")
            yield Words(x, self.floor + 15, format_bytes(size), 11, "#444", "middle")
        what = "memory a rank, parameters and optimizer state included"
        yield Words((LEFT + self.right) / 2, self.floor + 36, what, 12, "#444", "middle")

    def curves(self) -> Iterator[Mark]:
        """Value from above and bound from below as steps, what is between shaded, and every point."""
        upper, lower = self._values(), self._bounds()
        yield Area((*upper, *reversed(lower)), BETWEEN_COLOUR)
        yield Line(tuple(lower), BOUND_COLOUR, 1.6)
        yield Line(tuple(upper), VALUE_COLOUR, 2.2)
        for point in self.frontier.points:
            fill = VALUE_COLOUR if point.bound >= point.value else "#fff"
            yield Dot(self.x(point.memory), self.y(point.value), 4, fill, VALUE_COLOUR, 1.6)

    def _values(self) -> Corners:
        """A schedule's value holds from the memory that it really needs."""
        points = self.frontier.points
        corners = [(self.x(points[0].memory), self.y(points[0].value))]
        for before, point in pairwise(points):
            at = self.x(max(point.peak, before.memory))
            corners += [(at, self.y(before.value)), (at, self.y(point.value))]
        return [*corners, (self.x(self.high), self.y(points[-1].value))]

    def _bounds(self) -> Corners:
        """A bound holds up to the memory that it was proven for."""
        points = self.frontier.points
        corners = [(self.x(points[0].memory), self.y(points[0].bound))]
        for before, point in pairwise(points):
            at = self.x(before.memory)
            corners += [(at, self.y(before.bound)), (at, self.y(point.bound))]
        return [*corners, (self.x(self.high), self.y(points[-1].bound))]

    def device(self) -> Iterator[Mark]:
        """The memory that the profiled device has, where it is in the picture."""
        size = self.frontier.device
        if size is not None and self.low <= size <= self.high:
            x = self.x(size)
            yield Line(((x, TOP), (x, self.floor)), "#888", dashes=(4, 4))
            yield Words(x + 6, TOP + 6, f"device: {format_bytes(size)}", 11, "#444")

    def named(self) -> Iterator[Mark]:
        """Named schedules as diamonds with how much longer they are than the best within their memory."""
        for one in self.frontier.named:
            x, y = self.x(one.memory), self.y(one.value)
            over = excess(self.frontier, one)
            more = f", needs {format_bytes(one.memory)}" if one.memory > self.high else ""
            text = f"{one.name}{f' {over}' if over else ''}{more}"
            yield _diamond(x, y)
            if x + 10 + 6.2 * len(text) > self.right:
                yield Words(x - 10, y - 12, text, 12, NAMED_COLOUR, "end", halo=True)
            else:
                yield Words(x + 10, y - 12, text, 12, NAMED_COLOUR, halo=True)


def _legend(named: bool) -> Iterator[Mark]:
    """What the marks mean; `named`: whether named schedules are among them."""
    texts = (
        "optimal",
        "best found",
        "proven bound: nothing is shorter",
        "named schedules, against the best in their memory",
    )
    x, y = LEFT, 42.0
    for i, text in enumerate(texts if named else texts[:-1]):
        closed, still_open = (Dot(x + 6, y, 4, fill, VALUE_COLOUR, 1.6) for fill in (VALUE_COLOUR, "#fff"))
        yield (closed, still_open, Line(((x, y), (x + 14, y)), BOUND_COLOUR, 2), _diamond(x + 6, y))[i]
        yield Words(x + 19, y, text, 12)
        x += 42 + 6.4 * len(text)


def _diamond(x: float, y: float) -> Area:
    return Area(((x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)), NAMED_COLOUR)


def _three_digits(us: float) -> str:
    """A time with three digits at most that count."""
    number, unit = format_time(us).split(" ")
    rounded = float(f"{float(number.replace(',', '')):.3g}")
    return f"{rounded:,g} {unit}"


def _round_sizes(low: float, high: float) -> list[float]:
    """About eight round sizes between, in the unit that the largest is read in; bytes."""
    unit = 1024 ** max(0, next((i for i in range(5) if high < 1024 ** (i + 1)), 4))
    wanted = (high - low) / unit / 8
    base = 10.0 ** (len(f"{int(wanted)}") - 1) if wanted >= 1 else 1.0
    while base > wanted:
        base /= 10
    step = next(base * m for m in (1, 2, 5, 10) if base * m >= wanted) * unit
    first = int(low / step) + 1
    return [i * step for i in range(first, int(high / step) + 1)]
