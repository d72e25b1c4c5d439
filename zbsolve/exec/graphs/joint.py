"""A block's joint graph: one graph of its forward and backward, with the role of each input and output. torch's AOTAutograd
traces it (`aot_export_joint_with_descriptors`). Dynamo captures the block first: without it, tags of activation
checkpointing are lost, and compiled blocks cannot be traced."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ...models.losses import auxiliary_losses
from ...models.sides import Carried, called_by, names_of
from ...util.errors import BadInput
from ..base import torch_private as private
from ..base.values import Layout, is_dtensor, leaves_of

# Attributes that a forward may change because it restores them: for auxiliary losses, for outputs in transformers, and for
# parts of a model that other ranks compute.
AS_BEFORE = ("._collecting", "._listening", "._active_collector", "._passing")
TENSOR_PARALLEL = "torch.distributed.tensor."


class Untraceable(BadInput):
    """A block has no graph; the message says why, in one line."""


class Role(NamedTuple):
    """The role of an input or output of a joint graph. kind: `parameter`, `buffer`, `input` or `tangent` (the gradient of an
    output) for inputs; `output`, `mutation` (a buffer's new value), `parameter gradient` (or the `left factor` and
    `right factor` of one), `input gradient` or `nothing` for outputs. key: the parameter's or buffer's name, or the
    number of the input's or output's leaf. part: the attribute of a tensor subclass that it is; None: a whole value."""

    kind: str
    key: str | int = 0
    part: str | None = None

    @property
    def has_numbers(self) -> bool:
        """Is it a tensor, or the local tensor of a DTensor? (Another part of a DTensor is its mesh.)"""
        return self.part in (None, private.LOCAL_PART)

    @property
    def whole(self) -> Role:
        """The role of the whole value."""
        return Role(self.kind, self.key)


NOTHING = Role("nothing")


@dataclass(frozen=True, eq=False)
class Joint:
    """graph: (parameters, buffers, inputs, tangents) → (outputs, mutations, gradients). takes: name of an input node → its
    role; gives: the role of each output, in order. forwards: how many of the outputs belong to the forward. spec: the
    structure of the outputs. mode: the fake tensor mode of the trace. passed: leaf of the outputs → leaf of the inputs that
    it is, if that requires a gradient, which the graph does not compute. layouts: of outputs, tangents and gradients that
    are DTensors outside of the graph. extra: the leaf after the outputs that layers add to the loss; None: nothing."""

    graph: torch.fx.GraphModule
    takes: dict[str, Role]
    gives: tuple[Role, ...]
    forwards: int
    spec: Any
    mode: Any
    passed: dict[int, int]
    layouts: dict[Role, Layout]
    extra: int | None


def trace(block: nn.Module, inputs: Sequence[Any], *, decompose: bool = False) -> Joint:
    """The joint graph of `block(*inputs)`, which are pytrees of tensors; those that require a gradient get one. Autocast,
    training mode and each parameter's `requires_grad` are as they are now. decompose: into the operations that inductor
    knows. Raises Untraceable for hooks, which graphs do not run; control flow that depends on values; attributes that
    a forward sets; and everything else that torch's tracers refuse."""
    _refuse_hooks(block)
    trained = {i for i, leaf in enumerate(leaves_of(tuple(inputs))) if isinstance(leaf, Tensor) and leaf.requires_grad}
    try:
        joint = _traced(_Whole(block), inputs, trained, decompose)
    except (_ViewsOfOneAnother, private.NoOperations):  # a layer that returns its inputs: copies make a graph
        return _traced(_Whole(block, None), inputs, trained, decompose)
    parameters = {name for name, p in block.named_parameters(remove_duplicate=False) if p.requires_grad}
    views = _views(joint, {*(Role("input", i) for i in trained), *(Role("parameter", name) for name in parameters)})
    return _traced(_Whole(block, views), inputs, trained, decompose) if views else joint


class _ViewsOfOneAnother(Exception):
    """Outputs are views of one tensor; a joint graph would have a single gradient for all of them."""


class _Whole(nn.Module):
    """A block that returns, after its outputs, what its layers add to the loss. copied: leaves of its outputs that it
    copies: views of its inputs and parameters, whose gradients a joint graph leaves out. None: copy all."""

    def __init__(self, block: nn.Module, copied: frozenset[int] | None = frozenset()) -> None:
        super().__init__()
        self.block = block
        self.copied = copied
        self.names = names_of(block)

    def forward(self, *inputs: Any) -> Any:
        with auxiliary_losses() as extra:
            beside = any(self.names) or isinstance(inputs[0], Carried)
            y = called_by(self.block, self.names, inputs[0]) if beside else self.block(*inputs)
        leaves, spec = private.tree_flatten(y)
        wanted = range(len(leaves)) if self.copied is None else self.copied
        if wanted:
            copies = [leaf.clone() if i in wanted and isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(leaves)]
            y = private.tree_unflatten(copies, spec)
        return y, None if extra.total is None else extra.total.clone()


