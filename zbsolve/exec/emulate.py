"""Emulated devices: tensors, messages and orders are real, but times are a given device's.

A rank runs each pass for real, and then sleeps until its emulated device would be done. The device has a clock. A pass
starts there when the pass before it has ended and its message has arrived, which takes the link's time from the end of the
sending pass; it ends after its own duration.

The wall clock follows that clock. Deadlines are absolute: a delay of this machine (a late wake-up, gloo's own time for a
message) is made up in the next sleeps. Only a delay of more than the duration of one pass makes the device wait for its
rank, and the step longer. Records have wall-clock times. Host time, the optimizer and memory are not emulated.

Side streams have clocks of their own. A rank sleeps for them only if its next pass takes their result. The record of an
all-to-all has its device's start and end, as nothing really runs then. Collectives counted by the step really
start when the rank comes to them, but on the device when all that they wait for has ended there. If they wait for other
ranks of the pipeline, their end is known only at the end of the step; all-to-alls after them start without it. A collective
of a microbatch takes its device's duration from its real end on, since all devices have come to it by then.

Attention for another rank is really computed while the pass that hands it over runs. The parts before that pass do nothing:
they are recorded with their devices' times, and the real work after them has their time, too. Parts and helpers end when
their device is done, after what they wait for on other devices. A helper is never late: its own work waits for that pass, or
is done beside its rank's passes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..build.links import MESSAGES
from ..kinds import ALL_TO_ALL
from ..problem import Problem
from ..profile.known_steps import timed_by
from ..profile.profile import Profile
from ..schedule import Schedule
from ..util.errors import BadInput, LostRank, prefixed
from .awaits import crossings
from .base.program import Message
from .handlers import passes_where
from .transport.peers import shared_cells
from .transport.wires import Wires, came_true

OWN_TIMES = "schedule"  # emulate the times of the schedule's own problem
LOOK_SECONDS = 5e-5  # between two polls of another device


@dataclass(frozen=True)
class Times:
    """Durations on devices and links, whole µs.

    source: where they come from. passes: pass → its duration, with its message where that blocks its sender: the device is
    busy meanwhile, and the message arrives at the pass's end. links: (before, after) → the time of the message between them,
    if that goes to another rank. side_streams: pass off the compute stream → its stream. waits: pass → (pass before, lag)
    for what passes of side streams wait for, and passes of their rank that wait for them. others: the same for passes of
    other ranks that send no message, where ranks help each other, or copies wait for each other. helping: passes that
    compute another rank's attention. parts: passes whose work is done by the pass after them. joined: sums of gradients that
    wait for passes of other ranks.
    """

    source: str
    passes: Mapping[str, int]
    links: Mapping[tuple[str, str], int]
    side_streams: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)
    others: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)
    helping: Collection[str] = ()
    parts: Collection[str] = ()
    joined: Collection[str] = ()

    @classmethod
    def of(cls, schedule: Schedule, source: str) -> Times:
        """source: "schedule" for the durations in its own problem, or the file of a profile. For exchanges, and for
        all-to-alls without a price there, the schedule's durations stay. Raises BadInput where the profile is of another
        model, or has all-to-alls for which the schedule has no passes."""
        problem = schedule.problem
        if problem.passes.are(*MESSAGES[1:].flat).any():
            raise BadInput("emulate: not with attention for another rank on links that messages share: run it without")
        passes, links = _times(problem)
        streams, waits = _side_streams(problem)
        for before, after in schedule.syncs:
            if before in streams or after in streams:
                waits.setdefault(after, []).append((before, 0))
        (others, helping, parts), rank, e = _others(problem), problem.passes.rank, problem.edges
        for row, other in crossings(schedule):
            others.setdefault(problem.names[other], []).append((problem.names[row], 0))
        into = passes_where(problem, "ends_with_step")[e.after] & (rank[e.before] != rank[e.after])
        joined = frozenset(problem.names[row] for row in np.unique(e.after[into]).tolist())
        if source == OWN_TIMES:
            own = problem.source or "the schedule's problem"
            return cls(own, passes, links, streams, waits, others, helping, parts, joined)
        if helping:
            raise BadInput(f"{source}: ranks make attention for each other: emulate the schedule's own times ('schedule')")
        if source == "-":
            raise BadInput("emulate: every rank reads the profile: give a file")
        profile = Profile.load(source)
        if (layers := sum(problem.layers)) != len(profile.layers):
            raise BadInput(f"{source}: a profile of {len(profile.layers)} layers, but the schedule is for {layers}")
        with prefixed(source):
            again = _profiled(profile, problem)
        other_passes, other_links = _times(again)
        if (more := next((name for name in other_passes if name not in passes), None)) is not None:
            raise BadInput(f"{source}: has a time for pass {more}, which the schedule lacks: solve it with this profile")
        priced = any(layer.all_to_all for layer in profile.layers)  # then stages without a price have no all-to-all
        around = problem.passes.that(feature=ALL_TO_ALL)
        for name in streams:
            other_passes.setdefault(name, 0 if priced and around[problem.index[name]] else passes[name])
        for a, b in links:
            if a in streams and a in waits:
                other_links.setdefault((a, b), other_links.get((waits[a][0][0], b), links[a, b]))
        if (missing := next((name for name in passes if name not in other_passes), None)) is not None:
            raise BadInput(f"{source}: gives no time for pass {missing}")
        return cls(f"{profile.source}: {profile.model}", other_passes, other_links, streams, waits, others, joined=joined)


def _profiled(profile: Profile, problem: Problem) -> Problem:
    """The same step with a profile's durations."""
    stays = problem
    if profile.host is None:  # it says nothing of copies to a further pool, and back
        stays = problem.only(np.flatnonzero(~problem.copying))
    return timed_by(stays, replace(profile, capacity=None))  # the solver has checked that it fits


