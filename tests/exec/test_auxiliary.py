"""Losses that layers make themselves: they count in the loss and in all gradients, on any stage and however it is split."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from profiler.dataflow import flow
from profiler.roofline import estimate
from zbsolve import BadInput, preset, solve
from zbsolve.build import with_updates
from zbsolve.exec import Pipeline, auxiliary_loss, auxiliary_losses
from zbsolve.exec.check import reference
from zbsolve.exec.run.job import Options, run_on_one_device
from zbsolve.exec.run.launch import run_local
from zbsolve.models.by_name import load
from zbsolve.util.errors import RunFailed

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, random_schedule
from ..support.trials import TRIED, Batches, Trial, too_far, tried

SPEC = f"{__name__}:model"
WIDTH, LAYERS, MICROBATCHES = 6, 6, 3
loss = nn.functional.mse_loss


class Experts(nn.Module):
    """Two experts, whose shares of the rows are to be alike."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(WIDTH, 2), nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(self.norm(x)).softmax(-1)
        auxiliary_loss(0.5 * shares.mean(0).square().sum())
        auxiliary_loss(0.1 * self.gate.weight.square().mean())
        return torch.tanh(sum(one(x) * shares[:, i : i + 1] for i, one in enumerate(self.experts)))  # type: ignore[arg-type]


def layers(numbers: list[int]) -> list[nn.Module]:
    """A layer that adds nothing among others that do, the same wherever they are built."""
    made: list[nn.Module] = []
    for i in numbers:
        torch.default_generator.manual_seed(i)
        made.append(nn.Linear(WIDTH, WIDTH) if i == 2 else Experts())
    return made


def model() -> Any:
    """For `module:function`."""
    x = torch.randn(4, WIDTH)
    return [nn.Linear(WIDTH, WIDTH) if i == 2 else Experts() for i in range(LAYERS)], (x, x.roll(1, 1)), loss


def batch(place: int, step: int, rows: tuple[int, ...] = (2, 2, 2)) -> Batches:
    """Inputs and targets."""
    x = torch.randn(sum(rows), WIDTH, generator=torch.Generator().manual_seed(sum(rows)))
    return x.split(rows), x.roll(1, 0).split(rows)


def uneven(place: int, step: int) -> Batches:
    return batch(place, step, (3, 2, 2))


def whole() -> list[nn.Module]:
    return layers(list(range(LAYERS)))


def trial(placement: tuple[int, ...], split: str = "layers", rows: bool = False, scaled: bool = False, **how: Any) -> Trial:
    return Trial(
        problem=a_problem(placement, MICROBATCHES, layers=LAYERS, **how),
        layers=layers,
        batch=uneven if rows else batch,
        order=1,
        options={"split": split},
        uneven=rows,
        scaler=(lambda: ShardedGradScaler("cpu", init_scale=8.0)) if scaled else None,
    )


TRIALS = {
    "plain": trial((0, 1)),
    "vee, recompute": trial((0, 1, 1, 0), recompute="all"),
    "fused": trial((0, 1), fused=True),
    "loop, uneven": trial((0, 1, 0, 1), rows=True),
    "scaled": trial((0, 1), scaled=True),
    "graph, vee, recompute, uneven": trial((0, 1, 1, 0), "graph", rows=True, recompute="all"),
    "graph, fused, scaled": trial((0, 1), "graph", scaled=True, fused=True),
}
EVALUATED = {"vee": replace(trial((0, 1, 1, 0)), uneven=True)}


@pytest.mark.slow
def test_gradients_and_losses_are_the_whole_models() -> None:
    """`reference` adds up what layers add; below it is held against a sum by hand."""
    assert too_far(on_ranks(2, TRIED, f"{__name__}:TRIALS", timeout=120), 2e-6) == {}


