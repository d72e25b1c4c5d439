"""One job for whatever the executor runs: steps of any problem on ranks, held against the unsplit model in one process.

`on_ranks(4, TRIED, "tests.exec.test_x:TRIALS")` gives what each rank found, a row a trial. A trial of fewer ranks than there
are has the first of them. Training loops are in `trainings`.

Other jobs lie beside their tests. They ask what a comparison with the unsplit model does not show: how many bytes are held;
whether bits are the same, with a barrier and without; who waits for whom; what is refused, in which words; what is left
where ranks fail (`exec_failing`); how more or fewer ranks go on from a checkpoint; how torch's own runtime runs an order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbsolve import Problem
from zbsolve.exec import Pipeline
from zbsolve.exec.backward.layer_split import run_layers
from zbsolve.exec.base.values import tensors_of
from zbsolve.exec.check import difference, reference
from zbsolve.exec.feed import first_tensor, step_seed
from zbsolve.exec.handlers import Data
from zbsolve.exec.sharding.rank import Sharding
from zbsolve.models.sides import batch_with, row_of

from .exec_ranks import LIMIT
from .exec_tools import largest, random_schedule, worst

TRIED = "tests.support.trials:tried"
DIFFERENCES = ("gradient", "weight", "loss")
Batches = tuple[Sequence[Any], Sequence[Any]]


def nothing(layers: Mapping[int, nn.Module], place: int, step: int) -> None:
    """Layers are as they were."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is tried.

    problem: a problem, whose passes run in an order drawn with `order`; or a schedule, or a rank's part of one.
    layers(numbers): these layers of the model, alike wherever they are built.
    batch(place, step): inputs and targets of the pipeline at this place of those beside each other, a microbatch each; or
    tensors, which the pipeline splits and the unsplit model does not.
    options: of `Pipeline`; a function where they need process groups, which all ranks call together.
    wrap: changes the layers that the pipeline gets. whole: the unsplit model, where it is not just all layers. listed: the
    pipeline gets that model too, so tied layers are found.
    before(layers, place, step): changes the layers before a step, those of this rank and those of the unsplit model.
    steps: whose gradients add up; each: they do not, and each step is compared by itself.
    uneven: microbatches differ in rows, which all count alike; only ranks that need a batch have it.
    scaler(): a new one of the loss. around(): what steps and the unsplit model run in.
    """

    problem: Any
    layers: Callable[[list[int]], list[nn.Module]]
    batch: Callable[[int, int], Batches]
    loss: Any = nn.functional.mse_loss
    order: int = 0
    options: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    wrap: Callable[[list[nn.Module]], Any] | None = None
    whole: Callable[[], list[nn.Module]] | None = None
    listed: bool = False
    before: Callable[[Mapping[int, nn.Module], int, int], None] = nothing
    steps: int = 1
    each: bool = False
    uneven: bool = False
    scaler: Callable[[], Any] | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def schedule(self) -> Any:
        return random_schedule(self.problem, self.order) if isinstance(self.problem, Problem) else self.problem

    def pipeline(self, **more: Any) -> Pipeline:
        """This rank's part; all ranks make it together."""

        def wrapped(numbers: list[int]) -> list[nn.Module]:
            made = self.layers(numbers)
            self.wrap(made)  # type: ignore[misc]
            return made

        options = self.options() if callable(self.options) else self.options
        how: dict[str, Any] = {"loss": self.loss, "timeout": LIMIT, **options, **more}
        given = self.whole() if self.listed and self.whole else wrapped if self.wrap else self.layers
        layers = how.pop("layers", given)
        return Pipeline(layers, how.pop("schedule", None) or self.schedule(), **how)

    def unsplit(self, count: int) -> list[nn.Module]:
        """The model in one process."""
        return self.whole() if self.whole else self.layers(list(range(count)))

    def data(self, batch: Batches, seed: int = 0, factor: float = 1.0) -> Data:
        """What the unsplit model gets of a batch. factor: of the losses."""
        inputs, targets = ([part] if isinstance(part, Tensor) else part for part in batch)
        rows = [len(first_tensor(y)) if self.uneven else 1 for y in targets]
        shares = {m: factor * n * len(rows) / sum(rows) for m, n in enumerate(rows)}
        return Data(dict(enumerate(inputs)), dict(enumerate(targets)), seed, shares)

    def step(self, pipe: Pipeline, step: int, scaler: Any = None) -> Any:
        """A step with the batch of this pipeline."""
        self.before(pipe.layers, pipe.place, step)
        given: list[Any] = [part if isinstance(part, Tensor) else list(part) for part in self.batch(pipe.place, step)]
        if self.uneven:
            given = [part if there else None for part, there in zip(given, (pipe.inputs, pipe.targets), strict=True)]
        with self.around():
            return pipe.step(*given, uneven=self.uneven and not pipe.cutting.sizes, scaler=scaler)

    def add_gradients(self, whole: Sequence[nn.Module], step: int, pipe: Pipeline, scale: float = 1.0) -> float:
        """Those of a step with the batches of all pipelines go into the unsplit model; the loss of the batch of `pipe`.
        scale: of the gradients."""
        places, losses = places_of(pipe), []
        for place in range(places):
            self.before(dict(enumerate(whole)), place, step)
            seed = step_seed(pipe.seed, step) + place * len(pipe.microbatches) * pipe.cutting.count
            with self.around():
                value = reference(whole, self.data(self.batch(place, step), seed, scale / places), self.loss)
            losses.append(value * places / scale)
        return losses[pipe.place]

    def ran(self, pipe: Pipeline) -> dict[str, Any]:
        """The largest relative differences of gradients and of losses on this rank; what is left behind the steps."""
        whole, gradients, losses = self.unsplit(sum(pipe.counts)), list[float](), list[float]()
        for step in range(self.steps):
            scaler = self.scaler and self.scaler()
            loss = self.step(pipe, step, scaler).loss
            right = self.add_gradients(whole, step, pipe, scaler.get_scale() if scaler else 1.0)
            losses.append(abs(loss - right) / abs(right))
            if self.each or step == self.steps - 1:
                pipe.wait_gradients()
                gradients.append(worst(pipe, whole))
            for one in (pipe.module, nn.ModuleList(whole)) if self.each else ():
                one.zero_grad()
        return {"gradient": largest(gradients), "loss": largest(losses), "left": left_in(pipe)}

    def clipped(self, pipe: Pipeline, most: float, kind: float = 2.0) -> dict[str, float]:
        """After a step, without a wait for gradients: their norm of this kind, the unsplit model's norm, and how far the
        clipped gradients are from the unsplit model's."""
        pipe.module.zero_grad()
        self.step(pipe, 0)
        norm, whole = float(pipe.clip_grad_norm_(most, kind)), self.unsplit(sum(pipe.counts))
        self.add_gradients(whole, 0, pipe)
        right = nn.utils.clip_grad_norm_(nn.ModuleList(whole).parameters(), most, kind)
        return {"norm": norm, "right": float(right), "worst": worst(pipe, whole)}

    def evaluated(self, pipe: Pipeline, batches: Iterable[Batches], outputs: bool = True) -> float:
        """The largest relative difference of evaluations and their outputs from those of the unsplit model."""
        whole, apart = [layer.eval() for layer in self.unsplit(sum(pipe.counts))], list[float]()
        for inputs, targets in batches:
            right = reference(whole, self.data((inputs, targets)), self.loss, backward=False)
            apart.append(abs(pipe.evaluate(list(inputs), list(targets) if pipe.targets else None) - right) / abs(right))
            if outputs:
                with torch.no_grad():
                    wanted = [row_of(run_layers(whole, batch_with(whole, x, None), 0, 0)) for x in inputs]
                found = pipe.forward(list(inputs), everywhere=True)
                pairs = zip(tensors_of(list(found)), tensors_of(wanted), strict=True)
                apart += [difference(a, b) for a, b in pairs]
        return largest(apart)


