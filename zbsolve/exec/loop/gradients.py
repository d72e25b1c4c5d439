"""Gradients of the whole model, of which each rank has its layers': their norm, clipping by it, and loss scaling."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...util.errors import BadInput
from ..torch_private import default_group, norms_of, scale_all
from ..transport.failure import RunFailed
from .on_rank import OnRank

TORCH_CLIP = "torch.nn.utils.clip_grad", "clip_grad_norm_"  # the module, and the function in it
OURS = "torch's clip_grad_norm_ sees this rank's gradients alone, so every rank clips by another norm: call {}"


def norm_power(parameters: Iterable[nn.Parameter], elsewhere: Collection[nn.Parameter], norm_type: float) -> float:
    """The sum of |g|^norm_type over the gradients of `parameters`, but for those that other ranks count (`elsewhere`); with
    inf their largest |g|."""
    skipped = {id(p) for p in elsewhere}
    mine = [p.grad for p in parameters if p.grad is not None and id(p) not in skipped]
    norms = norms_of(mine, norm_type, torch.float64) if mine else ()
    if not norms:
        return 0.0
    each = torch.stack([norm.to(norms[0].device) for norm in norms])
    return float(each.max() if math.isinf(norm_type) else each.pow(norm_type).sum())


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by, as in `torch.nn.utils.clip_grad_norm_`."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1 else factor  # not min(): NaN stays


def total_norm(powers: Iterable[float], norm_type: float) -> float:
    """The norm of the whole from what `norm_power` gave on each rank."""
    if math.isinf(norm_type):
        found = list(powers)
        return math.nan if any(map(math.isnan, found)) else max(found)
    total = 0.0
    for power in powers:  # in the order of the ranks, so every rank has the same bits
        total += power
    return float(total ** (1 / norm_type))


def clip_grad_norm_(pipeline: OnRank, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """Scale the gradients of the whole model, on all its ranks, as `torch.nn.utils.clip_grad_norm_` does in one process.

    Every rank calls this between `step` and the optimizer's step, and gets the norm that the gradients had: shape (), the
    same bits everywhere. A parameter that several ranks hold counts once; with replicas the mean gradients count. Raises
    BadInput, and RunFailed where a rank is lost or, with `error_if_nonfinite`, the norm is NaN or inf.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise BadInput(f"clip_grad_norm_: max_norm {max_norm:g} and norm_type {norm_type:g} must be positive")
    if pipeline.versions:
        raise BadInput("clip_grad_norm_: the schedule has passes U, which update inside a step and leave no gradients")
    pipeline.wait_gradients()
    peers, parameters = pipeline.peers, list(pipeline.module.parameters())
    mine = torch.tensor([norm_power(parameters, pipeline.shared.elsewhere(), norm_type)], dtype=torch.float64)
    everything = torch.empty((peers.wires.size, 1), dtype=torch.float64)
    peers.wait(peers.wires.control.allgather([list(everything.unbind())], [mine]), "norm of the gradients")
    norm = total_norm(everything.ravel().tolist(), norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RunFailed(f"clip_grad_norm_: the norm of the gradients is {norm}")
    factor = clip_factor(norm, max_norm)
    present = [p.grad for p in parameters if p.grad is not None]
    if factor != 1 and present:
        scale_all(present, factor)
    return torch.tensor(norm, dtype=torch.float64)


class ClipWatch:
    """Says once that torch's `clip_grad_norm_` is not the way to clip a part of a model.

    It looks at who takes parameters from an iterator: nothing of torch's is replaced, and nobody else is warned. So what
    comes to torch's function as a list is not seen.
    """

    def __init__(self) -> None:
        self._said = False

    def over(self, parameters: Iterator[nn.Parameter]) -> Iterator[nn.Parameter]:
        """The same parameters."""
        here = inspect.currentframe()
        if not self._said and here is not None and _is_torch_clip(here.f_back):
            self._said = True
            warnings.warn(OURS.format("pipeline.clip_grad_norm_(max_norm)"), stacklevel=4)
        yield from parameters


def _is_torch_clip(frame: Any) -> bool:
    """Does torch's function, or a comprehension in it, run here?"""
    for one in (frame, getattr(frame, "f_back", None)):
        if one is not None and (one.f_globals.get("__name__"), one.f_code.co_name) == TORCH_CLIP:
            return True
    return False


def loss_scale(pipeline: OnRank, scaler: Any) -> float:
    """What `scaler` multiplies losses by in this step; 1 where it is not enabled. Raises BadInput where a rank would skip a
    step that another one makes."""
    ranks = dist.get_process_group_ranks(default_group() if pipeline.group is None else pipeline.group)
    if not scaler.is_enabled():
        return 1.0
    if len(ranks) > 1:
        if not hasattr(scaler, "process_group"):
            raise BadInput(
                f"scaler: a {type(scaler).__name__} looks for inf on each rank alone: take "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, on the pipeline's process group"
            )
        group = default_group() if scaler.process_group is None else scaler.process_group
        missing = sorted(set(ranks) - set(dist.get_process_group_ranks(group)))
        if missing:
            raise BadInput(f"scaler: its process group lacks rank {missing[0]} of the pipeline")
    return float(scaler.scale(torch.ones((), device=pipeline.device)))
