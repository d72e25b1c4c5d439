"""A schedule in a form that other engines take: a row of passes for each rank, with the engine's numbers of microbatches. An
error names passes that the engine cannot express. Nothing here imports torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..build.links import without_links
from ..build.sides import rows_begun
from ..build.untrained import untrained_stages, with_backward
from ..kinds import SHARDING, TABLE
from ..planner.engines import ANY, Target
from ..problem import Ints, Problem, pass_name
from ..problem.placement import describe
from ..schedule import Schedule
from ..schedule.timeline import Precedence, longest_path
from ..util.errors import BadInput
from ..util.text import plural
from ..verifier import verify

Spans = tuple[tuple[tuple[int, int], ...], ...]


class Refused(BadInput):
    """The schedule is valid, but the engine cannot express it."""


class Cell(NamedTuple):
    """One pass in a row."""

    stage: int
    kind: str
    microbatch: int

    @property
    def name(self) -> str:
        """Its name, such as `3B12`."""
        return pass_name(self.kind, self.stage, self.microbatch)


@dataclass(frozen=True)
class Order:
    """A schedule for one engine. rows: of each rank. placement: stage → rank. microbatches: the engine's number → ours."""

    schedule: Schedule
    rows: tuple[tuple[Cell, ...], ...]
    placement: tuple[int, ...]
    microbatches: tuple[int, ...]

    @property
    def relabelled(self) -> bool:
        """Does any microbatch have another number in the engine?"""
        return self.microbatches != tuple(range(len(self.microbatches)))

    @property
    def chunks(self) -> tuple[int, ...]:
        """Stage → its place among the stages of its rank, 0 first."""
        return tuple(self.placement[:stage].count(rank) for stage, rank in enumerate(self.placement))

    @property
    def split(self) -> bool:
        """Whether any stage runs B and W apart."""
        return "B" in self.schedule.problem.passes.kinds

    @cached_property
    def spans(self) -> Spans:
        """(start, end) of every pass, µs, as `rows`."""
        return spans_of(self.schedule)

    def facts(self) -> dict[str, object]:
        """The order's facts for `export --json`."""
        return {
            "ranks": len(self.rows),
            "placement": list(self.placement),
            "placement_name": describe(self.placement),
            "microbatches": list(self.microbatches),
            "relabelled": self.relabelled,
        }

    def ours(self, cell: Cell) -> Cell:
        """The pass with the schedule's own number of its microbatch."""
        return cell._replace(microbatch=self.microbatches[cell.microbatch])

    def notes(self, reason: str, whose: str) -> list[str]:
        """A line about microbatches with other numbers in the engine, if there are any. reason: why. whose: "torch's"."""
        if not self.relabelled:
            return []
        numbers = ", ".join(map(str, self.microbatches))
        return [f"microbatches are relabelled, since {reason}: {whose} 0, 1, … are the schedule's {numbers}"]


def spans_of(schedule: Schedule) -> Spans:
    """Each rank's passes in order, (start, end) in µs."""
    timeline = schedule.timeline()
    rows = [schedule.sequences[f"compute:{rank}"] for rank in range(schedule.problem.ranks)]
    return tuple(tuple(zip(timeline.start[row].tolist(), timeline.end[row].tolist(), strict=True)) for row in rows)


def order_for(schedule: Schedule, target: Target) -> Order:
    """The order of `schedule` for `target`, without passes of a data-parallel group. Raises BadInput if it is not valid;
    Refused, naming the pass or edge, for what the target cannot express; Deadlock if its ranks would wait forever."""
    violations = verify(schedule.problem, schedule)
    if violations:
        raise BadInput(f"schedule: {violations[0]}")
    schedule = with_front(without_group_passes(schedule))
    placement = _placement(schedule.problem, target)
    _check_edges(schedule, target)
    rows = _rows(schedule)
    order = _complete(rows, placement, target)
    check_progress(schedule, rows, len(placement) - 1)
    number = {ours: i for i, ours in enumerate(order)}
    _check_rows(rows, number, target)
    if any(ours != place for ours, place in number.items()):
        rows = [[cell._replace(microbatch=number[cell.microbatch]) for cell in row] for row in rows]
    return Order(schedule, tuple(map(tuple, rows)), placement, order)


