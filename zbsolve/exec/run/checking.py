"""A run's first step against the unsplit model in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...models.by_name import load
from ...models.model import Model
from ...util.errors import BadInput
from .. import check
from ..backward.replay import as_written
from ..base.part import Data
from ..base.values import cast
from ..connecting import Update
from ..feed import moved, step_seed
from ..layers import forwards_alone
from ..mesh import PipelineMesh, group_along
from ..one_device import OneDevice
from ..pipeline import Pipeline
from ..verdict import Others, compare

Verdict = dict[str, Any]
SHAKES = 8  # each sees a sum that lies beside a kink on its other side with a chance of some half
SHAKE_SECONDS = 60.0  # after which no further one begins: the other ranks wait meanwhile, and not for ever


def mean_over_data(pipeline: Pipeline | OneDevice, losses: Sequence[float]) -> list[float]:
    """The mean of each over all data coordinates. All ranks call this."""
    if pipeline.mesh is None or pipeline.mesh.replicas is None:
        return list(losses)
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total, group=pipeline.mesh.replicas)
    return (total / pipeline.mesh.places).tolist()


def checked(pipeline: Pipeline | OneDevice, model: Model, seed: int, update: Update, loss: float) -> Verdict | None:
    """Compare the first step with the unsplit model, before anything was updated; where the step itself updates, its weights
    with those of its rule in one process. The verdict, on rank 0 of the first pipeline. All ranks call this. seed: of
    parameters and batches. update: makes an optimizer of parameters. loss: of the step. Gradients are whole, whatever mesh
    they are spread over. Along data dimensions all pipelines have the same ones; along others each is compared, and the
    verdict is that of the worst."""
    whole, right, mesh, counts = None, 0.0, pipeline.mesh, None
    what = check.weight if pipeline.view.step.round > 0 else check.gradient
    pipeline.wait_gradients()
    (loss,) = mean_over_data(pipeline, [loss])
    mine, shards = check.values(pipeline.layers, what), pipeline.vocabulary.values(what)
    mine |= {place: value for place, value in shards.items() if place[0] in pipeline.layers}
    if mesh is not None and mesh.place:
        return None  # the first pipeline's gradients are everybody's
    places = 1 if mesh is None else mesh.places
    if pipeline.rank == 0:
        with as_written():  # as all modules run where bytes are counted, so in the first step
            whole, right, counts = _reference(pipeline, load(model.name, seed), seed, update, places)

    def exact() -> list[torch.nn.Module] | None:
        """The reference in float64; None where the model cannot run in it."""
        try:
            with as_written(), check.SingleConstants():
                return _reference(pipeline, load(model.name, seed), seed, update, places, torch.float64)[0]
        except Exception:  # somebody's model or loss may take float32 alone
            return None

    def shaken() -> Iterator[list[torch.nn.Module]]:
        """References with weights that are rounded otherwise."""
        until = time.monotonic() + SHAKE_SECONDS
        for number in range(1, SHAKES + 1):
            if number > 1 and time.monotonic() > until:
                return
            with as_written():
                found = _reference(pipeline, load(model.name, seed), seed, update, places, shake=number)[0]
            yield found

    verdict = compare(pipeline.wires, pipeline.owners, mine, whole, (loss, right), what, Others(exact, shaken))
    if verdict is not None and mesh is not None:
        verdict = _worst(verdict, mesh)
    if verdict is None or counts is None:
        return verdict
    return verdict | {"loss_of_rows": {"add_up": counts.add_up, "uneven": counts.uneven}}


def _worst(verdict: Verdict, mesh: PipelineMesh) -> Verdict:
    """The worst of the verdicts along the dimensions beside pipeline and data; it says where it is."""
    group = group_along(mesh.whole, mesh.others)
    if group is None:
        return verdict
    verdicts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(verdicts, verdict | {"where": f"{verdict['where']} ({mesh.coordinate})"}, group=group)
    worst: Verdict = max(verdicts, key=lambda one: (not one["passed"], one["worst"] / one["limit"]))
    return worst


def _reference(
    pipeline: Pipeline | OneDevice,
    other: Model,
    seed: int,
    update: Update,
    places: int,
    kind: torch.dtype | None = None,
    shake: int = 0,
) -> tuple[list[torch.nn.Module], float, check.RowCounts | None]:
    """The layers of the unsplit model after its first step on the batches of all places, the loss of that step, and
    `row_counts` before it. other: the model anew, so its parameters are the starting ones. kind: of its
    parameters and batches, if not their own. shake: its parameters are moved by roundings (see `check.shake`), each time
    otherwise; 0: they are not. Raises BadInput."""
    problem = pipeline.view.step
    whole = [layer.to(pipeline.device, kind) for layer in other.build()]
    trained = {id(p) for p in pipeline.parameters()}
    if any(id(p) in trained for layer in whole for p in layer.parameters()):
        raise BadInput(f"model '{other.name}': its function must make new layers on every call, for the check")
    if shake:
        check.shake(whole, shake)
    batches = {m: other.batch(m, 0) for m in range(places * len(pipeline.microbatches))}
    inputs, targets = ({m: cast(moved(pair[i], pipeline.device), kind) for m, pair in batches.items()} for i in range(2))
    data = Data(inputs, targets, step_seed(seed, 0))
    counts = check.row_counts(whole, data, other.loss) if kind is None and not shake else None
    if not problem.round:
        return whole, check.reference(whole, data, other.loss, backward=not forwards_alone(problem)), counts
    cuts = [sum(pipeline.counts[:s]) for s in range(len(pipeline.counts) + 1)]
    stages = [whole[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    return whole, check.updated(problem, stages, data, other.loss, update), counts
