"""Gradients of the whole model, of which each rank has its layers': their norm, clipping by it, and loss scaling; and
what the functions of a training loop need of a pipeline."""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...util.errors import BadInput, RunFailed
from ..base.torch_private import default_group, norms_of, scale_all
from ..base.values import is_dtensor, laid_out_as, local
from ..transport.peers import together
from ..transport.wires import all_of

SAID_BYTES = 512  # of what did not work on a rank


OnRank = Any  # one rank's `Pipeline`, which imports these functions


def beside(pipeline: OnRank, numbers: Sequence[float], what: str) -> Tensor:
    """The numbers of all ranks beside this one, shape (ranks, numbers), in one order on each; they call this together. One
    row without a mesh. Raises RunFailed naming `what`."""
    row = torch.tensor(numbers, dtype=torch.float64)
    group = None if pipeline.mesh is None else pipeline.mesh.beside
    return row[None] if group is None else _gathered(pipeline, row, group, what)


@contextmanager
def together_on_mesh(pipeline: OnRank, what: str) -> Iterator[None]:
    """Inside, each rank does what it does by itself; where one cannot, all ranks of the mesh raise. Raises RunFailed where
    one is lost."""
    failed: BadInput | None = None
    try:
        with together(pipeline.peers, what):
            yield
    except BadInput as error:
        failed = error
    group = None if pipeline.mesh is None else pipeline.mesh.beside
    if group is not None:
        text = str(failed or "").encode()[:SAID_BYTES].ljust(SAID_BYTES)
        rows = _gathered(pipeline, torch.frombuffer(bytearray(text), dtype=torch.uint8), group, what)
        texts = [row.numpy().tobytes().decode(errors="replace").strip() for row in rows]
        if failed is None and any(texts):
            raise BadInput(next(filter(None, texts)))
    if failed is not None:
        raise failed


def _gathered(pipeline: OnRank, row: Tensor, group: Any, what: str) -> Tensor:
    with pipeline.peers.telling(what):
        return all_of(group, row.to(pipeline.device), "ranks beside", pipeline.peers.timeout).cpu()


TORCH_CLIP = "torch.nn.utils.clip_grad", "clip_grad_norm_"  # the module, and the function in it
OURS = "torch's clip_grad_norm_ sees this rank's gradients alone, so every rank clips by another norm: call {}"
NOTHING = (
    "rank {} trains none of its parameters. Of trained ones alone there is no optimizer to make here, as torch refuses an "
    "empty list (PostValidated takes None in its place); clip_grad_norm_, save and load are called all the same"
)


def norm_power(pipeline: OnRank, norm_type: float) -> float:
    """The sum of |g|^norm_type over the gradients of this rank's parameters; with inf their largest |g|. On a mesh that of
    all ranks with the same place in the pipeline, which call this together. What several ranks hold counts at the first.
    Sums over ranks of a mesh that are still to be made are made (see `lay_out`). Raises RunFailed, and BadInput for DTensors
    of a pipeline that has no mesh."""
    parameters, mesh = list(pipeline.module.parameters()), pipeline.mesh
    skipped = {id(p) for part in pipeline.parts for p in part.elsewhere()}
    lay_out(pipeline)
    if mesh is None and any(is_dtensor(p) for p in parameters):
        raise BadInput("the norm of DTensors' gradients needs the other ranks of their mesh: give Pipeline its mesh")
    gradients = [p.grad for p in parameters if p.grad is not None and id(p) not in skipped]
    counted = [local(g) for g in gradients if mesh is None or mesh.counts(g)]
    norms, power = norms_of([g for g in counted if g.numel()], norm_type, torch.float64), 0.0
    if norms:
        each = torch.stack([norm.to(norms[0].device) for norm in norms])
        power = float(each.max() if math.isinf(norm_type) else each.pow(norm_type).sum())
    return added(beside(pipeline, [power], "norm of the gradients")[:, 0].tolist(), norm_type)


def lay_out(pipeline: OnRank) -> None:
    """Give the gradients of DTensors the placements of their parameters, where a sum over ranks is still to be made."""
    with pipeline.peers.telling("gradients of distributed parameters"):
        for p in pipeline.module.parameters():
            if p.grad is not None:
                p.grad = laid_out_as(p.grad, p)


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by, as in `torch.nn.utils.clip_grad_norm_`."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1 else factor  # not min(): NaN stays


def added(powers: Iterable[float], norm_type: float) -> float:
    """What `norm_power` is of several ranks together, from what it is of each."""
    rows = list(powers)
    if math.isinf(norm_type):
        return math.nan if any(map(math.isnan, rows)) else max(rows)
    return float(reduce(add, rows, 0.0))  # in the order of the ranks, so every rank has the same bits


