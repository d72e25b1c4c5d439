"""Rounds: the model's layers, each a stage of its own, run and timed exactly as the executor runs passes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.stage import Stage

from .models import Model

Sample = tuple[int, str, float]  # (layer, kind, µs)
IN_FLIGHT = 2  # microbatches at a time, as in a pipeline: the second evicts the first from the caches


def stages_of(model: Model, taken: Sequence[int]) -> list[Stage]:
    """The layers `taken`, each as a stage; `first` is its number in the model."""
    last = len(model.layers) - 1
    return [
        Stage([layer], i, model.loss if i == last else None, 1.0) for i, layer in zip(taken, model.build(taken), strict=True)
    ]


def rounds(model: Model, stages: list[Stage]) -> Iterator[list[Sample]]:
    """Without end: a round with B and W, a round with fused BW, and so on. Gradients are kept and added to, as in the
    middle of a training step."""
    step = 0
    while True:
        batches = [model.batch(m, step) for m in range(IN_FLIGHT)]
        yield _round(stages, batches, split=step % 2 == 0)
        step += 1


def _round(stages: list[Stage], batches: list[tuple[Tensor, Tensor]], *, split: bool) -> list[Sample]:
    samples: list[Sample] = []
    for m, (x, target) in enumerate(batches):
        for stage in stages:
            start = time.monotonic_ns()
            x = stage.forward(m, x, target, split=split)
            if split:  # the forward of a fused backward is not a sample: problems know one F
                samples.append((stage.first, "F", (time.monotonic_ns() - start) / 1000))
    for m in range(len(batches)):
        gradient: Tensor | None = None
        for stage in reversed(stages):
            start = time.monotonic_ns()
            gradient = stage.backward(m, gradient)
            samples.append((stage.first, "B" if split else "BW", (time.monotonic_ns() - start) / 1000))
        for stage in stages if split else []:
            start = time.monotonic_ns()
            stage.weights(m)
            samples.append((stage.first, "W", (time.monotonic_ns() - start) / 1000))
    return samples


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one layer for one microbatch: living after F (its input among them), after B (what W needs, gradients
    that B made among it), after W; the most at any moment; its output."""

    after_F: int
    after_B: int
    after_W: int
    most: int
    output: int


def held(model: Model, stages: list[Stage]) -> list[Held]:
    """Memory of every layer, each on its own, after one whole microbatch."""
    x, target = model.batch(0, 0)
    inputs: list[Tensor] = []
    for i, stage in enumerate(stages):
        inputs.append(x)
        x = stage.forward(-1, x, target, split=True)
        stage.live.clear()
        if i < len(stages) - 1 and x.dim() == 0:
            break
    return [_held(stage, x, target) for stage, x in zip(stages, inputs, strict=True)]


def _held(stage: Stage, example: Tensor, target: Tensor) -> Held:
    parameters = [p for layer in stage.layers for p in layer.parameters()]
    buffers = [b for layer in stage.layers for b in layer.buffers()]
    meter = LiveBytes([*parameters, *buffers, target, *(p.grad for p in parameters if p.grad is not None)])

    def now() -> int:
        meter.ignore(p.grad for p in parameters if p.grad is not None)
        return meter.now

    with meter:
        y = stage.forward(0, example.clone(), target, split=True)
        size = y.numel() * y.element_size()
        gradient = None
        if stage.loss is None:
            shape, kind = y.shape, y.dtype
            del y
            after_f = now()
            gradient = example.new_ones(shape, dtype=kind)
        else:
            del y
            after_f = now()
        stage.backward(0, gradient)
        del gradient
        after_b = now()
        stage.weights(0)
        after_w = now()
    return Held(after_f, after_b, after_w, meter.most, size)
