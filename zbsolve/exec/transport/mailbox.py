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

from ...util.errors import BadInput
from ..program import Message
from .failure import LostRank
from .wires import SHAPES, Wires, reason

TensorShape = tuple[torch.Size, torch.dtype, tuple[int, ...]]  # the last: strides of a contiguous tensor
POLL_SECONDS = 0.001  # between looks at what was sent
SMALL_BYTES, SMALL_COUNT = 1 << 12, 16  # what was sent is not worth a look up to here
MAX_DIMENSIONS = 12  # of a tensor that can be sent
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Mailbox:
    """One rank's messages, step after step. incoming: source rank → its messages of a step, in their order; timeout: seconds
    to wait for one.

    A message's shape and dtype are agreed once for each shape of input, which the first stage's rank numbers. The first
    activation of a number over a channel is preceded by its shape, and both ends know it from then on; its gradient has the
    same. So receives can be posted ahead, also where microbatches differ.
    """

    def __init__(
        self, wires: Wires, incoming: Mapping[int, Sequence[Message]], device: torch.device, timeout: float
    ) -> None:
        self._wires = wires
        self._incoming = dict(incoming)
        self._device = device
        self._timeout = timedelta(seconds=timeout)
        self._shapes: dict[tuple[tuple[int, int, int], int], TensorShape] = {}
        self._numbers: Mapping[int, int] = {}
        self._unposted: dict[int, deque[Message]] = {}
        self._posted: dict[Message, tuple[Any, Tensor]] = {}
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
        """Post its receive, and those before it from its source, as far as shapes are known. Never waits."""
        waiting = self._unposted[message.source]
        while message not in self._posted and waiting:
            shape = self._shapes.get(self._key(waiting[0]))
            if shape is None:
                return
            self._receive(waiting.popleft(), shape)

    def take(self, message: Message) -> tuple[Tensor, int]:
        """Wait for a message. Its tensor, and when this rank had it, monotonic ns. Raises LostRank."""
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
        """Start sending. Never waits. Raises BadInput for another shape than agreed, LostRank."""
        key = self._key(message)
        agreed = self._shapes.get(key)
        try:
            if agreed is None:
                self._shapes[key] = _shape(tensor.shape, tensor.dtype)
                header = _header(tensor, message)
                self._sent.keep(self._wires.send(header, message.destination, SHAPES), header)
            elif tensor.shape != agreed[0] or tensor.dtype != agreed[1]:
                made, wanted = (f"{tuple(shape)} {kind}" for shape, kind in ((tensor.shape, tensor.dtype), agreed[:2]))
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
        """Bytes of a message that this rank sent or took in the last step."""
        shape, dtype, _ = self._shapes[self._key(message)]
        return shape.numel() * dtype.itemsize

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
        return message.channel, self._numbers[message.microbatch]

    def _receive(self, message: Message, shape: TensorShape) -> None:
        buffer = torch.empty_strided(shape[0], shape[2], dtype=shape[1], device=self._device)  # half as long as `empty`
        self._posted[message] = self._wires.receive(buffer, message.source), buffer

    def _asked(self, source: int) -> TensorShape:
        header = torch.empty(MAX_DIMENSIONS + 2, dtype=torch.int64)
        self._wires.receive(header, source, SHAPES).wait(self._timeout)
        kind, dimensions, *sizes = header.tolist()
        return _shape(torch.Size(sizes[:dimensions]), DTYPES[kind])


def _shape(size: torch.Size, dtype: torch.dtype) -> TensorShape:
    return size, dtype, torch.empty(size, device="meta").stride()


def _header(tensor: Tensor, message: Message) -> Tensor:
    if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMENSIONS:
        raise BadInput(f"its output is {tensor.dtype} of {tensor.dim()} dimensions: what can be sent is {DTYPES}")
    rest = [0] * (MAX_DIMENSIONS - tensor.dim())
    return torch.tensor([DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *rest])


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
