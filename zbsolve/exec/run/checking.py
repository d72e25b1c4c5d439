"""A run's first step against the unsplit model in one process: what ranks hold against it, and where float32 values differ,
against float64 and against what the unsplit model itself does with weights that are rounded otherwise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.by_name import load
from ...models.model import Model, Place
from ...util.errors import BadInput
from .. import check
from ..backward.replay import as_written
from ..base.part import Data, Part
from ..base.values import cast
from ..check import LIMITS, NOT_A_NUMBER, Value, difference, gradient, magnitude, values
from ..connecting import Update
from ..feed import moved, step_seed
from ..layers import forwards_alone
from ..mesh import PipelineMesh, group_along
from ..one_device import OneDevice
from ..pipeline import Pipeline
from ..slices.cutting import shares_of_rows
from ..transport.format import receive_value, send_value
from ..transport.wires import Wires, receive_bytes, send_bytes

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
    own, cut = values(pipeline.layers, what), pipeline.whole.values(what)
    own |= {place: value for place, value in cut.items() if place[0] in pipeline.layers}
    if mesh is not None and mesh.place:
        return None  # the first pipeline's gradients are everybody's
    reference = partial(_reference, pipeline, model.name, seed, update, 1 if mesh is None else mesh.places)
    if pipeline.rank == 0:
        with as_written():  # as all modules run where bytes are counted, so in the first step
            whole, right, counts = reference()

    def exact() -> list[nn.Module] | None:
        """The reference in float64; None where the model cannot run in it."""
        try:
            with as_written(), check.SingleConstants():
                return reference(torch.float64)[0]
        except Exception:  # somebody's model or loss may take float32 alone
            return None

    def shaken() -> Iterator[list[nn.Module]]:
        """References with weights that are rounded otherwise."""
        until = time.monotonic() + SHAKE_SECONDS
        for number in range(1, SHAKES + 1):
            if number > 1 and time.monotonic() > until:
                return
            with as_written():
                layers, *_ = reference(shake=number)
            yield layers

    rounding = max((part.rounding for part in _parts(pipeline)), default=0.0)
    verdict = compare(pipeline.wires, pipeline.owners, own, whole, (loss, right), what, Others(exact, shaken, rounding))
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
    return max(verdicts, key=lambda other: (not other["passed"], other["worst"] / other["limit"]))


def _reference(
    pipeline: Pipeline | OneDevice,
    spec: str,
    seed: int,
    update: Update,
    places: int,
    kind: torch.dtype | None = None,
    shake: int = 0,
) -> tuple[list[nn.Module], float, check.RowCounts | None]:
    """The layers of the unsplit model after its first step on the batches of all places, the loss of that step, and
    `row_counts` behind it. spec: the model's name: it is made anew, so its parameters are the starting ones. kind: of
    its parameters and batches, if not their own. shake: its parameters are moved by roundings (see `check.shake`), each time
    otherwise; 0: they are not. Raises BadInput."""
    problem, other = pipeline.view.step, load(spec, seed)
    whole = [layer.to(pipeline.device, kind) for layer in other.build()]
    trained = {id(p) for p in pipeline.parameters()}
    if any(id(p) in trained for layer in whole for p in layer.parameters()):
        raise BadInput(f"model '{other.name}': its function must make new layers on every call, for the check")
    if shake:
        check.shake(whole, shake)
    count, sizes = len(pipeline.microbatches), problem.sizes * places
    other = other.in_steps_of(places * count, sizes) if sizes else other
    batches = {m: other.batch(m, 0) for m in range(places * count)}
    inputs, targets = ({m: cast(moved(pair[i], pipeline.device), kind) for m, pair in batches.items()} for i in range(2))
    data = Data(inputs, targets, step_seed(seed, 0), shares_of_rows(sizes))
    if problem.round:
        cuts = [sum(pipeline.counts[:s]) for s in range(len(pipeline.counts) + 1)]
        stages = [whole[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        right = check.updated(problem, stages, data, other.loss, update)
    else:
        right = check.reference(whole, data, other.loss, backward=not forwards_alone(problem))
        for part in _parts(pipeline):
            part.change_whole(whole)
    # Not before: a forward may change buffers and generators, by which the next one goes.
    return whole, right, check.row_counts(whole, data, other.loss) if kind is None and not shake else None


def _parts(pipeline: Pipeline | OneDevice) -> Sequence[Part]:
    return pipeline.parts if isinstance(pipeline, Pipeline) else ()


MAX_ROUNDING = 1e-5  # what float32 may lie away from float64 at most
MAX_KINK = LIMITS[torch.bfloat16]  # the largest difference that a kink may explain
NOTHING = 1e-10  # of a layer's largest value: in float64 only sums that cancel leave less


class Others(NamedTuple):
    """What makes further references where float32 values differ by more than their limit. exact: the one in float64, or None
    where there is none: two right orders of summation may differ so (see `row`). shaken: those whose weights are rounded
    otherwise, where that does not do. A sum beside a kink (ReLU's at 0) that is rounded otherwise has another gradient, so a
    value may differ by twice what it moves there, and by no more than `MAX_KINK`. rounding: see `Part`."""

    exact: Callable[[], Sequence[nn.Module] | None] = lambda: None
    shaken: Callable[[], Iterator[Sequence[nn.Module]]] = lambda: iter(())
    rounding: float = 0.0


class Row(NamedTuple):
    """A difference: as a share of what is allowed, itself, its limit, where, how far (run, unsplit) are from float64, and by
    how much the unsplit model's own value moves where weights are rounded otherwise."""

    share: float
    difference: float
    limit: float
    where: str
    from_float64: Sequence[float] | None = None
    moves: float | None = None


def compare(
    wires: Wires,
    owners: Sequence[Sequence[int]],
    own: Mapping[Place, Value],
    whole: Sequence[nn.Module] | None,
    losses: tuple[float, float],
    what: Callable[[nn.Parameter], Tensor | None] = gradient,
    others: Others = Others(),  # noqa: B008 (immutable)
) -> dict[str, Any] | None:
    """The verdict, on rank 0; None on the others. All ranks of `wires` call this.

    Rank 0 holds `whole`, the reference with its gradients. The ranks in `owners[layer]` send it their own `values`, `own`.
    losses: (pipeline, reference), known on rank 0. what: `gradient` or `weight`. "worst" in the verdict is the largest
    difference over all tensors and the loss (see `difference`). others: asked for by rank 0 alone. Raises BadInput on rank 0
    where the two have other parameters.
    """
    if wires.rank:
        for layer in (layer for layer, ranks in enumerate(owners) if wires.rank in ranks):
            here = _of_layer(own, layer).items()
            send_value(wires, [(name, str(val.dtype).removeprefix("torch."), val.tensor) for (_, name), val in here], 0)
        receive_bytes(wires, 0)  # there is a verdict: till then rank 0 may have made further references
        return None
    assert whole is not None
    right = values(dict(enumerate(whole)), what)
    judged = _moving(_judged(wires, owners, own, right, others, what), right, others.shaken, what)
    for other in range(1, wires.size):
        send_bytes(wires, b"", other)
    pipeline, single = losses
    gap = abs(pipeline - single) / abs(single) if single else abs(pipeline)
    gap = gap if math.isfinite(pipeline) and math.isfinite(single) else NOT_A_NUMBER
    limit = max(LIMITS[torch.float32], others.rounding)
    rows = [*judged, Row(gap / limit, gap, limit, "loss")]
    failed = [diff for diff in rows if not diff.share <= 1]
    worst = max(failed, key=lambda diff: diff.share) if failed else max(rows, key=lambda diff: diff.difference / diff.limit)
    verdict = {
        "passed": not failed,
        "worst": worst.difference,
        "limit": worst.limit,
        "where": worst.where,
        "tensors": len(judged),
        "loss": pipeline,
        "reference_loss": single,
        "measure": f"max |{what.__name__} - reference| / max |reference| of a tensor; "
        "reference: the unsplit model in one process",
        "compared": what.__name__,
    }
    verdict |= {} if worst.from_float64 is None else {"from_float64": list(worst.from_float64)}
    return verdict | ({} if worst.moves is None else {"moves": worst.moves})


def _moving(
    rows: list[Row],
    right: Mapping[Place, Value],
    shaken: Callable[[], Iterator[Sequence[nn.Module]]],
    what: Callable[[nn.Parameter], Tensor | None],
) -> list[Row]:
    """The same rows; those that fail by how much the reference's own value moves, where that may explain all of them."""
    failed = {gap.where: gap for gap in sorted(rows, key=lambda gap: gap.difference) if not gap.share <= 1}
    if not failed or not all(_in_doubt(gap.difference, gap.limit) and gap.difference <= MAX_KINK for gap in failed.values()):
        return rows
    moves = dict.fromkeys(failed, 0.0)
    for model in shaken():
        for place, value in values(dict(enumerate(model)), what).items():
            if (where := f"layer {place[0]} {place[1]}") in moves:
                moves[where] = max(moves[where], difference(value.tensor, right[place].tensor))
        if all(gap.difference <= 2 * moves[where] for where, gap in failed.items()):
            break
    return [
        Row(gap.difference / (2 * by), *gap[1:5], by) if not gap.share <= 1 and (by := moves[gap.where]) > 0 else gap
        for gap in rows
    ]


def _judged(
    wires: Wires,
    owners: Sequence[Sequence[int]],
    own: Mapping[Place, Value],
    right: Mapping[Place, Value],
    others: Others,
    what: Callable[[nn.Parameter], Tensor | None],
) -> list[Row]:
    """All differences, of each layer on each of its ranks. right: the reference."""
    rows, doubts, wrong = list[Row](), list[tuple[int, Place, Tensor | None]](), ""
    for layer, owner in [(layer, owner) for layer, ranks in enumerate(owners) for owner in ranks]:
        here = _of_layer(own, layer)
        if owner:
            here = {(layer, name): Value(tensor, getattr(torch, kind)) for name, kind, tensor in receive_value(wires, owner)}
        for place in here.keys() ^ _of_layer(right, layer).keys():
            which = "which the unsplit model lacks" if place in here else "which only the unsplit model has"
            wrong = wrong or f"check: layer {layer}: parameter '{place[1]}', {which}"
        for place, value in here.items() if not wrong else ():
            away, limit = difference(value.tensor, right[place].tensor), max(LIMITS.get(value.dtype, 1e-5), others.rounding)
            if _in_doubt(away, limit):
                doubts.append((len(rows), place, value.tensor))
            rows.append(row(away, limit, f"layer {layer} {place[1]}"))
    if wrong:  # not before: ranks are sending
        raise BadInput(wrong)
    known = values(dict(enumerate((others.exact() if doubts else None) or ())), what)
    for number, place, tensor in doubts if known else ():
        # What cancels (the gradient of a key's bias: softmax does not change with it) is rounding in float32: it is measured
        # by the largest of the layer.
        single, double = right[place].tensor, known[place].tensor
        largest = max(magnitude(other.tensor) for other in _of_layer(known, place[0]).values())
        scale = largest if magnitude(double) <= NOTHING * largest else 0.0
        from_float64 = difference(tensor, double, scale), difference(single, double, scale)
        rows[number] = row(difference(tensor, single, scale), rows[number].limit, rows[number].where, from_float64)
    return rows


def _of_layer(held: Mapping[Place, Value], layer: int) -> dict[Place, Value]:
    return {place: value for place, value in held.items() if place[0] == layer}


def _in_doubt(gap: float, limit: float) -> bool:
    """Whether float32 itself may be why this differs by more than its limit."""
    return LIMITS[torch.float32] == limit < gap < NOT_A_NUMBER


def row(gap: float, limit: float, where: str, away: tuple[float, float] | None = None) -> Row:
    """A difference, judged; what is not finite is wrong. away: how far (run, unsplit) are from float64, where that is known.
    Then the run may be as far as the limit, or twice as far as the unsplit model, but no farther than `MAX_ROUNDING`. Where
    the unsplit model is farther itself, float64 says nothing, and the limit stays."""
    gap = gap if math.isfinite(gap) else NOT_A_NUMBER
    if away is None or not away[1] <= MAX_ROUNDING or not math.isfinite(away[0]):
        return Row(gap / limit, gap, limit, where)
    return Row(away[0] / min(max(limit, 2 * away[1]), MAX_ROUNDING), gap, limit, where, away)