def test_the_whole_models_loss_has_them() -> None:
    ran, (inputs, targets), right = TRIALS["loop, uneven"], uneven(0, 0), 0.0
    for x, y in zip(inputs, targets, strict=True):
        with auxiliary_losses() as extra:
            for layer in whole():
                x = layer(x)
        right += float((loss(x, y) + extra.total).detach()) * len(y) / 7
    assert reference(whole(), ran.data((inputs, targets)), loss) == pytest.approx(right, rel=1e-6)
    assert float(extra.total.detach()) > 0.1


def evaluated(rank: int, where: str) -> dict[str, float]:
    """Evaluations of several numbers of rows."""
    batches = [batch(0, 0, rows) for rows in ((2, 2, 2), (3, 2, 2), (1, 1, 1))]
    return tried(rank, where, lambda trial, pipe: trial.evaluated(pipe, batches))


def test_an_evaluation_counts_them() -> None:
    for found in on_ranks(2, f"{__name__}:evaluated", f"{__name__}:EVALUATED"):
        assert found["vee"] < 1e-6


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_a_profile_and_a_checked_run_know_them() -> None:
    model = load(SPEC)
    assert flow(model).prints[0] == flow(model).prints[1]
    profile = estimate(SPEC, "h100")
    schedule = solve(profile.problem(2, 4), effort=0.02)
    updating = preset("pipedream", with_updates(profile.problem(2, 4), 1, every=2, delay=2))
    traces = [
        run_on_one_device(schedule, SPEC, Options(steps=1, warmup=0, check=True)),
        run_local(schedule, SPEC, steps=1, warmup=0, timeout=90, check=True, mesh="dp=2"),
        run_local(updating, SPEC, steps=1, warmup=0, timeout=90, check=True),
    ]
    for trace in traces:
        assert trace.facts["check"]["passed"]


class Wrong(nn.Module):
    """Adds what is no number."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.layer, self.why = nn.Linear(WIDTH, WIDTH), why

    def forward(self, x: Tensor) -> Tensor:
        if self.why == "shape":
            auxiliary_loss(x.mean(0))
        with torch.no_grad():
            if self.why == "no gradient":
                auxiliary_loss(x.mean())
        if self.why == "nan":
            auxiliary_loss(self.layer.weight.sum() * float("nan"))
        return self.layer(x)


def wrong(rank: int, reasons: list[str]) -> list[str]:
    """What a step says of each."""
    said = []
    for why in reasons:
        schedule = random_schedule(a_problem((0,), MICROBATCHES, layers=2))
        runner = Pipeline([nn.Linear(WIDTH, WIDTH), Wrong(why)], schedule, loss=loss, timeout=60, watch=True)
        with pytest.raises(RunFailed) as error:
            runner.step(*map(torch.cat, batch(0, 0)))
        said.append(str(error.value))
    return said


def test_what_cannot_count_is_refused() -> None:
    right = {
        "shape": r"auxiliary_loss: \(6,\) torch.float32 is no floating-point tensor of one number",
        "no gradient": r"auxiliary_loss: no gradient is recorded here .*",
        "nan": r"its loss is nan.*",
    }
    (said,) = on_ranks(1, f"{__name__}:wrong", list(right))
    for line, text in zip(said, right.values(), strict=True):
        assert re.fullmatch(rf"rank 0, pass 0F\d: {text}", line)


def test_plain_code_collects_them() -> None:
    weight = nn.Parameter(torch.ones(()))
    auxiliary_loss(weight)  # nobody collects
    with auxiliary_losses() as outer:
        auxiliary_loss(2 * weight)
        with auxiliary_losses() as inner:
            auxiliary_loss(3 * weight)
        auxiliary_loss(4 * weight)
    assert inner.total is not None
    assert outer.total is not None
    assert (float(inner.total.detach()), float(outer.total.detach())) == (3.0, 6.0)
    with pytest.raises(BadInput, match="one number"), auxiliary_losses():
        auxiliary_loss(torch.ones(2))
    with torch.no_grad(), auxiliary_losses() as silent:
        auxiliary_loss(weight)
    assert silent.total is not None
