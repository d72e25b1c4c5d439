"""`Wires`: the point-to-point connections between the ranks of a process group; and what the backends' errors mean."""

from __future__ import annotations

import hashlib
import json
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
# Message tags; from STEP on, one for each route of microbatches. NCCL has no tags, but carries DATA alone.
DATA, FORMATS, BYTES, STOPPED, TOTAL, STEP = 0, 1, 2, 3, 4, 5
BROKE = "the connection broke"
ABORT_SECONDS = 10.0  # to wait for communicators to abort
SHORTEST, LONGEST = 1e-5, 1e-3  # seconds between two polls: at first, and in the end


@dataclass(frozen=True)
class Wires:
    """The connections of a pipeline's process group.

    rank, size: in the group. device: of the tensors that messages carry. control: the gloo backend that carries everything
    else (CPU tensors, with tags). notes: a store where a failing rank leaves a note for the others. pairs: (source,
    destination) → a connection for the messages of these two ranks alone (see `paired`). All of these are backends without
    torch's dispatcher, which takes some µs a message.
    """

    rank: int
    size: int
    device: torch.device
    control: Any
    notes: Any
    pairs: Mapping[tuple[int, int], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, group: Any = None, device: torch.device = CPU) -> Wires:
        """The connections of a process group (None: the default one), for tensors on `device`. All ranks of the group call
        this. Raises BadInput where there is no process group, or its backend does not carry tensors on the device. (gloo
        claims that it carries those of GPUs, and then crashes the process.)"""
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
        """These wires with a connection of its own for each (source, destination) in `edges` (→ messages of a step).

        Two CPU ranks on one machine share memory. On GPUs each pair gets an NCCL communicator, so that the two
        directions never wait for each other. It is made here, since making it blocks the host until both ranks do. All
        ranks call this with the same edges, and make their pairs in the same order.
        """
        if self.device.type == "cpu":
            return replace(self, pairs=self._local(edges))
        token = self.token()
        return replace(self, pairs={pair: self._connected(*pair, token) for pair in sorted(edges) if self.rank in pair})

    def token(self) -> str:
        """A unique name, the same on all ranks. All of them call this. Raises LostRank."""
        return str(self.told(uuid4().hex)[0])

    def _connected(self, source: int, destination: int, token: str) -> Any:
        """This rank's end of an NCCL communicator; a first message has gone through it. Raises LostRank."""
        other = destination if self.rank == source else source
        place = int(self.rank > other), 2
        pair = own_backend("nccl", f"zbsolve/{token}/{source}-{destination}", place, self.timeout)
        try:
            row = torch.zeros(1, device=self.device)
            send = self.rank == source
            (pair.send if send else pair.recv)([row], 1 - place[0], DATA).wait()
            passed(self.device, self.timeout)
        except Exception as error:
            abort([pair])
            raise LostRank(f"connecting to rank {other}: {reason(error)}", other) from None
        return pair

    def _local(self, edges: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], ShmSender | ShmReceiver]:
        """This rank's ends of the memory that pairs of ranks share; of pairs that cannot share any, neither has one."""
        opened = {b: ShmSender.opened(count) for (a, b), count in edges.items() if a == self.rank}
        offers = self.told([(b, sender.offer) for b, sender in opened.items() if sender is not None])
        own = ((a, offer) for a, of_rank in enumerate(offers) for b, offer in of_rank if b == self.rank)
        made = {a: ShmReceiver.of(offer, self.timeout) for a, offer in own}
        receivers = {a: receiver for a, receiver in made.items() if receiver is not None}
        taken = self.told(list(receivers))
        senders = {b: sender.agreed(self.rank in taken[b]) for b, sender in opened.items() if sender is not None}
        return {
            **{(a, self.rank): receiver for a, receiver in receivers.items()},
            **{(self.rank, b): sender for b, sender in senders.items() if sender is not None},
        }

    @property
    def timeout(self) -> timedelta:
        """How long the process group waits."""
        return backend_timeout(self.control)

    def wait(self, work: Any, peer: int | None = None, timeout: timedelta | None = None) -> None:
        """Wait for a work handle (None: done already) that depends on `peer` (None: on all ranks). Without a timeout this
        waits as long as the process group does. Raises LostRank."""
        with losing(peer):
            if work is not None:
                _ = work.wait() if timeout is None else work.wait(timeout)

    def gather(self, row: Tensor) -> tuple[Any, Tensor]:
        """Start to gather a row of numbers from each rank. Returns the work handle (None: done) and the rows, filled when it
        is done: shape (ranks, numbers). All ranks call this."""
        if self.size == 1:
            return None, row[None]
        everything = row.new_empty((self.size, len(row)))
        return self.control.allgather([list(everything.unbind())], [row]), everything

    def told(self, value: Any) -> list[Any]:
        """The plain values (see `json`) of all ranks. All of them call this, and wait for all. Raises LostRank."""
        body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        work, sizes = self.gather(torch.tensor([len(body)]))
        self.wait(work)
        work, rows = self.gather(torch.cat([body, body.new_zeros(int(sizes.max()) - len(body))]))
        self.wait(work)
        return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes.ravel().tolist(), strict=True)]

    def send(self, tensor: Tensor, destination: int, tag: int = DATA) -> Any:
        """Start to send. Returns the work handle (None: it has left)."""
        pair = self.pairs.get((self.rank, destination))
        if pair is not None and (tag == DATA or isinstance(pair, ShmSender)):
            return pair.send([tensor], int(self.rank < destination), tag)
        return self.control.send([tensor], destination, tag)

    def copies(self, destination: int) -> bool:
        """Does sending to this rank copy the tensor at once, so that the sender need not keep it?"""
        return isinstance(self.pairs.get((self.rank, destination)), ShmSender)

    def receive(self, tensor: Tensor, source: int, tag: int = DATA) -> Any:
        """Start to receive into `tensor`. Returns the work handle."""
        pair = self.pairs.get((source, self.rank))
        if pair is not None and (tag == DATA or isinstance(pair, ShmReceiver)):
            return pair.recv([tensor], int(self.rank < source), tag)
        return self.control.recv([tensor], source, tag)

    def break_off(self) -> None:
        """Break all connections of this rank, so that no other rank waits for it."""
        for other in set(range(self.size)) - {self.rank}:
            end_connection(self.control, other)
        for end in self.pairs.values():
            if isinstance(end, (ShmReceiver, ShmSender)):
                end.break_off()
        self.abort()

    def abort(self) -> None:
        """Abort the communicators of this rank's GPU."""
        abort(end for end in self.pairs.values() if not isinstance(end, (ShmReceiver, ShmSender)))

    def close(self) -> None:
        """Close what `paired` opened. (If torch closed a communicator itself, it would wait for the other rank to do so.)"""
        for end in self.pairs.values():
            if isinstance(end, (ShmReceiver, ShmSender)):
                end.close()
        self.abort()


