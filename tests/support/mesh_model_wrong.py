"""The same model with a `parallelize` that is right on one coordinate alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from .mesh_model import Block, Wrong
from .mesh_model import pipeline as pipeline


def parallelize(stage: nn.Module, mesh: Any) -> None:
    if mesh["tp"].get_local_rank():
        for name, block in list(stage.named_children()):
            assert isinstance(block, Block)
            setattr(stage, name, Wrong(block, 1.5))
