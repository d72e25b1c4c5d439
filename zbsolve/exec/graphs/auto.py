"""How each block is split, by name: by its graph because that is asked for, or as is measured faster within the memory. A
split by shape is chosen when inputs of a shape come for the first time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ...util.errors import BadInput
from ...util.text import format_bytes
from ..backward.layer_split import LayerSplit, Loss
from ..backward.replay import undisturbed
from ..backward.split import defer, restore
from ..backward.stage import Split, Stage
from ..base.part import Keeper
from ..base.torch_private import compiles, unwrapped
from ..base.values import copied, detached, is_dtensor, own_type, tensors_of, trained, wrapped_modules
from ..choices import COSTS, SPLITS, Row, merged
from ..memory import LiveBytes
from .graph_split import Graphs, Saved, Zeros, graphs_of
from .joint import Untraceable
from .sharing import SharedGraphs, inputs_key, shared_key

MAKES: dict[str, Callable[[nn.Module, Any], Graphs]] = {
    "graph": graphs_of,
    "graph:least": partial(graphs_of, least=True),
    "inductor": partial(graphs_of, inductor=True),
    "inductor:least": partial(graphs_of, inductor=True, least=True),
}
MIN_ROUNDS, MAX_ROUNDS = 3, 15
SECONDS = 1.0  # of rounds, if MIN_ROUNDS take no longer


def parts_by(choose: Choose) -> Parts:
    """What splits layers `first` … of a model as `choose` says, and the loss behind them by itself."""

    def parts(layers: Sequence[nn.Module], first: int, loss: Loss | None) -> list[Split]:
        splits: list[Split] = [ByShape(layer, i, choose) for i, layer in enumerate(layers, first)]
        return splits if loss is None else [*splits, LayerSplit([], first + len(layers), loss)]

    return parts


def always(name: str, shared: SharedGraphs) -> Choose:
    """Each layer by its graph, of which the split's name says the kind. Refuses those that have none."""

    def choose(layer: nn.Module, number: int, x: Any, seed: int) -> tuple[Split, Decision]:
        restore(layer)  # another stage may have deferred its gradients
        try:
            part = shared.split(layer, number, x, seed)
        except Untraceable as error:
            raise Untraceable(f"split {name}: layer {number}: {error} (split auto falls back)") from error
        return part, Decision(_name(layer), name, "asked for")

    return choose


class Auto:
    """A layer's split is the one that was measured to take the least time for F, B and W of a microbatch; equal layers share
    that, for inputs of one shape. tight: none may hold more bytes after F or after B than the split of the layers. inductor:
    graphs that inductor compiles are tried for every block, and not only for blocks that are compiled. alone: see
    `parts_by_name`."""

    def __init__(self, tight: bool = False, inductor: bool = False, alone: bool = True) -> None:
        self.tight, self.inductor, self.alone = tight, inductor, alone
        self._shared = {name: SharedGraphs(make) for name, make in MAKES.items()}
        self._known: dict[Any, Decision] = {}
        self._layer_splits: dict[int, LayerSplit] = {}

    def choose(self, layer: nn.Module, number: int, x: Any, seed: int) -> tuple[Split, Decision]:
        """Its split, and why: where it cannot be traced, that of the layers."""
        restore(layer)  # a trace sees the layer as it is
        key = shared_key(unwrapped(layer), x)
        decision = self._known.get(key)
        if decision is None:
            decision = self._known[key] = self._decided(layer, number, x, seed)
        restore(layer)
        if decision.split == "layers":
            return self._by_layers(layer, number), decision
        part = self._shared[decision.split].split(layer, number, x, seed)
        if id(layer) in self._layer_splits:  # which inputs of another shape take
            self._by_layers(layer, number)
        return part, decision

    def _decided(self, layer: nn.Module, number: int, x: Any, seed: int) -> Decision:
        parts: dict[str, Split] = {}
        refused: dict[str, str] = {}

        def tried(name: str) -> None:
            try:
                parts[name] = self._shared[name].split(layer, number, x, seed)
            except Untraceable as error:
                refused[name] = str(error)

        if not self.alone or wrapped_modules(layer) or any(map(is_dtensor, layer.parameters())):
            return Decision(_name(layer), "layers", "other ranks take part in its forward, and would have to try in step")
        for name in ("graph", *(["inductor"] if self.inductor or compiles(layer) else [])):
            tried(name)
        if not parts:
            warnings.warn(f"split auto: layer {number} by layers, not by its graph: {refused['graph']}", stacklevel=2)
            return Decision(_name(layer), "layers", refused["graph"])
        parts["layers"] = own = self._by_layers(layer, number)
        sizes = {name: held(layer, part, x, seed) for name, part in parts.items()}
        # Where memory is bounded, in place of each split that holds more than that of the layers comes one that recomputes.
        for name in [name for name in parts if self.tight and _more(sizes[name], sizes["layers"])]:
            least = f"{name}:least"
            restore(layer)
            tried(least)
            defer(layer, own.deferral)
            if least in parts:
                sizes[least] = held(layer, parts[least], x, seed)
            smallest = least if least in parts else name
            if _more(sizes[smallest], sizes["layers"]):
                both = (format_bytes(max(sizes[which])) for which in (smallest, "layers"))
                refused[name] = "{} holds {}, and layers {}".format(smallest, *both)
                parts.pop(least, None)
            del parts[name]
        times = timed(layer, parts, x, seed)
        costs = {name: dict(zip(COSTS, (*times[name], *sizes[name]), strict=True)) for name in parts}
        best = min(times, key=lambda name: sum(times[name]))
        return Decision(_name(layer), best, "; ".join(refused.values()), costs)

    def _by_layers(self, layer: nn.Module, number: int) -> LayerSplit:
        known = self._layer_splits.get(id(layer))
        if known is None:
            return self._layer_splits.setdefault(id(layer), LayerSplit([layer], number))
        defer(layer, known.deferral)
        return known


