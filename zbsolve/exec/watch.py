"""`--watch`: which pass made the first number that is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from .failure import RunFailed
from .lower import Action
from .stage import Stage

MADE = {"F": "its activation", "B": "the gradient of its input", "BW": "the gradient of its input"}
MADE |= {"AF": MADE["F"], "AB": MADE["B"]}


def watch(action: Action, stage: Stage, output: Tensor | None, loss: Tensor | None, given: Tensor | None) -> None:
    """After a pass, look at all that it made: `output` (for other ranks or stages), the `loss`, gradients of the stage's
    parameters. `given`: the model's input, where the pass read it. Nothing goes on from a pass that raises here, so what it
    names is where it began. Raises RunFailed. On a GPU it waits for the pass."""
    if given is not None and given.is_floating_point():
        _look("the model's input", given)
    if output is not None:
        _look(MADE[action.kind], output, stage)
    if loss is not None:
        _look("its loss", loss, stage)
    if action.kind != "F":
        for name, parameter in _named(stage):
            if parameter.grad is not None:
                _look(f"the gradient of {name}", parameter.grad)


def _look(what: str, tensor: Tensor, stage: Stage | None = None) -> None:
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    if bool(torch.isfinite(values).all()):
        return
    if not values.dim():
        raise RunFailed(f"{what} is {float(values)}{_already(stage)}")
    nan, inf = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    found = " and ".join(f"{count} {word}" for count, word in ((nan, "NaN"), (inf, "inf")) if count)
    raise RunFailed(f"{what} has {found} among {values.numel()} numbers{_already(stage)}")


def _already(stage: Stage | None) -> str:
    """A parameter that was no number before, most often since the optimizer's last step."""
    for name, parameter in () if stage is None else _named(stage):
        if not bool(torch.isfinite(parameter.detach()).all()):
            return f"; parameter {name} already had some"
    return ""


def _named(stage: Stage) -> Iterable[tuple[str, nn.Parameter]]:
    """Every trained parameter with its layer."""
    for number, layer in enumerate(stage.layers, stage.first):
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                yield f"layer {number} {name}", parameter


def not_finite(losses: Mapping[int, float]) -> str:
    """Step → loss: the first that is no finite number, in words; "" where all are."""
    for step, loss in losses.items():
        if not -float("inf") < loss < float("inf"):
            return f"the loss of step {step} is {loss}"
    return ""
