"""Emulated devices: tensors, messages and orders are real, time is a device's.

A rank runs each pass as always and then sleeps until its device would be done. A device has a clock: a pass starts there
when the pass before has ended and its message is there, ends after its time, and its own message is there when the
link's time has passed since. A step's first pass starts when it really does.

The wall clock follows that clock: deadlines are absolute, so what this machine adds (a late wake-up, gloo's own time for
a message) is made up within the next sleeps and does not add up along a step. At most one pass's time is made up: where
the real work comes later than that, the device waits for its rank, and the step is longer. What is recorded is the wall
clock: when a pass really began, and when its rank really went on after its end. Not emulated: host time, the optimizer,
memory.

All-to-alls and exchanges run beside compute: their stream has a clock of its own, and nobody sleeps for them but who waits
for what they give. An all-to-all is recorded with its device's start and end, both: nothing really runs then, and the rank
comes to it when it has time. So it may begin before the recorded end of its F, by what that came late. When an exchange
ends is known when the step does, for it waits for other ranks: all-to-alls that come behind it in its stream begin without
it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BadInput
from ..problem import KINDS, Problem
from ..profile import Profile
from ..schedule import Schedule
from .groups import ALL_TO_ALL
from .lower import Message, microbatches, routes
from .wires import Wires, receive_bytes, send_bytes

OWN = "schedule"  # emulate the times of the schedule's own problem


@dataclass(frozen=True)
class Times:
    """What devices and links take, whole µs: pass → its time; (before, after) → the time of the message between them,
    where that goes to another rank. `source`: where they come from. `beside`: pass that runs beside compute → its stream;
    `waits`: what such a pass waits for, and who waits for such a pass on its rank: pass → (pass before, lag)."""

    source: str
    passes: Mapping[str, int]
    links: Mapping[tuple[str, str], int]
    beside: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, schedule: Schedule, source: str) -> Times:
        """`source`: "schedule" for the times of its own problem, or a profile's file. All-to-alls take what the profile
        says; where it says nothing of any, and for exchanges, of which no profile does, the schedule's times stay. Raises
        BadInput where the profile is of another model, or has all-to-alls where the schedule has no passes for them."""
        problem = schedule.problem
        passes, links = _times(problem)
        beside, waits = _beside(problem)
        if source == OWN:
            return cls(problem.source or "the schedule's problem", passes, links, beside, waits)
        if source == "-":
            raise BadInput("emulate: every rank reads the profile: give a file")
        profile = Profile.load(source)
        if sum(problem.layers) != len(profile.layers):
            layers = sum(problem.layers)
            raise BadInput(f"{source}: a profile of {len(profile.layers)} layers, but the schedule is for {layers}")
        other_passes, other_links = _times(_profiled(profile, problem))
        more = next((name for name in other_passes if name not in passes), None)
        if more is not None:
            raise BadInput(f"{source}: has a time for pass {more}, which the schedule lacks: solve it with this profile")
        told = any(layer.all_to_all for layer in profile.layers)  # then a stage without has none
        for name in beside:
            sent = problem.passes[problem.index[name]].kind in ALL_TO_ALL
            other_passes.setdefault(name, 0 if told and sent else passes[name])
        for a, b in links:
            if a in beside:
                other_links.setdefault((a, b), other_links.get((waits[a][0][0], b), links[a, b]))
        missing = next((name for name in passes if name not in other_passes), None)
        if missing is not None:
            raise BadInput(f"{source}: gives no time for pass {missing}")
        return cls(f"{profile.source}: {profile.model}", other_passes, other_links, beside, waits)


def _profiled(profile: Profile, problem: Problem) -> Problem:
    """The same step by a profile's times."""
    count = len(microbatches(problem))
    fused = bool((problem.passes.kind == KINDS.index("BW")).any())
    again = np.unique(problem.passes.stage[problem.passes.kind == KINDS.index("X")]).tolist()
    profile = replace(profile, capacity=None)  # whether it fits has been settled by who solved it
    return profile.problem(problem.ranks, count, routes(problem), layers=problem.layers, fused=fused, recompute=again)


def _times(problem: Problem) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    names, rank, edges = problem.names, problem.passes.rank, problem.edges
    passes = dict(zip(names, problem.passes.duration.tolist(), strict=True))
    rows = np.flatnonzero(rank[edges.before] != rank[edges.after])
    before, after, lag = edges.before[rows].tolist(), edges.after[rows].tolist(), edges.lag[rows].tolist()
    return passes, {(names[a], names[b]): time for a, b, time in zip(before, after, lag, strict=True)}


def _beside(problem: Problem) -> tuple[dict[str, str], dict[str, list[tuple[str, int]]]]:
    """See `Times`."""
    names, p, e = problem.names, problem.passes, problem.edges
    found = {names[i]: p.stream_sets[p.streams[i]][0] for i in problem.beside.tolist()}
    waits: dict[str, list[tuple[str, int]]] = {}
    for a, b, lag in zip(e.before.tolist(), e.after.tolist(), e.lag.tolist(), strict=True):
        if names[b] in found or (names[a] in found and p.rank[a] == p.rank[b]):
            waits.setdefault(names[b], []).append((names[a], lag))
    return found, waits


