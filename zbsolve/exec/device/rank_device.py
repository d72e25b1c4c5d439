"""A rank's GPU in a step: when it begins, when it has done all, and what its marks say then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..base.program import Action
from ..base.state import Hooks, Record
from ..transport.peers import Peers
from .guard import Guard
from .marks import Marks


class RankDevice:
    """The GPU of one rank. actions: of its program; hooks: around them. peak: the most bytes that the last step took
    beside what lay there when it began, as torch's allocator counts. launching: how long its host took to launch all of
    it, ns."""

    def __init__(self, device: torch.device, peers: Peers, actions: tuple[Action, ...], hooks: Hooks) -> None:
        self.device, self.limit = device, hooks.limit
        self.marks, self.guard = Marks(device), Guard(peers, actions, hooks.announce)
        self.peak = 0
        self.launching = 0
        self._before = 0

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A step runs inside. Where the guard ended the communicators, what raises then is a consequence, and why it did is
        raised. Raises LostRank."""
        try:
            yield
        except Exception:
            if self.guard.cause is not None:
                raise self.guard.cause from None
            raise
        finally:
            self.guard.end()

    def begin(self, record: Record, marks: Marks, missing: int) -> None:
        """A step begins, behind all that was launched before. missing: bytes of gradients that it will make anew. Raises
        LostRank where that is never done."""
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        self.guard.begin(record, marks)
        self.guard.wait(ready)
        marks.begin()
        record.began = time.monotonic_ns()
        self.guard.begin(record, marks)
        self._before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        if self.limit is not None:
            self._allow(self._before + missing + self.limit)

    def finish(self, record: Record, marks: Marks) -> None:
        """Wait until all is done that was launched, and put the times of the device in place of the host's. Raises
        LostRank."""
        over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        over.record()
        self.launching = time.monotonic_ns() - record.began
        self.guard.wait(over)
        if self.limit is not None:
            self._allow(None)
        self.peak = torch.cuda.max_memory_allocated(self.device) - self._before
        read_marks(record, marks)

    def _allow(self, size: int | None) -> None:
        """Let the allocator take so many bytes of the device in all (None: whatever there is); what it keeps unused goes
        before it says that memory is out."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if size is None else min(1.0, size / total), self.device)


def read_marks(record: Record, marks: Marks) -> None:
    """Put the times of the device, which has done all, in place of those of launching: monotonic ns of the host."""
    record.launched = [end - start for start, end in zip(record.start, record.end, strict=True)]
    spans = [(marks.ns(start), marks.ns(end)) for start, end in record.marks]
    record.start, record.end = [span[0] for span in spans], [span[1] for span in spans]
    for i, mark in record.later.items():
        record.end[i] = max(record.end[i], marks.ns(mark))
    record.arrived = [arrived if isinstance(arrived, int) else marks.ns(arrived) for arrived in record.arrived]


def missing_bytes(parameters: Any) -> int:
    """Bytes of the gradients that trained parameters do not have yet."""
    return sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
