"""Messages between ranks: receives posted ahead, sends that never block.

The thread that runs the passes posts and waits itself: handing a message from one thread to another costs more than the
message.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...util.errors import BadInput
from ..program import Message
from .failure import LostRank
from .format import FORMAT_BYTES, Format
from .wires import FORMATS, Wires, reason

POLL_SECONDS = 0.001  # between looks at what was sent
SMALL_BYTES, SMALL_COUNT = 1 << 12, 16  # what was sent is not worth a look up to here


class Mailbox:
    """One rank's messages, step after step. incoming: source rank → its messages of a step, in their order; timeout: seconds
    to wait for one. mesh: that of the pipeline, on which DTensors are rebuilt; None: none comes.

    A message's format (structure, shapes, dtypes) is agreed once for each shape of input, which the first stage's rank
    numbers. The first activation of a number over a channel is preceded by its format, and both ends know it from then on;
    that of its gradient follows from it. So receives can be posted ahead, also where microbatches differ.
    """

    def __init__(
        self,
        wires: Wires,
        incoming: Mapping[int, Sequence[Message]],
        device: torch.device,
        timeout: float,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._wires, self._mesh = wires, mesh
        self._incoming = dict(incoming)
        self._device = device
        self._timeout = timedelta(seconds=timeout)
        self._formats: dict[tuple[tuple[int, int, int], int], Format] = {}
        self._numbers: Mapping[int, int] = {}
        self._unposted: dict[int, deque[Message]] = {}
        self._posted: dict[Message, tuple[Any, Tensor, Format]] = {}
        self._sent = _Sent(self._timeout)

    def begin(self, numbers: Mapping[int, int]) -> None:
        """A step starts: its messages may come. numbers: microbatch → the number of its input's shape."""
        self._numbers = numbers
        self._unposted = {source: deque(messages) for source, messages in self._incoming.items()}

    def again(self, counts: Mapping[int, int]) -> None:
        """The step starts anew. counts: source → how many messages it had sent before; those that were not taken are waited
        for and dropped. Raises LostRank."""
        for source, count in counts.items():
            for message in self._incoming[source][:count]:
                if message in self._posted or message in self._unposted[source]:
                    self.take(message)
        self.begin(self._numbers)

    def post(self, message: Message) -> None:
        """Post its receive, and those before it from its source, as far as formats are known. Never waits."""
        waiting = self._unposted[message.source]
        while message not in self._posted and waiting:
            agreed = self._agreed(waiting[0])
            if agreed is None:
                return
            self._receive(waiting.popleft(), agreed)

    def take(self, message: Message) -> tuple[Any, int]:
        """Wait for a message. What it carries, and when this rank had it, monotonic ns. Raises LostRank."""
        try:
            posted = self._posted.pop(message, None)
            while posted is None:
                first = self._unposted[message.source].popleft()
                self._receive(first, self._agreed(first) or self._asked(first))
                posted = self._posted.pop(message, None)
            work, row, agreed = posted
            work.wait(self._timeout)
            return agreed.unpack(row), time.monotonic_ns()
        except Exception as error:
            text = f"waiting for {message.before} from rank {message.source}: {reason(error)}"
            raise LostRank(text, message.source) from None

    def send(self, message: Message, value: Any) -> None:
        """Start sending. Never waits. Raises BadInput for another format than agreed, LostRank."""
        agreed, found = self._agreed(message), Format.of(value)
        try:
            if agreed is None:
                header = torch.frombuffer(bytearray(found.dumps(self._mesh)), dtype=torch.uint8)
                agreed = self._formats[self._key(message)] = found
                self._sent.keep(self._wires.send(header, message.destination, FORMATS), header)
            elif found != agreed:
                raise BadInput(f"makes {found}, not {agreed} as before for an input of the same shape")
            row = agreed.pack(value, self._device)
            self._sent.keep(self._wires.send(row, message.destination), row)
        except BadInput:
            raise
        except Exception as error:
            text = f"sending {message.before} to rank {message.destination}: {reason(error)}"
            raise LostRank(text, message.destination) from None

    def flush(self) -> None:
        """Wait until everything has gone. Raises LostRank."""
        self._sent.flush()

    def size(self, message: Message) -> int:
        """Bytes that a message of the last step takes here, before the pass that takes it or behind the one that sends it: 0
        where sending copied it."""
        agreed = self._agreed(message)
        copied = message.source == self._wires.rank and self._wires.copies(message.destination)
        return 0 if agreed is None or copied else agreed.nbytes

    def tell(self, tensor: Tensor, destination: int, tag: int) -> None:
        """Start sending something else than a message. Never waits. Raises LostRank."""
        try:
            self._sent.keep(self._wires.send(tensor, destination, tag), tensor)
        except Exception as error:
            raise LostRank(f"sending to rank {destination}: {reason(error)}", destination) from None

    def ask(self, tensor: Tensor, source: int, tag: int) -> None:
        """Wait for what `tell` sent. Raises LostRank."""
        self._wires.wait(self._wires.receive(tensor, source, tag), source, self._timeout)

    def _key(self, message: Message) -> tuple[tuple[int, int, int], int]:
        return message.channel, self._numbers[message.part]

    def _agreed(self, message: Message) -> Format | None:
        found = self._formats.get(self._key(message))
        return found.gradient if found is not None and message.gradient else found

    def _receive(self, message: Message, agreed: Format) -> None:
        row = agreed.buffer(self._device)
        self._posted[message] = self._wires.receive(row, message.source), row, agreed

    def _asked(self, message: Message) -> Format:
        """The format of the first activation of its number, which comes before it."""
        header = torch.empty(FORMAT_BYTES, dtype=torch.uint8)
        self._wires.receive(header, message.source, FORMATS).wait(self._timeout)
        found = self._formats[self._key(message)] = Format.loads(header.numpy().tobytes(), self._mesh)
        return found


class _Sent:
    """Keeps what was sent until it has gone. gloo's work objects cannot be asked, so a thread waits for them. It looks from
    time to time: waking it for every message would cost the thread that runs the passes more than the message."""

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
        """Keep `tensor` until `work` is done (None: it is), or a few small ones until `flush`."""
        if work is None:
            return
        self._open.append((work, tensor))
        if (tensor.nbytes > SMALL_BYTES or len(self._open) > SMALL_COUNT) and not self._busy.is_set():
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
        time.sleep(POLL_SECONDS)


def _wait_for(sent: deque[tuple[Any, Tensor]], broken: list[str], timeout: timedelta) -> None:
    while sent:
        work, tensor = sent[0]
        try:
            if tensor.is_cuda:  # NCCL's wait lets a stream wait, but the memory must stay until the device is done
                while not work.is_completed():
                    time.sleep(POLL_SECONDS)
            else:
                work.wait(timeout)
        except Exception as error:
            broken.append(reason(error))
        del work, tensor
        sent.popleft()


def _close(busy: Event, closed: Event) -> None:
    closed.set()
    busy.set()
