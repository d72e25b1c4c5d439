"""Rounds: the model's layers, each a stage of its own, run and timed exactly as the executor runs passes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from torch import Tensor

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
