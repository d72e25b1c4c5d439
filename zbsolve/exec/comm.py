"""Messages between ranks over torch.distributed: receives posted ahead, sends that never block.

The walking thread itself posts and waits: handing a message from one thread to another costs more than the message.
"""

from __future__ import annotations

import re
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import BadInput
from .failure import LostRank, one_line
from .lower import Message

Shape = tuple[torch.Size, torch.dtype]
CPU = torch.device("cpu")
POLL = 0.001  # seconds between looks at what was sent
DATA, SHAPES, STEP, BYTES, STOPPED, TOTAL = 0, 1, 2, 3, 4, 5  # tags; NCCL has none, but only DATA goes over it
BROKE = "the connection broke"
DIMENSIONS = 12  # of the largest tensor that can be sent
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Wires:
    """A pipeline's process group as point-to-point wires. `rank`, `size`: in the group. `data` carries the tensors,
    `control` (always gloo: CPU tensors, tags) everything else; where the backend has no tags, `pairs` holds a
    communicator for each ordered pair of ranks, so that two directions never wait for each other. All are the backends
    themselves: the dispatcher in front of them would cost some µs a message. `notes`: a store for what ranks leave for
    each other when they fail."""

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

    def paired(self, group: Any, device: torch.device, edges: Iterable[tuple[int, int]]) -> Wires:
        """With a communicator a pair of `edges` (the ordered pairs of ranks that exchange messages), where the backend
        needs one. All ranks of `group` call this, with the same edges."""
        if self.data is self.control:
            return self
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._get_default_group() if group is None else group)
        pairs = {
            (a, b): dist.new_group([ranks[a], ranks[b]], use_local_synchronization=True, group_desc=f"zbsolve {a} to {b}")
            for a, b in sorted(edges)
            if self.rank in (a, b)
        }
        return replace(self, pairs={pair: one._get_backend(device) for pair, one in pairs.items()})

    def wait(self, work: Any, peer: int | None = None, timeout: timedelta | None = None) -> None:
        """For a work object that concerns `peer` (None: all ranks); as long as the process group waits where no timeout
        is given. Raises LostRank."""
        try:
            _ = work.wait() if timeout is None else work.wait(timeout)
        except Exception as error:
            other = "" if peer is None else f"waiting for rank {peer}: "
            raise LostRank(f"{other}{reason(error)}", peer) from None

    def send(self, tensor: Tensor, destination: int, tag: int = DATA) -> Any:
        """Start sending; the work object."""
        if tag != DATA:
            return self.control.send([tensor], destination, tag)
        if (self.rank, destination) not in self.pairs:
            return self.data.send([tensor], destination, tag)
        return self.pairs[self.rank, destination].send([tensor], int(self.rank < destination), tag)

    def receive(self, tensor: Tensor, source: int, tag: int = DATA) -> Any:
        """Start receiving into `tensor`; the work object."""
        if tag != DATA:
            return self.control.recv([tensor], source, tag)
        if (source, self.rank) not in self.pairs:
            return self.data.recv([tensor], source, tag)
        return self.pairs[source, self.rank].recv([tensor], int(self.rank < source), tag)


