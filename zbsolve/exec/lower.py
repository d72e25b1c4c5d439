"""Lowering: a schedule → each rank's program of passes, sends and receives, ordered by the schedule's own time.

Messages go along the graph's edges between ranks. Both ends of a (source, destination) pair have them in one order, that
of the sender's passes, by construction: point-to-point messages carry no tags on NCCL. A receive is posted before the
pass that runs when its message is sent, by the predicted timeline, and at least one pass ahead of its use: early enough
to arrive beside other work, late enough that its buffer does not lie idle.

No deadlock, whatever ranks really take: sends never block, receives of a pair are posted in the order of its sends, and
a pass waits only for a message whose sender runs earlier in the one order that the verified schedule is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import BadInput
from ..problem import KINDS, Problem
from ..schedule import Schedule
from ..verifier import verify
from .groups import ALL_TO_ALL, GRADIENTS, Use, group_size, uses

WORK = ("F", "B", "W", "BW", "X")  # passes of a microbatch
RUNS = (*WORK, *ALL_TO_ALL, "C", "U")


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What pass `before` on rank `source` makes and pass `after` on rank `destination` takes: an activation after stage
    `boundary`, or (`gradient`) the gradient of one, of the same shape. Both ends of one lowering hold the same object."""

    before: str
    after: str
    source: int
    destination: int
    boundary: int
    microbatch: int
    gradient: bool

    @property
    def link(self) -> tuple[int, int, int]:
        """Boundary, and the ranks before and behind it: all messages of one link have one shape for one shape of input."""
        ends = (self.destination, self.source) if self.gradient else (self.source, self.destination)
        return self.boundary, *ends


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """One pass of a rank's program. `posts`: receives to post before it. `takes`: the message with its input, or the
    name of the pass on this rank that hands it over, or None where it needs none. `sends`, `hands`: where its output
    goes: other ranks, and a pass of this rank (None: nowhere). `done`: it is the last to add to its stage's gradients.
    `split`: its microbatch has B and W there, not BW; `recompute`: it has X, so that F keeps its input alone. `use`: of
    versions of weights, where there are updates."""

    name: str
    kind: str
    stage: int
    microbatch: int
    split: bool
    recompute: bool
    posts: tuple[Message, ...]
    takes: Message | str | None
    sends: tuple[Message, ...]
    hands: Message | None
    done: bool
    use: Use | None = None


@dataclass(frozen=True)
class Program:
    """What one rank does in a step, in order; `incoming`: source rank → its messages in order; `stages`: held here;
    `inputs`, `targets`: the microbatches whose first or last stage runs here."""

    rank: int
    actions: tuple[Action, ...]
    incoming: dict[int, tuple[Message, ...]]
    stages: tuple[int, ...]
    inputs: tuple[int, ...]
    targets: tuple[int, ...]


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """One program a rank. Raises BadInput for a schedule that does not hold or that the executor cannot run."""
    problem = schedule.problem
    violations = verify(problem, schedule)
    if violations:
        raise BadInput(f"schedule: {violations[0]}")
    homes = stage_ranks(problem)
    routes(problem)
    data = _edges(problem)
    _complete(problem, data, len(homes))
    _recomputed(problem)
    _exchanged(problem, homes)
    _sent_around(problem)
    _updated(problem, homes)
    for name, kind in zip(problem.names, problem.passes.kind.tolist(), strict=True):
        if KINDS[kind] in WORK:
            _one_backward(problem, name)
    walks = [tuple(walk(schedule, rank)) for rank in range(problem.ranks)]
    messages = {after: _message(problem, before, after) for after, before in data.items()}
    goes: dict[str, list[Message]] = {}
    for message in messages.values():
        goes.setdefault(message.before, []).append(message)
    return tuple(_program(schedule, rank, walks, homes, messages, goes) for rank in range(problem.ranks))


