"""`SolvedSpace`: every layout of a plan with its lower bound, and the steps of those that were solved. From it follow how
much each family of layouts loses, and why the bound of a plan's schedule holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..search.certify import proven_again
from .bounds.space_bounds import RULES, SpaceBounds
from .candidate import Candidate
from .cluster import Cluster
from .layout import FIELDS, named, rows_of
from .profiled_model import Model
from .space import ALL, Only

MFU_COUNTS = "attention's whole square, masked or not; nothing that is computed again (2205.05198, appendix A)"
SAME_US = 1e-3  # steps that differ by less are equal, since files round them


@dataclass(frozen=True, eq=False)
class SolvedSpace:
    """The whole space of a plan, as in its file. batch: sequences in a step; memory: bytes of a device; solved: index of a
    layout → µs of its best step found; only: which layouts the space has."""

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
        """The index of the layout with the least step."""
        return min(self.solved, key=lambda row: self.solved[row])

    @property
    def value(self) -> float:
        """µs of the least step."""
        return self.solved[self.best]

    @property
    def bound(self) -> float:
        """A lower bound, µs, on the step of every layout with any partition and schedule."""
        return min(self.bounds.least, self.value)

    @property
    def bound_by(self) -> str:
        """The layout with the least bound, and the rule that gives it."""
        row = int(self.bounds.step.argmin())
        return f"{RULES[self.bounds.rule[row]]} of {self.bounds.layout.row(row).title}"

    @property
    def gap(self) -> float:
        """(step − bound) / step, over the whole space."""
        return 1 - self.bound / self.value

    @property
    def is_open(self) -> NDArray[np.bool_]:
        """[layout]: whether no bound excludes it."""
        return self.bounds.step < self.value - SAME_US

    @property
    def open(self) -> int:
        """The number of layouts that no bound excludes."""
        return int(self.is_open.sum())

    def mfu(self, step: float) -> float | None:
        """Model FLOPs (see `MFU_COUNTS`) over the peak FLOPs of all devices in `step` µs; None: not known."""
        flops = self.shape.flops(self.batch)
        return None if flops is None else flops / (step / 1e6 * self.devices * self.cluster.peak)

    def tokens(self, step: float) -> float:
        """Tokens per second and device with a step of `step` µs; sequences where their tokens are not known."""
        return self.batch * (self.shape.sequence or 1) / (step / 1e6) / self.devices


# --- Families ---


class Family(NamedTuple):
    """All layouts with one value of a field. field: of `FIELDS`; value: as readable text; layouts: how many; lost: the least
    share of the plan's step by which their bounds exceed it, below 0 where one is not excluded, infinite where none fits. A
    dominated layout loses at least what the layout that dominates it loses."""

    field: str
    value: str
    layouts: int
    lost: float


def families(space: SolvedSpace) -> list[Family]:
    """All families of the space, in the order of `FIELDS`."""
    layout, by = space.bounds.layout, space.bounds.by
    step = np.where(by >= 0, space.bounds.step[by], space.bounds.step)
    rows = []
    for name in FIELDS:
        column = np.asarray(getattr(layout, name))
        for value in np.unique(column).tolist():
            in_family = column == value
            lost = float(step[in_family].min()) / space.value - 1
            rows.append(Family(name, named(name, value), int(in_family.sum()), lost))
    return rows


# --- The schedule's bound ---


def proof_of_schedule(
    candidate: Candidate, stated: SpaceBounds, seconds: float, search: bool
) -> tuple[str | None, list[str]]:
    """Why the bound of the schedule's certificate holds (None: not proven again), and lines on what is wrong with it. It
    assumes that the space's bounds are proven and the schedule is verified. search: whether a solver may prove it again."""
    own = candidate.schedule.certificate
    if own is None:
        return None, []
    row = int(rows_of(stated.layout, candidate.layout)[0])
    if own.bound <= stated.pipeline[row]:
        return f"{RULES[stated.rule[row]]}, whatever the partition", []
    verdict = proven_again(candidate.schedule, own, seconds, search=search)
    if isinstance(verdict, str):
        return verdict, []
    return None, [f"schedule: {verdict}"] if search else []
