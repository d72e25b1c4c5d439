"""A loss in which rows do not count alike is told, at random weights too: the check against one process cannot see it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zbsolve.cli.run import _of_rows
from zbsolve.exec.base.part import Data
from zbsolve.exec.check import RowCounts, row_counts
from zbsolve.exec.run.job import Options, run_on_one_device

from ..support.exec_tools import a_problem, random_schedule

ENTROPY = nn.functional.cross_entropy


def counted(loss: Callable[..., Tensor], rows: int = 4, scale: float = 1.0) -> RowCounts | None:
    """Of two microbatches of a model whose outputs are as large as `scale`; of the labels of each row some are 0."""
    labels = torch.randint(1, 6, (2, rows, 8))
    for i in range(rows):
        labels[:, i, : 2 * i % 7] = 0
    inputs = {m: scale * torch.randn(rows, 8, 4) for m in range(2)}
    return row_counts([nn.Linear(4, 6, bias=False)], Data(inputs, dict(enumerate(labels)), 0), loss)


def of_labels(output: Tensor, labels: Tensor, **how: object) -> Tensor:
    return ENTROPY(output.flatten(0, 1), labels.flatten(), **how)  # type: ignore[arg-type]


def over_constant(output: Tensor, labels: Tensor) -> Tensor:
    return of_labels(output, labels, ignore_index=0, reduction="sum") / 17


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_rows_of_means_and_sums_count_alike(rows: int, scale: float) -> None:
    """A scale of 1e-4 is that of random weights: all losses are log 6, so nothing but gradients can tell them apart."""
    assert counted(of_labels, rows, scale) == (False, 1)
    assert counted(partial(of_labels, reduction="sum"), rows, scale) == (True, 1)
    assert counted(over_constant, rows, scale) == (True, 1)
    assert counted(lambda output, labels: output.square().mean(), rows, scale) == (False, 1)
    assert counted(lambda output, labels: output.square().sum(-1).mean(0).sum(), rows, scale) == (False, 1)


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_a_mean_that_leaves_out_padding_is_told(scale: float) -> None:
    found = counted(partial(of_labels, ignore_index=0), scale=scale)
    assert found is not None
    assert not found.add_up
    # Of 8 rows with 8, 6, 4, 2, … labels one with 2 makes 2/40 of the loss of all, and as a row it would make 1/8.
    assert found.uneven == pytest.approx((1 / 8) / (2 / 40), rel=1e-3)
    weights = torch.tensor([0.1, 1.0, 1.0, 1.0, 1.0, 5.0])
    weighted = counted(partial(of_labels, weight=weights), scale=scale)
    assert weighted is not None
    assert weighted.uneven > 1.05


def test_a_row_without_labels_does_not_hide_it() -> None:
    targets = torch.tensor([1, 0])  # a mean over the rows that count: of none it is no number
    inputs = {m: torch.randn(2, 4) for m in range(2)}
    found = row_counts([nn.Linear(4, 6)], Data(inputs, {0: targets, 1: targets}, 0), partial(ENTROPY, ignore_index=0))
    assert found is not None
    assert found.uneven > 1.9


def test_nothing_is_said_of_outputs_without_rows() -> None:
    inputs = {m: torch.randn(2, 4) for m in range(2)}
    assert row_counts([nn.Linear(4, 6)], Data(inputs, {0: 1, 1: 2}, 0), lambda y, t: y.sum() * t) is None


def test_a_loss_for_one_size_alone_is_left_in_peace() -> None:
    def fixed(output: Tensor, target: Tensor) -> Tensor:
        return ENTROPY(output.reshape(5, 6), target)

    inputs, targets = {m: torch.randn(5, 4) for m in range(2)}, {m: torch.ones(5, dtype=torch.int64) for m in range(2)}
    assert row_counts([nn.Linear(4, 6)], Data(inputs, targets, 0), fixed) is None


MODEL = """
import torch
from torch import nn

def naive(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)
def constant(output, target):
    summed = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
    return summed / 20
def mean(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten().clamp(min=0))

def made(loss):
    tokens = torch.randint(50, (4, 8))
    target = tokens.roll(-1, 1)
    for row in range(4):
        target[row, 8 - 2 * row:] = -100
    return [nn.Embedding(50, 16), nn.Linear(16, 50)], (tokens, target), loss
def wrong():
    return made(naive)
def right():
    return made(constant)
def plain():
    return made(mean)

class Drawing(nn.Linear):
    def forward(self, x):
        return super().forward(x) * torch.rand((), generator=self.own)

def drawing():
    (first, _), sample, loss = made(mean)
    last = Drawing(16, 50)
    last.own = torch.Generator().manual_seed(0)
    return [first, last], sample, loss
"""


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("wrong", "WARNING: in the loss a row counts up to "),
        ("right", "the loss of rows is the sum of theirs: "),
        ("plain", ""),
        ("drawing", ""),  # looking at the loss draws nothing that the step would
    ],
)
def test_a_run_says_it(name: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "llm.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    schedule = random_schedule(a_problem((0, 1), microbatches=4, layers=2), seed=1, in_order=True)
    found = run_on_one_device(schedule, f"llm.py:{name}", Options(steps=1, warmup=0, check=True)).facts["check"]
    assert found["passed"]
    said = _of_rows(found["loss_of_rows"])
    assert said.startswith(line)
    assert bool(said) == bool(line)