def stage_ranks(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The ranks that each stage lives on, ascending. Raises BadInput for passes that the executor does not know yet."""
    homes: dict[int, set[int]] = {}
    for one in problem.passes:
        if one.kind not in RUNS:
            raise BadInput(f"pass {one.name}: run does not know passes of kind {one.kind} yet (only {' '.join(RUNS)})")
        if one.slice:
            raise BadInput(f"pass {one.name}: run does not know slices yet")
        homes.setdefault(one.stage, set()).add(one.rank)
    if sorted(homes) != list(range(len(homes))):
        raise BadInput(f"problem: stages {sorted(homes)} are not 0 to {len(homes) - 1}")
    return tuple(tuple(sorted(homes[s])) for s in range(len(homes)))


def routes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The ranks that microbatches visit, stage by stage: microbatch i follows route i modulo their number. Raises BadInput
    where a microbatch is on two ranks for one stage."""
    homes: dict[tuple[int, int], int] = {}
    for one in problem.passes:
        if one.kind in WORK and homes.setdefault((one.microbatch, one.stage), one.rank) != one.rank:
            first = homes[one.microbatch, one.stage]
            raise BadInput(f"pass {one.name}: its microbatch is on rank {first} and on rank {one.rank} for one stage")
    every: dict[int, list[int]] = {}
    for (microbatch, _), rank in sorted(homes.items()):
        every.setdefault(microbatch, []).append(rank)
    table = [tuple(every[m]) for m in sorted(every)]
    period = next(n for n in range(1, len(table) + 1) if all(one == table[i % n] for i, one in enumerate(table)))
    return tuple(table[:period])


def microbatches(problem: Problem) -> list[int]:
    """The numbers of the microbatches."""
    p = problem.passes
    return sorted(set(p.microbatch[p.kind == KINDS.index("F")].tolist()))


def _updated(problem: Problem, homes: tuple[tuple[int, ...], ...]) -> None:
    """Where there are passes U, every stage is on one rank, and groups are alike."""
    group_size(problem)
    for i in np.flatnonzero(problem.passes.kind == KINDS.index("U")).tolist():
        one = problem.passes[i]
        if len(homes[one.stage]) > 1:
            raise BadInput(f"pass {one.name}: its stage is on ranks {homes[one.stage]}; updates need it on one")


def _exchanged(problem: Problem, homes: tuple[tuple[int, ...], ...]) -> None:
    """The passes C. A stage has none, or one on each of its ranks after all gradients of the stage there."""
    p, e = problem.passes, problem.edges
    before: dict[int, set[int]] = {}
    for a, b in zip(e.before.tolist(), e.after.tolist(), strict=True):
        before.setdefault(b, set()).add(a)
    found: dict[int, list[int]] = {}
    for i in np.flatnonzero(p.kind == KINDS.index("C")).tolist():
        one = p[i]
        found.setdefault(one.stage, []).append(one.rank)
        here = (p.stage == one.stage) & (p.rank == one.rank)
        last = "W" if (p.kind == KINDS.index("W")).any() else "BW"
        for row in np.flatnonzero(here & (p.kind == KINDS.index(last))).tolist():
            if row not in before.get(i, ()):
                raise BadInput(f"pass {one.name}: no edge orders it behind {problem.names[row]}")
    for stage, ranks in found.items():
        if sorted(ranks) != list(homes[stage]):
            raise BadInput(f"stage {stage}: it is on ranks {homes[stage]}, but its passes C are on ranks {sorted(ranks)}")


def _one_backward(problem: Problem, name: str) -> None:
    """Its microbatch has B and W on its stage, or BW."""
    one = problem.passes[problem.index[name]]
    fused = f"{one.stage}BW{one.microbatch}" in problem.index
    if fused == (f"{one.stage}B{one.microbatch}" in problem.index):
        both = "both B and BW" if fused else "neither B nor BW"
        raise BadInput(f"pass {name}: its microbatch has {both} on stage {one.stage}")
    if fused == (f"{one.stage}W{one.microbatch}" in problem.index):
        raise BadInput(f"pass {name}: on stage {one.stage} its microbatch needs B and W, or BW")


def _edges(problem: Problem) -> dict[str, str]:
    """Consumer → producer of its activation or gradient.

    An edge carries an activation from F of a stage to F of the next, a gradient from a B or BW to that of the stage
    before; where there is an all-to-all, the edge to it does, and from it. What a C waits for on other ranks comes with the
    exchange itself. Any other edge must stay inside a rank: its order there keeps it.
    """
    names, p = problem.names, problem.passes
    data: dict[str, str] = {}
    kinds, last = [KINDS[k] for k in p.kind.tolist()], int(p.stage.max())
    rank, stage, microbatch = p.rank.tolist(), p.stage.tolist(), p.microbatch.tolist()
    for a, b in dict.fromkeys(zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True)):
        forward = kinds[a] in ("F", "AF") and kinds[b] == "F" and stage[b] == stage[a] + 1
        backward = kinds[a] in ("B", "BW", "AB") and kinds[b] in ("B", "BW") and stage[b] == stage[a] - 1
        around = kinds[a] in ALL_TO_ALL.get(kinds[b], ()) and stage[a] == stage[b]
        if (forward or backward or around) and microbatch[a] == microbatch[b]:
            if around and stage[a] == (last if kinds[b] == "AF" else 0):
                continue  # the loss, or the gradient of the model's input: nobody takes it
            data[names[b]] = names[a]
        elif rank[a] != rank[b] and not (kinds[b] == "C" and kinds[a] in GRADIENTS and stage[a] == stage[b]):
            raise BadInput(f"edge {names[a]} → {names[b]}: it links two ranks, but carries no activation or gradient")
    return data


def _complete(problem: Problem, data: dict[str, str], stages: int) -> None:
    """Every F but stage 0's, every B but the last stage's, has its producer; every pass has its F."""
    for one in problem.passes:
        if one.kind not in WORK:
            continue
        if f"{one.stage}F{one.microbatch}" not in problem.index:
            raise BadInput(f"pass {one.name}: there is no {one.stage}F{one.microbatch}")
        needs = (one.kind == "F" and one.stage > 0) or (one.kind[0] == "B" and one.stage < stages - 1)
        if needs and one.name not in data:
            raise BadInput(f"pass {one.name}: no edge brings its {'input' if one.kind == 'F' else 'gradient'}")


