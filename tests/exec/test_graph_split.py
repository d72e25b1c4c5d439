"""The split of the graph: bit for bit eager's outputs and gradients, whatever the operations; equal layers share graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zbsolve import BadInput
from zbsolve.exec.backward.by_name import parts_by_name
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.graphs import Untraceable
from zbsolve.exec.graphs.graph_split import graphs_of
from zbsolve.exec.graphs.keys import block_key
from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.torch_private import tree_leaves, tree_map

WIDTH = 32


class Block(nn.Module):
    """A small transformer block."""

    def __init__(self, norm: type[nn.Module] = nn.RMSNorm, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList([norm(WIDTH), norm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=bias), nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(self.norms[0](x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(nn.functional.silu(self.up(self.norms[1](x)))))


class Counting(nn.Module):
    """Its forward changes buffers, one of which it also uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) - self.mean
        self.count += 1
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))
        return y


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.batch, self.group = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.group(torch.relu(self.batch(self.first(x))))


class Product(torch.autograd.Function):
    """A product with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight)


class Many(nn.Module):
    """Several tensors in and out, plain values, an unused layer and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        y = self.frozen(self.layer(x["x"])) * x["mask"]
        passed = {"mask": x["mask"], "skip": x["skip"], "view": x["x"].flatten(1)}
        return {"x": y, "ids": x["ids"] + 1, "none": None, "depth": 3, "aux": y.square().mean(), **passed}


class Sums(nn.Module):
    """Parameters whose gradients are one tensor, which is the input's too, and the output's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(2, 8, WIDTH)) for _ in range(2))
        self.c, self.d = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a + self.b + (self.c + self.d)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def compiled() -> nn.Module:
    block = Block()
    block.compile()
    return nn.Sequential(block)


def hidden() -> Tensor:
    return torch.randn(2, 8, WIDTH, requires_grad=True)


def many() -> dict[str, Any]:
    constant = {"mask": torch.ones(2, 8, 1), "ids": torch.arange(8), "none": None}
    return {"x": hidden(), "skip": hidden(), "unused": hidden(), **constant}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "block": (Block, hidden),
    "norms and biases": (lambda: Block(nn.LayerNorm, bias=True), hidden),
    "dropout": (lambda: Block(dropout=0.2), hidden),
    "no gradient of the input": (Block, lambda: hidden().detach()),
    "buffers": (Counting, hidden),
    "convolutions": (Convolutions, hidden),
    "custom function": (Custom, hidden),
    "many tensors": (Many, many),
    "sums": (Sums, hidden),
    "tied": (Tied, hidden),
    "embedding": (lambda: nn.Embedding(50, WIDTH), lambda: torch.randint(50, (2, 8))),
    "checkpointed": (Checkpointed, hidden),
    "compiled": (compiled, hidden),
}


def leaf_copies(value: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf, value
    )


def run(layer: nn.Module, x: Any, split: str, fused: bool = False, **how: Any) -> list[Any]:
    """Two microbatches in flight: outputs, gradients of inputs and parameters, buffers. First: in eager mode."""
    stage = Stage([layer], 1, parts=parts_by_name(split)([layer], 1, None))
    found: list[Any] = []
    for m in range(2):
        found += tree_leaves(stage.forward(m, leaf_copies(x), None, split=not fused, seed=5 + m, **how))
    gradients = [torch.full_like(leaf, 0.1) for leaf in found[: len(found) // 2] if _trained(leaf)]
    for m in range(2):
        if how.get("recompute"):
            stage.recompute(m)
        found += stage.backward(m, gradients)
        if not fused:
            stage.weights(m)
    assert stage.live == {}
    return [*found, *(p.grad for p in layer.parameters()), *layer.buffers()]


def _trained(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def assert_same(found: list[Any], right: list[Any]) -> None:
    assert len(found) == len(right)
    for a, b in zip(found, right, strict=True):
        if isinstance(b, Tensor):
            assert torch.equal(a, b)
            assert a.requires_grad == b.requires_grad
        else:
            assert a == b


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_passes_are_bitwise_those_of_eager_mode(name: str) -> None:
    """The layer split runs autograd itself, so its fused backward is eager mode's."""
    make, inputs = CASES[name]
    torch.manual_seed(0)
    layer, x = make(), inputs()
    right = run(copy.deepcopy(layer), x, "layers", fused=True)
    assert_same(run(copy.deepcopy(layer), x, "graph"), right)
    assert_same(run(copy.deepcopy(layer), x, "graph", fused=True), right)


