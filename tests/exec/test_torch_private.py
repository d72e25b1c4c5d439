"""Each private name of torch does what the executor needs of it; and none is named elsewhere."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import profiler
import zbsolve.exec
from zbsolve import BadInput
from zbsolve.exec.base import torch_private as private

from ..support.exec_ranks import LIMIT, on_ranks


def profiler_enabled() -> None:
    assert not private.profiler_enabled()
    with torch.profiler.profile():
        assert private.profiler_enabled()


def functorch_active() -> None:
    seen: list[bool] = []
    torch.func.vmap(lambda x: (seen.append(private.functorch_active()), x)[1])(torch.ones(2))
    assert seen == [True]
    assert not private.functorch_active()


def run_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    y, z = (x * x).sum(), 3 * x
    private.run_backward([private.gradient_edge(y), private.gradient_edge(z)], [torch.tensor(5.0), torch.ones(3)])
    assert x.grad is not None
    assert x.grad.tolist() == [13.0] * 3
    with pytest.raises(RuntimeError, match="second time"):
        private.run_backward([private.gradient_edge(y)], [torch.tensor(1.0)])


def gradient_edge() -> None:
    leaf = torch.ones(2, requires_grad=True)
    for y in (leaf, leaf * 2, Doubled.apply(leaf)):
        found, right = private.gradient_edge(y), torch.autograd.graph.get_gradient_edge(y)
        assert (found.node, found.output_nr) == (right.node, right.output_nr)


def flash_forward() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    y, lse = private.flash_forward(q, k, v, True, 0.3)
    scores = (q @ k.transpose(-2, -1) * 0.3).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    assert torch.allclose(lse, scores.logsumexp(-1))
    assert torch.allclose(y, scores.softmax(-1) @ v)


def flash_backward() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64).unbind()
    leaves = [one.clone().requires_grad_() for one in (q, k, v)]
    y, lse = private.flash_forward(q, k, v, True, None)
    functional.scaled_dot_product_attention(*leaves, is_causal=True).backward(gradient := torch.randn_like(y))
    for found, leaf in zip(private.flash_backward(gradient, q, k, v, y, lse, True, None), leaves, strict=True):
        assert leaf.grad is not None
        assert torch.allclose(found, leaf.grad)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


def applied() -> None:
    x = torch.ones(2, requires_grad=True)
    private.applied(Doubled)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def hooked() -> None:
    plain, first, second = (nn.Parameter(torch.ones(1)) for _ in range(3))
    first.register_hook(lambda gradient: gradient)
    second.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [private.hooked(one) for one in (plain, first, second)] == [False, True, True]


def version_of() -> None:
    x = torch.ones(2)
    before = private.version_of(x)
    x.add_(1)
    assert private.version_of(x) == private.version_of(x[:1]) == before + 1


def storage_key() -> None:
    x = torch.ones(4)
    assert private.storage_key(x) == private.storage_key(x[1:]) == private.storage_key(x.view(2, 2))
    assert private.storage_key(x) != private.storage_key(x.clone())


def norms_of() -> None:
    found = private.norms_of([torch.tensor([3.0 + 4.0j]), torch.zeros(2)], 2, torch.float64)
    assert [(one.item(), one.dtype) for one in found] == [(5.0, torch.float64), (0.0, torch.float64)]


def scale_all() -> None:
    tensors = [torch.ones(2), torch.full((1,), 3.0)]
    private.scale_all(tensors, 0.5)
    assert [one.tolist() for one in tensors] == [[0.5, 0.5], [1.5]]


def is_mutable() -> None:
    assert private.is_mutable(torch.ops.aten.add_.Tensor)
    assert not private.is_mutable(torch.ops.aten.add.Tensor)


def children_of() -> None:
    layer = nn.Linear(1, 1)
    assert list(private.children_of(nn.Sequential(layer, layer)).items()) == [("0", layer), ("1", layer)]


def parameters_of() -> None:
    layer = nn.Linear(1, 1, bias=False)
    assert dict(private.parameters_of(layer)) == {"weight": layer.weight, "bias": None}
    assert dict(private.parameters_of(nn.Sequential(layer))) == {}


def buffers_of() -> None:
    layer = nn.BatchNorm1d(2)
    other = torch.full((2,), 7.0)
    private.buffers_of(layer)["running_mean"] = other
    assert layer.running_mean is other
    assert dict(private.buffers_of(nn.Sequential(layer))) == {}


def persistent_buffers() -> None:
    layer = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Identity())
    layer[1].register_buffer("table", torch.ones(3), persistent=False)
    found = private.persistent_buffers(layer)
    assert [id(one) for one in found] == [id(one) for one in layer.state_dict(keep_vars=True).values()]


def padding_around() -> None:
    layer = nn.Conv1d(1, 1, 3, padding=2, padding_mode="circular")
    x = torch.randn(1, 1, 5)
    padded = functional.pad(x, private.padding_around(layer), mode="circular")
    torch.testing.assert_close(functional.conv1d(padded, layer.weight, layer.bias), layer(x))


def output_padding() -> None:
    layer, x = nn.ConvTranspose1d(1, 1, 3, stride=2), torch.randn(1, 1, 4)
    for size in ([9], [10]):
        extra = private.output_padding(layer, x, size)
        found = functional.conv_transpose1d(x, layer.weight, layer.bias, 2, output_padding=extra)
        torch.testing.assert_close(found, layer(x, size))


def fake_log() -> None:
    assert private.fake_log().name == private.FakeTensorMode.__module__


def fake_refusals() -> None:
    with private.FakeTensorMode() as mode, pytest.raises(private.FAKE_REFUSALS):
        bool(mode.from_tensor(torch.ones(())) > 0)


def fake_tensor_mode() -> None:
    with private.FakeTensorMode() as mode:
        found = mode.from_tensor(torch.ones(2, 3)) @ torch.ones(3, 10**9)
    assert isinstance(found, private.FakeTensor)
    assert found.shape == (2, 10**9)


def batch_norm() -> None:
    kinds = (nn.BatchNorm1d(1), nn.BatchNorm2d(1), nn.SyncBatchNorm(1))
    assert all(isinstance(one, private.BatchNorm) for one in kinds)
    assert not isinstance(nn.LayerNorm(1), private.BatchNorm)


def dispatch_mode() -> None:
    class Names(private.PlainDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Names():
        torch.ones(2).add_(1)
    assert seen == ["ones", "add_"]


def tree_leaves() -> None:
    value = {"a": [1, (2, 3)], "b": None}
    assert private.tree_leaves(value) == [1, 2, 3, None]
    leaves, spec = private.tree_flatten(value)
    text = private.treespec_dumps(spec)
    assert isinstance(spec, private.TreeSpec)
    assert private.tree_unflatten(leaves, private.treespec_loads(text)) == value
    assert private.tree_map(lambda leaf: leaf and leaf + 1, value) == {"a": [2, (3, 4)], "b": None}
    with pytest.raises(NotImplementedError):
        private.treespec_dumps(private.tree_flatten(torch.return_types.max((1, 2)))[1])


# --- Joint graphs ---


def _joint(block: nn.Module, *x: Tensor, table: Any = None) -> Any:
    with ExitStack() as stack:
        return private.export_joint(stack, private.capture_block(stack, block, x), x, table)


def _descs(joint: Any) -> list[Any]:
    (output,) = joint.graph_module.graph.find_nodes(op="output")
    return list(output.meta["desc"])


def capture_block() -> None:
    """Tags of checkpointing stay: a joint graph that is cut keeps less between forward and backward."""
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    block.compile()
    x = torch.randn(2, 4, requires_grad=True)
    with ExitStack() as stack:
        captured = private.capture_block(stack, block, (x,))
        torch.testing.assert_close(captured(x), block(x))
        assert [name for name, _ in captured.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    with ExitStack() as stack, pytest.raises(private.NoOperations):
        private.capture_block(stack, nn.Identity(), ({"x": x},))


def branches_on() -> None:
    class Stepping(nn.Module):
        def __init__(self, branches: bool) -> None:
            super().__init__()
            self.branches, self.layer = branches, nn.Linear(2, 2)

        def forward(self, x: Tensor, step: Tensor) -> Tensor:
            return self.layer(x) * (2 if self.branches and int(step) % 2 else 1)

    given = torch.randn(2, 2, requires_grad=True), torch.tensor(3)
    found = [private.branches_on(_joint(Stepping(branches), *given).fake_mode) for branches in (False, True)]
    assert [len(names) for names in found] == [0, 1]


def export_joint() -> None:
    joint = _joint(nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True))
    takes = [node.meta["desc"] for node in joint.graph_module.graph.find_nodes(op="placeholder")]
    kinds = private.descriptors()
    expected = [kinds.ParamAOTInput("weight"), kinds.ParamAOTInput("bias"), kinds.PlainAOTInput(0)]
    assert takes == [*expected, kinds.TangentAOTInput(kinds.PlainAOTOutput(0))]
    assert _descs(joint) == [kinds.PlainAOTOutput(0), *(kinds.GradAOTOutput(one) for one in expected)]


def partition_joint() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    sizes = []
    for least in (False, True):
        joint = _joint(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.GELU()), x)
        forward, backward = private.partition_joint(joint.graph_module, joint.fake_mode, 1, [0, 1], least)
        ((kept, *_),) = [node.args for node in forward.graph.find_nodes(op="output")]
        sizes.append(len(kept))
        assert len(list(backward.graph.find_nodes(op="placeholder"))) == len(kept)  # what is kept, and a tangent
    assert sizes[1] < sizes[0]


def mask_positions() -> None:
    for operation, at in private.MASK_POSITIONS.items():
        assert operation._schema.arguments[at].name == "output_mask"


def simplify_joint() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 0).reshape(2, 4)

    joint = _joint(Twice(), torch.randn(2, 4, requires_grad=True), table=private.decompositions())
    before = len(list(joint.graph_module.graph.nodes))
    private.simplify_joint(joint.graph_module, joint.fake_mode)
    assert len(list(joint.graph_module.graph.nodes)) < before


def decompositions() -> None:
    """Dropout is not among them: its random numbers stay those of eager mode."""
    table = private.decompositions()
    assert torch.ops.aten.silu.default in table
    assert torch.ops.aten.rand_like.default not in table


def boxed() -> None:
    joint = _joint(nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True))
    block, x = nn.Linear(4, 3), torch.randn(2, 4)
    given = [block.weight.detach(), block.bias.detach(), x, torch.ones(2, 3)]
    y, dw, _, dx = private.boxed(joint.graph_module)(given)
    assert given == []
    torch.testing.assert_close(y, block(x).detach())
    torch.testing.assert_close(dw, torch.ones(3, 2) @ x)
    torch.testing.assert_close(dx, torch.ones(2, 3) @ block.weight.detach())


def module_hooks() -> None:
    layers = [nn.Linear(1, 1) for _ in range(5)]
    layers[1].register_forward_hook(lambda *args: None)
    layers[2].register_forward_pre_hook(lambda *args: None)
    layers[3].register_full_backward_hook(lambda *args: None)
    layers[4].register_full_backward_pre_hook(lambda *args: None)
    assert [len(private.module_hooks(layer)) for layer in layers] == [0, 1, 1, 1, 1]


def side_effects() -> None:
    class Sets(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.last, self.inner = name, 0, nn.Linear(2, 2)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.name == "buffer":
                self.count += 1
            else:
                (self.inner if self.name == "inner" else self).last = x
            return self.inner(x)

    found = {}
    for name in ("self", "inner", "buffer"):
        with ExitStack() as stack, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            private.capture_block(stack, Sets(name), (torch.ones(2, 2),))
        found[name] = [one for warning in said for one in private.side_effects(str(warning.message))]
    assert found == {"self": ["self"], "inner": ["self.inner"], "buffer": []}


def unwrapped() -> None:
    layer = nn.Linear(2, 2)
    assert private.unwrapped(torch.compile(layer, backend="eager")) is layer
    assert private.unwrapped(layer) is layer


def compiles() -> None:
    inside, wrapped = nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager")
    inside.compile(backend="eager")
    assert [private.compiles(nn.Sequential(one)) for one in (nn.Linear(2, 2), inside, wrapped)] == [False, True, True]


def without_modes() -> None:
    seen: list[str] = []

    class Seeing(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(1)
    with Seeing():  # type: ignore[no-untyped-call]
        with private.without_modes():
            x + x
            assert private.dispatch_modes() == 0
        assert private.dispatch_modes() == 1
        x * x
    assert seen == ["aten.mul.Tensor"]


def check_version() -> None:
    for version in ("2.10.1", "1.13.0", "2.6.0+cu124"):
        with pytest.raises(BadInput, match=rf"^torch {re.escape(version)}: zbsolve needs torch 2\.11 or newer$"):
            private.check_version(version, private.OLDEST, "zbsolve")
    for version in ("2.11.0", "2.13.0+cu130", "3.0.0a0+git1"):
        private.check_version(version, private.OLDEST, "zbsolve")


def saving_hooked() -> None:
    assert not private.saving_hooked()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert private.saving_hooked()


LOCAL = {
    name: value
    for name, value in list(globals().items())
    if inspect.isfunction(value) and value.__module__ == __name__ and not name.startswith(("test_", "_"))
}
# Names that a function above covers under another one, and those that need a process group (see `groups`).
ELSEWHERE = {
    "NoOperations": "capture_block",
    "OLDEST": "check_version",
    "FAKE_REFUSALS": "fake_refusals",
    "BatchNorm": "batch_norm",
    "FakeTensor": "fake_tensor_mode",
    "FakeTensorMode": "fake_tensor_mode",
    "PlainDispatchMode": "dispatch_mode",
    "TorchDispatchMode": "without_modes",
    "MASK_POSITIONS": "mask_positions",
    "descriptors": "export_joint",
    "dispatch_modes": "without_modes",
    **dict.fromkeys(
        ("TreeSpec", "tree_flatten", "tree_map", "tree_unflatten", "treespec_dumps", "treespec_loads"), "tree_leaves"
    ),
}
# tests/exec/test_graph_split.py compiles with it: a C++ compiler takes ten seconds.
COMPILED = {"compiled"}
ON_RANKS = {
    "default_group",
    "default_store",
    "backend_name",
    "backend_of",
    "backend_timeout",
    "pipeline_runtime",
    "load_order",
    "own_backend",
}
ON_GPUS = {"end_pool"}  # a line of `Pipeline.captured` where a capture broke off
ON_RANKS |= {"awaited", "wrapped_values", "LOCAL_PART"}
# tests/exec/test_sharded_parameters.py has several ranks.
ON_RANKS |= {"fsdp_casts", "fsdp_gathers", "fsdp_groups", "fsdp_hooks", "fsdp_mark", "fsdp_parameters", "fsdp_together"}


@pytest.mark.parametrize("check", LOCAL.values(), ids=LOCAL)
def test_a_private_name_does_what_is_needed(check: Callable[[], None]) -> None:
    check()


def groups(rank: int, _: None) -> dict[str, Any]:
    """What needs a process group, on one rank of it."""
    group, store = private.default_group(), private.default_store()
    store.set("key", "value")
    backend = private.backend_of(group, torch.device("cpu"))
    with pytest.raises(RuntimeError):
        private.backend_of(group, torch.device("meta"))
    assert private.backend_name(group, torch.device("meta")) == ""
    return {
        "group": dist.get_process_group_ranks(group),
        "store": store.get("key").decode(),
        "backend": private.backend_name(group, torch.device("cpu")),
        "timeout": private.backend_timeout(backend) / timedelta(seconds=1),
        "own": private.own_backend("gloo", "a name", (0, 1), timedelta(seconds=5)).name(),
        "runtime": _runtime(),
        "distributed": _distributed(),
    }


def _distributed() -> dict[str, Any]:
    """What is known of DTensors, of one rank each."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh, layer = init_device_mesh("cpu", (1,)), nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh, [Shard(0)]))
    coming = all_reduce(torch.ones(2), "sum", mesh)
    joint = _joint(layer, DTensor.from_local(torch.ones(3, 2), mesh, [Replicate()]).requires_grad_())
    outputs, gradients, ((tangent, desc),) = private.wrapped_values(joint)
    takes = [node.meta["desc"] for node in joint.graph_module.graph.find_nodes(op="placeholder")]
    made = sum(len(node.args[0]) for node in joint.graph_module.graph.find_nodes(op="output"))
    return {
        "coming": [type(coming) is AsyncCollectiveTensor, type(private.awaited(coming)) is Tensor],
        "parts": [one.attr for one in takes].count(private.LOCAL_PART),
        "values": [str(one.placements) for _, one in (*outputs, *gradients)],
        "in all": sum(count for count, _ in (*outputs, *gradients)) == made,
        "tangent": [str(tangent.placements), desc.output.idx],
        "plain": private.wrapped_values(_joint(nn.Linear(2, 2), torch.ones(1, 2))) == ([], [], []),
    }


