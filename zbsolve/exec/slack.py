"""Slack at run time: a rank that waits for a message runs a later W of its order meanwhile, if it surely fits.

A W depends on its own rank alone and gives others nothing, so no rank can wait for ever. W's keep their order among
themselves, and overtake only F, X, B and BW, so every gradient is the same sum in the same order. A W takes no memory, and
frees some earlier. It runs only if the passes that the sender must still run before the message, without its own W's, take
at least as long by the schedule's times: then the rank is free again when the message comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from ..problem import Problem
from ..schedule import Schedule
from ..schedule.trace import SLACK
from ..util.errors import BadInput
from .backward.passes import HANDLERS as PLAIN
from .base.part import Part
from .base.program import Action, Message, Program
from .base.torch_private import version_of
from .step_view import StepView
from .transport.peers import Cells

PASSED = tuple(PLAIN)  # kinds that a W may overtake; it never overtakes those of features
WEIGHTS = next(kind for kind, handler in PLAIN.items() if handler.adds_gradients and not handler.takes)
ADDING = tuple(kind for kind, handler in PLAIN.items() if handler.adds_gradients and handler.takes)  # B and BW


class Slack:
    """Decides what one rank may run while it waits. cells: for all ranks, how many passes each has begun in all steps.
    early: pass that ran before its turn in this step → its record. at: the place of the pass whose turn it is."""

    def __init__(self, schedule: Schedule, programs: Sequence[Program], rank: int, cells: Cells) -> None:
        self.early: dict[str, Any] = {}
        self.at, self._step, self._next = -1, -1, 0
        self._schedule, self._cells, self._rank = schedule, cells, rank
        self._lengths = [len(program.actions) for program in programs]
        self._actions = programs[rank].actions
        problem = schedule.problem
        e, p = problem.edges, problem.passes
        came = p.rank[e.before] != p.rank[e.after]
        ends = zip(e.before[came].tolist(), e.after[came].tolist(), e.lag[came].tolist(), strict=True)
        self._lag: dict[tuple[str, str], int] = {(problem.names[a], problem.names[b]): lag for a, b, lag in ends}
        self._took = dict(zip(problem.names, p.duration.tolist(), strict=True))
        self._place = {action.name: i for program in programs for i, action in enumerate(program.actions)}
        self._until = [list(accumulate(map(self._surely, program.actions), initial=0)) for program in programs]
        self._weights = [i for i, action in enumerate(self._actions) if action.kind == WEIGHTS]
        self._trained: list[nn.Parameter] | None = None
        self._marks: dict[int, Any] = {}
        self._added: dict[bool, set[int]] = {}
        self._from: dict[int, int] | None = None  # see `earliest`; None: not known yet

    def of(self, schedule: Schedule, programs: Sequence[Program]) -> Slack:
        """The same for another order. Passes that others began in the old one count as begun."""
        return Slack(schedule, programs, self._rank, self._cells)

    def _surely(self, action: Action) -> int:
        """µs that a rank must still spend on a pass that it has not begun; 0 for a W, which may have run early."""
        return self._took[action.name] if action.kind in PASSED and action.kind != WEIGHTS else 0

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """A step begins. parameters: all trained ones of this rank. In the first step, and if they have changed, nothing
        runs early, and the rank finds out to which gradients B's and W's add."""
        trained = list(parameters)
        if self._trained is None or list(map(id, trained)) != list(map(id, self._trained)):
            self._trained, self._from, self._added = trained, None, {True: set(), False: set()}
            self._marks = self._marked()
        elif self._from is None:
            both = self._added[True] & self._added[False]  # the order of such a sum must not change
            passed = [kind for kind in PASSED if not (both and kind in ADDING)]
            self._from = earliest(self._schedule.problem, self._schedule.syncs, self._actions, passed)
        self._step, self.at, self._next = self._step + 1, -1, 0
        self.early.clear()

    def begun(self, action: Action) -> None:
        """A pass has all of its inputs: if it is its turn, publish that it begins."""
        if action is self._actions[self.at]:
            self._cells[self._rank] = self._step * self._lengths[self._rank] + self.at + 1

    def ended(self, action: Action) -> None:
        """A pass has ended: record which gradients it added to, while that is still unknown."""
        if self._from is not None or (action.kind != WEIGHTS and action.kind not in ADDING):
            return
        now = self._marked()
        self._added[action.kind == WEIGHTS] |= {key for key, mark in now.items() if mark != self._marks.get(key)}
        self._marks = now

    def _marked(self) -> dict[int, Any]:
        grads = {id(p): p.grad for p in self._trained or ()}
        return {key: (id(grad), version_of(grad)) for key, grad in grads.items() if grad is not None}

    def pull(self, missing: Iterable[Message]) -> Action | None:
        """The W to run now, while the pass whose turn it is waits for these messages; None: better wait."""
        if self._from is None:
            return None
        while self._next < len(self._weights) and self._weights[self._next] <= self.at:
            self._next += 1
        if self._next == len(self._weights):
            return None
        place = self._weights[self._next]
        action = self._actions[place]
        if self._from[place] > self.at or self._took[action.name] > max(map(self._left, missing)):
            return None
        self._next += 1
        return action

    def _left(self, message: Message) -> int:
        """A lower bound on the µs until a message comes, by the schedule's times."""
        source, place = message.source, self._place[message.before]
        begun = int(self._cells[source]) - self._step * self._lengths[source]
        until, lag = self._until[source], self._lag[message.before, message.after]
        return until[place + 1] - until[min(max(begun, 0), place + 1)] + lag


def earliest(
    problem: Problem, syncs: Iterable[tuple[str, str]], actions: Sequence[Action], passed: Sequence[str]
) -> dict[int, int]:
    """Place of each W in its rank's order → the first place where it may run. passed: kinds that it may overtake."""
    index, place = problem.index, {action.name: i for i, action in enumerate(actions)}
    needs: dict[str, list[str]] = {}
    for a, b in zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True):
        needs.setdefault(problem.names[b], []).append(problem.names[a])
    for before, after in syncs:
        needs.setdefault(after, []).append(before)
    first, wall = dict[int, int](), 0
    for i, action in enumerate(actions):
        if action.kind == WEIGHTS:
            tied = action.takes or action.sides or action.sends or action.hands or action.awaits or action.hears
            if tied or problem.taken[index[action.name]] > 0:
                wall = i + 1  # it keeps its place, and later W's do not overtake it
            first[i] = max(wall, *(place.get(name, i - 1) + 1 for name in needs.get(action.name, ())), 0)
        if action.kind not in passed:
            wall = i + 1
    return first


def check_slack(view: StepView, parts: Iterable[Part]) -> None:
    """Raise BadInput for a step without W's, or one where slack might change sums."""
    odd = "a step without W" if not view.step.passes.are(WEIGHTS).any() else more_than_plain(view, parts)
    if odd:
        raise BadInput(f"split '{SLACK}': not with {odd}")


def more_than_plain(view: StepView, parts: Iterable[Part]) -> str:
    """A part of the step whose passes may not change their order: a feature, or a file of rounds; "" where there is none."""
    odd = (part.name for part in parts if not part.any_order)
    return next(odd, "" if view.part is None else "a file of rounds")
