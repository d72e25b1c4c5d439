"""Whole runs: gradients equal to the unsplit model; ranks as processes, their failures, torchrun."""

import json
import os
import random
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from zbsolve import BadInput, Schedule, Trace, preset, problem_for, verify
from zbsolve.cli.run import gpus_not_used, unlike_lengths
from zbsolve.exec.run.launch import run_local
from zbsolve.models.by_name import load
from zbsolve.models.model import Model, seeded
from zbsolve.models.presets import GptSizes, gpt, mlp

from ..support.exec_ranks import torchrun
from ..support.exec_tools import a_problem, random_schedule, worst_difference

PLACEMENTS = [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 3), (0, 2, 1, 1, 0)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_equal_the_unsplit_model(placement: tuple[int, ...], fused: bool) -> None:
    problem = a_problem(placement, microbatches=3, fused=fused)
    for seed in range(2):
        assert worst_difference(random_schedule(problem, seed), mlp(0)) < 1e-5


def small(dtype: torch.dtype) -> Model:
    """Six layers, two kinds of norm and activation, all of one type."""

    def layer(i: int) -> nn.Module:
        act = nn.Tanh() if i % 2 else nn.GELU()
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=i % 3 > 0), act).to(dtype)

    def batch(microbatch: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.Generator().manual_seed(microbatch + 100 * step)
        x = torch.randn(6, 8, dtype=dtype, generator=numbers)
        return x, x.roll(1, 1).tanh()

    layers = tuple(seeded(0, i, partial(layer, i)) for i in range(6))
    return Model("small", layers, tuple("abcdef"), batch, nn.functional.mse_loss)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.slow
def test_200_random_orders_and_placements(dtype: torch.dtype, limit: float) -> None:
    """max |gradient − right| / max |right| of each tensor: microbatches add up in another order than in one process."""
    model, rng, worst = small(dtype), random.Random(7), 0.0
    for seed in range(200):
        ranks = rng.randint(1, 4)
        spot = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, 6 - ranks)))]
        rng.shuffle(spot)
        problem = a_problem(tuple(spot), rng.randint(1, 5), layers=6, fused=rng.random() < 0.25)
        worst = max(worst, worst_difference(random_schedule(problem, seed), model))
    assert 0 < worst <= limit


@pytest.mark.parametrize("placement", [(0,), (0, 1, 0), (0, 0, 1)])
def test_a_small_gpt_tied_on_one_rank(placement: tuple[int, ...]) -> None:
    model = gpt("small", 0, GptSizes(width=16, blocks=2, heads=2, batch=2, length=8), tied=placement[-1] == 0)
    assert worst_difference(random_schedule(a_problem(placement, 3, layers=4)), model) < 1e-5


def test_dropout_is_the_same_on_every_rank() -> None:
    base = mlp(0)
    layers = tuple(seeded(0, i, lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5))) for i in range(8))
    model = Model("dropout", layers, base.layer_names, base.batch, base.loss)
    assert worst_difference(random_schedule(a_problem((0, 1, 0, 1), 2)), model) < 1e-5


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_a_run_on_two_ranks() -> None:
    problem = a_problem((0, 1, 1, 0), microbatches=4)
    schedule = random_schedule(problem, 1)
    trace = run_local(schedule, "mlp-tiny", steps=3, check=True, optimizer="adamw")
    assert trace.facts["check"]["passed"]
    assert trace.facts["check"]["tensors"] == 32
    assert len(trace.steps) == len(trace.losses) == len(trace.ready) == 3
    assert len(trace.peaks[0]) == 2
    assert min(trace.peaks[0]) > 0
    for step, ready in zip(trace.steps, trace.ready, strict=True):
        found = [v for v in verify(problem, schedule, step) if v.rule != "dependency"]
        assert not found
        assert (step.start >= ready).all()
        assert (step.end > step.start).all()
        for a, b in zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True):
            assert step.start[b] >= step.end[a]


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_tied_across_ranks_is_summed() -> None:
    schedule = random_schedule(a_problem((0, 1), microbatches=2, layers=10))
    trace = run_local(schedule, "gpt-tiny-tied", steps=2, warmup=0, check=True)
    assert trace.facts["check"]["passed"], trace.facts["check"]


