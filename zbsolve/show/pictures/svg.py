"""A drawing as an SVG document: light background, no scripts, nothing loaded."""

from __future__ import annotations

from html import escape

from ...util.text import printable
from .drawing import PAPER, UNITS, Area, Box, Dot, Drawing, Line, Mark, Points, Row, Words

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
    """One mark as an element."""
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
