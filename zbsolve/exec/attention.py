"""Attention that ranks compute for each other while a stage's forward or backward runs (see `build.attention_exchange`).

A pass with a helper asks it at each call of attention: it sends queries and some of the earlier keys and values, computes
the rest, and combines the results. The pass F or B does all of this; the parts of it that come before do nothing. Where the
parts directly precede their pass, the helper's rank serves until that pass is over. Else a pass between them may wait for
what the helper's rank does next, so the rank goes on and a thread serves, from the helper's place in the order on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..build.attention_exchange import HandedOver, handed_over
from ..problem import Problem
from ..util.errors import BadInput, LostRank, RunFailed, one_line
from .base.handler import Handler
from .base.part import Part, RankState, Run
from .base.program import Action
from .connecting import Connecting
from .slices.attention import Attended, Scores, partial_attention, partial_gradients, scale_of
from .slices.stage import Slices
from .transport.format import begin_value, receive_value
from .transport.peers import Peers
from .transport.wires import Wires

HELPS = {"FH": ("F",), "BH": ("B", "BW")}  # kind of helper → kinds of passes that it helps
FIRST_TAG = 71  # the first of two tags for each helped pass, to its helper and back; no other message has them


class AttentionPeers(Part):
    """One rank's exchange of attention, over the pipeline's connections. handed: see `handed_over`; homes: stage → rank."""

    name = "attention exchange"

    def __init__(self, peers: Peers, wires: Wires, problem: Problem) -> None:
        self.peers, self.wires, self.timeout = peers, wires, peers.timeout
        self.handed, self.homes = handed_over(problem), problem.routes[0]
        self._tags = {at: FIRST_TAG + 2 * i for i, at in enumerate(self.handed)}
        self._threads = ThreadPoolExecutor(max(1, len(self.handed)), "attention")  # a thread for each helped pass
        self._begun: dict[str, Future[None]] = {}

    @classmethod
    def of(cls, c: Connecting) -> AttentionPeers | None:
        """The part of a rank; None where no rank helps another. Raises BadInput on a GPU, where this does not run."""
        if not HELPS.keys() & set(c.problem.passes.kinds):
            return None
        if c.device.type != "cpu":
            raise BadInput(f"Pipeline: attention for other ranks runs on CPUs alone, and this is the device {c.device}")
        return cls(c.peers, c.wires, c.problem)

    def around(self, kind: str, run: Run) -> Run:
        """While a pass with a helper runs, its slices ask the helper for a part of their attention."""
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
        """Inside, a pass runs that a helper serves; the helper is done afterwards."""
        at = stage, part, backward
        handed, tag = self.handed[at], self._tags[at]
        helping = Helping(self, handed, tag)
        yield helping
        helping.sent += self.send(handed.rank, tag, None)  # tells the helper that nothing more comes
        for work, _ in helping.sent:
            self.wires.wait(work, handed.rank, self.timeout)

    def serve(self, stage: int, part: int, backward: bool) -> None:
        """Compute what the stage's rank asks for, until its pass is over."""
        home, tag, sent = self.homes[stage], self._tags[stage, part, backward], list[Any]()
        while (given := receive_value(self.wires, home, tag=tag, timeout=self.timeout)) is not None:
            sent += self.send(home, tag + 1, (_gradients if backward else _attention)(*given))
        for work, _ in sent:
            self.wires.wait(work, home, self.timeout)

    def help(self, action: Action) -> None:
        """The pass of a helper: `serve`, in a thread if the rank goes on. An error in the thread must reach the ranks that
        wait."""
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
        """Wait until pass `name` has served, if it does so in a thread. Returns 0, as its rank spent no time on it. Raises
        the thread's error."""
        if name in self._begun:
            self._begun.pop(name).result()
        if self.peers.thread_error is not None:
            raise self.peers.thread_error
        return 0

    def send(self, rank: int, tag: int, value: Any) -> list[tuple[Any, Tensor]]:
        """Start to send a value (see `begin_value`)."""
        return begin_value(self.wires, value, rank, tag=tag)


class Helping:
    """The asking end of the exchange, for one pass. sent: messages in transit."""

    def __init__(self, peers: AttentionPeers, handed: HandedOver, tag: int) -> None:
        self.peers, self.handed, self.tag, self.sent = peers, handed, tag, list[Any]()

    def ask(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores, more: Sequence[Tensor] = ()) -> None:
        """Ask for the attention of queries to keys and values; or, with `more` (the gradient of the whole output, the output
        and its statistics), for the gradients."""
        asked = scale_of(query, scores), scores.mask, query, key, value, *more
        self.sent += self.peers.send(self.handed.rank, self.tag, asked)

    def answer(self) -> Sequence[Tensor]:
        """The output and its statistics, or the gradients of queries, keys and values."""
        wires, limit = self.peers.wires, self.peers.timeout
        return receive_value(wires, self.handed.rank, tag=self.tag + 1, timeout=limit)


def _attention(scale: float, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
    return tuple(partial_attention(query, key, value, Scores(scale, False, mask)))


def _gradients(scale: float, mask: Tensor | None, *tensors: Tensor) -> Sequence[Tensor]:
    query, key, value, gradient, out, lse = tensors
    return partial_gradients(gradient, Attended(out, lse), query, key, value, Scores(scale, False, mask))


_PART = Handler(lambda *_: None, only_time=True, in_parts=True, before_its_pass=True)  # the F or B after it does its work
_HELP = Handler(
    lambda state, action, _: state.part(AttentionPeers).help(action),
    in_parts=True,
    ended=lambda state, action: state.part(AttentionPeers).ended(action.name),
)
HANDLERS = dict.fromkeys(("FQ", "FA", "FS", "FR", "BQ", "BA", "BS", "BR"), _PART)
HANDLERS |= {"FH": replace(_HELP, orders=("FQ", "FA")), "BH": replace(_HELP, orders=("BQ", "BA"))}
