"""A still picture as data: marks on a page, in pixels from its upper left corner. `svg.py` writes it."""

from __future__ import annotations

from dataclasses import dataclass

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; `radius` of its corners."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    radius: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """Many rectangles of one colour between the same two heights; spans: (x, width) of each."""

    y: float
    height: float
    fill: str
    spans: Points


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon."""

    points: Points
    fill: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line through the points; dashes: pixels of line and of gap in turn, () for none."""

    points: Points
    colour: str
    thickness: float = 1.0
    dashes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Dot:
    """A circle around (x, y) with its outline."""

    x: float
    y: float
    radius: float
    fill: str
    outline: str
    thickness: float


@dataclass(frozen=True, slots=True)
class Words:
    """One line of text, its middle at height `y`. anchor: which end of it stands at `x` (start, middle, end); halo: in white
    around the letters, where they stand on other marks."""

    x: float
    y: float
    text: str
    size: float
    colour: str = "#111"
    anchor: str = "start"
    bold: bool = False
    halo: bool = False


Mark = Box | Row | Area | Line | Dot | Words


@dataclass(frozen=True)
class Drawing:
    """Marks from back to front on a white page; title and description say in words what is drawn."""

    width: float
    height: float
    title: str
    description: str
    marks: tuple[Mark, ...]
