"""What an optimizer's step changes, kept so that the step can be taken back bit by bit.

It is a copy, because no inverse update gives the same bits: every step rounds some away.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.torch_private import tree_leaves


class OptimizerSnapshot:
    """An optimizer as it was before a step: its hyperparameters, and after `keep` its parameters and state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._then = self._left = _hyperparameters(optimizer)
        self._parameters: dict[nn.Parameter, Tensor] = {}
        self._keys: list[Any] = []
        self._state: list[Any] | None = None

    def keep(self) -> int:
        """Copy parameters and state. Bytes of the copies: with Adam three times the parameters, with plain SGD once."""
        optimizer = self._optimizer
        self._parameters = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
        self._keys = list(optimizer.state)
        # Parameters that the state refers to stay themselves. What shares memory shares it in the copy too.
        same = {id(p): p for p in self._parameters}
        self._state = copy.deepcopy([optimizer.state[key] for key in self._keys], same)
        tensors = [leaf for leaf in tree_leaves(self._state) if isinstance(leaf, Tensor)]
        return sum(t.nbytes for t in (*self._parameters.values(), *tensors))

    def step(self) -> None:
        """Make the optimizer's step. Hyperparameters that differ from now on were changed by somebody else."""
        self._optimizer.step()
        self._left = _hyperparameters(self._optimizer)

    @torch.no_grad()
    def amend(self, again: bool) -> None:
        """Undo the step, if it was made. again: step again, by the hyperparameters of that time; those that were changed
        since (by a learning rate schedule) come back afterwards. To be called once: the copies become the state."""
        optimizer = self._optimizer
        if self._state is not None:
            for parameter, values in self._parameters.items():
                parameter.copy_(values)
            optimizer.state.clear()
            optimizer.state.update(zip(self._keys, self._state, strict=True))
        now, left = _hyperparameters(optimizer), self._left
        for group, then in zip(optimizer.param_groups, self._then, strict=True):
            group.update(then)
        if again:
            optimizer.step()
        for group, present, after in zip(optimizer.param_groups, now, left, strict=True):
            group.update({name: value for name, value in present.items() if not _equal(value, after.get(name))})


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: copy.deepcopy(value) for name, value in g.items() if name != "params"} for g in optimizer.param_groups]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return bool(a == b)
