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
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.torch_private import tree_leaves
from zbsolve.exec.graphs.auto import always, parts_by, parts_by_name
from zbsolve.exec.graphs.graph_split import graphs_of
from zbsolve.exec.graphs.joint import Untraceable, trace
from zbsolve.exec.graphs.sharing import SharedGraphs, block_key
from zbsolve.exec.memory import LiveBytes

from ..support.split_blocks import WIDTH, Block, Product, assert_same, hidden, run


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


class Named(Tied):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.b = self.a


class Giving(nn.Module):
    """Hands parameters on: one as it is, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.start = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x), self.start, self.start.expand(2, WIDTH), self.layer.weight.t()


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
    "one module, two names": (Named, hidden),
    "parameters": (Giving, hidden),
    "embedding": (lambda: nn.Embedding(50, WIDTH), lambda: torch.randint(50, (2, 8))),
    "checkpointed": (Checkpointed, hidden),
    "compiled": (compiled, hidden),
}


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


class IfThere(nn.Module):
    """A microbatch without an image is handed on as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        return x if x["image"] is None else {**x, "image": self.layer(x["image"])}


@pytest.mark.parametrize(
    ("layer", "given"),
    [(nn.Identity(), hidden), (nn.Dropout(0.0), hidden), (IfThere(), lambda: {"x": hidden(), "image": None})],
)
def test_a_layer_that_only_hands_its_value_on_is_split(layer: nn.Module, given: Callable[[], Any]) -> None:
    x = given()
    assert_same(run(layer, x, "graph"), run(copy.deepcopy(layer), x, "layers"))


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


def test_of_one_microbatch_gradients_are_bitwise_those_of_eager_mode() -> None:
    torch.manual_seed(0)
    layer, x = Block(nn.LayerNorm, bias=True), hidden()
    right = copy.deepcopy(layer)
    stage = Stage([layer], 1, parts=parts_by_name("graph")([layer], 1, None))
    stage.forward(0, x, None, split=True)
    stage.backward(0, [torch.ones_like(x)])
    stage.weights(0)
    right(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(layer.parameters(), right.parameters(), strict=True))  # type: ignore[arg-type]


class Unpacked(nn.Module):
    """Its parts are unpacked, along a dimension that is not the first; one of them twice, one of another not at all."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = x.unflatten(-1, (2, -1)).unbind(-2)
        a, b, c = x.view(2, 8, -1)[..., :3].permute(2, 0, 1)
        first, *_, last = x.transpose(0, 1)
        return q.sum() * k + a.sum() * b.sum() + c.sum() + (first * last).sum()


def test_gradients_of_unpacked_parts_are_stacked() -> None:
    layer, x = Unpacked(), hidden()
    stage = Stage([layer], 1, parts=parts_by_name("graph")([layer], 1, None))
    y = stage.forward(0, x, None, split=True)
    (found,) = stage.backward(0, [torch.ones_like(y)])
    (right,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(found, right)
    made = [str(node.target) for node in graphs_of(layer, x).cut.backward.graph.graph.nodes]
    assert "aten.stack.default" in made


def test_equal_layers_share_their_graphs() -> None:
    made = []

    def make(block: nn.Module, x: Any) -> Any:
        made.append(block)
        return graphs_of(block, x)

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)] + [nn.Linear(WIDTH, WIDTH, bias=False)]
    stage = Stage(layers, 1, parts=parts_by(always("graph", SharedGraphs(make)))(layers, 1, None))
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


class Stepping(nn.Module):
    """torch's tracer takes the number that it is given for what it always is."""

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        return 2 * x if int(step) % 2 else x


def test_a_branch_on_a_number_that_is_given_is_refused() -> None:
    with pytest.raises(Untraceable, match="Stepping's forward branches on a number in a tensor that it gets"):
        trace(Stepping(), (hidden(), torch.tensor(1)))


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
    with pytest.raises(BadInput, match="split: 'grahp' is none of layers, graph, graph:least"):
        parts_by_name("grahp")


@pytest.mark.slow
def test_compiled_graphs_give_the_same_within_rounding() -> None:
    """Random numbers too: dropout's masks are those of eager mode."""
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)), hidden()
    right = run(copy.deepcopy(layer), x, "layers")
    for a, b in zip(tree_leaves(run(copy.deepcopy(layer), x, "inductor")), tree_leaves(right), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Turned(nn.Module):
    """Its output is a view, whose gradient comes as a message has it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inside(x).transpose(1, 2)
        return result


def test_gradients_of_views_come_in_any_order_of_memory() -> None:
    layer, x = Turned(), torch.randn(2, 3, WIDTH, requires_grad=True)
    stage = Stage([layer], 1, parts=parts_by_name("graph")([layer], 1, None))
    y = stage.forward(0, x, None, split=True)
    gradient = torch.randn(y.shape)
    (found,) = stage.backward(0, [gradient])
    stage.weights(0)
    grads = [p.grad for p in layer.parameters()]
    expected = torch.autograd.grad(Turned.forward(layer, x), [x, *layer.parameters()], gradient)
    for one, right in zip([found, *grads], expected, strict=True):
        assert one is not None
        assert torch.allclose(one, right, atol=1e-6)
