"""A schedule in torch's own pipeline runtime (torch.distributed.pipelining), with our deferred weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..interchange.torch_csv import TorchOrder, torch_order
from ..schedule import Schedule
from ..util.errors import BadInput
from ..util.temporary import temporary_folder
from .torch_private import load_order, pipeline_runtime
from .torch_stages import check_wrappers, split_stage

MIN_TORCH = (2, 11)  # the first release that reads the compute-only CSV as all later ones do
MIN_TORCH_DEFER_RECV = (2, 13)  # the first with defer_pp_recv


def torch_schedule(
    schedule: Schedule,
    stages: Mapping[int, nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    scale_grads: bool = True,
    defer_recv: bool = False,
) -> Any:
    """This rank's `_PipelineScheduleRuntime` for a schedule, ready for `.step(inputs, target=targets, losses=[])`. Every
    rank of the group calls it.

    schedule: what to run.
    stages: stage → module, for the stages that the schedule puts on this rank; `split_stage` says what becomes of them.
    loss: loss(output, target), a mean over the microbatch.
    group: the process group; None: all.
    device: where the stages live; None: where their parameters are.
    scale_grads: divide gradients by the number of microbatches, as for a mean over the batch.
    defer_recv: use torch's `defer_pp_recv`.

    The whole batch goes to `.step`; torch splits it along dimension 0 into the microbatches that
    `zbsolve.interchange.torch_csv.torch_order(schedule).microbatches` names. torch itself does not add up the gradients of a
    parameter that is tied across ranks.

    Raises BadInput for what torch's runtime cannot express (see `torch_order`), a torch older than 2.11, stages that are not
    this rank's, a parameter in two stages (torch would scale its gradient twice), and stages wrapped for data parallelism
    (deferred gradients do not pass their hooks).
    """
    check_version(torch.__version__, defer_recv)
    order = torch_order(schedule, defer_recv=defer_recv)
    _check_stages(order, stages, dist.get_rank(group), dist.get_world_size(group))

    from torch.distributed.pipelining import PipelineStage

    made = []
    for number in sorted(stages):  # torch hands shapes from one stage of a rank to its next in this order
        place = _device(stages[number]) if device is None else torch.device(device)
        made.append(split_stage(PipelineStage(stages[number], number, len(order.placement), place, group=group)))
    more = {"defer_pp_recv": True} if defer_recv else {}
    runtime = pipeline_runtime(made, len(order.microbatches), loss_fn=loss, scale_grads=scale_grads, **more)
    with temporary_folder("order") as folder:
        path = folder / "order.csv"
        path.write_text(order.csv, encoding="utf-8")
        load_order(runtime, str(path))
    return runtime


def check_version(version: str, defer_recv: bool = False) -> None:
    """Raise BadInput where a torch of this version cannot load our orders."""
    major, minor = (int(part) for part in version.split(".")[:2])
    oldest = MIN_TORCH_DEFER_RECV if defer_recv else MIN_TORCH
    if (major, minor) < oldest:
        what = "defer_pp_recv" if defer_recv else "the compute-only CSV of its pipeline runtime"
        raise BadInput(f"torch {version}: {what} needs torch {oldest[0]}.{oldest[1]} or newer")


def _check_stages(order: TorchOrder, stages: Mapping[int, nn.Module], rank: int, ranks: int) -> None:
    if ranks != len(order.rows):
        raise BadInput(f"schedule: it is for {len(order.rows)} ranks, but the process group has {ranks}")
    mine = [s for s, home in enumerate(order.placement) if home == rank]
    if sorted(stages) != mine:
        raise BadInput(f"stages: {sorted(stages)} were given on rank {rank}, but the schedule puts {mine} there")
    owner: dict[int, tuple[int, str]] = {}
    for number in mine:
        check_wrappers(number, stages[number])
        for name, parameter in stages[number].named_parameters():
            first = owner.setdefault(id(parameter), (number, name))
            if first[0] != number:
                where = f"stage {first[0]}'s {first[1]}"
                raise BadInput(f"stage {number}: {name} is also {where}; torch would scale its gradient twice")


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))
