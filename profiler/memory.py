"""Each layer's memory between passes. On a CPU and with fake tensors it is found from the lifetimes of storages, on a GPU
from the allocator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zbsolve.exec.backward.stage import Live, Stage
from zbsolve.exec.base.torch_private import persistent_buffers, storage_key
from zbsolve.exec.base.values import constant, copied, is_dtensor, local_bytes, tensors_of, trained
from zbsolve.exec.graphs.auto import graph_saved
from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.sides import SideValues
from zbsolve.exec.transport.format import Format
from zbsolve.models.model import Model
from zbsolve.models.sides import Carried, row_of
from zbsolve.partition.layer import INPUTS, TARGETS
from zbsolve.util.errors import BadInput

from .dataflow import Saving, batch_of

SETTLE_SECONDS = 0.002  # until a thread has released its collective's output


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes of one layer for one microbatch. after_F: live after F, including its input. after_B: waiting for W. after_W:
    live after W. transient: the peak inside a pass beyond what lives before or after it. output: of its output, as a
    message. kept: for each tensor of its output, what the layer itself needs later. unneeded: for each tensor of its input,
    what it does not need itself (a stage keeps the inputs of its first layer that get a gradient in any case). frozen:
    parameters that are not trained. buffers: those in a state dict."""

    after_F: int
    after_B: int
    after_W: int
    transient: int
    output: int
    kept: tuple[int, ...]
    unneeded: tuple[int, ...]
    frozen: int = 0
    buffers: int = 0

    def costs(self, behind: LayerMemory | None = None) -> dict[str, int]:
        """The same as fields of a Layer. If B leaves more than it frees (output gradients), that counts from B on.

        behind: of the next layer. Of several tensors between the two, this layer keeps some, and a stage that begins with
        the next one keeps others. Within one stage each counts only once, so here they count as the output that is kept.
        """
        kept = sum(self.kept)
        if behind is not None and behind.unneeded and len(self.kept) > 1:
            kept = sum(max(pair) for pair in zip(self.kept, behind.unneeded, strict=True))
        return {
            "held_until_B": max(0, self.after_F - self.after_B),
            "held_until_W": min(self.after_F, self.after_B),
            "held_from_B": max(0, self.after_B - self.after_F),
            "output_bytes": self.output,
            "output_kept": kept,
            "input_unneeded": sum(self.unneeded),
            "transient": self.transient,
            "frozen_bytes": self.frozen,
            "buffer_bytes": self.buffers,
        }


class AllocatedBytes:
    """The CUDA allocator's count since entry. Gradients must exist before, since no tensor can be ignored."""

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
        """The peak since it was last reset."""
        return torch.cuda.max_memory_allocated() - self._base

    @most.setter
    def most(self, value: int) -> None:
        """Reset the peak to what lives now, whatever the value."""
        torch.cuda.reset_peak_memory_stats()

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: the allocator cannot ignore tensors, and what existed before entry is not counted."""


Meter = LiveBytes | AllocatedBytes


def costs_of(rows: Sequence[LayerMemory]) -> list[dict[str, int]]:
    """The fields of all Layers of a model, in order."""
    return [layer_memory.costs(behind) for layer_memory, behind in zip(rows, [*rows[1:], None], strict=True)]


class Settled(LiveBytes):  # type: ignore[no-untyped-call]
    """Waits before it counts: a collective's output may live a moment longer, in the thread that ran it."""

    @property
    def now(self) -> int:
        time.sleep(SETTLE_SECONDS)
        return super().now


def held(
    model: Model, stages: Sequence[Stage], living: Callable[[Iterable[Tensor]], Meter] = LiveBytes
) -> list[LayerMemory]:
    """Every layer's memory by itself, in a microbatch after the first, so that gradients exist. living: counts bytes on a
    CPU, ignoring these tensors."""
    device = next((p.device for stage in stages for p in stage.parameters()), torch.device("cpu"))
    x, target = batch_of(model, device=device)
    result, sides = [], SideValues({stage.first: stage for stage in stages})
    read = {INPUTS: constant(x), TARGETS: target}
    for stage in stages:
        x = sides.into(stage.first, -1, x, read)
        y = stage.forward(-1, x, target, split=True)
        stage.live.clear()
        result.append(held_by(stage, x, target, living))
        x = sides.out(stage.first, -1, y)
    return result