def group_passes(problem: Problem) -> Ints:
    """Rows of a data-parallel group's passes: gathers, reductions, and passes C of stages on one rank, over replicas."""
    homes = np.array([len(ranks) for ranks in problem.stage_ranks])
    sums = problem.passes.are("C") & (homes[problem.passes.stage] == 1)
    return np.flatnonzero(sums | problem.passes.that(feature=SHARDING))


def without_group_passes(schedule: Schedule) -> Schedule:
    """The schedule without passes of a data-parallel group, and with messages as lags in place of passes: engines send
    messages by themselves. The same schedule if nothing changes."""
    problem = without_links(schedule.problem)
    alone = group_passes(problem)
    if not len(alone) and problem is schedule.problem:
        return schedule
    plain = problem.only(np.setdiff1d(np.arange(len(problem.passes)), alone))
    streams = plain.passes.stream_sets[: int(plain.passes.streams.max()) + 1]  # as before the builder put sums in
    return schedule.within(replace(plain, passes=replace(plain.passes, stream_sets=streams)))


def _placement(problem: Problem, target: Target) -> tuple[int, ...]:
    """Stage → rank. Raises Refused for kinds of passes, and for placements, that the engine does not have."""
    engine, known = target.engine, {kind: None for kinds in target.places.values() for kind in kinds}
    for row in _unsupported(problem, known)[:1]:
        odd, name = problem.passes[row], problem.names[row]
        if odd.kind not in known:
            others = [kind for kind in problem.passes.kinds if kind not in known and kind != odd.kind]
            missing = ", ".join((odd.kind, *others))
            lacks = ", ".join(dict.fromkeys(TABLE[kind].feature for kind in (odd.kind, *others) if TABLE[kind].feature))
            so = f", so no {lacks}" if lacks else ""
            raise Refused(f"pass {name}: {engine} has no passes of kind {missing} (only {' '.join(known)}){so}")
        if odd.slice:
            raise Refused(f"pass {name}: {engine} has no slices of a microbatch")
        first = problem.stage_ranks[odd.stage][0]
        if odd.rank != first:
            fault = f"stage {odd.stage} is on rank {first} and on rank {odd.rank}"
            raise Refused(f"pass {name}: {fault}; {engine} has one a stage")
        if odd.streams != (f"compute:{odd.rank}",):
            fault = f"it occupies {', '.join(odd.streams)}"
            raise Refused(f"pass {name}: {fault}; {engine} has one line of passes a rank, compute:{odd.rank}")
    stages = [stage for stage, ranks in enumerate(problem.stage_ranks) if ranks]
    if len(stages) < problem.stages:
        raise Refused(f"problem: stages {stages} are not 0 to {len(stages) - 1}, which {engine} needs")
    idle = sorted(set(range(problem.ranks)) - set(problem.passes.rank.tolist()))
    if idle:
        raise Refused(f"problem: rank {idle[0]} has no stage; {engine} needs a line of passes for every rank")
    placement = tuple(ranks[0] for ranks in problem.stage_ranks)
    _check_place(problem, placement, target)
    return placement


def _unsupported(problem: Problem, known: Iterable[str]) -> list[int]:
    """Rows of passes that are of an unknown kind, sliced, not on their stage's first rank, or not on its compute stream."""
    p = problem.passes
    first = np.array([ranks[0] if ranks else -1 for ranks in problem.stage_ranks])
    alone: dict[tuple[str, ...], int] = {(f"compute:{rank}",): rank for rank in range(problem.ranks)}
    compute = np.array([alone.get(streams, -1) for streams in p.stream_sets])
    plain = p.are(*known) & (p.slice == 0) & (p.rank == first[p.stage]) & (compute[p.streams] == p.rank)
    return np.flatnonzero(~plain).tolist()


