"""How a still picture is to look: its size, letters, colours, words, and the part of the step that it shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """Everything that one may ask of a picture; each has a default.

    width: pixels, 96 an inch; rows are as high as they read well. unit: px, pt, mm, cm or in, in which an SVG says the
    size; a PNG has 300 dots an inch where it is not px. title: None for what the picture says of
    itself, "" for none. window: µs from the step's start. memory: also what ranks hold
    over time. notes: the lines about value and certificate. longest: µs that the width stands for (default: what is drawn).
    hover: marks say what they are.
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
