"""A stage whose parameters FSDP2 shards: gathers of its parameters, and reductions of its gradients.

FSDP's own hooks stay in its modules, since they cast under mixed precision, but they neither gather nor reduce. A gather is
open until it is released; while any is open the parameters are in memory. A reduction is one flat reduce-scatter for each
dtype and mesh. In the end each rank has its shards of the mean over the data-parallel group. With a second dimension of
replicas (HSDP), the scattered sums are also summed over these, when the gradients are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ..base.torch_private import fsdp_gathers, fsdp_parameters
from ..base.values import as_local_of, laid_out_as, local
from ..transport.wires import joined, stamped, waiting


@dataclass(eq=False)
class Parameter:
    """A parameter of layer `layer` that FSDP wrapped; `known` is FSDP's record of it. mesh: the data-parallel mesh: its last
    dimension has the ranks with different shards, its first one the replicas, if any. dim: the dimension that is sharded.
    ranks: the number of ranks in the mean; mesh_ranks: these ranks. shard_group: the `shard_size` ranks with different
    shards; replica_group: those with the same shard, None if there is one."""

    layer: int
    known: Any

    def __post_init__(self) -> None:
        mesh = self.mesh = self.known.mesh_info.mesh
        self.dim: int = self.known.fsdp_placement.dim
        self.ranks: int = mesh.size()
        self.mesh_ranks: list[int] = mesh.mesh.flatten().tolist()
        self.shard_group: Any = mesh.get_group(mesh.ndim - 1)
        self.shard_size = dist.get_world_size(self.shard_group)
        self.replica_group: Any = mesh.get_group(0) if mesh.ndim > 1 and mesh.size(0) > 1 else None

    @property
    def sharded(self) -> nn.Parameter:
        """The DTensor that optimizers see."""
        return self.known.sharded_param

    @property
    def gathered(self) -> nn.Parameter:
        """The gathered parameter that layers use: one object from the first gather on; its memory comes and goes."""
        return self.known.unsharded_param

    @property
    def gradient_type(self) -> torch.dtype:
        """The dtype in which its gradients are summed and reduced."""
        return self.known.reduce_dtype or self.gathered.dtype

    def take_gradient(self) -> Tensor | None:
        """Remove and return the gradient of the gathered parameter."""
        self.settle()
        tensor: Tensor | None = self.known.unsharded_accumulated_grad
        if tensor is None:
            tensor = self.gathered.grad
        self.known.unsharded_accumulated_grad = self.gathered.grad = None
        return tensor

    def settle(self) -> None:
        """Under mixed precision, gradients are summed in another dtype than they are computed in: do that now."""
        if self.known.reduce_dtype is not None:
            self.known.accumulate_unsharded_grad_if_needed()
            self.known.to_accumulated_grad_if_needed()

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered parameter."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors()[:1])

    def tensors(self) -> list[Tensor]:
        """Its tensors other than the shard: the gathered parameter, whose memory may be freed, and its gradients."""
        gathered: nn.Parameter | None = getattr(self.known, "unsharded_param", None)  # not before the first gather
        if gathered is None:
            return []
        both = self.known.unsharded_accumulated_grad, gathered.grad
        return [local(gathered.detach()), *(local(tensor) for tensor in both if tensor is not None)]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that are not reduced yet."""
        return sum(tensor.nbytes for tensor in self.tensors()[1:])


def parameters_of_module(layer: int, module: nn.Module) -> list[Parameter]:
    """The parameters that FSDP wrapped with `module` itself."""
    return [Parameter(layer, known) for known in fsdp_parameters(module)]


@dataclass(slots=True)
class _Bucket:
    """Gradients of one dtype over one mesh, while they are reduced. flat: shape (width,): this rank's shards, each padded to
    the longest one among its ranks, then for each parameter how many ranks have a gradient of it. widths: of each shard.
    missing: this rank lacks a gradient. work: the handle of the reduction into `flat`."""

    parameters: Sequence[Parameter]
    widths: Sequence[int]
    flat: Tensor
    missing: bool
    work: Any


