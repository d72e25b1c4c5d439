"""Layers of the meta device: every value that a rank computes with was given by somebody, or is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zbsolve.exec import Pipeline
from zbsolve.exec.layers import is_unset, mark_unset, materialise
from zbsolve.util.errors import BadInput

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, random_schedule

CPU = torch.device("cpu")
COS = torch.arange(4.0).cos()
FLOATS = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


class Rotary(nn.Module):
    """A linear layer, a gain, and a table that no checkpoint has."""

    def __init__(self, where: str | None = None, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("cos", torch.arange(4.0, device=where).cos().to(kind), persistent=False)


class Resetting(Rotary):
    """The same with a function that makes the table."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        self.cos = torch.arange(4.0).cos()


def made(build: Callable[[], nn.Module], init: Any) -> nn.Module:
    with torch.device("meta"):
        layer = build()
    return materialise({3: layer}, CPU, init, seed=1)[3]


def halves(number: int, layer: nn.Module) -> None:
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.5)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_buffer_that_init_leaves_is_refused(kind: torch.dtype) -> None:
    with pytest.raises(BadInput, match=r"layer 3\.cos: init leaves this buffer .* without values.*device='cpu'"):
        made(lambda: Rotary(kind=kind), halves)


def test_a_parameter_that_init_leaves_is_refused() -> None:
    def forgets(number: int, layer: nn.Module) -> None:
        layer.linear.reset_parameters()  # type: ignore[operator, union-attr]
        layer.cos.copy_(COS)  # type: ignore[operator, union-attr]

    def in_part(number: int, layer: nn.Module) -> None:
        forgets(number, layer)
        layer.gain.data[:2] = 1  # type: ignore[index, union-attr]

    for init in (forgets, in_part):
        with pytest.raises(BadInput, match=r"layer 3\.gain: init leaves this parameter of the meta device without values"):
            made(Rotary, init)


def test_reset_parameters_makes_buffers_and_leaves_what_init_gave() -> None:
    layer: Any = made(lambda: nn.Sequential(Resetting(), nn.BatchNorm1d(4)), halves)
    assert torch.equal(layer[0].cos, COS)
    assert layer[0].gain.tolist() == layer[1].weight.tolist() == [0.5] * 4
    assert layer[1].running_var.tolist() == [1] * 4
    assert int(layer[1].num_batches_tracked) == 0


def test_what_has_memory_keeps_its_values() -> None:
    by_init: Any = made(lambda: nn.Sequential(Rotary("cpu"), nn.Linear(4, 4)), halves)
    by_modules: Any = made(lambda: nn.Sequential(Resetting("cpu"), nn.Linear(4, 4)), None)
    assert torch.equal(by_init[0].cos, COS)
    assert torch.equal(by_modules[0].cos, COS)


def test_reset_parameters_that_leaves_something_is_refused() -> None:
    class Half(Rotary):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.gain)

    with pytest.raises(BadInput, match=r"layer 3\.cos: Half\.reset_parameters leaves this buffer .*: fill it there, or"):
        made(Half, None)


def test_places_that_hold_one_tensor_still_do() -> None:
    def twice() -> nn.Module:
        layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        layer[1].weight = layer[0].weight
        return layer

    layer: Any = made(twice, halves)
    assert layer[0].weight is layer[1].weight
    assert len(list(layer.parameters())) == 3


@pytest.mark.parametrize("kind", [*FLOATS, *WHOLE])
def test_memory_that_nobody_filled_is_recognised(kind: torch.dtype) -> None:
    for shape in ((3, 2), ()):
        tensor = torch.empty(shape, dtype=kind)
        mark_unset(tensor)
        assert is_unset(tensor)
        tensor.copy_(torch.ones(shape))
        assert not is_unset(tensor)


def tied_on_meta(rank: int, order: list[int]) -> float:
    """A model on the meta device whose last layer has the first one's weights; `init` fills those of the first alone. The
    weight's value on this rank. order: stage → rank."""
    with torch.device("meta"):
        whole = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    whole[3].weight = whole[0].weight

    def init(number: int, layer: nn.Module) -> None:
        if number < 3:
            nn.init.constant_(layer.weight, 7.0 if number == 0 else 0.1)  # type: ignore[arg-type]

    schedule = random_schedule(a_problem(tuple(order), 2, layers=4))
    runner = Pipeline(whole, schedule, loss=nn.functional.mse_loss, init=init)
    return float(runner.layers[0 if rank == order[0] else 3].weight[0, 0])  # type: ignore[index]


def test_a_tied_place_takes_the_first_ones_values_on_any_rank() -> None:
    """The head has the embedding's weights, and init fills the embedding alone; also where an earlier rank has the head."""
    orders = [("tied_on_meta", order) for order in ((0, 1), (1, 0))]
    assert on_ranks(2, __name__, orders) == [[7.0, 7.0]] * 2