class Links:
    """One rank's messages, step after step.

    Every message's shape and dtype are agreed once for each shape of input (numbered by the first stage's rank): the
    first activation of that number over a boundary is preceded by its shape, and known at both ends from then on; its
    gradient has the same. So receives can be posted ahead, also where microbatches differ.
    """

    def __init__(
        self, wires: Wires, incoming: Mapping[int, Sequence[Message]], device: torch.device, timeout: float
    ) -> None:
        self._wires = wires
        self._incoming = dict(incoming)
        self._device = device
        self._timeout = timedelta(seconds=timeout)
        self._shapes: dict[tuple[int, int], Shape] = {}
        self._numbers: Mapping[int, int] = {}
        self._unposted: dict[int, deque[Message]] = {}
        self._posted: dict[Message, tuple[Any, Tensor]] = {}
        self._sent = _Sent(self._timeout)

    def begin(self, numbers: Mapping[int, int]) -> None:
        """A step starts: its messages may come. `numbers`: microbatch → the number of its input's shape."""
        self._numbers = numbers
        self._unposted = {source: deque(messages) for source, messages in self._incoming.items()}

    def again(self, counts: Mapping[int, int]) -> None:
        """The step starts anew, after each source has sent as many messages as `counts` says: those that were not taken
        are waited for and dropped. Raises LostRank."""
        for source, count in counts.items():
            for message in self._incoming[source][:count]:
                if message in self._posted or message in self._unposted[source]:
                    self.take(message)
        self.begin(self._numbers)

    def post(self, message: Message) -> None:
        """Post its receive, and those before it from its source, as far as shapes are known; never waits."""
        waiting = self._unposted[message.source]
        while message not in self._posted and waiting:
            shape = self._shapes.get(self._key(waiting[0]))
            if shape is None:
                return
            self._receive(waiting.popleft(), shape)

    def take(self, message: Message) -> tuple[Tensor, int]:
        """The tensor of `message` and when this rank had it, monotonic ns; waits. Raises LostRank."""
        try:
            posted = self._posted.pop(message, None)
            while posted is None:
                first = self._unposted[message.source].popleft()
                key = self._key(first)
                if key not in self._shapes:
                    self._shapes[key] = self._asked(first.source)
                self._receive(first, self._shapes[key])
                posted = self._posted.pop(message, None)
            work, tensor = posted
            work.wait(self._timeout)
            return tensor, time.monotonic_ns()
        except Exception as error:
            text = f"waiting for {message.before} from rank {message.source}: {reason(error)}"
            raise LostRank(text, message.source) from None

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending; never waits. Raises BadInput for another shape than agreed, LostRank."""
        key = self._key(message)
        agreed = self._shapes.get(key)
        try:
            if agreed is None:
                self._shapes[key] = tensor.shape, tensor.dtype
                header = _header(tensor, message)
                self._sent.keep(self._wires.send(header, message.destination, SHAPES), header)
            elif tensor.shape != agreed[0] or tensor.dtype != agreed[1]:
                made, wanted = (f"{tuple(shape)} {kind}" for shape, kind in ((tensor.shape, tensor.dtype), agreed))
                raise BadInput(f"makes {made}, not {wanted} as before for an input of the same shape")
            tensor = tensor.contiguous()
            self._sent.keep(self._wires.send(tensor, message.destination), tensor)
        except BadInput:
            raise
        except Exception as error:
            text = f"sending {message.before} to rank {message.destination}: {reason(error)}"
            raise LostRank(text, message.destination) from None

    def flush(self) -> None:
        """Wait until everything has gone. Raises LostRank."""
        self._sent.flush()

    def size(self, message: Message) -> int:
        """Bytes of a message of the last step, that this rank sent or took."""
        shape, dtype = self._shapes[self._key(message)]
        return shape.numel() * dtype.itemsize

    def tell(self, tensor: Tensor, destination: int, tag: int) -> None:
        """Start sending something beside the messages; never waits. Raises LostRank."""
        try:
            self._sent.keep(self._wires.send(tensor, destination, tag), tensor)
        except Exception as error:
            raise LostRank(f"sending to rank {destination}: {reason(error)}", destination) from None

    def ask(self, tensor: Tensor, source: int, tag: int) -> None:
        """Wait for what `tell` sent. Raises LostRank."""
        self._wires.wait(self._wires.receive(tensor, source, tag), source, self._timeout)

    def _key(self, message: Message) -> tuple[int, int]:
        return message.boundary, self._numbers[message.microbatch]

    def _receive(self, message: Message, shape: Shape) -> None:
        buffer = torch.empty(shape[0], dtype=shape[1], device=self._device)
        self._posted[message] = self._wires.receive(buffer, message.source), buffer

    def _asked(self, source: int) -> Shape:
        header = torch.empty(DIMENSIONS + 2, dtype=torch.int64)
        self._wires.receive(header, source, SHAPES).wait(self._timeout)
        kind, dimensions, *sizes = header.tolist()
        return torch.Size(sizes[:dimensions]), DTYPES[kind]


def _header(tensor: Tensor, message: Message) -> Tensor:
    if tensor.dtype not in DTYPES or tensor.dim() > DIMENSIONS:
        raise BadInput(f"its output is {tensor.dtype} of {tensor.dim()} dimensions: what can be sent is {DTYPES}")
    rest = [0] * (DIMENSIONS - tensor.dim())
    return torch.tensor([DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *rest])


class _Sent:
    """Keeps what was sent until it has gone. gloo's work objects cannot be asked, so a thread waits for them; it looks
    from time to time, because waking it for every message would cost the walking thread more than the message."""

    def __init__(self, timeout: timedelta) -> None:
        self._open: deque[tuple[Any, Tensor]] = deque()
        self._broken: list[str] = []
        self._looking = Lock()
        self._busy = Event()
        self._timeout = timeout
        closed = Event()
        everything = self._open, self._broken, self._looking, self._busy, closed, timeout
        Thread(target=_look, args=everything, daemon=True).start()
        weakref.finalize(self, _close, self._busy, closed)

    def keep(self, work: Any, tensor: Tensor) -> None:
        """Reference `tensor` until `work` is done."""
        self._open.append((work, tensor))
        if not self._busy.is_set():
            self._busy.set()

    def flush(self) -> None:
        """Wait for all of it. Raises LostRank."""
        if not self._looking.acquire(timeout=self._timeout.total_seconds()):
            raise LostRank(f"sending: not taken for {self._timeout.total_seconds():g} s")
        try:
            _wait_for(self._open, self._broken, self._timeout)
            self._busy.clear()
        finally:
            self._looking.release()
        if self._broken:
            raise LostRank(f"sending: {self._broken[0]}")


def _look(
    sent: deque[tuple[Any, Tensor]], broken: list[str], looking: Lock, busy: Event, closed: Event, timeout: timedelta
) -> None:
    """The thread's work, until `closed`; it sleeps while nothing is on its way."""
    while busy.wait() and not closed.is_set():
        with looking:
            _wait_for(sent, broken, timeout)
        time.sleep(POLL)


def _wait_for(sent: deque[tuple[Any, Tensor]], broken: list[str], timeout: timedelta) -> None:
    while sent:
        work, tensor = sent[0]
        try:
            if tensor.is_cuda:  # NCCL's wait lets a stream wait, but the memory must stay until the device is done
                while not work.is_completed():
                    time.sleep(POLL)
            else:
                work.wait(timeout)
        except Exception as error:
            broken.append(reason(error))
        del work, tensor
        sent.popleft()


def _close(busy: Event, closed: Event) -> None:
    closed.set()
    busy.set()


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
