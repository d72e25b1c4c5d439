"""Whole numbers in memory that all ranks of a machine share, and what copies of several ranks tell each other by them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...util.errors import BadInput
from ...util.temporary import temporary_folder
from .failure import LostRank
from .wires import Wires, receive_bytes, send_bytes

Cells = NDArray[np.int64]
SHORTEST, LONGEST = 2e-5, 1e-3  # seconds between two looks


def shared_cells(wires: Wires, shape: tuple[int, ...], what: str) -> Cells:
    """Zeros that all ranks share; all of them call this. They are a file that rank 0 makes, and that loses its name once all
    have it. Raises BadInput naming `what` where a rank does not find it: on another machine."""
    others = range(1, wires.size) if wires.rank == 0 else ()
    with nullcontext() if wires.rank else temporary_folder("cells") as folder:
        if folder is None:
            path = receive_bytes(wires, 0).decode()
        else:
            path = str(folder / "cells")
            Path(path).write_bytes(bytes(int(np.prod(shape)) * 8))
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


class Signals:
    """What copies of several ranks tell each other: where ranks share a bus or host memory, a copy waits for another rank's.
    cells: pass → the last step in which it has ended, shape (passes,), of all ranks. rows: the passes by name; ranks: of
    each. timeout: seconds to wait for one. step: this rank's."""

    def __init__(self, cells: Cells, rows: Mapping[str, int], ranks: Mapping[str, int], timeout: float) -> None:
        self.cells, self.rows, self.ranks, self.timeout = cells, rows, ranks, timeout
        self.step = 0

    def tell(self, name: str, step: int) -> None:
        """Pass `name` has ended in a step."""
        self.cells[self.rows[name]] = step

    def hear(self, name: str, step: int) -> None:
        """Wait until pass `name` of another rank has ended in a step. Raises LostRank."""
        row, pause, until = self.rows[name], SHORTEST, time.monotonic() + self.timeout
        while self.cells[row] < step:
            if time.monotonic() > until:
                raise LostRank(f"waiting for {name}: not done after {self.timeout:g} s", self.ranks[name])
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)
