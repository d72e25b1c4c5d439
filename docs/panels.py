"""Panels: lines over numbers that double, such as ranks or tokens, each with its name behind its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zbsolve.show.pictures.drawing import GRID, INK, SOFT, Dot, Line, Mark, Words


@dataclass(frozen=True)
class Panel:
    """One panel. left, right, top, floor: its edges, pixels. over: the numbers along it, and `named` how one reads; axis,
    says: what it is over and of. ticks: of what it shows, `text` how one reads, and `height` where it lies, pixels."""

    left: float
    right: float
    top: float
    floor: float
    over: Sequence[int]
    named: Callable[[int], str]
    axis: str
    says: str
    ticks: Sequence[float]
    text: Callable[[float], str]
    height: Callable[[float], float]

    def place(self, number: int) -> float:
        """Where a number along it lies, pixels."""
        low, high = math.log2(self.over[0]), math.log2(self.over[-1])
        return self.left + (self.right - self.left) * (math.log2(number) - low) / (high - low)

    def grid(self) -> Iterator[Mark]:
        """The grid, and what its axes are."""
        yield Words(self.left, self.top - 26, self.says, 13, SOFT)
        for tick in self.ticks:
            y = self.height(tick)
            yield Line(((self.left, y), (self.right, y)), GRID)
            yield Words(self.left - 8, y, self.text(tick), 12, SOFT, "end")
        for number in self.over:
            x = self.place(number)
            yield Line(((x, self.top), (x, self.floor)), GRID)
            yield Words(x, self.floor + 18, self.named(number), 12, SOFT, "middle")
        yield Words((self.left + self.right) / 2, self.floor + 40, self.axis, 12, SOFT, "middle")

    def curves(self, known: Mapping[str, Mapping[int, float]], looks: Mapping[str, Look]) -> Iterator[Mark]:
        """A line each: by name, number → value, where there is one; names stand apart from each other."""
        ends = []
        for name, values in known.items():
            look = looks[name]
            points = tuple((self.place(number), self.height(values[number])) for number in self.over if number in values)
            if not points:
                continue
            yield Line(points, look.colour, 2.0, look.dashes)
            for x, y in points:
                yield Dot(x, y, 3.0, look.colour, look.colour, 0.0)
            ends.append((points[-1][1], look.called))
        lowest = -math.inf
        for y, called in sorted(ends):
            lowest = max(lowest + 14, y)
            yield Words(self.right + 10, lowest, called, 12, INK)


@dataclass(frozen=True)
class Look:
    """What a line is called, its colour, and its dashes."""

    called: str
    colour: str
    dashes: tuple[float, ...] = ()
