"""Collectives beside computing: a process group and a thread, which does one after the other.

All ranks begin them in one order, that of the schedule, whatever their kinds: NCCL's kernels wait for their peers on the
device, so communicators whose collectives ranks begin in orders that differ may wait for each other for ever (NCCL's user
guide, "Using multiple NCCL communicators concurrently").
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.torch_private import backend_of, default_group
from ..device.copying import Begun, LaunchedCopies, SideWork, timed_event
from ..devices import BACKENDS
from ..transport.failure import LostRank
from ..transport.wires import break_off_group, joined, passed, reason

STREAM = "collectives"


def _nothing() -> None:
    """What a rank does by itself behind most collectives."""


class Collectives(SideWork):
    """The collectives of one rank. group: the process group that is theirs alone. timeout: to wait for any of them.
    emulated: the device (`emulate.EmulatedDevice`) whose time they take, where there is one."""

    def __init__(self, group: Any, device: torch.device, timeout: timedelta, emulated: Any = None) -> None:
        # Beyond the group's own time, which knows what it waited for.
        super().__init__(device, timeout.total_seconds() + 1.0, device.type == "cuda")
        self.group, self.timeout, self._emulated = group, timeout, emulated
        self.marks: Any = None  # on a GPU: makes the events around each
        self._untimed: dict[str, bool] = {}  # in the order in which an emulated device runs them → do they wait for others?

    @classmethod
    def of(cls, group: Any, device: torch.device, timeout: timedelta, emulated: Any = None) -> Collectives:
        """Those of a pipeline's process group. All its ranks call this. Raises TimeoutError where one does not, on a GPU."""
        ranks = dist.get_process_group_ranks(default_group() if group is None else group)
        own = dist.new_group(
            ranks, timeout, BACKENDS[device.type], use_local_synchronization=True, group_desc="zbsolve vocabulary"
        )
        if device.type == "cuda":  # its communicator is made here: at the first collective it would hold the host
            dist.all_reduce(torch.zeros(1, device=device), group=own)
            passed(device, timeout)
        return cls(own, device, timeout, emulated)

    def in_real_time(self) -> Collectives:
        """The same group, where no emulated device takes time."""
        return self if self._emulated is None else Collectives(self.group, self.device, self.timeout)

    def begin_step(self, marks: Any) -> None:
        """A step begins. marks: see `Part`."""
        self.done.clear()
        self._untimed.clear()
        self.marks = marks

    def begin(self, name: str, work: Callable[[], None], over: Callable[[], None] = _nothing, waits: bool = True) -> None:
        """Begin what `work` does with the group, for pass `name`, behind all that was begun before. `over` follows when it
        is settled. waits: for what other ranks must do before; else this rank's part takes its device's time without them.
        Never waits itself."""
        if isinstance(self.copies, LaunchedCopies):
            event = timed_event if self.marks is None else self.marks.event
            self.begun[name] = Begun(self.copies.begin(STREAM, work, [self.copies.mark()], event), over)
        else:
            self.begun[name] = Begun(self.copies.begin(STREAM, work), over)
        self._untimed[name] = waits

    def settle(self, name: str, sure: bool = True) -> None:
        """As `SideWork`, in an emulated device's time. Raises LostRank too."""
        if self._emulated is not None and name in self.begun and (sure or self.begun[name].copy.known()):
            while name in self._untimed:  # a device's stream runs them one after the other
                earlier = next(iter(self._untimed))
                if self._untimed.pop(earlier):  # now all have come to it, and when their devices did is known
                    self.copies.end(self.begun[earlier].copy, self.seconds)
                self._emulated.run_on_side_stream(earlier)
        super().settle(name, sure)

    def wait(self, work: Any) -> None:
        """Wait for a collective of torch's inside a `work`. Raises LostRank."""
        try:
            joined(work, self.timeout, self.device)
        except RuntimeError as error:
            raise LostRank(f"waiting for the other shards of the vocabulary: {reason(error)}") from None

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """From the rank `root` to all, inside a `work`."""
        source = dist.get_global_rank(self.group, root)
        self.wait(dist.broadcast(tensor, source, group=self.group, async_op=True))

    def sum(self, tensor: Tensor, root: int) -> None:
        """Over all ranks, on the rank `root`, inside a `work`."""
        destination = dist.get_global_rank(self.group, root)
        self.wait(dist.reduce(tensor, destination, group=self.group, async_op=True))

    def break_off(self) -> None:
        """End this rank's connections, so that none of the others waits for it."""
        backend = backend_of(self.group, self.device)
        break_off_group(backend, dist.get_rank(self.group), dist.get_world_size(self.group), self.device)
