"""A still picture as data: marks on a page, in pixels (96 an inch) from its upper left corner. `svg.py` and `files.py`
write it."""

from __future__ import annotations

from dataclasses import dataclass

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
