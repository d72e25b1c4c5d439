"""Each rank's program: what it does in a step, as data. `lower` makes programs, and the interpreter runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A tensor or pytree that pass `before` on rank `source` makes and pass `after` on rank `destination` takes: the
    activation after stage `boundary`, or (`gradient`) the gradient of one, with the same shape. part: see `Action`. beside:
    for a side input that stage `boundary` gives, and for its gradient, the first stage there that takes it; 0: a message
    from one stage to the next. Sender and receiver have the same object, if one call of `lower` made both."""

    before: str
    after: str
    source: int
    destination: int
    boundary: int
    part: int
    gradient: bool
    beside: int = 0

    @property
    def channel(self) -> tuple[int, ...]:
        """The boundary, the ranks before and behind it, and `beside`. All messages of a channel have the same shape where
        inputs have the same shape."""
        ends = (self.destination, self.source) if self.gradient else (self.source, self.destination)
        return self.boundary, *ends, self.beside


@dataclass(frozen=True, slots=True)
class VersionUse:
    """How a pass uses versions of its stage's weights. version: the one that it reads; of an update, the one that it makes.
    group: the update that gets its gradients (of an update: itself). over: it is the last pass that uses the version."""

    version: int
    group: int
    over: bool


class Await(NamedTuple):
    """Pass `name` started work before; it must be finished now (`sure`), or is finished only if it is done already."""

    kind: str
    name: str
    sure: bool


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """One pass of a rank's program.

    part: its number among all parts of microbatches (see `Problem.parts`). companions: the kinds of all passes of its stage
    and part. posts: messages whose memory is allocated before it. receives, gone: on a GPU, the messages whose receive
    starts before it, and those sent earlier that have left by then (see `handover`). takes: the message with its input, or
    the name of the pass on this rank that makes it, or None where it takes neither. reads: its input is the batch. sends,
    hands: the messages with its output, to other ranks and to passes of this rank. done: it is the last pass here that adds
    to its stage's gradients. use: of versions of weights, where passes U update them. releases: (kind, stage) of passes
    whose result no pass after this one uses (see `Handler.release`). awaits: work to finish that passes before it started
    (see `Handler.settle`). hears: passes of other ranks that it waits for, though they send it nothing. stream: the stream
    that it runs on. share: which share of the bytes that a pass before it holds it moves to another pool. goes_on: its rank
    runs the next passes while its work is done. sides: further messages that it takes, with side inputs (see `exec.sides`).
    """

    name: str
    kind: str
    stage: int
    part: int
    companions: frozenset[str]
    posts: tuple[Message, ...]
    takes: Message | str | None
    reads: bool
    sends: tuple[Message, ...]
    hands: tuple[Message, ...]
    done: bool
    use: VersionUse | None = None
    releases: tuple[tuple[str, int], ...] = ()
    awaits: tuple[Await, ...] = ()
    hears: tuple[str, ...] = ()
    stream: str = ""
    share: float = 1.0
    goes_on: bool = False
    receives: tuple[Message, ...] = ()
    gone: tuple[Message, ...] = ()
    sides: tuple[Message, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages from other ranks that it takes; first the one from the stage before or behind it."""
        return (self.takes, *self.sides) if isinstance(self.takes, Message) else self.sides


@dataclass(frozen=True)
class Program:
    """One rank's program of a step. actions: its passes in order. incoming: source rank → its messages in the order of its
    sends. stages: those on this rank. inputs, targets: the microbatches whose inputs or targets it reads."""

    rank: int
    actions: tuple[Action, ...]
    incoming: dict[int, tuple[Message, ...]]
    stages: tuple[int, ...]
    inputs: tuple[int, ...]
    targets: tuple[int, ...]
