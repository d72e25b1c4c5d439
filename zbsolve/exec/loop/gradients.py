"""Gradients of the whole model, of which each rank has those of its layers: norm, clipping and loss scaling."""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...util.errors import BadInput, RunFailed
from ..base.torch_private import default_group, norms_of, scale_all
from ..base.values import is_dtensor, laid_out_as, local
from ..transport.peers import together
from ..transport.wires import all_of, passed, waiting

SAID_BYTES = 512  # of a rank's error message
OnRank = Any  # one rank's `Pipeline`, which imports these functions


def beside(pipeline: OnRank, numbers: Sequence[float], what: str) -> Tensor:
    """The numbers of all ranks at the same place of the pipeline on other coordinates of the mesh, shape (ranks, numbers),
    in the same order on each. They call this together. Without a mesh one row. Raises RunFailed naming `what`."""
    row = torch.tensor(numbers, dtype=torch.float64)
    group = None if pipeline.mesh is None else pipeline.mesh.beside
    return row[None] if group is None else _gathered(pipeline, row, group, what)


@contextmanager
def together_on_mesh(pipeline: OnRank, what: str) -> Iterator[None]:
    """Inside, each rank works by itself. Where one rank raises BadInput, all ranks of the mesh raise it. Raises RunFailed
    where a rank is lost."""
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
    """The sum of |g|^norm_type over the gradients of this rank's parameters; for inf, the largest |g|. On a mesh it is that
    of all ranks at the same place in the pipeline, which call this together. A parameter that several ranks hold counts
    on the first. Pending sums over ranks of the mesh are made first (see `lay_out`). Raises RunFailed, and BadInput for
    DTensors of a pipeline that has no mesh."""
    parameters, mesh = list(pipeline.module.parameters()), pipeline.mesh
    skipped = {id(p) for part in pipeline.parts for p in part.elsewhere()}
    lay_out(pipeline)
    if mesh is None and any(is_dtensor(p) for p in parameters):
        raise BadInput("the norm of DTensors' gradients needs the other ranks of their mesh: give Pipeline its mesh")
    gradients = [p.grad for p in parameters if p.grad is not None and id(p) not in skipped]
    counted = [local(g) for g in gradients if mesh is None or mesh.counts(g)]
    norms, power = norms_of([g for g in counted if g.numel()], norm_type, torch.float64), 0.0
    if pipeline.device.type == "cuda":  # reading it would wait for sums over a lost pipeline for ever
        with pipeline.peers.telling("norm of the gradients"), waiting("gradients"):
            passed(pipeline.device, pipeline.peers.timeout)
    if norms:
        each = torch.stack([norm.to(norms[0].device) for norm in norms])
        power = float(each.max() if math.isinf(norm_type) else each.pow(norm_type).sum())
    return added(beside(pipeline, [power], "norm of the gradients")[:, 0].tolist(), norm_type)


def lay_out(pipeline: OnRank) -> None:
    """Give gradients that are DTensors the placements of their parameters, which makes the pending sums over ranks."""
    with pipeline.peers.telling("gradients of distributed parameters"):
        for p in pipeline.module.parameters():
            if p.grad is not None:
                p.grad = laid_out_as(p.grad, p)


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that clips gradients of this norm, as in `torch.nn.utils.clip_grad_norm_`."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1 else factor  # not min(): a NaN must stay one


def added(powers: Sequence[float], norm_type: float) -> float:
    """Combine the `norm_power` of several ranks into that of all their gradients together."""
    if math.isinf(norm_type):
        return math.nan if any(map(math.isnan, powers)) else max(powers)
    return float(reduce(add, powers, 0.0))  # summed rank by rank, so that every rank gets the same bits


def clip_grad_norm_(pipeline: OnRank, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """Scale the gradients of the whole model, on all its ranks, as `torch.nn.utils.clip_grad_norm_` does in one process.

    Every rank calls this between `step` and the optimizer's step. Returns the norm before clipping: shape (), the same bits
    on all ranks. A parameter that several ranks hold counts once, whole or in parts; with replicas, the mean gradients
    count. On a mesh, plain tensors are taken to be the same on all coordinates. Raises BadInput, and RunFailed where a
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
    if (factor := clip_factor(norm, max_norm)) != 1:
        scale_all([local(p.grad) for p in pipeline.module.parameters() if p.grad is not None], factor)
    return torch.tensor(norm, dtype=torch.float64)


class ParameterWatch:
    """Warns, once each, where torch's `clip_grad_norm_` gets this rank's parameters alone, and where an optimizer would get
    a rank's parameters though none is trained. It inspects the caller that iterates over `parameters()`; no function of
    torch's is replaced. So it does not see a list of parameters."""

    def __init__(self, rank: int) -> None:
        self._rank, self._said, self._said_nothing = rank, False, False

    def over(self, parameters: Iterator[nn.Parameter]) -> Iterator[nn.Parameter]:
        """Yield the same parameters, and look at the caller."""
        here = inspect.currentframe()
        if not self._said and here is not None and _clips(here.f_back):
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


def _clips(frame: Any) -> bool:
    """Is this a frame of torch's `clip_grad_norm_`, or of a comprehension in it?"""
    frames = filter(None, (frame, getattr(frame, "f_back", None)))
    return any((caller.f_globals.get("__name__"), caller.f_code.co_name) == TORCH_CLIP for caller in frames)


def refuse_lbfgs(module: weakref.ref[nn.Module], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before each step of an optimizer: raise BadInput for an LBFGS of this module's parameters."""
    if isinstance(optimizer, torch.optim.LBFGS):
        ours = {id(p) for p in getattr(module(), "parameters", list)()}
        if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            raise BadInput("LBFGS: it steps by products of all gradients, and a rank has its own: take another optimizer")


def loss_scale(pipeline: OnRank, scaler: Any) -> float:
    """The factor of `scaler` for the losses of this step; 1 where it is not enabled. Raises BadInput where ranks could
    disagree on whether to skip a step."""
    if not scaler.is_enabled():
        return 1.0
    ranks = dist.get_process_group_ranks(pipeline.group)
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
