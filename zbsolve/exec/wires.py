"""A process group as wires between its ranks, and what its errors mean."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import BadInput
from .failure import LostRank, one_line
from .local import Inlet, Outlet

CPU = torch.device("cpu")
# Tags (STEP and on: a route each); NCCL has none, but only DATA goes over it.
DATA, SHAPES, BYTES, STOPPED, TOTAL, STEP = 0, 1, 2, 3, 4, 5
BROKE = "the connection broke"
TAKEN = b"taken"


@dataclass(frozen=True)
class Wires:
    """A pipeline's process group as point-to-point wires. `rank`, `size`: in the group. `data` carries the tensors,
    `control` (always gloo: CPU tensors, tags) everything else. `pairs`: what carries messages of an ordered pair of
    ranks in place of both, or of `data` alone (see `paired`). All are the backends themselves: the dispatcher in front
    of them would cost some µs a message. `notes`: a store for what ranks leave for each other when they fail."""

    rank: int
    size: int
    data: Any
    control: Any
    notes: Any
    pairs: Mapping[tuple[int, int], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, group: Any = None, device: torch.device = CPU) -> Wires:
        """Of a process group (the default one without), for tensors on `device`. All ranks of the group call this.
        Raises BadInput where no process group is there."""
        if not dist.is_initialized():
            raise BadInput("no process group: call torch.distributed.init_process_group first (or use torchrun)")
        group = dist.distributed_c10d._get_default_group() if group is None else group
        rank, size, ranks = dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)
        try:
            data = group._get_backend(device)
        except RuntimeError:
            raise BadInput(f"the process group ({dist.get_backend(group)}) carries no tensors on {device}") from None
        notes = dist.distributed_c10d.PrefixStore(f"zbsolve/{group.group_name}", dist.distributed_c10d._get_default_store())
        if data.name() == "gloo":
            return cls(rank, size, data, data, notes)
        control = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)._get_backend(CPU)
        return cls(rank, size, data, control, notes)

    def paired(self, group: Any, device: torch.device, edges: Mapping[tuple[int, int], int]) -> Wires:
        """With a carrier of its own for each ordered pair of ranks that exchange messages (`edges`: → how many a step):
        memory where they share a machine; where the backend needs one, a communicator, so that two directions never wait
        for each other. All ranks of `group` call this, with the same edges."""
        if self.data is self.control:
            found = {pair: self._local(*pair, edges[pair]) for pair in sorted(edges)} if device.type == "cpu" else {}
            return replace(self, pairs={pair: end for pair, end in found.items() if end is not None})
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._get_default_group() if group is None else group)
        pairs = {
            (a, b): dist.new_group([ranks[a], ranks[b]], use_local_synchronization=True, group_desc=f"zbsolve {a} to {b}")
            for a, b in sorted(edges)
            if self.rank in (a, b)
        }
        return replace(self, pairs={pair: one._get_backend(device) for pair, one in pairs.items()})

    def _local(self, source: int, destination: int, messages: int) -> Outlet | Inlet | None:
        """This rank's end of memory that the two share; None, at both, where they do not."""
        if self.rank == source:
            outlet = Outlet.made(messages)
            send_bytes(self, b"" if outlet is None else outlet.offer, destination)
            taken = receive_bytes(self, destination) == TAKEN
            return None if outlet is None else outlet.agreed(taken)
        if self.rank == destination:
            inlet = Inlet.of(receive_bytes(self, source), self.control.options._timeout)  # as long as gloo waits
            send_bytes(self, b"" if inlet is None else TAKEN, source)
            return inlet
        return None

    def wait(self, work: Any, peer: int | None = None, timeout: timedelta | None = None) -> None:
        """For a work object (None: it is done) that concerns `peer` (None: all ranks); as long as the process group waits
        where no timeout is given. Raises LostRank."""
        try:
            if work is not None:
                _ = work.wait() if timeout is None else work.wait(timeout)
        except Exception as error:
            other = "" if peer is None else f"waiting for rank {peer}: "
            raise LostRank(f"{other}{reason(error)}", peer) from None

    def send(self, tensor: Tensor, destination: int, tag: int = DATA) -> Any:
        """Start sending; the work object (None: it has gone)."""
        pair = self.pairs.get((self.rank, destination))
        if pair is not None and (tag == DATA or isinstance(pair, Outlet)):
            return pair.send([tensor], int(self.rank < destination), tag)
        return (self.data if tag == DATA else self.control).send([tensor], destination, tag)

    def receive(self, tensor: Tensor, source: int, tag: int = DATA) -> Any:
        """Start receiving into `tensor`; the work object."""
        pair = self.pairs.get((source, self.rank))
        if pair is not None and (tag == DATA or isinstance(pair, Inlet)):
            return pair.recv([tensor], int(self.rank < source), tag)
        return (self.data if tag == DATA else self.control).recv([tensor], source, tag)

    def break_off(self) -> None:
        """End every connection of this rank, so that nobody waits for it: gloo does so where a receive ran out of time (but
        not where it is from a rank that is gone already)."""
        for other in set(range(self.size)) - {self.rank}:
            with suppress(Exception):
                self.control.recv([torch.empty(1)], other, STOPPED).wait(timedelta(milliseconds=1))
        for end in self._ends():
            end.break_off()

    def close(self) -> None:
        """Give back what `paired` made of this machine's memory."""
        for end in self._ends():
            end.close()

    def _ends(self) -> list[Inlet | Outlet]:
        return [end for end in self.pairs.values() if isinstance(end, (Inlet, Outlet))]


