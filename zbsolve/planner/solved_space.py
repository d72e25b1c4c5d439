"""`SolvedSpace`: every layout of a plan with its bound, and the steps of those that were solved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .bounds.space_bounds import RULES, SpaceBounds
from .clusters.cluster import Cluster
from .costs.layer_costs import Model
from .only import ALL, Only

MFU_COUNTS = "attention's whole square, masked or not; nothing that is computed again (2205.05198, appendix A)"
SAME_US = 1e-3  # steps this near are the same number, written and read


@dataclass(frozen=True, eq=False)
class SolvedSpace:
    """What a plan says of its whole space; a plan file has it too. memory: bytes a device. solved: number of a layout → µs
    of the best step that was found for it. only: which layouts it has."""

    shape: Model
    cluster: Cluster
    devices: int
    batch: int
    memory: int
    bounds: SpaceBounds
    solved: Mapping[int, float]
    only: Only = ALL

    @property
    def best(self) -> int:
        """The number of the layout with the least step."""
        return min(self.solved, key=lambda row: self.solved[row])

    @property
    def value(self) -> float:
        """µs of the least step."""
        return self.solved[self.best]

    @property
    def bound(self) -> float:
        """µs that no layout's step undercuts, whatever its partition and schedule."""
        return min(self.bounds.least, self.value)

    @property
    def bound_by(self) -> str:
        """The rule of the layout with the least bound, and the layout."""
        row = int(self.bounds.step.argmin())
        return f"{RULES[self.bounds.rule[row]]} of {self.bounds.layout.row(row).title}"

    @property
    def gap(self) -> float:
        """(step − bound) / step, over the whole space."""
        return 1 - self.bound / self.value

    @property
    def is_open(self) -> NDArray[np.bool_]:
        """Of each layout: whether no bound excludes it."""
        return self.bounds.step < self.value - SAME_US

    @property
    def open(self) -> int:
        """Layouts that no bound excludes."""
        return int(self.is_open.sum())

    def mfu(self, step: float) -> float | None:
        """Model FLOPs, `MFU_COUNTS`, over what the devices could do in so many µs; None: not known."""
        flops = self.shape.flops(self.batch)
        return None if flops is None else flops / (step / 1e6 * self.devices * self.cluster.peak)

    def tokens(self, step: float) -> float:
        """Tokens a second and device with a step of so many µs; sequences where nobody knows how long one is."""
        return self.batch * (self.shape.sequence or 1) / (step / 1e6) / self.devices
