"""A picture as data: marks (boxes, lines, texts, …) with positions in pixels, 96 an inch, from the upper left corner. Its
SVG document; its `Style`; and the width of texts, which layouts need so that texts do not overlap. `files.py` writes files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ...util.text import format_time, printable

# Colours by purpose, of everything but passes. In dark mode pages replace each by another one (picture.css).
PAPER, INK, SOFT, TRACK, GRID, TICK, LIMIT = "#fff", "#111", "#444", "#f1f2f4", "#e3e5e9", "#888", "#b3261e"

UNITS = {"px": 1.0, "pt": 96 / 72, "mm": 96 / 25.4, "cm": 96 / 2.54, "in": 96.0}  # pixels

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle. radius: of its corners. said: its tooltip on a page."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    radius: float = 0.0
    said: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Rectangles of one colour with the same `y` and height. spans: (x, width) of each."""

    y: float
    height: float
    fill: str
    spans: Points


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon. said: see Box."""

    points: Points
    fill: str
    said: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through the points. dashes: alternating lengths of dash and gap, pixels; () for a solid line."""

    points: Points
    colour: str
    thickness: float = 1.0
    dashes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Dot:
    """A circle around (x, y) with its outline. said: see Box."""

    x: float
    y: float
    radius: float
    fill: str
    outline: str
    thickness: float
    said: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text, centred at `y`. anchor: its part at `x` (start, middle, end). halo: white, on other marks."""

    x: float
    y: float
    text: str
    size: float
    colour: str = INK
    anchor: str = "start"
    bold: bool = False
    halo: bool = False


Mark = Box | Row | Area | Line | Dot | Words


@dataclass(frozen=True)
class Drawing:
    """Marks on a white page, in drawing order. title, description: for accessibility. unit: of the given size, in UNITS."""

    width: float
    height: float
    title: str
    description: str
    marks: tuple[Mark, ...]
    unit: str = "px"


FONT = "system-ui,sans-serif"


def to_svg(drawing: Drawing) -> str:
    """The drawing as a well-formed SVG document. Texts are escaped. Tooltips are `title` elements, which browsers show."""
    width, height = _number(drawing.width), _number(drawing.height)
    unit = "" if drawing.unit == "px" else drawing.unit
    size = (f"{_number(length / UNITS[drawing.unit])}{unit}" for length in (drawing.width, drawing.height))
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{next(size)}' height='{next(size)}' viewBox='0 0 {width} {height}' "
        f"role='img' font-family='{FONT}'>"
    )
    words = (f"<title>{_safe(drawing.title)}</title>", f"<desc>{_safe(drawing.description)}</desc>")
    page = f"<rect width='{width}' height='{height}' fill='{PAPER}'/>"
    return "\n".join([head, *words, page, *map(_element, drawing.marks), "</svg>"]) + "\n"


def _element(mark: Mark) -> str:
    n = _number
    match mark:
        case Box(x, y, width, height, fill, radius, said):
            round_corners = f" rx='{n(radius)}'" if radius else ""
            return (
                f"<rect x='{n(x)}' y='{n(y)}' width='{n(width)}' height='{n(height)}' fill='{fill}'{round_corners}"
                + _end("rect", said)
            )
        case Row(y, height, fill, spans):
            path = "".join(f"M{n(x)} {n(y)}h{n(width)}v{n(height)}h{n(-width)}z" for x, width in spans)
            return f"<path fill='{fill}' d='{path}'/>"
        case Area(points, fill, said):
            return f"<path fill='{fill}' d='{_path(points)}z'" + _end("path", said)
        case Line(points, colour, thickness, dashes):
            dashed = f" stroke-dasharray='{' '.join(map(n, dashes))}'" if dashes else ""
            return f"<path fill='none' stroke='{colour}' stroke-width='{n(thickness)}'{dashed} d='{_path(points)}'/>"
        case Dot(x, y, radius, fill, outline, thickness, said):
            stroke = f"stroke='{outline}' stroke-width='{n(thickness)}'"
            return f"<circle cx='{n(x)}' cy='{n(y)}' r='{n(radius)}' fill='{fill}' {stroke}" + _end("circle", said)
        case Words():
            return _text(mark)


def _end(tag: str, title: str) -> str:
    return f"><title>{_safe(title)}</title></{tag}>" if title else "/>"


def _text(words: Words) -> str:
    halo = f" paint-order='stroke' stroke='{PAPER}' stroke-width='3' stroke-linejoin='round'" if words.halo else ""
    return (
        f"<text x='{_number(words.x)}' y='{_number(words.y)}' font-size='{_number(words.size)}' fill='{words.colour}' "
        f"text-anchor='{words.anchor}' font-weight='{600 if words.bold else 400}' dominant-baseline='central'{halo}>"
        f"{_safe(words.text)}</text>"
    )


def _path(points: Points) -> str:
    return "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)


def _number(x: float) -> str:
    """Pixels to a hundredth."""
    return f"{x:.2f}".rstrip("0").rstrip(".")


def _safe(text: str) -> str:
    return escape(printable(text))


# --- How a picture is to look, and how wide its texts are ---

# Letters by width in DejaVu Sans, the font of PDF and PNG; fonts of browsers are slightly narrower.
NARROW, WIDE = frozenset(" iljtfrI.,:;|!'()[]-"), frozenset("mwMW@%→×–—+=<>")
USUAL_WIDTH, NARROW_WIDTH, WIDE_WIDTH, CAPITAL_WIDTH = 0.62, 0.37, 0.9, 0.72
BOLD = 1.12
LINE = 1.45  # letter heights from a line to the next


@dataclass(frozen=True)
class Style:
    """The options of a picture.

    width: pixels, 96 an inch; the height follows from the rows.
    unit: of the size in an SVG: px, pt, mm, cm or in. A PNG has 300 dots an inch unless it is px.
    title: None for the default title, "" for none. hover: marks have tooltips.
    window: the part of the step that is drawn, µs from its start. longest: µs of the full width (default: the step).
    memory: draw also the memory of ranks over time. notes: print value, certificate and peaks.
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
    """The text in lines of at most `width` pixels, broken between words; a word that is wider is on a separate line."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def paragraph(lines: Sequence[str], x: float, top: float, mark: Words) -> Iterator[Words]:
    """Lines of text below each other, starting at height `top`, in the size and style of `mark`."""
    for i, line in enumerate(lines):
        y = top + (i + 0.5) * LINE * mark.size
        yield Words(x, y, line, mark.size, mark.colour, mark.anchor, mark.bold, mark.halo)


def legend(
    entries: Sequence[tuple[Sequence[str], str]], x: float, top: float, size: float, width: float
) -> tuple[list[Mark], float]:
    """A legend, starting at height `top` and wrapped into rows of `width` pixels, and the height at which it ends.

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
