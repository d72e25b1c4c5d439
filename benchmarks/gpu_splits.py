"""A split backward beside eager mode's, on any device: the same numbers, and what its passes take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.graphs.by_name import parts_by_name
from zbsolve.models.model import seeded
from zbsolve.models.presets import Block

MICROBATCHES = 2  # in flight, so that what one keeps cannot be the other's
# The largest difference that passes, as a share of the largest value of a tensor: some hundred roundings of the type.
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}


class Sizes(NamedTuple):
    """Transformer blocks, their inputs, and how many rounds are timed after one that warms up."""

    width: int
    heads: int
    blocks: int
    batch: int
    length: int
    rounds: int


SIZES = Sizes(width=2048, heads=16, blocks=2, batch=2, length=1024, rounds=20)
TINY = Sizes(width=32, heads=4, blocks=1, batch=2, length=16, rounds=2)


def split_beside_eager(device: str, name: str, dtype: str, sizes: Sizes) -> dict[str, Any]:
    """differences: by tensor, the largest difference from eager mode as a share of eager's largest value. samples_us: wall
    time of each pass, with the device idle before and after it."""
    torch.manual_seed(0)
    how = {"device": device, "dtype": getattr(torch, dtype)}
    shape = (MICROBATCHES, sizes.batch, sizes.length, sizes.width)
    inputs, gradients = torch.randn(shape, **how), torch.randn(shape, **how)
    layers = blocks(sizes, how)
    stage = Stage(layers, 1, parts=parts_by_name(name)(layers, 1, None))
    right, samples = _eager(blocks(sizes, how), inputs, gradients, sizes.rounds)
    found, split_samples = _split(stage, inputs, gradients, sizes.rounds)
    assert right.keys() == found.keys()
    return {
        "differences": {what: difference(found[what], right[what]) for what in right},
        "samples_us": {"eager": samples, name: split_samples},
    }


def blocks(sizes: Sizes, how: dict[str, Any]) -> list[nn.Module]:
    """Equal blocks each time."""
    return [seeded(0, i, partial(Block, sizes.width, sizes.heads))().to(**how) for i in range(sizes.blocks)]


def difference(found: Tensor, right: Tensor) -> float:
    """The largest difference, as a share of the largest value of `right`; NaN where either is no number."""
    return float((found.double() - right.double()).abs().max() / right.double().abs().max())


def _eager(layers: Sequence[nn.Module], inputs: Tensor, gradients: Tensor, rounds: int) -> tuple[dict[str, Tensor], Any]:
    """Outputs and gradients of the first round, and µs of F and BW of the others."""
    module, samples, first = nn.Sequential(*layers), _Samples(inputs.device), {}
    for turn in range(rounds + 1):
        xs = [x.clone().requires_grad_() for x in inputs]
        ys = [samples.timed(turn, "F", partial(module, x)) for x in xs]
        for y, dy in zip(ys, gradients, strict=True):
            samples.timed(turn, "BW", partial(y.backward, dy))
        if turn == 0:
            first = _named(ys, [x.grad for x in xs], module)
    return first, samples.rows


def _split(stage: Stage, inputs: Tensor, gradients: Tensor, rounds: int) -> tuple[dict[str, Tensor], Any]:
    """The same of a stage, with B and W in place of BW: the Ws after all Bs."""
    module, samples, first = nn.Sequential(*stage.layers), _Samples(inputs.device), {}
    for turn in range(rounds + 1):
        xs = [x.clone().requires_grad_() for x in inputs]
        each = range(len(xs))
        ys = [samples.timed(turn, "F", partial(stage.forward, m, xs[m], None, split=True)) for m in each]
        dxs = [samples.timed(turn, "B", partial(stage.backward, m, [gradients[m]])) for m in each]
        for m in each:
            samples.timed(turn, "W", partial(stage.weights, m))
        if turn == 0:
            first = _named(ys, [dx for (dx,) in dxs], module)
    return first, samples.rows


def _named(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], module: nn.Module) -> dict[str, Tensor]:
    """What is compared, copied, by name. A gradient that is missing is no tensor, and fails."""
    found: dict[str, Any] = {f"output {m}": y for m, y in enumerate(outputs)}
    found |= {f"input gradient {m}": dx for m, dx in enumerate(gradients)}
    found |= {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return {name: value.detach().clone() for name, value in found.items()}


class _Samples:
    """µs of passes by kind; round 0 warms up and is not kept."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.rows: dict[str, list[float]] = {}

    def timed(self, turn: int, kind: str, run: Callable[[], Any]) -> Any:
        """What `run` returns."""
        self._wait()
        began = time.perf_counter()
        result = run()
        self._wait()
        if turn:
            self.rows.setdefault(kind, []).append(round((time.perf_counter() - began) * 1e6, 1))
        return result

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