class Board:
    """What the ranks of one machine tell each other about their devices: int64 cells, a row a field, a column a pass.

    `end`: when the pass ended on its device in this step, monotonic ns. Counted since `Device.forget`: `runs`; `longer`:
    its real work took longer than its time; `late`: its real work was done after its time was over, and how many ns at
    worst (`worst`); `waited`: so late that its device waited.
    """

    FIELDS = 6

    def __init__(self, cells: NDArray[np.int64]) -> None:
        self.end, self.runs, self.longer, self.late, self.worst, self.waited = cells

    @classmethod
    def alone(cls, passes: int) -> Board:
        """For ranks in one process."""
        return cls(np.zeros((cls.FIELDS, passes), np.int64))

    @classmethod
    def shared(cls, wires: Wires, passes: int) -> Board:
        """The same memory for all ranks, which all call this: a file of rank 0's, which loses its name once all have it.
        Raises BadInput where it is not there: on another machine."""
        path = _made(cls.FIELDS * passes * 8) if wires.rank == 0 else receive_bytes(wires, 0).decode()
        others = range(1, wires.size) if wires.rank == 0 else ()
        try:
            for other in others:
                send_bytes(wires, path.encode(), other)
            cells = np.memmap(path, np.int64, "r+", shape=(cls.FIELDS, passes))
            if wires.rank:
                send_bytes(wires, b"", 0)
            for other in others:
                receive_bytes(wires, other)
        except OSError:
            raise BadInput("emulate: all ranks must be on one machine") from None
        finally:
            if wires.rank == 0:
                os.unlink(path)
        return cls(cells)

    def facts(self) -> dict[str, Any]:
        """Over all passes, for the trace."""
        return {
            "passes": int(self.runs.sum()),
            "longer_than_emulated": int(self.longer.sum()),
            "late": int(self.late.sum()),
            "worst_late_us": int(self.worst.max()) / 1000,
            "waited": int(self.waited.sum()),
        }


def _made(size: int) -> str:
    """A new file of zeros."""
    handle, path = tempfile.mkstemp(prefix="zbsolve-emulate-")
    os.truncate(handle, size)
    os.close(handle)
    return path


class Device:
    """One rank's device. `clock`: when its last pass ended there, monotonic ns. `names`: the passes in table order."""

    def __init__(self, times: Times, names: Sequence[str], board: Board) -> None:
        self.board, self.times = board, times
        self.clock = 0
        self._beside: dict[str, int] = {}  # stream → when its last pass ended
        self._row = {name: i for i, name in enumerate(names)}
        self._length = {name: us * 1000 for name, us in times.passes.items()}
        self._link = {pair: us * 1000 for pair, us in times.links.items()}
        self._first = True

    def begin(self) -> None:
        """A step begins: its first pass starts when it really does, or when its message is there."""
        self._first = True

    def arrived(self, message: Message, arrival: int) -> int:
        """`message` is really here since `arrival`, ns: wait until its link would have brought it. The later of both."""
        due = int(self.board.end[self._row[message.before]]) + self._link[message.before, message.after]
        self.clock, self._first = max(self.clock, due), False
        return arrival if arrival >= due else sleep_until(due)

    def _awaited(self, name: str) -> int:
        """When what pass `name` waits for beside compute (or behind it) has ended on its device, ns."""
        return max((int(self.board.end[self._row[a]]) + lag * 1000 for a, lag in self.times.waits.get(name, ())), default=0)

    def ready(self, name: str, arrival: int) -> int:
        """Pass `name` could begin at `arrival`, ns, but for passes beside compute on its rank: wait for those. The later of
        both."""
        due = self._awaited(name)
        if due == 0 or name in self.times.beside:
            return arrival
        self.clock, self._first = max(self.clock, due), False
        return arrival if time.monotonic_ns() >= due else sleep_until(due)

    def ran_beside(self, name: str) -> tuple[int, int]:
        """All that pass `name`, beside compute, waits for has ended: when it starts and ends on its device, ns."""
        stream, row = self.times.beside[name], self._row[name]
        start = max(self._beside.get(stream, 0), self._awaited(name))
        self._beside[stream] = self.board.end[row] = end = start + self._length[name]
        self.board.runs[row] += 1
        return start, end

    def finish(self, name: str, start: int) -> tuple[int, int]:
        """The real work of pass `name`, begun at `start`, ns, is done: wait until its device's is, unless it runs beside.
        Its start and end, ns."""
        if name in self.times.beside:
            return self.ran_beside(name)
        now, board = time.monotonic_ns(), self.board
        row, length = self._row[name], self._length[name]
        due = (max(self.clock, start) if self._first else self.clock) + length
        self.clock, self._first = max(due, now - length), False
        board.end[row] = self.clock
        board.runs[row] += 1
        board.longer[row] += now - start > length
        board.late[row] += now > due
        board.worst[row] = max(int(board.worst[row]), now - due)
        board.waited[row] += self.clock > due
        return start, sleep_until(self.clock)

    def forget(self, names: Iterable[str]) -> None:
        """Count anew for these passes."""
        rows = [self._row[name] for name in names]
        board = self.board
        for counts in (board.runs, board.longer, board.late, board.worst, board.waited):
            counts[rows] = 0


def sleep_until(due: int) -> int:
    """Sleep until `due`, monotonic ns; the time then."""
    while (left := due - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)
    return time.monotonic_ns()