def _check_place(problem: Problem, placement: tuple[int, ...], target: Target) -> None:
    """Raise Refused for a placement that the engine does not have, or kinds of passes that it does not have there."""
    place, places = target.place(placement), " or ".join(target.places)
    if place is None:
        raise Refused(f"placement {describe(placement)}: {target.engine} lays stages out as {places} only")
    kinds = target.places[place]
    for kind in problem.passes.kinds:
        if kind not in kinds:
            where = "" if place == ANY else f" on placement {place}"
            name = problem.names[int(problem.rows(kind)[0])]
            raise Refused(f"pass {name}: {target.engine} has no passes of kind {kind}{where} (only {' '.join(kinds)})")
    if not target.mixed and {"B", "BW"} <= set(problem.passes.kinds):
        half, other = (problem.names[int(problem.rows(kind)[0])] for kind in ("B", "BW"))
        raise Refused(f"passes {half} and {other}: {target.engine} splits the backward of all stages or of none")
    if target.groups and problem.microbatches % problem.ranks:
        step = f"problem: {plural(microbatch=problem.microbatches)} on {plural(rank=problem.ranks)}"
        raise Refused(f"{step}; {target.engine} needs a multiple of {problem.ranks}")


def _check_edges(schedule: Schedule, target: Target) -> None:
    """Raise Refused for a wait between ranks without a message of the engine. (On one rank, its row is the order.)"""
    problem, says = schedule.problem, f"{target.engine} links ranks by activations and gradients only"
    if problem.edges.carrying("activation").any() and (begun := rows_begun(problem)):
        raise Refused(f"stage {begun[0]}: it begins a row of its own, and {target.engine} has stages in one row only")
    edges, names, rank = problem.edges, problem.names, problem.passes.rank
    silent = (rank[edges.before] != rank[edges.after]) & ~edges.carrying("activation", "gradient")
    for i in np.flatnonzero(silent).tolist():
        says = f"{target.engine} has no side inputs" if edges.beside[i] else says
        raise Refused(f"edge {names[edges.before[i]]} → {names[edges.after[i]]}: {says}")
    for before, after in schedule.syncs:
        if rank[problem.index[before]] != rank[problem.index[after]]:
            raise Refused(f"sync {before} → {after}: {says}")


def _rows(schedule: Schedule) -> list[list[Cell]]:
    p = schedule.problem.passes
    cells = [Cell(s, k, m) for s, k, m in zip(p.stage.tolist(), p.kind_names, p.microbatch.tolist(), strict=True)]
    return [[cells[i] for i in schedule.sequences[f"compute:{rank}"].tolist()] for rank in range(schedule.problem.ranks)]


def _complete(rows: Sequence[Sequence[Cell]], placement: tuple[int, ...], target: Target) -> tuple[int, ...]:
    """Microbatches in the order of the forwards that number them. Raises Refused where a stage lacks a pass of one."""
    last = len(placement) - 1
    numbering = last if target.numbered_by else 0
    order = tuple(m for stage, kind, m in rows[placement[numbering]] if (stage, kind) == (numbering, "F"))
    kinds_at: dict[tuple[int, int], set[str]] = {(s, m): set() for s in range(last + 1) for m in order}
    for row in rows:
        for stage, kind, m in row:
            kinds_at.setdefault((stage, m), set()).add(kind)
    for (stage, m), kinds in kinds_at.items():
        if kinds not in ({"F", "B", "W"}, {"F", "BW"}):
            has = " ".join(sorted(kinds)) or "nothing"
            raise Refused(f"stage {stage}, microbatch {m}: {target.engine} needs F B W or F BW, but there is {has}")
    return order


