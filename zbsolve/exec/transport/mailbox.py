"""Messages between ranks: formats, order, the memory that they come into; and their rows between ranks on CPUs."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from .wires import FORMATS, Wires, reason

POLL_SECONDS = 0.001  # between looks at what was sent
SMALL_BYTES, SMALL_COUNT = 1 << 12, 16  # what was sent is not worth a look up to here
Key = tuple[tuple[int, ...], int]  # a channel, and the number of an input's shape


class HostRows:
    """How rows of bytes come and go, here between CPUs. What `reserve` gives is handed to `receive` and `take`. timeout: to
    wait for a message."""

    def __init__(self, wires: Wires, timeout: timedelta) -> None:
        self._wires, self._timeout = wires, timeout
        self.sent = Sent(timeout)

    def begin(self) -> None:
        """A step begins."""

    def reserve(self, message: Message, row: Tensor) -> Any:
        """`row`, which was made just now, is where the message comes to: receive from now on. Never waits."""
        return self._wires.receive(row, message.source), row

    def receive(self, message: Message, coming: Any) -> None:
        """All that the message needs of this rank is launched. Those of one source come in their order."""

    def here(self, coming: Any) -> bool:
        """Is it here? gloo cannot be asked: of its messages as if they were."""
        return not isinstance(coming[0], ReceiveWork) or coming[0].here()

    def take(self, message: Message, coming: Any) -> tuple[Tensor, Any]:
        """The row is there for what comes now; and when it was: monotonic ns, or a mark of a device."""
        work, row = coming
        work.wait(self._timeout)
        return row, time.monotonic_ns()

    def send(self, message: Message, row: Tensor) -> None:
        """Start sending. Never waits."""
        self.sent.keep(self._wires.send(row, message.destination), row)

    def gone(self, message: Message) -> None:
        """By the schedule it has gone: what was sent may be given up. (Here a thread looks after that.)"""

    def flush(self) -> None:
        """Everything has gone before what comes now."""
        self.sent.flush()


class Looker:
    """A thread that calls a method from time to time while `busy` is set, until its object is gone. What a look raises is of
    no use. seconds: before each look."""

    def __init__(self, look: Callable[[], None], seconds: float) -> None:
        self.busy, closed = Event(), Event()
        method: WeakMethod[Callable[[], None]] = WeakMethod(look)
        Thread(target=_look, args=(method, self.busy, closed, seconds), daemon=True).start()
        finalize(look.__self__, _close, self.busy, closed)  # type: ignore[attr-defined]


def _look(method: WeakMethod[Callable[[], None]], busy: Event, closed: Event, seconds: float) -> None:
    """The thread's work, until `closed`."""
    while busy.wait() and not closed.wait(seconds):
        if busy.is_set() and (look := method()) is not None:
            with suppress(Exception):
                look()
            del look


def _close(busy: Event, closed: Event) -> None:
    closed.set()
    busy.set()


