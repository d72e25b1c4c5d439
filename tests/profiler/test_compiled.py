"""Models whose layers torch.compile compiled: profiled, and split by their graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from profiler.dataflow import flow
from zbsolve.models.by_name import load

from ..support.split_blocks import assert_same, run

calls: list[bool] = []


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    calls.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A compiler whose kernels count their calls."""

    def kernel(*given: Any) -> Any:
        calls.append(True)
        return graph.forward(*given)

    return kernel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.layer(x)))


def model() -> tuple[Any, ...]:
    """A layer compiled in place, and one that is wrapped."""
    inside, wrapped = Block(), torch.compile(Block(), backend=backend)
    inside.compile(backend=backend)
    x = torch.randn(4, 8)
    return [Block(), inside, wrapped, Block()], (x, x.flip(0)), mse_loss


def test_no_kernel_sees_fake_tensors() -> None:
    """It would read memory that is not there."""
    through = flow(load(f"{__name__}:model"))
    assert [one.tensors[0].shape for one in through.inputs] == [(4, 8)] * 4
    assert calls == []


@pytest.mark.slow
def test_graphs_of_compiled_blocks_draw_the_numbers_of_eager_mode() -> None:
    """Inductor's kernels draw others, so their outputs are not what a graph is compared with."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    right = run(copy.deepcopy(block), x, "layers", fused=True)
    compiled = copy.deepcopy(block)
    compiled.compile()
    assert not torch.equal(run(compiled, x, "layers", fused=True)[0], right[0])
    compiled.zero_grad()
    assert_same(run(compiled, x, "graph"), right)