def reason(error: BaseException) -> str:
    """gloo's own words, shorter."""
    text = re.sub(r"\[[^]]*\.cc:\d+\] ", "", str(error)).split(". This is ")[0]
    if broken(text):
        return BROKE
    found = re.search(r"Timed out waiting (\d+)ms", text)
    if found:
        return f"nothing for {int(found[1]) / 1000:g} s"
    return "too long" if re.search(r"[Tt]imed out", text) else one_line(error)


def broken(text: str) -> bool:
    """Does gloo say that a connection ended?"""
    return re.search(r"[Cc]onnection (closed|reset) by peer|Broken pipe|pair closure|Socket closed", text) is not None


def send_bytes(wires: Wires, body: bytes, destination: int) -> None:
    """A length, then the bytes."""
    wires.wait(wires.send(torch.tensor([len(body)]), destination, BYTES), destination)
    if body:
        wires.wait(wires.send(torch.frombuffer(bytearray(body), dtype=torch.uint8), destination, BYTES), destination)


def receive_bytes(wires: Wires, source: int) -> bytes:
    """What `send_bytes` sent."""
    length = torch.zeros(1, dtype=torch.int64)
    wires.wait(wires.receive(length, source, BYTES), source)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if len(buffer):
        wires.wait(wires.receive(buffer, source, BYTES), source)
    return buffer.numpy().tobytes()


def clock_offset(wires: Wires, rounds: int = 20) -> int:
    """ns that this rank's monotonic clock is ahead of rank 0's, by the quickest of some round trips. Every rank calls."""
    stamp = torch.zeros(1, dtype=torch.int64)
    best = (1 << 62, 0)
    for other in range(1, wires.size):
        for _ in range(rounds if wires.rank in (0, other) else 0):
            if wires.rank == 0:
                wires.wait(wires.receive(stamp, other, BYTES), other)
                stamp[0] = time.monotonic_ns()
                wires.wait(wires.send(stamp, other, BYTES), other)
                continue
            sent = time.monotonic_ns()
            wires.wait(wires.send(stamp, 0, BYTES), 0)
            wires.wait(wires.receive(stamp, 0, BYTES), 0)
            back = time.monotonic_ns()
            best = min(best, (back - sent, (back + sent) // 2 - int(stamp)))
    return best[1]


def clock_lead(wires: Wires) -> int:
    """How far this rank's clock is ahead of rank 0's, ns; one machine has one clock."""
    mine = _machine()
    if wires.rank:
        send_bytes(wires, mine.encode(), 0)
        alike = receive_bytes(wires, 0) == b"one"
    else:
        alike = {receive_bytes(wires, other).decode() for other in range(1, wires.size)} <= {mine}
        for other in range(1, wires.size):
            send_bytes(wires, b"one" if alike else b"several", other)
    return 0 if alike else clock_offset(wires)


def _machine() -> str:
    """Names the running system: ranks that share it share its monotonic clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return socket.gethostname()
