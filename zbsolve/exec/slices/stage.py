"""Slices on one stage: which of them runs, where it begins, and the keys and values that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..backward.stage import Stage
from ..base.part import Around
from ..base.torch_private import tree_map
from ..base.values import leaves_of, tensors_of
from .attention import Helper
from .check import check_stage
from .cutting import Cutting
from .inputs import SeenInputs
from .labels import SeenTargets
from .loss import Uncounted
from .reach import room_of
from .store import SliceStore
from .trial import IGNORED, LAYERS, LOSS, MAX_TOKENS, undisturbed


class StageSlices(Around):
    """The slices of a stage's microbatches, by the number of their part (see `cutting`).

    Where a slice begins follows from the activations before: tensors (batch, length, …). looked: what of the stage was
    looked at (see `check.check_stage`), which gave `made`. length: of the sequence that runs, at least. reached: on how many
    tokens the layers were looked at, in each state of training and evaluation. inputs, labels: what of whole numbers was
    tried with the layers, and of the targets with the loss. ignored: the step that runs has labels that do not count.
    """

    def __init__(self, cutting: Cutting) -> None:
        self.cutting, self.looked, self.ignored = cutting, set[str](), False
        self.made: Any = None
        self.length, self.reached = 0, dict[tuple[bool, ...], int]()
        self.inputs, self.labels = SeenInputs(), SeenTargets()
        self.store = SliceStore(cutting.count)
        self._ends: dict[int, list[int]] = {}

    def anew(self) -> StageSlices:
        """The same slices of other microbatches."""
        found = StageSlices(self.cutting)
        found.looked |= self.looked
        found.made, found.reached = self.made, self.reached
        found.inputs, found.labels = self.inputs, self.labels
        return found

    def looks(self, part: int, x: Any, layers: Sequence[nn.Module], counts: bool) -> set[str]:
        """What is still to be looked at before a slice runs: also layers that are in another state, or on longer sequences,
        than when they were looked at. counts: the slice has a loss, in which some of its labels count."""
        if not part % self.cutting.count or not self.length:
            self.length = self.cutting.length(_length(x))
        found = {LAYERS, *([LOSS] if counts else []), *([IGNORED] if counts and self.ignored else [])} - self.looked
        first = self.made is not None and not part % self.cutting.count
        if first and self._reach(layers, x) > self.reached.get(_state(layers), 0):
            found.add(LAYERS)
        return found

    def saw(self, looks: set[str], x: Any, layers: Sequence[nn.Module], made: Any) -> None:
        """What was looked at (see `check.check_stage`), and gave `made`."""
        self.made = made
        self.looked |= looks
        for state in {_state(layers), ()}:  # in evaluation in any case
            self.reached[state] = max(self.reached.get(state, 0), self._reach(layers, x))

    def _reach(self, layers: Sequence[nn.Module], x: Any) -> int:
        """On how many tokens the layers can be looked at."""
        return min(self.length, max(room_of(layers, x), MAX_TOKENS))

    def check_inputs(self, layers: Sequence[nn.Module], first: int, x: Any) -> None:
        """Look at whole numbers that are new in a slice's activations. Raises BadInput."""
        if self.made is not None:  # else whoever says that all was looked at
            self.inputs.check(layers, first, x, self.length)

    def check_labels(self, loss: Callable[[Any, Any], Tensor], targets: Any) -> None:
        """Look at what is new in the labels of a slice with a loss. Raises BadInput."""
        if self.made is not None:  # else whoever says that all was looked at
            with undisturbed(targets):
                self.labels.check(loss, tree_map(partial(_empty, tensors_of(targets)[0].device), self.made), targets)

    def forward(self, stage: Stage, microbatch: int, x: Any, target: Any) -> AbstractContextManager[None]:
        """What a forward runs in. The first one of a slice looks at the layers, and the first of one whose labels count at
        the loss: can they be cut? So does one of a longer sequence, or behind a change to training. All look at whole
        numbers and labels that come for the first time. Raises BadInput."""
        counts = stage.loss is not None and not isinstance(target, Uncounted)
        looks = self.looks(microbatch, x, stage.layers, counts)
        if looks:
            made = check_stage(stage.layers, stage.first, stage.loss, (x, target), self.length, looks)
            self.saw(looks, x, stage.layers, made)
        self.check_inputs(stage.layers, stage.first, x)
        if stage.loss is not None and counts:
            self.check_labels(stage.loss, target)
        return self.runs(microbatch, x)

    @contextmanager
    def runs(self, part: int, x: Any) -> Iterator[None]:
        """Run a slice's forward on the activations `x` inside."""
        microbatch, number = divmod(part, self.cutting.count)
        if not number:  # nothing is left of a step that failed
            self.store.drop(microbatch)
        ends = self._ends.setdefault(microbatch, [0])
        del ends[number + 1 :]
        ends.append(ends[-1] + _length(x))
        with self.store.forward(microbatch, number, ends[number]):
            yield
        if not torch.is_grad_enabled() and number == self.cutting.count - 1:
            del self._ends[microbatch]

    @contextmanager
    def helped(self, helping: AbstractContextManager[Helper]) -> Iterator[None]:
        """Run a pass inside, for which another rank makes attention."""
        with helping as self.store.helper:
            try:
                yield
            finally:
                self.store.helper = None

    def again(self, part: int) -> AbstractContextManager[None]:
        """Run it once more inside, to recompute it."""
        microbatch, number = divmod(part, self.cutting.count)
        return self.store.forward(microbatch, number, self._ends[microbatch][number])

    @contextmanager
    def backward(self, part: int) -> Iterator[None]:
        """Run a slice's backward inside. Afterwards its keys are gone."""
        microbatch, number = divmod(part, self.cutting.count)
        with self.store.backward(microbatch, number):
            yield
        if not number:
            del self._ends[microbatch]

    def clear(self) -> None:
        """Forget all microbatches, such as those of a step that begins anew."""
        for microbatch in self._ends:
            self.store.drop(microbatch)
        self._ends.clear()


def _state(layers: Sequence[nn.Module]) -> tuple[bool, ...]:
    """Which parts are in training; () for none."""
    found = tuple(one.training for layer in layers for one in layer.modules())
    return found if any(found) else ()


def _empty(device: torch.device, one: Any) -> Any:
    return torch.empty_like(one, device=device) if isinstance(one, Tensor) else one


def _length(x: Any) -> int:
    """Tokens of a slice."""
    return next((leaf.shape[1] for leaf in leaves_of(x) if isinstance(leaf, Tensor) and leaf.dim() > 1), 0)
