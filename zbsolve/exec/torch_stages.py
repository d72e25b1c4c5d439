"""torch's pipeline stages (torch.distributed.pipelining) with our split of the backward.

torch's own split keeps the graph from I to W, and goes through it again for every group of parameters. Here I is one
backward, in which layers queue what their weight gradients need. The graph is freed, and W computes what is queued.

This uses three public names of a stage. In its `forward_one_chunk` layers prepare a split backward. In its
`backward_one_chunk` they queue, if the schedule has I and not B. torch gets the work of W from its `dw_builder`. Outside of
these autograd works as always: in torch's shape inference, in evaluation, in a loss that runs a backward of its own. The
module is not wrapped: its parameters keep their names, and FSDP2 or checkpointing may wrap parts of it afterwards.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..interchange.torch_csv import TorchOrder, torch_order
from ..models.losses import auxiliary_losses
from ..schedule import Schedule
from ..util.errors import BadInput
from ..util.files import temporary_folder
from .backward.deferral import Deferral, Queue, run_queue
from .backward.split import WRAPPERS, defer
from .base.torch_private import check_version, compiles, fsdp_casts, load_order, pipeline_runtime
from .base.values import is_wrapped, wrapped_modules
from .sharding.stage import Parameter, parameters_of_module

OURS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
FULL_RUNTIME = (2, 13)  # the first torch whose runtime has defer_pp_recv, and sends in the dtypes of FSDP's casts


def split_stage(stage: Any) -> Any:
    """Give one of torch's pipeline stages our split, in place; returns it. A second call changes nothing.

    stage: a `torch.distributed.pipelining.PipelineStage`. Layers of its `submod` are changed as in `split.defer`. All other
    weight gradients (of other layers, norms, and what torch.compile compiled) are computed in I; if none is left for W, the
    stage warns once. A B (the whole backward in one) is not split.

    Raises BadInput for anything but torch's own stage, and for one with a `dw_builder` of its own; here or at the first
    forward also for wrappers that deferred gradients bypass: DistributedDataParallel, FSDP1, FSDP2 of parts of `submod`
    alone.
    """
    from torch.distributed.pipelining import PipelineStage

    kind = type(stage)
    if not isinstance(stage, PipelineStage):
        raise BadInput(f"stage: {kind.__name__} is no PipelineStage of torch.distributed.pipelining")
    number = stage.stage_index
    if isinstance(getattr(stage.dw_builder, "__self__", None), _Passes):
        return stage
    for name in OURS:
        if getattr(kind, name) is not getattr(PipelineStage, name):
            raise BadInput(f"stage {number}: {kind.__name__} has a {name} of its own: it splits its backward as it likes")
    if stage.dw_builder is not None:
        raise BadInput(f"stage {number}: it has a dw_builder already: somebody else splits its backward")
    check_wrappers(number, stage.submod)
    passes = _Passes(stage)
    vars(stage).update(forward_one_chunk=passes.forward, backward_one_chunk=passes.backward, dw_builder=passes.weights)
    return stage


def check_wrappers(number: int, module: nn.Module) -> None:
    """Raise BadInput where the module of stage `number` is wrapped so that deferred gradients would not be reduced."""
    for part in module.modules():
        wrappers = WRAPPERS & {kind.__name__ for kind in type(part).__mro__}
        if wrappers:
            raise BadInput(f"stage {number}: wrapped in {wrappers.pop()}, whose hooks deferred weight gradients do not pass")
    # For FSDP2 of parts alone, torch's runtime does not know when to gather and reduce.
    if wrapped_modules(module) and not is_wrapped(module):
        raise BadInput(f"stage {number}: fully_shard wraps parts of its module: call it on the module itself too")
    if is_wrapped(module) and any(fsdp_casts(module)):
        check_version(torch.__version__, FULL_RUNTIME, "fully_shard's mixed precision in torch's runtime")


class _Passes:
    """The passes of one stage, wrapped around torch's own. pending: the queue of the current backward, until torch asks for
    its W right afterwards; None: it is not split."""

    def __init__(self, stage: Any) -> None:
        self.stage, self.deferral, self.warned = stage, Deferral(), False
        self.pending: Queue | None = None
        self._forward, self._backward = stage.forward_one_chunk, stage.backward_one_chunk
        defer(stage.submod, self.deferral)

    @cached_property
    def _sharded(self) -> list[Parameter]:
        """The parameters that FSDP shards; first read when all wrappers are in place. Raises BadInput."""
        number, module = self.stage.stage_index, self.stage.submod
        check_wrappers(number, module)
        return [parameter for wrapped in wrapped_modules(module) for parameter in parameters_of_module(number, wrapped)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """F. Raises BadInput where a layer adds to the loss."""
        _ = self._sharded
        with self.deferral.during(True), auxiliary_losses() as extra:
            result = self._forward(*args, **kwargs)
        if extra.total is not None:
            raise BadInput("auxiliary_loss: torch's runtime knows the loss of the last stage's output alone")
        return result

    def backward(self, chunk: int, loss: Any = None, full_backward: bool = True, **more: Any) -> Any:
        """I, which is split, or a whole B, which is not. Forwards that checkpointing repeats inside also prepare a split,
        since they must save the same tensors as in F."""
        self.pending = None if full_backward else deque()
        with self.deferral.during(True, self.pending):
            return self._backward(chunk, loss=loss, full_backward=full_backward, **more)

    def weights(self) -> Callable[[], None]:
        """torch's `dw_builder`: the W of the backward that just ran, as a function."""
        queue, self.pending = self.pending, None

        def work_off() -> None:
            if queue is not None:  # a whole B leaves nothing to do
                run_queue(queue)
                for parameter in self._sharded:
                    parameter.settle()

        if queue is not None and not queue:
            self._warn()
        return work_off

    def _warn(self) -> None:
        module = self.stage.submod
        if self.warned or all(p.dim() < 2 or not p.requires_grad for p in module.parameters()):
            return
        self.warned = True
        why = "it is compiled by torch.compile" if compiles(module) else "none of its layers is one of torch's own"
        warnings.warn(
            f"stage {self.stage.stage_index}: {why}, so I makes all its weight gradients, and W has nothing to do",
            stacklevel=2,
        )


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

    Raises BadInput for what torch's runtime cannot express (see `torch_order`), stages that are not this rank's,
    a parameter in two stages (torch would scale its gradient twice), and stages wrapped for data parallelism
    (deferred gradients do not pass their hooks).
    """
    if defer_recv:
        check_version(torch.__version__, FULL_RUNTIME, "defer_pp_recv")
    order = torch_order(schedule, defer_recv=defer_recv)
    _check_stages(order, stages, dist.get_rank(group), dist.get_world_size(group))

    from torch.distributed.pipelining import PipelineStage

    made = []
    for number in sorted(stages):  # torch passes shapes between a rank's stages in this order
        here = next((p.device for p in stages[number].parameters()), torch.device("cpu"))
        place = here if device is None else torch.device(device)
        made.append(split_stage(PipelineStage(stages[number], number, len(order.placement), place, group=group)))
    more = {"defer_pp_recv": True} if defer_recv else {}
    runtime = pipeline_runtime(made, len(order.microbatches), loss_fn=loss, scale_grads=scale_grads, **more)
    with temporary_folder("order") as folder:
        path = folder / "order.csv"
        path.write_text(order.csv, encoding="utf-8")
        load_order(runtime, str(path))
    return runtime


def _check_stages(order: TorchOrder, stages: Mapping[int, nn.Module], rank: int, ranks: int) -> None:
    if ranks != len(order.rows):
        raise BadInput(f"schedule: it is for {len(order.rows)} ranks, but the process group has {ranks}")
    own = [s for s, home in enumerate(order.placement) if home == rank]
    if sorted(stages) != own:
        raise BadInput(f"stages: {sorted(stages)} were given on rank {rank}, but the schedule puts {own} there")
    owner: dict[int, tuple[int, str]] = {}
    for number in own:
        check_wrappers(number, stages[number])
        for name, parameter in stages[number].named_parameters():
            first = owner.setdefault(id(parameter), (number, name))
            if first[0] != number:
                where = f"stage {first[0]}'s {first[1]}"
                raise BadInput(f"stage {number}: {name} is also {where}; torch would scale its gradient twice")
