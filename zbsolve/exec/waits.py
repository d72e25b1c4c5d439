"""Can a step on GPUs deadlock? From the programs of all ranks this builds a graph of what waits for what, by the rules in
`docs/nccl.md`. A circle in it is a deadlock. The graph has no times: without a circle the step ends, however long passes,
messages and hosts take."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter

import torch

from ..kinds import TABLE
from ..util.errors import BadInput
from .base.program import Action, Message, Program
from .handlers import HANDLERS

MOST_NAMED = 6  # of what waits for each other


def circle(programs: Sequence[Program]) -> tuple[str, ...]:
    """Why a step may deadlock: lines, each of which waits for the previous one, and the first for the last; () where it
    cannot. programs: of all ranks, as `lower` makes them."""
    return graph_of(programs).circle()


def check_ends(programs: Sequence[Program], device: torch.device) -> None:
    """Raise BadInput where a step on this kind of device may hang. programs: of all ranks; where one is given, none is."""
    if device.type == "cuda" and len(programs) > 1 and (waits := circle(programs)):
        raise BadInput(f"schedule: on GPUs its ranks would wait for each other: {'; '.join(waits[:MOST_NAMED])}")


def graph_of(programs: Sequence[Program]) -> WaitGraph:
    """The graph of a step. programs: those of all ranks."""
    together = _Together()
    for program in programs:
        _Rank(program, together).run()
    together.join(len(programs))
    return together.graph


class _Together:
    """What several ranks take part in. ends: of messages, collectives and copies. sends, receives: the calls of hosts.
    joined: end of a collective → how many ranks start it. heard: (event, the copy of another rank that it waits for)."""

    def __init__(self) -> None:
        self.graph = WaitGraph()
        self.ends: dict[object, int] = {}
        self.sends: dict[Message, int] = {}
        self.receives: dict[Message, int] = {}
        self.joined = Counter[int]()
        self.heard: list[tuple[int, str]] = []

    def end(self, what: object, text: str) -> int:
        """The event that ends what several ranks start together."""
        if what not in self.ends:
            self.ends[what] = self.graph.event(text)
        return self.ends[what]

    def join(self, ranks: int) -> None:
        """Add waits between ranks. What not all of its ranks start never ends: it waits for itself."""
        before = self.graph.before
        for message in self.sends.keys() ^ self.receives.keys():
            before[self.ends[message]].append(self.ends[message])
        for end, count in self.joined.items():
            before[end] += [] if count == ranks else [end]
        for message in self.receives.keys() & self.sends.keys():  # the sender's host sends the format first
            before[self.receives[message]].append(self.sends[message])
        for event, name in self.heard:
            before[event].append(self.ends[name])


class _Rank:
    """One rank, as its program is read. host: the last call of its host. open: ends of the work enqueued since that call.
    computed: the end of the pass launched last. issued: the last entry in the device's single hardware queue; every
    later one waits for it. streamed: stream → the end of its last work. reserved: message → what used its memory
    before. left: source → the messages whose receives are not enqueued yet. begun: pass that only starts work → (when a
    thread launched the work; None: the host did), its end. prepared: stage → the end of the last work for its weights."""

    def __init__(self, program: Program, together: _Together) -> None:
        self.program, self.together, self.graph = program, together, together.graph
        self.name = f"rank {program.rank}'s"
        self.host: int | None = None
        self.open: list[int] = []
        self.computed: int | None = None
        self.issued: int | None = None
        self.streamed: dict[str, int] = {}
        self.reserved: dict[Message, int | None] = {}
        self.left = {source: deque(messages) for source, messages in program.incoming.items()}
        self.begun: dict[str, tuple[int | None, int]] = {}
        self.prepared: dict[int, int] = {}

    def run(self) -> None:
        """Read the whole program, in the interpreter's order; the step ends after all that was enqueued."""
        for action in self.program.actions:
            self.hold([self.together.ends[message] for message in action.gone], f"sends over before {action.name}")
            for message in action.posts:
                self.reserved[message] = self.computed
            for message in (*action.receives, *action.messages):
                self.receive(message)
            begun = [self.begun[awaited.name] for awaited in action.awaits if awaited.sure and awaited.name in self.begun]
            self.hold([end for _, end in begun], f"work over before {action.name}", [launched for launched, _ in begun])
            self.launch(action)
            for message in action.sends:
                self.send(message)
        self.graph.event(f"{self.name} step ends", [self.host, *self.streamed.values()])

    def call(self, text: str, before: Iterable[int | None] = ()) -> int:
        """Add a call of the host; it may wait for all that the rank has enqueued so far."""
        self.host, self.open = self.graph.event(f"{self.name} host {text}", [self.host, *before, *self.open]), []
        return self.host

    def enqueue(self, stream: str, text: str, before: Iterable[int | None] = (), end: int | None = None) -> int:
        """Enqueue work on a stream, by the host's last call. end: the event that ends it, or None. Returns its end."""
        waits = [self.host, self.streamed.get(stream), *before, self.issued]
        start = self.issued = self.graph.event(f"{self.name} device {text}", waits)
        if end is None:
            end = start
        else:
            self.graph.before[end].append(start)
        self.streamed[stream] = end
        self.open.append(end)
        return end

    def hold(self, ends: Sequence[int], what: str, before: Iterable[int | None] = ()) -> None:
        """The compute stream waits for these ends, if there are any."""
        if ends:
            self.call(f"takes {what}", before)
            self.computed = self.enqueue("compute", f"waits for {what}", ends)

    def receive(self, message: Message) -> None:
        """Enqueue the receives from the message's source up to it that are not enqueued yet."""
        while message not in self.together.receives:
            due = self.left[message.source].popleft()
            self.together.receives[due] = self.call(f"receives {_named(due)}")
            end = self.carry(due, "receives", [self.reserved.setdefault(due, self.computed)])
            self.enqueue(f"arrivals from {due.source}", f"sees {_named(due)} arrive", [end])

    def send(self, message: Message) -> None:
        """Send after the pass that was launched last."""
        self.together.sends[message] = self.call(f"sends {_named(message)}")
        self.carry(message, "sends", [self.computed])

    def carry(self, message: Message, does: str, before: Iterable[int | None]) -> int:
        """Enqueue this device's part of a message on the communicator of its two ranks. Returns its end."""
        name = _named(message)
        end = self.together.end(message, f"message {name} is through")
        return self.enqueue(f"messages {message.source} {message.destination}", f"{does} {name}", before, end)

    def launch(self, action: Action) -> None:
        """Launch the pass, on the stream of its kind."""
        handler, kind, name, together = HANDLERS[action.kind], TABLE[action.kind], action.name, self.together
        taken = [together.ends[message] for message in action.messages]
        self.call(f"launches {name}")
        if kind.together:
            end = together.end((action.kind, action.part), f"collective {action.kind}{action.part} ends")
            together.joined[end] += 1
            self.begun[name] = None, self.enqueue("collectives", f"begins {name}", [self.computed], end)
        elif handler.ends_with_step:
            end = together.end((action.kind, action.stage), f"sum of stage {action.stage} ends")
            self.enqueue(f"sums of {action.stage}", f"begins {name}", [self.computed], end)
        elif handler.settle is not None:
            self.copy(action)
        elif handler.ended is not None:  # it is over by itself, beside the passes behind it; what it prepared is released
            end = self.enqueue("beside", f"begins {name}", [self.computed])
            if handler.release is not None:
                self.prepared[action.stage] = end
        else:
            prepared = self.prepared.get(action.stage) if handler.uses_weights else None
            self.computed = self.enqueue("compute", f"runs {name}", [*taken, prepared])

    def copy(self, action: Action) -> None:
        """A copy. A thread launches one that waits for copies of other ranks; the host waits for the thread
        where the copy must be done."""
        stream, name = f"copies {action.stream}", action.name
        if action.hears:
            end = self.graph.event(
                f"{self.name} thread copies {name}", [self.host, self.streamed.get(stream), self.computed]
            )
            self.together.heard += [(end, other) for other in action.hears]
            self.streamed[stream] = end
            self.begun[name] = end, end
        else:
            end = self.enqueue(stream, f"copies {name}", [self.computed])
            self.begun[name] = None, end
        self.together.ends[name] = end


