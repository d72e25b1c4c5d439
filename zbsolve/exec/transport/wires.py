"""A process group as wires between its ranks, and what its errors mean."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from threading import Thread
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from ...util.errors import BadInput, LostRank, one_line
from ..base.torch_private import backend_name, backend_of, backend_timeout, default_group, default_store, own_backend
from .shared_memory import ShmReceiver, ShmSender

CPU = torch.device("cpu")
# Tags (from STEP on: one a route). NCCL has none, but only DATA goes over it.
DATA, FORMATS, BYTES, STOPPED, TOTAL, STEP = 0, 1, 2, 3, 4, 5
BROKE = "the connection broke"
TAKEN = b"taken"
ABORT_SECONDS = 10.0  # for communicators to end
POLL_SECONDS = 1e-4


@dataclass(frozen=True)
class Wires:
    """A pipeline's process group as point-to-point wires.

    rank, size: in the group. device: of the tensors that messages carry. control: carries everything else (always gloo: CPU
    tensors, tags). notes: a store for what ranks leave for each other when they fail. pairs: what carries the messages of an
    ordered pair of ranks in place of it (see `paired`). All carriers are the backends themselves: the dispatcher in front of
    them would cost some µs a message.
    """

    rank: int
    size: int
    device: torch.device
    control: Any
    notes: Any
    pairs: Mapping[tuple[int, int], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, group: Any = None, device: torch.device = CPU) -> Wires:
        """The wires of a process group (None: the default one), for tensors on `device`. All ranks of the group call this.
        Raises BadInput where there is no process group, or it carries no tensors on the device (gloo says that it carries
        those of GPUs, and ends the process)."""
        if not dist.is_initialized():
            raise BadInput("no process group: call torch.distributed.init_process_group first (or use torchrun)")
        group = default_group() if group is None else group
        rank, size, ranks = dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)
        wanted = "gloo" if device.type == "cpu" else "nccl"
        if backend_name(group, device) != wanted:
            carries = dist.get_backend_config(group)
            raise BadInput(
                f"the process group ({carries}) carries no tensors on {device}: "
                f"init_process_group('{'gloo' if wanted == 'gloo' else 'cpu:gloo,cuda:nccl'}') does"
            )
        notes = dist.distributed_c10d.PrefixStore(f"zbsolve/{group.group_name}", default_store())
        if backend_name(group, CPU) != "gloo":
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return cls(rank, size, device, backend_of(group, CPU), notes)

    def paired(self, edges: Mapping[tuple[int, int], int]) -> Wires:
        """The same wires with a carrier of its own for each ordered pair of ranks in `edges` (→ messages a step).

        Two CPU ranks of one machine get memory that they share. On GPUs each pair gets a communicator of NCCL, so that two
        directions never wait for each other; it is made here, for making one holds the host until both ranks come to it. All
        ranks call this, with the same edges, and come to their pairs in one order.
        """
        if self.device.type == "cpu":
            ends = {pair: self._local(*pair, edges[pair]) for pair in sorted(edges)}
        else:
            token = self.token()
            ends = {pair: self._connected(*pair, token) for pair in sorted(edges) if self.rank in pair}
        return replace(self, pairs={pair: end for pair, end in ends.items() if end is not None})

    def token(self) -> str:
        """A name that no other call gave, the same on all ranks. All of them call this. Raises LostRank."""
        row = torch.frombuffer(bytearray(uuid4().bytes), dtype=torch.uint8)
        self.wait(self.control.broadcast(row, 0))
        return row.numpy().tobytes().hex()

    def _connected(self, source: int, destination: int, token: str) -> Any:
        """This rank's end of a communicator whose first message is through. Raises LostRank."""
        other = destination if self.rank == source else source
        place = int(self.rank > other), 2
        pair = own_backend("nccl", f"zbsolve/{token}/{source}-{destination}", place, backend_timeout(self.control))
        try:
            row = torch.zeros(1, device=self.device)
            send = self.rank == source
            (pair.send if send else pair.recv)([row], 1 - place[0], DATA).wait()
            passed(self.device, backend_timeout(self.control))
        except Exception as error:
            abort([pair])
            raise LostRank(f"connecting to rank {other}: {reason(error)}", other) from None
        return pair

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

    def gather(self, row: Tensor) -> tuple[Any, Tensor]:
        """Begin to tell all ranks a row of numbers. The work object, and what all of them tell once that is done, shape
        (ranks, numbers). All ranks call this."""
        everything = row.new_empty((self.size, len(row)))
        return self.control.allgather([list(everything.unbind())], [row]), everything

    def send(self, tensor: Tensor, destination: int, tag: int = DATA) -> Any:
        """Start sending. The work object (None: it has gone)."""
        pair = self.pairs.get((self.rank, destination))
        if pair is not None and (tag == DATA or isinstance(pair, ShmSender)):
            return pair.send([tensor], int(self.rank < destination), tag)
        return self.control.send([tensor], destination, tag)

    def copies(self, destination: int) -> bool:
        """Is a tensor sent there copied at once, so that the sender keeps nothing?"""
        return isinstance(self.pairs.get((self.rank, destination)), ShmSender)

    def receive(self, tensor: Tensor, source: int, tag: int = DATA) -> Any:
        """Start receiving into `tensor`. The work object."""
        pair = self.pairs.get((source, self.rank))
        if pair is not None and (tag == DATA or isinstance(pair, ShmReceiver)):
            return pair.recv([tensor], int(self.rank < source), tag)
        return self.control.recv([tensor], source, tag)

    def break_off(self) -> None:
        """End every connection of this rank, so that nobody waits for it."""
        for other in set(range(self.size)) - {self.rank}:
            end_connection(self.control, other)
        for end in self.pairs.values():
            if isinstance(end, (ShmReceiver, ShmSender)):
                end.break_off()
        self.abort()

    def abort(self) -> None:
        """End the communicators of this rank's device."""
        abort(end for end in self.pairs.values() if not isinstance(end, (ShmReceiver, ShmSender)))

    def close(self) -> None:
        """Give back what `paired` took. (A communicator that torch ends by itself waits for its other rank to do so.)"""
        for end in self.pairs.values():
            if isinstance(end, (ShmReceiver, ShmSender)):
                end.close()
        self.abort()


