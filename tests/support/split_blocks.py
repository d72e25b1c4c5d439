"""Blocks whose backward is split, and passes of them beside eager mode's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.torch_private import tree_leaves, tree_map
from zbsolve.exec.graphs.auto import parts_by_name

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


def hidden() -> Tensor:
    return torch.randn(2, 8, WIDTH, requires_grad=True)


def leaf_copies(value: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf, value
    )


def run(layer: nn.Module, x: Any, split: str, fused: bool = False, **how: Any) -> list[Any]:
    """Two microbatches in flight: outputs, gradients of inputs, buffers; and last the gradients of parameters, as a list."""
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
    return [*found, *layer.buffers(), [p.grad for p in layer.parameters()]]


def _trained(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def assert_same(found: list[Any], right: list[Any]) -> None:
    """Bit for bit; sums over microbatches up to rounding, because product and sum may be one kernel."""
    assert len(found) == len(right)
    for a, b in zip(found[-1], right[-1], strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=8 * torch.finfo(b.dtype).eps * float(b.abs().max()))
    for a, b in zip(found[:-1], right[:-1], strict=True):
        if isinstance(b, Tensor):
            assert torch.equal(a, b)
            assert a.requires_grad == b.requires_grad
        else:
            assert a == b
