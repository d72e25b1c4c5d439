"""What layouts' steps probably take: estimates, corrected by what searches of layouts like them found. Nothing is proven
with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..layout import Layout

Floats = NDArray[np.float64]
ALIKE = 0.5  # times as much counts what was found of a layout, for each field in which another differs from it
ESTIMATE = 0.05  # counts the estimate itself
PENDING = 0.02  # log of what a search is taken to find until it ends, over its estimate: others are begun beside it
FIELDS = tuple(name for name in Layout._fields if name not in ("count", "scattered"))  # others follow from these


@dataclass(frozen=True, eq=False)
class Promise:
    """Columns over the layouts of a space. estimate: µs of a step, infinite where it is out of the race; weight and total:
    of the logarithms of steps found over their estimates."""

    layout: Layout
    estimate: Floats
    weight: Floats
    total: Floats

    @classmethod
    def of(cls, layout: Layout, estimate: Floats) -> Promise:
        """Where nothing was searched yet."""
        return cls(layout, estimate, np.zeros(len(estimate)), np.zeros(len(estimate)))

    @property
    def step(self) -> Floats:
        """µs that each layout's step probably takes."""
        return np.asarray(self.estimate * np.exp(self.total / (ESTIMATE + self.weight)))

    def begun(self, row: int) -> None:
        """A search of this layout has begun."""
        alike = self._alike(row)
        np.add(self.weight, alike, out=self.weight)
        np.add(self.total, PENDING * alike, out=self.total)

    def ended(self, row: int, step: float) -> None:
        """It found a step of so many µs. That says nothing where its bound has put it out of the race meanwhile."""
        if np.isinf(self.estimate[row]):
            return
        more = np.log(step / self.estimate[row]) - PENDING
        np.add(self.total, more * self._alike(row), out=self.total)

    def _alike(self, row: int) -> Floats:
        """How much a step of this layout says of each other's."""
        differ = sum(column != column[row] for column in (getattr(self.layout, name) for name in FIELDS))
        return np.asarray(ALIKE**differ)
