"""Sequences in slices on one rank: its stages' slices, and what a schedule with slices must go with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...problem import Problem
from ...util.errors import BadInput
from ..backward.layer_split import Loss
from ..base.part import Part
from ..transport.failure import RunFailed, one_line
from .cutting import Cutting, SliceLoss
from .stage import StageSlices


class Slices(Part):
    """The slices of the `stages` of a rank, by number."""

    name, no_capture = "slices", "labels of slices are counted on the host"

    def __init__(self, rank: int, stages: Mapping[int, Any], slices: Mapping[int, StageSlices]) -> None:
        self.rank, self.stages, self.slices = rank, stages, slices
        self._rounds: Mapping[int, StageSlices] = {}  # of rounds of forwards
        for s, one in slices.items():
            stages[s].around = one

    @classmethod
    def of(cls, problem: Problem, rank: int, stages: Mapping[int, Any], compares: bool = True) -> Slices | None:
        """Give stages the slices of their microbatches; None where sequences are whole. compares: see `StageSlices`. Raises
        BadInput."""
        cutting = Cutting.of(problem)
        return None if cutting.count == 1 else cls(rank, stages, {s: StageSlices(cutting, compares) for s in stages})

    def end(self) -> None:
        """Is the step what whole sequences give? Raises RunFailed."""
        for s, one in self.slices.items():
            try:
                one.compare(self.stages[s])
            except Exception as error:
                raise RunFailed(f"rank {self.rank}, stage {s}: {one_line(error)}") from error

    def for_forwards(self, stages: Mapping[int, Any]) -> Slices:
        """The same slices of other microbatches. All rounds have one count of steps, so that few of them are compared."""
        self._rounds = self._rounds or {s: one.anew() for s, one in self.slices.items()}
        return Slices(self.rank, stages, self._rounds)


def check_sliced(problem: Problem, split: str) -> None:
    """Raise BadInput for a way to split the backward that does not go with slices."""
    if problem.slices > 1 and split != "layers":
        raise BadInput(f"split: '{split}' does not know slices, whose keys and values lie outside of a layer's graph")


def sliced_loss(problem: Problem, loss: Loss | None) -> Loss | None:
    """The loss of the stages, which run slices or not."""
    return loss if loss is None or problem.slices == 1 else SliceLoss(loss)
