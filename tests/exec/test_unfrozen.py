"""What is trained may change between steps, as in usual fine-tuning; what cannot change is said in one line."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbsolve.exec import Pipeline
from zbsolve.util.errors import ZbsolveError

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, random_schedule
from ..support.trials import TRIED, Batches, Trial, too_far

pytestmark = pytest.mark.slow

# Which of six layers are trained in each step: the back, then more, all, a part, the front alone, all.
PHASES = [(3, 6), (2, 6), (0, 6), (1, 6), (0, 2), (0, 6)]


class Later(nn.Module):
    """Hands on a tensor that needs a gradient where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if float(x.detach().sum()) > 0 else y.detach()


def model() -> nn.Sequential:
    """The first layers have an attribute that cannot be compared, so they share no graphs."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(6)]
    for layer in layers[:3]:
        layer.config = object()  # type: ignore[assignment]
    return nn.Sequential(*layers).double()


def batch(place: int, step: int) -> Batches:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    return x.chunk(4), y.chunk(4)


def thaw(layers: Mapping[int, nn.Module], place: int, step: int, phases: Any = PHASES) -> None:
    """Train the layers of this step's phase, and no other."""
    for number, layer in layers.items():
        layer.requires_grad_(phases[step][0] <= number < phases[step][1])


TRIALS = {
    f"{placement}, {split}": Trial(
        problem=a_problem(placement, 4, layers=6),
        layers=lambda numbers: [model()[i] for i in numbers],
        batch=batch,
        order=3,
        before=thaw,
        steps=len(PHASES),
        each=True,
        options={"split": split},
    )
    for placement, split in (((0, 1), "layers"), ((0, 1), "graph"), ((0, 0), "layers"))
}


def test_layers_are_frozen_and_unfrozen_between_steps() -> None:
    """What has no gradient in the unsplit model has none here."""
    assert too_far(on_ranks(2, TRIED, f"{__name__}:TRIALS"), 1e-12) == {}


def refused(rank: int, how: str) -> str:
    """What a rank hears of a step that cannot run as the one before."""
    problem = a_problem((0, 1, 2), 4, layers=6)
    layers = model()
    if how == "data":
        layers = nn.Sequential(nn.Linear(8, 8), Later(), *(nn.Linear(8, 8) for _ in range(4))).double()
    elif how == "middle":
        thaw(dict(enumerate(layers)), 0, 0, [(4, 6)])
    group = dist.new_group(range(3))  # which a step that fails leaves broken
    runner = Pipeline(layers, random_schedule(problem, 3), loss=nn.functional.mse_loss, group=group)
    x, y = map(torch.cat, batch(0, 0))
    if how == "data":
        runner.module.requires_grad_(True)
        layers[0].weight.data, layers[0].bias.data = torch.zeros(8, 8).double(), torch.full((8,), 1.0).double()
    mode: AbstractContextManager[Any] = torch.enable_grad()
    if how in ("no_grad", "inference_mode"):
        mode = torch.no_grad() if how == "no_grad" else torch.inference_mode()
    else:
        runner.step(x, y)
    if how == "data":
        layers[0].bias.data.neg_()
    elif how == "middle" and rank == 1:
        runner.module.requires_grad_(True)
    try:
        with mode:
            runner.step(x, y)
    except ZbsolveError as error:
        return str(error)
    return ""


WRONG = {
    "middle": (
        1,
        "needs a gradient, unlike before: requires_grad of 2.weight and 3 more changed; make a new Pipeline",
    ),
    "data": (
        0,
        "needs no gradient, unlike before: whether it does depends on the data or on other ranks' parameters",
    ),
    "no_grad": (
        0,
        "step: torch makes no gradients here (no_grad, inference_mode): call evaluate or forward",
    ),
    "inference_mode": (
        0,
        "step: torch makes no gradients here (no_grad, inference_mode): call evaluate or forward",
    ),
}


def every_wrong(rank: int, _: None) -> dict[str, str]:
    return {how: refused(rank, how) for how in WRONG}


def test_what_a_step_cannot_do_is_one_line() -> None:
    ranks = on_ranks(3, f"{__name__}:every_wrong")
    for how, (rank, text) in WRONG.items():
        assert text in ranks[rank][how]
        assert all(said[how] and "\n" not in said[how] for said in ranks)
