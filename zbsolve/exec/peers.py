"""How ranks tell each other why they stop, so that every one of them ends soon and says the same.

gloo knows that a neighbour's connection broke, or that nothing came; neither says who began it. So a rank that stops
leaves a note in the process group's store and breaks its connections off, which wakes those that wait for it; they read
the notes before they say what happened. A rank without a note died or hangs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from ..errors import BadInput, ZbsolveError
from ..schedule import Schedule
from .comm import STOPPED, Wires, broken
from .failure import LostRank, RunFailed, one_line

HEARING = 1.0  # seconds for the others' notes
ROOM = 2048  # bytes a rank for what all hear: 300 characters, however they are written
Note = dict[str, Any]


def content(schedule: Schedule) -> str:
    """What a schedule says: its problem, orders and syncs, not its certificate."""
    order = sorted((stream, list(names)) for stream, names in schedule.order.items())
    return json.dumps([schedule.problem.digest, order, sorted(map(list, schedule.syncs))])


@contextmanager
def agreed(wires: Wires, what: str, content: str) -> Iterator[None]:
    """What each rank does by itself inside; at its end all ranks hear of all, and none goes on where one cannot.

    content: of `what`, to be the same on all ranks; a digest is compared. Waits as long as the process group's timeout.
    Raises BadInput naming the rank that has another one, or what was wrong there; RunFailed where its code raised.
    """
    mark = hashlib.sha256(content.encode()).hexdigest()[:16]
    try:
        yield
    except Exception as error:
        with suppress(LostRank):  # what happened here is the cause, whatever becomes of the others
            _all_say(wires, mark, type(error).__name__, one_line(error))
        raise
    said = _all_say(wires, mark, "", "")
    for rank, one in enumerate(said):
        if one["error"] == "BadInput":
            raise BadInput(f"rank {rank}: {one['text']}")
        if one["error"]:
            raise RunFailed(f"rank {rank}, building: {one['text']}")
    marks = [one["mark"] for one in said]
    common = Counter(marks).most_common(1)[0][0]
    others = [rank for rank, one in enumerate(marks) if one != common]
    if others:
        names, first = ", ".join(map(str, others)), marks.index(common)
        raise BadInput(f"rank {names} has another {what} than rank {first} (digests {marks[others[0]]} and {common})")


def _all_say(wires: Wires, mark: str, error: str, text: str) -> list[Note]:
    body = json.dumps({"mark": mark, "error": error, "text": text[:300]}).encode()
    mine = torch.frombuffer(bytearray(body.ljust(ROOM)), dtype=torch.uint8)
    everything = torch.empty((wires.size, ROOM), dtype=torch.uint8)
    wires.wait(wires.control.allgather([list(everything.unbind())], [mine]))
    return [json.loads(row.numpy().tobytes()) for row in everything]


class Peers:
    """The other ranks of a pipeline, for a rank that stops or waits. timeout: seconds to wait for them."""

    def __init__(self, wires: Wires, timeout: float) -> None:
        self.wires = wires
        self.timeout = timedelta(seconds=timeout)

    def wait(self, work: Any, what: str) -> None:
        """For a collective operation of all ranks. Raises LostRank naming `what`."""
        with self.telling(what):
            self.wires.wait(work, timeout=self.timeout)

    @contextmanager
    def telling(self, what: str | Callable[[], str]) -> Iterator[None]:
        """What is raised inside, the others hear; where one of them is the cause, it is said. Raises RunFailed in one
        line naming rank, pass (or `what`) and cause; the process group cannot be used any more."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RunFailed) and error.told:
                raise
            final = self._final(error, what if isinstance(what, str) else what())
            if isinstance(final, RunFailed):
                final.told = True
            if final is error:
                raise
            raise final from error

    def _final(self, error: Exception, what: str) -> Exception:
        rank, text = self.wires.rank, one_line(error)
        text = text if text.startswith(f"rank {rank}") else f"rank {rank}, {what}: {text}"
        lost = isinstance(error, LostRank) or broken(str(error))
        peer = error.peer if isinstance(error, LostRank) else None
        self._say({"text": text, "lost": lost, "peer": peer, "time": time.time()})
        break_off(self.wires)
        if lost:
            return self._heard(text)
        return error if isinstance(error, ZbsolveError) else RunFailed(text)

    def _say(self, note: Note) -> None:
        with suppress(Exception):  # where the store is gone with its rank, connections still break
            self.wires.notes.set(str(self.wires.rank), json.dumps(note))

    def _heard(self, text: str) -> RunFailed:
        """What happened, by everybody's notes."""
        until, notes = time.monotonic() + HEARING, dict[int, Note]()
        while time.monotonic() < until and not any(not note["lost"] for note in notes.values()):
            with suppress(Exception):
                notes |= {rank: self._read(rank) for rank in range(self.wires.size) if self._has(rank, notes)}
            time.sleep(0.02)
        return explained(text, self.wires.rank, notes, self.wires.size)

    def _has(self, rank: int, notes: Mapping[int, Note]) -> bool:
        return rank not in notes and bool(self.wires.notes.check([str(rank)]))

    def _read(self, rank: int) -> Note:
        note: Note = json.loads(self.wires.notes.get(str(rank)))
        return note


def explained(text: str, rank: int, notes: Mapping[int, Note], ranks: int) -> LostRank:
    """`text` of `rank`, which lost another one, with the cause: what a rank said that failed by itself, or which rank
    says nothing at all, found along who waited for whom."""
    causes = [(note["time"], other) for other, note in notes.items() if not note["lost"]]
    if causes:
        other = min(causes)[1]
        return LostRank(f"{notes[other]['text']}; then {text}", other)
    path = [rank]
    while path[-1] in notes and notes[path[-1]]["peer"] not in (None, *path):
        path.append(notes[path[-1]]["peer"])
    silent = [other for other in range(ranks) if other not in notes and other != rank]
    if path[-1] in silent:
        waited = notes[path[-2]]["text"] if path[-2] in notes else text
        return LostRank(f"rank {path[-1]} is lost: {waited}" + ("" if path[-2] == rank else f"; then {text}"), path[-1])
    if len(silent) == 1:
        return LostRank(f"rank {silent[0]} is lost: {text}", silent[0])
    return LostRank(text)


def break_off(wires: Wires) -> None:
    """End every connection of this rank, so that nobody waits for it: gloo does so where a receive ran out of time (but not
    where it is from a rank that is gone already)."""
    for other in set(range(wires.size)) - {wires.rank}:
        with suppress(Exception):
            wires.control.recv([torch.empty(1)], other, STOPPED).wait(timedelta(milliseconds=1))
