"""Weight gradients deferred inside layers are those of plain autograd, for every kind of layer and every use of it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from zbsolve.exec.backward.deferral import Deferral, Queue, run_queue
from zbsolve.exec.backward.split import defer, restore
from zbsolve.exec.backward.stage import Stage

Make = Callable[[], nn.Module]


def backward(module: nn.Module, deferral: Deferral | None, x: Tensor) -> tuple[Tensor | None, Queue]:
    """One forward and backward, split where there is a deferral: the input's gradient and what is left for W."""
    x = x.clone().requires_grad_(x.is_floating_point())
    queue: Queue = deque()
    if deferral is None:
        module(x).square().sum().backward()
        return x.grad, queue
    with during(deferral):
        y = module(x)
    with during(deferral, queue):
        y.square().sum().backward()
    return x.grad, queue


@contextmanager
def during(deferral: Deferral, queue: Queue | None = None) -> Iterator[None]:
    """A split forward or, with a queue, its backward."""
    deferral.splitting, deferral.queue = True, queue
    yield
    deferral.splitting, deferral.queue = False, None


def compare(module: nn.Module, x: Tensor, limit: float = 1e-12, plain: nn.Module | None = None) -> int:
    """Two microbatches, split and whole: gradients agree in value, type and layout. How much was deferred.

    `plain`: a copy of the module, where deepcopy cannot make one."""
    plain, deferral, deferred = copy.deepcopy(module) if plain is None else plain, Deferral(), 0
    defer(module, deferral)
    for _ in range(2):
        dx, queue = backward(module, deferral, x)
        deferred += len(queue)
        run_queue(queue)
        close(dx, backward(plain, None, x)[0], limit)
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad, limit, name)
    return deferred // 2


def close(found: Tensor | None, right: Tensor | None, limit: float, name: str = "x") -> None:
    assert (found is None) == (right is None), name
    if found is None or right is None:
        return
    assert (found.dtype, found.shape, found.stride()) == (right.dtype, right.shape, right.stride()), name
    assert float((found - right).abs().max()) <= limit * float(right.abs().max()), name


class Twice(nn.Module):
    """One layer used twice, its weight in a second layer, and once more outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.layer(self.layer(x).tanh())) @ self.layer.weight


class Tied(nn.Module):
    """An embedding and an output layer that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 5)
        self.output = nn.Linear(5, 8, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.embed((x * 3).long().clamp(0, 7)) + x.mean(-1, keepdim=True)[..., None])


class Checkpointed(nn.Module):
    """Layers whose activations torch's own checkpointing recomputes within B."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


class Penalty(nn.Module):
    """A forward that takes a gradient itself, and one to be differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.conv = nn.Conv1d(5, 4, 3)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x)).tanh()
        z = self.conv(y)
        (slope,) = torch.autograd.grad(z.sin().sum(), x, create_graph=True)
        return slope.square().sum() + y * torch.autograd.grad(y.sum(), y, retain_graph=True)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def freeze(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def transposed_weight() -> nn.Module:
    layer = nn.Linear(8, 4)
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer


# name: (the module, how many calls it defers), on an input (3, 5, 8)
MODULES: dict[str, tuple[Make, int]] = {
    "linear": (lambda: nn.Linear(8, 4), 1),
    "changed in place behind": (lambda: nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True)), 1),
    "no bias": (lambda: nn.Linear(8, 4, bias=False), 1),
    "weight in another layout": (transposed_weight, 1),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8), nn.LayerNorm(8, bias=False), nn.GroupNorm(5, 5)), 0),
    "norms without parameters": (lambda: nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 2)), 1),
    "norm over two axes": (lambda: nn.Sequential(nn.LayerNorm((5, 8)), nn.RMSNorm((5, 8), eps=1e-3)), 0),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(8, 2)), 1),
    "used twice": (Twice, 3),
    "tied": (Tied, 2),
    "frozen weight": (lambda: freeze(nn.Linear(8, 4), "weight"), 0),
    "frozen bias": (lambda: freeze(nn.Linear(8, 4), "bias"), 1),
    "frozen": (lambda: nn.Sequential(freeze(nn.Linear(8, 8), "weight", "bias"), nn.Linear(8, 2)), 1),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 4)), 0),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 4)), 0),
    "old weight norm": (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 4)), nn.Linear(4, 2)), 1),
    "other layers": (lambda: nn.Sequential(nn.PReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), 2),
    "attention": (Attention, 0),
    "checkpoint": (lambda: Checkpointed(False), 2),
    "reentrant checkpoint": (lambda: Checkpointed(True), 2),
    "differentiated twice": (Penalty, 2),
    "conv": (lambda: nn.Conv1d(5, 4, 3), 1),
    "conv with all options": (lambda: nn.Conv1d(5, 10, 3, stride=2, padding=2, dilation=2, groups=5, bias=False), 1),
    "conv same": (lambda: nn.Conv1d(5, 4, 4, padding="same"), 1),
    "conv valid": (lambda: nn.Conv1d(5, 4, 3, padding="valid"), 1),
    "conv circular": (lambda: nn.Conv1d(5, 4, 3, padding=2, padding_mode="circular"), 1),
    "conv reflect same": (lambda: nn.Conv1d(5, 4, 3, padding="same", padding_mode="reflect"), 1),
    "conv frozen bias": (lambda: freeze(nn.Conv1d(5, 4, 3), "bias"), 1),
    "conv of one sample": (lambda: nn.Conv2d(3, 4, 3, padding=1), 1),
    "conv transposed": (lambda: nn.ConvTranspose1d(5, 4, 3, stride=2, padding=1, output_padding=1), 1),
    "conv transposed of one sample": (lambda: nn.ConvTranspose2d(3, 2, 3), 1),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning", "ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_autograd(name: str) -> None:
    make, deferred = MODULES[name]
    copies = []
    for _ in range(2):
        torch.manual_seed(0)
        copies.append(make().double())
    assert compare(copies[0], torch.randn(3, 5, 8, dtype=torch.float64), plain=copies[1]) == deferred


