"""How a still picture is to look: its size, letters, colours, words, and the part of the step that it shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...util.errors import BadInput
from .drawing import UNITS

SMALLEST, LARGEST = 120.0, 12_000.0  # pixels of a side


@dataclass(frozen=True)
class Style:
    """Everything that one may ask of a picture; each has a default.

    width, height: pixels, 96 an inch; without a height rows are as high as they read well. unit: in which the size was
    given: an SVG says it, and a PNG has 300 dots an inch where it is not px. title: None for what the picture says of
    itself, "" for none. palette: one of `kinds.PALETTES`. window: µs from the step's start. memory: also what ranks hold
    over time. notes: the lines about value and certificate. longest: µs that the width stands for (default: what is drawn).
    hover: marks say what they are.
    """

    width: float = 1200.0
    height: float | None = None
    unit: str = "px"
    title: str | None = None
    palette: str = "standard"
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


def parse_picture_size(text: str) -> tuple[float, float | None, str]:
    """Width and height in pixels, and their unit, of `8.5cm`, `8.5x6cm`, `1200px` or `3.5in x 2in`; height None where
    there is none. Raises BadInput."""
    found = re.fullmatch(r"\s*([\d.]+)\s*([a-z]*)\s*(?:[x×]\s*([\d.]+)\s*([a-z]*)\s*)?", text.lower()[:60])
    if found is None:
        raise BadInput(f"size '{text[:40]}': not a width such as 8.5cm, or a width and a height such as 8.5x6cm")
    width, unit, height, other = found.groups()
    unit, other = unit or other or "px", other or unit or "px"
    sides = [_pixels(number, of, text) for number, of in ((width, unit), (height, other)) if number]
    for side in sides:
        if not SMALLEST <= side <= LARGEST:
            raise BadInput(f"size '{text[:40]}': a side has {SMALLEST:.0f} to {LARGEST:,.0f} pixels, 96 an inch")
    return sides[0], sides[1] if height else None, unit


def parse_window(text: str) -> tuple[float, float]:
    """µs from and to, of `10ms:25ms`. Raises BadInput."""
    parts = [re.fullmatch(r"\s*([\d.]+)\s*(us|µs|ms|s)\s*", part) for part in text[:60].split(":")]
    if len(parts) == 2 and parts[0] is not None and parts[1] is not None:
        scale = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
        first, last = (_number(part[1], text) * scale[part[2]] for part in parts if part is not None)
        if first < last:
            return first, last
    raise BadInput(f"time range '{text[:40]}': not two times, the earlier first, such as 10ms:25ms")


def _pixels(number: str, unit: str, text: str) -> float:
    if unit not in UNITS:
        raise BadInput(f"size '{text[:40]}': unit '{unit}' is unknown: one of {', '.join(UNITS)}")
    return _number(number, text) * UNITS[unit]


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadInput(f"'{whole[:40]}': '{text}' is not a number") from None
