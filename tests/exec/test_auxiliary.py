"""Losses that layers make themselves: they count in the loss and in all gradients, on any stage and however it is split."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from profiler.dataflow import flow
from profiler.roofline import estimate
from zbsolve import BadInput, preset, solve
from zbsolve.build import with_updates
from zbsolve.exec import auxiliary_loss, auxiliary_losses
from zbsolve.exec.run.job import Options, run_on_one_device
from zbsolve.exec.run.launch import run_local
from zbsolve.models.by_name import load

from ..support.exec_ranks import on_ranks

SPEC = "tests.support.exec_jobs_auxiliary:model"
JOB = "tests.support.exec_jobs_auxiliary:"
CASES: list[dict[str, Any]] = [
    {"split": "layers", "placement": (0, 1)},
    {"split": "layers", "placement": (0, 1, 1, 0), "recompute": "all"},
    {"split": "layers", "placement": (0, 1), "fused": True},
    {"split": "layers", "placement": (0, 1, 0, 1), "rows": 7},
    {"split": "layers", "placement": (0, 1), "scaled": True},
    {"split": "graph", "placement": (0, 1, 1, 0), "recompute": "all", "rows": 7},
    {"split": "graph", "placement": (0, 1), "fused": True, "scaled": True},
]


@pytest.mark.slow
def test_gradients_and_losses_are_the_whole_models() -> None:
    for rank in on_ranks(2, f"{JOB}trained", CASES, timeout=120):
        for case, (loss, gradient) in zip(CASES, rank, strict=True):
            assert loss < 1e-6, case
            assert gradient < 2e-6, case


def test_an_evaluation_counts_them() -> None:
    for rank in on_ranks(2, f"{JOB}evaluated", "layers", timeout=60):
        assert max(rank) < 1e-6


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


def test_what_cannot_count_is_refused() -> None:
    for why, text in {
        "shape": r"auxiliary_loss: \(6,\) torch.float32 is no floating-point tensor of one number",
        "no gradient": r"auxiliary_loss: no gradient is recorded here .*",
        "nan": r"its loss is nan.*",
    }.items():
        assert re.fullmatch(rf"RunFailed: rank 0, pass 0F\d: {text}", on_ranks(1, f"{JOB}wrong", why)[0])


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