ALONE = Wires(0, 1, CPU, None, None)  # for a single rank, which sends nothing


def joined(work: Any, timeout: timedelta | None, device: torch.device) -> None:
    """Make what follows wait for the work. On a GPU the current stream waits, and the host goes on; with a timeout the host
    would wait. On a CPU the host waits. timeout: None: the process group's."""
    _ = work.wait() if device.type == "cuda" or timeout is None else work.wait(timeout)


def all_of(group: Any, own: Tensor, what: str, timeout: timedelta | None = None) -> Tensor:
    """The tensors of all ranks of a group, shape (ranks, …). All of them call this. Raises LostRank naming `what`."""
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with waiting(what):
        joined(dist.all_gather(rows, own, group=group, async_op=True), timeout, own.device)
    return torch.stack(rows)


def digest(content: str) -> int:
    """A hash of a text that fits into an int64."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:7], "big")


def passed(device: torch.device, timeout: timedelta) -> None:
    """Wait until a GPU has done all that was launched on its current stream. Raises TimeoutError. (Waiting for the whole
    device would never end where another rank is lost.)"""
    event = torch.cuda.current_stream(device).record_event()
    if not came_true(event.query, timeout.total_seconds()):
        raise TimeoutError(f"nothing for {timeout.total_seconds():g} s")


def came_true(done: Callable[[], bool], seconds: float, longest: float = LONGEST) -> bool:
    """Poll until `done()` is true: False where it is not within `seconds`. longest: seconds between two polls in the end."""
    pause, until = min(SHORTEST, longest), time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
    return True


def connect(groups: Iterable[Any], device: torch.device, timeout: timedelta) -> None:
    """On a GPU, make the communicators of process groups now; each would otherwise block the host at its first use. All
    ranks of each group call this. Raises TimeoutError where one does not."""
    if device.type == "cuda":
        for group in groups:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        passed(device, timeout)


def abort(backends: Iterable[Any]) -> None:
    """Abort NCCL communicators: their kernels on this GPU end, whatever they wait for. All are aborted at once, since an
    abort frees memory: that waits for the device, and so for the kernels of the others."""
    call_beside(backend.abort for backend in backends)


def call_beside(calls: Iterable[Callable[[], None]]) -> None:
    """Make all these calls, each in a thread, and wait for up to ABORT_SECONDS. Their exceptions are ignored."""
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
    """Break the connection to another rank: gloo does so when a receive times out, unless that rank is gone already."""
    with suppress(Exception):
        backend.recv([torch.empty(1, device=device)], other, STOPPED).wait(timedelta(milliseconds=1))


def break_off_groups(groups: Iterable[Any], device: torch.device) -> None:
    """Break this rank's connections over groups with tensors on `device`, so that no rank waits for it."""
    if device.type == "cuda":
        abort(backend_of(group, device) for group in groups)
        return
    for group in groups:
        for other in set(range(dist.get_world_size(group))) - {dist.get_rank(group)}:
            end_connection(backend_of(group, device), other, device)


@contextmanager
def losing(peer: int | None, does: str = "") -> Iterator[None]:
    """Any exception of a backend inside means that `peer` (None: some rank) is lost: raises LostRank. does: what this rank
    does meanwhile, in words that begin the message; "": it waits for the peer."""
    try:
        yield
    except Exception as error:
        does = does or ("" if peer is None else f"waiting for rank {peer}: ")
        raise LostRank(f"{does}{reason(error)}", peer) from None


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Turn a backend's error inside into a LostRank that says what was waited for."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LostRank(f"waiting for the {what}: {reason(error)}") from error


def stamped(work: Any, times: list[int]) -> Any:
    """The same work handle; when it is done, the time (monotonic ns) is appended to `times`."""
    work.get_future().add_done_callback(lambda _: times.append(time.monotonic_ns()))
    return work


def reason(error: BaseException) -> str:
    """gloo's error message in short."""
    text = re.sub(r"\[[^]]*\.cc:\d+\] ", "", str(error)).split(". This is ")[0]
    if broken(text):
        return BROKE
    match = re.search(r"Timed out waiting (\d+)ms", text)
    if match:
        return f"nothing for {int(match[1]) / 1000:g} s"
    return "too long" if re.search(r"[Tt]imed out", text) else one_line(error)


def broken(text: str) -> bool:
    """Does this error message of gloo say that a connection ended?"""
    return re.search(r"[Cc]onnection (closed|reset) by peer|Broken pipe|pair closure|Socket closed", text) is not None
