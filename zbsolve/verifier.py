"""`verify`: whether a schedule is valid. It shares no code with the solvers or `timeline`, so it checks those too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .problem import Problem
from .problem.tables import Ints
from .schedule import Schedule
from .util.columns import looped
from .util.errors import BadInput


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule that a schedule breaks.

    rule: unknown, missing, doubled, misplaced, deadlock, dependency, overlap, memory, certificate or digest.
    passes: names of the passes concerned.
    text: one line for people.
    """

    rule: str
    passes: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


Times = Mapping[str, tuple[float, float]]
PARTS = 1_000_000  # work is counted in millionths of a µs, so that slowed passes do a whole number of them in each µs
ANY_AMOUNT = 2**62  # bytes: more than all passes of a problem take
Numbers = NDArray[Any]  # µs: whole if computed here, else as in the given timeline


class _Arcs(NamedTuple):
    """Pass `after` may start `lag` µs after pass `before` ends; shape (arcs,) each."""

    before: Ints
    after: Ints
    lag: Ints


def verify(problem: Problem, schedule: Schedule, timeline: Times | None = None) -> tuple[Violation, ...]:
    """All violations of a schedule; () if it is valid.

    problem: the step.
    schedule: its order, syncs and certificate.
    timeline: start and end of each pass, µs, from a solver or a measurement; its dependencies and overlaps are checked
        then. None: every pass runs as early as the order allows.

    Checks that every stream runs exactly its passes; that order, edges and syncs form no cycle, even if all parts of a
    collective must begin together; that no rank and no pool ever holds more than its capacity; and that the certificate
    states the value that is found here.
    """
    if schedule.problem is not problem and schedule.problem.digest != problem.digest:
        text = f"the schedule was made for problem {schedule.problem.digest}, not for {problem.digest}"
        return (Violation("digest", (), text),)
    rows = _complete_rows(problem, schedule)
    violations = [*(_placement(problem, schedule) if rows is None else ()), *_unknown_syncs(problem, schedule)]
    if rows is None or violations:
        return tuple(violations)
    arcs = _arcs(problem, schedule, rows)
    start, turn, cycle = _earliest(problem, arcs)
    if timeline is None:
        if cycle:
            chain = " → ".join((*cycle, cycle[0]))
            return (Violation("deadlock", cycle, f"these passes wait for each other: {chain}"),)
        end = start + problem.passes.duration
        if problem.slowdowns:
            start, end, turn = _beside(problem, arcs)
        return (*_apart(problem, arcs), *_memory(problem, start, end, turn), *_certificate(problem, schedule, start, end))
    start = np.array([timeline[name][0] for name in problem.names])
    end = np.array([timeline[name][1] for name in problem.names])
    return (*_dependencies(problem, arcs, start, end), *_overlaps(problem, start, end), *_memory(problem, start, end, turn))


def _complete_rows(problem: Problem, schedule: Schedule) -> dict[str, Ints] | None:
    """Stream → rows of its passes in order, where every stream lists each of its passes once and no other; else None."""
    try:
        rows = schedule.sequences
    except BadInput:
        return None
    streams = {stream for stream, listed in rows.items() if len(listed)}
    if streams != set(problem.members):
        return None
    good = all(np.array_equal(np.sort(rows[stream]), own) for stream, own in problem.members.items())
    return {stream: rows[stream] for stream in streams} if good else None


def _placement(problem: Problem, schedule: Schedule) -> Iterator[Violation]:
    """Streams that do not list each of their passes exactly once."""
    names, passes = problem.names, problem.passes
    expected = {stream: [names[i] for i in rows.tolist()] for stream, rows in problem.members.items()}
    for stream in sorted(set(schedule.order) - set(expected)):
        if schedule.order[stream]:
            first = schedule.order[stream][0]
            yield Violation("unknown", (first,), f"stream {stream} is not in the problem, but lists {first}")
    for stream, wanted in expected.items():
        listed = schedule.order.get(stream, ())
        if len(listed) == len(wanted) and set(listed) == set(wanted):
            continue
        number = Counter(listed)
        for name, times in number.items():
            if name not in problem.index:
                yield Violation("unknown", (name,), f"{stream} lists {name}, which is not in the problem")
            elif stream not in passes.stream_sets[passes.streams[problem.index[name]]]:
                home = ", ".join(passes.stream_sets[passes.streams[problem.index[name]]])
                yield Violation("misplaced", (name,), f"{stream} lists {name}, which belongs to {home}")
            elif times > 1:
                yield Violation("doubled", (name,), f"{stream} lists {name} {times} times")
        for name in (name for name in wanted if name not in number):
            yield Violation("missing", (name,), f"{stream} does not list {name}")


