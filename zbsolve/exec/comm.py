"""Messages between ranks over torch.distributed: receives posted ahead, sends that never block.

One thread a source waits for receives, so that an arrival is stamped when it happens and not when the rank looks; one a
destination keeps each sent tensor until it has gone. (gloo's work objects cannot be asked whether they are done.)
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .failure import LostRank, one_line
from .lower import Message

AHEAD = 2  # receives posted at a time, per source
Allocate = Callable[[Message], Tensor]


class Inbox:
    """Receives this rank's messages, in the order of the program. `allocate` gives the buffer of a message."""

    def __init__(self, incoming: Mapping[int, tuple[Message, ...]], allocate: Allocate, timeout: float) -> None:
        self._incoming = dict(incoming)
        self._allocate = allocate
        self._timeout = timeout
        self._changed = Condition()
        self._arrived: dict[Message, tuple[Tensor, int]] = {}
        self._broken: dict[int, str] = {}
        self._wanted: dict[int, SimpleQueue[Message | None]] = {source: SimpleQueue() for source in incoming}
        self._threads = [Thread(target=self._receive, args=(source,), daemon=True) for source in incoming]
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """A step starts: its messages may come."""
        for source, messages in self._incoming.items():
            for message in messages:
                self._wanted[source].put(message)

    def take(self, message: Message) -> tuple[Tensor, int]:
        """The tensor of `message` and when it had arrived, monotonic ns; waits. Raises LostRank."""
        with self._changed:
            self._changed.wait_for(lambda: message in self._arrived or message.source in self._broken, timeout=self._timeout)
            if message in self._arrived:
                return self._arrived.pop(message)
        reason = self._broken.get(message.source, f"nothing came for {self._timeout:g} s")
        raise LostRank(f"waiting for {message.before} from rank {message.source}: {reason}")

    def close(self) -> None:
        """End the threads; every message must have been taken."""
        for wanted in self._wanted.values():
            wanted.put(None)
        for thread in self._threads:
            thread.join(self._timeout)

    def _receive(self, source: int) -> None:
        wanted = self._wanted[source]
        posted: deque[tuple[Message, Tensor, Any]] = deque()
        try:
            while True:
                while len(posted) < AHEAD and not (posted and wanted.empty()):
                    message = wanted.get()
                    if message is None:
                        return
                    buffer = self._allocate(message)
                    posted.append((message, buffer, dist.irecv(buffer, source)))
                message, buffer, work = posted.popleft()
                work.wait()
                arrival = time.monotonic_ns()
                with self._changed:
                    self._arrived[message] = buffer, arrival
                    self._changed.notify_all()
                del buffer, work
        except Exception as error:
            with self._changed:
                self._broken[source] = _reason(error)
                self._changed.notify_all()


class Outbox:
    """Sends without blocking; `flush` waits until everything has gone."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._changed = Condition()
        self._open = 0
        self._broken: str | None = None
        self._sent: dict[int, SimpleQueue[Any]] = {}
        self._threads: list[Thread] = []

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending. Raises LostRank."""
        destination = message.destination
        if destination not in self._sent:
            self._sent[destination] = SimpleQueue()
            self._threads.append(Thread(target=self._keep, args=(destination,), daemon=True))
            self._threads[-1].start()
        tensor = tensor.contiguous()
        try:
            work = dist.isend(tensor, destination)
        except Exception as error:
            raise LostRank(f"sending {message.before} to rank {destination}: {_reason(error)}") from None
        with self._changed:
            self._open += 1
        self._sent[destination].put((work, tensor))

    def flush(self) -> None:
        """Wait until every tensor has gone. Raises LostRank."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0 or self._broken is not None, timeout=self._timeout)
            if self._broken is not None or self._open:
                raise LostRank(f"sending: {self._broken or f'not taken for {self._timeout:g} s'}")

    def close(self) -> None:
        """End the threads."""
        for sent in self._sent.values():
            sent.put(None)
        for thread in self._threads:
            thread.join(self._timeout)

    def _keep(self, destination: int) -> None:
        while (pair := self._sent[destination].get()) is not None:
            work, tensor = pair
            broken = None
            try:
                work.wait()
            except Exception as error:
                broken = f"to rank {destination}: {_reason(error)}"
            del pair, work, tensor  # before the next `get` blocks: the tensor's memory goes now
            with self._changed:
                self._open -= 1
                self._broken = self._broken or broken
                self._changed.notify_all()


def _reason(error: BaseException) -> str:
    """gloo's own words without its source lines and advice."""
    return re.sub(r"\[[^]]*\.cc:\d+\] ", "", one_line(error)).split(". This is ")[0]


def send_bytes(body: bytes, destination: int) -> None:
    """A length, then the bytes."""
    dist.send(torch.tensor([len(body)]), destination)
    if body:
        dist.send(torch.frombuffer(bytearray(body), dtype=torch.uint8), destination)


def receive_bytes(source: int) -> bytes:
    """What `send_bytes` sent."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if len(buffer):
        dist.recv(buffer, source)
    return buffer.numpy().tobytes()


def clock_offset(rank: int, ranks: int, rounds: int = 20) -> int:
    """ns that this rank's monotonic clock is ahead of rank 0's, by the quickest of some round trips. Every rank calls."""
    stamp = torch.zeros(1, dtype=torch.int64)
    best = (1 << 62, 0)
    for other in range(1, ranks):
        for _ in range(rounds if rank in (0, other) else 0):
            if rank == 0:
                dist.recv(stamp, other)
                stamp[0] = time.monotonic_ns()
                dist.send(stamp, other)
                continue
            sent = time.monotonic_ns()
            dist.send(stamp, 0)
            dist.recv(stamp, 0)
            back = time.monotonic_ns()
            best = min(best, (back - sent, (back + sent) // 2 - int(stamp)))
    return best[1]