def _more(sizes: tuple[int, int], limits: tuple[int, int]) -> bool:
    return sizes[0] > limits[0] or sizes[1] > limits[1]


def _name(layer: nn.Module) -> str:
    return own_type(unwrapped(layer)).__name__


def timed(layer: nn.Module, parts: Mapping[str, Split], x: Any, seed: int) -> dict[str, tuple[float, float, float]]:
    """Median µs of F, B and W of each. They take turns, so that a slow moment of the machine meets all. Gradients are there,
    as in the middle of a step. On a CPU: of the thread that works, on its core."""
    clock = _synchronised if any(tensor.is_cuda for tensor in tensors_of(x)) else time.thread_time_ns
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in parts}
    with undisturbed(layer):
        for part in parts.values():
            _passes(part, x, seed, clock)  # warm
        began, rounds = time.monotonic(), 0
        while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.monotonic() - began < SECONDS):
            for name, part in parts.items():
                rows[name].append(_passes(part, x, seed, clock))
            rounds += 1
    return {name: tuple(map(median, zip(*times, strict=True))) for name, times in rows.items()}


def held(layer: nn.Module, part: Split, x: Any, seed: int) -> tuple[int, int]:
    """Bytes held after F (its input among them) and after B, for a microbatch that is not the first."""
    with undisturbed(layer):
        _passes(part, x, seed, time.monotonic_ns)
        parameters = list(layer.parameters())
        there = (*parameters, *layer.buffers(), *(p.grad for p in parameters if p.grad is not None))
        meter = LiveBytes(there)
        with meter:
            given = copied(x)
            y, kept = part.forward(given, None, split=True, seed=seed)
            like = [Zeros.of(leaf) for leaf in trained(y)]
            del given, y
            after_f = meter.now
            part.backward(kept, [zeros.made() for zeros in like])
            after_b = meter.now
    return after_f, after_b


def _passes(part: Split, x: Any, seed: int, clock: Callable[[], int]) -> tuple[float, float, float]:
    """µs of F, B and W."""
    at = [clock()]
    y, kept = part.forward(detached(x), None, split=True, seed=seed)
    gradients = [torch.ones_like(leaf) for leaf in trained(y)]
    at.append(clock())
    part.backward(kept, gradients)
    at.append(clock())
    part.weights(kept)
    at.append(clock())
    f, b, w = ((later - earlier) / 1000 for earlier, later in zip(at, at[1:], strict=False))
    return f, b, w