def _check_rows(rows: Sequence[Sequence[Cell]], number: dict[int, int], target: Target) -> None:
    """Raise Refused where a stage runs passes in another order than the engine does."""
    before: dict[tuple[int, str], Cell] = {}
    for row in rows:
        for i, cell in enumerate(row):
            lane = (cell.stage, cell.kind[0])  # B and BW of one stage are in one lane
            last = before.get(lane)
            if last is not None and cell.kind in target.in_order and number[last.microbatch] > number[cell.microbatch]:
                wanted = f"{target.engine} runs the microbatches of all stages in one order"
                raise Refused(f"pass {cell.name}: it comes after {last.name}; {wanted}")
            before[lane] = cell
            if target.first_fused and cell.kind == "B" and not cell.stage and row[i + 1] != cell._replace(kind="W"):
                wanted = f"{target.engine} runs each W of stage 0 right after its B"
                raise Refused(f"pass {cell.name}: {row[i + 1].name} comes after it; {wanted}")


def needs(cell: Cell, backward: dict[tuple[int, int], str], last: int) -> list[Cell]:
    """The passes that must run before `cell`. backward: (stage, microbatch) → "B" or "BW". last: the last stage."""
    stage, kind, m = cell
    if kind == "F":
        return [Cell(stage - 1, "F", m)] if stage else []
    if kind == "W":
        return [Cell(stage, "B", m)]
    after = [Cell(stage + 1, backward[stage + 1, m], m)] if stage < last else []
    return [Cell(stage, "F", m), *after]


def backwards(rows: Sequence[Sequence[Cell]]) -> dict[tuple[int, int], str]:
    """(stage, microbatch) → the kind of its backward, "B" or "BW"."""
    return {(s, m): kind for row in rows for s, kind, m in row if kind[0] == "B"}


def check_progress(schedule: Schedule, rows: Sequence[Sequence[Cell]], last: int) -> None:
    """Raise Deadlock, naming passes, where ranks that run these rows would wait for each other. last: the last stage."""
    orders = [schedule.sequences[f"compute:{rank}"] for rank in range(len(rows))]
    place = dict(zip(chain.from_iterable(rows), np.concatenate(orders).tolist(), strict=True))
    backward = backwards(rows)
    waits = [(place[need], row) for cell, row in place.items() for need in reversed(needs(cell, backward, last))]
    arcs = Precedence.of(schedule.problem, orders, np.array(waits, np.int64).reshape(-1, 2))
    longest_path(schedule.problem, arcs)


def with_front(schedule: Schedule) -> Schedule:
    """The schedule with backwards of no time for first stages that train nothing, as soon as their gradient arrives: engines
    run a backward of each stage. The schedule itself if it has all backwards, or none."""
    problem, whole = schedule.problem, with_backward(schedule.problem)
    front = untrained_stages(problem)
    if whole is problem or front == problem.stages:
        return schedule
    times, backward = schedule.timeline(), "BW" if "BW" in problem.passes.kinds else "B"
    spans = {stream: list(zip(*(times[name] for name in names), strict=True)) for stream, names in schedule.order.items()}
    added: dict[str, list[tuple[float, int, int]]] = {}
    for m in range(problem.microbatches):
        ready = times[f"{front}{backward}{m}"][1]
        for stage in reversed(range(front)):
            stream = f"compute:{whole.passes.rank[whole.index[f'{stage}F{m}']]}"
            starts, ends = spans[stream]
            begun = bisect_left(starts, ready)
            ready = max(ready, ends[begun - 1]) if begun else ready
            added.setdefault(stream, []).append((ready, -stage, m))
    order: dict[str, list[str]] = {}
    for stream, names in schedule.order.items():
        row, done, (starts, ends) = order.setdefault(stream, []), 0, spans[stream]
        for ready, stage, m in sorted(added.get(stream, [])):
            until = max(bisect_left(starts, ready), bisect_right(ends, ready))
            row += names[done:until]
            row += [f"{-stage}{kind}{m}" for kind in (("BW",) if backward == "BW" else ("B", "W"))]
            done = until
        row += names[done:]
    return Schedule(whole, {stream: tuple(row) for stream, row in order.items()})
