"""Rounds: the model's layers, each as its own stage, run and timed exactly as the executor runs passes; layers sharded over
a mesh, by all its ranks together."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.values import constant, local_bytes, tensors_of, trained
from zbsolve.exec.choices import BACKENDS
from zbsolve.exec.feed import moved
from zbsolve.exec.graphs.auto import Parts, parts_by_name
from zbsolve.exec.layers import tie
from zbsolve.exec.mesh import PIPELINE, PipelineMesh, group_along, made_mesh, named_sizes, parallelized
from zbsolve.exec.run.torchrun import torchrun_environment
from zbsolve.exec.sides import SideValues
from zbsolve.exec.transport.format import Format
from zbsolve.exec.transport.wires import reason
from zbsolve.layer import INPUTS, TARGETS, Tied
from zbsolve.models.model import Model
from zbsolve.models.sides import Carried
from zbsolve.util.errors import BadInput, RunFailed

from .dataflow import Flow


@dataclass(frozen=True, eq=False)
class Spread:
    """This rank within a mesh. group: the ranks along all dimensions except pipeline and data, which run the same rounds;
    None: this rank alone. measures: whether this rank measures layers, which those of the first pipeline rank and the first
    data coordinate do."""

    mesh: PipelineMesh
    group: Any
    measures: bool

    @property
    def beside(self) -> bool:
        """Whether this rank is in another pipeline than the first."""
        return bool(self.mesh.place) or any(self.mesh.whole.get_local_rank(name) for name in self.mesh.others)

    def check(self, model: Model) -> None:
        """Raise BadInput where the model's function for this is missing."""
        if self.group is not None and model.parallelize is None:
            name = self.mesh.others[0]
            raise BadInput(f"profile --mesh: model '{model.name}' has no parallelize(stage, mesh), which {name} needs")

    def layers(self, model: Model, numbers: Sequence[int], layers: Sequence[nn.Module]) -> list[nn.Module]:
        """These layers, as one stage, after the model's `parallelize` was applied. Raises BadInput."""
        modules = dict(zip(numbers, layers, strict=True))
        if model.parallelize is not None:
            names = {i: str(i) for i in numbers}
            modules = parallelized({0: list(numbers)}, modules, names, self.mesh, model.parallelize)
        for group in model.tied:
            tie(modules, group)
        return [modules[i] for i in numbers]

    def agreed(self, value: bool) -> bool:
        """The value on the first of the ranks that measure together."""
        if self.group is None:
            return value
        verdict = torch.tensor([int(value)])
        try:
            dist.broadcast(verdict, group=self.group, group_src=0)
        except RuntimeError as error:
            raise RunFailed(f"profile: waiting for the other ranks ({self.mesh.coordinate} here): {reason(error)}") from None
        return bool(verdict)


def joined(text: str, timeout: float, device: torch.device) -> Spread:
    """This rank, which computes on `device`, in the mesh described by `text`. Its process groups time out after `timeout`
    seconds. All of torchrun's ranks call this. Raises BadInput."""
    place, sizes = torchrun_environment(), named_sizes(text)
    wanted = math.prod(sizes.values())
    if place is None:
        raise BadInput(f"--mesh {text}: start profile under torchrun --nproc-per-node {wanted}")
    if place[1] != wanted:
        raise BadInput(f"profile --mesh {text}: it has {wanted} ranks, but torchrun started {place[1]}")
    limit = timedelta(seconds=timeout)
    if not dist.is_initialized():
        dist.init_process_group(BACKENDS[device.type], init_method="env://", timeout=limit)
    mesh = PipelineMesh.of(made_mesh(sizes if PIPELINE in sizes else {PIPELINE: 1, **sizes}, limit, device.type))
    return Spread(mesh, group_along(mesh.whole, mesh.others), not mesh.place and not mesh.whole.get_local_rank(PIPELINE))


def bytes_here(model: Model, stages: Sequence[Stage]) -> tuple[tuple[int, ...], Tied]:
    """Bytes of each layer's parameters on this rank, and of each parameter that several layers share, with their numbers.
    stages: all layers of the model, one each."""
    layers = [stage.layers[0] for stage in stages]
    sizes = tuple(sum(local_bytes(p) for p in layer.parameters()) for layer in layers)
    tied = []
    for group in model.tied:
        holders = tuple(dict.fromkeys(place[0] for place in group))
        if len(holders) > 1:
            tied.append((local_bytes(layers[holders[0]].get_parameter(group[0][1])), holders))
    return sizes, tuple(tied)