def places_of(pipe: Pipeline) -> int:
    """How many pipelines have a batch of their own."""
    if pipe.mesh is not None:
        return pipe.mesh.places
    if pipe.replicas is not None:
        return dist.get_world_size(pipe.replicas)
    return next((len(part.ranks) for part in pipe.parts if isinstance(part, Sharding)), 1)


def left_in(pipe: Pipeline) -> int:
    """Microbatches that stages still hold, and bytes that features do."""
    return sum(len(stage.live) for stage in pipe.stages.values()) + sum(p.held_bytes() + p.host_bytes() for p in pipe.parts)


@cache
def mesh_of(**sizes: int) -> Any:
    """The mesh of all ranks with these dimensions; all ranks ask for it together."""
    return dist.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@cache
def first_ranks(count: int) -> Any:
    """The process group of the first ranks; all ranks ask for it together."""
    return dist.new_group(list(range(count)))


def rows_here(rank: int, where: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Those of a mapping "module:name", or of a function that makes it, from names to trials (or what has one) in which this
    rank has a part, each with more options of its pipeline."""
    module, _, name = where.partition(":")
    rows = getattr(importlib.import_module(module), name)
    for title, row in (rows() if callable(rows) else rows).items():
        trial, ranks, more = getattr(row, "trial", row), dist.get_world_size(), {}
        problem = getattr(trial.problem, "problem", trial.problem)
        if not callable(trial.options) and isinstance(problem, Problem) and problem.ranks < ranks:
            ranks, more = problem.ranks, {"group": first_ranks(problem.ranks)}
        if rank < ranks:
            yield title, row, more


def tried(rank: int, where: str, run: Callable[[Trial, Pipeline], Any] = Trial.ran) -> dict[str, Any]:
    """Of each trial in which this rank has a part. where: "module:name" of a mapping from names to trials. run: in place of
    a trial's steps."""
    return {title: run(trial, trial.pipeline(**more)) for title, trial, more in rows_here(rank, where)}


def too_far(ranks: Sequence[Mapping[str, Mapping[str, Any]]], limit: float, **limits: float) -> dict[str, Any]:
    """What ranks found of trials that are further from the unsplit model than they may be, or leave something. limits: of
    single trials."""
    return {
        f"rank {rank}, {name}": row
        for rank, rows in enumerate(ranks)
        for name, row in rows.items()
        if not all(row.get(what, 0.0) <= limits.get(name, limit) for what in DIFFERENCES) or row["left"]
    }
