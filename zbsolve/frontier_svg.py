"""The frontier as a picture (SVG) and as a page, and as a table of text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from .errors import BadInput
from .files import write_text
from .frontier import Frontier
from .show_style import format_time, printable
from .show_svg import FONT, caption
from .text import format_bytes, html_page, html_table

LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 78.0, 112.0, 76.0, 110.0, 560.0
VALUE, BOUND, NAMED, BETWEEN = "#1a5a9c", "#2fa583", "#d2623a", "#eef0f4"


def save(frontier: Frontier, path: str | os.PathLike[str]) -> None:
    """Write the frontier as `.json`, `.svg` or `.html`; `-` is JSON on standard output. Raises BadInput otherwise."""
    check_ending(path)
    if str(path).endswith(".svg"):
        write_text(path, svg(frontier))
    elif str(path).endswith(".html"):
        write_text(path, page(frontier))
    else:
        frontier.save(path)


def check_ending(path: str | os.PathLike[str]) -> None:
    """Raise BadInput for a path that `save` cannot write, before any time is spent."""
    if str(path) != "-" and not str(path).endswith((".json", ".svg", ".html")):
        raise BadInput(f"{path}: unknown ending; one of .json .svg .html")


def headline(frontier: Frontier) -> str:
    """One line: model, ranks, microbatches, placement, objective."""
    return (
        f"{printable(frontier.model)}: {frontier.objective} over memory a rank, {frontier.ranks} ranks, "
        f"{frontier.microbatches} microbatches, placement {printable(frontier.placement)}"
    )


def sentence(frontier: Frontier) -> str:
    """What the picture says, in words."""
    first, last = frontier.points[0], frontier.points[-1]
    near = next(point for point in frontier.points if point.value <= 1.01 * last.value)
    proven = sum(point.bound >= point.value for point in frontier.points)
    return (
        f"From {format_bytes(first.memory)} a rank ({format_time(first.value)}) to {format_bytes(last.memory)} "
        f"({format_time(last.value)}); {format_bytes(near.memory)} are within 1 % of that. "
        f"{proven} of {len(frontier.points)} points are optimal; the largest gap is "
        f"{max(point.gap for point in frontier.points):.2%}."
    )


def rows(frontier: Frontier) -> list[tuple[str, ...]]:
    """The table: a header, then points and named schedules by rising memory."""
    found: list[tuple[int, tuple[str, ...]]] = []
    for point in frontier.points:
        gap = "optimal" if point.bound >= point.value else f"{point.gap:.2%}"
        numbers = (format_bytes(point.peak), format_time(point.value), format_time(point.bound), gap)
        found.append((point.memory, (format_bytes(point.memory), *numbers, _bubble(frontier, point.value), point.solver)))
    for one in frontier.named:
        over = _over(frontier, one.memory, one.value)
        value = (format_time(one.value), "", over, _bubble(frontier, one.value))
        found.append((one.memory, ("", format_bytes(one.memory), *value, one.name)))
    found.sort(key=lambda row: row[0])
    return [("memory", "needed", frontier.objective, "bound", "gap", "bubble", "by"), *(row for _, row in found)]


def table(frontier: Frontier) -> str:
    """The table as text."""
    cells = rows(frontier)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    last = len(widths) - 1
    lines = [
        "  ".join(cell.ljust(w) if i == last else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in [*lines, sentence(frontier)]) + "\n"


def page(frontier: Frontier) -> str:
    """The picture and its table as one HTML page that loads nothing."""
    style = (
        "svg{max-width:100%;height:auto;border:1px solid #dfe3e9;border-radius:10px}"
        "td:last-child,th:last-child{text-align:left}"
    )
    return html_page(headline(frontier), style, svg(frontier) + html_table(rows(frontier)))


def svg(frontier: Frontier, width: int = 1200) -> str:
    """A well-formed SVG document `width` pixels wide: memory to the right, time lost to bubbles upwards."""
    draw = _Axes(frontier, width)
    body = [*draw.grid(), *draw.curves(), *draw.device(), *draw.named(), *draw.legend()]
    head = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{HEIGHT:.0f}' "
        f"viewBox='0 0 {width} {HEIGHT:.0f}' role='img' {FONT}>",
        f"<title>{escape(headline(frontier))}</title>",
        f"<desc>{escape(sentence(frontier))}</desc>",
        f"<rect width='{width}' height='{HEIGHT:.0f}' fill='#fff'/>",
        caption(LEFT, 22, headline(frontier), 15, weight="600"),
        caption(LEFT, HEIGHT - 24, sentence(frontier), 12, "#444"),
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _bubble(frontier: Frontier, value: float) -> str:
    return f"{_rate(frontier, value):.2%}"


def _rate(frontier: Frontier, value: float) -> float:
    return 1 - frontier.work / value if value else 0.0


def _over(frontier: Frontier, memory: int, value: int) -> str:
    """How much longer a named schedule is than the best point within its memory."""
    best = min((point.value for point in frontier.points if point.memory <= memory), default=0)
    return f"{value / best - 1:+.1%}" if best else ""


class _Axes:
    """Where memory and value lie in the picture. Upwards: the bubble rate 1 − work/value, which keeps serial schedules
    (many times the work) and near-perfect ones in one picture; times stand at the right."""

    def __init__(self, frontier: Frontier, width: int) -> None:
        self.frontier, self.width = frontier, width
        points, named = frontier.points, frontier.named
        memory = [float(size) for p in points for size in (p.memory, p.peak)] + [float(one.memory) for one in named]
        # A named schedule that needs far more than the best one (GPipe) stands at the edge, with its memory in words.
        ceiling = max(1.25 * points[-1].memory, 1.0)
        self.low, self.high = min(memory), max(size for size in memory if size <= ceiling)
        pad = 0.04 * (self.high - self.low or self.high or 1.0)
        self.low, self.high = max(0.0, self.low - pad), self.high + 2 * pad
        rates = [_rate(frontier, v) for v in (*(p.value for p in points), *(one.value for one in named))]
        self.most = min(1.0, 1.08 * max(*rates, 0.05))

    def x(self, memory: float) -> float:
        """Pixels from the left, at most the right edge."""
        span = self.width - LEFT - RIGHT
        return LEFT + span * min(1.0, max(0.0, (memory - self.low) / (self.high - self.low)))

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * max(0.0, _rate(self.frontier, value)) / self.most

    def grid(self) -> Iterator[str]:
        """Lines at round bubble rates, with the time at the right; ticks at round memory sizes."""
        right, floor = self.width - RIGHT, HEIGHT - BOTTOM
        step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2) if self.most / s <= 8)
        for i in range(int(self.most / step) + 1):
            value = self.frontier.work / (1 - i * step) if i * step < 1 else float("inf")
            y = floor - (floor - TOP) * i * step / self.most
            yield f"<line x1='{LEFT}' y1='{y:.1f}' x2='{right:.1f}' y2='{y:.1f}' stroke='#e3e5e9'/>"
            yield caption(LEFT - 8, y, f"{i * step:.0%}", 11, "#444", "end")
            if value < float("inf"):
                yield caption(right + 8, y, _short(value), 11, "#444")
        yield caption(LEFT - 8, TOP - 16, "bubble", 11, "#444", "end")
        yield caption(right + 8, TOP - 16, self.frontier.objective, 11, "#444")
        for size in _round_sizes(self.low, self.high):
            x = self.x(size)
            yield f"<line x1='{x:.1f}' y1='{floor:.1f}' x2='{x:.1f}' y2='{floor + 5:.1f}' stroke='#888'/>"
            yield caption(x, floor + 15, format_bytes(size), 11, "#444", "middle")
        yield caption(
            (LEFT + right) / 2, floor + 36, "memory a rank, parameters and optimizer state included", 12, "#444", "middle"
        )

    def curves(self) -> Iterator[str]:
        """Value from above and bound from below as steps, what is between shaded, and every point."""
        upper, lower = self._upper(), self._lower()
        area = [*upper, *reversed(lower)]
        yield f"<path fill='{BETWEEN}' d='{_line(area)}Z'/>"
        yield f"<path fill='none' stroke='{BOUND}' stroke-width='1.6' d='{_line(lower)}'/>"
        yield f"<path fill='none' stroke='{VALUE}' stroke-width='2.2' d='{_line(upper)}'/>"
        for point in self.frontier.points:
            closed = point.bound >= point.value
            yield (
                f"<circle cx='{self.x(point.memory):.1f}' cy='{self.y(point.value):.1f}' r='4' stroke='{VALUE}' "
                f"stroke-width='1.6' fill='{VALUE if closed else '#fff'}'/>"
            )

    def _upper(self) -> list[tuple[float, float]]:
        """A schedule's value holds from the memory that it really needs."""
        points = self.frontier.points
        corners = [(self.x(points[0].memory), self.y(points[0].value))]
        for before, point in pairwise(points):
            at = self.x(max(point.peak, before.memory))
            corners += [(at, self.y(before.value)), (at, self.y(point.value))]
        return [*corners, (self.x(self.high), self.y(points[-1].value))]

    def _lower(self) -> list[tuple[float, float]]:
        """A bound holds up to the memory that it was proven for."""
        points = self.frontier.points
        corners = [(self.x(points[0].memory), self.y(points[0].bound))]
        for before, point in pairwise(points):
            at = self.x(before.memory)
            corners += [(at, self.y(before.bound)), (at, self.y(point.bound))]
        return [*corners, (self.x(self.high), self.y(points[-1].bound))]

    def device(self) -> Iterator[str]:
        """The memory that the profiled device has, where it is in the picture."""
        size = self.frontier.device
        if size is not None and self.low <= size <= self.high:
            x = self.x(size)
            yield f"<line x1='{x:.1f}' y1='{TOP}' x2='{x:.1f}' y2='{HEIGHT - BOTTOM}' stroke='#888' stroke-dasharray='4 4'/>"
            yield caption(x + 6, TOP + 6, f"device: {format_bytes(size)}", 11, "#444")

    def named(self) -> Iterator[str]:
        """Named schedules as diamonds with how much longer they are than the best within their memory."""
        for one in self.frontier.named:
            x, y = self.x(one.memory), self.y(one.value)
            over = _over(self.frontier, one.memory, one.value)
            more = f", needs {format_bytes(one.memory)}" if one.memory > self.high else ""
            text = f"{one.name}{f' {over}' if over else ''}{more}"
            yield f"<path fill='{NAMED}' d='M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z'/>"
            end = x + 10 + 6.2 * len(text) > self.width - RIGHT
            words = caption(x - 10 if end else x + 10, y - 12, text, 12, NAMED, "end" if end else "start")
            yield f"<g paint-order='stroke' stroke='#fff' stroke-width='3' stroke-linejoin='round'>{words}</g>"

    def legend(self) -> Iterator[str]:
        """What the marks mean."""
        entries = (
            (f"<circle cx='6' cy='0' r='4' fill='{VALUE}' stroke='{VALUE}' stroke-width='1.6'/>", "optimal"),
            (f"<circle cx='6' cy='0' r='4' fill='#fff' stroke='{VALUE}' stroke-width='1.6'/>", "best found"),
            (f"<path d='M0 0h14' stroke='{BOUND}' stroke-width='2'/>", "proven bound: nothing is shorter"),
            (f"<path fill='{NAMED}' d='M6 -6l6 6l-6 6l-6 -6z'/>", "named schedules, against the best in their memory"),
        )
        x = LEFT
        for mark, text in entries if self.frontier.named else entries[:-1]:
            yield f"<g transform='translate({x:.0f},42)'>{mark}</g>"
            yield caption(x + 19, 42, text, 12)
            x += 42 + 6.4 * len(text)


def _short(us: float) -> str:
    """Three digits of a time."""
    number, unit = format_time(us).split(" ")
    rounded = float(f"{float(number.replace(',', '')):.3g}")
    return f"{rounded:,g} {unit}"


def _line(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)


def _round_sizes(low: float, high: float) -> list[float]:
    """About eight round sizes between, in the unit that the largest is read in."""
    unit = 1024 ** max(0, next((i for i in range(5) if high < 1024 ** (i + 1)), 4))
    wanted = (high - low) / unit / 8
    base = 10.0 ** (len(f"{int(wanted)}") - 1) if wanted >= 1 else 1.0
    while base > wanted:
        base /= 10
    step = next(base * m for m in (1, 2, 5, 10) if base * m >= wanted) * unit
    first = int(low / step) + 1
    return [i * step for i in range(first, int(high / step) + 1)]
