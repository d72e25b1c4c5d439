"""How far a rank may run into a step before the optimizer's last update is validated, and how it repeats these passes.

The first forwards of every rank, up to its first backward, change nothing that stays. A rank stops before the first pass
that needs a message from a pass behind another rank's stop. So these passes can run whatever the validation says; after it,
either every rank repeats them, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .backward.replay import Replay
from .base.program import Action, Message, Program
from .handlers import HANDLERS
from .interpreter import Interpreter
from .memory import LiveBytes
from .transport.mailbox import Mailbox


def lengths(programs: Sequence[Program]) -> tuple[int, ...]:
    """How many passes each rank may run early: only repeatable ones, whose inputs all come from such passes."""
    most = [_until(p.actions, lambda action: not HANDLERS[action.kind].repeatable) for p in programs]
    while True:
        made = {action.name for p, n in zip(programs, most, strict=True) for action in p.actions[:n]}

        def waits(action: Action, made: set[str] = made) -> bool:
            return any(message.before not in made for message in action.messages)

        less = [_until(p.actions[:n], waits) for p, n in zip(programs, most, strict=True)]
        if less == most:
            return tuple(most)
        most = less


def _until(actions: Sequence[Action], stop: Callable[[Action], bool]) -> int:
    return next((i for i, action in enumerate(actions) if stop(action)), len(actions))


@dataclass(frozen=True)
class Cut:
    """One rank's program, cut in two. length: passes before the cut. counts: source rank → messages that it sends before its
    own cut. Receives of messages that are sent after the source's cut are posted after this rank's cut."""

    program: Program
    length: int
    counts: Mapping[int, int]

    @classmethod
    def of(cls, programs: Sequence[Program], rank: int) -> Cut:
        """The cut of one rank's program. programs: of all ranks."""
        most, own = lengths(programs), programs[rank]
        made = {action.name for p, n in zip(programs, most, strict=True) for action in p.actions[:n]}
        counts = {source: sum(m.before in made for m in sent) for source, sent in own.incoming.items()}
        actions, late = list(own.actions), list[Message]()
        for i in range(most[rank]):
            posts = actions[i].posts
            late += (m for m in posts if m.before not in made)
            actions[i] = replace(actions[i], posts=tuple(m for m in posts if m.before in made))
        if late:  # then passes follow the cut: the one that takes such a message, at least
            after = actions[most[rank]]
            actions[most[rank]] = replace(after, posts=(*late, *after.posts))
        return cls(replace(own, actions=tuple(actions)), most[rank], counts)


class Ahead:
    """Runs a rank's passes before the cut, and repeats them where the parameters turn out wrong. optimizer: the
    `PostValidated` whose update is validated meanwhile. module: has the buffers and generators that these passes change."""

    def __init__(self, cut: Cut, optimizer: Any, module: nn.Module) -> None:
        self.cut = cut
        self.optimizer = optimizer
        self._module, self._replay = module, Replay([module])

    def run(self, interpreter: Interpreter, mailbox: Mailbox, meter: LiveBytes | None) -> int:
        """Run the passes before the cut, with validated parameters in the end. Returns their number. Raises RunFailed."""
        first = interpreter.program.actions[: self.cut.length]
        pending = self.optimizer.begin()
        early = pending and interpreter.hooks.watch  # check for NaN only what is computed with validated parameters
        wrong = early and not self.optimizer.stands()
        drawn = self._replay.drawn() if pending else ()
        buffers = [(b, b.detach().clone()) for b in self._module.buffers()] if pending else []
        interpreter.run_all(first, meter)
        if pending and not early:
            wrong = not self.optimizer.stands()
        if wrong:
            mailbox.again(self.cut.counts)
            interpreter.forget()
            self._replay.draw_from(drawn)
            with torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)
            interpreter.run_all(first, meter)
        return len(first)
