"""Several frontiers of one step in one picture: what recompute, offload and both buy over keeping activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from ...search.keeping import BOTH, KEPT, OFFLOADED, RECOMPUTED, Curves
from ...search.memory_limits import Point
from ...util.text import format_bytes, format_time
from .drawing import PAPER, SOFT, TICK, Area, Drawing, Line, Mark
from .frontier import BOUND_COLOUR, NAMED_COLOUR, VALUE_COLOUR, Chart, Corners, Entry, chart_drawing
from .style import USUAL, Style


@dataclass(frozen=True)
class Look:
    """One curve: colour, thickness, dashes, and its mark as corners around (0, 0), so that no curve is told from another by
    its colour alone."""

    colour: str
    thickness: float
    dashes: tuple[float, ...]
    mark: tuple[tuple[float, float], ...]


# From back to front: where curves run over each other, thinner and dashed ones lie on wider ones.
LOOKS = {
    BOTH: Look(VALUE_COLOUR, 5.0, (), ((0, -8), (8, 0), (0, 8), (-8, 0))),
    KEPT: Look(SOFT, 2.0, (), ((-4.5, -4.5), (4.5, -4.5), (4.5, 4.5), (-4.5, 4.5))),
    RECOMPUTED: Look(NAMED_COLOUR, 2.4, (9.0, 6.0), ((0, -6), (5.5, 4), (-5.5, 4))),
    OFFLOADED: Look(BOUND_COLOUR, 2.4, (3.0, 4.0), ((0, 6), (5.5, -4), (-5.5, -4))),
}


def curves_drawing(curves: Curves, headline: str, sentence: str, style: Style = USUAL) -> Drawing:
    """The picture in this style, with its headline above and its sentence below."""
    every = sorted((point for one in curves.frontiers.values() for point in one.points), key=lambda point: point.memory)
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
    """A line of steps down, with a mark where a shorter schedule fits first, filled where it is optimal."""
    corners: Corners = chart.values(points)
    yield Line(tuple(corners), look.colour, look.thickness, look.dashes)
    firsts = [(points[0].memory, points[0])]
    firsts += [(max(one.peak, before.memory), one) for before, one in pairwise(points) if one.value < before.value]
    for memory, one in firsts:
        said = f"{name}, {format_bytes(memory)}: {format_time(one.value)}{f', {one.choice}' if one.choice else ''}"
        yield from _mark(chart.x(memory), chart.y(one.value), look, one.bound >= one.value, said)


def _mark(x: float, y: float, look: Look, filled: bool, said: str = "") -> Iterator[Mark]:
    """The mark of a curve around (x, y), hollow where it is not filled."""
    yield Area(tuple((x + a, y + b) for a, b in look.mark), look.colour, said)
    if not filled:
        yield Area(tuple((x + a / 2, y + b / 2) for a, b in look.mark), PAPER)
