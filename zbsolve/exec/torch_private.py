"""Private names of torch, all that the executor and the profiler use, each behind a name of ours that says what it is for.

They may change with any release of torch; `tests/exec/test_torch_private.py` has a test for each. Nothing else in these
packages names a private part of torch. What needs an import of seconds is imported when it is first asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "FAKE_REFUSALS",
    "BatchNorm",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "applied",
    "backend_of",
    "backend_timeout",
    "buffers_of",
    "children_of",
    "default_group",
    "default_store",
    "fake_log",
    "functorch_active",
    "gradient_edge",
    "hooked",
    "is_mutable",
    "load_order",
    "norms_of",
    "output_padding",
    "padding_around",
    "parameters_of",
    "pipeline_runtime",
    "profiler_enabled",
    "run_backward",
    "scale_all",
    "storage_key",
    "tree_leaves",
    "version_of",
]

# --- Autograd ---

# Is torch's profiler recording? 0.05 µs a question; a label where nobody looks would cost ten.
profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
# Are grad, vmap or other function transforms active? Their tensors are not ours to split.
functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_ENGINE: Any = torch.autograd.Variable._execution_engine


def run_backward(root: GradientEdge, gradient: Tensor) -> None:
    """Accumulate gradients from `root` on, freeing the graph. torch.autograd.backward's own Python would take longer than
    many a small layer, and a second to import."""
    _ENGINE.run_backward((root,), (gradient,), False, False, (), True, True)


def gradient_edge(y: Tensor) -> GradientEdge:
    """The edge into the graph that made `y`: what torch's `get_gradient_edge` gives, in a third of its time for all but a
    leaf and a node of Python's, which would not hold the graph."""
    node = y.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(y)
    return GradientEdge(node, y.output_nr)


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its own Python, which looks for functorch transforms: 3 of 20 µs a call. For functions that
    are called only where `functorch_active` says no."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


def hooked(parameter: Tensor) -> bool:
    """Does it have hooks? They run where autograd brings its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


# --- Tensors ---


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place."""
    return tensor._version


def storage_key(tensor: Tensor) -> int:
    """The same number for tensors that share memory, as long as one of them lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def norms_of(tensors: list[Tensor], order: float, kind: torch.dtype) -> tuple[Tensor, ...]:
    """The norm of this order of each, added up in `kind`."""
    return torch._foreach_norm(tensors, order, dtype=kind)


def scale_all(tensors: list[Tensor], factor: float) -> None:
    """Multiply all of them in place."""
    torch._foreach_mul_(tensors, factor)


def is_mutable(operation: Any) -> bool:
    """Does a dispatched operation write to what it is given?"""
    return bool(operation._schema.is_mutable)


# --- Modules ---


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Name → child, also a child that is there twice; `named_children` names it once."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Name → the module's own parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Name → the module's own buffers; another tensor may be put in one's place."""
    return module._buffers


def padding_around(layer: Any) -> list[int]:
    """What a convolution whose padding is no plain zeros pads its input by, as `functional.pad` takes it."""
    around: list[int] = layer._reversed_padding_repeated_twice
    return around


def output_padding(layer: Any, x: Tensor, output_size: list[int] | None) -> list[int]:
    """How much a transposed convolution adds to one side of its output."""
    stride, padding, kernel, dilation = (list(v) for v in (layer.stride, layer.padding, layer.kernel_size, layer.dilation))
    found: list[int] = layer._output_padding(x, output_size, stride, padding, kernel, len(kernel), dilation)
    return found


# --- Fake tensors ---

# What tensors without numbers raise where a layer reads numbers.
FAKE_REFUSALS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def fake_log() -> logging.Logger:
    """Where torch logs the traceback of what fails under fake tensors."""
    return logging.getLogger("torch._subclasses.fake_tensor")


# --- Process groups ---


def default_group() -> Any:
    """The process group that `init_process_group` made."""
    return dist.distributed_c10d._get_default_group()


def default_store() -> Any:
    """The store through which its ranks met."""
    return dist.distributed_c10d._get_default_store()


def backend_of(group: Any, device: torch.device) -> Any:
    """The backend that carries a group's tensors on `device`; the dispatcher in front of it costs some µs a message. Raises
    RuntimeError where there is none."""
    return group._get_backend(device)


def backend_timeout(backend: Any) -> timedelta:
    """How long a gloo backend waits where nothing else is said."""
    limit: timedelta = backend.options._timeout
    return limit


# --- torch's own pipeline runtime ---


def pipeline_runtime(stages: Iterable[Any], microbatches: int, **options: Any) -> Any:
    """A runtime that takes its order from a CSV (see `load_order`)."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    return _PipelineScheduleRuntime(list(stages), microbatches, **options)  # type: ignore[no-untyped-call]


def load_order(runtime: Any, path: str) -> None:
    """Give a runtime the order in a compute-only CSV."""
    runtime._load_csv(path, format="compute_only")