MODEL = """
import torch
from torch import nn

def good():
    return [nn.Linear(4, 4) for _ in range(4)], torch.randn(2, 4)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(MODEL)
    return str(path)


def test_lengths_and_gpus_that_a_run_does_not_use_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = a_problem((0, 1), 4, layers=4)
    assert unlike_lengths(plain) == []
    assert "F of number 1 60 µs, of number 0 20 µs" in unlike_lengths(plain.scaled((1, 3, 1, 1), 0))[0]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    asked = Namespace(device="auto", one_device=None)
    assert "WARNING: this ran on the CPU: torch sees 1 GPU, fewer than this machine's ranks" in gpus_not_used(asked, {})[0]
    assert gpus_not_used(asked, {"on": "cuda:0"}) == gpus_not_used(Namespace(device="cpu", one_device=None), {}) == []


def test_what_does_not_fit_is_said_before_any_rank_starts(own: str) -> None:
    schedule = random_schedule(a_problem((0, 1), 2, layers=4))
    with pytest.raises(BadInput, match="for 4 layers, but the model has 8"):
        run_local(schedule, "mlp-tiny")
    with pytest.raises(BadInput, match=r"did you mean gpt-tiny"):
        run_local(schedule, "gpt-tinny")
    with pytest.raises(BadInput, match="optimizer 'lion'"):
        run_local(schedule, f"{own}:good", optimizer="lion")


def command(*arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m"]
    if ranks:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    return subprocess.run(
        [*start, "zbsolve", *arguments], capture_output=True, text=True, timeout=300, env=environment, check=False
    )


@pytest.mark.slow
def test_torchrun(own: str, tmp_path: Path) -> None:
    problem = a_problem((0, 1), 3, layers=4)
    schedule, out = tmp_path / "s.json", tmp_path / "t.json"
    random_schedule(problem).save(schedule)
    done = command("run", str(schedule), "--model", f"{own}:good", "--check", "--steps", "2", "-o", str(out), ranks=2)
    assert done.returncode == 0, done.stderr
    assert "check: right" in done.stdout
    assert Trace.load(out).problem == problem


def test_torchrun_with_a_wrong_number_of_ranks(own: str, tmp_path: Path) -> None:
    schedule = tmp_path / "s.json"
    random_schedule(a_problem((0, 1), 3, layers=4)).save(schedule)
    done = torchrun(1, "run", str(schedule), "--model", f"{own}:good")
    assert done.returncode != 0
    assert "the schedule is for 2 ranks, but torchrun started 1 (--nproc-per-node 2 on one machine)" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from zbsolve.cli import main

    monkeypatch.delenv("RANK", raising=False)
    schedule, out = tmp_path / "s.json", tmp_path / "t.json"
    random_schedule(a_problem((0, 1), 2)).save(schedule)
    assert main(["run", str(schedule), "--model", "mlp-tiny"]) == 2
    assert "--local" in capsys.readouterr().err
    arguments = ["run", str(schedule), "--model", "mlp-tiny", "--local", "--steps", "2", "--check", "--json", "-o", str(out)]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["check"]["passed"] is True
    assert Trace.load(out).steps
    assert Schedule.load(schedule).problem == Trace.load(out).problem


def test_a_wrong_gradient_fails_the_check() -> None:
    from zbsolve.exec.check import values
    from zbsolve.exec.run.checking import compare
    from zbsolve.exec.transport.wires import ALONE

    layers = dict(enumerate(load("mlp-tiny").build()))
    whole = load("mlp-tiny").build()
    for layer in (*layers.values(), *whole):
        for parameter in layer.parameters():
            parameter.grad = parameter.detach().clone()
    layers[5][1].weight.grad[0, 0] += 1e-3
    verdict = compare(ALONE, [(0,)] * 8, values(layers), whole, (1.0, 1.0))
    assert verdict is not None
    assert not verdict["passed"]
    assert verdict["where"] == "layer 5 1.weight"


@pytest.mark.parametrize(
    ("have", "options", "warned"), [(1, [], True), (2, [], False), (1, ["--emulate", "schedule"], False)]
)
@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_run_says_where_ranks_take_turns_on_cores(
    have: int,
    options: list[str],
    warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from zbsolve.cli import main

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("zbsolve.util.machine.cores", lambda: have)
    schedule = str(tmp_path / "s.json")
    random_schedule(a_problem((0, 1), 2)).save(schedule)
    run = ["run", schedule, "--model", "mlp-tiny", "--local", "--steps", "1", "--warmup", "0", *options]
    assert main(run) == 0
    assert ("WARNING: 2 ranks share 1 core:" in capsys.readouterr().out) == warned


OWN_OPTIMIZER = """
import torch
from torch import nn

def pipeline():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(4)], torch.randn(4, 8)

def optimizer(parameters):
    named = list(zip(parameters.names, parameters, strict=True))
    assert all(int(name.split(".")[0]) < 4 for name in parameters.names)
    plain = [p for name, p in named if name.endswith("0.weight")]
    return [torch.optim.Muon(plain, lr=0.02), torch.optim.AdamW([p for name, p in named if p.dim() < 2], lr=0.5)]
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", ["1f1b", "pipedream-2bw"])
def test_a_models_own_optimizers_train_it(name: str, tmp_path: Path) -> None:
    """Muon for matrices, AdamW for the rest, behind the step or in passes U, where weights are compared with one process."""
    (tmp_path / "own.py").write_text(OWN_OPTIMIZER)
    step = problem_for(name, 2, 4)
    schedule = preset(name, replace(step, layers=(2, 2)))
    trace = run_local(schedule, f"{tmp_path / 'own.py'}:pipeline", steps=3, warmup=0, check=True)
    assert isinstance(trace, Trace)
    assert trace.facts["check"]["passed"]
    assert trace.facts["optimizer"] == "the model's"
    assert trace.losses[-1] < 0.9 * trace.losses[0]


@pytest.mark.usefixtures("forked")
def test_an_optimizer_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_OPTIMIZER.replace("return [torch.optim.Muon", "return 3, [torch.optim.Muon"))
    schedule = preset("1f1b", replace(problem_for("1f1b", 2, 2), layers=(2, 2)))
    with pytest.raises(BadInput, match=r"optimizer\(\): a torch optimizer or a list of them is needed"):
        run_local(schedule, f"{tmp_path / 'own.py'}:pipeline", steps=1, warmup=0)
