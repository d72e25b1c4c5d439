"""Stages: what each pass leaves in memory, and activations that are dropped and made again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from zbsolve import BadInput
from zbsolve.exec.backward.layer_split import LayerSplit
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.check import reference
from zbsolve.exec.handlers import Data
from zbsolve.exec.memory import LiveBytes
from zbsolve.models.by_name import load

UNIT = 32 * 64 * 4  # bytes of one activation (32, 64) in float32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def held(stage: Stage, x: Tensor, dy: Tensor, recompute: bool = False) -> tuple[int, ...]:
    """Bytes living after F, (X,) B and W, without parameters, gradients and x itself."""
    parameters = stage.parameters()
    meter = LiveBytes([*parameters, *(p for layer in stage.layers for p in [*layer.parameters(), *layer.buffers()])])
    found = []
    with meter:
        x = x.clone().requires_grad_()
        stage.forward(0, x, None, split=True, recompute=recompute)
        del x
        found.append(meter.now)
        if recompute:
            stage.recompute(0)
            found.append(meter.now)
        dy = dy.clone()
        assert len(stage.backward(0, [dy])) == 1
        del dy  # where W needs it, it is kept
        meter.ignore(p.grad for p in parameters if p.grad is not None)
        found.append(meter.now)
        stage.weights(0)
        meter.ignore(p.grad for p in parameters if p.grad is not None)
        found.append(meter.now)
    assert stage.live == {}
    return tuple(found)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


# name: (layers, units of (32, 64) held after F, after B)
HELD: dict[str, tuple[Callable[[], nn.Module], tuple[float, float]]] = {
    # x, h, gelu(h); then x, dh, gelu(h), dy
    "linear": (lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), (3, 4)),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), (2 + 1 / 32, 2)),
    # W needs neither input nor output gradient of what is frozen
    "frozen": (lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), frozen(nn.Linear(64, 64))), (2, 2)),
    "only the bias": (lambda: nn.Sequential(frozen(nn.Linear(64, 64)), nn.Tanh(), nn.Linear(64, 64)), (2, 2)),
}


@pytest.mark.parametrize("name", HELD)
def test_only_what_W_needs_is_held_after_B(name: str) -> None:
    make, (after_f, after_b) = HELD[name]
    stage = Stage([make()], first=1)
    found = held(stage, torch.randn(32, 64), torch.randn(32, 64))
    assert [size / UNIT for size in found] == [after_f, after_b, 0]


def test_parameters_get_no_gradient_in_B() -> None:
    stage = Stage([nn.Linear(8, 8), nn.Conv1d(2, 2, 1)], first=1)
    stage.forward(0, torch.randn(2, 2, 8), None, split=True)
    stage.backward(0, [torch.randn(2, 2, 8)])
    assert all(p.grad is None for p in stage.parameters())
    stage.weights(0)
    assert all(p.grad is not None for p in stage.parameters())


def test_fused_has_nothing_left_after_the_backward() -> None:
    stage = Stage([nn.Linear(8, 8)], first=1)
    stage.forward(3, torch.randn(2, 8), None, split=False)
    stage.backward(3, [torch.randn(2, 8)])
    assert stage.live == {}
    assert stage.layers[0].weight.grad is not None


# --- Recompute ---


class Noisy(nn.Module):
    """Every source of random numbers a layer may use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * torch.rand(x.shape, dtype=x.dtype)
        x = x + torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        return x * random.random() + float(np.random.random())


