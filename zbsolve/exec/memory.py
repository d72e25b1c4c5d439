"""How many bytes live, counted by weak references to the storages that operations make.

Counting takes some µs an operation. So a step of its own is counted, and never one that is timed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..problem import Problem
from .dtensors import local
from .program import Message, Program
from .torch_private import TorchDispatchMode, storage_key, tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that are made while it is active, each once, until they die. Storages given to `ignore`
    (parameters, gradients) do not count. most: the most ever so far, between any two operations."""

    supports_higher_order_operators = True  # a graph with checkpointing in it calls some

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._died: deque[int] = deque()
        self.ignore(ignore)

    @property
    def now(self) -> int:
        """Bytes that live now."""
        while self._died:
            self._now -= self._died.popleft()
        return self._now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it becomes operations on local tensors, which come here again
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
        for tensor in map(local, tensors):
            key = storage_key(tensor)
            if key in self._known:
                reference, size = self._known[key]
                self._now -= size
                self._known[key] = reference, 0
            else:
                self._watch(tensor, counted=False)

    def _watch(self, tensor: Tensor, *, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
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
    """Activation bytes of one rank in one step, without parameters and their gradients.

    names: of its passes, in the order of its program. held, predicted: bytes after each of them, counted and predicted.
    most: bytes at any moment, inside passes too.
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
    """Bytes held after each pass of `program`: what the problem's edges hold, and messages.

    A receive's buffer is held from when it is posted until its pass takes it, an output that goes to another rank right
    after its pass, and one for this rank until it is taken. size: bytes of a message; without it messages are not counted.
    """
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