class Sent:
    """Keeps what was sent until it has gone. gloo's work objects cannot be asked, so a thread waits for them. It looks from
    time to time: waking it for every message would cost the thread that runs the passes more than the message."""

    def __init__(self, timeout: timedelta) -> None:
        self._open: deque[tuple[Any, Tensor]] = deque()
        self._broken: list[str] = []
        self._looking, self._timeout = Lock(), timeout
        self._busy = Looker(self.look, POLL_SECONDS).busy

    def keep(self, work: Any, tensor: Tensor) -> None:
        """Keep `tensor` until `work` is done (None: it is), or a few small ones until `flush`."""
        if work is None:
            return
        self._open.append((work, tensor))
        if (tensor.nbytes > SMALL_BYTES or len(self._open) > SMALL_COUNT) and not self._busy.is_set():
            self._busy.set()

    def look(self) -> None:
        """Wait for all that was sent so far, and give it up."""
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
    """One rank's messages, step after step. incoming: source rank → its messages of a step, in their order; timeout: seconds
    to wait for one. mesh: that of the pipeline, on which DTensors are rebuilt; None: none comes. rows: how they come and go;
    None: as between CPUs. trained: asks which parameters of this rank are trained, by name.

    A message's format (structure, shapes, dtypes, what needs a gradient) is agreed once for each shape of input, which the
    first stage's rank numbers. The first activation of a number over a channel is preceded by its format, and both ends know
    it from then on. So receives can be posted ahead, also where microbatches differ. Of a gradient the first message is
    preceded by a flag for each tensor: what nobody used has none, and nothing of it goes over the wire. Microbatches may
    differ in that, so while some are not there, each is. Once all were, they are from then on, with zeros if need be.
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
        """A step starts: its messages may come. numbers: microbatch → the number of its input's shape."""
        self._numbers = numbers
        self._rows.begin()
        self._unposted = {source: deque(messages) for source, messages in self._incoming.items()}

    def expect(self, incoming: Mapping[int, Sequence[Message]]) -> None:
        """From the next step on these come."""
        self._incoming = dict(incoming)

    def restart(self) -> None:
        """The step begins anew before anything of it has come or gone."""
        self._posted.clear()
        self.begin(self._numbers)

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

    def receive(self, message: Message) -> None:
        """All that the message needs of this rank is launched. On a device this waits for formats that are not known yet.
        Raises LostRank."""
        if self._rows is not self._host:
            with _waiting(message):
                self._rows.receive(message, self._known(message)[0])

    def here(self, message: Message) -> bool:
        """Is it here, or is that not known? Never waits."""
        return message not in self._posted or self._host.here(self._posted[message][0])

    def take(self, message: Message) -> tuple[Any, Any]:
        """Wait for a message. What it carries, and when this rank had it: monotonic ns, or a mark of its device. Raises
        LostRank."""
        with _waiting(message):
            coming, agreed = self._known(message)
            del self._posted[message]
            row, when = self._rows.take(message, coming)
            return agreed.unpack(row), when

    def _known(self, message: Message) -> tuple[Any, Format]:
        """What `HostRows.reserve` gave for it, and its format, which this waits for where it is not known."""
        while message not in self._posted:
            first = self._unposted[message.source].popleft()
            self._receive(first, self._agreed(first) or self._asked(first))
        return self._posted[message]

    def send(self, message: Message, value: Any) -> None:
        """Start sending. Never waits. Raises BadInput for another format than agreed, LostRank."""
        agreed, form, key = self._agreed(message), Format.of(value), self._key(message)
        right = self._formats[key].gradient if message.gradient else agreed
        try:
            if right is not None and form != right:
                if not (message.gradient and form.lacks(right)):
                    raise BadInput(_unlike(form, right, self._trained.get(key, {}), self.trained()))
                value = value if agreed is None else self._with_zeros(message, agreed.completed(value, self._device))
            if agreed is None:
                if message.gradient:
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

    def _with_zeros(self, message: Message, value: list[Tensor]) -> list[Tensor]:
        """The value; the first time it is said what its zeros are."""
        if not self._said_zeros:
            what = "nobody used a part of what its stage was given, of which all was used before"
            zeros = "its gradient is zeros from now on, where the unsplit model may have none"
            warnings.warn(f"pass {message.before}: {what}: {zeros}", stacklevel=2)
        self._said_zeros = True
        return value

    def gone(self, message: Message) -> None:
        """By the schedule it has gone. Never waits."""
        self._rows.gone(message)

    def flush(self) -> None:
        """Wait until everything has gone. Raises LostRank."""
        self._rows.flush()
        if self._rows is not self._host:
            self._host.flush()

    def mark_with(self, marks: Any) -> None:
        """On a device: the events of this step are these."""
        self._rows.marks = marks  # type: ignore[attr-defined]

    def size(self, message: Message) -> int:
        """Bytes that a message of the last step takes here, before the pass that takes it or behind the one that sends it: 0
        where sending copied it."""
        agreed = self._last_format(message)
        copied = message.source == self._wires.rank and self._wires.copies(message.destination)
        return 0 if agreed is None or copied else agreed.nbytes

    def tell(self, tensor: Tensor, destination: int, tag: int) -> None:
        """Start sending something else than a message. Never waits. Raises LostRank."""
        try:
            self._host.sent.keep(self._wires.send(tensor, destination, tag), tensor)
        except Exception as error:
            raise LostRank(f"sending to rank {destination}: {reason(error)}", destination) from None

    def ask(self, tensor: Tensor, source: int, tag: int) -> None:
        """Wait for what `tell` sent. Raises LostRank."""
        self._wires.wait(self._wires.receive(tensor, source, tag), source, self._timeout)

    def _key(self, message: Message) -> Key:
        return message.channel, self._numbers[message.part]

    @property
    def no_capture(self) -> str:
        """Why steps are not captured (see `Part`): each has other messages than those of its program."""
        some = any(None in form.leaves for form in self._gradients.values())
        return "ranks tell each other which of a stage's outputs nobody used" if some else ""

    def _last_format(self, message: Message) -> Format | None:
        return (self._gradients if message.gradient else self._formats).get(self._key(message))

    def _agreed(self, message: Message) -> Format | None:
        """Its format; None: that comes before it."""
        known = self._last_format(message)
        return None if known is not None and message.gradient and None in known.leaves else known

    def _learned(self, message: Message, form: Format) -> Format:
        """Keep what came before a message, at either end."""
        key = self._key(message)
        (self._gradients if message.gradient else self._formats)[key] = form
        if not message.gradient and not form.gradient.leaves:
            self._gradients[key] = form.gradient
        return form

    def _receive(self, message: Message, agreed: Format) -> None:
        self._posted[message] = self._rows.reserve(message, agreed.buffer(self._device)), agreed

    def _asked(self, message: Message) -> Format:
        """The format that comes before it."""
        whole = self._formats[self._key(message)].gradient if message.gradient else None
        header = torch.empty(FORMAT_BYTES if whole is None else len(whole.leaves), dtype=torch.uint8)
        self._wires.receive(header, message.source, FORMATS).wait(self._timeout)
        form = Format.loads(header.numpy().tobytes(), self._mesh) if whole is None else whole.only(header.tolist())
        return self._learned(message, form)


def _unlike(made: Format, agreed: Format, then: Mapping[str, bool], now: Mapping[str, bool]) -> str:
    """What a format is, and was before for an input of the same number."""
    changed = [name for name, trained in now.items() if then.get(name, trained) != trained]
    if str(made) != str(agreed) or [f.trained for f in made.tensors] == [f.trained for f in agreed.tensors]:
        return f"makes {made}, not {agreed} as before for an input of the same shape"
    word = "a" if sum(f.trained for f in made.tensors) > sum(f.trained for f in agreed.tensors) else "no"
    why = "whether it does depends on the data or on other ranks' parameters"
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        why = f"requires_grad of {changed[0]}{more} changed"
    return f"makes {made} that needs {word} gradient, unlike before: {why}; make a new Pipeline of the same layers for it"


@contextmanager
def _waiting(message: Message) -> Iterator[None]:
    """What goes wrong inside is a message that does not come. Raises LostRank."""
    try:
        yield
    except Exception as error:
        text = f"waiting for {message.before} from rank {message.source}: {reason(error)}"
        raise LostRank(text, message.source) from None
