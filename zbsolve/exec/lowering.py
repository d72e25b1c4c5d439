"""Lowering: from a schedule to each rank's program of passes, sends and receives, ordered by the schedule's predicted times.

A rank's program depends on its own passes, on those that exchange messages with them, and on when these run. So a very long
step is lowered from one rank's part of it (see `step_view`), any other from the whole schedule, by the same code.

Messages go along the edges between ranks that carry something. Sender and receiver have the same order of messages for each
(source, destination), that of the sender's passes, as NCCL has no tags for messages. A receive is posted before the pass
that runs when its message is sent, by the predicted times, and at least one pass before the message is used. So it can
arrive while other work runs, and its buffer does not lie idle for long.

Programs cannot deadlock, whatever the real times are. Sends never block, the receives of a pair are posted in the order of
its sends, and a pass waits only for messages from passes before it in the verified schedule. The requirements of a kind of
pass are in its handler (`handlers`); nothing here knows a kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from ..build.sides import rows_begun
from ..kinds import OURS
from ..problem import Problem
from ..problem.tables import Bools, Ints
from ..schedule import Schedule
from ..schedule.handover import Handover
from ..util.errors import BadInput
from .awaits import awaits_of, begins_and_ends, crossings, received, shares
from .base.handler import Graph
from .base.program import Action, Message, Program
from .handlers import CHECKS, HANDLERS, passes_where
from .step_view import StepView
from .updates import uses_of

CARRIED = {"activation": "input", "gradient": "gradient"}  # what an edge carries → its name for the pass that takes it
# Fields of handlers whose passes depend on ranks that send them no message.
FAR = ("goes_on", "before_its_pass", "settle", "release")
Incoming = Mapping[int, tuple[Message, ...]]


def lower(given: Schedule | StepView, training: bool = True) -> tuple[Program, ...]:
    """The programs of the ranks whose passes are all known: of a whole schedule, all ranks. training: each forward needs its
    backward. Raises BadInput for a schedule that is not valid, or that the executor cannot run."""
    view = StepView.of(given) if isinstance(given, Schedule) else given
    view.check()
    if view.part is not None:
        check_by_rank(view.step)
    check_runs(view.step, training)
    lowering = _Lowering(view)
    _check_collectives(lowering.problem, lowering.orders)
    return tuple(lowering.program(rank) for rank in view.ranks)


def check_by_rank(problem: Problem) -> None:
    """Raise BadInput where very long steps with the passes of `problem` cannot be lowered rank by rank."""
    far = [kind for kind in problem.passes.kinds if kind in HANDLERS and any(getattr(HANDLERS[kind], f) for f in FAR)]
    if far:
        name = problem.names[problem.rows(*far)[0]]
        raise BadInput(f"pass {name}: run knows no passes of its kind in a file of rounds: it concerns other ranks too")


def check_runs(problem: Problem, training: bool = True) -> None:
    """Raise BadInput, naming a pass, where the executor cannot run the problem: a kind has no handler; several
    ranks have one stage of a microbatch; an edge between ranks carries nothing; a pass lacks its input; a check of a feature
    or of a handler fails."""
    p = problem.passes
    unknown = [kind for kind in p.kinds if kind not in HANDLERS]
    if unknown:
        name, kind = problem.names[problem.rows(*unknown)[0]], p[problem.rows(*unknown)[0]].kind
        raise BadInput(f"pass {name}: run does not know passes of kind {kind} yet (only {' '.join(HANDLERS)})")
    _ = problem.routes  # raises where a microbatch is on several ranks for one stage
    graph = Graph(problem, training)
    for check in CHECKS:
        check(graph)
    _check_edges(problem)
    _check_inputs(problem)
    for kind in p.kinds:
        graph.check_orders(problem.rows(kind), HANDLERS[kind])
        HANDLERS[kind].check(graph, problem.rows(kind))


def _check_edges(problem: Problem) -> None:
    """Check the edges between ranks. Each carries something, or one of its passes synchronizes with other ranks by itself: a
    sum of gradients, a collective, a pass that helps another, or a part of a helped pass. All other edges must stay inside a
    rank, where the order of passes fulfils them."""
    p, e = problem.passes, problem.edges
    sums = passes_where(problem, "adds_gradients")[e.before] & passes_where(problem, "ends_with_step")[e.after]
    helps, parts = _by_itself(problem, away=True), passes_where(problem, "before_its_pass")
    kept = e.handing | (sums & (p.stage[e.before] == p.stage[e.after])) | _kept_by_collectives(problem)
    kept |= helps[e.before] | (helps | parts)[e.after]
    wrong = np.flatnonzero((p.rank[e.before] != p.rank[e.after]) & ~kept)
    if len(wrong):
        a, b = (problem.names[end[wrong[0]]] for end in (e.before, e.after))
        raise BadInput(f"edge {a} → {b}: it links two ranks, but carries no activation or gradient (carries=)")


def _by_itself(problem: Problem, **row: bool) -> Bools:
    """Passes of such kinds that synchronize with other ranks while their own rank goes on, shape (passes,)."""
    return problem.passes.that(**row) & passes_where(problem, "goes_on")


def _kept_by_collectives(problem: Problem) -> Bools:
    """Which edges a collective fulfils, shape (edges,). A collective ends on all ranks only after each rank has begun it. So
    an edge between it and a pass of another rank holds if there is one between that pass and its own rank's collective."""
    p, e, joins = problem.passes, problem.edges, _by_itself(problem, together=True)
    kept = np.zeros(len(e), bool)
    if not joins.any():
        return kept
    part = problem.parts
    peers = np.full((int(p.kind.max()) + 1, int(part.max()) + 1, problem.ranks), -1, np.int64)
    rows = np.flatnonzero(joins)
    peers[p.kind[rows], part[rows], p.rank[rows]] = rows
    pairs = np.sort(e.before * len(p) + e.after)
    for this, other, before in ((e.after, e.before, True), (e.before, e.after, False)):
        ends = np.flatnonzero(joins[this])
        here = peers[p.kind[this[ends]], part[this[ends]], p.rank[other[ends]]]
        own = other[ends] * len(p) + here if before else here * len(p) + other[ends]
        place = np.minimum(np.searchsorted(pairs, own), len(pairs) - 1)
        kept[ends] |= (here >= 0) & (pairs[place] == own)
    return kept


