"""Evaluation: forwards alone, over the same ranks and wires as training. No gradient is made or touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...util.errors import BadInput
from ..assembly import device_and_mailbox
from ..backward.replay import Replay
from ..backward.stage import ForwardStage
from ..base.part import Data, Hooks, RankState, sum_of
from ..base.values import joined
from ..device.rank_device import RankDevice
from ..feed import Batch, ShapeNumbers, agreed_shares, cut, first_tensor, in_microbatches, moved, step_seed
from ..interpreter import Interpreter
from ..lowering import lower
from ..sides import reading
from ..slices.cutting import Cutting
from ..transport.format import receive_value, send_value
from ..transport.mailbox import Mailbox
from ..transport.peers import Peers, together
from .gradients import OnRank, beside

WHAT = "evaluation"


def evaluate(
    pipeline: OnRank, inputs: Batch | None = None, targets: Batch | None = None, *, microbatches: int | None = None
) -> float:
    """The mean loss of a batch, on every rank; on a mesh over the parts of all data coordinates, with replicas of this
    pipeline's batch. Every rank calls this.

    inputs, targets: a tensor of any number of rows, or a list of microbatches; every row of `targets` counts alike. Inputs
    are read on ranks of the first stage, targets on those of the last; with a sharded vocabulary targets on all ranks, and
    inputs too where the embedding is sharded. microbatches: into how many a tensor is cut (as many as a step has, where
    nothing is said). Layers run in eval mode, and are put back into theirs. Raises BadInput on all
    ranks together, and RunFailed as `step` does.
    """
    batch = _Batch.of(pipeline, inputs, targets, microbatches, with_loss=True)
    total = _Total(pipeline.peers)
    for _, forward_round in _ran(pipeline, batch, with_loss=True):
        total.add(forward_round.loss)
    # Coordinates that are not of data have the same part.
    loss, rows = beside(pipeline, (total.whole(), sum(batch.rows.values())), WHAT).sum(0).tolist()
    return float(loss / rows)


def forward(
    pipeline: OnRank, inputs: Batch | None = None, *, microbatches: int | None = None, everywhere: bool = False
) -> Any:
    """The model's outputs for a batch: on ranks of the last stage, or `everywhere`; None on other ranks. On a mesh for this
    coordinate's part of it. Every rank calls this.

    inputs: a tensor of any number of rows, which gives a tensor, or a list of microbatches, which gives a list; read on
    ranks of the first stage. All else is as in `evaluate`.
    """
    batch = _Batch.of(pipeline, inputs, None, microbatches, with_loss=False)
    total, own = _Total(pipeline.peers), dict[int, Any]()
    for start, forward_round in _ran(pipeline, batch, with_loss=False):
        own |= {start + m: y for m, y in forward_round.outputs.items()}
        total.add(0.0)  # no rank runs ahead of the others by more than a round
    total.whole()
    owners = pipeline.view.step.stage_ranks[-1]
    takers = range(pipeline.wires.size) if everywhere else owners
    with pipeline.peers.telling(WHAT):
        whole = handed_out(pipeline, own, owners, takers)
    if pipeline.rank not in takers:
        return None
    outputs = [whole[m] for m in range(batch.count)]
    return outputs if batch.listed else joined(outputs)


@dataclass(frozen=True)
class _Batch:
    """A batch in microbatches. inputs, targets: all of them, on ranks that need some; else empty. count: of microbatches.
    listed: inputs were given as a list. rows: of the targets of each microbatch, on all ranks, because layers of any rank
    may add to the loss; {} without a loss."""

    inputs: Sequence[Any]
    targets: Sequence[Any]
    count: int
    listed: bool
    rows: Mapping[int, float]

    @classmethod
    def of(
        cls, pipeline: OnRank, inputs: Batch | None, targets: Batch | None, microbatches: int | None, *, with_loss: bool
    ) -> _Batch:
        """What all ranks have of it; they agree on the number of microbatches. Raises BadInput on all ranks."""
        for part in pipeline.parts:
            if part.no_outputs and not with_loss:
                raise BadInput(f"forward: {part.no_outputs}")
        usual = pipeline.view.microbatches if microbatches is None else microbatches
        with together(pipeline.peers, WHAT):
            first = _parts(inputs, "inputs", usual) if pipeline.inputs else []
            last = _parts(targets, "targets", usual) if with_loss and pipeline.targets else []
            for what, rows in (("inputs", first), ("targets", last)):
                for row in rows:
                    pipeline.cutting.check(row, what)
        own = torch.tensor([len(first), len(last), bool(first) and in_microbatches(inputs)], dtype=torch.int64)
        everything = pipeline.peers.gathered(own, WHAT)
        counts = sorted({*everything[:, :2].ravel().tolist()} - {0})
        if len(counts) > 1:
            raise BadInput(f"inputs and targets: {' and '.join(map(str, counts))} microbatches: they must be as many")
        sizes = {m: float(len(first_tensor(target))) for m, target in enumerate(last)}
        known = agreed_shares(sizes, counts[0], pipeline.peers) if with_loss else {}
        return cls(first, last, counts[0], bool(everything[:, 2].any()), known)


def _parts(batch: Batch | None, what: str, usual: int) -> Sequence[Any]:
    if usual < 1:
        raise BadInput(f"microbatches: at least 1 is needed, got {usual}")
    if batch is None:
        raise BadInput(f"{what}: needed here")
    if not in_microbatches(batch):
        first = first_tensor(batch)
        return cut(batch, what, min(usual, len(first)) if first.dim() else usual, None)
    if not isinstance(batch, Sequence) or not batch:
        raise BadInput(f"{what}: give the whole batch, as a tensor or as a list of microbatches")
    return batch


def _ran(pipeline: OnRank, batch: _Batch, *, with_loss: bool) -> Iterator[tuple[int, ForwardRound]]:
    """Run the batch in rounds of at most as many microbatches as a step has. The number of its first microbatch, and each
    round."""
    pipeline.finish()
    most, device = pipeline.view.microbatches, pipeline.device
    with _eval_mode(pipeline.module), Replay([pipeline.module]).random_kept():
        for start in range(0, batch.count, most):
            count = min(most, batch.count - start)
            if (count, with_loss) not in pipeline.rounds:
                pipeline.rounds[count, with_loss] = ForwardRound.of(pipeline, count, with_loss)
            forwards, cutting = pipeline.rounds[count, with_loss], pipeline.cutting
            program = forwards.interpreter.program
            first = {m: moved(batch.inputs[start + m], device) for m in program.inputs}
            last = {m: moved(batch.targets[start + m], device) for m in program.targets} if with_loss else {}
            rows = {m: batch.rows[start + m] for m in range(count)} if with_loss else {}
            seed = step_seed(pipeline.seed, pipeline.steps) + start * cutting.count
            parts = cutting.parts(first, "inputs"), cutting.parts(last, "targets")
            forwards.run(pipeline, cutting.data(*parts, seed, rows, pipeline.counting))
            yield start, forwards
            forwards.clear()


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    training = [inner for inner in module.modules() if inner.training]
    module.eval()
    try:
        yield
    finally:
        for inner in training:
            inner.training = True


class _Total:
    """A number, added up over rounds and ranks. Each round's goes on its way while the next one runs."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._sum = 0.0
        self._coming: tuple[Any, torch.Tensor] | None = None

    def add(self, value: float) -> None:
        """A round's number of this rank. Waits until all ranks have ended the round before."""
        self.whole()
        self._coming = self._peers.wires.gather(torch.tensor([value], dtype=torch.float64))

    def whole(self) -> float:
        """The sum up to here, the same bits on every rank."""
        if self._coming is not None:
            (work, everything), self._coming = self._coming, None
            self._peers.wait(work, WHAT)
            for row in everything.tolist():
                self._sum += row[0]
        return self._sum


