"""Slices on one stage: which slice runs, where it begins, the keys and values that it leaves, and what is compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...build.untrained import untrained_stages
from ...problem import Problem
from ...util.errors import BadInput, RunFailed, one_line
from ..backward.layer_split import Loss
from ..backward.passes import HANDLERS as PLAIN
from ..backward.passes import has_backward
from ..backward.stage import Stage
from ..base.handler import Graph
from ..base.part import Part, RankState, Run
from ..base.program import Action
from ..base.torch_private import without_modes
from ..base.values import copied, leaves_of
from ..connecting import Connecting
from .comparing import Sequences, compare
from .cutting import Cutting, SliceLoss, join_sequence
from .store import SliceStore


class StageSlices:
    """The slices of a stage's microbatches, numbered as parts (see `cutting`). Where a slice begins follows from the lengths
    of the activations before it: tensors (batch, length, …). compares: after steps 1, 2, 4, 8, …, two microbatches, other
    ones each time, are compared with whole sequences; after other steps, microbatches that are longer than all before, or
    that run with layers newly in training mode. Until then their activations are kept, in copies that no meter counts."""

    def __init__(self, cutting: Cutting, compares: bool = True) -> None:
        self.cutting, self.compares = cutting, compares
        self.store = SliceStore(cutting.count)
        self._ends: dict[int, list[int]] = {}
        self._given: dict[int, list[Any]] = {}  # microbatch → activations and targets of its slices
        self._begun, self._next, self._steps = 0, 0, 1  # microbatches of this step; the first to compare; the step's number
        self._seen: dict[tuple[bool, ...], int] = {}  # see `_state` → tokens of the longest first slice
        self._trained = True

    @contextmanager
    def forward(self, stage: Stage, part: int, x: Any, target: Any) -> Iterator[None]:
        """Run a slice's forward on the activations `x` inside."""
        microbatch, number = divmod(part, self.cutting.count)
        if self.compares:
            self._note(stage, microbatch, number, x, target)
        if not number:  # drop what a failed step has left
            self.store.drop(microbatch)
        ends = self._ends.setdefault(microbatch, [0])
        del ends[number + 1 :]
        ends.append(ends[-1] + _length(x))
        with self.store.forward(microbatch, number, ends[number]):
            yield
        if not torch.is_grad_enabled() and number == self.cutting.count - 1:
            del self._ends[microbatch]

    @property
    def _due(self) -> bool:
        """Is the step's number a power of two?"""
        return self._steps & (self._steps - 1) == 0

    def _note(self, stage: Stage, microbatch: int, number: int, x: Any, target: Any) -> None:
        """Keep the input of a slice, if its microbatch is to be compared."""
        if not number:
            turn = self._due and 0 <= self._begun - self._next < 2
            self._begun += 1
            if len(self._given) < 2 and (turn or _length(x) > self._seen.get(_state(stage), 0)):
                self._given[microbatch], self._trained = [], torch.is_grad_enabled()
        if microbatch in self._given:
            with without_modes():
                self._given[microbatch].append(copied((x, target)))

    def compare(self, stage: Stage) -> None:
        """After a step: compare what was kept. Raises BadInput (see `comparing.compare`)."""
        rows = [row for row in self._given.values() if len(row) == self.cutting.count]
        if self._begun and self._due:
            self._next = (self._next + 2) % self._begun
        self._steps += self._begun > 0
        self._given, self._begun = {}, 0
        if rows:
            state, with_loss = _state(stage), stage.loss is not None
            self._seen[state] = max(self._seen.get(state, 0), *(_length(row[0][0]) for row in rows))
            compare(stage.layers, stage.first, stage.loss, _whole(rows, with_loss), self.cutting, self._trained)

    def again(self, part: int) -> AbstractContextManager[None]:
        """Run a slice's forward a second time inside, to recompute it."""
        microbatch, number = divmod(part, self.cutting.count)
        return self.store.forward(microbatch, number, self._ends[microbatch][number])

    @contextmanager
    def backward(self, part: int) -> Iterator[None]:
        """Run a slice's backward inside."""
        microbatch, number = divmod(part, self.cutting.count)
        with self.store.backward(microbatch, number):
            yield
        if not number:
            del self._ends[microbatch]

    def clear(self) -> None:
        """Drop all microbatches: their step begins again."""
        for microbatch in self._ends:
            self.store.drop(microbatch)
        self._ends.clear()
        self._given, self._begun = {}, 0


def _state(stage: Stage) -> tuple[bool, ...]:
    """Has the stage a loss, and which of its modules are in training mode?"""
    return stage.loss is not None, *(module.training for layer in stage.layers for module in layer.modules())


