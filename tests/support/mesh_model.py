"""A model whose stages a mesh spreads, as somebody would write it: `tests.support.mesh_model:pipeline`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two linear layers that tensor parallelism spreads, and a norm and dropout that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.dropout = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return y


def pipeline() -> tuple[list[nn.Module], Tensor]:
    return [Block().double() for _ in range(4)], torch.randn(4, 8, dtype=torch.float64)


def parallelize(stage: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if "tp" in mesh.mesh_dim_names:
        for block in stage.children():
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data = tuple(name for name in ("dp_replicate", "dp_shard") if name in mesh.mesh_dim_names)
    if data:
        from torch.distributed.fsdp import fully_shard

        for block in stage.children():
            fully_shard(block, mesh=mesh[data])


class Wrong(nn.Module):
    """Changes its input's gradient on the second coordinate of tp alone."""

    def __init__(self, block: Block, scale: float) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.dropout, self.scale = block.norm, block.up, block.down, block.dropout, scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Block.forward(self, x)  # type: ignore[arg-type]
        return y * self.scale + y.detach() * (1 - self.scale)