def _unknown_syncs(problem: Problem, schedule: Schedule) -> Iterator[Violation]:
    """Syncs that name a pass which the problem does not have."""
    for before, after in schedule.syncs:
        for name in (before, after):
            if name not in problem.index:
                yield Violation("unknown", (name,), f"sync {before} → {after}: {name} is not in the problem")


def _arcs(problem: Problem, schedule: Schedule, rows: dict[str, Ints]) -> _Arcs:
    """All arcs: edges, neighbours in each stream's order, and syncs."""
    edges, index = problem.edges, problem.index if schedule.syncs else {}
    syncs = np.array([[index[a], index[b]] for a, b in schedule.syncs], np.int64).reshape(-1, 2)
    listed = [rows[stream] for stream in schedule.order if stream in rows]
    before = np.concatenate([edges.before, *(array[:-1] for array in listed), syncs[:, 0]])
    after = np.concatenate([edges.after, *(array[1:] for array in listed), syncs[:, 1]])
    return _Arcs(before, after, np.concatenate([edges.lag, np.zeros(len(before) - len(edges), np.int64)]))


def _earliest(problem: Problem, arcs: _Arcs) -> tuple[Numbers, Ints, tuple[str, ...]]:
    """Earliest starts, each pass's place in a topological order, and (); or a cycle of names in place of ()."""
    count = len(problem.passes)
    by_source = np.argsort(arcs.before, kind="stable")
    before, after, lag = (column[by_source] for column in arcs)
    first, nothing = np.searchsorted(before, np.arange(count + 1)), np.zeros(count, np.int64)
    waiting = np.bincount(after, minlength=count)
    settled = looped(_settle, first, after, lag, problem.passes.duration, waiting, nothing, nothing.copy())
    reached, start, ready, waiting = settled[0], *(np.asarray(column, np.int64) for column in settled[1:])
    if reached == count:
        turn = np.empty(count, np.int64)
        turn[ready] = np.arange(count)
        return start, turn, ()
    stuck = (waiting[before] > 0) & (waiting[after] > 0)
    waits_for = dict(zip(after[stuck].tolist(), before[stuck].tolist(), strict=True))
    at, trail = next(iter(waits_for)), dict[int, None]()
    while at not in trail:
        trail[at] = None
        at = waits_for[at]
    cycle = list(trail)[list(trail).index(at) :]
    return start, nothing, tuple(problem.names[i] for i in reversed(cycle))


def _apart(problem: Problem, arcs: _Arcs) -> Iterator[Violation]:
    """A cycle if all parts of each collective begin together: ranks run collectives in different orders, or collectives
    wait for each other."""
    rows, place = np.flatnonzero(problem.collective >= 0), np.arange(len(problem.passes))
    if not len(rows):
        return
    _, first, number = np.unique(problem.collective[rows], return_index=True, return_inverse=True)
    place[rows] = rows[first][number]  # the first part of a collective stands for all
    before, after = place[arcs.before], place[arcs.after]
    other = np.flatnonzero(before != after)
    cycle = _earliest(problem, _Arcs(before[other], after[other], arcs.lag[other]))[2]
    if cycle:
        chain = " → ".join((*cycle, cycle[0]))
        yield Violation("deadlock", cycle, f"ranks wait for each other in collectives: {chain}")


def _settle(first, after, lag, duration, waiting, start, ready):  # type: ignore[no-untyped-def]
    """Settle passes one by one, each when all its inputs are settled. The arcs from pass i are first[i] … first[i + 1] − 1.

    waiting: how many inputs of each pass are not settled. start: its earliest start, µs. ready: passes in the order in which
    they were settled. Fills in these three; returns how many passes were settled, and the three.
    """
    known, at = 0, 0
    for i in range(len(waiting)):
        if waiting[i] == 0:
            ready[known] = i
            known += 1
    while at < known:
        i = ready[at]
        at += 1
        end = start[i] + duration[i]
        for arc in range(first[i], first[i + 1]):
            b = after[arc]
            start[b] = max(start[b], end + lag[arc])
            waiting[b] -= 1
            if waiting[b] == 0:
                ready[known] = b
                known += 1
    return known, start, ready, waiting