def least_held(model: Model, stages: Sequence[Stage], times: int) -> list[LayerMemory]:
    """The minimum of several measurements, for stages that run collectives (see `Settled`)."""
    rows = zip(*(held(model, stages, Settled) for _ in range(times)), strict=True)
    return [min(row, key=lambda used: (used.after_F + used.after_B + used.after_W, used.transient)) for row in rows]


def held_by(stage: Stage, x: Any, target: Any, living: Callable[[Iterable[Tensor]], Meter] = LiveBytes) -> LayerMemory:
    """The memory of one stage with input x."""
    parameters = [p for layer in stage.layers for p in layer.parameters()]
    for p in parameters:
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    frozen = sum(local_bytes(p) for p in parameters if not p.requires_grad)
    kept = sum(local_bytes(b) for layer in stage.layers for b in persistent_buffers(layer))
    if any(tensor.device.type == "cuda" for tensor in tensors_of(x)):
        return replace(_metered(stage, x, target, AllocatedBytes()), frozen=frozen, buffers=kept)
    own = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    own += [buffer for layer in stage.layers for buffer in layer.buffers()]
    # A batch exists before the step, so it does not count, neither here nor in the executor.
    fixed = [*own, *tensors_of(target), *(tensors_of(x) if stage.first == 0 else [])]
    return replace(_metered(stage, x, target, living(fixed)), frozen=frozen, buffers=kept)


def _borders(
    stage: Stage, x: Any, target: Any
) -> tuple[Format, tuple[int, ...], tuple[int, ...], list[tuple[Any, torch.dtype]]]:
    """What a layer keeps of its inputs and outputs, except side inputs: the format of its output; `kept` and `unneeded` of
    `LayerMemory`; shapes and types of all outputs that get a gradient. Found from what autograd or a graph saves. With
    autograd a one-layer stage also holds the inputs that get a gradient, in any case."""
    saving = Saving()
    with saving.watched():
        y = stage.forward(-1, x, target, split=True)
    saved = saving.keys()
    if any(map(is_dtensor, tensors_of(y))):
        raise BadInput(f"layer {stage.first} hands on a DTensor: profile measures layers that hand on local tensors")
    live = stage.live.pop(-1)
    graphs = [graph_saved(kept) for kept in live.kept] if isinstance(live, Live) else []
    saved |= {storage_key(tensor) for graph in graphs for tensor in graph or []}
    # The batch and side inputs belong to no layer, even one that passes them on.
    saved -= {storage_key(tensor) for tensor in tensors_of(x if stage.first == 0 else getattr(x, "sides", ()))}
    row, y_row = row_of(x), row_of(y)
    inputs = [] if stage.first == 0 or graphs[0] is not None else tensors_of(row)
    kept = tuple(t.nbytes if storage_key(t) in saved else 0 for t in tensors_of(y_row))
    unneeded = tuple(t.nbytes if t.requires_grad and storage_key(t) not in saved else 0 for t in inputs)
    makes = [(tuple(t.shape), t.dtype) for t in trained(y)]
    return Format.of(y_row), kept, unneeded or (0,) * len(tensors_of(row)), makes


def _metered(stage: Stage, inputs: Any, target: Any, meter: Meter) -> LayerMemory:
    form, kept, unneeded, makes = _borders(stage, inputs, target)
    last = stage.loss is not None
    device = next(tensor.device for tensor in tensors_of(inputs))
    with meter:
        meter.ignore(tensors_of(inputs))
        with torch.no_grad():
            row = row_of(inputs) if stage.first == 0 else copied(row_of(inputs))
            # Side inputs belong to no layer: a rank holds each once, however many layers take it.
            x = Carried(row, inputs.sides) if isinstance(inputs, Carried) else row
        before = meter.now
        y: Any = stage.forward(0, x, target, split=True)
        over = meter.most - max(before, meter.now)
        del x, y, row
        after_f = meter.now
        gradients = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype in makes]
        before = meter.most = meter.now
        result = stage.backward(0, None if last else gradients)
        over = max(over, meter.most - max(before, meter.now))
        del gradients, result
        after_b = meter.most = meter.now
        stage.weights(0)
        over = max(over, meter.most - after_b)
        after_w = meter.now
    size, kept = (0, ()) if last else (form.nbytes, kept)
    return LayerMemory(after_f, after_b, after_w, max(0, over), size, kept, unneeded)
