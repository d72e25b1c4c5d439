"""Messages between two processes of one machine: one copy into memory that both map, one copy out of it.

gloo moves such a message through the network stack and threads of its own at either end, which costs more than many a pass.
Here one direction of a pair of ranks is a file in memory, a pipe that says where in it the next message lies, and one back
that says what was copied out of it. Pipes keep order, wake who waits, and end with the process at their other end.

The sender offers its descriptors by number; the other end opens them through /proc, and only where their names there are
the offered ones, one of which is random: elsewhere (another machine, another container, no Linux) both know that it does
not work.
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

PLACE = Struct("qqq")  # where a message lies, its bytes, its tag
STOPPED = PLACE.pack(-1, 0, 0)
FREE = Struct("q")
LONGEST = 2**31 - 1  # ms that poll can wait
SPIN = 50_000  # ns to look out for a message before sleeping: a small pass takes some 30 µs longer after a sleep
CHUNK = 16 * PLACE.size  # read at once
LEAST, FIRST = 64, 1 << 16  # bytes of a place, and of the file at first
UNSAID = 1 << 14  # bytes of places that are free again before it is said: a word for each small message would cost too much
THEIRS = 1, 4  # of an outlet's files: the ends of its pipes that are for the other process
LARGE, PARTS = 1 << 20, 4  # bytes from which on a message goes in parts, so that both ends copy at once
EACH = 2 + PARTS  # words in the pipe for a message at most: before it may come its shape, and the numbers of a step's shapes
STEPS = 4  # whose messages fit into the pipe: no rank is two steps ahead, or begins one again more than once
F_SETPIPE_SZ, F_GETPIPE_SZ = 1031, 1032  # linux/fcntl.h


def room(size: int) -> int:
    """Bytes of the place for a message: few different ones, so that places serve again; pages never touched cost nothing."""
    return max(LEAST, 1 << (size - 1).bit_length())


def part(size: int) -> int:
    """Bytes of a message that go at once."""
    return size if size < LARGE else -(-size // (LEAST * PARTS)) * LEAST


class _Mapped:
    """A file in memory, mapped as far as it has grown. `base`: the mapping's address."""

    def __init__(self, file: FileIO) -> None:
        self._file, self.size, self.base = file, 0, 0
        self._map: mmap.mmap | None = None

    def reach(self, size: int) -> None:
        """Map all there is, at least so many bytes."""
        self.size = os.fstat(self._file.fileno()).st_size
        if self.size < size:
            raise RuntimeError(f"a message ends at byte {size} of {self.size}")
        self._map = mmap.mmap(self._file.fileno(), self.size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def grow(self, size: int) -> None:
        """Make the file at least so long, and map it."""
        if size > self.size:
            os.ftruncate(self._file.fileno(), max(size, 2 * self.size, FIRST))
            self.reach(size)

    def drop(self) -> None:
        """Map nothing: an address used from now on is asked for anew, of a file that is closed."""
        self._map, self.size, self.base = None, 0, 0


class Outlet:
    """The sender's end of one direction, for at most `messages` in a step. Raises OSError."""

    def __init__(self, messages: int) -> None:
        memory = FileIO(os.memfd_create(f"zbsolve-{secrets.token_hex(8)}"), "r+")
        self._files, self._memory, self._end = [memory], _Mapped(memory), 0
        self._free: dict[int, list[int]] = {}
        self._rooms: dict[int, int] = {}
        try:
            for _ in range(2):
                self._files += (FileIO(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True))
            _, _, self._places, self._freed, _ = self._files
            _hold(self._places, STEPS * EACH * messages * PLACE.size)
            theirs = [(number, _name("self", number)) for number in (self._files[i].fileno() for i in (0, *THEIRS))]
        except OSError:
            self.close()
            raise
        self.offer = json.dumps([os.getpid(), theirs]).encode()  # what the other end needs
        for one in (self._places, self._freed):
            os.set_blocking(one.fileno(), False)

    @classmethod
    def made(cls, messages: int) -> Outlet | None:
        """None where this system has no such thing."""
        with suppress(OSError, AttributeError):
            return cls(messages)
        return None

    def agreed(self, taken: bool) -> Outlet | None:
        """The other end has opened what it needs, and pipes end with the process that holds their end; or it cannot."""
        for i in THEIRS:
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
        place, step = self._place(room(size)), part(size)
        there, here = self._memory.base + place, tensor.data_ptr()
        while True:
            now = min(step, size - done)
            ctypes.memmove(there + done, here + done, now)
            if self._places.write(PLACE.pack(place + done, now, tag)) is None:
                raise RuntimeError("more messages on their way than two steps have")
            done += now
            if done == size:
                return

    def _place(self, wanted: int) -> int:
        free = self._free.setdefault(wanted, [])
        if not free:
            self._look()
        if free:
            return free.pop()
        place, self._end = self._end, self._end + wanted
        self._memory.grow(self._end)
        self._rooms[place] = wanted
        return place

    def _look(self) -> None:
        """Which places are free again?"""
        for (place,) in FREE.iter_unpack(self._freed.read(1 << 16) or b""):
            self._free[self._rooms[place]].append(place)

    def break_off(self) -> None:
        """Wake who waits, also where a child of this process holds the pipe open."""
        with suppress(OSError, ValueError):  # where it is gone, or closed already
            self._places.write(STOPPED)
        self.close()

    def close(self) -> None:
        """Give everything back; what is on its way still arrives."""
        for one in self._files:
            one.close()
        self._memory.drop()
        self._free.clear()


class Inlet:
    """The receiver's end of what another rank offers; it waits for `timeout` where nothing else is said. Raises OSError
    where it cannot be had."""

    def __init__(self, offer: bytes, timeout: timedelta) -> None:
        process, theirs = json.loads(offer)
        self.timeout = timeout
        self._files: list[FileIO] = []
        try:
            for (number, name), mode in zip(theirs, ("r+", "r", "w"), strict=True):
                self._files.append(_opened(process, number, name, mode))
        except OSError:
            for one in self._files:
                one.close()
            raise
        memory, self._places, self._freed = self._files
        self._memory = _Mapped(memory)
        self._poll = poll()
        self._poll.register(self._places, POLLIN)
        self._here: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)  # tag → what is to be taken
        self._asked: defaultdict[int, deque[Taking]] = defaultdict(deque)
        self._emptied, self._unsaid, self._ended = b"", 0, False

    @classmethod
    def of(cls, offer: bytes, timeout: timedelta) -> Inlet | None:
        """None where nothing is offered, or it cannot be had from here."""
        with suppress(OSError):
            return cls(offer, timeout) if offer else None
        return None

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Taking:
        """The next message of its tag, but those asked for already, is for this contiguous tensor of the CPU. As a backend's
        `recv`."""
        taking = Taking(self, tensors[0], tag)
        self._asked[tag].append(taking)
        return taking

    def take(self, taking: Taking, timeout: timedelta) -> None:
        """Take messages of one tag in their order, until this one is there."""
        here, asked = self._here[taking.tag], self._asked[taking.tag]
        while taking.open:
            if not here:
                self._read(timeout)
            while here and asked:
                self._copy(asked[0], *here.popleft())
                if not asked[0].open:
                    asked.popleft()

    def _copy(self, taking: Taking, place: int, size: int) -> None:
        done, whole = taking.done, taking.tensor.nbytes
        if size != min(part(whole), whole - done):
            raise RuntimeError(f"{size} bytes came in place of {min(part(whole), whole - done)}")
        if place + size > self._memory.size:
            self._memory.reach(place + size)
        ctypes.memmove(taking.tensor.data_ptr() + done, self._memory.base + place, size)
        taking.done += size
        if taking.done == whole:
            taking.open = False
            self._emptied += FREE.pack(place - done)
            self._unsaid += max(whole, LEAST)
            if self._unsaid >= UNSAID:
                self._say()

    def _say(self) -> None:
        said: int | None = len(self._emptied)
        with suppress(BrokenPipeError):  # the sender may be gone: its messages are here
            said = self._freed.write(self._emptied)  # None: the pipe is full, so the next time
        self._emptied, self._unsaid = self._emptied[said or 0 :], 0

    def _read(self, timeout: timedelta) -> None:
        if self._ended:  # what came before the end was taken first
            raise ConnectionError("Connection closed by peer")
        until = time.monotonic_ns() + SPIN
        while (words := self._places.read(CHUNK)) is None and time.monotonic_ns() < until:
            os.sched_yield()
        while words is None:
            ms = min(round(timeout.total_seconds() * 1000), LONGEST)
            if not self._poll.poll(ms):
                raise TimeoutError(f"Timed out waiting {ms}ms")
            words = self._places.read(CHUNK)
        for place, size, tag in PLACE.iter_unpack(words or STOPPED):
            if place < 0:
                self._ended = True
                return
            self._here[tag].append((place, size))

    def break_off(self) -> None:
        """Whoever sends next hears of it."""
        self.close()

    def close(self) -> None:
        """Give everything back."""
        for one in self._files:
            one.close()
        self._memory.drop()


class Taking:
    """One receive: as a backend's work object."""

    __slots__ = ("_inlet", "done", "open", "tag", "tensor")

    def __init__(self, inlet: Inlet, tensor: Tensor, tag: int) -> None:
        self._inlet, self.tensor, self.tag, self.done, self.open = inlet, tensor, tag, 0, True

    def wait(self, timeout: timedelta | None = None) -> None:
        """Until the tensor is filled, or the other end is gone, or time is over (None: the inlet's). Raises TimeoutError,
        ConnectionError in gloo's words."""
        self._inlet.take(self, self._inlet.timeout if timeout is None else timeout)


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
