"""`Mailbox`: one rank's messages, their formats, order and memory. `HostRows`: sends and receives between CPUs."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...util.errors import BadInput, LostRank
from ..base.program import Message
from .format import FORMAT_BYTES, Format
from .shared_memory import ReceiveWork
from .wires import FORMATS, Wires, losing, reason

POLL_SECONDS = 0.001  # between two checks of what was sent
SMALL_BYTES, SMALL_COUNT = 1 << 12, 16  # up to 16 sends of at most 4 KiB are not worth a check
ZEROS = "a part of its stage's input, used in steps before, was not used: its gradient is zeros from now on, not None"
Key = tuple[tuple[int | str, ...], int]  # a channel, and the number of the input's shape


class HostRows:
    """Sends and receives messages as rows of bytes, here between CPUs. What `reserve` returns is passed to `receive` and
    `take`. timeout: to wait for a message."""

    def __init__(self, wires: Wires, timeout: timedelta) -> None:
        self._wires, self._timeout = wires, timeout
        self.sent = Sent(timeout)

    def begin(self) -> None:
        """A step begins."""

    def reserve(self, message: Message, row: Tensor) -> Any:
        """Start to receive the message into `row`, which was just allocated. Never waits."""
        return self._wires.receive(row, message.source), row

    def receive(self, message: Message, coming: Any) -> None:
        """On a GPU, launch all that receives the message. Messages from one source come in their order."""

    def here(self, coming: Any) -> bool:
        """Has it arrived? Never waits. gloo cannot tell, so its messages count as arrived."""
        return not isinstance(coming[0], ReceiveWork) or coming[0].here()

    def take(self, message: Message, coming: Any) -> tuple[Tensor, Any]:
        """Wait for the row. Returns it, and when it arrived: monotonic ns, or a mark of a device."""
        work, row = coming
        work.wait(self._timeout)
        return row, time.monotonic_ns()

    def send(self, message: Message, row: Tensor) -> None:
        """Start to send. Never waits."""
        self.sent.keep(self._wires.send(row, message.destination), row)

    def gone(self, message: Message) -> None:
        """By the schedule the message has left, so its memory may be freed. (Here a thread frees it.)"""

    def flush(self) -> None:
        """Wait until everything has left."""
        self.sent.flush()


class Looker:
    """A thread that calls the method `look` again and again while `busy` is set, until the method's object is garbage.
    Exceptions of a call are ignored. seconds: the pause before each call. first: what the thread calls before."""

    def __init__(self, look: Callable[[], None], seconds: float, first: Callable[[], None] = lambda: None) -> None:
        self.busy, closed = Event(), Event()
        method: WeakMethod[Callable[[], None]] = WeakMethod(look)
        Thread(target=_look, args=(method, self.busy, closed, seconds, first), daemon=True).start()
        finalize(look.__self__, _close, self.busy, closed)  # type: ignore[attr-defined]


def _look(method: WeakMethod[Callable[[], None]], busy: Event, closed: Event, seconds: float, first: Any) -> None:
    """What the thread runs, until `closed` is set."""
    first()
    while busy.wait() and not closed.wait(seconds):
        if busy.is_set() and (look := method()) is not None:
            with suppress(Exception):
                look()
            del look


def _close(busy: Event, closed: Event) -> None:
    closed.set()
    busy.set()


class Sent:
    """Keeps each sent tensor until it has left. gloo's work handles cannot be polled, so a thread waits for them. It wakes
    up at intervals: to wake it for every message would delay the thread that runs passes by more than the message does."""

    def __init__(self, timeout: timedelta) -> None:
        self._open: deque[tuple[Any, Tensor]] = deque()
        self._broken: list[str] = []
        self._looking, self._timeout = Lock(), timeout
        self._busy = Looker(self.look, POLL_SECONDS).busy

    def keep(self, work: Any, tensor: Tensor) -> None:
        """Keep `tensor` until `work` is done (None: it is). A few small tensors are kept until `flush`."""
        if work is None:
            return
        self._open.append((work, tensor))
        if (tensor.nbytes > SMALL_BYTES or len(self._open) > SMALL_COUNT) and not self._busy.is_set():
            self._busy.set()

    def look(self) -> None:
        """Wait for all that was sent so far, and free it."""
        with self._looking:
            self._wait()

    def flush(self) -> None:
        """Wait for all of it. Raises LostRank."""
        if not self._looking.acquire(timeout=self._timeout.total_seconds()):
            raise LostRank(f"sending: not taken for {self._timeout.total_seconds():g} s")
        try:
            self._wait()
            self._busy.clear()
        finally:
            self._looking.release()
        if self._broken:
            raise LostRank(f"sending: {self._broken[0]}")

    def _wait(self) -> None:
        while self._open:
            try:
                self._open[0][0].wait(self._timeout)
            except Exception as error:
                self._broken.append(reason(error))
            self._open.popleft()


class Mailbox:
    """One rank's messages, step after step. incoming: source rank → its messages of a step, in order; timeout: seconds to
    wait for one. mesh: of the pipeline, to rebuild DTensors on; None: there are none. rows: what sends and receives; None:
    between CPUs. trained: a function that returns which parameters of this rank are trained, by name.

    Both ends agree on a message's format (structure, shapes, dtypes, what requires a gradient) once for each shape of input;
    ranks of the first stage number these shapes. Before the first activation with a new number a channel carries its format;
    both ends then keep it. So receives can be posted early, even where microbatches have different shapes. The first
    gradient comes after a flag for each tensor (after its format, if its channel has no activations): a tensor that nothing
    used has no gradient, and none is sent. Microbatches may differ in that, so flags come with each message until one has
    all gradients. From then on all are sent, zeros if need be.
    """

    def __init__(
        self,
        wires: Wires,
        incoming: Mapping[int, Sequence[Message]],
        device: torch.device,
        timeout: float,
        mesh: DeviceMesh | None = None,
        rows: HostRows | None = None,
    ) -> None:
        self.trained: Callable[[], Mapping[str, bool]] = dict
        self._wires, self._mesh = wires, mesh
        self._incoming = dict(incoming)
        self._device, self._said_zeros = device, False
        self._timeout = timedelta(seconds=timeout)
        self._formats: dict[Key, Format] = {}
        self._gradients: dict[Key, Format] = {}
        self._trained: dict[Key, Mapping[str, bool]] = {}
        self._numbers: Mapping[int, int] = {}
        self._unposted: dict[int, deque[Message]] = {}
        self._posted: dict[Message, tuple[Any, Format]] = {}
        self._host = HostRows(wires, self._timeout)
        self._rows = self._host if rows is None else rows

    def begin(self, numbers: Mapping[int, int]) -> None:
        """A step begins, and with it its messages. numbers: microbatch → the number of its input's shape."""
        self._numbers = numbers
        self._rows.begin()
        self._unposted = {source: deque(messages) for source, messages in self._incoming.items()}

    def expect(self, incoming: Mapping[int, Sequence[Message]]) -> None:
        """Set the messages to receive, from the next step on."""
        self._incoming = dict(incoming)

    def restart(self) -> None:
        """Begin the step again, where nothing of it was sent or received."""
        self._posted.clear()
        self.begin(self._numbers)

    def again(self, counts: Mapping[int, int]) -> None:
        """Begin the step again. counts: source → the number of messages that it had sent before; those not yet taken are
        received and dropped. Raises LostRank."""
        for source, count in counts.items():
            for message in self._incoming[source][:count]:
                if message in self._posted or message in self._unposted[source]:
                    self.take(message)
        self.begin(self._numbers)

    def post(self, message: Message) -> None:
        """Post its receive, and those before it from the same source, as far as formats are known. Never waits."""
        waiting = self._unposted[message.source]
        while message not in self._posted and waiting:
            agreed = self._agreed(waiting[0])
            if agreed is None:
                return
            self._receive(waiting.popleft(), agreed)

    def receive(self, message: Message) -> None:
        """On a GPU, launch all that receives the message, once its format is known. Raises LostRank."""
        if self._rows is not self._host:
            with _waiting(message):
                self._rows.receive(message, self._known(message)[0])

    def here(self, message: Message) -> bool:
        """Has it arrived, or is that unknown? Never waits."""
        return message not in self._posted or self._host.here(self._posted[message][0])

    def take(self, message: Message) -> tuple[Any, Any]:
        """Wait for a message. Returns its value and its arrival: monotonic ns, or a mark. Raises LostRank."""
        with _waiting(message):
            coming, agreed = self._known(message)
            del self._posted[message]
            row, when = self._rows.take(message, coming)
            return agreed.unpack(row), when

    def _known(self, message: Message) -> tuple[Any, Format]:
        """What `HostRows.reserve` returned for the message, and its format. Waits for a format that is not known yet."""
        while message not in self._posted:
            first = self._unposted[message.source].popleft()
            self._receive(first, self._agreed(first) or self._asked(first))
        return self._posted[message]

    def send(self, message: Message, value: Any) -> None:
        """Start to send. Never waits. Raises BadInput where the value does not have the agreed format, and LostRank."""
        agreed, form, key = self._agreed(message), Format.of(value), self._key(message)
        activation = self._formats.get(key) if message.gradient else None
        right = agreed if activation is None else activation.gradient
        try:
            if right is not None and form != right:
                if not (message.gradient and form.lacks(right)):
                    raise BadInput(_unlike(form, right, self._trained.get(key, {}), self.trained()))
                if agreed is not None and not self._said_zeros:
                    self._said_zeros = True
                    warnings.warn(f"pass {message.before}: {ZEROS}", stacklevel=2)
                value = value if agreed is None else agreed.completed(value, self._device)
            if agreed is None:
                if activation is not None:
                    header = torch.tensor([leaf is not None for leaf in form.leaves], dtype=torch.uint8)
                else:
                    header = torch.frombuffer(bytearray(form.dumps(self._mesh)), dtype=torch.uint8)
                    self._trained[key] = self.trained()
                agreed = self._learned(message, form)
                self._host.sent.keep(self._wires.send(header, message.destination, FORMATS), header)
            self._rows.send(message, agreed.pack(value, self._device))
        except BadInput:
            raise
        except Exception as error:
            text = f"sending {message.before} to rank {message.destination}: {reason(error)}"
            raise LostRank(text, message.destination) from None

    def gone(self, message: Message) -> None:
        """By the schedule the message has left: free its memory. Never waits."""
        self._rows.gone(message)

    def flush(self) -> None:
        """Wait until all messages have left. Raises LostRank."""
        self._rows.flush()
        if self._rows is not self._host:
            self._host.flush()

    def mark_with(self, marks: Any) -> None:
        """On a GPU: use these marks for the events of this step."""
        self._rows.marks = marks  # type: ignore[attr-defined]

    def size(self, message: Message) -> int:
        """Bytes of a message of the last step on this rank, until it is taken or has left; 0 where sending has copied it."""
        agreed = self._last_format(message)
        copied = message.source == self._wires.rank and self._wires.copies(message.destination)
        return 0 if agreed is None or copied else agreed.nbytes

    def tell(self, tensor: Tensor, destination: int, tag: int) -> None:
        """Start to send a tensor that is no message of the schedule. Never waits. Raises LostRank."""
        with losing(destination, f"sending to rank {destination}: "):
            self._host.sent.keep(self._wires.send(tensor, destination, tag), tensor)

    def ask(self, tensor: Tensor, source: int, tag: int) -> None:
        """Receive what `tell` sent, into `tensor`. Raises LostRank."""
        self._wires.wait(self._wires.receive(tensor, source, tag), source, self._timeout)

    def _key(self, message: Message) -> Key:
        return message.channel, self._numbers[message.part]

    @property
    def no_capture(self) -> str:
        """Why steps cannot be captured (see `Part`): with flags for gradients, the messages are not those of the program."""
        some = any(None in form.leaves for form in self._gradients.values())
        return "ranks tell each other which of a stage's outputs nobody used" if some else ""

    def _last_format(self, message: Message) -> Format | None:
        return (self._gradients if message.gradient else self._formats).get(self._key(message))

    def _agreed(self, message: Message) -> Format | None:
        """The format that both ends know; None: it comes before the message."""
        known = self._last_format(message)
        return None if known is not None and message.gradient and None in known.leaves else known

    def _learned(self, message: Message, form: Format) -> Format:
        """Keep the format that came before a message. Both ends call this."""
        key = self._key(message)
        (self._gradients if message.gradient else self._formats)[key] = form
        if not message.gradient and not form.gradient.leaves:
            self._gradients[key] = form.gradient
        return form

    def _receive(self, message: Message, agreed: Format) -> None:
        self._posted[message] = self._rows.reserve(message, agreed.buffer(self._device)), agreed

    def _asked(self, message: Message) -> Format:
        """Receive the format that comes before the message."""
        activation = self._formats.get(self._key(message)) if message.gradient else None
        whole = None if activation is None else activation.gradient
        header = torch.empty(FORMAT_BYTES if whole is None else len(whole.leaves), dtype=torch.uint8)
        self._wires.receive(header, message.source, FORMATS).wait(self._timeout)
        form = Format.loads(header.numpy().tobytes(), self._mesh) if whole is None else whole.only(header.tolist())
        return self._learned(message, form)


def _unlike(made: Format, agreed: Format, then: Mapping[str, bool], now: Mapping[str, bool]) -> str:
    """An error text: what the format is, and how it differs from before for an input of the same shape."""
    changed = [name for name, trained in now.items() if then.get(name, trained) != trained]
    if str(made) != str(agreed) or [f.trained for f in made.tensors] == [f.trained for f in agreed.tensors]:
        return f"makes {made}, not {agreed} as before for an input of the same shape"
    word = "a" if sum(f.trained for f in made.tensors) > sum(f.trained for f in agreed.tensors) else "no"
    why = "whether it does depends on the data or on other ranks' parameters"
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        why = f"requires_grad of {changed[0]}{more} changed"
    return f"makes {made} that needs {word} gradient, unlike before: {why}; make a new Pipeline of the same layers for it"


def _waiting(message: Message) -> AbstractContextManager[None]:
    """What is raised inside means that the message does not come: raises LostRank."""
    return losing(message.source, f"waiting for {message.before} from rank {message.source}: ")