def _check_collectives(problem: Problem, orders: Sequence[Sequence[str]]) -> None:
    """All ranks must have their collectives in the same order, or they would wait for each other."""
    number = problem.collective
    each = [[row for row in map(problem.index.__getitem__, order) if number[row] >= 0] for order in orders]
    for rank, rows in enumerate(each):
        wrong = next(((a, b) for a, b in zip(each[0], rows, strict=True) if number[a] != number[b]), None)
        if wrong is not None:
            a, b = (problem.names[row] for row in wrong)
            raise BadInput(f"pass {b}: rank {rank} has it where rank 0 has {a}: ranks need one order of their collectives")


def _check_inputs(problem: Problem) -> None:
    """Check that one edge brings each pass its input. Stages that begin a row (see `build.sides`) read the batch instead;
    those that end one get the gradient of the loss, or that of their side outputs."""
    p, e, missing = problem.passes, problem.edges, np.zeros(len(problem.passes), bool)
    brought = np.bincount(e.after[e.carrying("activation", "gradient")], minlength=len(p))
    if brought.max(initial=0) > 1:
        row = int(brought.argmax())
        raise BadInput(f"pass {problem.names[row]}: {brought[row]} edges carry something to it, and run hands it one thing")
    first = np.array([0, *rows_begun(problem)])
    for cargo, stages in (("activation", first), ("gradient", [*(first - 1), problem.model_stages - 1])):
        needs = passes_where(problem, "takes", cargo) & ~np.isin(p.stage, stages)
        needs[e.after[e.carrying(cargo)]] = False
        missing |= needs
    if missing.any():
        row = int(missing.argmax())
        raise BadInput(f"pass {problem.names[row]}: no edge brings its {CARRIED[HANDLERS[p[row].kind].takes]}")


