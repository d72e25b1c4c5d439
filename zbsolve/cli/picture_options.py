"""How a still picture is to look: options of every command that draws one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..util.errors import BadInput

if TYPE_CHECKING:
    from ..show.pictures.style import Style

OF_TIME = ("time_range", "with_memory")  # options that only a picture with an axis of time has


def add_picture_options(parser: argparse.ArgumentParser, axis_of_time: bool = True) -> None:
    """Size, title and colours; with an `axis_of_time` also which part of it, and what ranks hold over it."""
    group = parser.add_argument_group("pictures (SVG, PDF, PNG)")
    group.add_argument("--size", metavar="W[xH]", help="8.5cm, 8.5x6cm, 3.5in or 1200px; a height that fits without H")
    group.add_argument("--title", help="the line above; '' for none")
    group.add_argument("--palette", help="standard, colour-blind or grey")
    if axis_of_time:
        group.add_argument("--time-range", metavar="A:B", help="this part of the step alone: 10ms:25ms")
        group.add_argument("--with-memory", action="store_true", help="what ranks hold over time, on the same axis")


def style_from(options: argparse.Namespace, *paths: str) -> Style:
    """The style that the options ask for. Raises BadInput for values that cannot be, and for options that none of the files
    at `paths` heeds."""
    from ..show.pictures.files import PICTURES
    from ..show.pictures.style import Style, parse_picture_size, parse_window

    if not any(path.endswith(tuple(PICTURES)) for path in paths):
        given = [name for name in ("size", "palette", *OF_TIME) if getattr(options, name, None)]
        if given:
            raise BadInput(f"--{given[0].replace('_', '-')}: it is for a picture: add -o x.pdf, x.png or x.svg")
    width, height, unit = parse_picture_size(options.size or "1200px")
    return Style(
        width,
        height,
        unit,
        options.title,
        options.palette or "standard",
        parse_window(options.time_range) if getattr(options, "time_range", None) else None,
        getattr(options, "with_memory", False),
    )
