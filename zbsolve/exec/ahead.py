"""How far a rank may run into a step before the last optimizer's step is validated, and how it runs again from there.

The first forwards of every rank, up to its first backward, change nothing that stays: gradients are those of the last
step still. They are cut where they would take what others make later, so that a rank can run them all, whatever the
validation says; then every rank runs them anew, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from .comm import Links
from .lower import Action, Message, Program
from .memory import LiveBytes
from .walk import Data, Record, Walker

if TYPE_CHECKING:
    from .optimizer import PostValidated


def lengths(programs: Sequence[Program]) -> tuple[int, ...]:
    """How many passes each rank may run: forwards only, and all their inputs are made by such ones."""
    most = [_until(p.actions, lambda action: action.kind not in ("F", "AF")) for p in programs]
    while True:
        made = {action.name for p, n in zip(programs, most, strict=True) for action in p.actions[:n]}

        def waits(action: Action, made: set[str] = made) -> bool:
            return isinstance(action.takes, Message) and action.takes.before not in made

        less = [_until(p.actions[:n], waits) for p, n in zip(programs, most, strict=True)]
        if less == most:
            return tuple(most)
        most = less


def _until(actions: Sequence[Action], stop: Callable[[Action], bool]) -> int:
    return next((i for i, action in enumerate(actions) if stop(action)), len(actions))


@dataclass(frozen=True)
class Cut:
    """One rank's program, where receives of what others send after their own cut are posted after this rank's. `length`:
    passes before the cut; `counts`: source rank → messages that it sends before its own."""

    program: Program
    length: int
    counts: Mapping[int, int]

    @classmethod
    def of(cls, programs: Sequence[Program], rank: int) -> Cut:
        most, mine = lengths(programs), programs[rank]
        made = {action.name for p, n in zip(programs, most, strict=True) for action in p.actions[:n]}
        counts = {source: sum(m.before in made for m in sent) for source, sent in mine.incoming.items()}
        actions, late = list(mine.actions), list[Message]()
        for i in range(most[rank]):
            posts = actions[i].posts
            late += (m for m in posts if m.before not in made)
            actions[i] = replace(actions[i], posts=tuple(m for m in posts if m.before in made))
        if late:  # never empty behind the cut: there is the backward whose gradient, or something after it, was awaited
            after = actions[most[rank]]
            actions[most[rank]] = replace(after, posts=(*late, *after.posts))
        return cls(replace(mine, actions=tuple(actions)), most[rank], counts)


class Ahead:
    """Runs a rank's passes before the cut, and again where the parameters did not stand."""

    def __init__(self, cut: Cut, optimizer: PostValidated, module: nn.Module) -> None:
        self.cut = cut
        self.optimizer = optimizer
        self._module = module

    def run(self, walker: Walker, links: Links, data: Data, record: Record, meter: LiveBytes | None) -> int:
        """The passes before the cut, by parameters that are validated at its end; their number. Raises RunFailed."""
        first = walker.program.actions[: self.cut.length]
        pending = self.optimizer.begin()
        early = pending and walker.hooks.watch  # only numbers that stand are worth a look
        wrong = early and not self.optimizer.stands()
        buffers = [(b, b.detach().clone()) for b in self._module.buffers()] if pending else []
        walker.walk(first, data, record, meter)
        if pending and not early:
            wrong = not self.optimizer.stands()
        if wrong:
            links.again(self.cut.counts)
            walker.forget(record)
            with torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)
            walker.walk(first, data, record, meter)
        return len(first)
