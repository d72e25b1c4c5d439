"""`split="auto"`: a block at a time what is measured faster within the memory; trying it out leaves no trace."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zbsolve.exec import auxiliary_loss, auxiliary_losses
from zbsolve.exec.backward.replay import undisturbed
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.choices import as_line, merged
from zbsolve.exec.graphs import auto
from zbsolve.exec.graphs.auto import decisions_of, parts_by_name
from zbsolve.exec.memory import LiveBytes

from ..support.split_blocks import WIDTH, Block, assert_same, hidden, run

Times = dict[str, tuple[float, float, float]]


class Branching(nn.Module):
    """It cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x) if x.sum() > 0 else self.layer(x)


class Drawing(nn.Module):
    """Dropout, numpy's random numbers, batch norm and an attribute that each forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout, self.calls = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.dropout(self.norm(self.layer(x))) * float(np.random.rand() + random.random())
        return y


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> tuple[Times, dict[str, tuple[int, int]]]:
    """What trials find from now on: times and bytes by the split's name; what is not there is measured."""
    times: Times = {}
    sizes: dict[str, tuple[int, int]] = {}
    seen: list[tuple[nn.Module, str]] = []
    real_times, real_sizes = auto.timed, auto.held

    def timed(layer: nn.Module, parts: dict[str, Any], x: Any, seed: int) -> Times:
        found = real_times(layer, parts, x, seed)
        return {name: times.get(name, found[name]) for name in parts}

    def held(layer: nn.Module, part: Any, x: Any, seed: int) -> tuple[int, int]:
        found = real_sizes(layer, part, x, seed)
        kind = "layers" if isinstance(part, auto.LayerSplit) else "graph"
        if (layer, kind) in seen:  # it is asked for when the graph's and the layers' are known
            kind = "graph:least"
        seen.append((layer, kind))
        return sizes.get(kind, found)

    monkeypatch.setattr(auto, "timed", timed)
    monkeypatch.setattr(auto, "held", held)
    return times, sizes


def stage_of(layers: list[nn.Module], **how: Any) -> Stage:
    return Stage(layers, 1, parts=parts_by_name("auto", **how)(layers, 1, None))


def rows(stage: Stage) -> list[tuple[list[int], str, str]]:
    return [(row["layers"], row["block"], row["split"]) for row in decisions_of([stage])]