class _Lowering:
    """What programs are made from. orders: each rank's passes in order. messages: in the order of `handover`. takes: pass →
    the message with its input; sides: pass → those with side inputs; gives: pass → the messages with its output.
    companions: (stage, part) → the kinds of its passes. makers: pass → the passes before it that it uses and whose handler
    has a `release`; made: the stages with such passes. hears, going_on: see `Action`. received: message → the place in its
    rank's order where its receive starts; turn: message → its place in the order of all ranks (see `awaits`)."""

    def __init__(self, view: StepView) -> None:
        schedule = view.schedule
        self.step, self.schedule, self.problem = view.step, schedule, schedule.problem
        begin = begins_and_ends(schedule)[0]
        self.handover = Handover.of(schedule, begin)
        self.orders = [tuple(self.problem.names[row] for row in rows) for rows in self.handover.orders]
        self.messages = _messages(self.handover)
        self.takes = {message.after: message for message in self.messages if not message.beside}
        self.gives, self.sides = defaultdict[str, list[Message]](list), defaultdict[str, list[Message]](list)
        for message in self.messages:
            self.gives[message.before].append(message)
            if message.beside:
                self.sides[message.after].append(message)
        self.companions, self.going_on = _companions(self.problem), _going_on(self.problem, self.orders)
        self.received, sent = received(self.handover, begin)
        self.turn = dict(zip(self.messages, sent.tolist(), strict=True))
        self.makers, self.made = _makers(self.problem)
        self.shares = shares(self.problem)
        self.hears = defaultdict[int, list[str]](list)
        for before, after in crossings(schedule):
            self.hears[after].append(self.problem.names[before])
        self.taking = passes_where(self.problem, "takes", "activation")
        self.adding, self.weighted = passes_where(self.problem, "adds_gradients"), passes_where(self.problem, "uses_weights")

    def program(self, rank: int) -> Program:
        """The program of one rank."""
        problem, order, p = self.problem, self.orders[rank], self.problem.passes
        sent = {
            source: tuple(m for name in self.orders[source] for m in self.gives.get(name, ()) if m.destination == rank)
            for source in range(len(self.orders))
            if source != rank
        }
        incoming = {source: messages for source, messages in sent.items() if messages}
        outgoing = tuple(m for name in order for m in self.gives.get(name, ()) if m.destination != rank)
        uses = uses_of(problem, order, self.weighted)
        posts, receives = (self._placed(order, incoming, at) for at in (self.handover.posted, self.received))
        for some in receives.values():
            some.sort(key=self.turn.__getitem__)
        gone = self._placed(order, {rank: outgoing}, self.handover.gone)
        rows = [problem.index[name] for name in order]
        latest = {int(p.stage[row]): row for row in rows if self.adding[row]}
        done, releases, awaits = set(latest.values()), self._releases(rows), awaits_of(self.schedule, rows)
        actions = [
            self._action(
                row,
                posts=tuple(posts.get(name, ())),
                done=row in done,
                use=uses.get(name),
                releases=releases.get(row, ()),
                awaits=awaits.get(row, ()),
                receives=tuple(receives.get(name, ())),
                gone=tuple(gone.get(name, ())),
            )
            for row, name in zip(rows, order, strict=True)
        ]
        last = self.step.model_stages - 1
        stages = tuple(s for s, ranks in enumerate(self.step.stage_ranks[: last + 1]) if rank in ranks)
        inputs, targets = (
            [row for row in rows if (self.taking[row] and p.stage[row] == stage) or HANDLERS[p[row].kind].reads == what]
            for stage, what in ((0, "inputs"), (last, "targets"))
        )
        read = (tuple(np.unique(p.microbatch[some]).tolist()) for some in (inputs, targets))
        return Program(rank, tuple(actions), incoming, stages, *read)

    def _releases(self, rows: Sequence[int]) -> dict[int, tuple[tuple[str, int], ...]]:
        """Pass of a rank → (kind, stage) of passes that no pass after it uses (see `Handler.release`). rows: the rank's
        passes in order.

        A pass uses those from which an edge leads to it; without such an edge, the one that its microbatch used last on the
        stage. Raises BadInput where there is none though the stage has such passes.
        """
        problem, used, last = self.problem, dict[tuple[int, int], int](), dict[int, int]()
        for row in rows if self.made else ():
            stage, microbatch = int(problem.passes.stage[row]), int(problem.passes.microbatch[row])
            makers: Sequence[int] = self.makers.get(row, ())
            if not makers and self.weighted[row] and stage in self.made:
                if (stage, microbatch) not in used:
                    raise BadInput(f"pass {problem.names[row]}: no edge says which pass prepares its stage's weights")
                makers = [used[stage, microbatch]]
            for maker in makers:
                last[maker] = row
                used[stage, microbatch] = maker
        released: dict[int, tuple[tuple[str, int], ...]] = {}
        for maker, row in last.items():
            used_last = problem.passes[maker]
            released[row] = (*released.get(row, ()), (used_last.kind, used_last.stage))
        return released

    def _action(self, row: int, **by_order: Any) -> Action:
        """The action of a pass. by_order: the fields that depend on the order of its rank."""
        this_pass = self.problem.passes[row]
        given, takes = self.gives.get(this_pass.name, ()), self.takes.get(this_pass.name)
        local = takes is not None and takes.source == this_pass.rank
        return Action(
            name=this_pass.name,
            kind=this_pass.kind,
            stage=this_pass.stage,
            part=int(self.problem.parts[row]),
            companions=self.companions.get((this_pass.stage, int(self.problem.parts[row])), frozenset()),
            takes=takes.before if takes is not None and local else takes,
            reads=takes is None and bool(self.taking[row]),
            sends=tuple(m for m in given if m.destination != this_pass.rank),
            hands=tuple(m for m in given if m.destination == this_pass.rank and not m.beside),
            hears=tuple(self.hears.get(row, ())),
            stream=this_pass.streams[0],
            share=float(self.shares[row]),
            goes_on=bool(self.going_on[row]),
            sides=tuple(self.sides.get(this_pass.name, ())),
            **by_order,
        )

    def _placed(self, order: Sequence[str], given: Incoming, places: Ints) -> dict[str, list[Message]]:
        """Pass of a rank → the messages to handle before it, those of one source in the order of their sends. places: of
        each message, in the rank's order. A place after the last pass is the end of the step, and left out."""
        at, placed = dict(zip(self.messages, places.tolist(), strict=True)), defaultdict[str, list[Message]](list)
        for message in chain.from_iterable(given.values()):
            if at[message] < len(order):
                placed[order[at[message]]].append(message)
        return placed