@pytest.mark.parametrize(
    "kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
)
def test_convolutions(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    size = (2, 4, *(5,) * int(kind.__name__[-2]))
    assert compare(kind(4, 6, 3, stride=2, padding=1, groups=2).double(), torch.randn(size, dtype=torch.float64)) == 1


def test_a_transposed_convolution_with_a_given_size() -> None:
    layer = nn.ConvTranspose1d(2, 3, 3, stride=2).double()
    x, deferral, queue = torch.randn(1, 2, 4, dtype=torch.float64), Deferral(), deque()
    right = layer(x, output_size=[10])
    right.sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    defer(layer, deferral)
    with during(deferral, queue):
        y = layer(x, output_size=[10])
        y.sum().backward()
    run_queue(queue)
    assert torch.equal(y, right)
    torch.testing.assert_close(layer.weight.grad, expected)


@pytest.mark.parametrize(
    ("options", "deferred"), [({}, 1), ({"padding_idx": -5}, 1), ({"scale_grad_by_freq": True}, 1), ({"max_norm": 0.5}, 0)]
)
def test_embedding(options: dict, deferred: int) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(6, 4, **options).double()
    assert compare(embedding, torch.tensor([[0, 1, 1], [5, 2, 0]])) == deferred


def test_sparse_gradients_stay_sparse() -> None:
    layer, deferral = nn.Embedding(6, 4, sparse=True), Deferral()
    defer(layer, deferral)
    _, queue = backward(layer, deferral, torch.tensor([1, 2]))
    assert len(queue) == 0
    assert layer.weight.grad.is_sparse


class Autocast(nn.Module):
    def __init__(self, module: nn.Module, kind: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.module = module
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.kind):
            return self.module(x).float()


LAYERS: dict[str, tuple[Make, int]] = {
    "linear": (lambda: nn.Linear(64, 32), 1),
    "mlp": (lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), 2),
    "conv": (lambda: nn.Sequential(nn.Conv1d(5, 8, 3), nn.GroupNorm(2, 8), nn.ConvTranspose1d(8, 4, 3)), 2),
    "conv same": (lambda: nn.Conv1d(5, 8, 4, padding="same"), 1),
}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_autocast_casts_as_autocast_does(name: str, kind: torch.dtype) -> None:
    """Bit for bit: the same kernels on the same low-precision tensors, added up in the parameter's own precision."""
    torch.manual_seed(0)
    make, deferred = LAYERS[name]
    assert compare(Autocast(make(), kind), torch.randn(4, 5, 64), limit=0.0) == deferred


def test_autocast_leaves_doubles_alone() -> None:
    assert compare(Autocast(nn.Linear(8, 4).double()), torch.randn(3, 8, dtype=torch.float64)) == 1


def test_autocast_of_a_layer_used_twice() -> None:
    """Autograd adds both uses in bfloat16, here they are added in float32: equal to bfloat16's rounding, no better."""
    torch.manual_seed(0)
    assert compare(Autocast(Twice()), torch.randn(4, 8), limit=2**-6) == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["wrapped", "in place", "function"])
