"""A stage that runs forwards alone."""

from __future__ import annotations

from typing import Any

from ..offload.keeper import Keeper
from .stage import Stage


class ForwardStage(Stage):
    """The layers of `stage`, run without a graph: an F leaves no activations, and no backward can follow. with_loss: the
    last stage makes the loss; else it keeps its `outputs`, by microbatch."""

    def __init__(self, stage: Stage, with_loss: bool, last: bool) -> None:
        self.layers, self.first, self.live, self.sharding = stage.layers, stage.first, {}, stage.sharding
        self.slices = None if stage.slices is None else stage.slices.anew()
        self.loss = stage.loss if with_loss else None
        self.outputs: dict[int, Any] = {}
        self._keeps = last and not with_loss

    def forward(
        self,
        microbatch: int,
        x: Any,
        target: Any,
        *,
        split: bool,
        seed: int = 0,
        recompute: bool = False,
        keeper: Keeper | None = None,
    ) -> Any:
        """The F pass: see `Stage.forward`. Nothing is kept."""
        y = self.alone(microbatch, x, target, seed)
        if self._keeps:
            self.outputs[microbatch] = y
        return y
