"""Compares a run's first step with the unsplit model in one process. Where float32 values differ, it also compares with
float64, and with the unsplit model after small random changes of its weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
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
from ..base.part import Data, shares_of_rows
from ..base.values import cast
from ..check import LIMITS, NOT_A_NUMBER, Values, difference, gradient, magnitude, values
from ..connecting import Update
from ..feed import moved, step_seed
from ..layers import forwards_alone
from ..mesh import PipelineMesh, group_along
from ..one_device import OneDevice
from ..pipeline import Pipeline
from ..transport.format import receive_value, send_value
from ..transport.wires import Wires

Verdict = dict[str, Any]
SHAKES = 8  # references with changed weights; each moves a sum near a kink to its other side with a chance of about a half
SHAKE_SECONDS = 60.0  # after this no further one starts, as the other ranks wait


def mean_over_data(pipeline: Pipeline | OneDevice, losses: Sequence[float]) -> list[float]:
    """The mean of each loss over all data coordinates. All ranks call this."""
    if pipeline.mesh is None or pipeline.mesh.replicas is None:
        return list(losses)
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total, group=pipeline.mesh.replicas)
    return (total / pipeline.mesh.places).tolist()


def checked(pipeline: Pipeline | OneDevice, model: Model, seed: int, update: Update, loss: float) -> Verdict | None:
    """Compare the first step with the unsplit model, before any update; if the step updates weights itself, compare these
    with the same rule in one process. Returns the verdict on rank 0 of the first pipeline. All ranks call this. seed: of
    parameters and batches. update: makes an optimizer of parameters. loss: of the step. Gradients are compared whole, even
    if they are spread over a mesh. Along data dimensions all pipelines have the same gradients; along others each is
    compared, and the verdict is the worst one."""
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
        with as_written():  # as in the first step, where bytes are counted
            whole, right, counts = reference()

    def exact() -> list[nn.Module] | None:
        """The reference in float64; None where the model cannot run in float64."""
        try:
            with as_written(), check.SingleConstants():
                return reference(torch.float64)[0]
        except Exception:  # a user's model or loss may take only float32
            return None

    def shaken() -> Iterator[list[nn.Module]]:
        """References with slightly changed weights."""
        until = time.monotonic() + SHAKE_SECONDS
        for number in range(1, SHAKES + 1):
            if number > 1 and time.monotonic() > until:
                return
            with as_written():
                layers, *_ = reference(shake=number)
            yield layers

    rounding = max((part.rounding for part in pipeline.parts), default=0.0)
    verdict = compare(pipeline.wires, pipeline.owners, own, whole, (loss, right), what, References(exact, shaken, rounding))
    if verdict is not None and mesh is not None:
        verdict = _worst(verdict, mesh)
    if verdict is None or counts is None:
        return verdict
    return verdict | {"loss_of_rows": {"add_up": counts.add_up, "uneven": counts.uneven}}


def _worst(verdict: Verdict, mesh: PipelineMesh) -> Verdict:
    """The worst verdict along the dimensions other than pipeline and data, with its coordinates."""
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
    """The layers of the unsplit model after its first step on the batches of all places, the loss of that step, and the
    `row_counts`. spec: the model's name; it is built again, so its parameters have their starting values. kind: dtype of
    its parameters and batches, if not their own. shake: a seed for small changes of its parameters (see `check.shake`);
    0: none. Raises BadInput."""
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
        for part in pipeline.parts:
            part.change_whole(whole)
    # Last: its forwards may change buffers and generators, which the comparison depends on.
    return whole, right, check.row_counts(whole, data, other.loss) if kind is None and not shake else None


MAX_ROUNDING = 1e-5  # the largest difference between float32 and float64 that counts as rounding
MAX_KINK = LIMITS[torch.bfloat16]  # the largest difference that a kink may explain
NOTHING = 1e-10  # of a layer's largest value: in float64 only sums that cancel are smaller


class References(NamedTuple):
    """Makes further references where float32 values differ by more than their limit. exact: in float64, or None if that is
    impossible: two correct orders of summation may differ so much (see `row`). shaken: with slightly changed weights, if
    that does not explain the difference. A sum near a kink (ReLU's at 0) may then have another gradient, so a
    value may differ by twice its change there, up to `MAX_KINK`. rounding: see `Part`."""

    exact: Callable[[], Sequence[nn.Module] | None] = lambda: None
    shaken: Callable[[], Iterator[Sequence[nn.Module]]] = lambda: iter(())
    rounding: float = 0.0


class Row(NamedTuple):
    """A difference: as a share of its limit, its value, the limit, where it is, how far (run, unsplit) are from float64, and
    by how much the unsplit model's own value changes with slightly changed weights."""

    share: float
    difference: float
    limit: float
    where: str
    from_float64: Sequence[float] | None = None
    moves: float | None = None


def compare(
    wires: Wires,
    owners: Sequence[Sequence[int]],
    own: Values,
    whole: Sequence[nn.Module] | None,
    losses: tuple[float, float],
    what: Callable[[nn.Parameter], Tensor | None] = gradient,
    references: References = References(),  # noqa: B008 (immutable)
) -> dict[str, Any] | None:
    """The verdict, on rank 0; None on the others. All ranks of `wires` call this.

    Rank 0 has `whole`, the reference with its gradients. The ranks in `owners[layer]` send it their own `values`, `own`.
    losses: (pipeline, reference), known on rank 0. what: `gradient` or `weight`. "worst" in the verdict is the largest
    difference over all tensors and the loss (see `difference`). references: used by rank 0 alone. Raises BadInput on rank 0
    where the two have different parameters.
    """
    if wires.rank:
        for layer in (layer for layer, ranks in enumerate(owners) if wires.rank in ranks):
            send_value(wires, [(name, tensor) for (_, name), tensor in _of_layer(own, layer).items()], 0)
        wires.told("")  # wait for the verdict: rank 0 may make further references
        return None
    assert whole is not None
    right = values(dict(enumerate(whole)), what)
    judged = _moving(_judged(wires, owners, own, right, references, what), right, references.shaken, what)
    wires.told("")
    pipeline, single = losses
    gap = abs(pipeline - single) / abs(single) if single else abs(pipeline)
    gap = gap if math.isfinite(pipeline) and math.isfinite(single) else NOT_A_NUMBER
    limit = max(LIMITS[torch.float32], references.rounding)
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
    right: Values,
    shaken: Callable[[], Iterator[Sequence[nn.Module]]],
    what: Callable[[nn.Parameter], Tensor | None],
) -> list[Row]:
    """The rows. Where all failures are in doubt, their limit is twice the reference's own change with changed weights."""
    failed = {gap.where: gap for gap in sorted(rows, key=lambda gap: gap.difference) if not gap.share <= 1}
    if not failed or not all(_in_doubt(gap.difference, gap.limit) and gap.difference <= MAX_KINK for gap in failed.values()):
        return rows
    moves = dict.fromkeys(failed, 0.0)
    for model in shaken():
        for place, value in values(dict(enumerate(model)), what).items():
            if (where := f"layer {place[0]} {place[1]}") in moves:
                moves[where] = max(moves[where], difference(value, right[place]))
        if all(gap.difference <= 2 * moves[where] for where, gap in failed.items()):
            break
    return [
        Row(gap.difference / (2 * by), *gap[1:5], by) if not gap.share <= 1 and (by := moves[gap.where]) > 0 else gap
        for gap in rows
    ]