ALONE = Wires(0, 1, CPU, None, None)  # of one rank, which never speaks


def joined(work: Any, timeout: timedelta | None, device: torch.device) -> None:
    """What comes next is behind the work. On a GPU the current stream waits, and the host goes on: with a timeout the host
    would wait. Elsewhere the host does. timeout: None: as long as the process group's."""
    _ = work.wait() if device.type == "cuda" or timeout is None else work.wait(timeout)


def all_of(group: Any, own: Tensor, what: str, timeout: timedelta | None = None) -> Tensor:
    """What all ranks of a process group tell, shape (ranks, …). All of them call this. Raises LostRank naming `what`."""
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with waiting(what):
        joined(dist.all_gather(rows, own, group=group, async_op=True), timeout, own.device)
    return torch.stack(rows)


def digest(content: str) -> int:
    """A number for a text, which fits a tensor."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:7], "big")


def passed(device: torch.device, timeout: timedelta) -> None:
    """Wait until a GPU is behind all that was launched on its current stream. Raises TimeoutError. (To wait for the device
    itself has no end where another rank is gone.)"""
    event, until = torch.cuda.current_stream(device).record_event(), time.monotonic() + timeout.total_seconds()
    while not event.query():
        if time.monotonic() > until:
            raise TimeoutError(f"nothing for {timeout.total_seconds():g} s")
        time.sleep(POLL_SECONDS)


def connect(groups: Iterable[Any], device: torch.device, timeout: timedelta) -> None:
    """On a GPU make the communicators of process groups here: at its first use each would hold the host. All their ranks
    call this. Raises TimeoutError where one does not."""
    if device.type == "cuda":
        for group in groups:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        passed(device, timeout)


def abort(backends: Iterable[Any]) -> None:
    """End communicators of NCCL: their kernels on this rank's device end, whatever they wait for. All at once: one gives its
    memory back, which waits for the device, and so for the kernels of those that are still to end."""
    call_beside(backend.abort for backend in backends)


def call_beside(calls: Iterable[Callable[[], None]]) -> None:
    """Call all of these, each by a thread, and wait for them up to ABORT_SECONDS. What they raise is of no use."""
    ending = [Thread(target=_called, args=(call,), daemon=True) for call in calls]
    for thread in ending:
        thread.start()
    until = time.monotonic() + ABORT_SECONDS
    for thread in ending:
        thread.join(max(0.0, until - time.monotonic()))


def _called(call: Callable[[], None]) -> None:
    with suppress(Exception):
        call()


def end_connection(backend: Any, other: int, device: torch.device = CPU) -> None:
    """End the connection to another rank. gloo does so where a receive runs out of time, unless that rank is gone
    already."""
    with suppress(Exception):
        backend.recv([torch.empty(1, device=device)], other, STOPPED).wait(timedelta(milliseconds=1))


def break_off_groups(groups: Iterable[Any], device: torch.device) -> None:
    """End this rank's connections over process groups that carry tensors on a device, so that none of their other ranks
    waits for it."""
    if device.type == "cuda":
        abort(backend_of(group, device) for group in groups)
        return
    for group in groups:
        for other in set(range(dist.get_world_size(group))) - {dist.get_rank(group)}:
            end_connection(backend_of(group, device), other, device)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """What a backend says of a lost rank, in a line that says of what: raises LostRank."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LostRank(f"waiting for the {what}: {reason(error)}") from error


def stamped(work: Any, times: list[int]) -> Any:
    """The same work; when it is done, the time is put into `times`, monotonic ns."""
    work.get_future().add_done_callback(lambda _: times.append(time.monotonic_ns()))
    return work


def reason(error: BaseException) -> str:
    """What gloo's error says, shorter."""
    text = re.sub(r"\[[^]]*\.cc:\d+\] ", "", str(error)).split(". This is ")[0]
    if broken(text):
        return BROKE
    match = re.search(r"Timed out waiting (\d+)ms", text)
    if match:
        return f"nothing for {int(match[1]) / 1000:g} s"
    return "too long" if re.search(r"[Tt]imed out", text) else one_line(error)


def broken(text: str) -> bool:
    """Does gloo say that a connection ended?"""
    return re.search(r"[Cc]onnection (closed|reset) by peer|Broken pipe|pair closure|Socket closed", text) is not None


def send_tensor(wires: Wires, tensor: Tensor, destination: int) -> None:
    """Send a tensor outside of a step, through host memory. Raises LostRank."""
    wires.wait(wires.control.send([tensor.detach().cpu().contiguous()], destination, BYTES), destination)


def receive_tensor(wires: Wires, into: Tensor, source: int) -> None:
    """What `send_tensor` sent. Raises LostRank."""
    row = torch.empty_like(into, device=CPU, memory_format=torch.contiguous_format)
    wires.wait(wires.control.recv([row], source, BYTES), source)
    into.copy_(row)


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