def _whole(rows: list[list[Any]], with_loss: bool) -> Sequences:
    """Two microbatches (or one twice) as whole sequences, from the input of their slices. Empties `rows`, so that long
    sequences are in memory only once."""
    joined = []
    while rows:
        x, target = zip(*rows.pop(0), strict=True)
        joined.append((join_sequence(x), join_sequence(target) if with_loss else None))
    inputs, targets = zip(joined[0], joined[-1], strict=True)
    return Sequences(list(inputs), list(targets))


def _length(x: Any) -> int:
    """Tokens of a slice."""
    return next((leaf.shape[1] for leaf in leaves_of(x) if isinstance(leaf, Tensor) and leaf.dim() > 1), 0)


class Slices(Part):
    """The slices of the `stages` of a rank, by number."""

    name, no_capture = "slices", "labels of slices are counted on the host"

    def __init__(self, rank: int, stages: Mapping[int, Any], slices: Mapping[int, StageSlices]) -> None:
        self.rank, self.stages, self.slices = rank, stages, slices
        self._rounds: Mapping[int, StageSlices] = {}  # of rounds of forwards

    @classmethod
    def of(cls, c: Connecting) -> Slices | None:
        """The slices of a rank's stages; None where sequences are not cut. Raises BadInput."""
        cutting = Cutting.of(c.problem)
        slices = {s: StageSlices(cutting, c.hooks.compare) for s in c.stages}
        return None if cutting.count == 1 else cls(c.own.program.rank, c.stages, slices)

    def around(self, kind: str, run: Run) -> Run:
        """Around a pass: make the keys and values of its slice available. Weight gradients need none."""
        plain = PLAIN.get(kind)
        if plain is None or (plain.adds_gradients and not plain.takes):
            return run

        def sliced(state: RankState, action: Action, given: Any) -> Any:
            stage_slices, part, data = self.slices[action.stage], action.part, state.data
            if plain.takes == "activation":
                x = data.inputs[part] if given is None else given
                runs: Any = stage_slices.forward(self.stages[action.stage], part, x, data.targets.get(part))
            else:
                runs = stage_slices.backward(part) if plain.takes else stage_slices.again(part)
            with torch.set_grad_enabled(has_backward(action)), runs:
                output = run(state, action, given)
            if plain.takes == "activation" and self.stages[action.stage].auxiliary is not None:
                raise BadInput("slices: a layer adds to the loss by auxiliary_loss, which is of a whole sequence")
            return output

        return sliced

    def forget(self) -> None:
        for piece in self.slices.values():
            piece.clear()

    def end(self) -> None:
        for s, stage_slices in self.slices.items():
            try:
                stage_slices.compare(self.stages[s])
            except Exception as error:
                raise RunFailed(f"rank {self.rank}, stage {s}: {one_line(error)}") from error

    def for_forwards(self, stages: Mapping[int, Any]) -> Slices:
        """Slices for a round of forwards. All rounds share one count of steps, so that few of them are compared."""
        self._rounds = self._rounds or {s: StageSlices(old.cutting, old.compares) for s, old in self.slices.items()}
        return Slices(self.rank, stages, self._rounds)


def check_slices(graph: Graph, able: Iterable[str]) -> None:
    """Check that run knows the slices of a step. A forward comes after the one of the slice before, a backward after the one
    of the next slice, which gives gradients of keys and values. able: kinds that run for slices. Raises BadInput."""
    problem, front = graph.problem, untrained_stages(graph.problem) % graph.problem.stages
    if problem.slices == 1:
        return
    for row in np.flatnonzero(~problem.passes.are(*able))[:1]:
        raise BadInput(f"pass {problem.names[row]}: run knows none of its kind where sequences are cut into slices")
    if len(problem.routes) > 1:
        raise BadInput(f"slices: microbatches follow {len(problem.routes)} routes, and run knows slices on one")
    for kind, plain in PLAIN.items():
        step = 1 if plain.takes == "gradient" else -1
        for row, this in graph.each(problem.rows(kind)) if plain.takes else ():
            if graph.training and this.stage < front:
                raise BadInput(f"pass {this.name}: run knows no slices of a stage that trains nothing")
            if 0 <= this.slice + step < problem.slices:
                other = replace(this, slice=this.slice + step)
                if (before := graph.row(kind, other)) is None:
                    raise BadInput(f"pass {this.name}: there is no {other.name}")
                graph.check_order(this, before, row)


def sliced_loss(problem: Problem, loss: Loss | None, split: str) -> Loss | None:
    """The loss of the stages, for slices if the step has any. Raises BadInput for a `split` that does not go with slices."""
    if problem.slices == 1:
        return loss
    if split != "layers":
        raise BadInput(f"split: '{split}' does not know slices, whose keys and values lie outside of a layer's graph")
    return None if loss is None else SliceLoss(loss)
