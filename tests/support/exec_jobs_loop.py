"""What the tests of a training loop run on gloo ranks (see `exec_ranks`)."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from zbsolve import Schedule, pipeline
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.check import difference, named, reference
from zbsolve.exec.handlers import Data
from zbsolve.exec.memory import LiveBytes
from zbsolve.models.presets import GptSizes, gpt

from .exec_tools import a_problem, random_schedule, refusal, split_layers, worst

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


def whole_after(inputs: Tensor, targets: Tensor) -> tuple[nn.ModuleList, float]:
    """The unsplit model with the gradients of one batch, and its loss."""
    whole = nn.ModuleList(layers())
    return whole, reference(list(whole), Data({0: inputs}, {0: targets}), MODEL.loss)


def compared(runner: Pipeline, given: Any, inputs: Tensor, targets: Tensor, **how: Any) -> dict[str, float]:
    """A step of a batch as it is given, beside one process's of its rows."""
    runner.module.zero_grad()
    loss = runner.step(*given, **how).loss
    whole, right = whole_after(inputs, targets)
    return {"loss": loss, "right": right, "worst": worst(runner, whole)}


def clipped(rank: int, _: None) -> list[dict[str, Any]]:
    """Norms and gradients after clipping, and those of one process."""
    result = []
    for schedule in schedules():
        runner = runner_of(schedule)
        for max_norm, kind in ((0.01, 2.0), (1e9, 2.0), (0.01, math.inf), (0.5, 1.0)):
            batch = rows(4)
            runner.module.zero_grad()
            runner.step(*batch)
            norm = runner.clip_grad_norm_(max_norm, kind)
            whole, _ = whole_after(*batch)
            right = clip_grad_norm_(whole.parameters(), max_norm, kind)
            result.append({"norm": float(norm), "right": float(right), "worst": worst(runner, whole)})
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


def uneven(rank: int, _: None) -> list[dict[str, Any]]:
    """Batches that do not split, one of them with fewer rows than microbatches, and a list."""
    result = []
    for schedule in schedules(3):
        if len(schedule.problem.routes) > 1:
            schedule = both_ways(3)
        runner = runner_of(schedule)
        for count in (7, 2, 6):
            inputs, targets = rows(count)
            given: list[Any] = [(inputs, targets)]
            if count == 7:
                given.append([one.split([4, 2, 1]) for one in (inputs, targets)])
            result += [compared(runner, one, inputs, targets, uneven=True) for one in given]
    return result


def sized(rank: int, _: None) -> dict[str, Any]:
    """A schedule that says how large microbatches are: batches of 6 and of 12 rows, a list, and what is refused."""
    schedule = schedules(3)[1]
    runner, found = runner_of(replace(schedule, problem=replace(schedule.problem, sizes=(2, 6, 4)))), []
    for count in (6, 12):
        inputs, targets = rows(count)
        split = [count // 6, count // 2, count // 3]
        parts = [list(one.split(split)) for one in (inputs, targets)]
        found += [compared(runner, one, inputs, targets) for one in ((inputs, targets), parts)]
    even = [one.chunk(3) for one in rows(6)]
    tries = [lambda: runner.step(*rows(7)), lambda: runner.step(*even), lambda: runner.step(*rows(6), uneven=True)]
    return {"found": found, "refused": [refusal(one) for one in tries]}


def scaled(rank: int, validated: bool) -> dict[str, Any]:
    """Training with loss scaling, inf in some gradients of rank 1 alone, and the same in one process."""
    runner = runner_of(schedules()[0])
    inner = torch.optim.SGD(runner.parameters(), 0.1, momentum=0.9)
    optimizer: torch.optim.Optimizer = PostValidated(runner, inner, max_norm=1e9) if validated else inner
    scaler = ShardedGradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    whole = nn.ModuleList(layers())
    plain, other = (
        torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9),
        torch.amp.GradScaler("cpu", 2.0**20, growth_interval=3),
    )
    losses, right, scales = [], [], []
    for step in range(8):
        inputs, targets = rows(4, step)
        losses.append(runner.step(inputs, targets, scaler=scaler).loss)
        loss = MODEL.loss(nn.Sequential(*whole)(inputs), targets)
        right.append(float(loss.detach()))
        other.scale(loss).backward()
        if step in (2, 5):
            whole[-1].get_parameter("norm.weight").grad[0] = math.inf  # type: ignore[index]
            if rank == 1:
                runner.layers[LAYERS - 1].get_parameter("norm.weight").grad[0] = math.inf  # type: ignore[index]
        scaler.unscale_(optimizer)
        other.unscale_(plain)
        norms = float(runner.clip_grad_norm_(0.5)), float(clip_grad_norm_(whole.parameters(), 0.5))
        for one, optimizer_of in ((scaler, optimizer), (other, plain)):
            one.step(optimizer_of)
            one.update()
            optimizer_of.zero_grad()
        scales.append([scaler.get_scale(), other.get_scale(), *norms])
    runner.finish()
    expected, found = named(dict(enumerate(whole))), named(runner.layers)
    far = max(difference(p.detach(), expected[place].detach()) for place, p in found.items())
    return {"losses": losses, "right": right, "scales": scales, "worst": far}


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
        runner.step(*rows(4)).seen.wait()
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
