"""Attention that ranks make for each other while a stage's forward or backward runs (see `build.attention_exchange`).

A pass that hands attention over asks its helper at each call of attention: it sends queries and some of the earlier keys and
values, goes on with the others, and takes in what comes back. All its work is done behind its parts, where F or B is.

Where the parts of that pass come in one go on its rank, the helper serves it until it is over: both wait for each other no
longer than the graph says. Else other passes come between, and one of them may wait for what the helper does next. So the
helper's rank goes on then, and a thread serves the pass whenever it asks, no earlier than the schedule has the helper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..build.attention_exchange import HandedOver, handed_over
from ..problem import Problem
from ..tables import Ints, pass_name
from ..util.errors import BadInput
from .base.handler import Graph, Handler
from .base.part import Part, RankState, Run
from .base.program import Action
from .connecting import Connecting
from .slices.attention import Attended, Scores, partial_attention, partial_gradients, scale_of
from .slices.stage import Slices
from .transport.failure import LostRank, RunFailed, one_line
from .transport.format import Format
from .transport.peers import Peers
from .transport.wires import CPU, reason

HELPERS = {"F": "FH", "B": "BH", "BW": "BH"}  # kind of pass → of its helper
KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64)
MOST_TENSORS, MOST_DIMENSIONS = 8, 4
HEAD = 1 + MOST_TENSORS * (2 + MOST_DIMENSIONS)  # numbers: how many tensors come; of each its kind, dimensions, and sizes
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
        if not {"FH", "BH"} & set(c.problem.passes.kinds):
            return None
        if c.device.type != "cpu":
            raise BadInput(f"Pipeline: attention for other ranks runs on CPUs alone, and this is the device {c.device}")
        return cls(c.peers, c.problem)

    def around(self, kind: str, run: Run) -> Run:
        """While a pass runs that has a helper, its slices ask that one for a part of their attention."""
        helper = HELPERS.get(kind)
        if helper is None:
            return run

        def helped(state: RankState, action: Action, given: Any) -> Any:
            if helper not in action.companions:
                return run(state, action, given)
            with state.part(Slices).slices[action.stage].helped(self.helping(action.stage, action.part, helper == "BH")):
                return run(state, action, given)

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

    def begin_serving(self, name: str, stage: int, part: int, backward: bool) -> None:
        """Begin to `serve`, as pass `name`: what has come of it is for `ended` to say."""
        self._begun[name] = self._threads.submit(self._serve_or_stop, name, stage, part, backward)

    def _serve_or_stop(self, name: str, stage: int, part: int, backward: bool) -> None:
        """`serve` in a thread: whoever waits for this rank must hear of what went wrong."""
        where = f"rank {self.wires.rank}, pass {name}"
        try:
            self.serve(stage, part, backward)
        except LostRank as error:
            self.peers.stop(LostRank(f"{where}: {error}", error.peer))
        except Exception as error:
            self.peers.stop(RunFailed(f"{where}: {one_line(error)}"))

    def ended(self, name: str) -> None:
        """Wait until pass `name` has served, where that was only begun. Raises what stopped it."""
        if name in self._begun:
            self._begun.pop(name).result()
        if self.peers.thread_error is not None:
            raise self.peers.thread_error

    def send(self, rank: int, tag: int, tensors: Sequence[Tensor] | None) -> list[tuple[Any, Tensor]]:
        """Begin to send tensors, all as one message behind what says their sizes, or that nothing more comes. What is under
        way, with what must stay until then."""
        numbers = [-1 if tensors is None else len(tensors)]
        for one in tensors or ():
            numbers += [KINDS.index(one.dtype), one.dim(), *one.shape, *[0] * (MOST_DIMENSIONS - one.dim())]
        head = torch.tensor(numbers + [0] * (HEAD - len(numbers)))
        whole = [head] if tensors is None else [head, Format.of(list(tensors)).pack(list(tensors), CPU)]
        return [(_begun(self.wires.control.send, one, rank, tag), one) for one in whole]

    def receive(self, rank: int, tag: int) -> list[Tensor] | None:
        """The tensors that come next; None: nothing more."""
        head = torch.zeros(HEAD, dtype=torch.int64)
        self.wires.wait(_begun(self.wires.control.recv, head, rank, tag), rank, self.timeout)
        count, *numbers = head.tolist()
        if count < 0:
            return None
        shapes = list[Tensor]()
        for at in range(0, count * (2 + MOST_DIMENSIONS), 2 + MOST_DIMENSIONS):
            kind, dimensions = numbers[at : at + 2]
            shapes.append(torch.empty(numbers[at + 2 : at + 2 + dimensions], dtype=KINDS[kind], device="meta"))
        sent = Format.of(shapes)
        row = sent.buffer(CPU)
        self.wires.wait(_begun(self.wires.control.recv, row, rank, tag), rank, self.timeout)
        found: list[Tensor] = sent.unpack(row)
        return found


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
        found = self.peers.receive(self.handed.rank, self.tag + 1)
        assert found is not None
        return found


def _begun(begin: Callable[[list[Tensor], int, int], Any], one: Tensor, rank: int, tag: int) -> Any:
    """A message that is sent or received from now on: the work object. Raises LostRank."""
    try:
        return begin([one], rank, tag)
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


def _part(state: RankState, action: Action, given: Any) -> Any:
    """F or B, which comes behind, does it."""
    return None


def _help(state: RankState, action: Action, given: Any) -> Any:
    at = action.stage, action.part, action.kind == "BH"
    if action.goes_on:
        state.part(AttentionPeers).begin_serving(action.name, *at)
    else:
        state.part(AttentionPeers).serve(*at)
    return None


def _ended(state: RankState, action: Action) -> int:
    """Its rank spent no time on what it served while other passes ran there."""
    state.part(AttentionPeers).ended(action.name)
    return 0


def _check_help(graph: Graph, rows: Ints) -> None:
    """It has the parts that it helps."""
    for row in rows.tolist():
        one = graph.one(row)
        for kind in ("Q", "A"):
            graph.need(one.kind[0] + kind, one)


def helped_passes(problem: Problem) -> Ints:
    """Rows of helpers and of the passes that they help, shape (helpers, 2)."""
    found, rows = [], problem.rows("FH", "BH") if {"FH", "BH"} & set(problem.passes.kinds) else np.zeros(0, np.int64)
    for row in rows.tolist():
        one = problem.passes[row]
        kinds = ("F",) if one.kind == "FH" else ("B", "BW")
        names = (pass_name(kind, one.stage, one.microbatch, one.slice) for kind in kinds)
        found.append((row, next(problem.index[name] for name in names if name in problem.index)))
    return np.array(found, np.int64).reshape(-1, 2)


_PART = Handler(_part, only_time=True, sliced=True, before_its_pass=True)
_HELP = Handler(_help, _check_help, sliced=True, ended=_ended)
HANDLERS = {**dict.fromkeys(("FQ", "FA", "BQ", "BA"), _PART), **dict.fromkeys(("FH", "BH"), _HELP)}