Sample = tuple[int, str, float, float]  # layer, kind, µs on the device, µs on the host
Feed = Callable[[int, int], tuple[Any, Any]]  # microbatch, step → input of the first stage, target
IN_FLIGHT = 2  # microbatches at a time, at least, as in a pipeline
COLD_FACTOR = 2  # times the cache is touched between two passes of one layer: caches do not always drop what is oldest
MAX_COPIES = 64
TURNS = ("split", "fused", "recompute")


class PassTimer:
    """Times passes: on a GPU between two events on the stream, and on the host until everything is launched. On a CPU the
    host does the work, so both times are the same. at: the layer and the kind of the pass that runs, or ran last."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.at: tuple[int, str] = (0, "F")
        self._rows: list[tuple[int, str, Any, float]] = []

    def run(self, layer: int, kind: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """What `call` returns for the other arguments, timed as a pass of `layer`."""
        self.at = layer, kind
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.cuda else []  # type: ignore[no-untyped-call]
        if events:
            events[0].record()
        start = time.monotonic_ns()
        result = call(*args, **named)
        host = (time.monotonic_ns() - start) / 1000
        if events:
            events[1].record()
        self._rows.append((layer, kind, events, host))
        return result

    def drain(self) -> list[Sample]:
        """What was timed since the last time. This waits for a GPU once."""
        if self.cuda:
            torch.cuda.synchronize()
        rows, self._rows = self._rows, []
        return [(i, kind, 1000 * ev[0].elapsed_time(ev[1]) if ev else host, host) for i, kind, ev, host in rows]


BY_LAYERS = parts_by_name("layers")


def stages_of(model: Model, taken: Sequence[int]) -> list[Stage]:
    """The layers `taken`, each as a stage whose `first` is the layer's number in the model, split layer by layer."""
    return [_stage(model, i, layer, BY_LAYERS) for i, layer in zip(taken, model.build(taken), strict=True)]


def built(model: Model, numbers: Sequence[int], device: torch.device) -> list[nn.Module]:
    """These layers, created on the device: a GPU draws random numbers at once that take a core a minute."""
    with device:
        layers = model.build(numbers)
    # Some were made before the model was named. (Fake tensors, which are the CPU's, do not move.)
    return layers if device.type == "cpu" else [layer.to(device) for layer in layers]


def rotated(
    model: Model,
    taken: Sequence[int],
    inputs: Sequence[Format],
    device: torch.device,
    cache: int,
    spread: Spread | None = None,
    parts: Parts = BY_LAYERS,
) -> list[list[Stage]]:
    """The layers `taken` as stages, in several copies that take turns. inputs: the input of each layer of the model. spread:
    the mesh over which each copy is sharded. parts: how the backward of layers is split.

    There are as many copies as needed so that a pass finds nothing of its layer in a cache of `cache` bytes (0: one copy),
    as in training, where other layers ran in between.
    """
    layers = built(model, taken, device)
    size = sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters())
    size += sum(inputs[i].nbytes for i in taken)
    count = min(MAX_COPIES, max(1, ceil(COLD_FACTOR * cache / max(1, size))))
    copies = [layers, *(copy.deepcopy(layers) for _ in range(count - 1))]
    if spread is not None:
        copies = [spread.layers(model, taken, copied) for copied in copies]
    return [[_stage(model, i, layer, parts) for i, layer in zip(taken, copied, strict=True)] for copied in copies]


def _stage(model: Model, i: int, layer: nn.Module, parts: Parts) -> Stage:
    loss = model.loss if i == len(model.layers) - 1 else None
    return Stage([layer], i, loss, 1.0, parts=parts([layer], i, loss))


def batches(model: Model, device: torch.device) -> Feed:
    """Feeds the model's own microbatches, on `device`: those shaped like the first one, and the first instead of others."""
    first = model.batch(0, 0)

    def feed(microbatch: int, step: int) -> tuple[Any, Any]:
        batch = model.batch(microbatch, step)
        x, target = batch if _shapes(batch) == _shapes(first) else first
        return moved(x, device), moved(target, device)

    return feed