class Reduction:
    """A running reduction of the gradients of `parameters`. times: gets the times when sums are done, monotonic ns."""

    def __init__(self, parameters: Sequence[Parameter], times: list[int]) -> None:
        self.times = times
        kinds: dict[Any, list[Parameter]] = {}
        for parameter in parameters:
            if parameter.sharded.requires_grad:
                kinds.setdefault((parameter.gradient_type, parameter.mesh), []).append(parameter)
        self._buckets = [self._started(bucket) for bucket in kinds.values()]

    @torch.no_grad()
    def _started(self, parameters: Sequence[Parameter]) -> _Bucket:
        """Start to reduce. Takes the gradients away from the gathered parameters."""
        size, kind = parameters[0].shard_size, parameters[0].gradient_type
        gradients = [parameter.take_gradient() for parameter in parameters]
        rows = [_rows(parameter, gradient, size) for parameter, gradient in zip(parameters, gradients, strict=True)]
        there = rows[0].new_ones(len(gradients))  # (a copy from the host would wait for the device)
        lacking = [i for i, gradient in enumerate(gradients) if gradient is None]
        for i in lacking:
            there[i].zero_()
        del gradients
        widths = [row.shape[1] for row in rows]
        given = torch.cat([*rows, there.expand(size, -1)], dim=1)
        del rows
        if kind == torch.float16:  # sums over many ranks would overflow
            given[:, : sum(widths)].div_(parameters[0].ranks)
        group = parameters[0].shard_group
        if size == 1:
            return _Bucket(parameters, widths, given[0], bool(lacking), None)
        if given.device.type == "cpu":  # gloo has no reduce-scatter with a work handle
            flat, work = given[dist.get_rank(group)], dist.all_reduce(given, group=group, async_op=True)
        else:
            flat = given.new_empty(given.shape[1])
            work = dist.reduce_scatter_tensor(flat, given.view(-1), group=group, async_op=True)
        return _Bucket(parameters, widths, flat, bool(lacking), stamped(work, self.times))

    def end(self, timeout: timedelta) -> None:
        """Wait for the sums, and add the means to `.grad` of the sharded parameters. Raises RuntimeError."""
        for bucket in self._buckets:
            _scattered(bucket, timeout)
            group = bucket.parameters[0].replica_group
            if group is not None:
                bucket.work = stamped(dist.all_reduce(bucket.flat, group=group, async_op=True), self.times)
        for bucket in self._buckets:
            if bucket.work is not None:
                joined(bucket.work, timeout, bucket.flat.device)
            _give(bucket)

    def tidy(self, timeout: timedelta) -> None:
        """Free the memory of sums that are done already."""
        for bucket in self._buckets:
            if bucket.work is not None and bucket.work.is_completed():
                _scattered(bucket, timeout)


def _scattered(bucket: _Bucket, timeout: timedelta) -> None:
    """Wait until the sums are scattered, and keep only this rank's."""
    if bucket.work is not None:
        joined(bucket.work, timeout, bucket.flat.device)
        bucket.flat, bucket.work = bucket.flat.clone(), None


