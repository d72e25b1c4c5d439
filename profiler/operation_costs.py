"""The cost of operations on a GPU: FLOPs and bytes, counted as operations are dispatched, and optimizer state. With fake
tensors nothing is computed. Bytes are those that the kernels of torch's CUDA backend move, which may differ from the sizes
of an operation's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.torch_private import TorchDispatchMode, is_mutable, storage_key, tree_leaves
from zbsolve.exec.base.values import trained
from zbsolve.models.sides import batch_with
from zbsolve.util.errors import BadInput

from .dataflow import Flow

# These read and write nothing: they allocate memory, or return views.
FREE_OPERATIONS = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "detach", "alias", "lift_fresh"}
GATHER_OPERATIONS = {"embedding", "index_select", "gather", "index"}  # they read as much as they return, not the whole table
# Gradients are accumulated in place; torch's FLOP registry has only the out-of-place products.
IN_PLACE = {"addmm_": torch.ops.aten.mm, "baddbmm_": torch.ops.aten.bmm}
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
COPIES = {"clone", "copy_", "_to_copy"}
JOINS = {"cat", "stack"}
SMALL_KERNELS = {"embedding_dense_backward": 30}  # they sort the tokens
ROW_BYTES = 48 << 10  # shared memory of a multiprocessor by default: a softmax reads longer rows again
SOFTMAX_READS = {  # of the first argument: for the maximum, the sum, the result; backward for the last two
    "_log_softmax": 3,
    "_softmax": 3,
    "_log_softmax_backward_data": 2,
    "_softmax_backward_data": 2,
}


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. flops: those the kernel executes (causal attention skips half). bytes: read and written. kind:
    "matrix", "attention" or "other". half: computes in 16 bits. tokens, keys: for causal attention, the sequence's length
    and the bytes of its keys and values; heads: of its queries. scattered: accesses memory element by element, since its
    tensors differ in layout or type; otherwise kernels use vectors of 16 bytes. kernels: number of kernels that it launches,
    if that is large."""

    name: str
    flops: int
    bytes: int
    kind: str
    half: bool
    tokens: int = 0
    keys: int = 0
    heads: int = 0
    scattered: bool = False
    kernels: int = 1


