"""The balance of a Hugging Face model's experts, where its config asks for it (`output_router_logits`).

The library's loss is of the sums over all layers (Switch Transformers, arXiv 2101.03961, equations 4 to 6), so layers hand
these sums on beside the hidden states, and the head adds the loss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..util.errors import BadInput
from .huggingface_given import inner_of
from .losses import auxiliary_loss

Sums = dict[str, Tensor]

_listening: list[list[Tensor]] = []  # the innermost last: logits of the routers that run


@dataclass(frozen=True)
class Balance:
    """kind: the class of routers. place: of the logits in what a router gives. experts, chosen: how many there are, and are
    taken for a token. weight: of the loss."""

    kind: Any
    place: int
    experts: int
    chosen: int
    weight: float

    def begun(self, hidden: Tensor) -> Sums:
        """What the first layer is given: sums of 0 that get gradients, as all later ones do."""
        zeros = torch.zeros(self.experts, device=hidden.device)
        return {"hidden": hidden, "assigned": zeros, "shares": zeros + hidden.flatten()[:0].sum().float()}

    def added(self, before: Sums, hidden: Tensor, logits: list[Tensor]) -> Sums:
        """The sums with those of one more layer: tokens of each expert, and its share of them by the router."""
        assigned, shares = before["assigned"], before["shares"]
        for one in logits:
            weights = one.softmax(-1)
            chosen = weights.topk(self.chosen, dim=-1).indices
            assigned = assigned + functional.one_hot(chosen, self.experts).sum((0, 1)).float()
            shares = shares + weights.float().sum(0)
        return {"hidden": hidden, "assigned": assigned, "shares": shares}

    def add_loss(self, sums: Sums) -> None:
        """Add the loss of all layers."""
        rows = sums["assigned"].sum() / self.chosen
        value = self.experts * (sums["assigned"] / rows * (sums["shares"] / rows)).sum()
        auxiliary_loss(self.weight * value)


def balance_of(causal: Any) -> Balance | None:
    """Of a model whose config asks for the loss of its routers; None for others. Raises BadInput for a family whose loss is
    another one."""
    if not getattr(causal.config, "output_router_logits", False):
        return None
    recorder: Any = (getattr(inner_of(causal)[1], "_can_record_outputs", None) or {}).get("router_logits")
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    known = hasattr(sys.modules[type(causal).__module__], "load_balancing_loss_func")
    kind: Any = getattr(recorder, "target_class", nn.Linear)
    if not known or kind is nn.Linear or not all(hasattr(causal, name) for name in names):
        raise BadInput(f"output_router_logits: the router loss of {type(causal).__name__} is not known: leave it out")
    experts, chosen, weight = (getattr(causal, name) for name in names)
    return Balance(kind, recorder.index, experts, chosen, weight)


def hear(layer: nn.Module, balance: Balance) -> None:
    """From now on routers in `layer` tell their logits to `heard`."""
    for module in layer.modules():
        if isinstance(module, balance.kind):
            module.__class__ = _telling(balance.kind, balance.place)


@contextmanager
def heard() -> Iterator[list[Tensor]]:
    """The logits of the routers that run inside."""
    found: list[Tensor] = []
    _listening.append(found)
    try:
        yield found
    finally:
        _listening.pop()


@cache
def _telling(kind: Any, place: int) -> Any:
    """A router that does what `kind` does, and tells its logits. It stays of the same class in all layers."""
    plain: Callable[..., Any] = kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        if _listening:
            _listening[-1].append(found[place])
        return found

    return type(kind.__name__, (kind,), {"forward": forward})
