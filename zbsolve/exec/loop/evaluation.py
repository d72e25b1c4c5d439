"""Evaluation: forward passes alone, on the same ranks and connections as training. No gradient is made or touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...models.model import in_eval_mode
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
    """The mean loss of a batch, on every rank. On a mesh it is the mean over all data coordinates; with replicas it is of
    this pipeline's batch. Every rank calls this.

    inputs, targets: a tensor with any number of rows, or a list of microbatches; every row of `targets` has the same weight.
    Ranks of the first stage read inputs, ranks of the last stage targets. If a layer of theirs is on all ranks, all ranks
    read them. microbatches: the number that a tensor is split into; by default, that of a training step. Layers run in eval
    mode; afterwards they have their former mode again. Raises BadInput on all ranks together, and RunFailed as `step` does.
    """
    batch = _Batch.of(pipeline, inputs, targets, microbatches, with_loss=True)
    total, _ = _ran(pipeline, batch, with_loss=True)
    # Coordinates along other dimensions than data have the same rows: they change no mean.
    loss, rows = beside(pipeline, (total, sum(batch.rows.values())), WHAT).sum(0).tolist()
    return float(loss / rows)


def forward(
    pipeline: OnRank, inputs: Batch | None = None, *, microbatches: int | None = None, everywhere: bool = False
) -> Any:
    """The model's outputs for a batch: on ranks of the last stage, or `everywhere`; None on other ranks. On a mesh each data
    coordinate has those of its own part. Every rank calls this.

    inputs: a tensor with any number of rows, which gives a tensor, or a list of microbatches, which gives a list; ranks of
    the first stage read it. Everything else is as in `evaluate`.
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
    """A batch in microbatches. inputs, targets: all microbatches, on ranks that need any; else empty. count: their number.
    listed: inputs were given as a list. rows: microbatch → rows of its targets, known on all ranks, as layers on any rank
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
        """Split the batch; all ranks agree on the number of microbatches. Raises BadInput on all ranks."""
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
    """Run the batch in rounds of at most as many microbatches as a step has. Returns the sum of all ranks' losses and,
    without a loss, microbatch → the outputs that the last stage made on this rank."""
    pipeline.finish()
    most, device, cutting = pipeline.view.microbatches, pipeline.device, pipeline.cutting
    total, seen, outputs = 0.0, None, dict[int, Any]()
    with in_eval_mode(pipeline.module), Replay([pipeline.module]).random_kept():
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
            forwards.last = seen  # `run` waits for it: no rank gets more than a round ahead
            report = forwards.run(cutting.data(*parts, seed, rows, pipeline.counting), device, False)
            total, seen = total + (0.0 if seen is None else seen.total), report
            made = {m: y for stage in state.stages.values() for m, y in stage.outputs.items()}
            outputs |= {start + m: y for m, y in cutting.joined(made).items()}
            forwards.last = None  # here and below: free all that belongs to the batch
            forwards.interpreter.begin(Data({}, {}))
            for stage in state.stages.values():
                stage.outputs.clear()
    return total + (0.0 if seen is None else seen.total), outputs


def _round(pipeline: OnRank, count: int, with_loss: bool) -> RankRunner:
    """What runs the forwards of `count` microbatches (at most as many as a step has) in the schedule's order, to their
    losses or to their outputs, with a mailbox of its own."""
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


def handed_out(pipeline: OnRank, own: Mapping[int, Any], owners: Sequence[int], takers: Sequence[int]) -> dict[int, Any]:
    """microbatch → output of all `owners`, on each of the `takers`. own: this rank's. Owners and takers call this; other
    ranks may. Raises LostRank."""
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
