"""A loss that is no mean over rows is told: the check against one process cannot see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbsolve.exec.check import uneven_loss
from zbsolve.exec.handlers.handler import Data

ENTROPY = nn.functional.cross_entropy


def summed(output: Tensor, target: Tensor) -> Tensor:
    return ENTROPY(output, target, reduction="sum")


def padded(output: Tensor, target: Tensor) -> Tensor:
    return ENTROPY(output, target, ignore_index=0)


@pytest.mark.parametrize(("loss", "differs"), [(ENTROPY, False), (summed, True), (padded, True)])
@pytest.mark.parametrize("rows", [2, 5])
def test_a_sum_and_a_mean_without_padding_are_uneven(loss: Any, differs: bool, rows: int) -> None:
    torch.manual_seed(0)
    target = torch.tensor([0, *range(1, rows)])  # the first row is padding
    inputs = {m: torch.randn(rows, 4) for m in range(2)}
    targets = {0: target, 1: torch.ones_like(target)}
    found = uneven_loss([nn.Linear(4, 6)], Data(inputs, targets, 0), loss)
    assert (found is not None) == differs
    if found is not None and loss is summed:
        assert found[0] == pytest.approx(2 * found[1])


def test_nothing_is_said_of_outputs_without_rows() -> None:
    inputs = {m: torch.randn(2, 4) for m in range(2)}
    assert uneven_loss([nn.Linear(4, 6)], Data(inputs, {0: 1, 1: 2}, 0), lambda y, t: y.sum() * t) is None


def test_a_loss_for_one_size_alone_is_left_in_peace() -> None:
    def fixed(output: Tensor, target: Tensor) -> Tensor:
        return ENTROPY(output.reshape(5, 6), target)

    inputs, targets = {m: torch.randn(5, 4) for m in range(2)}, {m: torch.ones(5, dtype=torch.int64) for m in range(2)}
    assert uneven_loss([nn.Linear(4, 6)], Data(inputs, targets, 0), fixed) is None
