"""What the split of the graph honours, bit for bit as in eager mode: checkpointing policies, compiled blocks, autocast,
buffers, frozen parameters, outputs that share memory, mixtures of experts. And what it refuses, which would be wrong."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.graphs.auto import parts_by_name
from zbsolve.exec.graphs.joint import Untraceable
from zbsolve.exec.memory import LiveBytes

from ..support.split_blocks import WIDTH, Block, Product, assert_same, hidden, run


def matrices(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what products make, and recompute all else."""
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """Full or selective checkpointing of a block with dropout."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.block = Block(dropout=0.1)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, **self.how)


SELECTIVE = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, matrices)}


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(nn.LayerNorm, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.block(x).float()


class Residual(nn.Module):
    """A ResNet's block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norms[1](self.second(torch.relu(self.norms[0](self.first(x))))))


class Views(nn.Module):
    """Outputs that share memory with each other and with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x)
        return y, y[:, :4], x, x[:, 1:], y.transpose(0, 1)


class Viewed(nn.Module):
    """Two outputs of one memory, neither of which is a part of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.layer(x))
        return y, y.view_as(y)


class Experts(nn.Module):
    """A mixture of experts: how many tokens each gets depends on the numbers."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)
        y = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            y.index_add_(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        return y.view_as(x)


class ExpertChoice(nn.Module):
    """A mixture of experts that each take equally many tokens; their weights are one parameter."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, count), nn.Parameter(torch.randn(count, WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(-1).topk(4, dim=0)
        found = torch.bmm(tokens[chosen.T], self.experts) * weights.T[..., None]
        return torch.zeros_like(tokens).index_add(0, chosen.T.flatten(), found.flatten(0, 1)).view_as(x)


class PartlyFrozen(nn.Module):
    """A frozen block, a custom function that is trained, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.unused = Block().requires_grad_(False), nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(self.frozen(x), self.weight)


def image() -> Tensor:
    return torch.randn(2, 4, 6, 6, requires_grad=True)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), hidden),
    "checkpoint, reentrant": (lambda: Checkpointed(use_reentrant=True), hidden),
    "checkpoint, selective": (lambda: Checkpointed(**SELECTIVE), hidden),
    "compiled, wrapped": (lambda: torch.compile(Block(), backend="aot_eager"), hidden),
    "compiled, wrapped inside": (lambda: nn.Sequential(torch.compile(Block(), backend="aot_eager")), hidden),
    "autocast": (Autocast, hidden),
    "batch norm": (Residual, image),
    "views": (Views, hidden),
    "a view of an output": (Viewed, hidden),
    "experts": (Experts, hidden),
    "expert choice": (ExpertChoice, hidden),
    "partly frozen": (PartlyFrozen, hidden),
    "all frozen": (lambda: Block().requires_grad_(False), hidden),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_passes_are_bitwise_those_of_eager_mode(name: str) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    layer, x = make(), inputs()
    assert_same(run(copy.deepcopy(layer), x, "graph"), run(copy.deepcopy(layer), x, "layers", fused=True))
    right = run(copy.deepcopy(layer), x, "layers", fused=True, recompute=True)
    assert_same(run(copy.deepcopy(layer), x, "graph", recompute=True), right)


@pytest.mark.slow
def test_experts_get_other_numbers_of_tokens_each_time() -> None:
    """The sizes are no constants of the trace."""
    torch.manual_seed(0)
    layer = Experts()
    other = copy.deepcopy(layer)
    stage, right = Stage([layer], 1, parts=parts_by_name("graph")([layer], 1, None)), Stage([other], 1)
    counts = set()
    for m, x in enumerate([hidden() for _ in range(3)]):
        counts.add(tuple(layer.gate(x.detach()).topk(2).indices.flatten().bincount(minlength=4).tolist()))
        outputs = [one.forward(m, x, None, split=False) for one in (stage, right)]
        assert torch.equal(*outputs)
        assert torch.equal(*(one.backward(m, [torch.ones_like(outputs[0])])[0] for one in (stage, right)))
    assert len(counts) == 3
    for a, b in zip(layer.parameters(), other.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.slow
def test_checkpointing_keeps_what_its_policy_says() -> None:
    """Between F and B, in sizes of the input: all; the input alone; the input and what products make. States of the random
    generator are kept too, 5 KB each."""
    found, shape = {}, (64, 8, WIDTH)
    for name, layer in (
        ("all", Block(dropout=0.1)),
        ("full", Checkpointed(use_reentrant=False)),
        ("selective", Checkpointed(**SELECTIVE)),
    ):
        stage = Stage([layer], 1, parts=parts_by_name("graph")([layer], 1, None))
        stage.forward(-1, torch.randn(shape, requires_grad=True), None, split=True)  # traces
        stage.live.clear()
        with LiveBytes(layer.parameters()) as meter:
            stage.forward(0, torch.randn(shape, requires_grad=True), None, split=True)
            found[name] = meter.now / (4 * 64 * 8 * WIDTH)
    assert 1 <= found["full"] < 1.5
    assert found["full"] < found["selective"] - 4  # of q, k, v, the attention's output and two linear layers
    assert found["selective"] < found["all"] - 2


class Counts(nn.Module):
    """Its forward sets an attribute, which the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


class Replaces(nn.Module):
    """Its forward puts another tensor in a buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean((0, 1))
        return self.layer(x)


class Random(nn.Module):
    """Python's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class InPlace(nn.Module):
    """It changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) + 1


class Sparse(nn.Embedding):
    """Its weight's gradient is sparse."""

    def __init__(self) -> None:
        super().__init__(8, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(torch.arange(8))


class HooksInput(nn.Module):
    """It doubles its input's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return x.sin()


class Repacks(nn.Linear):
    """It sets its weight anew, as quantised layers of bitsandbytes do."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.packed[0]
        return super().forward(x)

    packed = [torch.ones(WIDTH, WIDTH)]


def test_graphs_follow_adapters_that_are_merged() -> None:
    layer, x = nn.Dropout(0.0), hidden()
    layer.merged_adapters, layer.forward = [], lambda x: 2 * x if layer.merged_adapters else x.sin()  # type: ignore
    stage = Stage([layer], 1, parts=parts_by_name("graph")([layer], 1, None))
    assert torch.equal(stage.forward(0, x, None, split=True), x.sin())
    layer.merged_adapters.append("default")
    assert torch.equal(stage.forward(1, x, None, split=True), 2 * x)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Repacks(WIDTH, WIDTH), "Repacks cannot be traced: "),
        (Sparse, "the graph makes a sparse gradient or output"),
        (HooksInput, "HooksInput puts hooks on its input, which graphs do not run"),
        (lambda: torch.jit.script(nn.Tanh()), "RecursiveScriptModule is a script, which no graph goes through"),
        (Counts, "Counts's forward changes attributes of self, which a graph would not do"),
        (Replaces, "Replaces's graph gives another buffer mean than eager mode"),
        (Random, "Random('s graph gives another output| cannot be traced: )"),  # the first from torch 2.14 on
        (InPlace, "the graph makes what a stage cannot take: "),
    ],
)
def test_what_a_graph_would_do_wrong_is_refused(make: Callable[[], nn.Module], why: str) -> None:
    layer = make()
    stage = Stage([layer], 1, parts=parts_by_name("graph")([layer], 1, None))
    with pytest.raises(Untraceable, match=f"split graph: layer 1: {why}.*(split auto falls back)"):
        stage.forward(0, hidden().requires_grad_(make is not InPlace), None, split=True)
    assert torch.is_grad_enabled()
