"""Sequences in slices on one rank: its stages' slices, and what a schedule with slices must go with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...problem import Problem
from ...util.errors import BadInput
from ..backward.layer_split import Loss
from ..base.part import Part
from .cutting import Cutting
from .loss import SliceLoss
from .stage import StageSlices


class Slices(Part):
    """The slices of a rank's stages, by number."""

    name, no_capture = "slices", "what is new in a slice is looked at on the host"

    def __init__(self, stages: Mapping[int, StageSlices]) -> None:
        self.stages = stages

    @classmethod
    def of(cls, problem: Problem, stages: Mapping[int, Any]) -> Slices | None:
        """Give stages the slices of their microbatches; None where sequences are whole. Raises BadInput."""
        cutting = Cutting.of(problem)
        return None if cutting.count == 1 else cls(_given(stages, {s: StageSlices(cutting) for s in stages}))

    def begin(self, data: Any) -> None:
        """A step begins."""
        for one in self.stages.values():
            one.ignored = data.ignored

    def for_forwards(self, stages: Mapping[int, Any]) -> Slices:
        """The same slices of other microbatches."""
        return Slices(_given(stages, {s: one.anew() for s, one in self.stages.items()}))


def _given(stages: Mapping[int, Any], slices: dict[int, StageSlices]) -> dict[int, StageSlices]:
    for s, one in slices.items():
        stages[s].around = one
    return slices


def check_sliced(problem: Problem, split: str) -> None:
    """Raise BadInput for a way to split the backward that does not go with slices."""
    if problem.slices > 1 and split != "layers":
        raise BadInput(f"split: '{split}' does not know slices, whose keys and values lie outside of a layer's graph")


def sliced_loss(problem: Problem, loss: Loss | None) -> Loss | None:
    """The loss of the stages, which run slices or not."""
    return loss if loss is None or problem.slices == 1 else SliceLoss(loss)
