"""Attention that ranks make for each other while a stage's forward or backward runs (see `build.attention_exchange`).

A pass that hands attention over asks its helper at each call of attention: it sends queries and some of the earlier keys and
values, goes on with the others, and takes in what comes back. All its work is done behind its parts, where F or B is.

Where the parts come in one go on its rank, the helper serves it until it is over. Else another pass between them may wait
for what the helper's rank does next: that goes on, and a thread serves, no earlier than the schedule has the helper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..build.attention_exchange import HandedOver, handed_over
from ..problem import Problem
from ..tables import Ints
from ..util.errors import BadInput, LostRank, RunFailed, one_line
from .base.handler import Graph, Handler
from .base.part import Part, RankState, Run
from .base.program import Action
from .connecting import Connecting
from .slices.attention import Attended, Scores, partial_attention, partial_gradients, scale_of
from .slices.stage import Slices
from .transport.format import FORMAT_BYTES, Format
from .transport.peers import Peers
from .transport.wires import CPU, reason

HELPS = {"FH": ("F",), "BH": ("B", "BW")}  # kind of helper → of the passes that it helps
FIRST_TAG = 71  # of two for each pass that hands over, to its helper and back; nothing else on the wires has them


class AttentionPeers(Part):
    """One rank's exchange, over the wires of the pipeline's ranks. handed: see `handed_over`; homes: stage → rank."""

    name = "attention exchange"

    def __init__(self, peers: Peers, problem: Problem) -> None:
        self.peers, self.wires, self.timeout = peers, peers.wires, peers.timeout
        self.handed, self.homes = handed_over(problem), problem.routes[0]
        self._tags = {at: FIRST_TAG + 2 * i for i, at in enumerate(self.handed)}
        self._threads = ThreadPoolExecutor(max(1, len(self.handed)), "attention")  # a thread for each that is asked
        self._begun: dict[str, Future[None]] = {}

    @classmethod
    def of(cls, c: Connecting) -> AttentionPeers | None:
        """The part of a rank; None where no rank helps another. Raises BadInput where it does not run."""
        if not HELPS.keys() & set(c.problem.passes.kinds):
            return None
        if c.device.type != "cpu":
            raise BadInput(f"Pipeline: attention for other ranks runs on CPUs alone, and this is the device {c.device}")
        return cls(c.peers, c.problem)

    def around(self, kind: str, run: Run) -> Run:
        """While a pass runs that has a helper, its slices ask that one for a part of their attention."""
        helper = next((name for name, kinds in HELPS.items() if kind in kinds), None)
        if helper is None:
            return run

        def helped(state: RankState, action: Action, given: Any) -> Any:
            if helper not in action.companions:
                return run(state, action, given)
            store = state.part(Slices).slices[action.stage].store
            with self.helping(action.stage, action.part, helper == "BH") as store.helper:
                try:
                    return run(state, action, given)
                finally:
                    store.helper = None

        return helped

    @contextmanager
    def helping(self, stage: int, part: int, backward: bool) -> Iterator[Helping]:
        """Run a pass that hands attention over inside; its helper serves it until then."""
        at = stage, part, backward
        handed, tag = self.handed[at], self._tags[at]
        helping = Helping(self, handed, tag)
        yield helping
        helping.sent += self.send(handed.rank, tag, None)
        for work, _ in helping.sent:
            self.wires.wait(work, handed.rank, self.timeout)

    def serve(self, stage: int, part: int, backward: bool) -> None:
        """Make what the stage's rank asks for, until its pass is over."""
        home, tag, sent = self.homes[stage], self._tags[stage, part, backward], list[Any]()
        while (given := self.receive(home, tag)) is not None:
            sent += self.send(home, tag + 1, _gradients(given) if backward else _attention(given))
        for work, _ in sent:
            self.wires.wait(work, home, self.timeout)

    def help(self, action: Action) -> None:
        """The pass of a helper: `serve`, in a thread where the rank goes on. Whoever waits for it must hear of what went
        wrong there."""
        at, where = (action.stage, action.part, action.kind == "BH"), f"rank {self.wires.rank}, pass {action.name}"
        if not action.goes_on:
            return self.serve(*at)

        def serving() -> None:
            try:
                self.serve(*at)
            except LostRank as error:
                self.peers.stop(LostRank(f"{where}: {error}", error.peer))
            except Exception as error:
                self.peers.stop(RunFailed(f"{where}: {one_line(error)}"))

        self._begun[action.name] = self._threads.submit(serving)

    def ended(self, name: str) -> int:
        """Wait until pass `name` has served, where that was only begun: 0, for its rank spent no time on that. Raises what
        stopped it."""
        if name in self._begun:
            self._begun.pop(name).result()
        if self.peers.thread_error is not None:
            raise self.peers.thread_error
        return 0

    def send(self, rank: int, tag: int, tensors: Sequence[Tensor] | None) -> list[tuple[Any, Tensor]]:
        """Begin to send tensors, all as one message behind what says their sizes, or that nothing more comes. What is under
        way, with what must stay until then."""
        value, form = list(tensors or ()), None if tensors is None else Format.of(list(tensors))
        text = b" " * FORMAT_BYTES if form is None else form.dumps()
        head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = [head] if form is None else [head, form.pack(value, CPU)]
        return [(_begun(self.wires.control.send, row, rank, tag), row) for row in rows]

    def receive(self, rank: int, tag: int) -> list[Tensor] | None:
        """The tensors that come next; None: nothing more."""
        head = torch.zeros(FORMAT_BYTES, dtype=torch.uint8)
        self.wires.wait(_begun(self.wires.control.recv, head, rank, tag), rank, self.timeout)
        text = head.numpy().tobytes().strip()
        if not text:
            return None
        form = Format.loads(text)
        row = form.buffer(CPU)
        self.wires.wait(_begun(self.wires.control.recv, row, rank, tag), rank, self.timeout)
        tensors: list[Tensor] = form.unpack(row)
        return tensors


