"""Collectives beside computing: a process group and a thread, which does one after the other.

All ranks begin them in one order, that of the schedule, whatever their kinds: NCCL's kernels wait for their peers on the
device, so communicators whose collectives ranks begin in orders that differ may wait for each other for ever (NCCL's user
guide, "Using multiple NCCL communicators concurrently").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..base.torch_private import backend_of, default_group
from ..device.copying import CopyStreams, LaunchedCopies, timed_event
from ..devices import BACKENDS
from ..transport.failure import LostRank
from ..transport.wires import break_off_group, joined, passed, reason

STREAM = "collectives"


@dataclass(frozen=True)
class Homes:
    """Which ranks a sharded vocabulary talks to. rank, size: this one's place. stages: of the model. routes: the ranks that
    microbatches visit (see `Problem.routes`). barriers: 1 or 2, algorithm 2 or 1."""

    rank: int
    size: int
    stages: int
    routes: Sequence[Sequence[int]]
    barriers: int = 1

    def last(self, microbatch: int) -> int:
        """The rank of the microbatch's last stage."""
        return self.routes[microbatch % len(self.routes)][self.stages - 1]

    def first(self, microbatch: int) -> int:
        """The rank of its first stage."""
        return self.routes[microbatch % len(self.routes)][0]


class SideStreams(Protocol):
    """An emulated device."""

    def run_on_side_stream(self, name: str) -> tuple[int, int]:
        """Run a pass of a side stream there, behind all that it waits for."""


@dataclass(slots=True)
class _Begun:
    """A collective that is not settled. over: what the rank does by itself when it is. waits: for what other ranks must do
    before, or else this rank's part takes its device's time without them. timed: it has taken that."""

    copy: Any
    over: Callable[[], None]
    waits: bool
    timed: bool = False


class Collectives:
    """The collectives of one rank. group: the process group that is theirs alone. timeout: to wait for any of them.
    emulated: the device whose time they take, where there is one."""

    def __init__(self, group: Any, device: torch.device, timeout: timedelta, emulated: SideStreams | None = None) -> None:
        index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        self.group, self.device, self.timeout = group, torch.device(device.type, index), timeout
        self._emulated = emulated
        self._copies: Any = (LaunchedCopies if device.type == "cuda" else CopyStreams)(self.device)
        self.marks: Any = None  # on a GPU: makes the events around each
        self._begun: dict[str, _Begun] = {}
        self._over: dict[str, Any] = {}
        self._turn: deque[str] = deque()  # in the order in which an emulated device runs them

    @classmethod
    def of(cls, group: Any, device: torch.device, timeout: timedelta, emulated: SideStreams | None = None) -> Collectives:
        """Those of a pipeline's process group. All its ranks call this. Raises TimeoutError where one does not, on a GPU."""
        group = default_group() if group is None else group
        ranks, backend = dist.get_process_group_ranks(group), BACKENDS[device.type]
        own = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=True, group_desc="zbsolve vocabulary"
        )
        if device.type == "cuda":  # its communicator is made here: at the first collective it would hold the host
            dist.all_reduce(torch.zeros(1, device=device), group=own)
            passed(device, timeout)
        return cls(own, device, timeout, emulated)

    def in_real_time(self) -> Collectives:
        """The same group, where no emulated device takes time."""
        return self if self._emulated is None else Collectives(self.group, self.device, self.timeout)

    def begin_step(self) -> None:
        """A step begins."""
        self._over.clear()
        self._turn.clear()

    def begin(self, name: str, work: Callable[[], None], over: Callable[[], None], waits: bool = True) -> None:
        """Begin what `work` does with the group, for pass `name`, behind all that was begun before. `over` follows when it
        is settled. waits: the pass waits for passes of other ranks. Never waits itself."""
        if isinstance(self._copies, LaunchedCopies):
            event = timed_event if self.marks is None else self.marks.event
            copy: Any = self._copies.begin(STREAM, work, [self._copies.mark()], event)
        else:
            copy = self._copies.begin(STREAM, work)
        self._begun[name] = _Begun(copy, over, waits)
        self._turn.append(name)

    def settle(self, name: str, sure: bool = True) -> None:
        """From here on the collective of pass `name` is done. sure: also where that must be waited for; else only if it is.
        Raises TimeoutError, LostRank, and what its work raised."""
        begun = self._begun.get(name)
        if begun is None or not (sure or begun.copy.known()):
            return
        while self._emulated is not None and not begun.timed:  # a device's stream runs them one after the other
            earlier = self._turn.popleft()
            one = self._begun[earlier]
            if one.waits:
                self._copies.end(one.copy, self._seconds)  # now all have come to it, and when their devices did is known
            self._emulated.run_on_side_stream(earlier)
            one.timed = True
        self._end(name)

    def ended(self, name: str) -> Any:
        """When it was done, monotonic ns; or the event of a GPU. Waits for it. Raises as `settle`."""
        self.settle(name)
        if isinstance(self._copies, LaunchedCopies):
            return self._over[name].end
        return self._copies.end(self._over[name], self._seconds)

    def wait(self, work: Any) -> None:
        """Wait for a collective of torch's inside a `work`. Raises LostRank."""
        try:
            joined(work, self.timeout, self.device)
        except RuntimeError as error:
            raise LostRank(f"waiting for the other shards of the vocabulary: {reason(error)}") from None

    def root(self, rank: int) -> int:
        """The number that torch has for a rank of the group."""
        return dist.get_global_rank(self.group, rank)

    def break_off(self) -> None:
        """End this rank's connections, so that none of the others waits for it."""
        backend = backend_of(self.group, self.device)
        break_off_group(backend, dist.get_rank(self.group), dist.get_world_size(self.group), self.device)

    @property
    def _seconds(self) -> float:
        return self.timeout.total_seconds() + 1.0  # beyond the group's own, which knows what it waited for

    def _end(self, name: str) -> None:
        begun = self._begun[name]
        self._copies.join(begun.copy, self._seconds)
        begun.over()
        self._over[name] = self._begun.pop(name).copy
