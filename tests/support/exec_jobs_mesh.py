"""What the tests of meshes run on gloo ranks (see `exec_ranks`)."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import gelu, scaled_dot_product_attention

from zbsolve.exec import Pipeline
from zbsolve.exec.base.values import is_dtensor

from .exec_tools import Resting, a_problem, random_schedule, refusal
from .trials import Batches, Trial, mesh_of, tried

WIDTH, LENGTH, HEADS = 8, 6, 4


class Block(nn.Module):
    """A transformer block with dropout, whose heads may be spread."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o, self.up, self.down = (
            nn.Linear(a, b) for a, b in [(WIDTH, WIDTH)] * 4 + [(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)]
        )
        self.k.bias = None  # its gradient is 0, so its rounding would be all that is compared
        self.heads, self.dropout = HEADS, nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (w(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.dropout(self.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        y: Tensor = x + self.down(gelu(self.up(x)))
        return y


class Layout(nn.Module):
    """Hands its input on as a DTensor with these placements, or as a local tensor (None). Parameters keep their names, as in
    torch's own wrappers."""

    def __init__(self, inner: nn.Module, mesh: Any, given: Any, made: Any) -> None:
        super().__init__()
        self._orig_mod, self.mesh, self.given, self.made = inner, mesh, given, made

    def forward(self, x: Any) -> Any:
        assert isinstance(x, DTensor) == (self.given is not None)
        if self.given is not None:
            assert tuple(x.placements) == (self.given,)
            assert x.device_mesh == self.mesh
            x = x.redistribute(placements=[Replicate()]).to_local()
        y = self._orig_mod(x)
        if self.made is None:
            return y
        y = DTensor.from_local(y, self.mesh, [Replicate()], run_check=False)
        if self.made.is_partial():  # a product of shards, which nobody has added up
            whole = DTensor.from_local(torch.eye(WIDTH, dtype=torch.float64), self.mesh, [Replicate()], run_check=False)
            y = y.redistribute(placements=[Shard(2)]) @ whole.redistribute(placements=[Shard(0)])
            assert y.placements[0].is_partial()
            return y
        return y.redistribute(placements=[self.made])


def layers(numbers: list[int] | None = None, rate: float = 0.1) -> list[nn.Module]:
    """Four blocks, in double precision; each has numbers of its own."""
    made = []
    for i in numbers if numbers is not None else range(4):
        torch.default_generator.manual_seed(1000 + i)
        made.append(Block(rate).double())
    return made


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def batch(microbatch: int, step: int = 0) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(100 * step + microbatch)
    x, y = (torch.randn(2, LENGTH, WIDTH, generator=numbers, dtype=torch.float64) for _ in range(2))
    return x, y


def spread(stage: nn.Module, mesh: Any) -> None:
    """Tensor parallelism, in place."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    assert mesh.mesh_dim_names.count("pp") == 1
    tp = mesh["tp"]
    for block in stage.children():
        parallelize_module(
            block,
            tp,
            {**dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()), **dict.fromkeys(("o", "down"), RowwiseParallel())},
        )
        block.heads = HEADS // tp.size()


def laid_out(made: Sequence[Any], stage: nn.Module, mesh: Any) -> None:
    """Blocks hand on DTensors with these placements, layer by layer; the last one a local tensor."""
    spread(stage, mesh)
    for name, block in list(stage.named_children()):
        i = int(name)
        setattr(stage, name, Layout(block, mesh["tp"], made[i - 1] if i else None, made[i]))


def in_microbatches(place: int, step: int) -> Batches:
    pairs = [batch(3 * place + m, step) for m in range(3)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def trial(
    sizes: dict[str, int], placement: tuple[int, ...], parallelize: Any = None, steps: int = 1, data: Any = None, **how: Any
) -> Trial:
    """Steps on a mesh."""
    return Trial(
        problem=a_problem(placement, 3, layers=4, **how),
        layers=layers,
        batch=in_microbatches,
        loss=loss,
        order=1,
        steps=steps,
        options=lambda: {"mesh": mesh_of(**sizes), "parallelize": parallelize, "seed": 3, "data": data},
    )


def unchanged(stage: nn.Module, mesh: Any) -> nn.Module:
    return stage


INNER, OUTER = {"pp": 2, "tp": 2}, {"tp": 2, "pp": 2}
# In both orders, with one stage a rank, two, and a vee; with split and fused backwards.
TENSOR_PARALLEL = {
    "inner": trial(INNER, (0, 1), spread, steps=2),
    "outer": trial(OUTER, (0, 1, 0, 1), spread),
    "vee, recompute": trial(INNER, (0, 1, 1, 0), spread, recompute="all"),
    "fused": trial(INNER, (0, 1), spread, fused=True),
}
# Activations that are shards, replicas and partial sums.
BETWEEN_STAGES = {
    f"{placement} {made}": trial(INNER, placement, partial(laid_out, [*made, None]))
    for made in (
        [Shard(1)] * 3,
        [Shard(2), Replicate(), Partial()],
        [Partial(), Shard(1), Replicate()],
    )
    for placement in ((0, 1, 0, 1), (0, 1, 1, 0))
}
# Without and with a function that does nothing; dimensions of data by other names; cp has the same batch.
DATA_PARALLEL = {
    "dp": trial({"dp": 2, "pp": 2}, (0, 1, 1, 0), steps=2),
    "dp_shard": trial({"pp": 2, "dp_shard": 2}, (0, 1), unchanged),
    "rows": trial({"pp": 2, "rows": 2}, (0, 1), unchanged, data=("rows",)),
    "cp": trial({"pp": 2, "cp": 2}, (0, 1), unchanged),
}
THREE_DIMENSIONS = {
    "tensor": trial({"dp": 2, "pp": 2, "tp": 2}, (0, 1), spread, steps=2),
    "data": trial({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, (0, 1)),
}


def ran(trial: Trial, pipe: Pipeline) -> dict[str, Any]:
    """Steps on a mesh, and where this rank is in it."""
    found, mesh = trial.ran(pipe), pipe.mesh
    spread_out = [is_dtensor(p) for p in pipe.parameters()]
    return found | {"where": [mesh.coordinate, mesh.place, mesh.places], "dtensors": [sum(spread_out), len(spread_out)]}


def steps(rank: int, name: str) -> dict[str, Any]:
    return tried(rank, f"{__name__}:{name}", ran)


def refused(rank: int, _: None) -> list[str]:
    """What bad input says, on this rank."""
    mesh, schedule = mesh_of(pp=2, tp=2), random_schedule(a_problem((0, 1), 3, layers=4))

    def raising(stage: nn.Module, mesh: Any) -> None:
        raise ValueError("no plan")

    def another(stage: nn.Module, mesh: Any) -> nn.Module:
        return nn.Linear(2, 2)

    tries: list[dict[str, Any]] = [
        {"mesh": mesh_of(stages=2, tp=2)},
        {"mesh": mesh_of(pp=4)},
        {"mesh": mesh, "data": ("rows",)},
        {"mesh": mesh, "data": ("pp",)},
        {"mesh": mesh, "group": mesh.get_group("pp")},
        {"mesh": 4},
        {"data": ("dp",)},
        {"parallelize": spread, "group": mesh.get_group("pp")},
        {"mesh": mesh, "parallelize": raising},
        {"mesh": mesh, "parallelize": another},
        {"mesh": mesh, "parallelize": lambda stage, mesh: 3},
        {"mesh": mesh, "device": "meta"},
    ]
    return [refusal(partial(Pipeline, layers, schedule, loss=loss, **one)) for one in tries]


def counted_bytes(rank: int, _: None) -> list[int]:
    """Bytes that live while DTensors are made: of what is here, each once."""
    from zbsolve.exec.memory import LiveBytes

    mesh = mesh_of(pp=2, tp=2)["tp"]
    x = DTensor.from_local(torch.randn(4, 8), mesh, [Shard(1)], run_check=False)
    weight = torch.nn.Parameter(DTensor.from_local(torch.randn(8, 8), mesh, [Shard(0)], run_check=False))
    found = []
    with LiveBytes([x, weight]) as meter:
        found.append(meter.now)
        doubled = x * 2
        found.append(meter.now)
        y = doubled @ weight
        found.append(meter.now)
        del doubled
        found.append(meter.now)
        del y
        found.append(meter.now)
    return found


def profiled(rank: int, words: list[str]) -> tuple[int, str]:
    """What `zbsolve profile` returns here and says on standard error, where torchrun's environment is there."""
    from zbsolve.cli import main

    place = {"RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": str(rank)}
    counted = mock.patch("profiler.memory.Settled", Resting)
    with mock.patch.dict(os.environ, place), counted, redirect_stderr(io.StringIO()) as said:
        code = main(["profile", *words])
    return code, said.getvalue()