def _recomputed(problem: Problem) -> None:
    """Every X lies between its F and its B, by edges: another order would have nothing to recompute, or nothing left."""
    pairs = set(zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True))
    for i in np.flatnonzero(problem.passes.kind == KINDS.index("X")).tolist():
        one = problem.passes[i]
        backward = "B" if f"{one.stage}B{one.microbatch}" in problem.index else "BW"
        ends = (problem.index[f"{one.stage}{kind}{one.microbatch}"] for kind in ("F", backward))
        for pair, name in zip(((next(ends), i), (i, next(ends))), ("F", backward), strict=True):
            if pair not in pairs:
                raise BadInput(f"pass {one.name}: no edge orders it and {one.stage}{name}{one.microbatch}")


def _sent_around(problem: Problem) -> None:
    """Every all-to-all is on the rank of its F or backward, and waits for it."""
    p, pairs = problem.passes, set(zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True))
    for i in np.flatnonzero(np.isin(p.kind, [KINDS.index(kind) for kind in ALL_TO_ALL])).tolist():
        one = p[i]
        makers = [problem.index.get(f"{one.stage}{kind}{one.microbatch}", -1) for kind in ALL_TO_ALL[one.kind]]
        if not any((maker, i) in pairs and p.rank[maker] == one.rank for maker in makers):
            raise BadInput(f"pass {one.name}: no edge from its {' or '.join(ALL_TO_ALL[one.kind])} on its rank")


def _message(problem: Problem, before: str, after: str) -> Message:
    p, a, b = problem.passes, problem.index[before], problem.index[after]
    gradient = KINDS[p.kind[a]] in ("B", "BW", "AB")
    boundary = int(p.stage[a]) - gradient
    return Message(before, after, int(p.rank[a]), int(p.rank[b]), boundary, int(p.microbatch[a]), gradient)


def _program(
    schedule: Schedule,
    rank: int,
    walks: list[tuple[str, ...]],
    homes: tuple[tuple[int, ...], ...],
    messages: dict[str, Message],
    goes: dict[str, list[Message]],
) -> Program:
    problem = schedule.problem
    incoming = {
        source: tuple(sent)
        for source in range(problem.ranks)
        if source != rank and (sent := [m for n in walks[source] for m in goes.get(n, ()) if m.destination == rank])
    }
    posts = _posts(schedule, walks[rank], incoming)
    rows = [problem.index[name] for name in walks[rank]]
    use = uses(problem, walks[rank])
    last = {one.stage: one.name for one in map(problem.passes.__getitem__, rows) if one.kind in GRADIENTS}

    def action(name: str) -> Action:
        one = problem.passes[problem.index[name]]
        out, takes = goes.get(name, ()), messages.get(name)
        local = takes is not None and takes.source == rank
        return Action(
            name,
            one.kind,
            one.stage,
            one.microbatch,
            f"{one.stage}B{one.microbatch}" in problem.index,
            f"{one.stage}X{one.microbatch}" in problem.index,
            tuple(posts.get(name, ())),
            takes.before if takes is not None and local else takes,
            tuple(m for m in out if m.destination != rank),
            next((m for m in out if m.destination == rank), None),
            last.get(one.stage) == name,
            use.get(name),
        )

    stages = tuple(s for s, ranks in enumerate(homes) if rank in ranks)
    actions = tuple(action(name) for name in walks[rank])
    reads = [[a.microbatch for a in actions if a.kind == "F" and a.stage == s] for s in (0, len(homes) - 1)]
    return Program(rank, actions, incoming, stages, tuple(sorted(reads[0])), tuple(sorted(reads[1])))


def _posts(schedule: Schedule, names: tuple[str, ...], incoming: dict[int, tuple[Message, ...]]) -> dict[str, list[Message]]:
    """Pass of this rank → the receives to post before it; those of one source in the order of its sends."""
    timeline, index = schedule.timeline(), schedule.problem.index
    starts = [int(timeline.start[index[name]]) for name in names]
    place = {name: i for i, name in enumerate(names)}
    result: dict[str, list[Message]] = {}
    for sent in incoming.values():
        at = len(names)
        points = []
        for message in reversed(sent):
            running = bisect_right(starts, int(timeline.end[index[message.before]])) - 1
            at = max(0, min(at, running, place[message.after] - 1))
            points.append((at, message))
        for at, message in reversed(points):
            result.setdefault(names[at], []).append(message)
    return result


def walk(schedule: Schedule, rank: int) -> Iterator[str]:
    """The passes of one rank in the order of the schedule's predicted timeline (which keeps each stream's order)."""
    problem, timeline = schedule.problem, schedule.timeline()
    rows = np.flatnonzero(problem.passes.rank == rank)
    turn = np.arange(len(problem.passes)) if timeline.turn is None else timeline.turn
    return iter(problem.names[i] for i in rows[np.lexsort((turn[rows], timeline.start[rows]))])
