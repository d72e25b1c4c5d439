"""Passes as CUDA graphs, as a captured run replays them: the host launches each one at once, and is never late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from zbsolve.exec.backward.layer_split import seeding
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.values import trained
from zbsolve.exec.transport.failure import is_out_of_memory, one_line

from .stage_rounds import SAMPLED, TURNS, Feed

Around = Callable[[str, Callable[[], Any]], Any]  # runs a pass of this kind, and does something around it


class CapturedStage:
    """A stage whose passes replay graphs, turn by turn; it stands for the stage in `rounds`. A turn that cannot be captured
    runs as it is. All microbatches share the graphs' memory: times do not depend on numbers.

    x, target: what goes in, on a GPU. stream: what is captured is enqueued there. why: turn → why it is not captured.
    """

    def __init__(self, stage: Stage, x: Any, target: Any, stream: Any) -> None:
        self.first, self.loss = stage.first, stage.loss
        self.why: dict[str, str] = {}
        self._stage, self._given, self._stream = stage, (x, target), stream
        self._graphs: dict[str, dict[str, Any]] = {}
        self._turn = ""
        for turn in TURNS:
            try:
                self._graphs[turn] = self._captured(turn)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.why[turn] = one_line(error)
                stage.forget()

    def parameters(self) -> list[nn.Parameter]:
        """The stage's."""
        return self._stage.parameters()

    def forward(self, microbatch: int, x: Any, target: Any, *, split: bool, recompute: bool) -> Any:
        """F, which begins a turn."""
        self._turn = "recompute" if recompute else "split" if split else "fused"
        if self._replayed("F"):
            return self._graphs[self._turn]["output"]
        return self._stage.forward(microbatch, x, target, split=split, recompute=recompute)

    def recompute(self, microbatch: int) -> None:
        """X."""
        if not self._replayed("X"):
            self._stage.recompute(microbatch)

    def backward(self, microbatch: int, gradients: Any) -> Any:
        """B, or BW: of the gradients that were captured, whatever is given."""
        if self._replayed("B"):
            return self._graphs[self._turn]["gradients"]
        return self._stage.backward(microbatch, gradients)

    def weights(self, microbatch: int) -> None:
        """W."""
        if not self._replayed("W"):
            self._stage.weights(microbatch)

    def _replayed(self, kind: str) -> bool:
        graphs = self._graphs.get(self._turn)
        if graphs is not None:
            graphs[kind].replay()
        return graphs is not None

    def _captured(self, turn: str) -> dict[str, Any]:
        """Kind → graph of one turn, and the tensors that they read and make. The turn runs as it is before. Nothing is
        seeded, which a capture may not do: times are the same for any random numbers."""
        found: dict[str, Any] = {}
        pool = torch.cuda.graph_pool_handle()  # the turn's own: what F keeps is there until W

        def capture(kind: str, call: Callable[[], Any]) -> Any:
            graph = found[kind] = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)
            try:
                return call()
            finally:
                with suppress(RuntimeError):  # what broke the capture off says why
                    graph.capture_end()

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), seeding(lambda seed, number: None):
            self._run(turn, lambda kind, call: call(), {})
            torch.cuda.synchronize()
            self._run(turn, capture, found)
        return found

    def _run(self, turn: str, around: Around, found: dict[str, Any]) -> None:
        """One turn. found: gets what goes in and out."""
        stage, (x, target) = self._stage, self._given
        split, again = turn != "fused", turn == "recompute"
        y = found["output"] = around("F", lambda: stage.forward(0, x, target, split=split, recompute=again))
        given = found["given"] = None if self.loss is not None else [torch.ones_like(one) for one in trained(y)]
        if again:
            around("X", lambda: stage.recompute(0))
        found["gradients"] = around("B", lambda: stage.backward(0, given))
        if split:
            around("W", lambda: stage.weights(0))


def replayed(sets: Sequence[list[Stage]], feed: Feed) -> tuple[list[list[Any]], dict[tuple[int, str], str]]:
    """The same copies of stages with their passes captured; and (layer, kind) → why that could not be. feed: as `rounds` has
    it."""
    found: list[list[Any]] = []
    missing: dict[tuple[int, str], str] = {}
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for number, stages in enumerate(sets):
        x, target = feed(number, 0)
        found.append([])
        for stage in stages:
            one = CapturedStage(stage, x, target, stream)
            missing |= {(stage.first, kind): why for turn, why in one.why.items() for kind in SAMPLED[turn]}
            found[-1].append(one)
            x = stage.forward(0, x, target, split=False)
            stage.forget()
    return found, missing
