"""Emulated devices: tensors, messages and orders are real, time is a device's.

A rank runs each pass as always, and then sleeps until its device would be done. A device has a clock: a pass starts there
when the pass before it has ended and its message is there, the link's time behind the pass that sends it, and ends after its
time.

The wall clock follows that clock. Deadlines are absolute, so what this machine adds (a late wake-up, gloo's own time for a
message) is made up within the next sleeps, but no more than one pass's time of it: beyond that the device waits for its
rank, and the step is longer. What is recorded is the wall clock. Host time, the optimizer and memory are not emulated.

Side streams have clocks of their own. Nobody sleeps for them but a rank whose next pass takes what they give. An all-to-all
is recorded with its device's start and end, since nothing really runs then. Gathers, reductions and sums over replicas are
begun when the rank comes to them, but take their device's time from when all that they wait for has ended there. When one
ends that waits for other ranks of the pipeline is known only when the step does: all-to-alls behind it begin without it. A
collective of a sharded vocabulary takes its device's time when it has really ended, for then all devices have come to it.

Attention for another rank is really made while the pass that hands it over runs. That pass's parts, which come before it, do
nothing: they are recorded with their device's times, and the real work that comes next has their time, too. Parts and
helpers are over when their device is done, behind what they wait for on other devices. A helper is never too late, for its
own work waits for that pass, or is done beside its rank's passes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kinds import ALL_TO_ALL
from ..known_steps import timed_by
from ..problem import Problem
from ..profile.profile import Profile
from ..schedule import Schedule
from ..util.errors import BadInput, LostRank, prefixed
from .awaits import crossings
from .base.program import Message
from .handlers import passes_where
from .transport.peers import shared_cells
from .transport.wires import Wires, came_true

OWN_TIMES = "schedule"  # emulate the times of the schedule's own problem
LOOK_SECONDS = 5e-5  # between two looks at what another device says


@dataclass(frozen=True)
class Times:
    """What devices and links take, whole µs.

    source: where the times come from. passes: pass → its time, with its message where that blocks its sender: the rank's
    device is busy meanwhile, and the message is there at its end. links: (before, after) → the time of the message between
    them, where that goes to another rank. side_streams: pass that runs off the compute stream → its stream. waits: what such
    a pass waits for, and which passes of its rank wait for it: pass → (pass before, lag). others: the same of passes of
    other ranks that send no message, where ranks help each other, or copies wait for each other's. helping: passes that make
    another rank's attention. parts: passes whose work the one behind them does. joined: sums of gradients that wait for
    passes of other ranks.
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
        """source: "schedule" for the times of its own problem, or a profile's file. Where that says nothing of all-to-alls,
        and for exchanges, the schedule's times stay. Raises BadInput where the profile is of another model, or has
        all-to-alls where the schedule has no passes for them."""
        problem = schedule.problem
        passes, links = _times(problem)
        streams, waits = _side_streams(problem)
        shared = [(problem.names[a], problem.names[b]) for a, b in crossings(schedule)]
        for before, after in schedule.syncs:
            if before in streams or after in streams:
                waits.setdefault(after, []).append((before, 0))
        (others, helping, parts), rank, e = _others(problem), problem.passes.rank, problem.edges
        for before, after in shared:
            others.setdefault(after, []).append((before, 0))
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
        if sum(problem.layers) != len(profile.layers):
            layers = sum(problem.layers)
            raise BadInput(f"{source}: a profile of {len(profile.layers)} layers, but the schedule is for {layers}")
        with prefixed(source):
            again = _profiled(profile, problem)
        other_passes, other_links = _times(again)
        more = next((name for name in other_passes if name not in passes), None)
        if more is not None:
            raise BadInput(f"{source}: has a time for pass {more}, which the schedule lacks: solve it with this profile")
        priced = any(layer.all_to_all for layer in profile.layers)  # then a stage without one has none
        around = problem.passes.that(feature=ALL_TO_ALL)
        for name in streams:
            other_passes.setdefault(name, 0 if priced and around[problem.index[name]] else passes[name])
        for a, b in links:
            if a in streams and a in waits:
                other_links.setdefault((a, b), other_links.get((waits[a][0][0], b), links[a, b]))
        missing = next((name for name in passes if name not in other_passes), None)
        if missing is not None:
            raise BadInput(f"{source}: gives no time for pass {missing}")
        return cls(f"{profile.source}: {profile.model}", other_passes, other_links, streams, waits, others, joined=joined)


