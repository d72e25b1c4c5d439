"""A stage's step with and without offload on one device: gradients, bytes and times."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from zbsolve import Problem, Schedule, pipeline
from zbsolve.build import with_offload
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.handlers import HANDLERS, Data, RankState
from zbsolve.exec.handlers.offload import buffers_of
from zbsolve.exec.interpreter import Interpreter
from zbsolve.exec.lowering import lower
from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.offload.rank import Offload

from .gpu_splits import Sizes, blocks

MICROBATCHES = 8
AHEAD = 2  # microbatches that come back before their backward, or are not gone yet
SIZES = Sizes(width=2048, heads=16, blocks=2, batch=2, length=1024, rounds=10)
TINY = Sizes(width=32, heads=4, blocks=1, batch=2, length=16, rounds=2)


def all_forwards_first(offload: bool) -> Schedule:
    """One stage: all its forwards, then all backwards. With offload what a forward keeps leaves until two microbatches
    before its backward; the last two stay."""
    problem = pipeline(300, 300, 300, placement=(0,), microbatches=MICROBATCHES, held_until_W=100)
    names = [f"0F{m}" for m in range(MICROBATCHES)]
    names += [f"0{kind}{m}" for m in range(MICROBATCHES) for kind in "BW"]
    if not offload:
        return Schedule(problem, {"compute:0": tuple(names)})
    away = range(AHEAD, MICROBATCHES)
    made: Problem = with_offload(problem, 250, 250, which=[[m in away for m in range(MICROBATCHES)]])
    order = {"compute:0": names, "d2h:0": [f"0O{m}" for m in away], "h2d:0": [f"0R{m}" for m in away]}
    syncs = [(f"0W{m - AHEAD}", f"0R{m}") for m in away] + [(f"0O{m}", f"0F{m + 2}") for m in away if m + 2 in away]
    return Schedule(made, {stream: tuple(row) for stream, row in order.items()}, tuple(syncs))


class OneStage:
    """A stage of transformer blocks on a device, and its step by a schedule of one rank."""

    def __init__(self, schedule: Schedule, device: str, sizes: Sizes, dtype: torch.dtype = torch.float32) -> None:
        how = {"device": device, "dtype": dtype}
        self.device = torch.device(device) if device == "cpu" else torch.device(device, torch.cuda.current_device())
        self.layers, program = blocks(sizes, how), lower(schedule)[0]
        stage = Stage(self.layers, 0, _loss, 1 / MICROBATCHES)
        buffers = buffers_of(program)
        self.offload = Offload(self.device, buffers, 60.0) if buffers else None
        self.interpreter = Interpreter(program, RankState({0: stage}, offload=self.offload), _NoTransport())
        torch.manual_seed(0)
        x = torch.randn((MICROBATCHES, sizes.batch, sizes.length, sizes.width), **how)
        self.data = Data(dict(enumerate(x)), dict(enumerate(x.flip(0))))

    def step(self, meter: LiveBytes | None = None) -> None:
        """One step; it is done when this returns."""
        self.interpreter.begin(self.data)
        self.interpreter.run_all(self.interpreter.program.actions, meter)
        for action in self.interpreter.program.actions:
            ended = HANDLERS[action.kind].ended
            if ended is not None:
                ended(self.interpreter.state, action)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gradients(self) -> list[Tensor]:
        """Of all parameters, in order."""
        return [p.grad for layer in self.layers for p in layer.parameters() if p.grad is not None]

    def peak(self) -> int:
        """The most bytes of activations in one step: the allocator's own count on a GPU, else those of live storages."""
        if self.device.type != "cuda":
            meter = LiveBytes([p for layer in self.layers for p in layer.parameters()])
            meter.ignore([*self.gradients(), *self.data.inputs.values(), *self.data.targets.values()])
            with meter:
                self.step(meter)
            return meter.most
        torch.cuda.reset_peak_memory_stats(self.device)
        base = torch.cuda.memory_allocated(self.device)
        self.step()
        return torch.cuda.max_memory_allocated(self.device) - base


class _NoTransport:
    """A rank alone exchanges no messages."""

    def post(self, message: Any) -> None:
        raise AssertionError(message)

    take = send = post


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def with_and_without(device: str, sizes: Sizes, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """By name (kept, offloaded): peak bytes and the samples of a step's wall time, µs. differs: the largest difference of a
    gradient, as a share of the gradient's largest value."""
    made = {name: OneStage(all_forwards_first(name == "offloaded"), device, sizes, dtype) for name in ("kept", "offloaded")}
    rows: dict[str, Any] = {}
    for name, one in made.items():
        one.step()
        rows[name] = {"peak_bytes": one.peak(), "samples_us": []}
    differs = max(
        float((a - b).abs().max() / b.abs().max())
        for a, b in zip(made["offloaded"].gradients(), made["kept"].gradients(), strict=True)
    )
    for _ in range(sizes.rounds):
        for name, one in made.items():
            began = time.perf_counter_ns()
            one.step()
            rows[name]["samples_us"].append((time.perf_counter_ns() - began) / 1000)
    return {"rows": rows, "differs": differs}