class Helping:
    """A pass's own end of it. sent: what is under way."""

    def __init__(self, peers: AttentionPeers, handed: HandedOver, tag: int) -> None:
        self.peers, self.handed, self.tag, self.sent = peers, handed, tag, list[Any]()

    def ask(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores, more: Sequence[Tensor] = ()) -> None:
        """Ask for the attention of queries to keys and values, or with more (the gradient of the whole's output, that and
        its statistics) for the gradients."""
        self.sent += self.peers.send(self.handed.rank, self.tag, asked(query, key, value, scores, more))

    def answer(self) -> list[Tensor]:
        """Output and statistics, or gradients of queries, keys and values."""
        return self.peers.receive(self.handed.rank, self.tag + 1) or []


def _begun(begin: Callable[[list[Tensor], int, int], Any], tensor: Tensor, rank: int, tag: int) -> Any:
    """A message that is sent or received from now on: the work object. Raises LostRank."""
    try:
        return begin([tensor], rank, tag)
    except Exception as error:
        raise LostRank(f"waiting for rank {rank}: {reason(error)}", rank) from None


def asked(query: Tensor, key: Tensor, value: Tensor, scores: Scores, more: Sequence[Tensor] = ()) -> list[Tensor]:
    """What is asked for (see `Helping.ask`), as tensors."""
    scale = torch.tensor([scale_of(query, scores)], dtype=torch.float64)
    return [scale, query, key, value, *more, *([] if scores.mask is None else [scores.mask])]


def _scores(scale: Tensor, mask: Sequence[Tensor]) -> Scores:
    return Scores(float(scale), False, mask[0] if mask else None)


def _attention(given: Sequence[Tensor]) -> Attended:
    scale, query, key, value, *mask = given
    return partial_attention(query, key, value, _scores(scale, mask))


def _gradients(given: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    scale, query, key, value, gradient, out, lse, *mask = given
    return partial_gradients(gradient, Attended(out, lse), query, key, value, _scores(scale, mask))


def _check_help(graph: Graph, rows: Ints) -> None:
    """It has the parts that it helps."""
    for _, helper in graph.each(rows):
        for kind in ("Q", "A"):
            graph.need(helper.kind[0] + kind, helper)


_PART = Handler(lambda *_: None, only_time=True, sliced=True, before_its_pass=True)  # F or B, which comes behind, does it
_HELP = Handler(
    lambda state, action, _: state.part(AttentionPeers).help(action),
    _check_help,
    sliced=True,
    ended=lambda state, action: state.part(AttentionPeers).ended(action.name),
)
HANDLERS = dict.fromkeys(("FQ", "FA", "BQ", "BA"), _PART) | {kind: replace(_HELP, helps=of) for kind, of in HELPS.items()}
