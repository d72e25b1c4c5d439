"""A layer's split by shape: it is chosen when inputs of a shape come for the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..backward.stage import Split, Stage
from ..base.part import Keeper
from ..splits import Row, merged
from .graph_split import Saved
from .sharing import inputs_key


@dataclass(frozen=True)
class Cost:
    """What a microbatch costs a block, split in one way: µs of F, B and W; bytes held after F and after B."""

    F: float
    B: float
    W: float
    after_F: int
    after_B: int


@dataclass(frozen=True, eq=False)
class Decision:
    """How equal blocks are split. block: their class. split: its name. why: what spoke against others (costs aside).
    costs: of each split that was tried."""

    block: str
    split: str
    why: str
    costs: Mapping[str, Cost] = field(default_factory=dict)


# (layer, its number, the input, the seed of its random numbers) → its split, and why.
Choose = Callable[[nn.Module, int, Any, int], tuple[Split, Decision]]


class ByShape:
    """Layer `number` of a model, split as `choose` says: for inputs of one structure, of their shapes and types, and for
    what a person may change meanwhile (autocast, training mode, which parameters are trained)."""

    def __init__(self, layer: nn.Module, number: int, choose: Choose) -> None:
        self.layer = layer
        self.number = number
        self.choose = choose
        self.decisions: list[Decision] = []
        self._modules, self._parameters = list(layer.modules()), list(layer.parameters())
        self._found: dict[Any, Split] = {}

    def forward(self, x: Any, target: Any, *, split: bool, seed: int) -> tuple[Any, tuple[Split, Any]]:
        """F (see `stage.Split`)."""
        state = tuple([one.training for one in self._modules]), tuple([one.requires_grad for one in self._parameters])
        key = state, inputs_key(x)
        part = self._found.get(key)
        if part is None:
            part, decision = self.choose(self.layer, self.number, x, seed)
            self._found[key] = part
            self.decisions.append(decision)
        y, kept = part.forward(x, target, split=split, seed=seed)
        return y, (part, kept)

    def backward(self, kept: tuple[Split, Any], gradients: Sequence[Tensor | None], unit: float = 1.0) -> list[Tensor]:
        """B (see `stage.Split`)."""
        return kept[0].backward(kept[1], gradients, unit)

    def give(self, kept: tuple[Split, Any], keeper: Keeper) -> None:
        """Into the keeper's hands (see `stage.Split`)."""
        kept[0].give(kept[1], keeper)

    def weights(self, kept: tuple[Split, Any]) -> None:
        """W (see `stage.Split`)."""
        kept[0].weights(kept[1])


def graph_saved(kept: Any) -> list[Tensor] | None:
    """What a graph's F saved for a microbatch, of what a stage keeps for one of its parts. None: autograd saved it."""
    saved = kept[1] if isinstance(kept, tuple) else kept
    return [one for one in saved.values if isinstance(one, Tensor)] if isinstance(saved, Saved) else None


def decisions_of(stages: Iterable[Stage]) -> list[Row]:
    """What was decided for the layers of `stages`, a row for a kind of them: numbers, class, split, why and costs."""
    rows = []
    for part in (part for stage in stages for part in stage.parts if isinstance(part, ByShape)):
        for one in part.decisions:
            costs = {name: vars(cost) for name, cost in one.costs.items()}
            rows.append({"layers": [part.number], "block": one.block, "split": one.split, "why": one.why, "costs": costs})
    return merged([rows])