def _times(problem: Problem) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    names, rank, edges = problem.names, problem.passes.rank, problem.edges
    passes = dict(zip(names, problem.passes.duration.tolist(), strict=True))
    rows = np.flatnonzero(rank[edges.before] != rank[edges.after])
    before, after, lag = edges.before[rows].tolist(), edges.after[rows].tolist(), edges.lag[rows].tolist()
    return passes, {(names[a], names[b]): time for a, b, time in zip(before, after, lag, strict=True)}


def _side_streams(problem: Problem) -> tuple[dict[str, str], dict[str, list[tuple[str, int]]]]:
    """`side_streams` and `waits` of `Times`."""
    names, p, e = problem.names, problem.passes, problem.edges
    streams = {names[i]: p.stream_sets[p.streams[i]][0] for i in problem.side_stream.tolist()}
    waits: dict[str, list[tuple[str, int]]] = {}
    for a, b, lag in zip(e.before.tolist(), e.after.tolist(), e.lag.tolist(), strict=True):
        if names[b] in streams or (names[a] in streams and p.rank[a] == p.rank[b]):
            waits.setdefault(names[b], []).append((names[a], lag))
    return streams, waits


def _others(problem: Problem) -> tuple[dict[str, list[tuple[str, int]]], frozenset[str], frozenset[str]]:
    """`others`, `helping` and `parts` of `Times`. For a collective, the pass on the own rank says when it has ended."""
    names, p, e = problem.names, problem.passes, problem.edges
    helps, parts, joins = p.that(away=True), passes_where(problem, "before_its_pass"), p.that(together=True)
    silent = (p.rank[e.before] != p.rank[e.after]) & (helps[e.before] | (helps | parts)[e.after]) & ~joins[e.before]
    others: dict[str, list[tuple[str, int]]] = {}
    for row in np.flatnonzero(silent).tolist():
        others.setdefault(names[e.after[row]], []).append((names[e.before[row]], int(e.lag[row])))
    helping, own = (frozenset(names[row] for row in np.flatnonzero(array).tolist()) for array in (helps, parts))
    return others, helping, own


class Board:
    """What the ranks of one machine tell each other about their devices: int64 cells of shape (FIELDS, passes). end: when
    the pass ended on its device, monotonic ns; step: in which step. The others are counts since `EmulatedDevice.forget`:
    runs: of the pass; longer: its real work took longer than its duration; late: it was done after its deadline, worst: by
    how many ns at most; waited: it was so late that its device waited."""

    FIELDS = 7

    def __init__(self, cells: NDArray[np.int64]) -> None:
        self.end, self.step, self.runs, self.longer, self.late, self.worst, self.waited = cells

    @classmethod
    def shared(cls, wires: Wires, passes: int) -> Board:
        """A board that all ranks share; all of them call this. Raises BadInput where a rank is on another machine."""
        return cls(shared_cells(wires, (cls.FIELDS, passes), "emulate"))

    def facts(self) -> dict[str, Any]:
        """Sums over all passes, for the trace."""
        return {
            "passes": int(self.runs.sum()),
            "longer_than_emulated": int(self.longer.sum()),
            "late": int(self.late.sum()),
            "worst_late_us": int(self.worst.max()) / 1000,
            "waited": int(self.waited.sum()),
        }


