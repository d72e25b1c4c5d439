"""How each block's backward is split, by name: by its graph, or as measurements say is faster within the memory. The choice
is made when inputs of a shape first come."""

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
from ..backward.replay import mode_of, undisturbed
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
SECONDS = 1.0  # for all rounds, unless MIN_ROUNDS take longer


def parts_by(choose: Choose) -> Parts:
    """Parts for layers `first` … of a model, each split as `choose` says, and one for the loss after them."""

    def parts(layers: Sequence[nn.Module], first: int, loss: Loss | None) -> list[Split]:
        splits: list[Split] = [ByShape(layer, i, choose) for i, layer in enumerate(layers, first)]
        return splits if loss is None else [*splits, LayerSplit([], first + len(layers), loss)]

    return parts


def always(name: str, shared: SharedGraphs) -> Choose:
    """Split each layer by its graph; the name says which kind. Raises Untraceable for layers without a graph."""

    def choose(layer: nn.Module, number: int, x: Any, seed: int) -> tuple[Split, Decision]:
        restore(layer)  # another stage may have deferred its gradients
        try:
            part = shared.split(layer, number, x, seed)
        except Untraceable as error:
            raise Untraceable(f"split {name}: layer {number}: {error} (split auto falls back)") from error
        return part, Decision(_name(layer), name, "asked for")

    return choose


class Auto:
    """Gives each layer the split that takes the least measured time for F, B and W of a microbatch. Equal layers share the
    measurement, for inputs of the same shape. tight: no split may hold more bytes after F or after B than "layers" does.
    inductor: try graphs compiled by inductor for every block, not only for compiled blocks. alone: see `parts_by_name`."""

    def __init__(self, tight: bool = False, inductor: bool = False, alone: bool = True) -> None:
        self.tight, self.inductor, self.alone = tight, inductor, alone
        self._shared = {name: SharedGraphs(make) for name, make in MAKES.items()}
        self._known: dict[Any, Decision] = {}
        self._layer_splits: dict[int, LayerSplit] = {}

    def choose(self, layer: nn.Module, number: int, x: Any, seed: int) -> tuple[Split, Decision]:
        """The layer's split, and why; "layers" if it cannot be traced."""
        restore(layer)  # trace the layer without deferred gradients
        key = shared_key(unwrapped(layer), x)
        decision = self._known.get(key)
        if decision is None:
            decision = self._known[key] = self._decided(layer, number, x, seed)
        restore(layer)
        if decision.split == "layers":
            return self._by_layers(layer, number), decision
        part = self._shared[decision.split].split(layer, number, x, seed)
        if id(layer) in self._layer_splits:  # inputs of another shape use that split
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
        # If memory is limited, a split that holds more than "layers" is replaced by one that recomputes.
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
    """Median µs of F, B and W of each split. They take turns, so that a slow moment of the machine affects all. Gradients
    exist already, as in the middle of a step. On a CPU: the time of the working thread on its core."""
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
    """Bytes held after F (with its input) and after B, for a microbatch that is not the first."""
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
    """The time in ns, once all launched work is done."""
    torch.cuda.synchronize()
    return time.monotonic_ns()


@dataclass(frozen=True, eq=False)
class Decision:
    """How equal blocks are split. block: their class. split: its name. why: what ruled out others, apart from costs.
    costs: of each split that was tried (see `choices.COSTS`)."""

    block: str
    split: str
    why: str
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


# (layer, its number, the input, the seed of its random numbers) → its split, and the decision.
Choose = Callable[[nn.Module, int, Any, int], tuple[Split, Decision]]


class ByShape(Split):
    """Layer `number` of a model, split as `choose` says for each structure, shape and dtype of its input, and each setting
    that a user may change (autocast, training mode, which parameters are trained)."""

    def __init__(self, layer: nn.Module, number: int, choose: Choose) -> None:
        self.layer, self.number, self.choose = layer, number, choose
        self.decisions: list[Decision] = []
        self._modules, self._parameters = list(layer.modules()), list(layer.parameters())
        self._found: dict[Any, Split] = {}

    def forward(self, x: Any, target: Any, *, split: bool, seed: int) -> tuple[Any, tuple[Split, Any]]:
        key = mode_of(self._modules), tuple([p.requires_grad for p in self._parameters]), inputs_key(x)
        if key not in self._found:
            self._found[key], decision = self.choose(self.layer, self.number, x, seed)
            self.decisions.append(decision)
        part = self._found[key]
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
    """The tensors that a graph's F saved for a microbatch, from what a part of a stage keeps. None: autograd saved them."""
    saved = kept[1] if isinstance(kept, tuple) else kept
    return [value for value in saved.values if isinstance(value, Tensor)] if isinstance(saved, Saved) else None


def decisions_of(stages: Iterable[Stage]) -> list[Row]:
    """The decisions for the layers of `stages`: a row for each kind, with numbers, class, split, reason and costs."""
    rows = [
        {**vars(decision), "layers": [part.number]}
        for part in (part for stage in stages for part in stage.parts if isinstance(part, ByShape))
        for decision in part.decisions
    ]
    return merged([rows])


# (layers, number of the first, loss or None) → their parts.
Parts = Callable[[Sequence[nn.Module], int, Loss | None], Sequence[Split]]


def parts_by_name(name: str, *, tight: bool = False, alone: bool = True) -> Parts:
    """What splits the stages of one rank; equal layers share traces, compiled graphs and measurements. tight: memory is
    limited, so `auto` takes no split that holds more than "layers". alone: no other rank takes part in a layer's
    forward; else `auto` measures nothing and takes "layers".

    layers: linear layers, embeddings and convolutions queue their weight gradients, and the rest of a backward is B. graph:
    each layer's joint graph is cut, so any operation is split; inductor compiles it. `:least` keeps as little between F and
    B as recomputing cheap operations allows. auto: for each layer, the faster one as measured; `auto:inductor` also
    compiles. Raises BadInput for a name that is not in `SPLITS`.
    """
    if name not in SPLITS:
        raise BadInput(f"split: '{name}' is none of {', '.join(SPLITS)}")
    if name == "layers":
        return lambda layers, first, loss: [LayerSplit(layers, first, loss)]
    if name.startswith("auto"):
        return parts_by(Auto(tight, inductor=name == "auto:inductor", alone=alone).choose)
    return parts_by(always(name, SharedGraphs(MAKES[name])))
