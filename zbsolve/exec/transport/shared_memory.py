"""Messages between two processes of one machine: one copy into memory that both map, one copy out of it.

gloo sends such a message through the network stack and through threads of its own at both ends, which takes longer than many
passes. Here one direction of a pair of ranks has a file in memory, a pipe with the place of each message in that file (its
slot), and a pipe back with the slots that are free again. Pipes keep their order, wake the process that waits, and end with
the process at their other end.

The sender offers its file descriptors by number, and the receiver opens them through /proc. Each must have the name there
that the sender gave, and one of these names is random. If they differ (another machine, another container, no Linux), both
ends know that they cannot share memory.
"""

from __future__ import annotations

import ctypes
import fcntl
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
from typing import Any

from torch import Tensor

SLOT = Struct("qqq")  # where a message lies, its bytes, its tag
STOP = SLOT.pack(-1, 0, 0)
FREED = Struct("q")
MAX_POLL_MS = 2**31 - 1
SPIN_NS = 50_000  # to poll for a message before sleeping: after a sleep a small pass takes some 30 µs longer
READ_BYTES = 16 * SLOT.size
MIN_SLOT, FIRST_SIZE = 64, 1 << 16  # bytes of a slot, and of the file at first
UNREPORTED_BYTES = 1 << 14  # of freed slots before the sender is informed: a write per message would cost too much
PEER_FILES = 1, 4  # of the sender's files, the ends of pipes that the other process uses
LARGE_BYTES, PARTS = 1 << 20, 4  # messages of this size and more go in parts, so that both ends copy at the same time
WORDS = 2 + PARTS  # in the pipe for one message at most: also its format, and the shape numbers of a step
STEPS = 4  # whose messages fit into the pipe: no rank is two steps ahead, or begins a step again more than once
F_SETPIPE_SZ, F_GETPIPE_SZ = 1031, 1032  # linux/fcntl.h


def slot_size(size: int) -> int:
    """Bytes of the slot for a message. Powers of two, so that slots are reused; unused pages take no memory."""
    return max(MIN_SLOT, 1 << (size - 1).bit_length())


