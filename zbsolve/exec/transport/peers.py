"""How ranks tell each other why they stop, so that all of them stop soon and report the same cause. Also how far their
clocks differ, and integers in memory that all ranks of a machine share.

gloo reports that a connection broke, or that nothing came, but not which rank is the cause. So a rank that stops writes a
note to the process group's store and then breaks its connections. That wakes the ranks that wait for it, and they read the
notes before they report an error. A rank without a note has died or hangs.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...util.errors import BadInput, LostRank, RunFailed, ZbsolveError, one_line
from ...util.files import temporary_folder
from .wires import BROKE, BYTES, Wires, broken, call_beside, came_true

Cells = NDArray[np.int64]
NOTES_SECONDS = 1.0  # to wait for the notes of others
MOST_TEXT = 300  # characters of an error that other ranks are told
Note = dict[str, Any]


@contextmanager
def agreed(wires: Wires, what: str, content: str) -> Iterator[None]:
    """Inside, each rank works by itself. At the end all ranks exchange their results, and if one failed all raise.

    content: the text of `what`, such as a schedule; its digest must be the same on all ranks. Waits up to the process
    group's timeout. Raises BadInput naming the rank with another content, or with the error there; RunFailed where code of a
    rank raised another exception.
    """
    mark = hashlib.sha256(content.encode()).hexdigest()[:16]
    try:
        yield
    except Exception as error:
        with suppress(LostRank):  # the error here is the cause, even if others are lost too
            wires.told([mark, type(error).__name__, one_line(error)[:MOST_TEXT]])
        raise
    notes = wires.told([mark, "", ""])
    for rank, (_, kind, text) in enumerate(notes):
        if kind == "BadInput":
            raise BadInput(text if text.startswith(f"rank {rank}") else f"rank {rank}: {text}")
        if kind:
            raise RunFailed(f"rank {rank}, building: {text}")
    marks = [mark for mark, *_ in notes]
    common = Counter(marks).most_common(1)[0][0]
    others = [rank for rank, other in enumerate(marks) if other != common]
    if others:
        names, first = ", ".join(map(str, others)), marks.index(common)
        raise BadInput(f"rank {names} has another {what} than rank {first} (digests {marks[others[0]]} and {common})")


class Peers:
    """The other ranks of a pipeline, for a rank that stops or waits. timeout: seconds to wait for them. failure: why this
    rank stopped; the first cause stays, here and in its note, even if the training loop goes on. beside: functions that
    break connections to ranks of other pipelines. thread_error: what another thread raised (see `stop`)."""

    def __init__(self, wires: Wires, timeout: float) -> None:
        self.beside: list[Callable[[], None]] = []
        self.wires = wires
        self.timeout = timedelta(seconds=timeout)
        self.failure = ""
        self.thread_error: Exception | None = None

    def stop(self, error: Exception) -> None:
        """Another thread of this rank raised `error`: this rank stops at its next wait, and reports this error."""
        self.thread_error = self.thread_error or error
        self._say(self.thread_error, "")

    def stopped(self) -> int | None:
        """Another rank that has left a note because it stopped; None where there is none."""
        ranks = [other for other in range(self.wires.size) if other != self.wires.rank]
        return next((other for other in ranks if self.wires.notes.check([str(other)])), None)

    def break_devices(self) -> None:
        """Abort the communicators of this rank's GPU, so that neither the GPU nor the host waits for others."""
        call_beside([self.wires.abort, *self.beside])

    def wait(self, work: Any, what: str) -> None:
        """Wait for a collective of all ranks; a done one is valid even after a failure. Raises LostRank naming `what`."""
        with self._told(what):
            self.wires.wait(work, timeout=self.timeout)

    def gathered(self, numbers: torch.Tensor, what: str) -> torch.Tensor:
        """The rows of all ranks (see `Wires.gather`); waits for them. Raises LostRank naming `what`."""
        work, everything = self.wires.gather(numbers)
        self.wait(work, what)
        return everything

    @contextmanager
    def telling(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Tell the other ranks what is raised inside. Where another rank is the cause, the error raised here says so.

        Raises RunFailed in one line naming rank, pass (or `what`) and cause. The pipeline and its process group are unusable
        afterwards: every later call raises RunFailed with the first cause.
        """
        self.refuse_failed()
        with self._told(what):
            yield

    def refuse_failed(self) -> None:
        """Raises RunFailed where this rank stopped before."""
        if self.failure:
            error = RunFailed(f"this pipeline failed before: {self.failure}; make a new process group and a new pipeline")
            error.told = True
            raise error

    @contextmanager
    def _told(self, what: str | Callable[[], str]) -> Iterator[None]:
        try:
            yield
        except Exception as raised:
            if isinstance(raised, RunFailed) and raised.told:
                raise
            self.refuse_failed()
            error = self.thread_error or raised
            note = self._say(error, what if isinstance(what, str) else what())
            own = error if isinstance(error, ZbsolveError) else RunFailed(note["text"])
            final = self._heard(note) if note["lost"] else own
            self.failure = one_line(final)
            if isinstance(final, RunFailed):
                final.told = True
            # Its line says what went wrong and where, so the traceback of our own frames is left out.
            final.details = "".join(traceback.format_exception(error))
            raise final.with_traceback(None) from None

    def _say(self, error: Exception, what: str) -> Note:
        """Leave a note, then break all connections."""
        rank, text = self.wires.rank, one_line(error)
        text = text if text.startswith(f"rank {rank}") else f"rank {rank}, {what}: {text}"
        lost = isinstance(error, LostRank) or broken(str(error))
        peer = error.peer if isinstance(error, LostRank) else None
        note: Note = {"text": text, "lost": lost, "peer": peer, "gone": text.endswith(BROKE), "time": time.time()}
        with suppress(Exception):  # the store may be gone with its rank; connections still break
            self.wires.notes.set(str(rank), json.dumps(note))
        call_beside([self.wires.break_off, *self.beside])
        return note

    def _heard(self, own: Note) -> RunFailed:
        """The error by the notes of all ranks. Notes may come a little after this rank wakes. But a rank whose connection
        broke has left its note before that, or leaves none."""
        until, rank, store = time.monotonic() + NOTES_SECONDS, self.wires.rank, self.wires.notes
        notes: dict[int, Note] = {rank: own}
        while True:
            with suppress(Exception):
                left = [str(other) for other in range(self.wires.size) if other not in notes]
                notes |= {int(other): json.loads(store.get(other)) for other in left if store.check([other])}
            last, end = last_waiting(rank, notes)
            settled = end not in notes and end is not None and notes[last]["gone"]
            if settled or any(not note["lost"] for note in notes.values()) or time.monotonic() > until:
                return explained(rank, notes, self.wires.size)
            time.sleep(0.02)


@contextmanager
def together(peers: Peers, what: str, content: str = "") -> Iterator[None]:
    """Inside, each rank works by itself; if one fails, or has other `content`, all raise (see `agreed`). Raises RunFailed
    where a rank is lost, or the pipeline has failed before."""
    peers.refuse_failed()
    try:
        with agreed(peers.wires, what, content):
            yield
    except LostRank as error:
        with peers.telling(what):
            raise error


def last_waiting(rank: int, notes: Mapping[int, Note]) -> tuple[int, int | None]:
    """Follow the chain of ranks that waited for each other, from `rank` on. Returns the last rank with a note, and the rank
    that it waited for (None: all ranks, or one that is in the chain)."""
    path = [rank]
    while (peer := notes[path[-1]]["peer"]) in notes and peer not in path:
        path.append(peer)
    return path[-1], None if peer in path else peer


def explained(rank: int, notes: Mapping[int, Note], ranks: int) -> LostRank:
    """The error that `rank`, which lost another one, raises. If a rank failed by itself, its note is the cause. If
    none did, the lost rank is one that others waited for and that has left no note."""
    text = notes[rank]["text"]
    causes = [(note["time"], other) for other, note in notes.items() if not note["lost"]]
    if causes:
        other = min(causes)[1]
        return LostRank(f"{notes[other]['text']}; then {text}", other)
    last, end = last_waiting(rank, notes)
    silent = [other for other in range(ranks) if other not in notes]
    if end is None and len(silent) == 1:
        last, end = rank, silent[0]
    if end is None:  # the last rank waited for ranks of other pipelines, or for all
        return LostRank(text if last == rank or notes[last]["peer"] is not None else f"{notes[last]['text']}; then {text}")
    return LostRank(f"rank {end} is lost: {notes[last]['text']}" + ("" if last == rank else f"; then {text}"), end)


def _offset(wires: Wires, rounds: int = 20) -> int:
    """ns by which this rank's monotonic clock is ahead of rank 0's, by the fastest of several round trips."""
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


def clock_lead(wires: Wires) -> int:
    """ns by which this rank's monotonic clock is ahead of rank 0's. Every rank calls this. Raises LostRank."""
    return 0 if len(set(wires.told(_machine()))) == 1 else _offset(wires)


def _machine() -> str:
    """An id of the running system: ranks with the same one have the same monotonic clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return socket.gethostname()


def shared_cells(wires: Wires, shape: tuple[int, ...], what: str) -> Cells:
    """An array of zeros in memory that all ranks share; all of them call this. Rank 0 makes a file for it and deletes its
    name once all have mapped it. Raises BadInput naming `what`, on all ranks, where one is on another machine."""
    with nullcontext() if wires.rank else temporary_folder("cells") as folder:
        path, cells = "", None
        if folder is not None:
            path = str(folder / "cells")
            Path(path).write_bytes(bytes(int(np.prod(shape)) * 8))
        path = wires.told(path)[0]
        with suppress(OSError):
            cells = np.memmap(path, np.int64, "r+", shape=shape)
        if not all(wires.told(cells is not None)) or cells is None:
            raise BadInput(f"{what}: all ranks must be on one machine")
    return cells


class Signals:
    """How copies of several ranks wait for each other, where ranks share a bus or host memory. cells: pass → the last step
    in which it has ended, shape (passes,), in memory shared by all ranks. rows: pass name → its cell; ranks: pass name → its
    rank. timeout: seconds to wait for a pass. step: this rank's current step."""

    def __init__(self, cells: Cells, rows: Mapping[str, int], ranks: Mapping[str, int], timeout: float) -> None:
        self.cells, self.rows, self.ranks, self.timeout = cells, rows, ranks, timeout
        self.step = 0

    def tell(self, name: str, step: int) -> None:
        """Pass `name` has ended in a step."""
        self.cells[self.rows[name]] = step

    def hear(self, name: str, step: int) -> None:
        """Wait until pass `name` of another rank has ended in a step. Raises LostRank."""
        row = self.rows[name]
        if not came_true(lambda: bool(self.cells[row] >= step), self.timeout):
            raise LostRank(f"waiting for {name}: not done after {self.timeout:g} s", self.ranks[name])
