"""The check's verdict: what ranks hold against the unsplit model, and where float32 values differ, against float64 and
against what the unsplit model itself does with weights that are rounded otherwise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..models.model import Place
from ..util.errors import BadInput
from .check import LIMITS, NOT_A_NUMBER, Value, difference, gradient, magnitude, values
from .transport.wires import Wires, receive_bytes, receive_tensor, send_bytes, send_tensor

MAX_ROUNDING = 1e-5  # what float32 may lie away from float64 at most
MAX_KINK = LIMITS[torch.bfloat16]  # the largest difference that a kink may explain
NOTHING = 1e-10  # of a layer's largest value: in float64 only sums that cancel leave less


class Others(NamedTuple):
    """What makes further references where float32 values differ by more than their limit.

    exact: the one in float64, or None where there is none: two right orders of summation may differ so (see `row`). shaken:
    those whose weights are rounded otherwise, where that does not do. A sum beside a kink (ReLU's at 0) that is rounded
    otherwise has another gradient, so a value may differ by twice what it moves there, and by no more than `MAX_KINK`.
    """

    exact: Callable[[], Sequence[nn.Module] | None] = lambda: None
    shaken: Callable[[], Iterator[Sequence[nn.Module]]] = lambda: iter(())


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
    wires: Wires | None,
    owners: Sequence[Sequence[int]],
    mine: Mapping[Place, Value],
    whole: Sequence[nn.Module] | None,
    losses: tuple[float, float],
    what: Callable[[nn.Parameter], Tensor | None] = gradient,
    others: Others = Others(),  # noqa: B008 (immutable)
) -> dict[str, Any] | None:
    """The verdict, on rank 0; None on the others. All ranks of `wires` call this (None: there is one rank).

    Rank 0 holds `whole`, the reference with its gradients. It sends those of each layer to the ranks in `owners[layer]`,
    which compare them with their own `values`, `mine`. losses: (pipeline, reference), known on rank 0. what: `gradient` or
    `weight`. "worst" in the verdict is the largest difference over all tensors and the loss (see `difference`). others:
    asked for by rank 0 alone.
    """
    found = _rows(wires, owners, mine, (whole, None), what)
    again = others.exact() if any(_in_doubt(one.difference, one.limit) for one in found) else None
    if _told(wires, again is not None):
        found = _rows(wires, owners, mine, (whole, again), what)
    if wires is not None and wires.rank:
        return None
    if whole is not None:
        found = _moving(found, values(dict(enumerate(whole)), what), others.shaken, what)
    pipeline, single = losses
    gap = abs(pipeline - single) / abs(single) if single else abs(pipeline)
    gap = gap if math.isfinite(pipeline) and math.isfinite(single) else NOT_A_NUMBER
    limit = LIMITS[torch.float32]
    rows = [*found, Row(gap / limit, gap, limit, "loss")]
    failed = [one for one in rows if not one.share <= 1]
    worst = max(failed, key=lambda one: one.share) if failed else max(rows, key=lambda one: one.difference / one.limit)
    verdict = {
        "passed": not failed,
        "worst": worst.difference,
        "limit": worst.limit,
        "where": worst.where,
        "tensors": len(found),
        "loss": pipeline,
        "reference_loss": single,
        "measure": f"max |{what.__name__} - reference| / max |reference| of a tensor; "
        "reference: the unsplit model in one process",
        "compared": what.__name__,
    }
    verdict |= {} if worst.from_float64 is None else {"from_float64": list(worst.from_float64)}
    return verdict | ({} if worst.moves is None else {"moves": worst.moves})


def _moving(
    found: list[Row],
    right: Mapping[Place, Value],
    shaken: Callable[[], Iterator[Sequence[nn.Module]]],
    what: Callable[[nn.Parameter], Tensor | None],
) -> list[Row]:
    """The same rows; those that fail by how much the reference's own value moves, where that may explain all of them."""
    failed = {one.where: one for one in sorted(found, key=lambda one: one.difference) if not one.share <= 1}
    if not failed or not all(_in_doubt(one.difference, one.limit) and one.difference <= MAX_KINK for one in failed.values()):
        return found
    moves = dict.fromkeys(failed, 0.0)
    for model in shaken():
        for place, one in values(dict(enumerate(model)), what).items():
            if (where := f"layer {place[0]} {place[1]}") in moves:
                moves[where] = max(moves[where], difference(one.tensor, right[place].tensor))
        if all(one.difference <= 2 * moves[where] for where, one in failed.items()):
            break
    return [
        Row(one.difference / (2 * by), *one[1:5], by) if not one.share <= 1 and (by := moves[one.where]) > 0 else one
        for one in found
    ]


def _told(wires: Wires | None, answer: bool) -> bool:
    """Rank 0's answer, on all ranks."""
    if wires is None:
        return answer
    if wires.rank:
        return bool(receive_bytes(wires, 0))
    for other in range(1, wires.size):
        send_bytes(wires, b"1" if answer else b"", other)
    return answer


def _rows(
    wires: Wires | None,
    owners: Sequence[Sequence[int]],
    mine: Mapping[Place, Value],
    wholes: tuple[Sequence[nn.Module] | None, Sequence[nn.Module] | None],
    what: Callable[[nn.Parameter], Tensor | None],
) -> list[Row]:
    """All differences, on rank 0; none on the others. wholes: the reference, and the same in float64 or None; on rank 0."""
    found: list[Row] = []
    rank = 0 if wires is None else wires.rank
    layers: dict[int, dict[Place, Value]] = {}
    for place, value in mine.items():
        layers.setdefault(place[0], {})[place] = value
    for layer, owner in [(layer, owner) for layer, here in enumerate(owners) for owner in here]:
        right: list[dict[Place, Tensor | None]] = []
        if rank == 0:
            models = [model for model in wholes if model is not None]
            right = [{place: one.tensor for place, one in values({layer: model[layer]}, what).items()} for model in models]
            if owner and wires is not None:
                _send(wires, right, owner)
        elif owner == rank and wires is not None:
            right = _receive(wires, layers.get(layer, {}))
        if owner == rank:
            found += _judged(layers.get(layer, {}), *right)
    if wires is not None and rank:
        send_bytes(wires, json.dumps(found).encode(), 0)
        return []
    for other in range(1, 1 if wires is None else wires.size):
        assert wires is not None
        found += [Row(*row) for row in json.loads(receive_bytes(wires, other))]
    return found


def _judged(
    mine: Mapping[Place, Value], right: Mapping[Place, Tensor | None], exact: Mapping[Place, Tensor | None] | None = None
) -> list[Row]:
    """One layer's differences. A tensor that is nothing in float64 beside the layer's others is measured by the largest of
    them. Raises BadInput where the two have other parameters."""
    for layer, name in mine.keys() ^ right.keys():
        other = "which the unsplit model lacks" if (layer, name) in mine else "which only the unsplit model has"
        raise BadInput(f"check: layer {layer}: parameter '{name}', {other}")
    rows, largest = [], max(map(magnitude, (exact or {}).values()), default=0.0)
    for place, one in mine.items():
        limit, where = LIMITS.get(one.dtype, 1e-5), f"layer {place[0]} {place[1]}"
        found = difference(one.tensor, right[place])
        away = None
        if exact is not None and _in_doubt(found, limit):
            # What cancels (the gradient of a key's bias: softmax does not change with it) is rounding in float32.
            scale = largest if magnitude(exact[place]) <= NOTHING * largest else 0.0
            found = difference(one.tensor, right[place], scale)
            away = difference(one.tensor, exact[place], scale), difference(right[place], exact[place], scale)
        rows.append(row(found, limit, where, away))
    return rows


def _in_doubt(found: float, limit: float) -> bool:
    """Whether float32 itself may be why this differs by more than its limit."""
    return LIMITS[torch.float32] == limit < found < NOT_A_NUMBER


def row(found: float, limit: float, where: str, away: tuple[float, float] | None = None) -> Row:
    """A difference, judged; what is not finite is wrong. away: how far (run, unsplit) are from float64, where that is known.

    Then the run may be as far as the limit, or twice as far as the unsplit model, but no farther than `MAX_ROUNDING`. Where
    the unsplit model is farther itself, float64 says nothing, and the limit stays.
    """
    found = found if math.isfinite(found) else NOT_A_NUMBER
    if away is None or not away[1] <= MAX_ROUNDING or not math.isfinite(away[0]):
        return Row(found / limit, found, limit, where)
    return Row(away[0] / min(max(limit, 2 * away[1]), MAX_ROUNDING), found, limit, where, away)


def _send(wires: Wires, right: Sequence[Mapping[Place, Tensor | None]], owner: int) -> None:
    """Send which places there are, which have a gradient and of what type it is, for each model, then the gradients."""
    there = [[(place, value is not None and str(value.dtype)) for place, value in model.items()] for model in right]
    send_bytes(wires, json.dumps(there).encode(), owner)
    for one in [one for model in right for one in model.values() if one is not None]:
        send_tensor(wires, one, owner)


def _receive(wires: Wires, mine: Mapping[Place, Value]) -> list[dict[Place, Tensor | None]]:
    """What `_send` sent. Raises BadInput for a parameter that is not here."""
    right: list[dict[Place, Tensor | None]] = []
    for model in json.loads(receive_bytes(wires, 0)):
        right.append({})
        for (layer, name), kind in model:
            one = mine.get((layer, name))
            if one is None:
                raise BadInput(f"check: layer {layer}: parameter '{name}', which only the unsplit model has")
            dtype = torch.float64 if kind == "torch.float64" else one.dtype
            right[-1][layer, name] = buffer = torch.empty(one.shape, dtype=dtype, device=one.device) if kind else None
            if buffer is not None:
                receive_tensor(wires, buffer, 0)
    return right