def _beside(problem: Problem, arcs: _Arcs) -> tuple[Numbers, Numbers, Ints]:
    """Starts, ends and turns where passes slow each other: between two events each running pass has a constant pace."""
    p, slower, now = problem.passes, {(slowdown.kind, slowdown.beside): slowdown.factor for slowdown in problem.slowdowns}, 0
    waits, soonest = np.bincount(arcs.after, minlength=len(p)), np.zeros(len(p), np.int64)
    start, end, turn = np.full(len(p), -1), np.full(len(p), -1), np.zeros(len(p), np.int64)
    left, by_source = dict[int, int](), np.argsort(arcs.before, kind="stable")
    first = np.searchsorted(arcs.before[by_source], np.arange(len(p) + 1))
    open_passes = set(np.flatnonzero(waits == 0).tolist())
    while open_passes or left:
        due = [i for i, work in left.items() if work <= 0] or sorted(i for i in open_passes if soonest[i] <= now)[:1]
        for i in due:
            if i in open_passes:
                open_passes.remove(i)
                start[i], turn[i], left[i] = now, (start >= 0).sum(), int(p.duration[i]) * PARTS
                continue
            del left[i]
            end[i] = now
            for arc in by_source[first[i] : first[i + 1]].tolist():
                j = int(arcs.after[arc])
                soonest[j], waits[j] = max(soonest[j], now + arcs.lag[arc]), waits[j] - 1
                open_passes |= {j} if waits[j] == 0 else set()
        if due:
            continue
        factor = {
            i: max(
                [1.0]
                + [slower.get((p.kind_names[i], p.kind_names[j]), 1.0) for j in left if j != i and p.rank[j] == p.rank[i]]
            )
            for i in left
        }
        pace = {i: round(PARTS / factor[i]) for i in left}
        step = min([-(-work // pace[i]) for i, work in left.items()] + [int(soonest[i]) - now for i in open_passes])
        left, now = {i: work - step * pace[i] for i, work in left.items()}, now + step
    return start, end, turn


def _memory(problem: Problem, start: Numbers, end: Numbers, turn: Ints) -> Iterator[Violation]:
    """Ranks' devices, then further pools, that hold more than their capacity."""
    edges, rank = problem.edges, problem.passes.rank
    if problem.capacity is not None:
        rows = np.flatnonzero(edges.pool == 0)
        yield from _by_numbers(problem, rows, turn)
        rooms = {f"rank {r}": room for r, room in enumerate(problem.capacity)}
        yield from _sweep(problem, rows, rank, rooms, (start, end, turn))
    for number, pool in enumerate(problem.pools, 1):
        if pool.capacity is not None:
            rows, here = np.flatnonzero(edges.pool == number), np.zeros(len(rank), np.int64)
            yield from _sweep(problem, rows, here, {pool.name: pool.capacity}, (start, end, turn))


def _by_numbers(problem: Problem, rows: Ints, turn: Ints) -> Iterator[Violation]:
    """Edges that hold bytes for several microbatches begin or end at the first or last of them by number, for example from a
    gather to the last W. Report where the order has another of these first or last: then more is held than edges say. Such
    edges have a pass of no microbatch, or, for weights, are in a step with updates. Others mean just their two passes."""
    lane_of = {row: lane for lane in problem.lanes if (np.diff(turn[lane]) < 0).any() for row in lane.tolist()}
    if not lane_of:
        return
    names, before, after = problem.names, problem.edges.before, problem.edges.after
    own = np.where(problem.in_microbatch, problem.passes.microbatch, -1)
    least, most = np.where(own < 0, problem.microbatches, own), own.copy()
    for by_step, inner in ((before, after), (after, before)):  # a pass of no microbatch has those of its neighbours
        met = (own[by_step] < 0) & (own[inner] >= 0)
        np.minimum.at(least, by_step[met], own[inner[met]])
        np.maximum.at(most, by_step[met], own[inner[met]])
    several = (own[before] != own[after]) & ((np.minimum(own[before], own[after]) < 0) | problem.updating.any())
    apart = rows[((problem.edges.bytes > 0) & several)[rows]]
    for a, b in zip(before[apart].tolist(), after[apart].tolist(), strict=True):
        for inner, outer, late in ((a, b, -1), (b, a, 1)):
            if own[inner] >= 0 and (lane := lane_of.get(inner)) is not None:
                first, last = min(own[inner], least[outer]), max(own[inner], most[outer])
                mates = lane[(own[lane] >= first) & (own[lane] <= last)]
                far = int(mates[(late * turn[mates]).argmax()])
                if far != inner:
                    text = f"{names[far]} runs {'after' if late > 0 else 'before'} {names[inner]}, where memory is counted"
                    yield Violation("memory", (names[far], names[inner]), text)


def _sweep(
    problem: Problem, rows: Ints, home_of: Ints, rooms: Mapping[str, int], times: tuple[Numbers, Numbers, Ints]
) -> Iterator[Violation]:
    """Sweep over the starts and ends of passes in every memory. At equal times, frees of passes that began earlier come
    first, then passes by turn, where one of duration 0 takes and frees. rows: edges with bytes. home_of: pass → its memory,
    an index into `rooms`."""
    start, end, turn = times
    taken, freed = np.zeros(len(start), np.int64), np.zeros(len(start), np.int64)
    before, after, size = (column[rows] for column in (problem.edges.before, problem.edges.after, problem.edges.bytes))
    np.add.at(taken, before, size)
    np.add.at(freed, after, size)
    takes, frees = np.flatnonzero(taken), np.flatnonzero(freed)
    which = np.concatenate([takes, frees])
    time = np.concatenate([start[takes], end[frees]])
    place = np.concatenate([2 * turn[takes] + 1, np.where(end[frees] > start[frees], 0, 2 * turn[frees] + 2)])
    change = np.concatenate([taken[takes], -freed[frees]])
    events = np.lexsort((place, time, home_of[which]))
    which, time, home, change = which[events], time[events], home_of[which[events]], change[events]
    total = np.concatenate([[0], np.cumsum(change)])
    held = total[1:] - total[np.searchsorted(home, home)]  # events are sorted by memory: subtract the total before each one
    room = np.array([min(limit, ANY_AMOUNT) for limit in rooms.values()], np.int64)
    over = np.flatnonzero(held > room[home])
    for where in over[np.unique(home[over], return_index=True)[1]].tolist():
        name, (place, limit) = problem.names[which[where]], [*rooms.items()][home[where]]
        moment = f"when {name} starts at {time[where]:g} µs"
        text = f"{place} holds {held[where]} bytes {moment}; its capacity is {limit}"
        yield Violation("memory", (name,), text)


def _certificate(problem: Problem, schedule: Schedule, start: Numbers, end: Numbers) -> Iterator[Violation]:
    """What is wrong with the certificate: another problem or objective, a wrong value, or a bound above the value."""
    certificate = schedule.certificate
    if certificate is None:
        return
    if certificate.digest != problem.digest:
        yield Violation("certificate", (), f"it was made for problem {certificate.digest}, not for {problem.digest}")
    if certificate.objective != problem.objective:
        yield Violation("certificate", (), f"it is about {certificate.objective}, the problem about {problem.objective}")
    value = int(end.max() - start.min())
    if problem.objective == "span":
        first, last = np.full(problem.ranks, end.max()), np.zeros(problem.ranks, np.int64)
        np.minimum.at(first, problem.passes.rank, start)
        np.maximum.at(last, problem.passes.rank, end)
        value = int((last - first).max())
    if certificate.value != value:
        yield Violation("certificate", (), f"it states {certificate.value} µs, but the order takes {value:g} µs")
    if certificate.bound > value:
        yield Violation("certificate", (), f"its bound {certificate.bound} µs is above the value {value:g} µs")


def _dependencies(problem: Problem, arcs: _Arcs, start: Numbers, end: Numbers) -> Iterator[Violation]:
    names = problem.names
    for arc in np.flatnonzero(start[arcs.after] < end[arcs.before] + arcs.lag).tolist():
        a, b, lag = (int(column[arc]) for column in arcs)
        text = f"{names[b]} starts at {start[b]:g} µs, before {names[a]} ends at {end[a]:g} µs"
        yield Violation("dependency", (names[a], names[b]), f"{text} and its {lag} µs lag" if lag else text)


def _overlaps(problem: Problem, start: Numbers, end: Numbers) -> Iterator[Violation]:
    names = problem.names
    for stream, rows in problem.members.items():
        runs = sorted(zip(start[rows].tolist(), end[rows].tolist(), rows.tolist(), strict=True))
        for (_, stop, i), (begin, _, j) in zip(runs, runs[1:], strict=False):
            if begin < stop:
                text = f"{stream} still runs {names[i]} until {stop:g} µs when {names[j]} starts at {begin:g} µs"
                yield Violation("overlap", (names[i], names[j]), text)