def _views(joint: Joint, trained: Collection[Role]) -> frozenset[int]:
    """Leaves of the outputs that are views of another output, or of an input or a parameter that requires a gradient."""
    known = {role.key for role in joint.takes.values() if role.kind == "tangent"} | joint.passed.keys()
    views = set[int]()
    (output,) = joint.graph.graph.find_nodes(op="output")
    pairs = [pair for pair in zip(output.args[0], joint.gives, strict=True) if pair[1].kind == "output"]
    others = {value for value, role in pairs if role.key in known}
    for value, role in pairs:
        if role.key in known or not role.has_numbers or not isinstance(value, fx.Node):
            continue
        while value.op == "call_function" and getattr(value.target, "is_view", False) and value not in others:
            value = value.all_input_nodes[0]
        if value in others or joint.takes.get(value.name, NOTHING).whole in trained:
            views.add(int(role.key))
    return frozenset(views)


def _traced(block: _Whole, inputs: Sequence[Any], trained: Collection[int], decompose: bool) -> Joint:
    table = private.decompositions() if decompose else None
    given = tuple(inputs)
    name = type(block.block).__name__
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()), ExitStack() as stack:  # failed traces may leave it off
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                captured = private.capture_block(stack, block, given)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                joint = private.export_joint(stack, captured, given, table)
    except Exception as error:
        if isinstance(error, private.NoOperations) and block.copied is not None:
            raise
        raise Untraceable(f"{name} cannot be traced: {_reason(error)}") from error
    if private.branches_on(joint.fake_mode):
        raise Untraceable(f"{name}'s forward branches on a number in a tensor that it gets, which a graph would not do")
    effects = [text for warning in warned for text in private.side_effects(str(warning.message))]
    if changed := [effect for effect in effects if not effect.endswith(AS_BEFORE)]:
        whose = ", ".join(effect.replace("self.block", "self", 1) for effect in changed)
        raise Untraceable(f"{name}'s forward changes attributes of {whose}, which a graph would not do")
    return _described(joint, trained)


def _described(joint: Any, trained: Collection[int]) -> Joint:
    graph = joint.graph_module
    takes = {node.name: _named(_input_role(node.meta["desc"])) for node in graph.graph.find_nodes(op="placeholder")}
    (output,) = graph.graph.find_nodes(op="output")
    gives = tuple(_named(_output_role(desc)) for desc in output.meta["desc"])
    results = [(v, role) for v, role in zip(output.args[0], gives, strict=True) if isinstance(v, fx.Node)]
    values = (value.meta.get("val") for value, _ in results)
    if any(isinstance(value, Tensor) and value.layout != torch.strided for value in values):
        raise Untraceable("the graph makes a sparse gradient or output")
    forwards = 1 + max((i for i, role in enumerate(gives) if role.kind in ("output", "mutation")), default=-1)
    passed = {
        int(role.key): int(of.key)
        for value, role in results
        if role.kind == "output" and role.has_numbers
        if (of := takes.get(value.name, NOTHING)).kind == "input" and of.key in trained
    }
    layouts = _layouts(joint, gives, forwards)
    spec, behind = joint.out_spec.child(0), joint.out_spec.num_leaves - 1
    made = any(role == Role("output", behind) for _, role in results)
    return Joint(graph, takes, gives, forwards, spec, joint.fake_mode, passed, layouts, behind if made else None)


def _layouts(joint: Any, gives: Sequence[Role], forwards: int) -> dict[Role, Layout]:
    outputs, gradients, tangents = private.wrapped_values(joint)
    layouts = {_named(_input_role(desc)).whole: Layout.of(value) for value, desc in tangents if is_dtensor(value)}
    for place, values in ((0, outputs), (forwards, gradients)):
        for count, value in values:
            if value is not None and not is_dtensor(value):
                raise Untraceable(f"the graph makes a {type(value).__name__}")
            if value is not None:
                layouts[gives[place].whole] = Layout.of(value)
            place += count
    return layouts


def _named(role: Role) -> Role:
    """The role with the parameter's name in the block itself."""
    return Role(role.kind, role.key.removeprefix("block."), role.part) if isinstance(role.key, str) else role


def _input_role(desc: Any) -> Role:
    kinds = private.descriptors()
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
    if isinstance(desc, kinds.TangentAOTInput) and isinstance(desc.output, kinds.IntermediateBaseAOTOutput):
        raise _ViewsOfOneAnother
    raise Untraceable(f"the graph takes what a stage cannot give: {desc.expr()}")


def _output_role(desc: Any) -> Role:
    kinds = private.descriptors()
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
        # Hooks of tensor parallelism redistribute inputs and outputs; a trace goes through them.
        if any(not hook.__module__.startswith(TENSOR_PARALLEL) for hook in private.module_hooks(module)):
            raise Untraceable(f"{name or type(block).__name__} has hooks, which graphs do not run")
    for name, parameter in block.named_parameters():
        if private.hooked(parameter):
            raise Untraceable(f"{name} has hooks, which graphs do not run")


def _reason(error: Exception) -> str:
    """An error's first line and, where torch gives one, its explanation."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{lines[0]}: {why}" if why else lines[0]