def _named(message: Message) -> str:
    return f"{message.before} → {message.after}"


class WaitGraph:
    """texts: each event in words; before: for each event the numbers of those that it waits for."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.before: list[list[int]] = []

    def event(self, text: str, before: Iterable[int | None] = ()) -> int:
        """Add an event that waits for those of `before` that are not None. Returns its number."""
        self.texts.append(text)
        self.before.append([number for number in before if number is not None])
        return len(self.texts) - 1

    def circle(self) -> tuple[str, ...]:
        """A circle of events in words: each waits for the one before it, the first for the last; () where there is none.
        It starts with the event that was added first among all in circles, which is in no shorter one."""
        with suppress(CycleError):
            TopologicalSorter(dict(enumerate(self.before))).prepare()
            return ()
        import networkx

        graph = networkx.DiGraph((earlier, event) for event, before in enumerate(self.before) for earlier in before)
        rings = (
            ring for ring in networkx.strongly_connected_components(graph) if len(ring) > 1 or graph.has_edge(*ring, *ring)
        )
        start = min(map(min, rings))
        behind = (there for there in graph[start] if networkx.has_path(graph, there, start))
        way = min((networkx.shortest_path(graph, there, start) for there in behind), key=len)
        return tuple(self.texts[event] for event in (start, *way[:-1]))
