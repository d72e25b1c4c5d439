"""A block whose backward is split by its graph: F, B and W are three functions that torch traced from the block itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..backward.deferral import accumulate
from ..backward.layer_split import seed_layer
from ..backward.split import restore
from ..backward.values import constant, leaves_of
from ..torch_private import boxed, buffers_of, compiled, parameters_of, simplify_joint, storage_key, tree_unflatten
from .cutting import Cut, Piece, cut
from .joint import Role, Untraceable, trace
from .keys import inputs_key

Run = Callable[[list[Any]], Sequence[Any]]


class Zeros(NamedTuple):
    """A gradient that is 0."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Zeros:
        """The gradient of a tensor like this."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def made(self) -> Tensor:
        """The tensor."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, eq=False)
class Graphs:
    """What equal blocks share: the three functions, what each takes and gives, and the structure of the outputs.

    trained_inputs, trained_outputs: the leaves that have a gradient. passed: those outputs that are inputs → which.
    mutated: names of buffers that F changes.
    """

    cut: Cut
    forward: Run
    backward: Run
    weights: Run
    spec: Any
    trained_inputs: dict[int, Zeros]
    trained_outputs: tuple[int, ...]
    passed: dict[int, int]
    mutated: frozenset[str]


def graphs_of(block: nn.Module, x: Any, *, inductor: bool = False, least: bool = False) -> Graphs:
    """Trace and cut `block` for inputs like `x`: structure, shapes, types and which tensors require a gradient. inductor:
    compile the graphs (tens of seconds). least: keep as little between F and B as recomputing cheap operations allows.

    Raises Untraceable.
    """
    joint = trace(block, (x,), decompose=inductor)
    if inductor:
        simplify_joint(joint.graph, joint.mode)
    parts = cut(joint, least=least)
    forward, backward, weights = (
        compiled(piece.graph, joint.mode, behind) if inductor else boxed(piece.graph)
        for piece, behind in ((parts.forward, False), (parts.backward, True), (parts.weights, True))
    )
    mutated = frozenset(str(role.key) for role in joint.gives if role.kind == "mutation")
    trained_inputs = {
        i: Zeros.of(leaf) for i, leaf in enumerate(leaves_of(x)) if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    trained_outputs = tuple(sorted({*parts.tangents, *joint.passed}))
    return Graphs(parts, forward, backward, weights, joint.spec, trained_inputs, trained_outputs, joint.passed, mutated)


@dataclass(slots=True)
class Saved:
    """What a microbatch keeps between its passes. values: what a later pass takes, by role."""

    graphs: Graphs
    values: dict[Role, Any]


class GraphSplit:
    """Layer `number` of a model, whose backward its graphs split. find(layer, x): its graphs for inputs like `x`."""

    def __init__(self, layer: nn.Module, number: int, find: Callable[[nn.Module, Any], Graphs]) -> None:
        restore(layer)  # another stage may have deferred its gradients
        self.layer = layer
        self.number = number
        self.find = find
        self._modules, self._parameters = list(layer.modules()), list(layer.parameters())
        self._known: dict[Any, Graphs] = {}

    def forward(self, x: Any, target: Any, *, split: bool, seed: int) -> tuple[Any, Saved]:
        """F: the outputs, detached; those that need a gradient say so. The target is for a loss, which is no block."""
        graphs = self._graphs(x)
        leaves = leaves_of(constant(x))
        given = [
            leaves[int(r.key)] if r.kind == "input" else self._state(r, graphs.mutated) for r in graphs.cut.forward.takes
        ]
        seed_layer(seed, self.number)
        with torch.no_grad():
            results = graphs.forward(given)
            outputs, values = dict[int, Any](), dict[Role, Any]()
            for role, value in zip(graphs.cut.forward.gives, results, strict=True):
                if role.kind == "output":
                    outputs[int(role.key)] = value
                elif role.kind == "mutation":
                    self._tensor(role).copy_(value)
                elif role.kind == "saved":
                    values[role] = value
        for i in graphs.trained_outputs:
            outputs[i] = outputs[i].detach().requires_grad_()
        return tree_unflatten([outputs[i] for i in range(len(outputs))], graphs.spec), Saved(graphs, values)

    def backward(self, kept: Saved, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """B: the gradients of the inputs that require one. Those of vectors among the parameters are added to `.grad`.
        gradients: of the outputs that need one; None: it is 0."""
        graphs, values = kept.graphs, kept.values
        given = dict(zip(graphs.trained_outputs, gradients, strict=True))
        for i, example in graphs.cut.tangents.items():
            values[Role("tangent", i)] = Zeros.of(example).made() if given[i] is None else given[i]
        kept.values = {role: values[role] for role in graphs.cut.weights.takes if role in values}
        taken = self._taken(graphs.cut.backward, values)
        values.clear()
        found = dict[int, Tensor]()
        with torch.no_grad():
            for role, value in self._run(graphs.backward, graphs.cut.backward, taken):
                if role.kind == "input gradient":
                    found[int(role.key)] = value
                else:
                    kept.values[role] = value
            for output, i in graphs.passed.items():
                if (more := given[output]) is not None:
                    found[i] = found[i] + more if i in found else more
        return [found[i] if i in found else zeros.made() for i, zeros in graphs.trained_inputs.items()]

    def weights(self, kept: Saved) -> None:
        """W: the other gradients of parameters."""
        piece = kept.graphs.cut.weights
        taken = self._taken(piece, kept.values)
        kept.values = {}
        with torch.no_grad():
            self._run(kept.graphs.weights, piece, taken)

    def _run(self, run: Run, piece: Piece, taken: list[Any]) -> list[tuple[Role, Tensor]]:
        """Run B or W: gradients of parameters are added to `.grad`; the rest of what it gives. taken: is emptied.

        `.grad` is added to later, so it must not share memory: a graph may give one tensor as several gradients, or one that
        it took.
        """
        there = {storage_key(one) for one in taken if isinstance(one, Tensor)}
        results = list(zip(piece.gives, run(taken), strict=True))
        counts = Counter(storage_key(value) for _, value in results)
        rest = []
        for role, value in results:
            if role.kind != "parameter gradient":
                rest.append((role, value))
                continue
            shared = storage_key(value) in there or counts[storage_key(value)] > 1
            parameter = self._tensor(role)
            accumulate(parameter, value.clone() if shared and parameter.grad is None else value)
        return rest

    def _graphs(self, x: Any) -> Graphs:
        """Graphs for `x`, and for what a person may change meanwhile: training mode, and which parameters are trained."""
        state = tuple(one.training for one in self._modules), tuple(one.requires_grad for one in self._parameters)
        key = state, inputs_key(x)
        if key not in self._known:
            try:
                self._known[key] = self.find(self.layer, x)
            except Untraceable as error:
                raise Untraceable(f"layer {self.number}: {error}") from error
        return self._known[key]

    def _taken(self, piece: Piece, values: Mapping[Role, Any]) -> list[Any]:
        return [values[role] if role in values else self._state(role) for role in piece.takes]

    def _state(self, role: Role, mutated: Collection[str] = ()) -> Any:
        """A parameter's or buffer's numbers as they are now; a copy where F changes them."""
        value = self._tensor(role).detach()
        if role.part is not None:
            return getattr(value, role.part)
        return value.clone() if role.key in mutated else value

    def _tensor(self, role: Role) -> Tensor:
        path, _, name = str(role.key).rpartition(".")
        module = self.layer.get_submodule(path)
        found = (buffers_of if role.kind in ("buffer", "mutation") else parameters_of)(module)[name]
        assert found is not None
        return found
