"""Whole numbers in memory that all ranks of a machine share."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...util.errors import BadInput
from ...util.temporary import temporary_folder
from .wires import Wires, receive_bytes, send_bytes

Cells = NDArray[np.int64]


def shared_cells(wires: Wires, shape: tuple[int, ...], what: str) -> Cells:
    """Zeros that all ranks share; all of them call this. They are a file that rank 0 makes, and that loses its name once all
    have it. Raises BadInput naming `what` where a rank does not find it: on another machine."""
    others = range(1, wires.size) if wires.rank == 0 else ()
    with nullcontext() if wires.rank else temporary_folder("cells") as folder:
        path = receive_bytes(wires, 0).decode() if folder is None else _made(folder / "cells", int(np.prod(shape)) * 8)
        try:
            for other in others:
                send_bytes(wires, path.encode(), other)
            cells: Cells = np.memmap(path, np.int64, "r+", shape=shape)
            if wires.rank:
                send_bytes(wires, b"", 0)
            for other in others:
                receive_bytes(wires, other)
        except OSError:
            raise BadInput(f"{what}: all ranks must be on one machine") from None
    return cells


def _made(path: Path, size: int) -> str:
    """A new file of zeros."""
    path.touch()
    os.truncate(path, size)
    return str(path)
