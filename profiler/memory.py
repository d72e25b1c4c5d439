"""What each layer keeps in memory from pass to pass. On a CPU and under fake tensors the lives of storages say it, on a GPU
the allocator does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.torch_private import storage_key
from zbsolve.models.model import Model


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes of one layer for one microbatch. after_F: they live after F, its input among them. after_B: they wait for W.
    after_W: they live then. transient: the most inside a pass beyond what lived before or after it. output: of its output.
    output_kept: of its output, what the layer itself needs later. input_unneeded: of its input, what it does not need itself
    (a stage keeps the input of its first layer all the same)."""

    after_F: int
    after_B: int
    after_W: int
    transient: int
    output: int
    output_kept: int
    input_unneeded: int

    def costs(self) -> dict[str, int]:
        """The same as fields of a Layer. B may leave more than it frees (output gradients): that is taken from B on."""
        return {
            "held_until_B": max(0, self.after_F - self.after_B),
            "held_until_W": min(self.after_F, self.after_B),
            "held_from_B": max(0, self.after_B - self.after_F),
            "output_bytes": self.output,
            "output_kept": self.output_kept,
            "input_unneeded": self.input_unneeded,
            "transient": self.transient,
        }


class Meter(Protocol):
    """Counts bytes that live. most: ever so far; it may be set back."""

    most: int

    @property
    def now(self) -> int:
        """Bytes that live now."""

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these, from now on."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> Any: ...


class Living(LiveBytes):  # type: ignore[no-untyped-call]
    """Notices what died before it counts what is new, so that `most` is exact."""

    def add(self, tensor: Tensor) -> None:
        """Count the storage of `tensor`, if it is new."""
        assert self.now >= 0
        super().add(tensor)


class AllocatedBytes:
    """The CUDA allocator's count, from when it was entered on. Gradients must be there before: nothing is ignored."""

    def __enter__(self) -> AllocatedBytes:
        torch.cuda.synchronize()
        self._base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.synchronize()

    @property
    def now(self) -> int:
        """Bytes allocated since it was entered."""
        return torch.cuda.memory_allocated() - self._base

    @property
    def most(self) -> int:
        """The most since it was last set back."""
        return torch.cuda.max_memory_allocated() - self._base

    @most.setter
    def most(self, value: int) -> None:
        """Set it back to what lives now, whatever the value."""
        torch.cuda.reset_peak_memory_stats()

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do: the allocator cannot, and what was there before is not counted."""


def held(model: Model, stages: Sequence[Stage]) -> list[LayerMemory]:
    """Memory of every layer by itself, in a microbatch that is not the first, so that gradients are there."""
    x, target = model.batch(0, 0)
    device = next((p.device for stage in stages for p in stage.parameters()), torch.device("cpu"))
    x, target = x.to(device), target.to(device)
    result = []
    for stage in stages:
        y = stage.forward(-1, x, target, split=True)
        stage.live.clear()
        result.append(_held(stage, x, target))
        x = y
    return result


def _held(stage: Stage, x: Tensor, target: Tensor) -> LayerMemory:
    parameters = [p for layer in stage.layers for p in layer.parameters()]
    for p in parameters:
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    if x.device.type == "cuda":
        return _metered(stage, x, target, AllocatedBytes())
    buffers = [b for layer in stage.layers for b in layer.buffers()]
    # A batch is there before the step, so it does not count, neither here nor in the executor.
    fixed = [
        *parameters,
        *buffers,
        target,
        *([x] if stage.first == 0 else []),
        *(p.grad for p in parameters if p.grad is not None),
    ]
    return _metered(stage, x, target, Living(fixed))


@dataclass(frozen=True, slots=True)
class _Output:
    """A stage's output. kept: bytes of it that the stage's own backward keeps. input_needed: whether it keeps its input."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: int
    input_needed: bool


def _output(stage: Stage, x: Tensor, target: Tensor) -> _Output:
    """What autograd saves shows it: a stage of one layer holds its input in any case."""
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(storage_key(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = stage.forward(-1, x, target, split=True)
    kept = y.numel() * y.element_size() if storage_key(y) in saved else 0
    found = _Output(tuple(y.shape), y.dtype, kept, storage_key(x) in saved)
    stage.live.clear()
    return found


def _metered(stage: Stage, example: Tensor, target: Tensor, meter: Meter) -> LayerMemory:
    output = _output(stage, example, target)
    last = stage.loss is not None
    with meter:
        with torch.no_grad():
            x = example if stage.first == 0 else example.clone().requires_grad_(example.requires_grad)
        before = meter.now
        y: Any = stage.forward(0, x, target, split=True)
        over = meter.most - max(before, meter.now)
        size = 0 if last else y.numel() * y.element_size()
        del x, y
        after_f = meter.now
        gradient = None if last else [torch.ones(output.shape, dtype=output.dtype, device=example.device)]
        before = meter.most = meter.now
        result = stage.backward(0, gradient)
        over = max(over, meter.most - max(before, meter.now))
        del gradient, result
        after_b = meter.most = meter.now
        stage.weights(0)
        over = max(over, meter.most - after_b)
        after_w = meter.now
    unneeded = 0 if output.input_needed or stage.first == 0 else example.numel() * example.element_size()
    return LayerMemory(after_f, after_b, after_w, max(0, over), size, 0 if last else output.kept, unneeded)