def _profiled(profile: Profile, problem: Problem) -> Problem:
    """The same step by a profile's times."""
    stays = problem
    if profile.host is None:  # it says nothing of copies
        copies = passes_where(problem, "does", "offload") | passes_where(problem, "does", "reload")
        stays = problem.only(np.flatnonzero(~copies))
    return timed_by(stays, replace(profile, capacity=None))  # whether it fits has been settled by the one who solved it


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
    """`others`, `helping` and `parts` of `Times`. Of a collective its rank's own pass says when it has ended."""
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
    the pass ended on its device in this step, monotonic ns; step: which one that is. The others are counts since
    `EmulatedDevice.forget`: runs of the pass; longer: its real work took longer than its time; late: that was done after its
    time was over, worst: by how many ns at most; waited: it was so late that its device waited."""

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
    """One rank's device. clock: when its last pass ended there, monotonic ns. length: ns of each pass. rows: pass → its
    column of the board. seconds: how long to wait for another device."""

    def __init__(self, times: Times, rows: Mapping[str, int], board: Board, seconds: float = 300.0) -> None:
        self.board, self.times = board, times
        self.clock, self.seconds, self._step = 0, seconds, 0
        self._side_clocks: dict[str, int] = {}  # stream → when its last pass ended
        self._row = rows
        self.length = {name: us * 1000 for name, us in times.passes.items()}
        self._link = {pair: us * 1000 for pair, us in times.links.items()}
        self._first, self._began = True, 0
        self._parts_length = 0  # of the parts right before a pass

    def begin(self) -> None:
        """A step begins: its first pass starts when it really does, or when its message is there."""
        self._first, self._began = True, time.monotonic_ns()
        self._step += 1

    def drain(self) -> None:
        """Wait until passes of side streams have ended."""
        sleep_until(max(self._side_clocks.values(), default=0))

    def here(self, message: Message) -> bool:
        """Would the link of `message`, which is really here, have brought it?"""
        sent = int(self.board.end[self._row[message.before]])
        return time.monotonic_ns() >= sent + self._link[message.before, message.after]

    def arrived(self, message: Message, arrival: int) -> int:
        """`message` is really here since `arrival`, ns. Wait until its link would have brought it. Returns the later of
        both."""
        due = int(self.board.end[self._row[message.before]]) + self._link[message.before, message.after]
        self.clock, self._first = max(self.clock, due), False
        return arrival if arrival >= due else sleep_until(due)

    def ready(self, name: str, arrival: int) -> int:
        """Pass `name` could begin at `arrival`, ns. Wait until passes of side streams have ended that it waits for. Returns
        the later of both."""
        if name in self.times.side_streams:
            return arrival
        helping, others = self.times.helping, self.times.others.get(name, ())
        # Behind which passes of other devices it really begins: helpers and what they help run together.
        parts = [] if name in helping else [other for other in others if other[0] not in helping]
        due = max(self._awaited(name), *map(self._ended, parts), 0)
        if due == 0:
            return arrival
        self.clock, self._first = max(self.clock, due), False
        return arrival if time.monotonic_ns() >= due else sleep_until(due)

    def run_on_side_stream(self, name: str) -> tuple[int, int]:
        """Run pass `name` of a side stream on its device, behind all that it waits for. When it starts and ends there,
        ns."""
        stream, row = self.times.side_streams[name], self._row[name]
        others = map(self._ended, self.times.others.get(name, ()))
        start = max(self._side_clocks.get(stream, 0), self._awaited(name), self._began, *others)
        self._side_clocks[stream] = self.board.end[row] = end = start + self.length[name]
        self.board.step[row] = self._step
        self.board.runs[row] += 1
        return start, end

    def span_of(self, name: str) -> tuple[int, int]:
        """When pass `name` of a side stream, which ran in this step, started and ended there, ns."""
        end = int(self.board.end[self._row[name]])
        return end - self.length[name], end

    def finish(self, name: str, start: int) -> tuple[int, int]:
        """The real work of pass `name`, begun at `start`, ns, is done. Wait until its device is done too, unless the pass is
        of a side stream. When the pass started and ended, ns. Raises LostRank where another device is not heard of."""
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
        if name in self.times.others or whole > length:  # its work may have begun before it would there
            start = max(start, due - length)
        board.longer[row] += now - start > whole and not helping
        board.late[row] += now > due and not helping
        board.worst[row] = max(int(board.worst[row]), 0 if helping else now - due)
        board.waited[row] += self.clock > due
        return start, sleep_until(self.clock)

    def forget(self, names: Iterable[str]) -> None:
        """Count anew for these passes."""
        rows = [self._row[name] for name in names]
        board = self.board
        for counts in (board.runs, board.longer, board.late, board.worst, board.waited):
            counts[rows] = 0

    def _ended(self, before: tuple[str, int]) -> int:
        """When a pass of another device that sends no message is over in this step, and its lag, ns."""
        row = self._row[before[0]]
        if not came_true(lambda: bool(self.board.step[row] >= self._step), self.seconds, LOOK_SECONDS):
            raise LostRank(f"waiting for pass {before[0]} of another device: nothing for {self.seconds:g} s")
        return int(self.board.end[row]) + before[1] * 1000

    def _awaited(self, name: str) -> int:
        """When all has ended on its device that pass `name` waits for across streams, ns; 0 where it waits for nothing."""
        return max((int(self.board.end[self._row[a]]) + lag * 1000 for a, lag in self.times.waits.get(name, ())), default=0)


def sleep_until(due: int) -> int:
    """Sleep until `due`, monotonic ns. Returns the time then."""
    while (left := due - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)
    return time.monotonic_ns()
