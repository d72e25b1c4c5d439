"""Jobs of `on_ranks`: training loops in which a rank lacks an optimizer, or anything to train."""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbsolve import Schedule, pipeline
from zbsolve.build import with_exchange
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.problem import Problem

from .exec_tools import a_problem, random_schedule, refusal

STEPS, AT, MAX_NORM = 4, 2, 0.05


class Scaled(nn.Module):
    """A layer of vectors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def model(frozen: int) -> nn.Sequential:
    """Two layers of vectors, then two of matrices; the first `frozen` are not trained."""
    torch.manual_seed(0)
    layers = nn.Sequential(Scaled(), Scaled(), nn.Linear(8, 8), nn.Linear(8, 8)).double()
    layers[:frozen].requires_grad_(False)
    return layers


def problem(ranks: int) -> Problem:
    return a_problem((0,) if ranks == 1 else (0, 1), 4, layers=4)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, y


def optimizers(parameters: list[nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
    """One for vectors and one for matrices, where there are any."""
    vectors, matrices = [p for p in parameters if p.dim() < 2], [p for p in parameters if p.dim() > 1]
    found: dict[str, torch.optim.Optimizer] = {"vectors": torch.optim.AdamW(vectors, 0.01)} if vectors else {}
    return found | ({"matrices": torch.optim.SGD(matrices, 0.1, momentum=0.9)} if matrices else {})


def two_optimizers(rank: int, argument: dict[str, Any]) -> dict[str, Any]:
    """Losses behind a checkpoint: of the training that saved it, or of one that goes on from it."""
    runner = Pipeline(model(0), random_schedule(problem(argument["ranks"]), 3), loss=nn.functional.mse_loss)
    mine, folder, losses = optimizers(list(runner.parameters())), Path(argument["folder"]) / "two", []
    said: list[str] = []
    if argument["resume"]:
        with warnings.catch_warnings(record=True) as caught:
            runner.load(folder, **{name: one for name, one in mine.items() if name not in argument["without"]})
        said = [str(one.message) for one in caught]
    while runner.steps < STEPS:
        losses.append(runner.step(*batch(runner.steps)).loss)
        for one in mine.values():
            one.step()
            one.zero_grad()
        if runner.steps == AT and not argument["resume"]:
            runner.save(folder, **mine)
    return {"losses": losses[-(STEPS - AT) :], "names": list(mine), "said": said}


def nothing_trained(rank: int, argument: dict[str, Any]) -> dict[str, Any]:
    """Losses with clipping, and those of one process. how: of the rank that trains nothing, "frozen": its optimizer has its
    frozen parameters, "none": it has none."""
    how, validated = argument["how"], argument["validated"]
    runner = Pipeline(model(2), random_schedule(problem(2), 3), loss=nn.functional.mse_loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = [p for p in runner.parameters() if how == "frozen" or p.requires_grad]
    optimizer: Any = torch.optim.AdamW(mine, 0.01) if mine else None
    if validated:
        optimizer = PostValidated(runner, optimizer, max_norm=MAX_NORM)
    whole = model(2)
    alone, losses, right = torch.optim.AdamW(whole[2:].parameters(), 0.01), [], []
    for step in range(STEPS):
        x, y = batch(step)
        losses.append(runner.step(x, y).loss)
        if not validated:
            runner.clip_grad_norm_(MAX_NORM)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(whole(x), y)
        loss.backward()
        right.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        alone.step()
        alone.zero_grad()
    runner.finish()
    folder = Path(argument["folder"]) / f"{how} {validated}"
    objects = {} if optimizer is None else {"optimizer": optimizer}
    runner.save(folder, **objects)
    runner.load(folder, **objects)
    return {"losses": losses, "right": right, "said": [str(one.message) for one in caught]}


def no_optimizer(rank: int, _: None) -> str:
    """What a rank hears that trains, and gives no optimizer."""
    runner = Pipeline(model(0), random_schedule(problem(2), 3), loss=nn.functional.mse_loss)
    return refusal(lambda: PostValidated(runner, None, max_norm=1.0))


class Holds(nn.Module):
    """Two parameters, of which a layer uses those that are named, one large enough to be summed where it lies."""

    def __init__(self, *used: str) -> None:
        super().__init__()
        self.used, self.small, self.large = used, nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(400, 400))
        self.row = nn.Parameter(torch.ones(8))
        self.bits = nn.Parameter(torch.full((2, 3), len(used), dtype=torch.int16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.row
        x = x * self.small if "small" in self.used else x
        return x + self.large.mean() if "large" in self.used else x


def tied_gradients(rank: int, _: None) -> dict[str, float | None]:
    """Of two parameters that two ranks share, one used by no rank and one by the second alone: the largest difference of the
    gradient from the unsplit model's behind two steps; None where both have none. bits: the most in a frozen parameter that
    they share, of a type that gloo cannot broadcast."""
    layers, whole = ([layer.double() for layer in (Holds(), Holds("large"))] for _ in range(2))
    tied = [[(0, name), (1, name)] for name in ("small", "large", "bits")]
    schedule = random_schedule(a_problem((0, 1), 4, layers=2), 3)
    runner = Pipeline(layers, schedule, loss=nn.functional.mse_loss, tied=tied)
    for name in ("small", "large"):
        setattr(whole[1], name, getattr(whole[0], name))
    for step in range(2):
        x, y = batch(step)
        runner.step(x, y)
        nn.functional.mse_loss(whole[1](whole[0](x)), y).backward()  # type: ignore[no-untyped-call]
    mine, found = next(iter(runner.layers.values())), dict[str, float | None]()
    for name in ("small", "large"):
        gradient, right = getattr(mine, name).grad, getattr(whole[0], name).grad
        same = gradient is None and right is None
        found[name] = None if same else float((gradient - right).abs().max())
    return found | {"bits": int(mine.get_parameter("bits").max())}


def tied_beyond_sums(rank: int, order: dict[str, list[str]]) -> float:
    """Stages 0 and 1 are on both ranks, and stage 2, tied to stage 0, on rank 1 alone: it has no pass C. The largest
    difference of the tied gradient from the unsplit model's."""
    torch.manual_seed(0)
    whole = [nn.Linear(8, 8, bias=False).double() for _ in range(3)]
    layers = deepcopy(whole)
    whole[2].weight = whole[0].weight
    routes, times = ((0, 1, 1), (1, 0, 1)), [10] * 3
    exchanged = with_exchange(pipeline(times, B=times, W=times, microbatches=2, placement=routes, layers=(1,) * 3), 1)
    schedule = Schedule(exchanged, {stream: tuple(names) for stream, names in order.items()})
    tied = [[(0, "weight"), (2, "weight")]]
    runner = Pipeline(layers, schedule, loss=nn.functional.mse_loss, tied=tied)
    x, y = torch.randn(2, 4, 8, dtype=torch.float64)
    runner.step(x, y)
    nn.functional.mse_loss(nn.Sequential(*whole)(x), y).backward()  # type: ignore[no-untyped-call]
    found, right = (layer.get_parameter("weight").grad for layer in (runner.layers[0], whole[0]))
    assert found is not None
    assert right is not None
    return float((found - right).abs().max())
