"""Messages between two processes of one machine: one copy into memory that both map, one copy out of it.

gloo moves such a message through the network stack and through threads of its own at either end, which costs more than many
a pass. Here one direction of a pair of ranks is a file in memory, a pipe that says in which slot of it the next message
lies, and a pipe back that says which slots are free again. Pipes keep order, wake the process that waits, and end with the
process at their other end.

The sender offers its descriptors by number, and the receiver opens them through /proc. It does so only where their names
there are the offered ones, one of which is random. Elsewhere (another machine, another container, no Linux) both ends know
that memory cannot be shared.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from io import FileIO
from select import POLLIN, poll
from struct import Struct

from torch import Tensor

SLOT = Struct("qqq")  # where a message lies, its bytes, its tag
STOP = SLOT.pack(-1, 0, 0)
FREED = Struct("q")
MAX_POLL_MS = 2**31 - 1
SPIN_NS = 50_000  # to look for a message before sleeping: after a sleep a small pass takes some 30 µs longer
READ_BYTES = 16 * SLOT.size
MIN_SLOT, FIRST_SIZE = 64, 1 << 16  # bytes of a slot, and of the file at first
UNREPORTED_BYTES = 1 << 14  # of free slots, before the sender hears of them: a word a message would cost too much
PEER_FILES = 1, 4  # of a sender's files: the ends of its pipes that are for the other process
LARGE_BYTES, PARTS = 1 << 20, 4  # from this size on a message goes in parts, so that both ends copy at once
WORDS = 2 + PARTS  # in the pipe for a message at most: its shape may come before it, and the numbers of a step's shapes
STEPS = 4  # whose messages fit into the pipe: no rank is two steps ahead, or begins a step again more than once
F_SETPIPE_SZ, F_GETPIPE_SZ = 1031, 1032  # linux/fcntl.h


def slot_size(size: int) -> int:
    """Bytes of the slot for a message: powers of two, so that slots serve again. Pages that nobody touches cost nothing."""
    return max(MIN_SLOT, 1 << (size - 1).bit_length())


def part_size(size: int) -> int:
    """Bytes of a message that go at once."""
    return size if size < LARGE_BYTES else -(-size // (MIN_SLOT * PARTS)) * MIN_SLOT


class _Mapped:
    """A file in memory, mapped as far as it has grown. base: the mapping's address."""

    def __init__(self, file: FileIO) -> None:
        self._file, self.size, self.base = file, 0, 0
        self._map: mmap.mmap | None = None

    def reach(self, size: int) -> None:
        """Map all there is, at least so many bytes. Raises RuntimeError where there are fewer."""
        self.size = os.fstat(self._file.fileno()).st_size
        if self.size < size:
            raise RuntimeError(f"a message ends at byte {size} of {self.size}")
        self._map = mmap.mmap(self._file.fileno(), self.size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def grow(self, size: int) -> None:
        """Make the file at least so long, and map it."""
        if size > self.size:
            os.ftruncate(self._file.fileno(), max(size, 2 * self.size, FIRST_SIZE))
            self.reach(size)

    def drop(self) -> None:
        """Map nothing: an address that is used from now on is asked for anew, of a file that is closed."""
        self._map, self.size, self.base = None, 0, 0


class ShmSender:
    """The sending end of one direction, for at most `messages` in a step. offer: what the other end needs. Raises
    OSError."""

    def __init__(self, messages: int) -> None:
        memory = FileIO(os.memfd_create(f"zbsolve-{secrets.token_hex(8)}"), "r+")
        self._files, self._memory, self._end = [memory], _Mapped(memory), 0
        self._free: dict[int, list[int]] = {}  # bytes of a slot → slots that are free
        self._sizes: dict[int, int] = {}  # slot → its bytes
        try:
            for _ in range(2):
                self._files += (FileIO(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True))
            _, _, self._slots, self._freed, _ = self._files
            _hold(self._slots, STEPS * WORDS * messages * SLOT.size)
            theirs = [(number, _name("self", number)) for number in (self._files[i].fileno() for i in (0, *PEER_FILES))]
        except OSError:
            self.close()
            raise
        self.offer = json.dumps([os.getpid(), theirs]).encode()
        for file in (self._slots, self._freed):
            os.set_blocking(file.fileno(), False)

    @classmethod
    def opened(cls, messages: int) -> ShmSender | None:
        """A sender; None where this system has no such memory."""
        with suppress(OSError, AttributeError):
            return cls(messages)
        return None

    def agreed(self, taken: bool) -> ShmSender | None:
        """The other end says whether it has opened what it needs. This end keeps only its own ends of the pipes then, since
        a pipe ends with the last process that holds it. None where the other end cannot."""
        for i in PEER_FILES:
            self._files[i].close()
        if taken:
            return self
        self.close()
        return None

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> None:
        """Copy one contiguous tensor of the CPU; never waits. As a backend's `send`, but nothing is left to wait for. Raises
        OSError where the other end is gone."""
        (tensor,) = tensors
        size, done = tensor.nbytes, 0
        slot, step = self._slot(slot_size(size)), part_size(size)
        there, here = self._memory.base + slot, tensor.data_ptr()
        while True:
            now = min(step, size - done)
            ctypes.memmove(there + done, here + done, now)
            if self._slots.write(SLOT.pack(slot + done, now, tag)) is None:
                raise RuntimeError("more messages on their way than two steps have")
            done += now
            if done == size:
                return

    def _slot(self, wanted: int) -> int:
        """A slot of so many bytes: a free one, or a new one behind all others."""
        free = self._free.setdefault(wanted, [])
        if not free:
            self._collect_freed()
        if free:
            return free.pop()
        slot, self._end = self._end, self._end + wanted
        self._memory.grow(self._end)
        self._sizes[slot] = wanted
        return slot

    def _collect_freed(self) -> None:
        for (slot,) in FREED.iter_unpack(self._freed.read(1 << 16) or b""):
            self._free[self._sizes[slot]].append(slot)

    def break_off(self) -> None:
        """Wake a receiver that waits, also where a child of this process holds the pipe open."""
        with suppress(OSError, ValueError):  # where it is gone, or closed already
            self._slots.write(STOP)
        self.close()

    def close(self) -> None:
        """Give everything back; what is on its way still arrives."""
        for file in self._files:
            file.close()
        self._memory.drop()
        self._free.clear()


class ShmReceiver:
    """The receiving end of what another rank offers. It waits for `timeout` where nothing else is said. Raises OSError where
    the offer cannot be opened from here."""

    def __init__(self, offer: bytes, timeout: timedelta) -> None:
        process, theirs = json.loads(offer)
        self.timeout = timeout
        self._files: list[FileIO] = []
        try:
            for (number, name), mode in zip(theirs, ("r+", "r", "w"), strict=True):
                self._files.append(_opened(process, number, name, mode))
        except OSError:
            for file in self._files:
                file.close()
            raise
        memory, self._slots, self._freed = self._files
        self._memory = _Mapped(memory)
        self._poll = poll()
        self._poll.register(self._slots, POLLIN)
        self._here: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)  # tag → (slot, bytes) to be taken
        self._asked: defaultdict[int, deque[ReceiveWork]] = defaultdict(deque)
        self._emptied, self._unreported, self._ended = b"", 0, False

    @classmethod
    def of(cls, offer: bytes, timeout: timedelta) -> ShmReceiver | None:
        """A receiver; None where nothing is offered, or it cannot be opened from here."""
        with suppress(OSError):
            return cls(offer, timeout) if offer else None
        return None

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> ReceiveWork:
        """As a backend's `recv`: the next message of its tag, behind those asked for already, goes into this contiguous
        tensor of the CPU."""
        work = ReceiveWork(self, tensors[0], tag)
        self._asked[tag].append(work)
        return work

    def take(self, work: ReceiveWork, timeout: timedelta) -> None:
        """Take messages of one tag in their order, until that of `work` is there."""
        while work.open:
            if not self._here[work.tag]:
                self._read(timeout)
            self._fill(work.tag)

    def here(self, work: ReceiveWork) -> bool:
        """Is that of `work` there, or the other end gone? Takes what has come; never waits."""
        while work.open and not self._ended and (self._here[work.tag] or self._noted(self._slots.read(READ_BYTES))):
            self._fill(work.tag)
        return not work.open or self._ended

    def _fill(self, tag: int) -> None:
        here, asked = self._here[tag], self._asked[tag]
        while here and asked:
            self._copy(asked[0], *here.popleft())
            if not asked[0].open:
                asked.popleft()

    def _copy(self, work: ReceiveWork, slot: int, size: int) -> None:
        done, whole = work.done, work.tensor.nbytes
        if size != min(part_size(whole), whole - done):
            raise RuntimeError(f"{size} bytes came in place of {min(part_size(whole), whole - done)}")
        if slot + size > self._memory.size:
            self._memory.reach(slot + size)
        ctypes.memmove(work.tensor.data_ptr() + done, self._memory.base + slot, size)
        work.done += size
        if work.done == whole:
            work.open = False
            self._emptied += FREED.pack(slot - done)
            self._unreported += max(whole, MIN_SLOT)
            if self._unreported >= UNREPORTED_BYTES:
                self._report_freed()

    def _report_freed(self) -> None:
        written: int | None = len(self._emptied)
        with suppress(BrokenPipeError):  # the sender may be gone: its messages are here
            written = self._freed.write(self._emptied)  # None: the pipe is full, so the next time
        self._emptied, self._unreported = self._emptied[written or 0 :], 0

    def _read(self, timeout: timedelta) -> None:
        """Wait for the next words in the pipe."""
        if self._ended:  # what came before the end was taken first
            raise ConnectionError("Connection closed by peer")
        until = time.monotonic_ns() + SPIN_NS
        while (words := self._slots.read(READ_BYTES)) is None and time.monotonic_ns() < until:
            os.sched_yield()
        while words is None:
            ms = min(round(timeout.total_seconds() * 1000), MAX_POLL_MS)
            if not self._poll.poll(ms):
                raise TimeoutError(f"Timed out waiting {ms}ms")
            words = self._slots.read(READ_BYTES)
        self._noted(words)

    def _noted(self, words: bytes | None) -> bool:
        """Note what stands in the pipe; False where nothing does (None)."""
        for slot, size, tag in () if words is None else SLOT.iter_unpack(words or STOP):
            if slot < 0:
                self._ended = True
                break
            self._here[tag].append((slot, size))
        return words is not None

    def break_off(self) -> None:
        """The next send at the other end fails."""
        self.close()

    def close(self) -> None:
        """Give everything back."""
        for file in self._files:
            file.close()
        self._memory.drop()