class FusedNorms(TorchFunctionMode):
    """In this mode an RMS norm counts as the single kernel that it is on a GPU, not as the dozen operations that it is on a
    CPU. It counts, and saves, as much as a layer norm without bias: on a GPU torch runs one kernel for both. (For each row
    of 16-bit values a CPU's layer norm saves two 16-bit numbers, where that kernel saves one of 32 bits.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.rms_norm, functional.rms_norm):
            x, shape, weight = _norm_of(*args, **(kwargs or {}))
            if weight is None or weight.dtype == x.dtype:  # else a GPU runs separate operations too
                return functional.layer_norm(x, shape, weight)
        return func(*args, **(kwargs or {}))


def _norm_of(input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    """The arguments of an RMS norm, without eps, which costs nothing."""
    return input, normalized_shape, weight


@dataclass
class Work(TorchDispatchMode):
    """Collects an Op for every operation that reads or writes memory."""

    ops: list[Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        op = _op(func, args, kwargs or {}, result)
        if op is not None:
            self.ops.append(op)
        return result


def _op(func: Any, args: Any, kwargs: Any, result: Any) -> Op | None:
    name = func.overloadpacket.__name__
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if name in FREE_OPERATIONS or not made or _is_view(func, inputs, made):
        return None
    half = made[0].dtype.itemsize == 2
    if name in GATHER_OPERATIONS:
        return Op(name, 0, 2 * sum(_bytes(t) for t in made), "other", half)
    size = sum(_bytes(t) for t in (*inputs, *made))
    if name.startswith(ATTENTION):
        return _attention(name, args, kwargs, size, half)
    if name in IN_PLACE:
        return Op(name, int(flop_registry[IN_PLACE[name]](*args[1:3], out_val=made[0])), size, "matrix", half)
    if name == "_grouped_mm":  # one product per expert, each over its own rows
        return Op(name, _grouped(*inputs[:2]), size, "matrix", half)
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        size += _again(name, args, made)
        scattered = _scattered(func, name, inputs, made)
        return Op(name, 0, size, "other", half, scattered=scattered, kernels=SMALL_KERNELS.get(name, 1))
    return Op(name, int(count(*args, **kwargs, out_val=result)), size, "matrix", half)


def _is_view(func: Any, inputs: list[Tensor], made: list[Tensor]) -> bool:
    """Whether the operation only returns views of its arguments, without writing."""
    if is_mutable(func):
        return False
    known = {storage_key(t) for t in inputs}
    return all(storage_key(t) in known for t in made)


def _again(name: str, args: Any, made: list[Tensor]) -> int:
    """Bytes that kernels move in addition to each tensor once; negative if they skip some."""
    backward = "backward" in name
    if name == "native_layer_norm_backward" and len(made) > 1:  # a second kernel computes its weights' gradients
        return _bytes(args[0]) + _bytes(args[1])
    if name.startswith("nll_loss"):  # it reads one score per row
        return -_bytes(args[1 if backward else 0])
    if name not in SOFTMAX_READS:
        return 0
    x, dim = args[0], args[2 if backward else 1]
    return (SOFTMAX_READS[name] - 1) * _bytes(x) if x.shape[dim] * x.element_size() > ROW_BYTES else 0


def _scattered(func: Any, name: str, inputs: list[Tensor], made: list[Tensor]) -> bool:
    """Whether it accesses memory element by element. See `Op`."""
    if name in JOINS:
        return True
    if name not in COPIES and torch.Tag.pointwise not in func.tags:
        return False
    several = [t for t in (*inputs, *made) if t.numel() > 1]
    if len({(t.shape, t.stride()) for t in several}) > 1 or not all(map(_dense, several)):
        return True
    narrower = name in COPIES and inputs[-1].element_size() > made[0].element_size()  # a special kernel
    return len({t.dtype for t in several}) > 1 and not narrower


def _dense(tensor: Tensor) -> bool:
    """Whether its elements fill a contiguous block of memory."""
    return tensor.numel() == 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; an expanded one is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _grouped(a: Tensor, b: Tensor) -> int:
    """FLOPs of a grouped product, where groups divide its rows, its inner dimension or its columns."""
    columns_shared = a.dim() == 3 and b.dim() == 2
    return 2 * a.numel() * b.shape[-1] // (a.shape[0] if columns_shared else 1)


def _attention(name: str, args: Any, kwargs: Any, size: int, half: bool) -> Op:
    backward = name.endswith("backward")
    q, k, v = args[1:4] if backward else args[:3]
    spot = 7 if backward else 4
    causal = kwargs.get("is_causal", args[spot] if len(args) > spot else False)
    heads = q.shape[1]
    known = (q.shape[-2], _bytes(k) + _bytes(v), heads) if causal else ()
    # Grouped keys and values are used once for every query head.
    k, v = ((*t.shape[:1], heads, *t.shape[2:]) for t in (k, v))
    shapes = (q.shape, q.shape, k, v) if backward else (q.shape, k, v)
    count: Any = sdpa_backward_flop_count if backward else sdpa_flop_count
    flops = count(*shapes)
    if backward:
        # It first multiplies the output and its gradient. The gradient of 16-bit queries accumulates in float32: zeros are
        # written, and the sum is read and written as 16 bits.
        size += (7 if half else 2) * _bytes(q)
    return Op(name, int(flops) // (2 if causal else 1), size, "attention", half, *known)


def total(ops: list[Op]) -> int:
    """FLOPs of all operations."""
    return sum(op.flops for op in ops)


def parameter_type(parameters: list[Tensor]) -> torch.dtype:
    """The type that most parameter bytes have."""
    sizes: dict[torch.dtype, int] = {}
    for p in parameters:
        sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel() * p.element_size()
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """How parameters are stored and updated. factor: bytes of parameters, gradients and optimizer state per byte of trained
    parameters. traffic: bytes that an update reads and writes per byte of parameters. optimizer: the one that is timed."""

    name: str
    factor: float
    traffic: float
    optimizer: str = "adamw"


# Bytes per parameter, K of ZeRO (1910.02054, section 3.1): parameters and gradients of 16 bits, and 12 bytes of float32
# master parameter and two moments. An update reads gradient, master and moments, and writes all but the gradient.
OPTIMIZER_STATES = {
    "adam": OptimizerState("adam", 4.0, 7.0),  # all in the parameters' own type
    "adam-mixed": OptimizerState("adam-mixed", (2 + 2 + 12) / 2, (2 + 12 + 12 + 2) / 2),
    "adam-mixed-float-gradients": OptimizerState("adam-mixed-float-gradients", (2 + 4 + 12) / 2, (4 + 12 + 12 + 2) / 2),
    "sgd": OptimizerState("sgd", 2.0, 3.0, "sgd"),
}


def state_of(name: str | None, parameters: Sequence[Tensor]) -> OptimizerState:
    """The optimizer state called `name`; None: Adam's, with mixed precision if most trained parameters have 16 bits. Raises
    BadInput."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    half = parameter_type(trained or list(parameters)).itemsize == 2
    if name is None:
        return OPTIMIZER_STATES["adam-mixed" if half else "adam"]
    if name not in OPTIMIZER_STATES:
        raise BadInput(f"optimizer states '{name}': one of {', '.join(OPTIMIZER_STATES)}")
    if "mixed" in name and not half:
        raise BadInput(f"optimizer states '{name}': is for parameters of 16 bits")
    return OPTIMIZER_STATES[name]


