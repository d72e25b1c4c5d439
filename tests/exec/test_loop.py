"""The rest of a training loop, on gloo ranks: clipping, loss scaling, batches that do not split, evaluation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from zbsolve import Schedule, pipeline
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.check import difference
from zbsolve.exec.memory import LiveBytes
from zbsolve.models.presets import GptSizes, gpt

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, random_schedule, refusal, split_layers
from ..support.trainings import Training, all_trained
from ..support.trials import Batches, Trial, too_far
from ..support.trials import tried as tried

pytestmark = pytest.mark.slow


MODEL = gpt("small", 0, GptSizes(width=16, blocks=2, heads=2, batch=1, length=8), tied=True)
LAYERS = len(MODEL.layers)


def both_ways(microbatches: int) -> Schedule:
    """Each stage on both ranks."""
    how = {"placement": ((0, 1), (1, 0)), "microbatches": microbatches, "layers": split_layers(LAYERS, 2)}
    return random_schedule(pipeline([10] * 2, B=[10] * 2, W=[10] * 2, comm=3, **how), 2)


def schedules(microbatches: int = 4) -> list[Schedule]:
    """The tied parameter on both ranks, on one, and stages on both."""
    straight, vee, loop = ((0, 1), (0, 1, 1, 0), (0, 1, 0, 1))
    some = [random_schedule(a_problem(spot, microbatches, layers=LAYERS), 3) for spot in (straight, vee, loop)]
    return [*some, both_ways(microbatches)]


def layers(numbers: list[int] | None = None) -> list[nn.Module]:
    """The small GPT in double precision."""
    return [layer.double() for layer in MODEL.build(numbers)]


def runner_of(schedule: Schedule, **more: Any) -> Pipeline:
    return Pipeline(layers, schedule, loss=MODEL.loss, tied=MODEL.tied, **more)


def rows(count: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """A batch of so many rows."""
    pairs = [MODEL.batch(m, step) for m in range(count)]
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def split(count: int, parts: list[int]) -> Batches:
    """The same, in microbatches of so many rows."""
    inputs, targets = (one.split(parts) for one in rows(count))
    return inputs, targets


def trial(schedule: Schedule, *batches: Batches, **how: Any) -> Trial:
    """A step of each batch."""
    how |= {"layers": layers, "loss": MODEL.loss, "options": {"tied": MODEL.tied}}
    return Trial(problem=schedule, batch=lambda place, step: batches[step], steps=len(batches), each=True, **how)


def clipped(rank: int, _: None) -> list[dict[str, Any]]:
    """Norms and gradients after clipping, and those of one process."""
    result = []
    for one in (trial(schedule, rows(4)) for schedule in schedules()):
        runner = one.pipeline()
        result += [one.clipped(runner, *how) for how in ((0.01, 2.0), (1e9, 2.0), (0.01, math.inf), (0.5, 1.0))]
    return result


def nonfinite(rank: int, _: None) -> dict[str, Any]:
    """A NaN on rank 1 alone: what each rank gets and hears."""
    runner = runner_of(schedules()[0])
    runner.step(*rows(4))
    if rank == 1:
        next(p for p in runner.parameters() if p.grad is not None).grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
    norms = [float(runner.clip_grad_norm_(1.0, kind)) for kind in (2.0, math.inf)]
    ways: list[dict[str, Any]] = [{"error_if_nonfinite": True}, {"norm_type": -1.0}]
    said = [refusal(partial(runner.clip_grad_norm_, 1.0, **how), Exception) for how in ways]
    said.append(refusal(lambda: torch.optim.LBFGS([*runner.parameters()]).step(lambda: 0.0)))
    return {"nan": [math.isnan(norm) for norm in norms], "said": said}


def warned(rank: int, _: None) -> dict[str, list[str]]:
    """What each way to use the parameters says."""
    runner, found = runner_of(schedules()[0]), {}
    optimizer = torch.optim.SGD(runner.parameters(), 0.1)
    runner.step(*rows(4))
    ways = {
        "optimizer": lambda: torch.optim.AdamW(runner.parameters()).zero_grad(set_to_none=False),
        "value": lambda: clip_grad_value_(runner.parameters(), 1.0),
        "scaled": lambda: [p.grad.mul_(0.5) for p in runner.parameters() if p.grad is not None],
        "unscaled": lambda: _unscaled(optimizer, runner),
        "ours": lambda: runner.clip_grad_norm_(1.0),
        "torch's": lambda: clip_grad_norm_(runner.parameters(), 1.0),
        "again": lambda: clip_grad_norm_(runner.parameters(), 1.0),
    }
    for name, way in ways.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            way()
        found[name] = [f"{one.filename.rpartition('/')[2]}: {one.message}" for one in said]
    return found


def _unscaled(optimizer: torch.optim.Optimizer, runner: Pipeline) -> None:
    scaler = ShardedGradScaler("cpu", 8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def sized() -> Schedule:
    """A schedule that says how large microbatches are."""
    schedule = schedules(3)[1]
    return replace(schedule, problem=replace(schedule.problem, sizes=(2, 6, 4)))


# Batches that do not split, one of them with fewer rows than microbatches, and a list; and microbatches of sizes.
TRIALS = {
    f"schedule {i}": trial(schedule, rows(7), split(7, [4, 2, 1]), rows(2), rows(6), uneven=True)
    for i, schedule in enumerate(schedules(3))
}
TRIALS["sized"] = trial(sized(), rows(6), split(6, [1, 3, 2]), rows(12), split(12, [2, 6, 4]), uneven=True)


def wrong_sizes(rank: int, _: None) -> list[str]:
    """What is refused of batches where the schedule says how large microbatches are."""
    runner, even = runner_of(sized()), [one.chunk(3) for one in rows(6)]
    tries = [lambda: runner.step(*rows(7)), lambda: runner.step(*even), lambda: runner.step(*rows(6), uneven=True)]
    return [refusal(one) for one in tries]


def two_infs(layers: Mapping[int, nn.Module], update: int, rank: int | None) -> None:
    """On rank 1 alone."""
    if update in (2, 5) and rank in (1, None):
        layers[LAYERS - 1].get_parameter("norm.weight").grad[0] = math.inf  # type: ignore[index]


SCALED = Training(
    trial=replace(trial(schedules()[0]), batch=lambda place, step: rows(4, step)),
    optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    updates=8,
    clip=0.5,
    scale=2.0**20,
    spoil=two_infs,
)
TRAININGS = {"scaled": SCALED, "validated": replace(SCALED, late=1e9)}


def trained(rank: int, folder: str) -> dict[str, Any]:
    return all_trained(rank, f"{__name__}:TRAININGS", folder)


def refusals(rank: int, _: None) -> list[str]:
    """What a rank hears of what makes no sense."""
    runner = runner_of(schedules()[0])
    alone = dist.new_group([rank], use_local_synchronization=True)
    tries: list[Any] = [
        lambda: runner.step(*rows(4), scaler=torch.amp.GradScaler("cpu")),
        lambda: runner.step(*rows(4), scaler=ShardedGradScaler("cpu", process_group=alone)),
        lambda: runner.step(*rows(5)),
        lambda: runner.step(torch.ones(0, 8), torch.ones(0, 8), uneven=True),
        lambda: torch.optim.swa_utils.AveragedModel(runner),
    ]
    return [refusal(one) for one in tries]


def own_random(rank: int, _: None) -> bool:
    """A step leaves torch's random numbers as they were."""
    runner = runner_of(schedules()[0])
    torch.default_generator.manual_seed(5)
    expected = torch.rand(3)
    torch.default_generator.manual_seed(5)
    runner.step(*rows(4))
    return torch.equal(torch.rand(3), expected)


