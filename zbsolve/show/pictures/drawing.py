"""A still picture as data: marks on a page, in pixels (96 an inch) from its upper left corner. As SVG it loads
nothing; `files.py` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ...util.text import printable

# The colours of all that is no pass, by what they are for. Pages give each another one where they are dark (picture.css).
PAPER, INK, SOFT, TRACK, GRID, TICK, LIMIT = "#fff", "#111", "#444", "#f1f2f4", "#e3e5e9", "#888", "#b3261e"

UNITS = {"px": 1.0, "pt": 96 / 72, "mm": 96 / 25.4, "cm": 96 / 2.54, "in": 96.0}  # pixels

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; `radius` of its corners. said: what a page says when it is pointed at."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    radius: float = 0.0
    said: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Many rectangles of one colour between the same two heights; spans: (x, width) of each."""

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
    """A line through the points; dashes: pixels of line and of gap in turn, () for none."""

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
    """One line of text, its middle at height `y`. anchor: which end of it stands at `x` (start, middle, end); halo: in white
    around the letters, where they stand on other marks."""

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
    """Marks from back to front on a white page; title and description say in words what is drawn. unit: in which the size
    was asked for, one of UNITS."""

    width: float
    height: float
    title: str
    description: str
    marks: tuple[Mark, ...]
    unit: str = "px"


FONT = "system-ui,sans-serif"


def to_svg(drawing: Drawing) -> str:
    """A well-formed document; control characters and markup in texts stay text. What marks say when they are pointed at is
    their title: browsers show it."""
    width, height = _number(drawing.width), _number(drawing.height)
    unit = "" if drawing.unit == "px" else drawing.unit
    size = (f"{_number(length / UNITS[drawing.unit])}{unit}" for length in (drawing.width, drawing.height))
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{next(size)}' height='{next(size)}' viewBox='0 0 {width} {height}' "
        f"role='img' font-family='{FONT}'>"
    )
    said = (f"<title>{_safe(drawing.title)}</title>", f"<desc>{_safe(drawing.description)}</desc>")
    page = f"<rect width='{width}' height='{height}' fill='{PAPER}'/>"
    return "\n".join([head, *said, page, *map(_element, drawing.marks), "</svg>"]) + "\n"


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


def _end(tag: str, said: str) -> str:
    return f"><title>{_safe(said)}</title></{tag}>" if said else "/>"


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