def _messages(handover: Handover) -> list[Message]:
    """The messages of a step, between ranks and within one, in the order of `handover`."""
    problem = handover.schedule.problem
    names, p, e = problem.names, problem.passes, problem.edges
    gradient, alone = e.carrying("gradient", "side gradient")[e.handing], handover.boundary < 0
    takers = np.where(handover.beside, np.maximum(p.stage[handover.before], p.stage[handover.after]), 0)
    part = problem.parts[handover.before]
    # A message that belongs to no microbatch has a channel of its own.
    boundary, part = np.where(alone, -1 - part, handover.boundary), np.where(alone, 0, part)
    # So has one of a registered kind: it does not have the form of the activation at that boundary.
    later = np.where(gradient, handover.before, handover.after)
    own = np.where(p.kind[later] < len(OURS), "", np.asarray(p.kind_names)[later])
    columns = (handover.before, handover.after, boundary, part, gradient, takers, own)
    return [
        Message(names[a], names[b], int(p.rank[a]), int(p.rank[b]), behind, number, back, beside, own)
        for a, b, behind, number, back, beside, own in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _companions(problem: Problem) -> dict[tuple[int, int], frozenset[str]]:
    """(stage, part) → the kinds of its passes. Passes that are counted by the step, not by microbatch, are left out."""
    p, companions = problem.passes, defaultdict[tuple[int, int], set[str]](set)
    kinds = p.kind_names
    rows = np.flatnonzero(~p.that(per_step=True))
    for row, stage, part in zip(rows.tolist(), p.stage[rows].tolist(), problem.parts[rows].tolist(), strict=True):
        companions[stage, part].add(kinds[row])
    return {spot: frozenset(kinds) for spot, kinds in companions.items()}


def _going_on(problem: Problem, orders: Sequence[Sequence[str]]) -> Bools:
    """For which passes the rank goes on while their work is done, shape (passes,). A pass that helps another one does so
    where the helped pass does not directly follow its parts: a pass between may wait for the helper's rank."""
    goes_on, parts, p = passes_where(problem, "goes_on"), passes_where(problem, "before_its_pass"), problem.passes
    broken = set[tuple[int, int]]()
    for order in orders if parts.any() else ():
        rows = [problem.index[name] for name in order]
        spots = [(int(p.stage[row]), int(problem.parts[row])) for row in rows]
        broken |= {a for row, (a, b) in zip(rows, pairwise(spots), strict=False) if parts[row] and a != b}
    for row in np.flatnonzero(problem.passes.that(away=True)).tolist():
        goes_on[row] = (int(p.stage[row]), int(problem.parts[row])) in broken
    return goes_on


def _makers(problem: Problem) -> tuple[dict[int, list[int]], set[int]]:
    e, makers, released = problem.edges, defaultdict[int, list[int]](list), passes_where(problem, "release")
    for row in np.flatnonzero(released[e.before]).tolist():
        makers[int(e.after[row])].append(int(e.before[row]))
    return makers, set(problem.passes.stage[released].tolist())