def _judged(
    wires: Wires,
    owners: Sequence[Sequence[int]],
    own: Values,
    right: Values,
    references: References,
    what: Callable[[nn.Parameter], Tensor | None],
) -> list[Row]:
    """All differences, for each layer and each of its ranks. right: the reference."""
    rows, doubts, wrong = list[Row](), list[tuple[int, Place, Tensor | None]](), ""
    for layer, owner in [(layer, owner) for layer, ranks in enumerate(owners) for owner in ranks]:
        here = _of_layer(own, layer)
        if owner:
            here = {(layer, name): tensor for name, tensor in receive_value(wires, owner)}
        for place in here.keys() ^ _of_layer(right, layer).keys():
            which = "which the unsplit model lacks" if place in here else "which only the unsplit model has"
            wrong = wrong or f"check: layer {layer}: parameter '{place[1]}', {which}"
        for place, value in here.items() if not wrong else ():
            kind = next((tensor.dtype for tensor in (value, right[place]) if tensor is not None), torch.float32)
            away, limit = difference(value, right[place]), max(LIMITS.get(kind, 1e-5), references.rounding)
            if _in_doubt(away, limit):
                doubts.append((len(rows), place, value))
            rows.append(row(away, limit, f"layer {layer} {place[1]}"))
    if wrong:  # not earlier, while ranks send
        raise BadInput(wrong)
    known = values(dict(enumerate((references.exact() if doubts else None) or ())), what)
    for number, place, tensor in doubts if known else ():
        # A gradient that cancels to zero (such as that of a key's bias, which the softmax does not depend on) is only
        # rounding in float32, so it is measured relative to the layer's largest.
        single, double = right[place], known[place]
        largest = max(map(magnitude, _of_layer(known, place[0]).values()))
        scale = largest if magnitude(double) <= NOTHING * largest else 0.0
        from_float64 = difference(tensor, double, scale), difference(single, double, scale)
        rows[number] = row(difference(tensor, single, scale), rows[number].limit, rows[number].where, from_float64)
    return rows


def _of_layer(held: Values, layer: int) -> Values:
    return {place: value for place, value in held.items() if place[0] == layer}


def _in_doubt(gap: float, limit: float) -> bool:
    """May float32 itself be the reason that this differs by more than its limit?"""
    return LIMITS[torch.float32] == limit < gap < NOT_A_NUMBER


def row(gap: float, limit: float, where: str, away: tuple[float, float] | None = None) -> Row:
    """A difference with its verdict; non-finite values fail. away: how far (run, unsplit) are from float64, if known. Then
    the run may be as far as the limit, or twice as far as the unsplit model, up to `MAX_ROUNDING`. If the unsplit model
    itself is farther than that, float64 decides nothing, and the limit stays."""
    gap = gap if math.isfinite(gap) else NOT_A_NUMBER
    if away is None or not away[1] <= MAX_ROUNDING or not math.isfinite(away[0]):
        return Row(gap / limit, gap, limit, where)
    return Row(away[0] / min(max(limit, 2 * away[1]), MAX_ROUNDING), gap, limit, where, away)
