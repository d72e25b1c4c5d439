"""A block's joint graph: one graph of its forward and backward, which says what each of its inputs and outputs is.

torch's AOTAutograd traces it (`aot_export_joint_with_descriptors`). Dynamo captures the block first: without it, tags of
activation checkpointing are lost, and compiled blocks cannot be traced.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ...util.errors import BadInput
from ..torch_private import (
    capture_block,
    decompositions,
    descriptors,
    export_joint,
    hooked,
    module_hooked,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)


class Untraceable(BadInput):
    """Why a block has no graph, in one line."""


class Role(NamedTuple):
    """What a value at the border of a joint graph is.

    kind: `parameter`, `buffer`, `input` or `tangent` (the gradient of an output) among the inputs; `output`, `mutation` (a
    buffer's new value), `parameter gradient`, `input gradient` or `nothing` among the outputs. key: the parameter's or
    buffer's name, or the number of the input's or output's leaf. part: the attribute of a tensor subclass that it is.
    """

    kind: str
    key: str | int = 0
    part: str | None = None


NOTHING = Role("nothing")


@dataclass(frozen=True, eq=False)
class Joint:
    """graph: (parameters, buffers, inputs, tangents) → (outputs, mutations, gradients). takes: the role of each of its
    inputs, by node name; gives: of each of its outputs, in order. forwards: how many of these the forward makes. spec: the
    structure of the outputs. mode: the fake tensors' mode that it was traced under. passed: leaf of the outputs → leaf of
    the inputs that it is, where that requires a gradient, of which the graph knows nothing."""

    graph: torch.fx.GraphModule
    takes: dict[str, Role]
    gives: tuple[Role, ...]
    forwards: int
    spec: Any
    mode: Any
    passed: dict[int, int]


def trace(block: nn.Module, inputs: Sequence[Any], *, decompose: bool = False) -> Joint:
    """The joint graph of `block(*inputs)`: any pytrees of tensors, of which those that require a gradient get one.

    Autocast, training mode and each parameter's `requires_grad` are as they are now. decompose: into the operations that
    inductor knows. Raises Untraceable: hooks, which graphs do not run; control flow that depends on numbers; and all else
    that torch's tracers refuse.
    """
    _refuse_hooks(block)
    trained = {i for i, leaf in enumerate(tree_leaves(tuple(inputs))) if isinstance(leaf, Tensor) and leaf.requires_grad}
    joint = _traced(block, inputs, trained, decompose)
    views = _views_of_inputs(joint, trained)
    return _traced(_WithCopies(block, views), inputs, trained, decompose) if views else joint


class _WithCopies(nn.Module):
    """A block that copies some leaves of its outputs: views of its inputs, whose gradients a joint graph leaves out."""

    def __init__(self, block: nn.Module, copied: frozenset[int]) -> None:
        super().__init__()
        self.block = block
        self.copied = copied

    def forward(self, *inputs: Any) -> Any:
        leaves, spec = tree_flatten(self.block(*inputs))
        return tree_unflatten([leaf.clone() if i in self.copied else leaf for i, leaf in enumerate(leaves)], spec)


def _views_of_inputs(joint: Joint, trained: Collection[int]) -> frozenset[int]:
    """Leaves of the outputs that only views lie between and an input that requires a gradient."""
    known = {role.key for role in joint.takes.values() if role.kind == "tangent"} | joint.passed.keys()
    found = set[int]()
    (output,) = joint.graph.graph.find_nodes(op="output")
    for value, role in zip(output.args[0], joint.gives, strict=True):
        if role.kind != "output" or role.key in known or not isinstance(value, fx.Node):
            continue
        while value.op == "call_function" and getattr(value.target, "is_view", False):
            value = value.all_input_nodes[0]
        of = joint.takes.get(value.name, NOTHING)
        if of.kind == "input" and of.key in trained:
            found.add(int(role.key))
    return frozenset(found)


def _traced(block: nn.Module, inputs: Sequence[Any], trained: Collection[int], decompose: bool) -> Joint:
    table = decompositions() if decompose else None
    given = tuple(inputs)
    try:
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore")  # Dynamo warns of buffers that a forward changes: the graph returns them
            captured = capture_block(stack, block, given)
            joint = export_joint(stack, captured, given, table)
    except Exception as error:
        name = type(block.block if isinstance(block, _WithCopies) else block).__name__
        raise Untraceable(f"{name} cannot be traced: {_first_line(error)}") from error
    return _described(joint, trained, "block." if isinstance(block, _WithCopies) else "")


def _described(joint: Any, trained: Collection[int], prefix: str) -> Joint:
    graph = joint.graph_module
    takes = {node.name: _named(_input_role(node.meta["desc"]), prefix) for node in graph.graph.find_nodes(op="placeholder")}
    (output,) = graph.graph.find_nodes(op="output")
    gives = tuple(_named(_output_role(desc), prefix) for desc in output.meta["desc"])
    forwards = 1 + max((i for i, role in enumerate(gives) if role.kind in ("output", "mutation")), default=-1)
    passed = {
        int(role.key): int(of.key)
        for value, role in zip(output.args[0], gives, strict=True)
        if role.kind == "output" and isinstance(value, fx.Node)
        if (of := takes.get(value.name, NOTHING)).kind == "input" and of.key in trained
    }
    return Joint(graph, takes, gives, forwards, joint.out_spec, joint.fake_mode, passed)


def _named(role: Role, prefix: str) -> Role:
    """The role with the name that a parameter has in the block itself."""
    return Role(role.kind, role.key.removeprefix(prefix) if isinstance(role.key, str) else role.key, role.part)


def _input_role(desc: Any) -> Role:
    kinds = descriptors()
    if isinstance(desc, kinds.SubclassGetAttrAOTInput):
        kind, key, _ = _input_role(desc.base)
        return Role(kind, key, desc.attr)
    if isinstance(desc, kinds.ParamAOTInput):
        return Role("parameter", desc.target)
    if isinstance(desc, kinds.BufferAOTInput):
        return Role("buffer", desc.target)
    if isinstance(desc, kinds.PlainAOTInput):
        return Role("input", desc.idx)
    if isinstance(desc, kinds.TangentAOTInput) and isinstance(desc.output, kinds.PlainAOTOutput):
        return Role("tangent", desc.output.idx)
    raise Untraceable(f"the graph takes what a stage cannot give: {desc.expr()}")


def _output_role(desc: Any) -> Role:
    kinds = descriptors()
    if desc is None:
        return NOTHING
    if isinstance(desc, kinds.SubclassGetAttrAOTOutput):
        kind, key, _ = _output_role(desc.base)
        return Role(kind, key, desc.attr)
    if isinstance(desc, kinds.PlainAOTOutput):
        return Role("output", desc.idx)
    if isinstance(desc, kinds.InputMutationAOTOutput) and isinstance(desc.mutated_input, kinds.BufferAOTInput):
        return Role("mutation", desc.mutated_input.target)
    if isinstance(desc, kinds.GradAOTOutput):
        of = _input_role(desc.grad_of)
        if of.kind in ("parameter", "input"):
            return Role(f"{of.kind} gradient", of.key, of.part)
    raise Untraceable(f"the graph makes what a stage cannot take: {desc.expr()}")


def _refuse_hooks(block: nn.Module) -> None:
    for name, module in block.named_modules():
        if module_hooked(module):
            raise Untraceable(f"{name or type(block).__name__} has hooks, which graphs do not run")
    for name, parameter in block.named_parameters():
        if hooked(parameter):
            raise Untraceable(f"{name} has hooks, which graphs do not run")


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
