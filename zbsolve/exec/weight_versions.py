"""Versions of a stage's weights, as PipeDream (arXiv 1806.03377) and PipeDream-2BW (arXiv 2006.09503) keep them.

The layers' parameters show one version at a time: for each pass its own, with the gradients of its own group. An update
works on parameters of its own. So it changes nothing that a microbatch still needs, and nothing that autograd has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .program import VersionUse
from .torch_private import tree_leaves

Update = Callable[[list[nn.Parameter]], Any]


class WeightVersions:
    """The versions of one stage's weights. parameters: those of its layers that are trained. update: makes a torch optimizer
    of parameters. kept: version → its tensors, from the update that made it to the last pass that uses it."""

    def __init__(self, parameters: Sequence[nn.Parameter], update: Update) -> None:
        self.parameters = list(parameters)
        self.newest = [nn.Parameter(p.data) for p in self.parameters]  # (detach would share its count of changes)
        self.optimizer = update(self.newest) if self.newest else None
        self.kept: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._shown: tuple[int, int] | None = None

    def begin(self) -> None:
        """A step begins, with the weights that the last one left."""
        self.kept, self._gradients, self._shown = {0: [p.data for p in self.newest]}, {}, None

    def show(self, use: VersionUse) -> None:
        """Before a pass: let the layers show its version, and the gradients of its group so far."""
        if self._shown == (use.version, use.group):
            return
        self._put_away()
        self._shown = use.version, use.group
        gradients = self._gradients.get(use.group, [None] * len(self.parameters))
        for parameter, weights, gradient in zip(self.parameters, self.kept[use.version], gradients, strict=True):
            parameter.data, parameter.grad = weights, gradient

    def done(self, use: VersionUse) -> None:
        """After a pass: drop its version if it is the last pass that uses it."""
        if use.over:
            del self.kept[use.version]

    def update(self, use: VersionUse) -> None:
        """The pass U: the newest weights and the mean gradient of its group make the next version."""
        self._put_away()
        gradients = self._gradients.pop(use.group)
        needed = use.version - 1 in self.kept
        for parameter, gradient in zip(self.newest, gradients, strict=True):
            if needed:
                parameter.data = parameter.data.clone()
            parameter.grad = gradient
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if not use.over:
            self.kept[use.version] = [p.data for p in self.newest]

    def end(self) -> None:
        """After a step: let the layers show the newest weights, and no gradients."""
        self._put_away()
        for parameter, newest in zip(self.parameters, self.newest, strict=True):
            parameter.data, parameter.grad = newest.data, None

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that are kept: weights, gradients and the optimizer's state."""
        state = [] if self.optimizer is None else tree_leaves(list(self.optimizer.state.values()))
        for leaf in (*self.newest, *tree_leaves([*self.kept.values(), *self._gradients.values()]), *state):
            if isinstance(leaf, Tensor):
                yield leaf

    @property
    def kept_bytes(self) -> int:
        """Bytes of all versions that some pass still uses."""
        return sum(tensor.nbytes for tensors in self.kept.values() for tensor in tensors)

    def _put_away(self) -> None:
        if self._shown is not None:
            self._gradients[self._shown[1]] = [p.grad for p in self.parameters]
            self._shown = None
