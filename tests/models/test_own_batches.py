"""What an own model is fed: no two microbatches alike, and the same on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zbsolve.exec.run.job import Options, run_on_one_device
from zbsolve.models.by_name import load
from zbsolve.util.errors import BadInput

from ..support.exec_tools import a_problem, random_schedule

MODELS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

X, Y = torch.arange(24.0).view(6, 4), torch.arange(6.0)[:, None].expand(6, 4)

def made(sample, loss=nn.functional.mse_loss):
    return [nn.Linear(4, 4), nn.Linear(4, 4)], sample, loss

def one():
    return made((X, Y))
def many():
    return made((torch.arange(64.0).view(16, 4), torch.ones(16, 4)))
def several():
    return made(({"x": X.t().contiguous().t(), "scale": torch.ones(3), "ids": torch.arange(6), "n": 2}, Y))
def row():
    return made((X[:1], Y[:1]))
def sparse():
    return made((X, Y.to_sparse()))
def function():
    return made(lambda microbatch, step: (torch.full((2, 4), 10.0 * step + microbatch), torch.randn(2, 4)))
def alone():
    return [nn.Linear(4, 4)], lambda microbatch, step: torch.full((2, 4), 1.0 + microbatch)
def endless():
    def items():
        number = 0
        while True:
            yield torch.full((2, 4), float(number)), torch.randn(2, 4)
            number += 1
    return made(items())
def few():
    return made(iter([(torch.full((2, 4), float(i)), torch.randn(2, 4)) for i in range(10)]))
def loader():
    return made(DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True))
def odd():
    return made(lambda microbatch, step: (X[: 2 + microbatch], Y[: 2 + microbatch]))
def wrong():
    return made(lambda microbatch, step: (X, Y, Y) if microbatch else (X, Y))
def raising():
    return made(lambda microbatch, step: (X, Y)[step])
def strings():
    return made(iter(["a"] * 20))
def array():
    return made([object()])
def nothing():
    return made(iter([]))
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fed.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)


def test_rows_of_one_sample_are_drawn_for_each_microbatch_and_step() -> None:
    model, again = load("fed.py:one"), load("fed.py:one")
    whole, _ = model.batch(0, 0)
    assert torch.equal(whole, torch.arange(24.0).view(6, 4))  # what is profiled is the sample itself
    seen: list[set[Any]] = [set(), set(), set()]
    for m, step in [(m, step) for m in range(100) for step in range(3)]:
        x, y = model.batch(m, step)
        assert (x.shape, x.dtype, y.shape, y.dtype) == ((6, 4), torch.float32, (6, 4), torch.float32)
        assert torch.equal(x[:, 0] / 4, y[:, 0])  # a row of the input keeps its target
        assert torch.equal(x, again.batch(m, step)[0])  # as another rank makes it
        seen[step].add(tuple(sorted(x[:, 0].tolist())))
    assert [len(one) for one in seen] == [100] * 3  # no two have the same rows, in whatever order: gradients differ
    assert sum(model.batch(m, 1)[0].equal(model.batch(m, 2)[0]) for m in range(100)) < 5
    many = load("fed.py:many")
    assert len({tuple(sorted(many.batch(m, 0)[0][:, 0].tolist())) for m in range(100)}) == 100
    assert not torch.equal(model.batch(1, 0)[0], load("fed.py:one", seed=1).batch(1, 0)[0])


def test_what_has_no_rows_stays() -> None:
    x, y = load("fed.py:several").batch(2, 1)
    assert torch.equal(x["x"][:, 0] / 4, x["ids"].float())
    assert torch.equal(x["ids"].float(), y[:, 0])
    assert x["x"].stride() == (1, 6)
    assert (x["n"], x["scale"].tolist()) == (2, [1.0] * 3)
    for name in ("row", "sparse"):
        model = load(f"fed.py:{name}")
        assert all(model.batch(m, 1)[0] is model.batch(0, 0)[0] for m in range(3))


def test_a_function_gives_each_microbatch() -> None:
    models = [load("fed.py:function", seed=3) for _ in range(2)]
    (x, y), (_, same), (_, other) = models[0].batch(2, 5), models[1].batch(2, 5), models[0].batch(3, 5)
    assert x[0, 0] == 52
    assert torch.equal(y, same)
    assert not torch.equal(y, other)
    assert load("fed.py:alone").batch(1, 0)[0][0, 0] == 2


def test_an_iterable_is_read_once_in_its_order() -> None:
    model, late = load("fed.py:endless").in_steps_of(4), load("fed.py:endless").in_steps_of(4)
    batches = [model.batch(m, step) for step in range(3) for m in range(4)]
    assert [int(x[0, 0]) for x, _ in batches] == list(range(12))
    torch.randn(5)  # what a rank draws beside it changes nothing
    assert torch.equal(late.batch(3, 2)[1], batches[11][1])
    loader = load("fed.py:loader").in_steps_of(2)
    rows = [loader.batch(m, step)[0] for step in range(3) for m in range(2)]
    for epoch in (rows[:3], rows[3:]):
        assert sorted(torch.cat(epoch)[:, 0].tolist()) == [0, 4, 8, 12, 16, 20]
    assert [int(load("fed.py:few").batch(m, 7)[0][0, 0]) for m in range(3)] == [0, 1, 2]  # where steps are not counted


def test_microbatches_of_sizes_take_the_rows_in_turn() -> None:
    """Two pipelines of 3 microbatches, 1, 4 and 3 rows each, of batches of 2: 8 of them a step."""
    sizes = (1, 4, 3) * 2
    for name in ("endless", "function", "loader", "several"):
        model, plain = load(f"fed.py:{name}").in_steps_of(6, sizes), load(f"fed.py:{name}").in_steps_of(8)
        for step in range(2):
            batches = [model.batch(m, step) for m in range(6)]
            count = 16 // len(_first(plain.batch(0, step)[0]))
            rows = torch.cat([_first(plain.batch(m, step)[0]) for m in range(count + (16 % 6 > 0 and name == "several"))])
            assert [len(_first(x)) for x, _ in batches] == [len(y) for _, y in batches] == list(sizes)
            assert torch.equal(torch.cat([_first(x) for x, _ in batches]), rows[:16])
    problem = replace(a_problem((0, 1), 3, layers=2), sizes=(1, 4, 3))
    trace = run_on_one_device(random_schedule(problem), "fed.py:loader", Options(steps=1, check=True))
    assert trace.facts["check"]["passed"]
    with pytest.raises(BadInput, match="among those of 2: sizes need as many in all"):
        load("fed.py:odd").in_steps_of(2, (3, 3)).batch(0, 0)


def _first(value: Any) -> torch.Tensor:
    found: torch.Tensor = value["x"] if isinstance(value, dict) else value
    return found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wrong", r"the sample of wrong\(\) must be \(input, target\)"),
        ("raising", r"microbatch 1 of step 2 raised IndexError"),
        ("strings", r"the sample of strings\(\) must be \(input, target\)"),
        ("array", r"the sample of array\(\) must be \(input, target\)"),
        ("nothing", r"the iterator gives 0 microbatches, and number 1 is needed"),
        ("few", r"the iterator gives 10 microbatches, and number 11 is needed"),
    ],
)
def test_what_is_no_microbatch_is_said(name: str, text: str) -> None:
    with pytest.raises(BadInput, match=rf"^model 'fed.py:{name}': .*{text}"):
        load(f"fed.py:{name}").in_steps_of(5).batch(1, 2)


@pytest.mark.parametrize("name", ["one", "function", "few", "loader"])
def test_runs_are_right(name: str) -> None:
    problem = a_problem((0, 1), microbatches=2, layers=2)
    found = run_on_one_device(random_schedule(problem, seed=1), f"fed.py:{name}", Options(steps=3, warmup=1, check=True))
    assert found.facts["check"]["passed"]
    assert found.facts["check"]["reference_loss"] == pytest.approx(found.facts["check"]["loss"], rel=1e-6)
    assert len(set(found.losses)) == 3


def test_the_wrong_microbatch_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that computes its first microbatch twice, and its second one never."""
    from zbsolve.exec.one_device import OneDevice

    step = OneDevice.step

    def wrong(self: OneDevice, inputs: dict, targets: dict, **how: object) -> object:
        return step(self, {**inputs, 1: inputs[0]}, {**targets, 1: targets[0]}, **how)

    monkeypatch.setattr(OneDevice, "step", wrong)
    schedule = random_schedule(a_problem((0, 1), microbatches=2, layers=2), seed=1)
    found = run_on_one_device(schedule, "fed.py:one", Options(steps=1, warmup=0, check=True))
    assert not found.facts["check"]["passed"]
