"""`verify`: does a schedule hold? Written apart from every solver and from `timeline`, on plain lists, to be believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .problem import Problem
from .schedule import Schedule


@dataclass(frozen=True, slots=True)
class Violation:
    """What does not hold: `rule` (unknown, missing, doubled, misplaced, deadlock, dependency, overlap, memory,
    certificate, digest), the passes it names, and one line of text."""

    rule: str
    passes: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


Times = Mapping[str, tuple[float, float]]


def verify(problem: Problem, schedule: Schedule, timeline: Times | None = None) -> tuple[Violation, ...]:
    """Everything that does not hold, or (). Without a `timeline` every pass runs as early as the order allows (µs).

    Checks that every stream runs exactly its passes, that order, edges and syncs have no cycle, that no rank ever
    holds more than its capacity, and that the certificate states the value found here. With a `timeline` (a
    solver's, or a measured one) also dependencies, order and overlaps in it.
    """
    if schedule.problem.digest != problem.digest:
        text = f"the schedule was made for problem {schedule.problem.digest}, not for {problem.digest}"
        return (Violation("digest", (), text),)
    found = list(_placement(problem, schedule))
    if found:
        return tuple(found)
    arcs = _arcs(problem, schedule)
    if timeline is None:
        start, turn, cycle = _earliest(problem, arcs)
        if cycle:
            chain = " → ".join((*cycle, cycle[0]))
            return (Violation("deadlock", cycle, f"these passes wait for each other: {chain}"),)
        end: list[float] = [a + d for a, d in zip(start, problem.passes.duration.tolist(), strict=True)]
        found = list(_memory(problem, start, end, turn)) + list(_certificate(problem, schedule, start, end))
        return tuple(found)
    start = [timeline[name][0] for name in problem.names]
    end = [timeline[name][1] for name in problem.names]
    turn = _earliest(problem, arcs)[1]
    return (*_dependencies(problem, arcs, start, end), *_overlaps(problem, start, end), *_memory(problem, start, end, turn))


def _placement(problem: Problem, schedule: Schedule) -> Iterator[Violation]:
    """Every stream lists each of its passes once and no other."""
    names, passes = problem.names, problem.passes
    expected: dict[str, list[str]] = {}
    for i, streams in enumerate(passes.streams.tolist()):
        for stream in passes.stream_sets[streams]:
            expected.setdefault(stream, []).append(names[i])
    for stream in sorted(set(schedule.order) - set(expected)):
        if schedule.order[stream]:
            first = schedule.order[stream][0]
            yield Violation("unknown", (first,), f"stream {stream} is not in the problem, but lists {first}")
    index = problem.index
    for stream, wanted in expected.items():
        listed = schedule.order.get(stream, ())
        if len(listed) == len(wanted) and set(listed) == set(wanted):
            continue
        for name, times in Counter(listed).items():
            if name not in index:
                yield Violation("unknown", (name,), f"{stream} lists {name}, which is not in the problem")
            elif stream not in passes.stream_sets[passes.streams[index[name]]]:
                home = ", ".join(passes.stream_sets[passes.streams[index[name]]])
                yield Violation("misplaced", (name,), f"{stream} lists {name}, which belongs to {home}")
            elif times > 1:
                yield Violation("doubled", (name,), f"{stream} lists {name} {times} times")
        listed_once = set(listed)
        for name in wanted:
            if name not in listed_once:
                yield Violation("missing", (name,), f"{stream} does not list {name}")
    for before, after in schedule.syncs:
        for name in (before, after):
            if name not in index:
                yield Violation("unknown", (name,), f"sync {before} → {after}: {name} is not in the problem")


def _arcs(problem: Problem, schedule: Schedule) -> list[tuple[int, int, int]]:
    """(before, after, lag): what must end before what starts."""
    edges, index = problem.edges, problem.index
    arcs = list(zip(edges.before.tolist(), edges.after.tolist(), edges.lag.tolist(), strict=True))
    for listed in schedule.order.values():
        rows = [index[name] for name in listed]
        arcs += [(a, b, 0) for a, b in zip(rows, rows[1:], strict=False)]
    return arcs + [(index[a], index[b], 0) for a, b in schedule.syncs]


def _earliest(problem: Problem, arcs: list[tuple[int, int, int]]) -> tuple[list[float], list[int], tuple[str, ...]]:
    """Earliest starts and the passes' turns in an order that respects all arcs; or a cycle of names."""
    count = len(problem.passes)
    following: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    open_inputs = [0] * count
    for a, b, lag in arcs:
        following[a].append((b, lag))
        open_inputs[b] += 1
    duration = problem.passes.duration.tolist()
    start: list[float] = [0] * count
    ready = [i for i in range(count) if not open_inputs[i]]
    for i in ready:  # grows while it is walked
        end = start[i] + duration[i]
        for b, lag in following[i]:
            start[b] = max(start[b], end + lag)
            open_inputs[b] -= 1
            if not open_inputs[b]:
                ready.append(b)
    if len(ready) == count:
        turn = [0] * count
        for place, i in enumerate(ready):
            turn[i] = place
        return start, turn, ()
    waits_for = {b: a for a in range(count) if open_inputs[a] for b, _ in following[a] if open_inputs[b]}
    at = next(iter(waits_for))
    trail: list[int] = []
    while at not in trail:
        trail.append(at)
        at = waits_for[at]
    return start, [], tuple(problem.names[i] for i in reversed(trail[trail.index(at) :]))


def _memory(problem: Problem, start: list[float], end: list[float], turn: list[int]) -> Iterator[Violation]:
    """A sweep over starts and ends of every rank: at one time, frees of passes that began earlier come first, then each
    pass in its turn (one without length starts and ends there)."""
    if problem.capacity is None:
        return
    taken, freed = [0] * len(start), [0] * len(start)
    edges = problem.edges
    for a, b, size in zip(edges.before.tolist(), edges.after.tolist(), edges.bytes.tolist(), strict=True):
        taken[a] += size
        freed[b] += size
    events: list[list[tuple[float, int, int, int]]] = [[] for _ in range(problem.ranks)]
    for i, rank in enumerate(problem.passes.rank.tolist()):
        if taken[i]:
            events[rank].append((start[i], 2 * turn[i] + 1, i, taken[i]))
        if freed[i]:
            events[rank].append((end[i], 0 if end[i] > start[i] else 2 * turn[i] + 2, i, -freed[i]))
    for rank, mine in enumerate(events):
        held = 0
        for time, _, i, change in sorted(mine):
            held += change
            if held > problem.capacity[rank]:
                name = problem.names[i]
                limit = problem.capacity[rank]
                text = f"rank {rank} holds {held} bytes when {name} starts at {time:g} µs; its capacity is {limit}"
                yield Violation("memory", (name,), text)
                break


def _certificate(problem: Problem, schedule: Schedule, start: list[float], end: list[float]) -> Iterator[Violation]:
    """The certificate is this problem's, states the value that the order has, and no bound above it."""
    certificate = schedule.certificate
    if certificate is None:
        return
    if certificate.digest != problem.digest:
        yield Violation("certificate", (), f"it was made for problem {certificate.digest}, not for {problem.digest}")
    if certificate.objective != problem.objective:
        yield Violation("certificate", (), f"it is about {certificate.objective}, the problem about {problem.objective}")
    value = max(end) - min(start)
    if problem.objective == "span":
        first, last = [max(end)] * problem.ranks, [0.0] * problem.ranks
        for rank, s, e in zip(problem.passes.rank.tolist(), start, end, strict=True):
            first[rank], last[rank] = min(first[rank], s), max(last[rank], e)
        value = max(e - s for s, e in zip(first, last, strict=True))
    if certificate.value != value:
        yield Violation("certificate", (), f"it states {certificate.value} µs, but the order takes {value:g} µs")
    if certificate.bound > value:
        yield Violation("certificate", (), f"its bound {certificate.bound} µs is above the value {value:g} µs")


def _dependencies(
    problem: Problem, arcs: list[tuple[int, int, int]], start: list[float], end: list[float]
) -> Iterator[Violation]:
    names = problem.names
    for a, b, lag in arcs:
        if start[b] < end[a] + lag:
            text = f"{names[b]} starts at {start[b]:g} µs, before {names[a]} ends at {end[a]:g} µs" + (
                f" and its {lag} µs lag" if lag else ""
            )
            yield Violation("dependency", (names[a], names[b]), text)


def _overlaps(problem: Problem, start: list[float], end: list[float]) -> Iterator[Violation]:
    names, passes = problem.names, problem.passes
    on: dict[str, list[tuple[float, float, int]]] = {}
    for i, streams in enumerate(passes.streams.tolist()):
        for stream in passes.stream_sets[streams]:
            on.setdefault(stream, []).append((start[i], end[i], i))
    for stream, mine in on.items():
        mine.sort()
        for (_, stop, i), (begin, _, j) in zip(mine, mine[1:], strict=False):
            if begin < stop:
                text = f"{stream} still runs {names[i]} until {stop:g} µs when {names[j]} starts at {begin:g} µs"
                yield Violation("overlap", (names[i], names[j]), text)
