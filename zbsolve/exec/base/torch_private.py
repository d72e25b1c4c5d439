"""All private names of torch that the executor and the profiler use, each behind a function of ours that says its purpose.

Any release of torch may change them; `tests/exec/test_torch_private.py` tests each. Nothing else in these
packages uses a private name of torch. What takes seconds to import is imported at its first use.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten, treespec_dumps, treespec_loads

from ...util.errors import BadInput

# Torch's own, passed on unchanged; everything else is defined here.
__all__ = ["BatchNorm", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "TreeSpec"]
__all__ += ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten", "treespec_dumps", "treespec_loads"]

OLDEST = (2, 11)  # torch with which all was seen to run


def check_version(version: str, oldest: tuple[int, int], what: str) -> None:
    """Raise BadInput where a torch of this version is older than what `what` needs."""
    if tuple(map(int, version.split(".")[:2])) < oldest:
        raise BadInput(f"torch {version}: {what} needs torch {oldest[0]}.{oldest[1]} or newer")


check_version(torch.__version__, OLDEST, "zbsolve")

# --- Autograd ---

# Is torch's profiler recording? Asking takes 0.05 µs; a label while it is off would take ten times as long.
profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
# Are function transforms such as grad or vmap active? We do not split their tensors.
functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_ENGINE: Any = torch.autograd.Variable._execution_engine


def run_backward(roots: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Accumulate gradients from `roots` on, freeing the graph. The Python code of torch.autograd.backward takes longer than
    many small layers, and a second to import."""
    _ENGINE.run_backward(tuple(roots), tuple(gradients), False, False, (), True, True)


def gradient_edge(y: Tensor) -> GradientEdge:
    """The edge into the graph that made `y`, as `get_gradient_edge` gives it, in a third of its time. Leaves and nodes of
    Python functions need torch's own, as a plain edge would not keep the graph of the latter alive."""
    node = y.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(y)
    return GradientEdge(node, y.output_nr)


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its Python code, which looks for functorch transforms: 3 of 20 µs a call. Call it only where
    `functorch_active` returns False."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def hooked(parameter: Tensor) -> bool:
    """Does the tensor have hooks? Autograd calls them when it has its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


# --- Tensors ---


def version_of(tensor: Tensor) -> int:
    """The number of in-place changes of the tensor so far."""
    return tensor._version


def storage_key(tensor: Tensor) -> int:
    """The same number for tensors that share memory, as long as one of them lives."""
    return tensor.untyped_storage()._cdata


def awaited(tensor: Tensor) -> Tensor:
    """The tensor itself, once a pending collective that makes it is done."""
    module = sys.modules.get("torch.distributed._functional_collectives")  # imported already wherever such a tensor exists
    if type(tensor) is Tensor or module is None or not isinstance(tensor, module.AsyncCollectiveTensor):
        return tensor
    return tensor.wait()


def norms_of(tensors: list[Tensor], order: float, kind: torch.dtype) -> tuple[Tensor, ...]:
    """The norm of this order of each tensor, if any, summed in dtype `kind`. Complex numbers count by magnitude."""
    real = [tensor.abs() if tensor.is_complex() else tensor for tensor in tensors]
    return torch._foreach_norm(real, order, dtype=kind) if tensors else ()


def scale_all(tensors: list[Tensor], factor: float) -> None:
    """Multiply all of them in place, if any."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def without_modes() -> Any:
    """A context in which dispatch modes, such as one that counts bytes, see no operations."""
    return _disable_current_modes()


class PlainDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that is never compiled, and so does not import torch._dynamo, which takes seconds."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def dispatch_modes() -> int:
    """The number of dispatch modes that are active."""
    return torch._C._len_torch_dispatch_stack()


def saving_hooked() -> bool:
    """Is there a hook on the tensors that autograd saves now?"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_mutable(operation: Any) -> bool:
    """Does a dispatched operation write to its arguments?"""
    return bool(operation._schema.is_mutable)


# --- Memory of CUDA graphs ---


def end_pool(device: torch.device, pool: Any) -> None:
    """After a capture that failed, stop the allocator from using the capture's memory pool, if it still does. Until then it
    gives no memory back to the device."""
    from torch._C import _cuda_endAllocateToPool, _cuda_releasePool

    with suppress(RuntimeError):  # the allocator has stopped using it
        _cuda_endAllocateToPool(device.index, pool)
        _cuda_releasePool(device.index, pool)


# --- Attention ---


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """The CPU's fused attention: output and log-sum-exp of the scores, shape (batch, heads, queries)."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def flash_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients with respect to q, k and v, from (gradient, q, k, v, output, log-sum-exp, causal, scale)."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*args[:-2], 0.0, args[-2], scale=args[-1])


