"""Backwards that are split into B and W, compared with fused ones: on one thread of a CPU, or on any device.

Rounds of all ways take turns, so that a slow moment of the machine affects all of them. Times on a CPU are CPU times of the
one thread that works. Ratios are of medians: (B + W) of a split over a fused backward.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbsolve.exec.backward.layer_split import LayerSplit
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.torch_private import gradient_edge, run_backward
from zbsolve.exec.graphs.auto import MAKES, parts_by_name
from zbsolve.exec.graphs.graph_split import GraphSplit
from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.run.host import keep_freed_memory
from zbsolve.models.blocks import BlockSizes, Decoder
from zbsolve.models.model import seeded
from zbsolve.models.presets import Block

from .harness import Results, rows_of, table

WIDTHS = {"wide": 256, "tiny": 32}
KINDS = ("F", "B", "W")


class Residual(nn.Module):
    """A basic block of a ResNet (1512.03385)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) → the same shape."""
        return torch.relu(x + self.norms[1](self.second(torch.relu(self.norms[0](self.first(x))))))


def _decoder(width: int, experts: int = 1) -> Decoder:
    """Of eight heads or fewer."""
    heads = max(1, width // 32)
    return Decoder(BlockSizes(width, heads, heads, width // heads, 8 * width // 3, experts=experts), width)


# Name → what makes the block for a width, and the shape of its input.
BLOCKS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], tuple[int, ...]]]] = {
    "llama": (_decoder, lambda width: (2, width, width)),
    "gpt": (lambda width: Block(width, max(1, width // 32)), lambda width: (2, width, width)),
    "experts": (partial(_decoder, experts=4), lambda width: (2, width, width)),
    "resnet": (lambda width: Residual(max(8, width // 4)), lambda width: (4, max(8, width // 4), width // 8, width // 8)),
}


class Way(NamedTuple):
    """How a layer runs. forward: F, returns the output and what is kept. backward: B, takes both and the output's gradient.
    weights: W, takes what is kept."""

    layer: nn.Module
    forward: Callable[[Tensor], tuple[Tensor, Any]]
    backward: Callable[[Any, Tensor], Any]
    weights: Callable[[Any], Any]


def _fused(layer: nn.Module) -> Way:
    """Autograd's backward, all of it in B: eager mode's, or that of torch.compile."""

    def forward(x: Tensor) -> tuple[Tensor, Any]:
        y: Tensor = layer(x.detach().requires_grad_())
        return y.detach(), gradient_edge(y)

    return Way(layer, forward, lambda root, dy: run_backward([root], [dy]), lambda root: None)


def _torchs(layer: nn.Module) -> Way:
    """torch.distributed.pipelining's own split: what its stages call for I and W."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    parameters = list(layer.parameters())

    def forward(x: Tensor) -> tuple[Tensor, Any]:
        x = x.detach().requires_grad_()
        y = layer(x)
        return y.detach(), [x, y]

    def backward(kept: Any, dy: Tensor) -> None:
        x, y = kept
        _, groups = stage_backward_input([y], [dy], [x], iter(parameters))
        kept[:] = [groups]

    return Way(layer, forward, backward, lambda kept: stage_backward_weight(iter(parameters), kept.pop()))


def _ours(layer: nn.Module, part: Any) -> Way:
    def forward(x: Tensor) -> tuple[Tensor, Any]:
        found: tuple[Tensor, Any] = part.forward(x.detach().requires_grad_(), None, split=True, seed=0)
        return found

    return Way(layer, forward, lambda kept, dy: part.backward(kept, [dy]), part.weights)


def _graph(name: str, layer: nn.Module, x: Tensor) -> Way:
    return _ours(layer, GraphSplit(layer, 1, MAKES[name](layer, x)))


WAYS: dict[str, Callable[[nn.Module, Tensor], Way]] = {
    "eager": lambda layer, x: _fused(layer),
    "torch": lambda layer, x: _torchs(layer),
    "layers": lambda layer, x: _ours(layer, LayerSplit([layer], 1)),
    **{name: partial(_graph, name) for name in ("graph", "graph:least", "inductor")},
    "compiled": lambda layer, x: _fused(torch.compile(layer)),
}
COMPILED = ("inductor", "compiled")


