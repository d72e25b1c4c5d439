"""Checkpoints and clipping where a rank lacks an optimizer that others have, or has nothing to train."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbsolve import Schedule, pipeline
from zbsolve.build import with_exchange
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.problem import Problem

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, random_schedule, refusal
from ..support.trainings import Training, all_trained, trained
from ..support.trials import Trial, too_far, tried

pytestmark = pytest.mark.slow


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


Jobs = dict[str, list[Any]]


def of_two_optimizers(folder: Path, ranks: int, resume: bool, *without: str) -> tuple[str, dict[str, Any]]:
    return "two_optimizers", {"ranks": ranks, "folder": str(folder), "resume": resume, "without": without}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(folder: Path) -> Jobs:
    """What each job gave on each of two ranks, in one launch."""
    jobs = {
        "saved": of_two_optimizers(folder, 2, False),
        "again": of_two_optimizers(folder, 2, True),
        "left": of_two_optimizers(folder, 2, True, "matrices"),
        "nothing": ("nothing_trained", str(folder)),
        "none": ("no_optimizer", None),
        "tied": ("tied_parameters", None),
    }
    ranks = on_ranks(2, __name__, list(jobs.values()))
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(jobs)}


def test_each_rank_saves_and_loads_the_optimizers_that_it_has(two: Jobs, folder: Path) -> None:
    saved, again, left = two["saved"], two["again"], two["left"]
    assert [one["names"] for one in saved] == [["vectors"], ["vectors", "matrices"]]
    assert [one["losses"] for one in again] == [one["losses"] for one in saved]
    assert [one["said"] for one in again] == [[], []]  # rank 0 leaves nothing that another rank loads
    ((alone,),) = on_ranks(1, __name__, [of_two_optimizers(folder, 1, True)])
    assert alone["losses"] == pytest.approx(saved[0]["losses"], rel=1e-11)
    assert left[0]["said"][0].endswith("it has 'matrices' too, which is not loaded")
    assert left[0]["losses"] != saved[0]["losses"]


def test_clipping_where_a_rank_trains_nothing(two: Jobs) -> None:
    """Its optimizer has its frozen parameters, or it has none; gradients are clipped before the step or validated late."""
    front, back = two["nothing"]
    assert too_far([front, back], 1e-11) == {}
    for name, one in front.items():
        other, count = back[name], 2 if "again" in name else 4
        assert one["seen"] == other["seen"]
        assert len({row[0] for row in one["seen"]}) == count
        assert other["said"] == []
        (said,) = one["said"]
        assert said.startswith("rank 0 trains none of its parameters. Of trained ones alone there is no optimizer to make")
    assert len(front) == 8


def test_a_rank_that_trains_needs_an_optimizer(two: Jobs) -> None:
    assert two["none"] == [
        f"PostValidated: rank {rank} trains parameters, so it needs an optimizer, not None" for rank in range(2)
    ]


def test_a_tied_parameter_has_the_gradient_of_all_ranks_that_use_it(two: Jobs) -> None:
    """None where no rank does; and a sum waits for a tied stage without a pass C. Bits are the first rank's."""
    ranks = two["tied"]
    assert too_far(ranks, 1e-15) == {}
    assert [rank["gradients"]["bits"] for rank in ranks] == [[0], [0]]
    assert [rank["gradients"]["made"] for rank in ranks] == [[f"{i}.large", f"{i}.row"] for i in range(2)]