class Changing(nn.Module):
    """Random in training, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh()).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def evaluated(rank: int, _: None) -> list[dict[str, Any]]:
    """Losses and outputs of batches of any size, beside those of one process; what evaluation leaves."""
    result = []
    for schedule in schedules():
        runner = runner_of(schedule)
        runner.step(*rows(4)).wait()
        before = [None if p.grad is None else p.grad.clone() for p in runner.parameters()]
        whole, count = nn.Sequential(*layers()), len(runner.microbatches)
        for size, how in ((1, {}), (4, {}), (11, {}), (11, {"microbatches": 11}), (5, {"microbatches": 2})):
            inputs, targets = rows(size, 1)
            first, last = (inputs if runner.inputs else None), (targets if runner.targets else None)
            meter = LiveBytes([*runner.module.parameters(), inputs, targets])
            with meter:
                loss = runner.evaluate(first, last, **how)
                left = meter.now
            outputs, all_outputs = runner.forward(first, **how), runner.forward(first, everywhere=True, **how)
            with torch.no_grad():
                right = whole(inputs)
            result.append(
                {
                    "loss": [loss, float(MODEL.loss(right, targets))],
                    "there": (outputs is not None) == bool(runner.targets),
                    "outputs": [difference(one, right) for one in (outputs, all_outputs) if one is not None],
                    "left": left,
                    "live": sum(len(stage.live) for stage in runner.stages.values()),
                    "grad": any(one is not None and one.requires_grad for one in (outputs, all_outputs)),
                }
            )
        parts = list(rows(3)[0].split([2, 1]))
        listed = runner.forward([parts[0], parts[1][:, :5]], everywhere=True)
        result[-1]["listed"] = [list(y.shape[:2]) for y in listed]
        after = [p.grad for p in runner.parameters()]
        result[-1]["touched"] = not all(a is b or torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert count == 4
    return result


def between_steps(rank: int, evaluating: bool) -> dict[str, Any]:
    """Training with dropout, batch norm and late validation, with evaluations in between or not."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        whole = [Changing() for _ in range(4)]
    schedule = random_schedule(a_problem((0, 1, 1, 0), 4, layers=4), 3)
    runner = Pipeline(whole, schedule, loss=nn.functional.mse_loss)
    optimizer = PostValidated(runner, torch.optim.AdamW(runner.parameters(), 0.05), max_norm=0.05)
    losses, seen = [], []
    for step in range(6):
        numbers = torch.Generator().manual_seed(step)
        x = torch.randn(16, 6, generator=numbers).double()
        losses.append(runner.step(x, x.flip(1)))
        if evaluating and step == 2:
            runner.evaluate(x, x)  # gradients are there, and stay
        optimizer.step()
        optimizer.zero_grad()
        if evaluating:
            seen += [runner.evaluate(x[:5], x[:5]), runner.evaluate(x[:5], x[:5])]
    optimizer.finish()
    bits = [float(t.double().sum()) for t in (*runner.module.parameters(), *runner.module.buffers())]
    training = all(one.training for one in runner.module.modules())
    return {"losses": [one.loss for one in losses], "bits": bits, "seen": seen, "training": training}