def _runtime() -> list[list[str]]:
    """What torch's runtime reads from a compute-only CSV: the actions of its ranks."""
    import tempfile

    from torch.distributed.pipelining import PipelineStage

    stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    runtime = private.pipeline_runtime([stage], 2, loss_fn=functional.mse_loss)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("0F0,0F1,0B0,0B1\n")
        file.flush()
        private.load_order(runtime, file.name)
    x, losses = torch.ones(4, 2), list[Tensor]()
    runtime.step(x, target=x, losses=losses)
    return [[str(action) for action in row] for row in runtime.pipeline_order.values()] + [[str(len(losses))]]


def test_what_needs_a_process_group() -> None:
    (found,) = on_ranks(1, "tests.exec.test_torch_private:groups")
    assert (found["group"], found["store"], found["backend"], found["timeout"]) == ([0], "value", "gloo", LIMIT)
    assert found["own"] == "gloo"
    assert found["runtime"] == [["0F0", "0F1", "0B0", "0B1"], ["2"]]
    assert found["distributed"] == {
        "coming": [True, True],
        "parts": 3,  # of the weight, the input and the tangent
        "values": ["(Shard(dim=1),)", "(Shard(dim=0),)", "(Partial(sum),)"],
        "in all": True,
        "tangent": ["(Shard(dim=1),)", 0],
        "plain": True,
    }


def test_every_name_has_a_test() -> None:
    names = {*private.__all__}
    for node in ast.parse(inspect.getsource(private)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        names |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
    assert len(names) > 60
    assert {name for name in names if not name.startswith("_")} <= {*LOCAL, *ON_RANKS, *ELSEWHERE, *COMPILED, *ON_GPUS}
    assert {*ELSEWHERE.values()} <= LOCAL.keys()


def test_no_private_name_of_torch_elsewhere() -> None:
    """An attribute with an underscore is the object's own, or of another object of the same module's."""
    found = []
    for root in (zbsolve.exec, profiler):
        for path in Path(root.__file__).parent.rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            own = {node.attr for node in ast.walk(tree) if _is_own(node)} | _declared(tree) | {"_exit"}
            for node in ast.walk(tree):
                where = f"{path.name}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.Attribute) and _private(node.attr) and node.attr not in own:
                    found.append(f"{where} {node.attr}")
                if isinstance(node, ast.ImportFrom) and "torch" in (node.module or "") and path.name != "torch_private.py":
                    names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                    found += [f"{where} {name}" for name in names if _private(name)]
    assert [one for one in found if not one.startswith("torch_private.py")] == []
    assert found  # the test sees what is there


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _declared(tree: ast.AST) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
