"""What each rank does in a step, as data: `lower` makes programs, the interpreter runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What pass `before` on rank `source` makes and pass `after` on rank `destination` takes: an activation after stage
    `boundary`, or (`gradient`) the gradient of one, of the same shape. part: see `Action`. beside: of side inputs and their
    gradients, which stage `boundary` gives, the first stage there that takes them; 0: it goes along the row of stages. Both
    ends of one lowering hold the same object."""

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
        """The boundary, the ranks before and behind it, and `beside`. Messages of one channel have one shape for one shape
        of input."""
        ends = (self.destination, self.source) if self.gradient else (self.source, self.destination)
        return self.boundary, *ends, self.beside


@dataclass(frozen=True, slots=True)
class VersionUse:
    """What a pass has to do with versions of its stage's weights. version: the one that it uses, or that an update makes;
    group: the update that its gradients go to (an update: itself); over: no pass after this one uses the version."""

    version: int
    group: int
    over: bool


class Await(NamedTuple):
    """A pass `name` before another one, which only began work that is to be done now: surely, or else if it is done."""

    kind: str
    name: str
    sure: bool


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """One pass of a rank's program.

    part: its microbatch, or its slice of one (see `slices.cutting`). companions: the kinds of all passes that its part
    has on its stage. posts: messages that get their memory before it. receives, gone: on a GPU, messages that are
    received from here on, and those sent before that have gone (see `handover`). takes: the message with its input, or
    the name of the pass on this rank that hands it over, or None where it needs neither. reads: its input is the batch.
    sends, hands: where its output goes: to other ranks, and to passes of this one. done: it is the last
    pass here that adds to its stage's gradients. use: of versions of weights, where there are updates. releases: (kind,
    stage) of the passes here whose work is over with this one (see `Handler.release`). awaits: work that passes before it
    only began (see `Handler.settle`). hears: passes of other ranks that it waits for though it takes nothing of them;
    tells: others wait for it so. stream: what it occupies. share: of the bytes that a pass before it holds, how much it
    moves to another pool. goes_on: its rank runs the next passes while its work is done. sides: messages
    of side inputs that it takes beside that (see `exec.sides`).
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
    tells: bool = False
    stream: str = ""
    share: float = 1.0
    goes_on: bool = False
    receives: tuple[Message, ...] = ()
    gone: tuple[Message, ...] = ()
    sides: tuple[Message, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """Those of other ranks that it takes, that of the row first."""
        return (self.takes, *self.sides) if isinstance(self.takes, Message) else self.sides


@dataclass(frozen=True)
class Program:
    """What one rank does in a step. actions: its passes in order. incoming: source rank → its messages in the order in which
    they are sent. stages: those held here. inputs, targets: the microbatches whose first or last stage runs here."""

    rank: int
    actions: tuple[Action, ...]
    incoming: dict[int, tuple[Message, ...]]
    stages: tuple[int, ...]
    inputs: tuple[int, ...]
    targets: tuple[int, ...]
