"""Other engines' schedules, told apart by what is in the file."""

from __future__ import annotations

import os

from ..util.files import read_text
from .foreign_order import ForeignOrder
from .text_grid import read_text_grid


def read_order(path: str | os.PathLike[str]) -> ForeignOrder:
    """The order in a file; `-` is standard input. Raises BadInput naming file and place."""
    text = read_text(path)
    return read_text_grid(text, str(path))
