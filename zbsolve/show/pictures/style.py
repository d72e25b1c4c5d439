"""How a still picture is to look, and how wide its texts are, so that none runs over another: lines, rows of a legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...util.text import format_time
from .drawing import Box, Mark, Words

# Widths in letter heights, of DejaVu Sans, which PDF and PNG are set in; a browser's own letters are a little narrower.
NARROW, WIDE = frozenset(" iljtfrI.,:;|!'()[]-"), frozenset("mwMW@%→×–—+=<>")
USUAL_WIDTH, NARROW_WIDTH, WIDE_WIDTH, CAPITAL_WIDTH = 0.62, 0.37, 0.9, 0.72
BOLD = 1.12
LINE = 1.45  # letter heights from a line to the next


@dataclass(frozen=True)
class Style:
    """Everything that one may ask of a picture; each has a default.

    width: pixels, 96 an inch; rows are as high as they read well. unit: px, pt, mm, cm or in, in which an SVG says the
    size; a PNG has 300 dots an inch where it is not px. title: None for what the picture says of
    itself, "" for none. window: µs from the step's start. memory: also what ranks hold
    over time. notes: the lines about value and certificate, and peaks. longest: µs that the width stands for (default: what
    is drawn). hover: marks say what they are.
    """

    width: float = 1200.0
    unit: str = "px"
    title: str | None = None
    window: tuple[float, float] | None = None
    memory: bool = False
    notes: bool = True
    longest: float | None = None
    hover: bool = False

    @property
    def size(self) -> float:
        """Pixels of the usual letter: 12 on a screen's width, 6.5 points in the column of a paper."""
        return min(12.0, max(8.5, 6 + self.width / 120))


USUAL = Style()


def text_width(text: str, size: float, bold: bool = False) -> float:
    """About how many pixels a text takes, where letters have `size` pixels."""
    widths = (
        NARROW_WIDTH if c in NARROW else WIDE_WIDTH if c in WIDE else CAPITAL_WIDTH if c.isupper() else USUAL_WIDTH
        for c in text
    )
    return sum(widths) * size * (BOLD if bold else 1)


def short_time(us: float) -> str:
    """A time with four digits: `935.4 ms`."""
    number, unit = format_time(us).split(" ")
    value = float(number.replace(",", ""))
    return f"{value:,.0f} {unit}" if value >= 1000 or value.is_integer() else f"{value:.4g} {unit}"


def wrapped(text: str, size: float, width: float, bold: bool = False) -> list[str]:
    """The text in lines of at most `width` pixels, broken between words; a longer word has a line of its own."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def paragraph(lines: Sequence[str], x: float, top: float, mark: Words) -> Iterator[Words]:
    """Lines below each other from `top` down, in the letters of `mark`."""
    for i, line in enumerate(lines):
        y = top + (i + 0.5) * LINE * mark.size
        yield Words(x, y, line, mark.size, mark.colour, mark.anchor, mark.bold, mark.halo)


def legend(
    entries: Sequence[tuple[Sequence[str], str]], x: float, top: float, size: float, width: float
) -> tuple[list[Mark], float]:
    """Swatches with texts in as many rows as they need from `top` down, and where the next thing may begin.

    entries: (colours, text) of each.
    """
    marks: list[Mark] = []
    edge, at, side = x + width, x, size
    for colours, text in entries:
        wide = len(colours) * 1.15 * side + 0.35 * size + text_width(text, size)
        if at > x and at + wide > edge:
            at, top = x, top + LINE * size
        middle = top + LINE * size / 2
        for i, colour in enumerate(colours):
            marks.append(Box(at + 1.15 * side * i, middle - side / 2, side, side, colour, radius=side / 6))
        marks.append(Words(at + len(colours) * 1.15 * side + 0.3 * size, middle, text, size))
        at += wide + 1.4 * size
    return marks, top + LINE * size if entries else top
