"""Cuts a joint graph in three: the forward, the input gradient (B) and the weight gradient (W). B is what the gradients of
the inputs need, and W is the rest. Gradients of vectors (norms, biases) are computed in B: else their inputs would be kept
for W, a fifth more bytes between B and W on Llama-like blocks."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..base.torch_private import MASK_POSITIONS, partition_joint
from .joint import NOTHING, Joint, Role

MATRIX_PRODUCT = torch.ops.aten.mm.default
ADD, PICK = torch.ops.aten.add.Tensor, torch.ops.aten.select_backward.default


@dataclass(frozen=True, eq=False)
class Piece:
    """One of the three graphs. takes: the role of each input; gives: of each output. `saved` n is what the forward keeps for
    the other two, `live` n what B computes for W."""

    graph: fx.GraphModule
    takes: tuple[Role, ...]
    gives: tuple[Role, ...]


@dataclass(frozen=True, eq=False)
class Cut:
    """The three graphs of a joint graph. tangents: number of an output's leaf → its gradient, as a fake tensor. needs: role
    of each gradient → the leaves from whose gradients it is computed."""

    forward: Piece
    backward: Piece
    weights: Piece
    tangents: dict[int, Any]
    needs: dict[Role, frozenset[int]]


def cut(joint: Joint, *, least: bool = False) -> Cut:
    """Cut a joint graph, which is changed. least: keep as little from F as recomputing cheap operations allows."""
    examples = {
        int(role.key): node.meta["val"]
        for node in _inputs(joint.graph)
        if (role := joint.takes[node.name]).kind == "tangent" and role.has_numbers
    }
    needs = _needs(joint)
    stack_selections(joint.graph.graph)
    _separate(joint.graph)
    states = [i for i, role in enumerate(joint.takes.values()) if role.kind in ("parameter", "buffer")]
    forward, backward = partition_joint(joint.graph, joint.mode, joint.forwards, states, least)
    for node in _inputs(forward):  # the graph takes only tensors; plain values are part of it
        if not node.users and "val" not in node.meta:
            forward.graph.erase_node(node)
    forward.recompile()
    changed = {role.key for role in joint.gives if role.kind == "mutation"}
    there = {  # what need not be saved for B and W; a buffer that F changes must be
        name: role
        for name, role in joint.takes.items()
        if role.kind in ("parameter", "tangent") or (role.kind == "buffer" and role.key not in changed)
    }
    kept = [node.name for node in _results(forward)[joint.forwards :]]
    names = [node.name for node in _inputs(backward) if there.get(node.name, NOTHING).kind != "tangent"]
    # The backward has the same names, except for states of random generators. The cut renames these, but keeps their order.
    renamed = iter([name for name in names if name not in kept])
    saved = [name if name in names else next(renamed, name) for name in kept]
    roles = {name: Role("saved", i) for i, name in enumerate(saved)} | there
    first = Piece(
        forward,
        tuple(joint.takes[node.name] for node in _inputs(forward)),
        (*joint.gives[: joint.forwards], *(NOTHING if name in there else roles[name] for name in saved)),
    )
    second, third = _split(backward, joint.gives[joint.forwards :], roles)
    return Cut(first, second, third, examples, needs)


def _needs(joint: Joint) -> dict[Role, frozenset[int]]:
    """Role of each gradient → the leaves of outputs from whose gradients it is computed."""
    of = dict[fx.Node, frozenset[int]]()
    for node in joint.graph.graph.nodes:
        role = joint.takes.get(node.name, NOTHING)
        own = frozenset({int(role.key)} if role.kind == "tangent" else ())
        of[node] = own.union(*(of[before] for before in node.all_input_nodes))
    every = frozenset().union(*of.values())
    pairs = zip(_results(joint.graph), joint.gives, strict=True)
    # A gradient that depends on no tangent (that of a rounded value) is zero, for any of them.
    return {role.whole: of[v] or every for v, role in pairs if isinstance(v, fx.Node) and role.kind.endswith("gradient")}


def _inputs(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="placeholder"))


def _results(graph: fx.GraphModule) -> list[Any]:
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])


def _separate(graph: fx.GraphModule) -> None:
    """Split kernels that compute the gradients of an input and a matrix into two, so that W's part does not run in B. (Not
    those of norms, as gradients of vectors are computed in B.)"""
    for node in list(graph.graph.nodes):
        at = MASK_POSITIONS.get(node.target) if node.op == "call_function" else None
        if at is None:
            continue
        mask = list(node.args[at])
        if not (mask[0] and _makes_matrix(node)):
            continue
        with graph.graph.inserting_before(node):
            parts = list[fx.Node]()
            for part in ([True, *[False] * (len(mask) - 1)], [False, *mask[1:]]):
                args = (*node.args[:at], part, *node.args[at + 1 :])
                parts.append(graph.graph.call_function(node.target, args, dict(node.kwargs)))
                parts[-1].meta = dict(node.meta)
        for user in list(node.users):
            user.replace_input_with(node, parts[user.args[1] > 0])
        graph.graph.erase_node(node)
    graph.recompile()


def _split(backward: fx.GraphModule, gives: Sequence[Role], roles: dict[str, Role]) -> tuple[Piece, Piece]:
    """B and W of a backward graph. gives: the role of each of its outputs."""
    wanted = [(v, role) for v, role in zip(_results(backward), gives, strict=True) if isinstance(v, fx.Node)]
    wanted = [(v, role) for v, role in wanted if role.kind != "nothing" and role.has_numbers]
    inputs = [(v, role) for v, role in wanted if role.kind == "input gradient"]
    weights = [(v, role) for v, role in wanted if role.kind == "parameter gradient"]
    early = [(v, role) for v, role in weights if v.meta["val"].dim() < 2 and not _beside_matrix(v)]
    late = [(v, role) for v, role in weights if (v, role) not in early]
    needed = Counter(node for v in dict.fromkeys(v for v, _ in weights) for node in _ancestors([v]))
    # If no input of a block needs a gradient, B is what two or more gradients need.
    in_backward = _ancestors([v for v, _ in inputs]) or {node for node, count in needed.items() if count > 1}
    in_backward |= _ancestors([v for v, _ in early])
    in_weights = _ancestors([v for v, _ in late]) - in_backward
    live = _crossing(backward, in_backward, in_weights, [v for v, _ in late])
    given = [node for node in live if node.op == "placeholder"]
    made = [node for node in live if node.op != "placeholder"]
    names = roles | {node.name: Role("live", i) for i, node in enumerate(made)}
    taken = [node for node in _inputs(backward) if node in in_backward]
    last = [pair for value, role in late for pair in _factors(value, role, in_weights)]
    return (
        _piece(backward, taken, in_backward, [*inputs, *early, *((node, names[node.name]) for node in made)], names),
        _piece(backward, [*given, *made], in_weights, last, names),
    )


def _beside_matrix(node: fx.Node) -> bool:
    """Does the kernel that computes it also compute the gradient of a matrix (as for a convolution's bias)?"""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target in MASK_POSITIONS and _makes_matrix(source)


def _makes_matrix(kernel: fx.Node) -> bool:
    """Does this kernel of several gradients compute one of a matrix, besides that of its input?"""
    return any(user.args[1] > 0 and user.meta["val"].dim() > 1 for user in kernel.users)  # type: ignore[operator]


def _transposes(node: fx.Node) -> bool:
    """Does the node transpose a matrix?"""
    if node.target is torch.ops.aten.permute.default:
        return list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return node.target is torch.ops.aten.t.default and node.meta["val"].dim() == 2


def _factors(value: fx.Node, role: Role, inside: Collection[fx.Node]) -> list[tuple[fx.Node, Role]]:
    """The two factors of a gradient that is a product: one kernel then multiplies and adds to an existing gradient. Else the
    gradient itself. inside: the nodes of W."""
    node, turned = value, False
    while _transposes(node) and len(node.users) == 1 and node in inside:
        node, turned = node.all_input_nodes[0], not turned
    if turned or node.target is not MATRIX_PRODUCT or len(node.users) != 1 or node not in inside or role.part is not None:
        return [(value, role)]
    left, right = node.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    return [(left, Role("left factor", role.key)), (right, Role("right factor", role.key))]


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and everything that they depend on."""
    seen, todo = set[fx.Node](), list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen


def _crossing(
    graph: fx.GraphModule, in_backward: set[fx.Node], in_weights: set[fx.Node], late: Sequence[fx.Node]
) -> list[fx.Node]:
    """Values from outside of W that W reads. Tuples cannot cross, so their elements move to B."""
    crossing = dict[fx.Node, None]()
    for node in graph.graph.nodes:
        if node in in_weights and node.op != "placeholder":
            continue
        readers = [user for user in node.users if user in in_weights]
        if isinstance(node.meta.get("val"), tuple | list):
            for part in readers:
                assert part.target is operator.getitem
                crossing[part] = None
                in_backward.add(part)
                in_weights.discard(part)
        elif readers or node in late:
            crossing[node] = None
    return list(crossing)


def _piece(
    source: fx.GraphModule,
    inputs: Sequence[fx.Node],
    nodes: Collection[fx.Node],
    gives: Sequence[tuple[fx.Node, Role]],
    names: dict[str, Role],
) -> Piece:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = node.meta
    for node in source.graph.nodes:
        if node in nodes and node not in copies and node.op != "placeholder":
            copies[node] = graph.node_copy(node, lambda arg: copies[arg])
    graph.output(tuple(copies[node] for node, _ in gives))
    graph.eliminate_dead_code()
    graph.lint()
    made = fx.GraphModule(source, graph)
    return Piece(made, tuple(names[node.name] for node in inputs), tuple(role for _, role in gives))


def stack_selections(graph: fx.Graph) -> None:
    """Replace a sum of gradients of all selections of an unpacked tensor (`q, k, v = x`) by one stack. Dynamo unpacks
    by selections, whose gradients are as many tensors that are zero elsewhere, and their sums."""
    for node in list(graph.nodes):
        parts: Any = _selections(node) if node.target is ADD else None
        if parts is None:
            continue
        shape, dim = parts[0].args[1:3]
        pieces = {part.args[3] % shape[dim]: part.args[0] for part in parts}
        alike = all(list(part.args[1]) == list(shape) and part.args[2] == dim for part in parts)
        if not alike or not len(pieces) == len(parts) == shape[dim]:
            continue
        with graph.inserting_before(node):
            made = graph.call_function(torch.ops.aten.stack.default, ([pieces[i] for i in sorted(pieces)], dim))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def _selections(node: Any) -> list[fx.Node] | None:
    """The gradients of selections whose sum a node is; None if it has other terms, or other nodes use one of them."""
    if node.target is PICK:
        return [node]
    if node.target is not ADD or len(node.args) != 2 or node.kwargs:
        return None
    selected = []
    for part in node.args:
        parts = _selections(part) if isinstance(part, fx.Node) and len(part.users) == 1 else None
        if parts is None:
            return None
        selected += parts
    return selected
