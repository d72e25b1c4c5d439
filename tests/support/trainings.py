"""One job for training loops: optimizers, clipping, scaled losses, evaluations and checkpoints on ranks, each update held
against that of the unsplit model in one process.

`all_trained(rank, "tests.exec.test_x:TRAININGS", folder)`, which each rank calls, gives what it found, a row a training.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.base.values import full
from zbsolve.exec.check import reference, weight

from .exec_tools import largest, worst
from .trials import Trial, left_in, rows_here


def nothing(layers: Mapping[int, nn.Module], update: int, rank: int | None) -> None:
    """Gradients are as they were."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained.

    optimizer(parameters): a new one; None where a rank trains nothing. rates(optimizer): a schedule of its learning rate.
    updates: how many. each: steps whose gradients one update takes.
    clip: the largest norm of gradients. late: the same of `PostValidated`, which steps before the norm is known.
    scale: that a scaler of losses begins with.
    spoil(layers, update, rank): changes gradients before they are clipped; rank: None for the unsplit model.
    held_out: the step whose batch is evaluated after each update.
    saved: the update behind which it saves a checkpoint. after: the training of whose checkpoint it goes on.
    """

    trial: Trial
    optimizer: Callable[[list[nn.Parameter]], Any]
    rates: Callable[[Any], Any] | None = None
    updates: int = 3
    each: int = 1
    clip: float | None = None
    late: float | None = None
    scale: float | None = None
    spoil: Callable[[Mapping[int, nn.Module], int, int | None], None] = nothing
    held_out: int | None = None
    saved: int = 0
    after: str = ""


class Loop:
    """The loop of a pipeline; or, where `whole` is given, of the unsplit model beside it. first: updates before this loop's.
    rows: losses, norm, scale and evaluation of each update. amended: updates that were made anew."""

    def __init__(self, training: Training, pipe: Pipeline, whole: nn.ModuleList | None = None) -> None:
        self.training, self.pipe, self.whole, self.first = training, pipe, whole, 0
        self.layers = pipe.layers if whole is None else dict(enumerate(whole))
        self.optimizer = training.optimizer(list((pipe if whole is None else whole).parameters()))
        if training.late and whole is None:
            self.optimizer = PostValidated(pipe, self.optimizer, max_norm=training.late)
        self.rates = training.rates(self.optimizer) if training.rates else None
        kind: Any = ShardedGradScaler if whole is None else torch.amp.GradScaler
        self.scaler = kind("cpu", training.scale, growth_interval=3) if training.scale else None
        self.rows: list[list[Any]] = []
        self.amended = 0

    def save(self, path: Path) -> None:
        self.pipe.save(path, **self.objects)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint, whatever parameters are now."""
        with torch.no_grad():
            for parameter in self.pipe.parameters():
                parameter.add_(1.0)
        self.pipe.load(path, **self.objects)
        self.first = self.pipe.steps // self.training.each

    @property
    def objects(self) -> dict[str, Any]:
        """What a checkpoint has beside the model."""
        return {name: one for name in ("optimizer", "rates") if (one := getattr(self, name)) is not None}

    @property
    def seen(self) -> list[list[float]]:
        return [[getattr(one, "loss", one) for one in row] for row in self.rows]

    def until(self, update: int) -> None:
        """Train to so many updates."""
        while self.first + len(self.rows) < update:
            self.rows.append(self.update(self.first + len(self.rows)))
        if self.whole is None:
            self.pipe.finish()

    def update(self, number: int) -> list[Any]:
        """One update; a row of what is seen. (A loss that was asked for would keep this rank waiting.)"""
        how = self.training
        row, norm = [self.step(number * how.each + i) for i in range(how.each)], 0.0
        if how.spoil is not nothing and self.whole is None:
            self.pipe.wait_gradients()
        how.spoil(self.layers, number, dist.get_rank() if self.whole is None else None)
        if how.clip and self.scaler:
            self.scaler.unscale_(self.optimizer)
        row += [self.clip(how.clip)] if how.clip else []
        if how.late and self.whole is not None:
            norm = self.clip(how.late)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            row.append(self.scaler.get_scale())
        elif self.optimizer is not None and math.isfinite(norm):  # what is validated late skips such a step
            self.optimizer.step()
        if self.rates:
            self.rates.step()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return row if how.held_out is None else [*row, self.evaluate(how.held_out)]

    def step(self, number: int) -> Any:
        if self.whole is None:
            result = self.training.trial.step(self.pipe, number, self.scaler)
            last = getattr(self.optimizer, "last", None)
            self.amended += last is not None and last.amended
            return result
        scale = float(self.scaler.scale(torch.ones(()))) if self.scaler else 1.0
        return self.training.trial.add_gradients(self.whole, number, self.pipe, scale)

    def clip(self, most: float) -> float:
        if self.whole is None:
            return float(self.pipe.clip_grad_norm_(most))
        return float(nn.utils.clip_grad_norm_(self.whole.parameters(), most))

    def evaluate(self, number: int) -> float:
        """Where pipelines are coordinates of a mesh, they evaluate one batch together."""
        pipe, trial = self.pipe, self.training.trial
        places = range(pipe.mesh.places) if pipe.mesh else [pipe.place]
        if self.whole is None:
            trial.before(pipe.layers, pipe.place, number)
            return pipe.evaluate(*map(list, trial.batch(pipe.place, number)))
        losses = []
        for place in places:
            trial.before(self.layers, place, number)
            losses.append(reference(self.whole.eval(), trial.data(trial.batch(place, number)), trial.loss, backward=False))
        self.whole.train()
        return sum(losses) / len(losses)

    def held_against_whole(self) -> dict[str, Any]:
        """The largest relative differences of weights and of what was seen from the unsplit model's loop, made now."""
        whole = Loop(self.training, self.pipe, nn.ModuleList(self.training.trial.unsplit(sum(self.pipe.counts))))
        whole.until(self.first + len(self.rows))
        return {
            "weight": worst(self.pipe, whole.layers.values(), weight),
            "loss": far(self.seen, whole.seen[self.first :]),
            "left": left_in(self.pipe),
            "seen": self.seen,
            "amended": self.amended,
        }


def far(found: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """The largest relative difference; numbers that are not finite are the same ones or infinitely far."""
    pairs = [(a, b) for row, other in zip(found, right, strict=True) for a, b in zip(row, other, strict=True)]
    same = [a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs]
    return largest(0.0 if alike else abs(a - b) / abs(b) for (a, b), alike in zip(pairs, same, strict=True))


def bits_of(pipe: Pipeline) -> str:
    """A digest of this rank's parameters."""
    found = hashlib.sha256()
    for p in pipe.parameters():
        found.update(full(p.detach()).contiguous().numpy().tobytes())
    return found.hexdigest()


def trained(training: Training, pipe: Pipeline, folder: Path, title: str) -> dict[str, Any]:
    """A training and a digest of its parameters, in a folder of checkpoints."""
    loop = Loop(training, pipe)
    if training.after:
        loop.load(folder / training.after)
    if training.saved:
        loop.until(training.saved)
        loop.save(folder / title)
    loop.until(training.updates)
    return loop.held_against_whole() | {"bits": bits_of(pipe)}


def all_trained(
    rank: int, where: str, folder: str, run: Callable[[Training, Pipeline, Path, str], dict[str, Any]] = trained
) -> dict[str, Any]:
    """Of each training in which this rank has a part. where: "module:name" of a mapping from names to trainings. folder: for
    checkpoints. run: in place of a training alone."""
    rows = rows_here(rank, where)
    return {title: run(row, row.trial.pipeline(**more), Path(folder), title) for title, row, more in rows}