# --- Modules ---


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Name → child; a child that occurs twice is there twice, unlike in `named_children`."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Name → the module's own parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Name → the module's own buffers. The mapping can be changed, to replace a buffer."""
    return module._buffers


def persistent_buffers(module: nn.Module) -> list[Tensor]:
    """The buffers in the state dict of the module and of all modules in it."""
    own = ((inner, name, buffer) for inner in module.modules() for name, buffer in buffers_of(inner).items())
    return [buffer for inner, name, buffer in own if buffer is not None and name not in inner._non_persistent_buffers_set]


def padding_around(layer: Any) -> list[int]:
    """For a convolution whose padding mode is not zeros: the padding of its input, as `functional.pad` takes it."""
    return layer._reversed_padding_repeated_twice


def output_padding(layer: Any, x: Tensor, output_size: list[int] | None) -> list[int]:
    """How much a transposed convolution adds to one side of its output."""
    stride, padding, kernel, dilation = (list(v) for v in (layer.stride, layer.padding, layer.kernel_size, layer.dilation))
    return layer._output_padding(x, output_size, stride, padding, kernel, len(kernel), dilation)


# --- Fake tensors ---

# What torch raises where a layer reads the values of fake tensors, which have none.
FAKE_REFUSALS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def fake_log() -> logging.Logger:
    """The logger to which torch writes the traceback of a failure under fake tensors."""
    return logging.getLogger("torch._subclasses.fake_tensor")


# --- Process groups ---


def default_group() -> Any:
    """The process group that `init_process_group` made."""
    return dist.distributed_c10d._get_default_group()


def default_store() -> Any:
    """The store through which the ranks of the default group met."""
    return dist.distributed_c10d._get_default_store()


def backend_of(group: Any, device: torch.device) -> Any:
    """The backend that carries a group's tensors on `device`; the dispatcher in front of it costs some µs a message. Raises
    RuntimeError where there is none."""
    return group._get_backend(device)


def backend_name(group: Any, device: torch.device) -> str:
    """Its name, such as "gloo"; "" where there is none."""
    try:
        return str(backend_of(group, device).name())
    except RuntimeError:
        return ""


def own_backend(kind: str, name: str, place: tuple[int, int], timeout: timedelta) -> Any:
    """A backend, "gloo" or "nccl", outside of torch's process groups. The names of groups that `new_group` makes for some
    ranks alone contain how many groups a process has; where ranks have made different numbers of groups, they do not find
    each other. name: the same on its ranks, and used once; place: (this rank's number, their count)."""
    store = dist.distributed_c10d.PrefixStore(name, default_store())
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, *place, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, *place, options)


def backend_timeout(backend: Any) -> timedelta:
    """How long a gloo backend waits by default."""
    return backend.options._timeout


# --- FSDP2 ---


def fsdp_parameters(module: Any) -> list[Any]:
    """FSDP's records of the parameters that it wrapped with `module` itself. We use their fields `sharded_param`,
    `unsharded_param` (from the first gather on), `unsharded_accumulated_grad` (a gradient in `reduce_dtype`, None where that
    is the parameter's dtype), `accumulate_unsharded_grad_if_needed` and `to_accumulated_grad_if_needed` (which put gradients
    there), `fsdp_placement` and `mesh_info.mesh`."""
    return [known for group in fsdp_groups(module) for known in group.fsdp_params]


def fsdp_gathers(module: Any) -> list[Any]:
    """Work handles of the gathers that `module.unshard(async_op=True)` has started and that are not waited for. (The handle
    that it returns has only the process group's own timeout.)"""
    begun = [group._all_gather_result for group in fsdp_groups(module)]
    return [gather.all_gather_work for gather in begun if gather is not None and gather.all_gather_work is not None]


