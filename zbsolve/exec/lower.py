"""Lowering: a schedule → each rank's program of passes, sends and receives.

Messages go along the graph's edges between ranks. Both ends of a (source, destination) pair have them in one order, that
of the sender's passes, by construction: point-to-point messages carry no tags on NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import BadInput
from ..problem import KINDS, Problem
from ..schedule import Schedule
from ..verifier import verify

RUNS = ("F", "B", "W", "BW")


@dataclass(frozen=True, slots=True)
class Message:
    """What pass `before` on rank `source` makes and pass `after` on rank `destination` takes: an activation after stage
    `boundary`, or the gradient of one (of the same shape)."""

    before: str
    after: str
    source: int
    destination: int
    boundary: int


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of a rank's program. `waits`: passes of the same rank that end before. `takes`: the message with its
    input, or the name of the pass on this rank that hands it over, or None where it needs none. `sends`, `hands`: where
    its output goes: other ranks, and a pass of this rank (None: nowhere)."""

    name: str
    kind: str
    stage: int
    microbatch: int
    split: bool
    waits: tuple[str, ...]
    takes: Message | str | None
    sends: tuple[Message, ...]
    hands: str | None


@dataclass(frozen=True)
class Program:
    """What one rank does in a step, in order; `incoming`: source rank → its messages in order; `stages`: held here."""

    rank: int
    actions: tuple[Action, ...]
    incoming: dict[int, tuple[Message, ...]]
    stages: tuple[int, ...]


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """One program a rank. Raises BadInput for a schedule that does not hold or that the executor cannot run."""
    problem = schedule.problem
    violations = verify(problem, schedule)
    if violations:
        raise BadInput(f"schedule: {violations[0]}")
    homes = stage_ranks(problem)
    data, waits = _edges(problem)
    _complete(problem, data, len(homes))
    split = {name for name in problem.names if _backward(problem, name) == "B"}
    return tuple(_program(schedule, rank, homes, data, waits, split) for rank in range(problem.ranks))


def stage_ranks(problem: Problem) -> tuple[int, ...]:
    """The rank of every stage. Raises BadInput for passes that the executor does not know yet."""
    homes: dict[int, int] = {}
    for one in problem.passes:
        if one.kind not in RUNS:
            raise BadInput(f"pass {one.name}: run does not know passes of kind {one.kind} yet (only {' '.join(RUNS)})")
        if one.slice:
            raise BadInput(f"pass {one.name}: run does not know slices yet")
        if homes.setdefault(one.stage, one.rank) != one.rank:
            raise BadInput(f"pass {one.name}: stage {one.stage} is on rank {homes[one.stage]} and on rank {one.rank}")
    if sorted(homes) != list(range(len(homes))):
        raise BadInput(f"problem: stages {sorted(homes)} are not 0 to {len(homes) - 1}")
    return tuple(homes[s] for s in range(len(homes)))


def _backward(problem: Problem, name: str) -> str:
    """Which backward the microbatch of pass `name` has on its stage: "B" or "BW"."""
    one = problem.passes[problem.index[name]]
    fused = f"{one.stage}BW{one.microbatch}" in problem.index
    if fused == (f"{one.stage}B{one.microbatch}" in problem.index):
        both = "both B and BW" if fused else "neither B nor BW"
        raise BadInput(f"pass {name}: its microbatch has {both} on stage {one.stage}")
    if fused == (f"{one.stage}W{one.microbatch}" in problem.index):
        raise BadInput(f"pass {name}: on stage {one.stage} its microbatch needs B and W, or BW")
    return "BW" if fused else "B"


def _edges(problem: Problem) -> tuple[dict[str, str], dict[str, list[str]]]:
    """`data`: consumer → producer of its activation or gradient; `waits`: pass → passes of its rank that it waits for.

    An edge carries an activation from F of a stage to F of the next, a gradient from a B or BW to that of the stage
    before. Any other edge must stay inside a rank.
    """
    names, p = problem.names, problem.passes
    data: dict[str, str] = {}
    waits: dict[str, list[str]] = {name: [] for name in names}
    kinds = [KINDS[k] for k in p.kind.tolist()]
    rank, stage, microbatch = p.rank.tolist(), p.stage.tolist(), p.microbatch.tolist()
    for a, b in dict.fromkeys(zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True)):
        forward = kinds[a] == kinds[b] == "F" and stage[b] == stage[a] + 1
        backward = kinds[a][0] == kinds[b][0] == "B" and stage[b] == stage[a] - 1
        if (forward or backward) and microbatch[a] == microbatch[b]:
            data[names[b]] = names[a]
        elif rank[a] != rank[b]:
            raise BadInput(f"edge {names[a]} → {names[b]}: it links two ranks, but carries no activation or gradient")
        if rank[a] == rank[b]:
            waits[names[b]].append(names[a])
    return data, waits


def _complete(problem: Problem, data: dict[str, str], stages: int) -> None:
    """Every F but stage 0's, every B but the last stage's, has its producer; every pass has its F."""
    for one in problem.passes:
        if f"{one.stage}F{one.microbatch}" not in problem.index:
            raise BadInput(f"pass {one.name}: there is no {one.stage}F{one.microbatch}")
        needs = (one.kind == "F" and one.stage > 0) or (one.kind[0] == "B" and one.stage < stages - 1)
        if needs and one.name not in data:
            raise BadInput(f"pass {one.name}: no edge brings its {'input' if one.kind == 'F' else 'gradient'}")


def _program(
    schedule: Schedule,
    rank: int,
    homes: tuple[int, ...],
    data: dict[str, str],
    waits: dict[str, list[str]],
    split: set[str],
) -> Program:
    problem = schedule.problem
    at = problem.passes.rank
    goes: dict[str, list[str]] = {}
    for after, before in data.items():
        goes.setdefault(before, []).append(after)

    def message(before: str, after: str) -> Message:
        a, b = problem.index[before], problem.index[after]
        boundary = min(int(problem.passes.stage[a]), int(problem.passes.stage[b]))
        return Message(before, after, int(at[a]), int(at[b]), boundary)

    def action(name: str) -> Action:
        one = problem.passes[problem.index[name]]
        out = [message(name, after) for after in goes.get(name, ())]
        takes = message(data[name], name) if name in data else None
        local = takes is not None and takes.source == rank
        return Action(
            name,
            one.kind,
            one.stage,
            one.microbatch,
            name in split,
            tuple(waits[name]),
            takes.before if takes is not None and local else takes,
            tuple(m for m in out if m.destination != rank),
            next((m.after for m in out if m.destination == rank), None),
        )

    incoming = {
        source: tuple(sent)
        for source in range(problem.ranks)
        if source != rank
        and (
            sent := [message(n, a) for n in walk(schedule, source) for a in goes.get(n, ()) if at[problem.index[a]] == rank]
        )
    }
    stages = tuple(s for s, home in enumerate(homes) if home == rank)
    return Program(rank, tuple(action(name) for name in walk(schedule, rank)), incoming, stages)


def walk(schedule: Schedule, rank: int) -> Iterator[str]:
    """The passes of one rank in the order of the schedule's predicted timeline (which keeps each stream's order)."""
    problem = schedule.problem
    rows = np.flatnonzero(problem.passes.rank == rank)
    place = {name: i for names in schedule.order.values() for i, name in enumerate(names)}
    start = schedule.timeline().start
    return iter(sorted((problem.names[i] for i in rows), key=lambda n: (int(start[problem.index[n]]), place[n])))