@pytest.mark.slow
def test_what_is_compiled_stays_whole_and_right(backend: str, how: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x).tanh())

    inner = Inner().double()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner
            self.last = nn.Linear(8, 8).double()
            if how == "wrapped":
                self.inner = torch.compile(inner, backend=backend, fullgraph=True)
            elif how == "in place":
                inner.compile(backend=backend, fullgraph=True)
            self.run = (
                torch.compile(lambda x: self.inner(x), backend=backend, fullgraph=True) if how == "function" else self.inner
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.run(x))

    model, x = Model(), torch.randn(4, 8, dtype=torch.float64)
    right = backward(model, None, x)[0]
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    deferral = Deferral()
    defer(model, deferral)
    found, queue = backward(model, deferral, x)
    assert len(queue) == 1  # the last layer, which is not compiled
    assert all(p.grad is not None for p in inner.parameters())
    run_queue(queue)
    close(found, right, 1e-12)
    for p, q in zip(model.parameters(), expected, strict=True):
        close(p.grad, q, 1e-12)


def test_hooks_of_parameters_run_in_B() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    seen: list[str] = []

    def double(gradient: Tensor) -> Tensor:
        seen.append("tensor")
        return 2 * gradient

    layers[0].weight.register_hook(double)
    layers[1].bias.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    plain, deferral = copy.deepcopy(layers), Deferral()
    plain[0].weight.register_hook(double)
    defer(layers, deferral)
    x = torch.randn(3, 4, dtype=torch.float64)
    with during(deferral):
        y = layers(x)
    layers[2].weight.register_hook(double)  # after F, before B
    plain[2].weight.register_hook(double)
    queue: Queue = deque()
    with during(deferral, queue):
        y.square().sum().backward()
    assert (sorted(seen), len(queue)) == (["after", "tensor", "tensor"], 0)
    plain(x).square().sum().backward()
    for p, q in zip(layers.parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad, 1e-12)


def test_hooks_of_modules_see_what_they_would() -> None:
    layer, deferral, seen = nn.Linear(4, 3).double(), Deferral(), []
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    layer.register_forward_hook(lambda module, args, output: output + 1)
    layer.register_full_backward_hook(lambda module, into, out: seen.append((into[0].clone(), out[0].clone())))
    assert compare(layer, torch.randn(2, 4, dtype=torch.float64)) == 1
    assert len(seen) == 4  # the copy shares the hooks: split and whole in turn
    for found, right in zip(seen[::2], seen[1::2], strict=True):
        assert torch.equal(found[0], right[0])
        assert torch.equal(found[1], right[1])
    assert deferral.queue is None


def test_what_has_a_forward_of_its_own_is_left_alone() -> None:
    class Louder(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    patched = nn.Linear(4, 4).double()
    patched.forward = lambda x: functional.linear(3 * x, patched.weight, patched.bias)  # type: ignore[method-assign]
    for layer in (Louder(4, 4).double(), patched):
        before, deferral = layer.forward, Deferral()
        defer(layer, deferral)
        assert layer.forward == before
        assert len(backward(layer, deferral, torch.randn(2, 4, dtype=torch.float64))[1]) == 0


def test_wrappers_that_reduce_gradients_are_left_alone() -> None:
    class DistributedDataParallel(nn.Module):  # known by name, as torch's own
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 4)

    wrapped = DistributedDataParallel()
    defer(wrapped, Deferral())
    assert "forward" not in wrapped.module.__dict__


def test_vmap_and_views_as_outputs() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.last = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.vmap(self.layer)(x)).transpose(0, 1)[1:]

    torch.manual_seed(0)
    assert compare(Mapped().double(), torch.randn(3, 5, 8, dtype=torch.float64)) == 1


def test_nothing_is_deferred_without_a_queue_and_restore_undoes() -> None:
    layer, deferral = nn.Linear(3, 3), Deferral()
    defer(layer, deferral)
    layer(torch.randn(2, 3)).sum().backward()
    assert layer.weight.grad is not None
    restore(layer)
    assert "forward" not in layer.__dict__


def test_two_stages_may_have_one_module() -> None:
    layers = [nn.Linear(4, 4)]
    for stage in [Stage(layers, first=first) for first in (1, 2)]:
        layers[0].weight.grad = None
        stage.forward(0, torch.randn(2, 4), None, split=True)
        stage.backward(0, [torch.randn(2, 4)])
        assert layers[0].weight.grad is None
        stage.weights(0)
        assert layers[0].weight.grad is not None


class Scaled(nn.Linear):
    """Made in its own way, called as a Linear is."""

    scale: float = 2.0

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.scale)


class Doubled(nn.Linear):
    """Called in its own way."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Padded(nn.Conv1d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x + 1, weight, bias)


def test_subclasses_are_split_that_are_called_as_their_layer_is() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    assert compare(Scaled(4).double(), x) == 1
    assert compare(Doubled(4, 4).double(), x) == 0
    assert compare(Padded(2, 2, 3).double(), torch.randn(3, 2, 8, dtype=torch.float64)) == 0
