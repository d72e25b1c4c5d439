"""The gradients of a stage's sharded parameters on their way: one flat reduce-scatter a type and mesh.

What a rank has at the end is the mean over the data-parallel group, of its own shards. With a second dimension of replicas
(HSDP) the scattered sums are added up over these too, when somebody waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ..base.dtensors import as_local_of, laid_out_as, local
from ..transport.wires import joined
from .parameters import Parameter


@dataclass(slots=True)
class _Bucket:
    """Gradients of one type over one mesh. flat: shape (width,), this rank's shards end to end, each as long as the longest
    of its ranks, and behind them for each parameter how many ranks have a gradient of it. widths: of each shard in it.
    missing: this rank lacks a gradient. work: on its way to `flat`."""

    parameters: Sequence[Parameter]
    widths: Sequence[int]
    flat: Tensor
    missing: bool
    work: Any


class Reduction:
    """Gradients of `parameters` on their way to their shards. times: gets when sums were there, monotonic ns."""

    def __init__(self, parameters: Sequence[Parameter], times: list[int]) -> None:
        self.times = times
        kinds: dict[Any, list[Parameter]] = {}
        for one in parameters:
            if one.sharded.requires_grad:
                kinds.setdefault((one.gradient_type, one.mesh), []).append(one)
        self._buckets = [self._started(found) for found in kinds.values()]

    @torch.no_grad()
    def _started(self, parameters: Sequence[Parameter]) -> _Bucket:
        """Take the gradients of the gathered parameters, which have none afterwards."""
        size, kind = parameters[0].shard_size, parameters[0].gradient_type
        gradients = [one.take_gradient() for one in parameters]
        rows = [_rows(one, gradient, size) for one, gradient in zip(parameters, gradients, strict=True)]
        there = torch.tensor([float(gradient is not None) for gradient in gradients], dtype=kind)
        missing = any(gradient is None for gradient in gradients)
        del gradients
        widths = [row.shape[1] for row in rows]
        given = torch.cat([*rows, there.to(rows[0].device).expand(size, -1)], dim=1)
        del rows
        if kind == torch.float16:  # sums of many ranks would be too large
            given[:, : sum(widths)].div_(parameters[0].ranks)
        group = parameters[0].shard_group
        if size == 1:
            return _Bucket(parameters, widths, given[0], missing, None)
        if given.device.type == "cpu":  # gloo scatters nothing: it adds up a copy of all, and does not say when
            work = dist.all_reduce(given, group=group, async_op=True)
            return _Bucket(parameters, widths, given[dist.get_rank(group)], missing, stamped(work, self.times))
        flat = given.new_empty(given.shape[1])
        work = dist.reduce_scatter_tensor(flat, given.view(-1), group=group, async_op=True)
        return _Bucket(parameters, widths, flat, missing, stamped(work, self.times))

    def end(self, timeout: timedelta) -> None:
        """Wait until sums are scattered, and add the means to `.grad` of the sharded parameters. Raises RuntimeError where a
        rank is lost."""
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
        """Give back the memory of what is scattered already."""
        for bucket in self._buckets:
            if bucket.work is not None and bucket.work.is_completed():
                _scattered(bucket, timeout)


def _scattered(bucket: _Bucket, timeout: timedelta) -> None:
    """Wait until the sums are scattered, and keep this rank's alone."""
    if bucket.work is not None:
        joined(bucket.work, timeout, bucket.flat.device)
        bucket.flat, bucket.work = bucket.flat.clone(), None


def _rows(one: Parameter, gradient: Tensor | None, size: int) -> Tensor:
    """A gradient as what each rank gets of it, shape (ranks, width); torch shards along a dimension as `chunk` does, so the
    last ranks may have less, which zeros fill up."""
    like = local(one.gathered.detach())
    part = torch.zeros_like(like) if gradient is None else local(laid_out_as(gradient, one.gathered))
    part = part.to(one.gradient_type).movedim(one.dim, 0)
    length, rest = len(part), part.numel() // max(1, len(part))
    each = -(-length // size)
    rows = part.reshape(length, rest)
    return functional.pad(rows, (0, 0, 0, each * size - length)).reshape(size, each * rest)


@torch.no_grad()
def _give(bucket: _Bucket) -> None:
    """Hand out the sums as means. A parameter that has a gradient on no rank stays without."""
    ranks, count = bucket.parameters[0].ranks, len(bucket.parameters)
    pieces, there = bucket.flat[:-count], bucket.flat[-count:]
    if bucket.flat.dtype != torch.float16:
        pieces.div_(ranks)
    given = there.tolist() if bucket.missing else [1.0] * count  # look only then: on a GPU it would wait
    for one, piece, some in zip(bucket.parameters, torch.split(pieces, list(bucket.widths)), given, strict=True):
        if not some:
            continue
        parameter = one.sharded
        shape = local(parameter.detach()).movedim(one.dim, 0).shape
        mine = piece[: shape.numel()].view(shape).movedim(0, one.dim).to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = as_local_of(mine.contiguous(), parameter)
        else:
            local(parameter.grad).add_(mine)


def stamped(work: Any, times: list[int]) -> Any:
    """The same work; when it is done, the time is put into `times`, monotonic ns."""

    def stamp(_: Any) -> None:
        times.append(time.monotonic_ns())

    work.get_future().add_done_callback(stamp)
    return work