PassOps = dict[str, list[Op]]  # kind → operations
Around = Callable[[str, Callable[[], Any]], Any]  # runs a pass of this kind, possibly with other work before and after


class Turn(NamedTuple):
    """Inputs and outputs of one microbatch's passes: the output, its gradients, and those of the input."""

    output: Any
    given: Any
    gradients: Any


def passes(stages: Sequence[Stage], through: Flow, batch: tuple[Any, Any]) -> dict[int, PassOps]:
    """Layer → kind → the operations of that pass, in order, with existing gradients to accumulate into."""
    ops = {}
    for stage in stages:
        x = through.example(stage.first, torch.empty) if stage.first else batch_with(stage.layers, *batch)
        ops[stage.first] = passes_of(stage, x, batch[1])
    return ops


def passes_of(stage: Stage, x: Any, target: Any) -> PassOps:
    """The operations of one stage with input x."""
    turn(stage, x, target, lambda kind, call: call())  # creates the gradients to accumulate into
    ops: PassOps = {}
    turn(stage, x, target, counting(ops), split=False)
    ops["F"].clear()
    turn(stage, x, target, counting(ops))
    return ops


def counting(ops: PassOps) -> Around:
    """Records the operations of each pass."""

    def around(kind: str, call: Callable[[], Any]) -> Any:
        with Work(ops.setdefault(kind, [])):
            return call()

    return around


def turn(stage: Stage, x: Any, target: Any, around: Around, *, split: bool = True, recompute: bool = False) -> Turn:
    """Forward and backward of one microbatch."""
    output = around("F", lambda: stage.forward(0, x, target, split=split, recompute=recompute))
    gradient = None if stage.loss is not None else [torch.ones_like(tensor) for tensor in trained(output)]
    if recompute:
        around("X", lambda: stage.recompute(0))
    gradients = around("B" if split else "BW", lambda: stage.backward(0, gradient))
    if split:
        around("W", lambda: stage.weights(0))
    return Turn(output, gradient, gradients)
