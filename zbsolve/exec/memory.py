"""How many bytes live: weak references to the storages that operations make.

Slow (some µs an operation), so it watches a step of its own and never one that is timed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..problem import Problem
from .lower import Message, Program


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of storages made while it is active, each once, until they die. `most`: the most ever so far, also
    inside an operation's neighbours. Storages given to `ignore` (parameters, gradients) do not count."""

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._died: deque[int] = deque()
        self.ignore(ignore)

    @property
    def now(self) -> int:
        """Bytes that live."""
        while self._died:
            self._now -= self._died.popleft()
        return self._now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the storage of `tensor`, if it is new."""
        self._watch(tensor, counted=True)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these, from now on."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._known:
                reference, size = self._known[key]
                self._now -= size
                self._known[key] = reference, 0
            else:
                self._watch(tensor, counted=False)

    def _watch(self, tensor: Tensor, *, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return

        def died(_: Any) -> None:  # in any thread: a queue, because adding to a number there could lose some
            self._died.append(self._known.pop(key)[1])

        size = storage.nbytes() if counted else 0
        self._known[key] = weakref.ref(storage, died), size
        self._now += size
        self.most = max(self.most, self.now)


@dataclass(frozen=True)
class Memory:
    """Activation bytes of one rank in one step, without parameters and their gradients. In the order of its program:
    `names` of passes, bytes `held` after each (counted), and `predicted` ones. `most`: at any moment, inside passes too.
    """

    names: tuple[str, ...]
    held: tuple[int, ...]
    predicted: tuple[int, ...]
    most: int

    @property
    def peak(self) -> int:
        """The most held after a pass."""
        return max(self.held, default=0)

    @property
    def predicted_peak(self) -> int:
        """The same, predicted."""
        return max(self.predicted, default=0)


def predicted(problem: Problem, program: Program, size: Callable[[Message], int] = lambda message: 0) -> tuple[int, ...]:
    """Bytes held after each pass of `program`: what the problem's edges hold, and messages: a receive's buffer from when
    it is posted until its pass takes it, an output on its way to another rank right after its pass, and one for this
    rank until it is taken. `size`: bytes of a message (without: they are not counted)."""
    actions = program.actions
    place = {action.name: i for i, action in enumerate(actions)}
    rows = [problem.index[action.name] for action in actions]
    change = [*(problem.taken[rows] - problem.freed[rows]).tolist(), 0]
    for i, action in enumerate(actions):
        spans = [(i, place[m.after], m) for m in action.posts]
        spans += [(i, i + 1, m) for m in action.sends]
        spans += [(i, place[action.hands.after], action.hands)] if action.hands is not None else []
        for begin, end, message in spans:
            change[begin] += size(message)
            change[end] -= size(message)
    return tuple(np.cumsum(change[:-1]).tolist())