def wrong_evaluations(rank: int, _: None) -> list[str]:
    """What all ranks hear where one of them was given what does not fit."""
    runner = runner_of(schedules()[0])
    inputs, targets = rows(4)
    tries: list[Any] = [
        lambda: runner.evaluate(None, targets),
        lambda: runner.evaluate(inputs, list(targets.split(2))),
        lambda: runner.forward({0: inputs}),
        lambda: runner.forward(inputs, microbatches=0),
    ]
    return [*map(refusal, tries), str(runner.evaluate(inputs, targets) > 0)]


Jobs = dict[str, list[Any]]


PLAIN = ("clipped", "nonfinite", "warned", "wrong_sizes", "refusals", "own_random", "evaluated", "wrong_evaluations")
MORE = {
    "tried": ("tried", f"{__name__}:TRIALS"),
    "evaluating": ("between_steps", True),
    "training alone": ("between_steps", False),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """What each job gave on each of two ranks, in one launch."""
    jobs = {name: (name, None) for name in PLAIN} | MORE | {"trained": ("trained", str(tmp_path_factory.mktemp("none")))}
    ranks = on_ranks(2, __name__, list(jobs.values()))
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(jobs)}


def test_clipping_is_that_of_one_process(two: Jobs) -> None:
    first, second = two["clipped"]
    assert [one["norm"] for one in first] == [one["norm"] for one in second]
    for one in (*first, *second):
        assert one["norm"] == pytest.approx(one["right"], rel=1e-12)
        assert one["worst"] < 1e-12


def test_a_nan_anywhere_is_seen_everywhere_and_lbfgs_is_refused(two: Jobs) -> None:
    for rank in two["nonfinite"]:
        assert rank["nan"] == [True, True]
        assert rank["said"] == [
            "clip_grad_norm_: the norm of the gradients is nan",
            "clip_grad_norm_: max_norm 1 and norm_type -1 must be positive",
            "LBFGS: it steps by products of all gradients, and a rank has its own: take another optimizer",
        ]