class EmulatedDevice:
    """One rank's device. clock: when its last pass ended there, monotonic ns. length: duration of each pass, ns. rows: pass
    → its column of the board. seconds: to wait for another device."""

    def __init__(self, times: Times, rows: Mapping[str, int], board: Board, seconds: float = 300.0) -> None:
        self.board, self.times = board, times
        self.clock, self.seconds, self._step = 0, seconds, 0
        self._side_clocks: dict[str, int] = {}  # stream → when its last pass ended
        self._row = rows
        self.length = {name: us * 1000 for name, us in times.passes.items()}
        self._link = {pair: us * 1000 for pair, us in times.links.items()}
        self._first, self._began = True, 0
        self._parts_length = 0  # of the parts directly before a pass

    def begin(self) -> None:
        """A step begins: its first pass starts at its real start, or when its message arrives."""
        self._first, self._began = True, time.monotonic_ns()
        self._step += 1

    def drain(self) -> None:
        """Wait until passes of side streams have ended."""
        sleep_until(max(self._side_clocks.values(), default=0))

    def here(self, message: Message) -> bool:
        """Has `message`, which has really arrived, also arrived over the emulated link?"""
        sent = int(self.board.end[self._row[message.before]])
        return time.monotonic_ns() >= sent + self._link[message.before, message.after]

    def arrived(self, message: Message, arrival: int) -> int:
        """Wait until `message` has arrived over the emulated link. arrival: when it really did, ns. Returns the later."""
        due = int(self.board.end[self._row[message.before]]) + self._link[message.before, message.after]
        self.clock, self._first = max(self.clock, due), False
        return arrival if arrival >= due else sleep_until(due)

    def ready(self, name: str, arrival: int) -> int:
        """Wait for the passes of side streams, and of other devices, that pass `name` waits for. arrival: when its input was
        there, ns. Returns the later of both."""
        if name in self.times.side_streams:
            return arrival
        helping, others = self.times.helping, self.times.others.get(name, ())
        # Passes of other devices that must end before it begins; a helper and its pass run together.
        parts = [] if name in helping else [other for other in others if other[0] not in helping]
        due = max(self._awaited(name), *map(self._ended, parts), 0)
        if due == 0:
            return arrival
        self.clock, self._first = max(self.clock, due), False
        return arrival if time.monotonic_ns() >= due else sleep_until(due)

    def run_on_side_stream(self, name: str) -> tuple[int, int]:
        """Run pass `name` of a side stream on its device, after all its inputs. Returns its start and end there, ns."""
        stream, row = self.times.side_streams[name], self._row[name]
        others = map(self._ended, self.times.others.get(name, ()))
        start = max(self._side_clocks.get(stream, 0), self._awaited(name), self._began, *others)
        self._side_clocks[stream] = self.board.end[row] = end = start + self.length[name]
        self.board.step[row] = self._step
        self.board.runs[row] += 1
        return start, end

    def span_of(self, name: str) -> tuple[int, int]:
        """Start and end, ns, of pass `name` of a side stream in this step."""
        end = int(self.board.end[self._row[name]])
        return end - self.length[name], end

    def finish(self, name: str, start: int) -> tuple[int, int]:
        """The real work of pass `name`, started at `start` (ns), is done: wait until its device is done, except on side
        streams. Returns the start and end of the pass, ns. Raises LostRank where another device reports nothing."""
        if name in self.times.side_streams:
            return self.run_on_side_stream(name)
        if name in self.times.others:
            self.clock, self._first = max(self.clock, *map(self._ended, self.times.others[name])), False
        now, board = time.monotonic_ns(), self.board
        row, length = self._row[name], self.length[name]
        due = (max(self.clock, start) if self._first else self.clock) + length
        helping, whole = name in self.times.helping, length + self._parts_length
        part = name in self.times.parts
        self._parts_length = whole if part else 0
        self.clock, self._first = due if part or helping else max(due, now - whole), False
        board.end[row], board.step[row] = self.clock, self._step
        board.runs[row] += 1
        if part:
            return due - length, due
        if name in self.times.others or whole > length:  # its real work may have started before its emulated start
            start = max(start, due - length)
        board.longer[row] += now - start > whole and not helping
        board.late[row] += now > due and not helping
        board.worst[row] = max(int(board.worst[row]), 0 if helping else now - due)
        board.waited[row] += self.clock > due
        return start, sleep_until(self.clock)

    def forget(self, names: Iterable[str]) -> None:
        """Restart the counts of these passes."""
        rows = [self._row[name] for name in names]
        board = self.board
        for counts in (board.runs, board.longer, board.late, board.worst, board.waited):
            counts[rows] = 0

    def _ended(self, before: tuple[str, int]) -> int:
        """When a pass of another device that sends no message ended in this step, plus its lag, ns."""
        row = self._row[before[0]]
        if not came_true(lambda: bool(self.board.step[row] >= self._step), self.seconds, LOOK_SECONDS):
            raise LostRank(f"waiting for pass {before[0]} of another device: nothing for {self.seconds:g} s")
        return int(self.board.end[row]) + before[1] * 1000

    def _awaited(self, name: str) -> int:
        """When everything on this device that pass `name` waits for across streams has ended, ns; 0: nothing."""
        return max((int(self.board.end[self._row[a]]) + lag * 1000 for a, lag in self.times.waits.get(name, ())), default=0)


def sleep_until(due: int) -> int:
    """Sleep until `due`, monotonic ns. Returns the time then."""
    while (left := due - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)
    return time.monotonic_ns()