@dataclass(frozen=True, eq=False)
class ForwardRound:
    """The forwards of some microbatches in the order that the schedule gives them, with messages of their own. stages: this
    rank's, by number. cutting: how sequences are cut into slices. gpu: the device, where that is one."""

    stages: Mapping[int, ForwardStage]
    interpreter: Interpreter
    mailbox: Mailbox
    shapes: ShapeNumbers
    cutting: Cutting
    gpu: RankDevice | None = None

    @classmethod
    def of(cls, pipeline: OnRank, count: int, with_loss: bool) -> ForwardRound:
        """The round of `count` microbatches, at most as many as a step has, to their losses or to their outputs."""
        view, peers = pipeline.view.forwards(count), pipeline.peers
        program = lower(view, training=False)[view.ranks.index(pipeline.rank)]
        program = reading(program, {s: stage.layers for s, stage in pipeline.stages.items()})
        gpu, mailbox = device_and_mailbox(peers, program, pipeline, pipeline.hooks)
        stages = {s: ForwardStage(stage, with_loss, s == view.step.stages - 1) for s, stage in pipeline.stages.items()}
        hooks = Hooks(announce=pipeline.hooks.announce, watch=pipeline.hooks.watch)
        parts = range(count * pipeline.cutting.count)
        shapes = ShapeNumbers(view.step.routes, parts, pipeline.rank, peers.wires.size)
        features = [part for feature in pipeline.parts if (part := feature.for_forwards(stages)) is not None]
        interpreter = Interpreter(program, RankState(stages, features), mailbox, hooks)
        interpreter.marks = None if gpu is None else gpu.marks
        return cls(stages, interpreter, mailbox, shapes, pipeline.cutting, gpu)

    def run(self, pipeline: OnRank, data: Data) -> None:
        """Run it on `data`. Raises RunFailed naming rank, pass and cause."""
        peers, interpreter = pipeline.peers, self.interpreter
        actions = interpreter.program.actions
        with peers.telling(f"pass {actions[0].name}"):
            self.mailbox.begin(self.shapes.agree(self.mailbox, data.inputs, pipeline.device))
        with peers.telling("end of the evaluation"), nullcontext() if self.gpu is None else self.gpu.guarded():
            record = interpreter.begin(data)
            if self.gpu is not None:
                self.gpu.marks.stream = torch.cuda.current_stream(self.gpu.device)
                self.gpu.begin(record, self.gpu.marks, 0)
            interpreter.run_all(actions)
            self.mailbox.flush()
            for _ in interpreter.ended():
                pass  # collectives that no pass here waits for
            if self.gpu is not None:
                self.gpu.finish(record, self.gpu.marks)
            interpreter.end()

    @property
    def loss(self) -> float:
        """The sum of this rank's losses."""
        total = sum_of(self.interpreter.state.losses)
        return 0.0 if total is None else float(total)

    @property
    def outputs(self) -> dict[int, Any]:
        """Microbatch → what the last stage made of it here."""
        return self.cutting.joined({m: y for stage in self.stages.values() for m, y in stage.outputs.items()})

    def clear(self) -> None:
        """Keep nothing of the batch."""
        self.interpreter.begin(Data({}, {}))
        for stage in self.stages.values():
            stage.outputs.clear()


def handed_out(pipeline: OnRank, own: Mapping[int, Any], owners: Sequence[int], takers: Sequence[int]) -> dict[int, Any]:
    """The outputs of all `owners`, on each of the `takers`. own: this rank's, by microbatch. All of them call this, and
    others may. Raises LostRank."""
    wires, outputs, mesh = pipeline.peers.wires, dict(own), None if pipeline.mesh is None else pipeline.mesh.whole
    for owner in owners:
        for other in (rank for rank in takers if rank != owner):
            if pipeline.rank == owner:
                send_value(wires, list(own), other)
                for y in own.values():
                    send_value(wires, y, other, mesh)
            elif pipeline.rank == other:
                for m in receive_value(wires, owner):
                    outputs[m] = receive_value(wires, owner, pipeline.device, mesh)
    return outputs
