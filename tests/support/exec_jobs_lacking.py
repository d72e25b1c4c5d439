"""Jobs of `on_ranks`: training loops in which a rank lacks an optimizer, or anything to train."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbsolve import Schedule, pipeline
from zbsolve.build import with_exchange
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.problem import Problem

from .exec_tools import a_problem, random_schedule, refusal
from .trainings import Training, all_trained, trained
from .trials import Trial, tried

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


def chunks(count: int) -> Any:
    return lambda place, step: tuple(part.chunk(count) for part in batch(step))


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


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    return torch.optim.AdamW(parameters, 0.01) if parameters else None


def adamw_of_trained(parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    return adamw([p for p in parameters if p.requires_grad])


def training(optimizer: Any, **clip: float) -> Training:
    """The first rank trains nothing."""
    trial = Trial(problem=problem(2), layers=lambda numbers: [model(2)[i] for i in numbers], batch=chunks(4), order=3)
    return Training(trial=trial, optimizer=optimizer, updates=STEPS, saved=AT, **clip)


TRAININGS = {
    f"{name}, {clip}": training(optimizer, **{clip: MAX_NORM})
    for name, optimizer in (("frozen", adamw), ("none", adamw_of_trained))
    for clip in ("clip", "late")
}
TRAININGS |= {f"{name}, again": replace(one, saved=0, after=name) for name, one in TRAININGS.items()}


def nothing_trained(rank: int, folder: str) -> dict[str, Any]:
    """Of each training, and what is said in it."""

    def run(*given: Any) -> dict[str, Any]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return trained(*given) | {"said": [str(one.message) for one in caught]}

    return all_trained(rank, f"{__name__}:TRAININGS", folder, run)


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


def held() -> list[nn.Module]:
    return [layer.double() for layer in (Holds(), Holds("large"))]


def held_together() -> list[nn.Module]:
    """The second layer, which alone uses the large one, has the first one's parameters."""
    first, second = held()
    second.small, second.large = first.small, first.large  # type: ignore[assignment]
    return [first, second]


def plain(tied: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False).double() for _ in range(3)]
    layers[2].weight = layers[0].weight if tied else layers[2].weight
    return list(layers)


# 2W1 comes behind 0C1, which would sum the gradient before it.
FIRST = "0F0 1F1 1B1 0B0 0W0 1W1"
SECOND = "0F1 1F0 2F0 2B0 1B0 2F1 2B1 0B1 1W0 0W1 2W0 2W1"
ORDER = {"compute:0": FIRST, "compute:1": SECOND, "comm:0": "0C0 1C0", "comm:1": "0C1 1C1"}


def without_a_pass() -> Schedule:
    """Stages 0 and 1 are on both ranks, and stage 2, tied to stage 0, on rank 1 alone: it has no pass C."""
    step = pipeline([10] * 3, B=[10] * 3, W=[10] * 3, microbatches=2, placement=((0, 1, 1), (1, 0, 1)), layers=(1,) * 3)
    return Schedule(with_exchange(step, 1), {stream: tuple(names.split()) for stream, names in ORDER.items()})


TIED = [[(0, name), (1, name)] for name in ("small", "large", "bits")]
# Of two parameters that two ranks share, one is used by no rank, one by the second alone, and one is frozen.
TRIALS = {
    "gradients": Trial(
        problem=a_problem((0, 1), 4, layers=2),
        layers=lambda numbers: [held()[i] for i in numbers],
        whole=held_together,
        batch=chunks(4),
        order=3,
        steps=2,
        options={"tied": TIED},
    ),
    "a sum": Trial(
        problem=without_a_pass(),
        layers=lambda numbers: [plain(False)[i] for i in numbers],
        whole=lambda: plain(True),
        batch=chunks(2),
        options={"tied": [[(0, "weight"), (2, "weight")]]},
    ),
}


def tied_parameters(rank: int, _: None) -> dict[str, Any]:
    """Of each trial; what is in frozen parameters, of a type that gloo cannot broadcast; those with a gradient."""

    def run(trial: Trial, pipe: Pipeline) -> dict[str, Any]:
        found, named = trial.ran(pipe), dict(pipe.named_parameters())
        bits = {int(value) for p in named.values() if not p.requires_grad for value in p.flatten()}
        return found | {"bits": sorted(bits), "made": sorted(name for name, p in named.items() if p.grad is not None)}

    return tried(rank, f"{__name__}:TRIALS", run)
