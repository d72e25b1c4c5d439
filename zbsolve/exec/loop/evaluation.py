"""Evaluation: forwards alone, over the same ranks and wires as training. No gradient is made or touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...util.errors import BadInput
from ..assembly import device_and_mailbox
from ..backward.replay import Replay
from ..backward.stage import ForwardStage
from ..base.part import Data, Hooks, RankState
from ..base.values import joined
from ..feed import Batch, ShapeNumbers, agreed_shares, cut, first_tensor, in_microbatches, moved, step_seed
from ..interpreter import Interpreter
from ..lowering import lower
from ..rank import RankRunner
from ..reports import Reports, Table
from ..sides import reading
from ..transport.format import receive_value, send_value
from ..transport.peers import together
from ..waits import check_ends
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
    total, _ = _ran(pipeline, batch, with_loss=True)
    # Coordinates that are not of data have the same part.
    loss, rows = beside(pipeline, (total, sum(batch.rows.values())), WHAT).sum(0).tolist()
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
    _, own = _ran(pipeline, batch, with_loss=False)
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


def _ran(pipeline: OnRank, batch: _Batch, *, with_loss: bool) -> tuple[float, dict[int, Any]]:
    """Run the batch in rounds of at most as many microbatches as a step has. The sum of all ranks' losses, and what the last
    stage made of microbatches here, without a loss."""
    pipeline.finish()
    most, device, cutting = pipeline.view.microbatches, pipeline.device, pipeline.cutting
    total, seen, outputs = 0.0, None, dict[int, Any]()
    with _eval_mode(pipeline.module), Replay([pipeline.module]).random_kept():
        for start in range(0, batch.count, most):
            count = min(most, batch.count - start)
            if (count, with_loss) not in pipeline.rounds:
                pipeline.rounds[count, with_loss] = _round(pipeline, count, with_loss)
            forwards = pipeline.rounds[count, with_loss]
            program, state = forwards.interpreter.program, forwards.interpreter.state
            first = {m: moved(batch.inputs[start + m], device) for m in program.inputs}
            last = {m: moved(batch.targets[start + m], device) for m in program.targets} if with_loss else {}
            rows = {m: batch.rows[start + m] for m in range(count)} if with_loss else {}
            seed = step_seed(pipeline.seed, pipeline.steps) + start * cutting.count
            parts = cutting.parts(first, "inputs"), cutting.parts(last, "targets")
            forwards.last = seen  # no rank runs ahead of the others by more than a round
            report = forwards.run(cutting.data(*parts, seed, rows, pipeline.counting), device, False).seen
            total, seen = total + (0.0 if seen is None else seen.total), report
            made = {m: y for stage in state.stages.values() for m, y in stage.outputs.items()}
            outputs |= {start + m: y for m, y in cutting.joined(made).items()}
            forwards.last = None  # here and below: keep nothing of the batch
            forwards.interpreter.begin(Data({}, {}))
            for stage in state.stages.values():
                stage.outputs.clear()
    return total + (0.0 if seen is None else seen.total), outputs


def _round(pipeline: OnRank, count: int, with_loss: bool) -> RankRunner:
    """Runs the forwards of `count` microbatches, at most as many as a step has, to their losses or to their outputs, in the
    order that the schedule gives them, with messages of their own."""
    view, peers, known = pipeline.view.forwards(count), pipeline.peers, pipeline.hooks
    programs = lower(view, training=False)
    check_ends(programs, pipeline.device)
    program = reading(programs[view.ranks.index(pipeline.rank)], {s: stage.layers for s, stage in pipeline.stages.items()})
    gpu, mailbox = device_and_mailbox(peers, program, pipeline, known)
    stages = {s: ForwardStage(stage, with_loss, s == view.step.stages - 1) for s, stage in pipeline.stages.items()}
    features = [part for feature in pipeline.parts if (part := feature.for_forwards(stages)) is not None]
    hooks = Hooks(announce=known.announce, watch=known.watch)
    return RankRunner(
        module=pipeline.module,
        peers=peers,
        mailbox=mailbox,
        interpreter=Interpreter(program, RankState(stages, features), mailbox, hooks),
        reports=Reports(view, Table(view.schedule, (), (), False, gpu is not None), peers, 0),
        gpu=gpu,
        shapes=ShapeNumbers(view.step.routes, range(count * pipeline.cutting.count), pipeline.rank, peers.wires.size),
    )


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    training = [inner for inner in module.modules() if inner.training]
    module.eval()
    try:
        yield
    finally:
        for inner in training:
            inner.training = True


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