def test_a_block_is_split_where_layers_are_not() -> None:
    """The weight gradient of a custom function is in W. Vectors' gradients are in B, and matrices' in W."""
    for layer in (Custom(), nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))):
        stage = Stage([layer], 1, parts=parts_by_name("graph")([layer], 1, None))
        stage.forward(0, hidden(), None, split=True)
        stage.backward(0, [torch.ones(2, 8, WIDTH)])
        assert [p.grad is None for p in layer.parameters()] == [p.dim() > 1 for p in layer.parameters()]
        stage.weights(0)
        assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.slow
def test_recomputed_is_bitwise_what_was_dropped() -> None:
    for name in ("dropout", "buffers"):
        make, inputs = CASES[name]
        layer, x = make(), inputs()
        right = run(copy.deepcopy(layer), x, "graph")
        assert_same(run(copy.deepcopy(layer), x, "graph", recompute=True), right)


def test_activations_go_when_B_or_W_has_used_them() -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    stage = Stage([layer], 1, parts=parts_by_name("graph")([layer], 1, None))
    run_once = hidden()
    stage.forward(-1, run_once, None, split=True)  # traces
    stage.backward(-1, [torch.ones(2, 8, WIDTH)])
    stage.weights(-1)
    unit = 2 * 8 * WIDTH * 4
    meter, found = LiveBytes([*layer.parameters(), *(p.grad for p in layer.parameters() if p.grad is not None)]), []
    with meter:
        with torch.no_grad():
            x = run_once.clone().requires_grad_()
        stage.forward(0, x, None, split=True)
        del x
        found.append(meter.now / unit)
        dy = torch.ones(2, 8, WIDTH)
        stage.backward(0, [dy])
        del dy
        found.append(meter.now / unit)
        stage.weights(0)
        found.append(meter.now / unit)
    assert found == [2, 4, 0]  # x and tanh's output; both and the gradients of both products; nothing


def test_equal_layers_share_their_graphs() -> None:
    made = []

    def make(block: nn.Module, x: Any) -> Any:
        made.append(block)
        return graphs_of(block, x)

    from zbsolve.exec.graphs.sharing import SharedGraphs

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)] + [nn.Linear(WIDTH, WIDTH, bias=False)]
    stage = Stage(layers, 1, parts=SharedGraphs(make).parts(layers, 1, None))
    stage.forward(0, hidden(), None, split=True)
    assert len(made) == 2
    stage.forward(1, hidden(), None, split=True)
    assert len(made) == 2
    stage.forward(2, torch.randn(3, 8, WIDTH, requires_grad=True), None, split=True)  # another shape
    layers[0].requires_grad_(False)
    stage.forward(3, hidden(), None, split=True)
    assert len(made) == 5


def test_keys_hold_all_that_a_trace_reads() -> None:
    same = [block_key(Block()) for _ in range(2)]
    others = [block_key(one) for one in (Block(dropout=0.1), Block(nn.LayerNorm), Block(bias=True), Block().eval(), Tied())]
    assert same[0] == same[1]
    assert all(one != same[0] for one in others)
    untied = Tied()
    untied.b.weight = nn.Parameter(untied.a.weight.detach().clone())
    assert block_key(untied) != block_key(Tied())
    odd = nn.Linear(2, 2)
    odd.table = object()  # type: ignore[assignment]
    assert block_key(odd) is None


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if x.sum() > 0 else x


def hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda *args: None)
    return layer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Branching, "layer 1: Branching cannot be traced: .*[Dd]ata-dependent"),
        (hooked, "layer 1: Linear has hooks, which graphs do not run"),
    ],
)
def test_what_cannot_be_traced_is_named(make: Callable[[], nn.Module], why: str) -> None:
    layer = make()
    stage = Stage([layer], 1, parts=parts_by_name("graph")([layer], 1, None))
    with pytest.raises(Untraceable, match=why):
        stage.forward(0, hidden(), None, split=True)


def test_a_split_of_another_name_is_refused() -> None:
    with pytest.raises(BadInput, match="split: 'grahp' is none of layers, graph, inductor"):
        parts_by_name("grahp")


@pytest.mark.slow
def test_compiled_graphs_give_the_same_within_rounding() -> None:
    """Random numbers too: dropout's masks are those of eager mode."""
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)), hidden()
    right = run(copy.deepcopy(layer), x, "layers")
    for a, b in zip(run(copy.deepcopy(layer), x, "inductor"), right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