def _synchronised() -> int:
    """Nanoseconds, when all that was launched has run."""
    torch.cuda.synchronize()
    return time.monotonic_ns()


@dataclass(frozen=True, eq=False)
class Decision:
    """How equal blocks are split. block: their class. split: its name. why: what spoke against others (costs aside).
    costs: of each split that was tried (see `choices.COSTS`)."""

    block: str
    split: str
    why: str
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


# (layer, its number, the input, the seed of its random numbers) → its split, and why.
Choose = Callable[[nn.Module, int, Any, int], tuple[Split, Decision]]


class ByShape(Split):
    """Layer `number` of a model, split as `choose` says: for inputs of one structure, of their shapes and types, and for
    what a person may change meanwhile (autocast, training mode, which parameters are trained)."""

    def __init__(self, layer: nn.Module, number: int, choose: Choose) -> None:
        self.layer, self.number, self.choose = layer, number, choose
        self.decisions: list[Decision] = []
        self._modules, self._parameters = list(layer.modules()), list(layer.parameters())
        self._found: dict[Any, Split] = {}

    def forward(self, x: Any, target: Any, *, split: bool, seed: int) -> tuple[Any, tuple[Split, Any]]:
        state = tuple([module.training for module in self._modules]), tuple([p.requires_grad for p in self._parameters])
        key = state, inputs_key(x)
        part = self._found.get(key)
        if part is None:
            part, decision = self.choose(self.layer, self.number, x, seed)
            self._found[key] = part
            self.decisions.append(decision)
        y, kept = part.forward(x, target, split=split, seed=seed)
        return y, (part, kept)

    def backward(
        self, kept: tuple[Split, Any], gradients: Sequence[Tensor | None], unit: float = 1.0
    ) -> list[Tensor | None]:
        return kept[0].backward(kept[1], gradients, unit)

    def give(self, kept: tuple[Split, Any], keeper: Keeper) -> None:
        kept[0].give(kept[1], keeper)

    def weights(self, kept: tuple[Split, Any]) -> None:
        kept[0].weights(kept[1])


def graph_saved(kept: Any) -> list[Tensor] | None:
    """What a graph's F saved for a microbatch, of what a stage keeps for one of its parts. None: autograd saved it."""
    saved = kept[1] if isinstance(kept, tuple) else kept
    return [value for value in saved.values if isinstance(value, Tensor)] if isinstance(saved, Saved) else None


def decisions_of(stages: Iterable[Stage]) -> list[Row]:
    """What was decided for the layers of `stages`, a row for a kind of them: numbers, class, split, why and costs."""
    rows = [
        {**vars(decision), "layers": [part.number]}
        for part in (part for stage in stages for part in stage.parts if isinstance(part, ByShape))
        for decision in part.decisions
    ]
    return merged([rows])


# (layers, number of the first, loss or None) → how they are split.
Parts = Callable[[Sequence[nn.Module], int, Loss | None], Sequence[Split]]


def parts_by_name(name: str, *, tight: bool = False, alone: bool = True) -> Parts:
    """What splits the stages of one rank: equal layers share what was traced, compiled and measured. tight: memory is
    bounded, so `auto` takes no split that holds more than that of the layers. alone: no other rank takes part in a layer's
    forward; where one does, `auto` tries nothing out, and takes the layers.

    layers: linear layers, embeddings and convolutions queue their weight gradients, and the rest of a backward is B. graph:
    each layer's joint graph is cut, so any operation is split; inductor compiles it. `:least` keeps as little between F and
    B as recomputing cheap operations allows. auto: a layer at a time, what is measured faster; `auto:inductor` also
    compiles. Raises BadInput for a name that is none of `SPLITS`.
    """
    if name not in SPLITS:
        raise BadInput(f"split: '{name}' is none of {', '.join(SPLITS)}")
    if name == "layers":
        return lambda layers, first, loss: [LayerSplit(layers, first, loss)]
    if name.startswith("auto"):
        return parts_by(Auto(tight, inductor=name == "auto:inductor", alone=alone).choose)
    return parts_by(always(name, SharedGraphs(MAKES[name])))