def test_equal_blocks_share_what_was_faster(measured: Any) -> None:
    times, _ = measured
    times |= {"layers": (1, 2, 1), "graph": (1, 1, 1)}
    stage = stage_of([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    stage.forward(0, hidden(), None, split=True)
    times |= {"layers": (0, 0, 1)}
    stage.forward(1, hidden(), None, split=True)  # nothing is measured again
    assert rows(stage) == [([1, 2, 3], "Linear", "graph")]
    stage.forward(2, torch.randn(3, 8, WIDTH, requires_grad=True), None, split=True)  # another shape
    assert [row[1:] for row in rows(stage)] == [("Linear", "graph"), ("Linear", "layers")]
    for m in range(3):
        stage.backward(m, [torch.ones(3 if m == 2 else 2, 8, WIDTH)])
        assert all(layer.weight.grad is None or m for layer in stage.layers)  # W is split, by graphs and by layers
        stage.weights(m)


def test_what_cannot_be_traced_falls_back_and_says_so() -> None:
    hooked = nn.Linear(WIDTH, WIDTH)
    hooked.weight.register_hook(lambda gradient: 2 * gradient)
    stage = stage_of([Branching(), Branching(), hooked])
    with pytest.warns(UserWarning, match="split auto: layer 1 by layers, not by its graph: Branching cannot be traced"):
        stage.forward(0, hidden(), None, split=True)
    stage.backward(0, [torch.ones(2, 8, WIDTH)])
    assert all(layer.layer.weight.grad is None for layer in stage.layers[:2])  # type: ignore[union-attr]
    stage.weights(0)
    found = decisions_of([stage])
    assert [row["layers"] for row in found] == [[1, 2], [3]]
    assert "data-dependent" in found[0]["why"].lower()
    assert found[1]["why"] == "weight has hooks, which graphs do not run"
    assert as_line(found[1]) == "layer 3 (Linear): layers: weight has hooks, which graphs do not run"


@pytest.mark.slow
def test_with_bounded_memory_nothing_holds_more_than_the_layers(measured: Any) -> None:
    times, sizes = measured
    times |= {"graph": (0, 0, 0), "graph:least": (0, 0, 0)}
    cases: list[tuple[dict[str, tuple[int, int]], bool, str]] = [
        ({"graph": (9, 9), "layers": (9, 9)}, True, "graph"),
        ({"graph": (10, 9), "layers": (9, 9)}, False, "graph"),
        ({"graph": (10, 9), "graph:least": (8, 9), "layers": (9, 9)}, True, "graph:least"),
        ({"graph": (9, 10), "graph:least": (9, 10), "layers": (9, 9)}, True, "layers"),
    ]
    for kept, tight, expected in cases:
        sizes.clear()
        sizes |= kept
        stage = stage_of([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())], tight=tight)
        stage.forward(0, hidden(), None, split=True)
        (row,) = decisions_of([stage])
        assert row["split"] == expected
        assert ("holds" in row["why"]) == (expected == "layers")


def test_where_other_ranks_take_part_nothing_is_tried() -> None:
    stage = stage_of([nn.Linear(WIDTH, WIDTH)], alone=False)
    stage.forward(0, hidden(), None, split=True)
    assert rows(stage) == [([1], "Linear", "layers")]


@pytest.mark.slow
@pytest.mark.parametrize("faster", ["layers", "graph"])
@pytest.mark.parametrize("recompute", [False, True])
def test_either_is_right_and_the_trial_leaves_no_trace(measured: Any, faster: str, recompute: bool) -> None:
    """Bytes too: the trial's are not counted."""
    measured[0][faster] = (0, 0, 0)
    torch.manual_seed(0)
    layer, x = Block(dropout=0.2), hidden()
    right = run(copy.deepcopy(layer), x, faster, recompute=recompute)
    with LiveBytes() as meter:
        assert_same(run(copy.deepcopy(layer), x, "auto", recompute=recompute), right)
    assert meter.most < 1e6


def test_a_loss_that_a_layer_makes_counts_once() -> None:
    class Balanced(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            auxiliary_loss(y.square().mean())
            return y

    layer, x = Balanced(WIDTH, WIDTH), hidden()
    right = copy.deepcopy(layer)
    stage = stage_of([layer])
    y = stage.forward(0, x, None, split=True)
    stage.backward(0, [torch.zeros_like(y)])
    stage.weights(0)
    with auxiliary_losses() as extra:
        right(x)
    assert extra.total is not None
    extra.total.backward()
    assert stage.auxiliary is not None
    torch.testing.assert_close(stage.auxiliary, extra.total.detach())
    torch.testing.assert_close(layer.weight.grad, right.weight.grad)


def test_undisturbed_is_as_before() -> None:
    layer = Drawing()
    x = torch.randn(4, 8)
    layer(x).sum().backward()
    before = copy.deepcopy([layer.state_dict(), [p.grad for p in layer.parameters()], layer.calls])
    buffers = [id(buffer) for buffer in layer.buffers()]
    expected = [torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()]
    with undisturbed(layer):
        assert all(p.grad is None for p in layer.parameters())
        layer(x).sum().backward()
        layer.other = 1  # type: ignore[assignment]
    after = [layer.state_dict(), [p.grad for p in layer.parameters()], layer.calls]
    for a, b in zip(torch.utils._pytree.tree_leaves(after), torch.utils._pytree.tree_leaves(before), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert [id(buffer) for buffer in layer.buffers()] == buffers
    assert not hasattr(layer, "other")
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert np.array_equal(np.random.get_state()[1], expected[1])
    assert random.getstate() == expected[2]


def test_ranks_tell_what_they_decided_in_one_table() -> None:
    cost = {"F": 1.0, "B": 2.0, "W": 0.5, "after_F": 2048, "after_B": 1024}
    row = {"block": "Block", "split": "graph", "why": "", "costs": {"graph": cost, "layers": cost | {"B": 3.0}}}
    other = {"block": "Embed", "split": "layers", "why": "it has hooks", "costs": {}}
    table = merged([[row | {"layers": [3, 1]}], [other | {"layers": [0]}, row | {"layers": [2, 5], "costs": {}}]])
    assert [*map(as_line, table)] == [
        "layer 0 (Embed): layers: it has hooks",
        "layers 1–3, 5 (Block): graph, 4 µs and 2.00 KiB a microbatch (layers 4 µs and 2.00 KiB)",
    ]