def _rows(parameter: Parameter, gradient: Tensor | None, size: int) -> Tensor:
    """A gradient as the part that each rank gets, shape (ranks, width). torch shards along a dimension like `chunk`, so the
    last ranks may get less; zeros pad it."""
    like = local(parameter.gathered.detach())
    part = torch.zeros_like(like) if gradient is None else local(laid_out_as(gradient, parameter.gathered))
    part = part.to(parameter.gradient_type).movedim(parameter.dim, 0)
    length, width = len(part), part.numel() // max(1, len(part))
    each = -(-length // size)
    rows = part.reshape(length, width)
    return functional.pad(rows, (0, 0, 0, each * size - length)).reshape(size, each * width)


@torch.no_grad()
def _give(bucket: _Bucket) -> None:
    """Add the sums to `.grad` as means. A parameter without a gradient on any rank still has none."""
    ranks, count = bucket.parameters[0].ranks, len(bucket.parameters)
    pieces, there = bucket.flat[:-count], bucket.flat[-count:]
    if bucket.flat.dtype != torch.float16:
        pieces.div_(ranks)
    given = there.tolist() if bucket.missing else [1.0] * count  # read the counts only then: on a GPU that waits
    for shard, piece, some in zip(bucket.parameters, torch.split(pieces, list(bucket.widths)), given, strict=True):
        if not some:
            continue
        parameter = shard.sharded
        shape = local(parameter.detach()).movedim(shard.dim, 0).shape
        part = piece[: shape.numel()].view(shape).movedim(0, shard.dim).to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = as_local_of(part.contiguous(), parameter)
        else:
            local(parameter.grad).add_(part)


class ShardedStage:
    """The sharded parameters of stage `number`. modules: those of it that FSDP wrapped. timeout: to wait for other ranks.
    by_passes: the kinds of work ("gather", "reduce") that the schedule has passes for. All other work is done here:
    parameters are gathered before a pass needs them, and with them those of `following`, the stage that the rank uses next.
    After the last pass that adds to the gradients, the gathers are released and the gradients reduced."""

    def __init__(
        self,
        number: int,
        modules: Sequence[Any],
        parameters: Sequence[Parameter],
        timeout: timedelta,
        by_passes: frozenset[str] = frozenset(),
    ) -> None:
        self.number, self.timeout, self.by_passes = number, timeout, by_passes
        self.parameters = tuple(parameters)
        self.following: ShardedStage | None = None
        self.reduction: Reduction | None = None
        self.beside: Sequence[ShardedStage] = ()  # all sharded stages of the rank
        self.last = ""  # its last pass, which releases what was gathered if it adds to no gradients
        self.times: dict[str, list[int]] = {}  # pass of this step → when the parts of its work were done, monotonic ns
        self._modules = tuple(modules)
        self._open, self._handles = 0, list[tuple[Any, Sequence[Any]]]()
        for module in self._modules:
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)

    def gather(self, name: str = "") -> None:
        """Open a gather, for pass `name`. Never waits."""
        self._open += 1
        if self._open > 1:
            return
        times = self.times.setdefault(name, [])
        with self._waiting():
            for module in self._modules:
                handle = module.unshard(async_op=True)
                self._handles.append((handle, [stamped(work, times) for work in fsdp_gathers(module)]))

    def weights(self) -> None:
        """Wait for the parameters, which are gathered first if no pass has done so. Raises LostRank."""
        for sharded_stage in self.beside:
            sharded_stage.tidy()
        if not self._open:
            self.gather()
            self._arrive()
            if self.following is not None and not self.following._open:
                self.following.gather()
        elif self._handles:
            self._arrive()

    def _arrive(self) -> None:
        with self._waiting():
            for handle, works in self._handles:
                for work in works:
                    joined(work, self.timeout, local(self.parameters[0].sharded.detach()).device)
                handle.wait()
        self._handles.clear()

    def tidy(self) -> None:
        """Free the memory of gradients that are reduced already. Never waits. Raises LostRank."""
        if self.reduction is not None:
            with self._waiting("gradients"):
                self.reduction.tidy(self.timeout)

    def added(self) -> None:
        """A pass has added to gradients."""
        for parameter in self.parameters:
            parameter.settle()

    def release(self) -> None:
        """Close a gather. With the last one the memory of the gathered parameters is freed."""
        self._open -= 1
        if self._open == 0:
            self._arrive()
            for module in self._modules:
                module.reshard()

    def close(self) -> None:
        """Close all open gathers."""
        if self._open:
            self._open = 1
            self.release()

    def reduce(self, name: str = "") -> None:
        """Start to reduce the gradients of all passes so far, for pass `name`. Never waits."""
        with self._waiting("gradients"):
            self.reduction = Reduction(self.parameters, self.times.setdefault(name, []))

    def ended(self, name: str) -> int:
        """Wait for the work of pass `name`. Returns its end, monotonic ns; 0 where there was none. Raises LostRank."""
        self._arrive()
        self.reduced()
        return max(self.times.get(name, ()), default=0)

    def done(self) -> None:
        """The last pass that adds to gradients has run: do the work for which the schedule has no passes."""
        if "reduce" not in self.by_passes:
            self.reduce()
        if "gather" not in self.by_passes:
            self.close()

    def reduced(self) -> None:
        """Wait until the reduced gradients are in `.grad`. Raises LostRank."""
        if self.reduction is not None:
            with self._waiting("gradients"):
                self.reduction.end(self.timeout)
            self.reduction = None

    def tensors(self) -> list[Tensor]:
        """All tensors other than shards: gathered parameters, and gradients that are not reduced yet."""
        return [tensor for parameter in self.parameters for tensor in parameter.tensors()]

    @property
    def held_bytes(self) -> int:
        """Bytes of gathered parameters and unreduced gradients, if the schedule has passes that free them."""
        held = 0
        if "gather" in self.by_passes and self._open:
            held += sum(parameter.gathered_bytes for parameter in self.parameters)
        if "reduce" in self.by_passes:
            held += sum(parameter.gradient_bytes for parameter in self.parameters)
        return held

    def _waiting(self, what: str = "parameters") -> AbstractContextManager[None]:
        return waiting(f"{what} of stage {self.number}")


def trained(parameters: Sequence[Parameter]) -> list[nn.Parameter]:
    """The sharded parameters that are trained, each once."""
    return list({id(p.sharded): p.sharded for p in parameters if p.sharded.requires_grad}.values())
