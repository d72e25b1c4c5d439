"""Gated MLPs, and several of them of which each token takes some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from .sizes import BatchedLinear, BlockSizes, linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class Gated(nn.Module):
    """A gated MLP (2002.05202), or several. make: its layers, of inputs and outputs."""

    def __init__(self, sizes: BlockSizes, make: Callable[[int, int], nn.Module] = linear) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[sizes.activation]
        self.gate = make(sizes.width, sizes.ffn)
        self.up = make(sizes.width, sizes.ffn)
        self.down = make(sizes.ffn, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → the same shape."""
        result: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return result


class Experts(nn.Module):
    """Each token goes through its best MLPs. Every expert takes the same number of tokens, its even share times the room of
    the routing (2006.16668, capacity), and drops the rest. So shapes, and times, do not depend on the data."""

    correction: Tensor

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.number, self.routing = sizes.experts, sizes.routing
        self.router = linear(sizes.width, sizes.experts)
        self.experts = Gated(sizes, partial(BatchedLinear, sizes.experts))
        if self.routing.groups:
            # Added to scores when experts are chosen. DeepSeek's training moves it to balance them; here it stays 0.
            self.register_buffer("correction", torch.zeros(sizes.experts, dtype=torch.float32))
        if self.routing.shared:
            self.shared = Gated(replace(sizes, ffn=self.routing.shared * sizes.ffn))

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → the same shape."""
        tokens, number, taken = x.flatten(0, -2), self.number, self.routing.taken
        room = min(-(-taken * self.routing.room * len(tokens) // (100 * number)), len(tokens))
        share, expert = self._within_groups(tokens) if self.routing.groups else self._of_all(tokens)
        share, expert = share.flatten(), expert.flatten()
        chosen = functional.one_hot(expert, number)
        place = (chosen.cumsum(0) * chosen).sum(-1) - 1
        there = place < room
        slot = torch.where(there, expert * room + place, number * room)
        filled = tokens.new_zeros(number * room + 1, tokens.shape[-1])
        filled = filled.index_copy(0, slot, tokens.repeat_interleave(taken, 0))
        out = self.experts(filled[:-1].view(number, room, -1)).flatten(0, 1)
        back = out.index_select(0, slot.clamp(max=number * room - 1)) * (share * there).to(x.dtype)[:, None]
        mixed: Tensor = back.view(len(tokens), taken, -1).sum(1).view(x.shape)
        if self.routing.shared:
            mixed = mixed + self.shared(x)
        return mixed

    def _of_all(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Shares and numbers of each token's experts, both (tokens, taken)."""
        share, expert = functional.softmax(self.router(tokens).float(), -1).topk(self.routing.taken, -1)
        return share / share.sum(-1, keepdim=True), expert

    def _within_groups(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The same. A group counts as much as its two best experts."""
        scores = self.router(tokens).float().sigmoid()
        choice = scores.detach() + self.correction
        grouped = choice.view(len(tokens), self.routing.groups, -1)
        best = grouped.topk(2, -1)[0].sum(-1).topk(self.routing.groups_taken, -1)[1]
        closed = torch.ones(grouped.shape[:2], dtype=torch.bool, device=tokens.device).scatter(1, best, False)
        expert = grouped.masked_fill(closed[:, :, None], -torch.inf).flatten(1).topk(self.routing.taken, -1)[1]
        share = scores.gather(1, expert)
        return share / share.sum(-1, keepdim=True) * self.routing.scale, expert