def clip_grad_norm_(pipeline: OnRank, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """Scale the gradients of the whole model, on all its ranks, as `torch.nn.utils.clip_grad_norm_` does in one process.

    Every rank calls this between `step` and the optimizer's step, and gets the norm that the gradients had: shape (), the
    same bits everywhere. A parameter that several ranks hold counts once, as a whole or in shards; with replicas the mean
    gradients count. On a mesh plain tensors count as the same on all coordinates. Raises BadInput, and RunFailed where a
    rank is lost or, with `error_if_nonfinite`, the norm is NaN or inf.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise BadInput(f"clip_grad_norm_: max_norm {max_norm:g} and norm_type {norm_type:g} must be positive")
    if pipeline.view.step.round:
        raise BadInput("clip_grad_norm_: the schedule has passes U, which update inside a step and leave no gradients")
    pipeline.wait_gradients()
    peers = pipeline.peers
    own = torch.tensor([norm_power(pipeline, norm_type)], dtype=torch.float64)
    power = added(peers.gathered(own, "norm of the gradients").ravel().tolist(), norm_type)
    norm = power if math.isinf(norm_type) else float(power ** (1 / norm_type))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RunFailed(f"clip_grad_norm_: the norm of the gradients is {norm}")
    factor = clip_factor(norm, max_norm)
    present = [local(p.grad) for p in pipeline.module.parameters() if p.grad is not None]
    if factor != 1:
        scale_all(present, factor)
    return torch.tensor(norm, dtype=torch.float64)


class ParameterWatch:
    """Says, once each, that torch's `clip_grad_norm_` is not the way to clip a part of a model, and that a rank trains
    nothing. It looks at who takes parameters from an iterator: nothing of torch's is replaced, and nobody else is warned. So
    what comes to torch's clipping as a list is not seen."""

    def __init__(self, rank: int) -> None:
        self._rank, self._said, self._said_nothing = rank, False, False

    def over(self, parameters: Iterator[nn.Parameter]) -> Iterator[nn.Parameter]:
        """The same parameters."""
        here = inspect.currentframe()
        if not self._said and here is not None and _is_torch_clip(here.f_back):
            self._said = True
            warnings.warn(OURS.format("pipeline.clip_grad_norm_(max_norm)"), stacklevel=4)
        trained = False
        for parameter in parameters:
            trained = trained or parameter.requires_grad
            yield parameter
        caller = getattr(here, "f_back", None)
        ours = caller is None or str(caller.f_globals.get("__name__")).startswith(f"{__package__.partition('.')[0]}.")
        if not (trained or self._said_nothing or ours):
            self._said_nothing = True
            warnings.warn(NOTHING.format(self._rank), stacklevel=2)


def refuse_lbfgs(module: nn.Module) -> Callable[[], None]:
    """Let LBFGS not step with parameters of this part of a model: its products are of all parameters, and a rank would take
    other steps by its own alone. Returns what undoes this."""
    part = weakref.ref(module)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if isinstance(optimizer, torch.optim.LBFGS) and (own := part()) is not None:
            numbers = {id(p) for p in own.parameters()}
            if any(id(p) in numbers for group in optimizer.param_groups for p in group["params"]):
                raise BadInput(
                    "LBFGS: it steps by products of all gradients, and a rank has its own: take another optimizer"
                )

    return register_optimizer_step_pre_hook(before).remove


def _is_torch_clip(frame: Any) -> bool:
    """Does torch's function, or a comprehension in it, run here?"""
    frames = filter(None, (frame, getattr(frame, "f_back", None)))
    return any((caller.f_globals.get("__name__"), caller.f_code.co_name) == TORCH_CLIP for caller in frames)


def loss_scale(pipeline: OnRank, scaler: Any) -> float:
    """What `scaler` multiplies losses by in this step; 1 where it is not enabled. Raises BadInput where a rank would skip a
    step that another one makes."""
    if not scaler.is_enabled():
        return 1.0
    ranks = dist.get_process_group_ranks(default_group() if pipeline.group is None else pipeline.group)
    if pipeline.mesh is not None:
        ranks = pipeline.mesh.whole.mesh.reshape(-1).tolist()
    if len(ranks) > 1:
        if not hasattr(scaler, "process_group"):
            raise BadInput(
                f"scaler: a {type(scaler).__name__} looks for inf on each rank alone: take "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, on the process group of all ranks"
            )
        group = default_group() if scaler.process_group is None else scaler.process_group
        missing = sorted(set(ranks) - set(dist.get_process_group_ranks(group)))
        if missing:
            where = "pipeline" if pipeline.mesh is None else "mesh"
            raise BadInput(f"scaler: its process group lacks rank {missing[0]} of the {where}")
    return float(scaler.scale(torch.ones((), device=pipeline.device)))