class ReceiveWork:
    """One receive, as a backend's work object."""

    __slots__ = ("_receiver", "done", "open", "tag", "tensor")

    def __init__(self, receiver: ShmReceiver, tensor: Tensor, tag: int) -> None:
        self._receiver, self.tensor, self.tag, self.done, self.open = receiver, tensor, tag, 0, True

    def here(self) -> bool:
        """Is the tensor filled? Never waits."""
        return self._receiver.here(self)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Until the tensor is filled, or the other end is gone, or time is over (None: the receiver's). Raises TimeoutError,
        ConnectionError in gloo's words."""
        self._receiver.take(self, self._receiver.timeout if timeout is None else timeout)


def _name(process: int | str, number: int) -> str:
    return os.readlink(f"/proc/{process}/fd/{number}")


def _opened(process: int, number: int, name: str, mode: str) -> FileIO:
    """Another process's file, if it is the one meant: numbers mean something else in another container."""
    if _name(process, number) != name:
        raise FileNotFoundError(name)
    flags = {"r+": os.O_RDWR, "r": os.O_RDONLY, "w": os.O_WRONLY}[mode]
    return FileIO(os.open(f"/proc/{process}/fd/{number}", flags | os.O_NONBLOCK | os.O_CLOEXEC), mode)


def _hold(pipe: FileIO, size: int) -> None:
    """Let a pipe hold so many bytes. Raises OSError."""
    if fcntl.fcntl(pipe.fileno(), F_GETPIPE_SZ) < size and fcntl.fcntl(pipe.fileno(), F_SETPIPE_SZ, size) < size:
        raise OSError(f"no pipe holds {size} bytes")
