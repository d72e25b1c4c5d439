"""A block whose backward is split by its graph: F, B and W are three functions that torch traced from the block. Equal
blocks share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models.losses import auxiliary_loss
from ..backward.deferral import accumulate, accumulate_product
from ..backward.layer_split import seed_layer
from ..backward.stage import Split
from ..base import torch_private as private
from ..base.part import Keeper
from ..base.values import Layout, constant, is_dtensor, leaves_of, local, opened
from .cutting import Cut, Piece, cut
from .joint import Role, trace

Run = Callable[[list[Any]], Sequence[Any]]


class Zeros(NamedTuple):
    """A gradient that is 0. shape: of the local tensor for a DTensor, whose layout is `layout`. stride: for which graphs
    were traced, if no elements share memory; (): any."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: Layout | None = None
    stride: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> Zeros:
        """The zero gradient of a tensor like this."""
        if is_dtensor(tensor):
            return cls(local(tensor).shape, tensor.dtype, tensor.device, Layout.of(tensor))
        return cls(tensor.shape, tensor.dtype, tensor.device, stride=tensor.stride() if all(tensor.stride()) else ())

    def made(self) -> Tensor:
        """The tensor."""
        tensor = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self.laid(tensor) if self.layout is None else self.layout.whole(tensor)

    def laid(self, gradient: Tensor) -> Tensor:
        """A gradient with the strides that graphs expect: messages bring contiguous ones, even of a view."""
        if not self.stride or gradient.stride() == self.stride:
            return gradient
        return torch.empty_strided(self.shape, self.stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


@dataclass(frozen=True, eq=False)
class Graphs:
    """What equal blocks share: the three functions, what each takes and gives, and the structure of the outputs.
    trained_inputs, trained_outputs: the leaves that have a gradient. passed: output that is an input → that input.
    tangents: the gradients of outputs that the functions take. mutated: names of buffers that F changes. one_output: the
    output is a single tensor. layouts: of values that are DTensors outside of the graphs (see `Joint`). extra: the leaf
    after the outputs that layers add to the loss."""

    cut: Cut
    forward: Run
    backward: Run
    weights: Run
    spec: Any
    trained_inputs: tuple[int, ...]
    trained_outputs: tuple[int, ...]
    tangents: dict[int, Zeros]
    passed: dict[int, int]
    mutated: frozenset[str]
    one_output: bool
    layouts: dict[Role, Layout]
    extra: int | None

    def layout(self, role: Role) -> Layout | None:
        """The layout of a value that is a DTensor outside of the graphs; else None."""
        return self.layouts.get(role.whole)


def graphs_of(block: nn.Module, x: Any, *, inductor: bool = False, least: bool = False) -> Graphs:
    """Trace and cut `block` for inputs like `x` in structure, shapes, dtypes and `requires_grad`. inductor:
    compile the graphs (tens of seconds). least: keep as little between F and B as recomputing cheap operations allows.
    Raises Untraceable."""
    joint = trace(block, (x,), decompose=inductor)
    if inductor:
        private.simplify_joint(joint.graph, joint.mode)
    parts = cut(joint, least=least)
    forward, backward, weights = (
        private.compiled(piece.graph, joint.mode, behind) if inductor else private.boxed(piece.graph)
        for piece, behind in ((parts.forward, False), (parts.backward, True), (parts.weights, True))
    )
    mutated = frozenset(str(role.key) for role in joint.gives if role.kind == "mutation")
    trained_inputs = tuple(i for i, leaf in enumerate(leaves_of(x)) if isinstance(leaf, Tensor) and leaf.requires_grad)
    outputs = tuple(sorted({*parts.tangents, *joint.passed} - {joint.extra}))
    tangents = {i: Zeros.of(example) for i, example in parts.tangents.items()}
    return Graphs(
        *(parts, forward, backward, weights, joint.spec),
        *(trained_inputs, outputs, tangents, joint.passed, mutated),
        *(joint.spec.is_leaf(), joint.layouts, joint.extra),
    )


# Where a function takes a value from: (a module's parameters or buffers, a name there), or (None, a number among the values
# given to it). Lists of these are made once, so that no pass looks up a role.
Place = tuple[Any, Any]


@dataclass(slots=True)
class Saved:
    """What a microbatch keeps between its passes: first what F saved, then what W takes. absent: leaves of the outputs that
    nothing used, so they have no gradient."""

    values: list[Any]
    absent: frozenset[int] = frozenset()


class GraphSplit(Split):
    """Layer `number` of a model, whose backward is split by `graphs`, for inputs like those of their trace."""

    def __init__(self, layer: nn.Module, number: int, graphs: Graphs) -> None:
        self.number, self.graphs = number, graphs
        first, second, third = graphs.cut.forward, graphs.cut.backward, graphs.cut.weights
        saved = [role for role in first.gives if role.kind == "saved"]
        self._tangents = [(leaf, zeros, graphs.layout(Role("tangent", leaf))) for leaf, zeros in graphs.tangents.items()]
        # Of a DTensor, graphs take the local tensor.
        tangents = [Role("tangent", leaf, layout and private.LOCAL_PART) for leaf, _, layout in self._tangents]
        given = {role: i for i, role in enumerate([*saved, *tangents])}
        kept = [role for role in third.takes if role in given]
        self._kept = [given[role] for role in kept]
        live = [role for role in second.gives if role.kind == "live"]
        self._backward = _Function(layer, graphs, second, given)
        self._weights = _Function(layer, graphs, third, {role: i for i, role in enumerate([*kept, *live])})
        mutated = graphs.mutated
        self._takes = [
            (None, r.key) if r.kind == "input" else _place(layer, r, copied=r.key in mutated) for r in first.takes
        ]
        self._input_parts = [(i, r) for i, r in enumerate(first.takes) if r.kind == "input" and r.part is not None]
        outputs = [(i, role) for i, role in enumerate(first.gives) if role.kind == "output" and role.has_numbers]
        self._outputs = [(i, int(role.key), graphs.layout(role)) for i, role in outputs]
        self._mutations = [(i, *_place(layer, role)) for i, role in enumerate(first.gives) if role.kind == "mutation"]
        self._saved = [i for i, role in enumerate(first.gives) if role.kind == "saved"]

    def forward(self, x: Any, target: Any, *, split: bool, seed: int) -> tuple[Any, Saved]:
        graphs = self.graphs
        given = _taken(self._takes, leaves_of(constant(x)))
        for i, role in self._input_parts:
            given[i] = _part(given[i], role)
        seed_layer(seed, self.number)
        outputs: list[Any] = [None] * len(self._outputs)
        with torch.no_grad():
            results = graphs.forward(given)
            for i, holder, name in self._mutations:
                holder[name].copy_(results[i])
            for i, leaf, layout in self._outputs:
                outputs[leaf] = _outside(results[i], layout)
            for leaf in graphs.trained_outputs:
                outputs[leaf] = outputs[leaf].detach().requires_grad_()
        if graphs.extra is not None:
            auxiliary_loss(outputs[graphs.extra].detach())
        y = outputs[0] if graphs.one_output else private.tree_unflatten(outputs[: graphs.spec.num_leaves], graphs.spec)
        return y, Saved([results[i] for i in self._saved])

    def backward(self, kept: Saved, gradients: Sequence[Tensor | None], unit: float = 1.0) -> list[Tensor | None]:
        """B. Also adds to `.grad` of parameters that are vectors."""
        graphs, values = self.graphs, [opened(value) for value in kept.values]
        given = dict(zip(graphs.trained_outputs, gradients, strict=True))
        kept.absent = frozenset(leaf for leaf, gradient in given.items() if gradient is None)
        for leaf, zeros, layout in self._tangents:
            if leaf == graphs.extra:
                values.append(zeros.made().fill_(unit))
                continue
            gradient = given[leaf]
            if gradient is None:
                values.append(zeros.made())
            elif layout is not None and is_dtensor(gradient):  # as the graph takes it
                values.append(local(layout.laid(gradient)))
            else:
                values.append(zeros.laid(gradient))
        kept.values = [values[i] for i in self._kept]
        with torch.no_grad():
            results = self._backward(values, kept.absent)
            there = (row for row in self._backward.inputs if not row[-1] <= kept.absent)
            gradient_of = {leaf: _outside(results[i], layout) for i, leaf, layout, _ in there}
            kept.values += [results[i] for i in self._backward.live]
            for output, leaf in graphs.passed.items():
                if (more := given[output]) is not None:
                    gradient_of[leaf] = gradient_of[leaf] + more if leaf in gradient_of else more
        return [gradient_of.get(leaf) for leaf in graphs.trained_inputs]

    def give(self, kept: Saved, keeper: Keeper) -> None:
        kept.values = [keeper.keep(value) if isinstance(value, Tensor) else value for value in kept.values]

    def weights(self, kept: Saved) -> None:
        values, kept.values = kept.values, []
        with torch.no_grad():
            self._weights(values, kept.absent)


class _Function:
    """B or W of one layer. gradients: (number of a result, place of its parameter, layout). inputs: (number of a result,
    leaf of the input whose gradient it is, layout). live: results that W takes. factors: for gradients that are products:
    (number of the first of two results, place of the parameter). The last entry of these rows: the gradients that it depends
    on."""

    def __init__(self, layer: nn.Module, graphs: Graphs, piece: Piece, given: Mapping[Role, int]) -> None:
        self.run = graphs.backward if piece is graphs.cut.backward else graphs.weights
        self.takes = [(None, given[role]) if role in given else _place(layer, role) for role in piece.takes]
        gives = list(enumerate(piece.gives))
        parameters = [(i, role) for i, role in gives if role.kind == "parameter gradient"]
        needs = graphs.cut.needs
        self.gradients = [(i, *_place(layer, role), graphs.layout(role), needs[role.whole]) for i, role in parameters]
        inputs = [(i, role) for i, role in gives if role.kind == "input gradient"]
        self.inputs = [(i, int(role.key), graphs.layout(role), needs[role.whole]) for i, role in inputs]
        self.live = [i for i, role in gives if role.kind == "live"]
        # The right factor follows the left one.
        factors = [(i, role) for i, role in gives if role.kind == "left factor"]
        self.factors = [(i, *_place(layer, role), needs[Role("parameter gradient", role.key)]) for i, role in factors]

    def __call__(self, values: list[Any], absent: frozenset[int]) -> Sequence[Any]:
        """Run the function on `values`, and free them. Adds gradients of parameters to `.grad`, which must not share memory:
        a graph may return one tensor as several gradients, or one of its inputs. Leaves out gradients that depend only on
        `absent` ones. Returns all results."""
        taken = _taken(self.takes, values)
        values.clear()
        gradients = [row for row in self.gradients if not row[-1] <= absent] if absent else self.gradients
        new = any(holder[name].grad is None for _, holder, name, *_ in gradients)  # a result becomes a `.grad` itself
        there = {private.storage_key(value) for value in taken if isinstance(value, Tensor)} if new else set()
        results = self.run(taken)
        counts = Counter(private.storage_key(result) for result in results if isinstance(result, Tensor)) if new else {}
        for i, holder, name, layout, _ in gradients:
            result = results[i]
            if new and ((key := private.storage_key(result)) in there or counts[key] > 1):
                result = result.clone()
            accumulate(holder[name], _outside(result, layout))
        for i, holder, name, needs in self.factors:
            if not needs <= absent:
                accumulate_product(holder[name], results[i], results[i + 1])
        return results


def _taken(places: Sequence[Place], values: Sequence[Any]) -> list[Any]:
    return [values[name] if holder is None else holder[name] for holder, name in places]


def _place(layer: nn.Module, role: Role, *, copied: bool = False) -> Place:
    """Where to find a parameter or buffer, with its value of the moment. copied: as a copy, because F changes it."""
    path, _, name = str(role.key).rpartition(".")
    module = layer.get_submodule(path)
    holder = (private.buffers_of if role.kind in ("buffer", "mutation") else private.parameters_of)(module)
    if role.part is not None and role.kind in ("parameter", "buffer"):
        return _Seen(holder, partial(_part, role=role)), name
    return (_Seen(holder, Tensor.clone) if copied else holder), name


@dataclass(frozen=True)
class _Seen:
    """A mapping whose values are `see` of those of `holder`, detached."""

    holder: Mapping[str, Any]
    see: Callable[[Tensor], Any]

    def __getitem__(self, name: str) -> Any:
        return self.see(self.holder[name].detach())


def _part(value: Any, role: Role) -> Any:
    """The part of a value that a graph takes."""
    if role.part is None:
        return value
    return local(value) if role.part == private.LOCAL_PART else getattr(value, role.part)


def _outside(value: Any, layout: Layout | None) -> Any:
    """A graph's value as it is outside of the graph: a DTensor, if it has a layout."""
    return value if layout is None else layout.whole(value)