def fsdp_groups(module: Any) -> list[Any]:
    """The parameter groups of one wrapped module. Releases of torch before 2.12 have one such group, or None."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def fsdp_casts(module: Any) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtypes to which FSDP's hooks cast a module's inputs and its outputs; None: they do not cast them."""
    policy = module._get_fsdp_state()._mp_policy
    return policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype


def fsdp_together(module: Any) -> int:
    """How many modules one call of `fully_shard` wrapped as one, this one among them."""
    return len(module._get_fsdp_state()._modules)


def fsdp_hooks(module: Any) -> set[int]:
    """The ids of FSDP's forward hooks on a module."""
    state = module._get_fsdp_state()
    return {state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id}


def fsdp_mark(name: str) -> bool:
    """Is this an attribute that FSDP sets on a module?"""
    return name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params") or name.startswith("__composable_api_state_key")


# --- torch's own pipeline runtime ---


def pipeline_runtime(stages: Iterable[Any], microbatches: int, **options: Any) -> Any:
    """A runtime whose order is read from a CSV file (see `load_order`). The first step of torch 2.11 begins with messages
    between consecutive stages. Those of a rank to itself are left out, since gloo does not carry them."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    for stage in (kept := list(stages)):
        rank, ops = stage.group_rank, stage._get_init_p2p_neighbors_ops
        stage._get_init_p2p_neighbors_ops = lambda rank=rank, ops=ops: [op for op in ops() if op.group_peer != rank]
    return _PipelineScheduleRuntime(kept, microbatches, **options)  # type: ignore[no-untyped-call]


def load_order(runtime: Any, path: str) -> None:
    """Give a runtime the order in a compute-only CSV."""
    runtime._load_csv(path, format="compute_only")


# --- Joint graphs of forward and backward ---

# Kernels that give gradients of inputs and parameters at once: the position of the argument that says which are wanted.
MASK_POSITIONS = {
    torch.ops.aten.convolution_backward.default: 10,
    torch.ops.aten.native_layer_norm_backward.default: 7,
    torch.ops.aten.native_group_norm_backward.default: 9,
    torch.ops.aten._fused_rms_norm_backward.default: 5,
}


# The name in a graph of the local part of a DTensor.
LOCAL_PART = "_local_tensor"


class NoOperations(Exception):
    """A forward that runs no operation of torch: there is nothing to capture."""


def capture_block(stack: ExitStack, block: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Capture `block` with Dynamo. Tags of activation checkpointing and names of parameters stay, and compiled blocks are
    traced through. Close `stack` only after the graph was traced. Sizes are those of `inputs`, even if Dynamo has seen
    blocks of the same class with others. Raises NoOperations."""
    from torch._dynamo import config
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export
    from torch._guards import tracing

    with config.patch(automatic_dynamic_shapes=False):
        try:
            captured: Any = dynamo_graph_capture_for_export(block)(*inputs)
        except AssertionError as error:
            if "backend_input" not in f"{error} {traceback.extract_tb(error.__traceback__)[-1].line}":  # 2.11 says no more
                raise
            raise NoOperations from error
    if "tracing_context" in captured.meta:
        stack.enter_context(tracing(captured.meta["tracing_context"]))
    return captured


def branches_on(mode: Any) -> list[str]:
    """The inputs whose value decided a branch of a trace under `mode`, as in `if int(step)`: for another value the graph is
    wrong. (Branches on numbers that layers compute are refused by torch's tracers.)"""
    env = mode.shape_env
    gone_by = {symbol for guard in env.guards for symbol in guard.expr.free_symbols} | env.replacements.keys()
    names = [source.name for symbol, sources in env.var_to_sources.items() if symbol in gone_by for source in sources]
    return [name for name in names if name.endswith(".item()")]


def side_effects(warning: str) -> list[str]:
    """From a warning of `capture_block`: what a forward changes beside tensors; empty where it warns of something else.
    Buffers are left out, since a graph returns them."""
    _, marker, sources = warning.partition("certain side effects happened")
    names = [name for name in re.findall(r'"([^"]+)"', sources) if not name.endswith("._buffers")] if marker else []
    return [re.sub(r"\._modules\['([^']+)'\]", r".\1", name).replace("L['self']", "self") for name in names]


def unwrapped(module: nn.Module) -> nn.Module:
    """What `torch.compile(module)` wrapped, or the module itself. Its class is known by name: importing it takes seconds."""
    return module._modules["_orig_mod"] if type(module).__name__ == "OptimizedModule" else module  # type: ignore[return-value]