@table()
def graph_split(
    seconds: float = 15.0, rounds: int = 60, blocks: tuple[str, ...] = tuple(BLOCKS), eager: bool = False
) -> Results:
    """The graph's split compared with the layers' split, torch's own and fused backwards: a Llama block, a GPT block, a
    mixture of experts and a ResNet block, at a width whose time is in products and at one whose time is the host's own.
    seconds: of rounds, for each block and width, at most `rounds` of them and at least 8. eager: compile nothing. Bytes are
    those held for a microbatch after F (its input among them) and after B."""
    plain = [way for way in WAYS if way not in COMPILED]  # compiled code has little to do with the host's time of the others

    def rows() -> Iterator[tuple[str, Results]]:
        for size, width in WIDTHS.items():
            for name in blocks:
                make, shape = BLOCKS[name]
                torch.manual_seed(0)
                block, x = make(width), torch.randn(shape(width), requires_grad=True)
                yield (
                    f"{name}, {size}",
                    _compared(block, x, plain if eager or size == "tiny" else list(WAYS), seconds, rounds),
                )

    return rows_of(rows())


@table()
def split(seconds: float = 4.0, blocks: tuple[int, ...] = (1, 2, 4, 8, 16, 32)) -> Results:
    """The split of the layers compared with eager mode's fused backward, for 1 to 32 transformer blocks at once, of two
    sizes: one whose time is Python's own, one whose time is in products."""
    sizes = {"width 192, 256 tokens": (192, 6, 2, 128), "width 64, 64 tokens": (64, 4, 2, 32)}  # width, heads, batch, length

    def rows() -> Iterator[tuple[str, Results]]:
        for size, (width, heads, batch, length) in sizes.items():
            for count in blocks:
                layers = nn.Sequential(*(seeded(0, i, partial(Block, width, heads))() for i in range(count)))
                x = torch.randn(batch, length, width, requires_grad=True)
                yield f"{size}, {count} blocks", _compared(layers, x, ["eager", "layers"], seconds, 40)

    return rows_of(rows())


def _compared(block: nn.Module, x: Tensor, chosen: Sequence[str], seconds: float, most: int) -> Results:
    """One block: samples, medians, ratios, bytes, and how busy the machine was. Each way has a copy of the block."""
    torch.set_num_threads(1)
    keep_freed_memory()
    began = time.monotonic()
    made = {name: WAYS[name](deepcopy(block), x) for name in chosen}
    for way in made.values():  # gradients are there, as in the middle of a step; torch.compile compiles
        _round(way, x)
    built, began, rounds = time.monotonic() - began, time.monotonic(), 0
    samples: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in made}
    while rounds < 8 or (rounds < most and time.monotonic() - began < seconds):
        for name, way in made.items():
            for kind, took in zip(KINDS, _round(way, x), strict=True):
                samples[name][kind].append(round(took, 1))
        rounds += 1
    us = {name: {kind: median(row) for kind, row in rows.items()} for name, rows in samples.items()}
    fused = {name: us[name]["B"] for name in ("eager", "compiled") if name in us}
    return {
        "us": us,
        "ratios": {name: {key: (row["B"] + row["W"]) / whole for key, whole in fused.items()} for name, row in us.items()},
        "held": {name: _held(way, x) for name, way in made.items() if name != "compiled"},
        "load": os.getloadavg()[0],
        "built_seconds": round(built, 1),
        "samples_us": samples,
    }


def _round(way: Any, x: Tensor) -> tuple[float, float, float]:
    """µs of the passes of one microbatch."""
    at = [time.thread_time_ns()]
    y, kept = way.forward(x)
    at.append(time.thread_time_ns())
    dy = torch.ones_like(y)
    start = time.thread_time_ns()
    way.backward(kept, dy)
    at.append(time.thread_time_ns())
    way.weights(kept)
    at.append(time.thread_time_ns())
    return (at[1] - at[0]) / 1000, (at[2] - start) / 1000, (at[3] - at[2]) / 1000


def _held(way: Any, x: Tensor) -> tuple[int, int]:
    """Bytes held after F (its input among them), and after B (the output's gradient among them)."""
    parameters = list(way.layer.parameters())
    with LiveBytes([*parameters, *way.layer.buffers(), *(p.grad for p in parameters if p.grad is not None)]) as meter:
        y, kept = way.forward(x.detach().clone())
        shape = y.shape
        del y
        after_f = meter.now
        way.backward(kept, torch.ones(shape))
        return after_f, meter.now


# --- On any device (`make gpu`) ---

MICROBATCHES = 2  # in flight, so that what one keeps cannot be the other's
# The largest difference that passes, as a share of the largest value of a tensor: some hundred roundings of the type.
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}


class Sizes(NamedTuple):
    """Transformer blocks, their inputs, and the number of timed rounds after a warm-up round."""

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
    """The largest difference, as a share of the largest value of `right`; NaN if either is no number."""
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
    """Copies of the compared tensors, by name. A missing gradient is no tensor, and fails."""
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