def test_torch_clipping_is_warned_of_once_and_nothing_else(two: Jobs) -> None:
    for rank in two["warned"]:
        (said,) = rank.pop("torch's")
        assert said.startswith("test_loop.py: ")  # where the user's line is
        assert "pipeline.clip_grad_norm_(max_norm)" in said
        assert rank == {name: [] for name in ("optimizer", "value", "scaled", "unscaled", "ours", "again")}


def test_every_row_counts_alike_also_in_microbatches_of_sizes(two: Jobs) -> None:
    assert [rank.keys() for rank in two["tried"]] == [TRIALS.keys()] * 2
    assert too_far(two["tried"], 1e-12) == {}
    split, even, _ = two["wrong_sizes"][0]
    assert "(7, 8) does not make microbatches of 1,3,2 rows" in split
    assert "have other rows than the schedule's sizes: 2 of 1, 2 of 3, 2 of 2" in even
    assert {rank[2] for rank in two["wrong_sizes"]} == {"step: uneven: the schedule says how large microbatches are: 1,3,2"}


def test_all_ranks_decide_of_a_scaled_step(two: Jobs) -> None:
    """Losses are not scaled, with and without post-validation; a scaler unscales in float32."""
    assert too_far(two["trained"], 1e-6) == {}
    for name in TRAININGS:
        scales = [row[-1] for row in two["trained"][0][name]["seen"]]
        assert scales[2] == scales[1] / 2  # the inf on rank 1 halved it on all
        assert len(set(scales)) > 2


def test_what_makes_no_sense_is_refused(two: Jobs) -> None:
    for rank in two["refusals"]:
        alone, lacking, split, empty, copied = rank
        assert "GradScaler looks for inf on each rank alone: take torch.distributed.fsdp" in alone
        assert "its process group lacks rank" in lacking
        assert "does not split into 4 microbatches of equal size: pass uneven=True, or a list of microbatches" in split
        assert "has no rows" in empty
        assert copied == "a Pipeline cannot be copied: copy its `module` (as AveragedModel(pipeline.module) does)"


def test_a_step_leaves_the_loop_its_random_numbers(two: Jobs) -> None:
    assert two["own_random"] == [True, True]


def test_evaluation_is_that_of_one_process(two: Jobs) -> None:
    """On a tied parameter, a V shape, chunks and both directions, for any number of rows."""
    assert len(two["evaluated"][0]) == 20
    for one in (*two["evaluated"][0], *two["evaluated"][1]):
        assert one["loss"][0] == pytest.approx(one["loss"][1], rel=1e-12)
        assert one["there"]
        assert max(one["outputs"]) < 1e-12
        assert one["left"] < 200  # bytes: an activation of one row has 1,024
        assert one["live"] == 0
        assert not one["grad"]
        assert not one.get("touched")
        assert one.get("listed", [[2, 8], [1, 5]]) == [[2, 8], [1, 5]]
    assert len(two["evaluated"][0][0]["outputs"]) + len(two["evaluated"][1][0]["outputs"]) == 3


def test_evaluation_changes_no_bit_of_training(two: Jobs) -> None:
    """Dropout, running statistics, gradients that wait for their optimizer, and steps that are validated late."""
    found, right = two["evaluating"], two["training alone"]
    for one, other in zip(found, right, strict=True):
        assert one["losses"] == other["losses"]
        assert one["bits"] == other["bits"]
        assert one["training"]
        assert one["seen"][::2] == one["seen"][1::2]  # nothing random
    assert found[0]["seen"] == found[1]["seen"]


def test_all_ranks_refuse_an_evaluation_together(two: Jobs) -> None:
    first, second = two["wrong_evaluations"]
    said = [
        "inputs: needed here",
        "inputs and targets: 2 and 4 microbatches: they must be as many",
        "inputs: give the whole batch, as a tensor or as a list of microbatches",
        "microbatches: at least 1 is needed, got 0",
        "True",  # and then one that works
    ]
    assert first == said
    assert second == [f"rank 0: {said[0]}", said[1], f"rank 0: {said[2]}", f"rank 0: {said[3]}", said[4]]