def compiles(module: nn.Module) -> bool:
    """Is it, or a part of it, compiled by `torch.compile` or its own `compile`?"""
    return any(unwrapped(inner) is not inner or inner._compiled_call_impl is not None for inner in module.modules())


def export_joint(stack: ExitStack, block: Any, inputs: tuple[Any, ...], decompositions: dict[Any, Any] | None) -> Any:
    """The joint graph of forward and backward; each of its inputs and outputs has a descriptor in its meta data. torch
    leaves traced tensors in a module that is registered under two names, so all tensors are put back."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    before = [(part, dict(part._parameters), dict(part._buffers)) for part in block.modules()]
    try:
        return aot_export_joint_with_descriptors(stack, block, inputs, decompositions=decompositions)
    finally:
        for part, parameters, buffers in before:
            part._parameters.update(parameters)
            part._buffers.update(buffers)


def wrapped_values(joint: Any) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]], list[tuple[Any, Any]]]:
    """Of the tensor subclasses that a joint graph splits into values: for each output of the forward, and for each gradient,
    the number of values and an example from the trace (None: a plain tensor, one value); and the
    tangents of the trace with their descriptors."""
    from torch._functorch._aot_autograd.schemas import SubclassCreationMeta

    def known(metas: Iterable[Any]) -> list[tuple[int, Any]]:
        return [(m.arg_count, m.original_subclass) if isinstance(m, SubclassCreationMeta) else (1, None) for m in metas]

    capture, forward = joint._aot_graph_capture.maybe_subclass_meta, joint._aot_state.fw_metadata
    if capture is None:
        return [], [], []
    tangents = zip(forward.traced_tangents, forward.traced_tangents_descs, strict=True)
    return known(forward.subclass_fw_graph_out_meta), known(capture.grad_input_metas or ()), list(tangents)


def descriptors() -> Any:
    """torch's module with the classes of descriptors."""
    from torch._functorch._aot_autograd import descriptors as found

    return found


def decompositions() -> dict[Any, Any]:
    """The decompositions that inductor wants. Random numbers stay those of eager mode."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=True):
        table = select_decomp_table()
    return {of: how for of, how in table.items() if torch.Tag.nondeterministic_seeded not in getattr(of, "tags", ())}


def partition_joint(joint: Any, mode: Any, forwards: int, fixed: list[int], least: bool) -> tuple[Any, Any]:
    """Split a joint graph into forward and backward. forwards: the number of its outputs that belong to the forward. fixed:
    numbers of the inputs that stay in memory anyway. least: save as little between the two as recomputing cheap operations
    allows."""
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
    from torch._guards import TracingContext, tracing

    cut = min_cut_rematerialization_partition if least else default_partition
    with tracing(TracingContext(mode)):
        return cut(joint, None, num_fwd_outputs=forwards, static_lifetime_input_indices=fixed)


def boxed(graph: Any) -> Callable[[list[Any]], Any]:
    """A graph as a function of one list, which it empties, so that each value is freed after its last use. Some kernels (the
    backward of batch norm) give other strides than the trace has; there a view must be a copy, so views become reshapes."""
    from torch.fx.graph import _BoxedCodeGen

    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()
    return graph.forward


def compiled(graph: Any, mode: Any, backward: bool) -> Callable[[list[Any]], Any]:
    """A graph that inductor compiled, as a function of one list, which it empties. Random numbers are eager mode's.

    Compiled code allocates tensors without the dispatcher, so a dispatch mode that counts bytes is shown the results.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    given = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    # With a layout of inductor's own, one graph's output would not have the layout that the next was compiled for.
    options = {"fallback_random": True, "layout_optimization": False}
    with tracing(TracingContext(mode)), config.patch(options):
        function: Callable[[list[Any]], Any] = compile_fx_inner(graph, given, is_backward=backward)

    def run(taken: list[Any]) -> Any:
        results = function(taken)
        if dispatch_modes():
            for result in results:
                if isinstance(result, Tensor):
                    result.detach()
        return results

    return run


def simplify_joint(graph: Any, mode: Any) -> None:
    """Inductor's passes over a joint graph before it is split, in place."""
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(mode), config.patch(fallback_random=True):
        joint_graph_passes(graph)


def module_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that run when the module is called."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for name in names for hook in getattr(module, name).values()]
