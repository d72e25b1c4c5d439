"""How many bytes are live, counted by weak references to the storages that operations allocate.

Counting takes some µs an operation, so steps that are timed are never counted.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..problem import Ints, Problem
from ..schedule import Schedule
from ..schedule.handover import Handover
from ..util.errors import RunFailed
from ..util.text import exact_bytes
from .awaits import begins_and_ends
from .base.program import Message, Program
from .base.torch_private import TorchDispatchMode, storage_key, tree_leaves
from .base.values import local
from .handlers import HANDLERS


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that are allocated while it is active, each once, until they are freed. Those given to
    `ignore` (parameters, gradients) do not count. most: the largest count so far, between any two operations. limit: bytes
    that the device has; full: called at the limit, to `ignore` more tensors."""

    supports_higher_order_operators = True  # graphs with checkpointing use some

    def __init__(self, ignore: Iterable[Tensor] = (), limit: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self.full: Callable[[LiveBytes], None] | None = None
        self.most = 0
        self._now = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._died: deque[int] = deque()
        # Callbacks refer to the meter weakly, to avoid a reference cycle. In Python up to 3.11 the deallocation of a storage
        # can fail if its weak references are garbage in a cycle and two meters count it.
        self._own = weakref.ref(self)
        self.ignore(ignore)

    @property
    def now(self) -> int:
        """Bytes that live now."""
        while self._died:
            self._now -= self._died.popleft()
        return self._now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its operations on local tensors come here
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these, from now on."""
        for tensor in map(local, tensors):
            key = storage_key(tensor)
            if key in self._known:
                reference, size = self._known[key]
                self._now -= size
                self._known[key] = reference, 0
            else:
                self.add(tensor, counted=False)

    def add(self, tensor: Tensor, *, counted: bool = True) -> None:
        """Know the storage of `tensor` from now on, and count it (or not), if it is new."""
        storage, own = tensor.untyped_storage(), self._own
        key = storage_key(tensor)
        if key in self._known:
            return

        def died(_: Any) -> None:  # called in any thread, so it only appends
            if (meter := own()) is not None:
                meter._died.append(meter._known.pop(key)[1])

        size = storage.nbytes() if counted else 0
        self._known[key] = weakref.ref(storage, died), size
        self._now += size
        if self.limit is not None and self.now > self.limit:
            self._full(size)
        self.most = max(self.most, self.now)

    def _full(self, size: int) -> None:
        """Raise RunFailed where the device has no room for `size` bytes more."""
        if self.full is not None:
            self.full(self)
        if self.limit is not None and self.now > self.limit:
            held, limit = exact_bytes(self.now - size), exact_bytes(self.limit)
            raise RunFailed(f"out of memory: the device has {limit} for activations, {held} are held, and {size} are needed")


@dataclass(frozen=True)
class Memory:
    """Activation bytes of one rank in one step, without parameters and their gradients. names: of its passes, in program
    order. held, predicted: bytes after each pass, counted and predicted. most: the peak at any moment, also inside passes.
    device: the peak by a GPU's allocator, with newly allocated gradients. host, predicted_host: bytes in host memory after
    each pass, if there are any."""

    names: tuple[str, ...]
    held: tuple[int, ...]
    predicted: tuple[int, ...]
    most: int
    host: tuple[int, ...] = ()
    predicted_host: tuple[int, ...] = ()
    device: int = 0

    @property
    def peak(self) -> int:
        """The most bytes held after a pass."""
        return max(self.held, default=0)

    @property
    def predicted_peak(self) -> int:
        """The most bytes predicted after a pass."""
        return max(self.predicted, default=0)


def predicted(schedule: Schedule, program: Program, size: Callable[[Message], int] | None = None) -> tuple[int, ...]:
    """Bytes held after each pass of `program`: those on the problem's edges, and messages that wait (see `Handover`).

    size: bytes of a message that this rank takes, sends or hands over; without it messages are not counted.
    """
    problem, actions = schedule.problem, program.actions
    rows = [problem.index[action.name] for action in actions]
    held = np.cumsum(_changes(program, problem.taken[rows], problem.freed[rows])[:-1])
    if size is not None:
        moved = [m for action in actions for m in (*action.posts, *action.sends, *action.hands)]
        handover = Handover.of(schedule, begins_and_ends(schedule)[0])
        sizes = {(m.after, m.before, bool(m.beside)): size(m) for m in moved}
        columns, names = (handover.after, handover.before, handover.beside), problem.names
        ends = zip(*(column.tolist() for column in columns), strict=True)
        each = [sizes.get((names[a], names[b], beside), 0) for a, b, beside in ends]
        held = held + handover.waiting(program.rank, np.array(each, np.int64))
    return tuple(held.tolist())


def predicted_host(problem: Problem, program: Program) -> tuple[int, ...]:
    """Bytes that a rank holds in pools other than devices after each pass of `program`."""
    rows, total = [problem.index[action.name] for action in program.actions], np.zeros(len(program.actions), np.int64)
    for pool in range(problem.ranks, len(problem.room)):
        taken, freed = problem.moved(pool)
        total += np.cumsum(_changes(program, taken[rows], freed[rows])[:-1])
    return tuple(total.tolist())


def _changes(program: Program, taken: Ints, freed: Ints) -> list[int]:
    """The change of held bytes with each pass, and after the last one. taken, freed: by pass, in order. Work that a pass
    only starts ends before the pass that awaits it."""
    change, actions = [0] * (len(program.actions) + 1), program.actions
    over: dict[str, int] = {}
    for i, action in enumerate(actions):
        for awaited in action.awaits:
            over.setdefault(awaited.name, i)
    begun = {i for i, action in enumerate(actions) if HANDLERS[action.kind].settle is not None}
    for i, action in enumerate(actions):
        change[i] += int(taken[i])
        change[over.get(action.name, len(actions)) if i in begun else i] -= int(freed[i])
    return change
