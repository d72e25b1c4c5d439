"""Weight gradients deferred inside layers are those of plain autograd, each W frees what it used."""

import copy
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.split import Deferral, defer, restore, run_queue
from zbsolve.exec.stage import Stage


def both(module: nn.Module, x: torch.Tensor, passes: int = 2) -> tuple[nn.Module, nn.Module]:
    """`passes` deferred backwards, and as many plain ones of a copy."""
    plain, deferral = copy.deepcopy(module), Deferral()
    defer(module, deferral)
    for _ in range(passes):
        a = x.clone().requires_grad_() if x.is_floating_point() else x
        b = x.clone().requires_grad_() if x.is_floating_point() else x
        queue: deque = deque()
        with deferral.into(queue):
            y = module(a)
        y.square().sum().backward()
        run_queue(queue)
        plain(b).square().sum().backward()
        if x.is_floating_point():
            torch.testing.assert_close(a.grad, b.grad)
    return module, plain


def same(module: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=name)


class Twice(nn.Module):
    """One layer used twice, and its weight once more outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.layer(self.layer(x).tanh())) @ self.layer.weight


MODULES = {
    "linear": lambda: nn.Linear(8, 4),
    "no bias": lambda: nn.Linear(8, 4, bias=False),
    "norms": lambda: nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8), nn.Linear(8, 8)),
    "used twice": Twice,
    "frozen weight": lambda: _freeze(nn.Linear(8, 4), "weight"),
    "frozen": lambda: nn.Sequential(_freeze(nn.Linear(8, 8), "weight", "bias"), nn.Linear(8, 2)),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(8, 4)),
    "other layers": lambda: nn.Sequential(nn.PReLU(), nn.Linear(8, 8)),
}


def _freeze(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_autograd(name: str) -> None:
    torch.manual_seed(0)
    same(*both(MODULES[name](), torch.randn(3, 5, 8)))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}])
def test_embedding(options: dict) -> None:
    torch.manual_seed(0)
    same(*both(nn.Embedding(6, 4, **options), torch.tensor([[0, 1, 1], [5, 2, 0]])))


def test_nothing_is_deferred_without_a_queue_and_restore_undoes() -> None:
    layer, deferral = nn.Linear(3, 3), Deferral()
    defer(layer, deferral)
    layer(torch.randn(2, 3)).sum().backward()
    assert layer.weight.grad is not None
    restore(layer)
    assert "forward" not in layer.__dict__


def test_weights_run_only_in_W_and_memory_goes() -> None:
    stage = Stage([nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)], first=1)
    parameters = stage.parameters()
    meter = LiveBytes(parameters)
    with meter:
        stage.forward(0, torch.randn(32, 64), None, split=True)
        after_f = meter.now
        assert stage.backward(0, torch.randn(32, 64)).shape == (32, 64)
        assert all(p.grad is None for p in parameters)
        after_b = meter.now
        stage.weights(0)
        meter.ignore(p.grad for p in parameters)
        after_w = meter.now
    unit = 32 * 64 * 4
    assert (after_f, after_b, after_w) == (3 * unit, 4 * unit, 0)  # x, h, gelu(h); then x, dh, gelu(h), dy
    assert stage.live == {}


def test_fused_has_nothing_left_after_the_backward() -> None:
    stage = Stage([nn.Linear(8, 8)], first=1)
    stage.forward(3, torch.randn(2, 8), None, split=False)
    stage.backward(3, torch.randn(2, 8))
    assert stage.live == {}
    assert stage.layers[0].weight.grad is not None