def part_size(size: int) -> int:
    """Bytes of each part that a message is sent in."""
    return size if size < LARGE_BYTES else -(-size // (MIN_SLOT * PARTS)) * MIN_SLOT


class _Mapped:
    """A file in memory, mapped as far as it has grown. base: the mapping's address."""

    def __init__(self, file: FileIO) -> None:
        self._file, self.size, self.base = file, 0, 0
        self._map: mmap.mmap | None = None

    def reach(self, size: int) -> None:
        """Map the whole file, which has at least `size` bytes. Raises RuntimeError where it has fewer."""
        self.size = os.fstat(self._file.fileno()).st_size
        if self.size < size:
            raise RuntimeError(f"a message ends at byte {size} of {self.size}")
        self._map = mmap.mmap(self._file.fileno(), self.size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def grow(self, size: int) -> None:
        """Make the file at least `size` bytes long, and map it."""
        if size > self.size:
            os.ftruncate(self._file.fileno(), max(size, 2 * self.size, FIRST_SIZE))
            self.reach(size)

    def drop(self) -> None:
        """Unmap the file, which may be closed: its address is no longer valid."""
        self._map, self.size, self.base = None, 0, 0


class ShmSender:
    """The sending end, for at most `messages` in a step. offer: plain values that the receiver opens. Raises OSError."""

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
        self.offer = os.getpid(), theirs
        for file in (self._slots, self._freed):
            os.set_blocking(file.fileno(), False)

    @classmethod
    def opened(cls, messages: int) -> ShmSender | None:
        """A sender; None where the system has no memory files."""
        with suppress(OSError, AttributeError):
            return cls(messages)
        return None

    def agreed(self, taken: bool) -> ShmSender | None:
        """Called with whether the receiver has opened its files. Closes this process's copy of the receiver's pipe ends,
        since a pipe ends with the last process that holds it. Returns None where the receiver could not open them."""
        for i in PEER_FILES:
            self._files[i].close()
        if taken:
            return self
        self.close()
        return None

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> None:
        """Copy one contiguous CPU tensor; never waits. Like a backend's `send`, but no work is left to wait for. Raises
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
        """A slot of `wanted` bytes: a free one, or a new one at the end of the file."""
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
        """Wake the waiting receiver, even where a child of this process holds the pipe open."""
        with suppress(OSError, ValueError):  # where it is gone, or closed already
            self._slots.write(STOP)
        self.close()

    def close(self) -> None:
        """Close all files. Messages that are in the pipe still arrive."""
        for file in self._files:
            file.close()
        self._memory.drop()
        self._free.clear()


class ShmReceiver:
    """The receiving end of what another rank offers. timeout: for waits without one of their own. Raises OSError where
    the offer cannot be opened from here."""

    def __init__(self, offer: Any, timeout: timedelta) -> None:
        process, theirs = offer
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
    def of(cls, offer: Any, timeout: timedelta) -> ShmReceiver | None:
        """A receiver; None where the offer cannot be opened from here."""
        with suppress(OSError):
            return cls(offer, timeout)
        return None

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> ReceiveWork:
        """Like a backend's `recv`: receive the next message of this tag into this contiguous CPU tensor."""
        work = ReceiveWork(self, tensors[0], tag)
        self._asked[tag].append(work)
        return work

    def take(self, work: ReceiveWork, timeout: timedelta) -> None:
        """Receive messages of one tag in order, until the one of `work` has come."""
        while work.open:
            if not self._here[work.tag]:
                self._read(timeout)
            self._fill(work.tag)

    def here(self, work: ReceiveWork) -> bool:
        """Has the message of `work` come, or is the other end gone? Reads what has come; never waits."""
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
        with suppress(BrokenPipeError):  # the sender may be gone; its messages are still here
            written = self._freed.write(self._emptied)  # None: the pipe is full; report with the next message
        self._emptied, self._unreported = self._emptied[written or 0 :], 0

    def _read(self, timeout: timedelta) -> None:
        """Wait for the next entries in the pipe."""
        if self._ended:  # all messages from before the end were taken
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
        """Note the entries read from the pipe; False where there were none (None)."""
        for slot, size, tag in () if words is None else SLOT.iter_unpack(words or STOP):
            if slot < 0:
                self._ended = True
                break
            self._here[tag].append((slot, size))
        return words is not None

    def close(self) -> None:
        """Close all files, so that the next send at the other end fails."""
        for file in self._files:
            file.close()
        self._memory.drop()

    break_off = close


class ReceiveWork:
    """One receive, with the methods of a backend's work handle."""

    __slots__ = ("_receiver", "done", "open", "tag", "tensor")

    def __init__(self, receiver: ShmReceiver, tensor: Tensor, tag: int) -> None:
        self._receiver, self.tensor, self.tag, self.done, self.open = receiver, tensor, tag, 0, True

    def here(self) -> bool:
        """Is the tensor filled? Never waits."""
        return self._receiver.here(self)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the tensor is filled. timeout: None: the receiver's. Raises TimeoutError, and ConnectionError (with
        gloo's message) where the other end is gone."""
        self._receiver.take(self, self._receiver.timeout if timeout is None else timeout)


def _name(process: int | str, number: int) -> str:
    return os.readlink(f"/proc/{process}/fd/{number}")


def _opened(process: int, number: int, name: str, mode: str) -> FileIO:
    """Open a file of another process if it has this name: in another container its number means another file."""
    if _name(process, number) != name:
        raise FileNotFoundError(name)
    flags = {"r+": os.O_RDWR, "r": os.O_RDONLY, "w": os.O_WRONLY}[mode]
    return FileIO(os.open(f"/proc/{process}/fd/{number}", flags | os.O_NONBLOCK | os.O_CLOEXEC), mode)


def _hold(pipe: FileIO, size: int) -> None:
    """Make a pipe hold at least `size` bytes. Raises OSError."""
    if fcntl.fcntl(pipe.fileno(), F_GETPIPE_SZ) < size and fcntl.fcntl(pipe.fileno(), F_SETPIPE_SZ, size) < size:
        raise OSError(f"no pipe holds {size} bytes")
