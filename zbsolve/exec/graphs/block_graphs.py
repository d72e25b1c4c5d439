"""What equal blocks share: F, B and W as functions that torch traced from a block, and what each takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..backward.distributed import Layout
from ..base.dtensors import is_dtensor, local
from ..base.torch_private import LOCAL_PART, boxed, compiled, simplify_joint
from ..base.values import leaves_of
from .cutting import Cut, cut
from .joint import Role, trace

Run = Callable[[list[Any]], Sequence[Any]]


class Zeros(NamedTuple):
    """A gradient that is 0. shape: of this rank's part, where it is a DTensor, of that layout."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: Layout | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Zeros:
        """The gradient of a tensor like this."""
        if is_dtensor(tensor):
            return cls(local(tensor).shape, tensor.dtype, tensor.device, Layout.of(tensor))
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def made(self) -> Tensor:
        """The tensor."""
        found = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return found if self.layout is None else self.layout.whole(found)


@dataclass(frozen=True, eq=False)
class Graphs:
    """What equal blocks share: the three functions, what each takes and gives, and the structure of the outputs.

    trained_inputs, trained_outputs: the leaves that have a gradient. passed: those outputs that are inputs → which.
    tangents: the gradients that the functions take of these. mutated: names of buffers that F changes. one_output: the
    output is one tensor, and no structure. layouts: of what is a DTensor outside of the graphs (see `Joint`). extra: the
    leaf behind the outputs that is what layers add to the loss.
    """

    cut: Cut
    forward: Run
    backward: Run
    weights: Run
    spec: Any
    trained_inputs: dict[int, Zeros]
    trained_outputs: tuple[int, ...]
    tangents: dict[int, Zeros]
    passed: dict[int, int]
    mutated: frozenset[str]
    one_output: bool
    layouts: dict[Role, Layout]
    extra: int | None

    def layout(self, role: Role) -> Layout | None:
        """The layout of a value that is a DTensor outside of the graphs."""
        return self.layouts.get(role.whole)

    def role_of(self, tangent: Role) -> Role:
        """The role of a gradient as the graphs take it: of a DTensor this rank's part."""
        return tangent if self.layout(tangent) is None else Role(tangent.kind, tangent.key, LOCAL_PART)


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
    outputs = tuple(sorted({*parts.tangents, *joint.passed} - {joint.extra}))
    return Graphs(
        cut=parts,
        forward=forward,
        backward=backward,
        weights=weights,
        spec=joint.spec,
        trained_inputs=trained_inputs,
        trained_outputs=outputs,
        tangents={i: Zeros.of(example) for i, example in parts.tangents.items()},
        passed=joint.passed,
        mutated=mutated,
        one_output=joint.spec.is_leaf(),
        layouts=joint.layouts,
        extra=joint.extra,
    )