def of_two_kinds(model: Model) -> bool:
    """Whether the first two microbatches differ in shape."""
    return _shapes(model.batch(0, 0)) != _shapes(model.batch(1, 0))


def _shapes(batch: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_of(batch)]


def alone(model: Model, i: int, through: Flow, device: torch.device) -> Feed:
    """Feeds layer i by itself: with random values for an input that another layer would produce, as described in
    `through`."""
    own = batches(model, device)
    if i == 0:
        return own
    return lambda microbatch, step: (through.example(i, torch.randn, device), own(microbatch, step)[1])


def rounds(sets: Sequence[list[Stage]], feed: Feed, timer: PassTimer, recompute: bool = False) -> Iterator[list[Sample]]:
    """An endless series of rounds, alternating B and W, fused BW, and (`recompute`) X. Yields the samples of each.

    sets: copies of the stages (see `rotated`); each microbatch uses the next. Gradients exist and are accumulated into, as
    in the middle of a training step.
    """
    step = 0
    turns = TURNS if recompute else TURNS[:2]
    while True:
        inputs = [feed(m, step) for m in range(max(IN_FLIGHT, len(sets)))]
        yield _round(sets, inputs, timer, turns[step % len(turns)])
        step += 1


Samples = dict[str, list[float]]  # kind → µs


def sampled(turns: Iterator[Sequence[Sample]], seconds: float, counts: tuple[int, int, int]) -> dict[int, Samples]:
    """Layer → kind → samples, µs on the device, of rounds for so many seconds. counts: of warm-up rounds, of the fewest and
    of the most that are sampled."""
    warm, least, most = counts
    for _ in range(warm):
        next(turns)
    samples: dict[int, Samples] = {}
    begin = time.monotonic()
    for done in range(most):
        if done >= least and time.monotonic() - begin > seconds:
            break
        for layer, kind, us, _ in next(turns):
            samples.setdefault(layer, {}).setdefault(kind, []).append(us)
    return samples


# The kinds that count in each turn. The forward of a fused or recomputed backward does not: problems have a single F. A
# backward after X is like any other.
SAMPLED = {"split": {"F", "B", "W"}, "fused": {"BW"}, "recompute": {"X"}}


def _round(sets: Sequence[list[Stage]], inputs: list[tuple[Any, Any]], timer: PassTimer, turn: str) -> list[Sample]:
    split, again, sides = turn != "fused", turn == "recompute", SideValues({each.first: each for each in sets[0]})
    for m, (x, target) in enumerate(inputs):
        read = {} if isinstance(x, Carried) else {INPUTS: constant(x), TARGETS: target}
        for stage in sets[m % len(sets)]:
            x = sides.into(stage.first, m, x, read)
            x = timer.run(stage.first, "F", stage.forward, m, x, target, split=split, recompute=again)
            x = sides.out(stage.first, m, x)
        last = x
    for m in range(len(inputs)):
        stages = sets[m % len(sets)]
        gradient: Any = None if stages[-1].loss is not None else [torch.ones_like(tensor) for tensor in trained(last)]
        for stage in reversed(stages):
            if again:
                timer.run(stage.first, "X", stage.recompute, m)
            gradient = sides.back_into(stage.first, m, gradient)
            gradient = timer.run(stage.first, "B" if split else "BW", stage.backward, m, gradient)
            gradient = sides.back_out(stage.first, m, gradient)
        for stage in stages if split else []:
            timer.run(stage.first, "W", stage.weights, m)
    return [row for row in timer.drain() if row[1] in SAMPLED[turn]]


def updates(
    sets: Sequence[list[Stage]], make: Callable[[list[nn.Parameter]], Any], timer: PassTimer, times: int
) -> list[Sample]:
    """Samples of the optimizer step of every layer, `times` each after one that creates its state. Copies take turns, and
    only one layer's state exists at a time. make: creates an optimizer of parameters."""
    rows: list[Sample] = []
    for same in zip(*sets, strict=True):
        trained = [[p for p in stage.parameters() if p.grad is not None] for stage in same]
        if not all(trained):
            continue
        optimizers = [make(parameters) for parameters in trained]
        for optimizer in optimizers:
            optimizer.step()
        for i in range(times):
            timer.run(same[0].first, "U", optimizers[i % len(optimizers)].step)
        rows += timer.drain()
    return rows
