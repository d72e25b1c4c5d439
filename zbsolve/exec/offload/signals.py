"""What copies of several ranks tell each other: where ranks share a bus or host memory, a copy waits for another rank's."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ..transport.cells import Cells
from ..transport.failure import LostRank

SHORTEST, LONGEST = 2e-5, 1e-3  # seconds between two looks


class Signals:
    """cells: pass → the last step in which it has ended, shape (passes,), of all ranks. rows: the passes by name; ranks: of
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
