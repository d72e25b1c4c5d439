"""A process group as wires between its ranks, and what its errors mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...util.errors import BadInput
from ..torch_private import backend_of, backend_timeout, default_group, default_store
from .failure import LostRank, one_line
from .shared_memory import ShmReceiver, ShmSender

CPU = torch.device("cpu")
# Tags (from STEP on: one a route). NCCL has none, but only DATA goes over it.
DATA, FORMATS, BYTES, STOPPED, TOTAL, STEP = 0, 1, 2, 3, 4, 5
BROKE = "the connection broke"
TAKEN = b"taken"


@dataclass(frozen=True)
class Wires:
    """A pipeline's process group as point-to-point wires.

    rank, size: in the group. data: carries the tensors. control: carries everything else (always gloo: CPU tensors, tags).
    notes: a store for what ranks leave for each other when they fail. pairs: what carries the messages of an ordered pair of
    ranks in place of both, or of `data` alone (see `paired`). All carriers are the backends themselves: the dispatcher in
    front of them would cost some µs a message.
    """

    rank: int
    size: int
    data: Any
    control: Any
    notes: Any
    pairs: Mapping[tuple[int, int], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, group: Any = None, device: torch.device = CPU) -> Wires:
        """The wires of a process group (None: the default one), for tensors on `device`. All ranks of the group call this.
        Raises BadInput where there is no process group, or it carries no tensors on the device."""
        if not dist.is_initialized():
            raise BadInput("no process group: call torch.distributed.init_process_group first (or use torchrun)")
        group = default_group() if group is None else group
        rank, size, ranks = dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)
        try:
            data = backend_of(group, device)
        except RuntimeError:
            raise BadInput(f"the process group ({dist.get_backend(group)}) carries no tensors on {device}") from None
        notes = dist.distributed_c10d.PrefixStore(f"zbsolve/{group.group_name}", default_store())
        if data.name() == "gloo":
            return cls(rank, size, data, data, notes)
        control = backend_of(dist.new_group(ranks, backend="gloo", use_local_synchronization=True), CPU)
        return cls(rank, size, data, control, notes)

    def paired(self, group: Any, device: torch.device, edges: Mapping[tuple[int, int], int]) -> Wires:
        """The same wires with a carrier of its own for each ordered pair of ranks in `edges` (→ messages a step).

        Two CPU ranks of one machine get memory that they share. Where the backend needs one, a pair gets a communicator, so
        that two directions never wait for each other. All ranks of `group` call this, with the same edges.
        """
        if self.data is self.control:
            found = {pair: self._local(*pair, edges[pair]) for pair in sorted(edges)} if device.type == "cpu" else {}
            return replace(self, pairs={pair: end for pair, end in found.items() if end is not None})
        ranks = dist.get_process_group_ranks(default_group() if group is None else group)
        pairs = {
            (a, b): dist.new_group([ranks[a], ranks[b]], use_local_synchronization=True, group_desc=f"zbsolve {a} to {b}")
            for a, b in sorted(edges)
            if self.rank in (a, b)
        }
        return replace(self, pairs={pair: backend_of(one, device) for pair, one in pairs.items()})

    def _local(self, source: int, destination: int, messages: int) -> ShmSender | ShmReceiver | None:
        """This rank's end of memory that the two ranks share; None at both where they share none."""
        if self.rank == source:
            sender = ShmSender.opened(messages)
            send_bytes(self, b"" if sender is None else sender.offer, destination)
            taken = receive_bytes(self, destination) == TAKEN
            return None if sender is None else sender.agreed(taken)
        if self.rank == destination:
            receiver = ShmReceiver.of(receive_bytes(self, source), backend_timeout(self.control))  # as long as gloo waits
            send_bytes(self, b"" if receiver is None else TAKEN, source)
            return receiver
        return None

    def wait(self, work: Any, peer: int | None = None, timeout: timedelta | None = None) -> None:
        """Wait for a work object (None: it is done) that concerns `peer` (None: all ranks). Without a timeout this waits as
        long as the process group does. Raises LostRank."""
        try:
            if work is not None:
                _ = work.wait() if timeout is None else work.wait(timeout)
        except Exception as error:
            other = "" if peer is None else f"waiting for rank {peer}: "
            raise LostRank(f"{other}{reason(error)}", peer) from None

    def send(self, tensor: Tensor, destination: int, tag: int = DATA) -> Any:
        """Start sending. The work object (None: it has gone)."""
        pair = self.pairs.get((self.rank, destination))
        if pair is not None and (tag == DATA or isinstance(pair, ShmSender)):
            return pair.send([tensor], int(self.rank < destination), tag)
        return (self.data if tag == DATA else self.control).send([tensor], destination, tag)

    def copies(self, destination: int) -> bool:
        """Is a tensor sent there copied at once, so that the sender keeps nothing?"""
        return isinstance(self.pairs.get((self.rank, destination)), ShmSender)

    def receive(self, tensor: Tensor, source: int, tag: int = DATA) -> Any:
        """Start receiving into `tensor`. The work object."""
        pair = self.pairs.get((source, self.rank))
        if pair is not None and (tag == DATA or isinstance(pair, ShmReceiver)):
            return pair.recv([tensor], int(self.rank < source), tag)
        return (self.data if tag == DATA else self.control).recv([tensor], source, tag)

    def break_off(self) -> None:
        """End every connection of this rank, so that nobody waits for it."""
        for other in set(range(self.size)) - {self.rank}:
            end_connection(self.control, other)
        for end in self._ends():
            end.break_off()

    def close(self) -> None:
        """Give back the memory that `paired` took."""
        for end in self._ends():
            end.close()

    def _ends(self) -> list[ShmReceiver | ShmSender]:
        return [end for end in self.pairs.values() if isinstance(end, (ShmReceiver, ShmSender))]


def end_connection(backend: Any, other: int, device: torch.device = CPU) -> None:
    """End the connection to another rank. gloo does so where a receive runs out of time, unless that rank is gone
    already."""
    with suppress(Exception):
        backend.recv([torch.empty(1, device=device)], other, STOPPED).wait(timedelta(milliseconds=1))


def reason(error: BaseException) -> str:
    """What gloo's error says, shorter."""
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
    """Send a length, then the bytes. Raises LostRank."""
    wires.wait(wires.send(torch.tensor([len(body)]), destination, BYTES), destination)
    if body:
        wires.wait(wires.send(torch.frombuffer(bytearray(body), dtype=torch.uint8), destination, BYTES), destination)


def receive_bytes(wires: Wires, source: int) -> bytes:
    """What `send_bytes` sent. Raises LostRank."""
    length = torch.zeros(1, dtype=torch.int64)
    wires.wait(wires.receive(length, source, BYTES), source)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if len(buffer):
        wires.wait(wires.receive(buffer, source, BYTES), source)
    return buffer.numpy().tobytes()