class Counts(nn.Module):
    """Buffers that change: in place, and replaced by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("constant", torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return self.layer(x) * float(self.calls) + self.mean * self.constant


RECOMPUTED: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.3)),
    "noise": Noisy,
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)),
    "power iteration": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "buffers": Counts,
    "batch norm in use": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).eval(),
}


def run(
    layers: list[nn.Module], recompute: bool, split: bool, orders: str, dropping: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Three microbatches in the order of `orders` (F, X, B each of the next): outputs and gradients; state of layers.
    dropping: so many of the layers recompute, of which each is a part; 0: all, as one part."""
    stage = Stage(layers, first=1)
    if dropping:
        stage = Stage(layers, first=1, parts=[LayerSplit([one], i) for i, one in enumerate(layers, 1)])
        stage.dropping = dropping
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    inputs = list(torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    at, found = {"F": 0, "X": 0, "B": 0}, []
    for pass_ in orders:
        m = at[pass_]
        at[pass_] += 1
        if pass_ == "F":
            x = inputs[m].requires_grad_()
            found.append(stage.forward(m, x, None, split=split, seed=m, recompute=recompute))
        elif pass_ == "X":
            if recompute:
                stage.recompute(m)
        else:
            found += stage.backward(m, [torch.ones(4, 6, dtype=torch.float64)])
            if split:
                stage.weights(m)
    assert stage.live == {}
    state = [p.grad for p in stage.parameters()] + [b for layer in layers for b in layer.buffers()]
    state += [m.generator.get_state() for layer in layers for m in layer.modules() if isinstance(m, Noisy)]
    return found, [*state, torch.tensor([random.random(), np.random.random()])]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("orders", ["FFXXBBFXB", "FXBFFXBXB"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed_is_bitwise_what_was_dropped(name: str, orders: str, split: bool) -> None:
    """Outputs, gradients, and all that a forward changes: as if it had run once."""
    results = []
    for recompute in (True, False):
        torch.manual_seed(0)
        results.append(run([RECOMPUTED[name]().double()], recompute, split, orders))
    (found, state), (right, expected) = results
    for a, b in zip([*found, *state], [*right, *expected], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("dropping", [1, 2])
def test_so_is_what_the_first_layers_dropped(dropping: int, split: bool) -> None:
    """Every kind of layer in one stage, of which some recompute: as if none did."""
    results = []
    for recompute in (True, False):
        torch.manual_seed(0)
        layers = [make().double() for make in RECOMPUTED.values()]
        results.append(run(layers, recompute, split, "FFXXBBFXB", dropping))
    (found, state), (right, expected) = results
    for a, b in zip([*found, *state], [*right, *expected], strict=True):
        assert torch.equal(a, b)


def test_recomputing_leaves_torchs_generator_alone() -> None:
    stage = Stage([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))], first=1)
    stage.forward(0, torch.randn(4, 6), None, split=True, recompute=True)
    before = torch.get_rng_state()
    stage.recompute(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_last_stage_recomputes_its_loss() -> None:
    model = load("gpt-tiny")
    for i, loss in ((8, None), (9, model.loss)):
        x, target = torch.randn(2, 128, 192, requires_grad=True), model.batch(0, 0)[1]
        found = []
        for recompute in (True, False):
            stage = Stage(model.build([i]), i, loss, 0.5)
            y = stage.forward(0, x, target, split=True, recompute=recompute)
            if recompute:
                stage.recompute(0)
            (dx,) = stage.backward(0, None if loss else [torch.ones_like(x)])
            stage.weights(0)
            found.append([y, dx, *(p.grad for p in stage.parameters())])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)


def test_only_the_input_is_held_until_X() -> None:
    make, (after_f, after_b) = HELD["linear"]
    found = held(Stage([make()], first=1), torch.randn(32, 64), torch.randn(32, 64), recompute=True)
    assert [size / UNIT for size in found] == [1, after_f, after_b, 0]


def test_passes_out_of_place_are_refused() -> None:
    x = torch.randn(2, 6)
    stage = Stage([nn.Linear(6, 6)], first=1)
    stage.forward(0, x, None, split=True, recompute=True)
    with pytest.raises(BadInput, match="an X pass must come before"):
        stage.backward(0, [x])
    stage.recompute(0)
    with pytest.raises(BadInput, match="nothing to recompute"):
        stage.recompute(0)
    stage.forward(1, x, None, split=True, recompute=True)
    x += 1
    with pytest.raises(BadInput, match="changed in place"):
        stage.recompute(1)


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_may_change_their_input_in_place(recompute: bool) -> None:
    x, dy = torch.randn(2, 2, 6)
    expected = x.clone().requires_grad_()
    nn.ReLU()(expected).backward(dy)
    stage = Stage([nn.ReLU(inplace=True), nn.Identity()], first=1)
    for m in range(2):
        stage.forward(m, x.clone().requires_grad_(), None, split=True, recompute=recompute)
        if recompute:
            stage.recompute(m)
        assert torch.equal(stage.backward(m, [dy])[0], expected.grad)


def test_what_W_needs_and_the_next_forward_changes_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("sum", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            self.sum += 1
            return x * self.layer(self.sum)

    x, stage = torch.randn(2, 6), Stage([Counting()], first=1)
    for m in range(2):
        stage.forward(m, x, None, split=True)
        stage.backward(m, [x])
    stage.weights(1)
    with pytest.raises(BadInput, match=r"layer of weight \(6, 6\) was changed in place between its B and its W"):
        stage.weights(0)


def test_a_buffer_that_changes_only_later_is_refused() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("late", torch.zeros(6))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                self.late += 1
            return self.layer(x) + self.late

    stage = Stage([Later()], first=1)
    stage.forward(0, torch.randn(2, 6), None, split=True, recompute=True)
    with pytest.raises(BadInput, match="buffer 'late' of a Later changed, but not in the first forward"):
        stage.forward(1, torch.randn(2, 6), None, split=True, recompute=True)


def test_a_loss_may_return_metrics_beside_it() -> None:
    """As Megatron-LM's do: the loss and its gradients are those of the loss alone."""
    target, found = torch.zeros(2, 4), []
    for loss in (functional.mse_loss, lambda y, t: (functional.mse_loss(y, t), {"error": (y - t).abs().mean()})):
        torch.manual_seed(0)
        layer, x = nn.Linear(4, 4), torch.randn(2, 4)
        stage = Stage([layer], loss=loss)
        y = stage.forward(0, x, target, split=True)
        stage.backward(0, None)
        stage.weights(0)
        expected = reference([layer], Data({0: x}, {0: target}), loss, backward=False)
        assert float(y) == pytest.approx(expected)
        found.append([y, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("made", [{"loss": torch.ones(())}, (torch.ones(()), torch.ones(())), 1.0])
def test_other_forms_of_a_loss_are_refused_by_name(made: object) -> None:
    stage = Stage([nn.Linear(4, 4)], loss=lambda y, t: made)  # type: ignore[arg-type, return-value]
    with pytest.raises(BadInput, match=rf"nor \(loss, dict of metrics\), but a {type(made).__name__}"):
        stage.forward(0, torch.randn(2, 4), None, split=True)
