"""Parameters that live on several ranks: tied between stages, or of a stage that itself lives on several (routes).

They begin with one value, and their gradients are summed over their ranks: from the stage's pass C on where the schedule has
one, while what comes after it runs, else when the step ends. Every sum has a process group of its own, so ranks may come to
their passes C in different orders.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from ...models.model import Place
from ..base.part import Part, asked
from ..base.torch_private import own_backend
from ..base.values import as_local_of, laid_out_as, local
from ..connecting import Connecting
from ..layers import tie
from ..transport.failure import LostRank
from ..transport.wires import Wires, abort, joined, receive_tensor, send_tensor

Key = tuple[tuple[int, ...], tuple[int, ...], str]  # stages, ranks, type


@dataclass(slots=True)
class Bucket:
    """Parameters of the same stages, ranks and type, in one order on all their ranks. givers: the rank that gives each its
    starting values. backend: of their process group. kept: gradients from before the step. work: the sum on its way. ended:
    when it was there, monotonic ns."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    parameters: list[nn.Parameter] = field(default_factory=list)
    givers: list[int] = field(default_factory=list)
    backend: Any = None
    kept: list[Tensor | None] = field(default_factory=list)
    work: Any = None
    ended: int = 0


def buckets(
    homes: Sequence[Sequence[int]], stage_of: Sequence[int], layers: dict[int, nn.Module], groups: Iterable[Sequence[Place]]
) -> list[Bucket]:
    """One rank's buckets, in an order that is the same on all ranks. homes: the ranks of every stage. stage_of: layer →
    stage. layers: this rank's. groups: places of one parameter each; the first place of a group gives the starting values.
    Lets the places of a group in `layers` hold one parameter."""
    first: dict[int, tuple[Place, set[int], int]] = {}
    for group in groups:
        here = tie(layers, group)
        if here is not None:
            stages = {stage_of[layer] for layer, _ in group}
            first[id(here)] = min(map(tuple, group)), stages, stage_of[group[0][0]]  # type: ignore[assignment]
    rows: dict[int, tuple[Place, set[int], int, nn.Parameter]] = {}
    for i, layer in layers.items():
        for name, parameter in layer.named_parameters():
            place, stages, giver = first.get(id(parameter), ((i, name), {stage_of[i]}, stage_of[i]))
            rows.setdefault(id(parameter), (place, stages, giver, parameter))
    found: dict[Key, Bucket] = {}
    for _, stages, giver, parameter in sorted(rows.values(), key=lambda row: row[0]):
        ranks = tuple(sorted({rank for s in stages for rank in homes[s]}))
        if len(ranks) > 1:
            key = tuple(sorted(stages)), ranks, str(parameter.dtype)
            bucket = found.setdefault(key, Bucket(key[0], ranks))
            bucket.parameters.append(parameter)
            bucket.givers.append(min(homes[giver]))
    return [found[key] for key in sorted(found)]


class Shared(Part):
    """This rank's part of all that ranks share; every rank of the pipeline makes one. found: its buckets. exchanged: stages
    with passes C on this rank. timeout: to wait for any sum. behind: called before the sums that no pass C begins. Raises
    LostRank."""

    name = "exchange"

    def __init__(
        self,
        wires: Wires,
        found: Sequence[Bucket],
        exchanged: Collection[int],
        device: torch.device,
        timeout: timedelta,
        behind: Iterable[Callable[[], None]] = (),
    ) -> None:
        self._buckets = [bucket for bucket in found if any(p.requires_grad for p in bucket.parameters)]
        self.exchanged = frozenset(exchanged)
        self._done: set[int] = set()
        self._wires, self._timeout, self._device, self._behind = wires, timeout, device, tuple(behind)
        for bucket in found:
            for parameter, giver in zip(bucket.parameters, bucket.givers, strict=True):
                _same(wires, bucket.ranks, local(parameter.detach()), giver)
            bucket.parameters = [p for p in bucket.parameters if p.requires_grad]
        token = wires.token()
        for bucket in self._buckets:
            bucket.backend = self._connected(f"zbsolve/{token}/{bucket.stages} {bucket.parameters[0].dtype}", bucket.ranks)

    @classmethod
    def of(cls, c: Connecting) -> Shared:
        """The part of a rank. Gradients that an earlier part makes complete (those of shards) are summed behind that, at the
        end of the step."""
        stage_of = [s for s, count in enumerate(c.own.counts) for _ in range(count)]
        common, behind = buckets(c.problem.stage_ranks, stage_of, c.own.layers, c.own.tied), asked(c.parts, "wait_gradients")
        return cls(c.wires, common, () if behind else c.exchanged, c.device, c.peers.timeout, behind)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that other ranks hold too."""
        return [p for bucket in self._buckets for p in bucket.parameters]

    def elsewhere(self) -> list[nn.Parameter]:
        """The parameters here that an earlier rank holds too."""
        return [p for bucket in self._buckets if bucket.ranks[0] != self._wires.rank for p in bucket.parameters]

    def begin_gradients(self) -> None:
        """A step begins. Only what it adds is to be summed, so older gradients are put aside."""
        self._done = set()
        for bucket in self._buckets:
            bucket.kept = [p.grad for p in bucket.parameters]
            for parameter in bucket.parameters:
                parameter.grad = None

    def exchange(self, stage: int) -> None:
        """The pass C of a stage: start the sums that are complete with it. Never waits."""
        if stage not in self.exchanged:
            return
        self._done.add(stage)
        for bucket in self._buckets:
            if bucket.work is None and stage in bucket.stages and self.exchanged.intersection(bucket.stages) <= self._done:
                _start(bucket)

    def forget(self) -> None:
        """The step breaks off: gradients are those from before it."""
        for bucket in self._buckets:
            for parameter, kept in zip(bucket.parameters, bucket.kept, strict=False):
                parameter.grad = kept
            bucket.work, bucket.kept = None, []

    def break_off(self) -> None:
        """On a GPU end the communicators."""
        if self._device.type == "cuda":
            abort(bucket.backend for bucket in self._buckets)

    close = break_off

    def _connected(self, name: str, ranks: Sequence[int]) -> Any:
        """The backend of these ranks. A communicator of NCCL is made with its first sum, which holds the host until all
        ranks come to it."""
        kind, place = "gloo" if self._device.type == "cpu" else "nccl", (ranks.index(self._wires.rank), len(ranks))
        made = own_backend(kind, name, place, self._timeout)
        self._wires.wait(made.allreduce([torch.zeros(1, device=self._device)]))
        return made

    def sums(self) -> dict[int, Any]:
        """Wait until all sums are in `.grad`. Stage → when its last sum was there, monotonic ns, or a mark of the device.
        Raises LostRank."""
        for wait in self._behind if self._buckets else ():
            wait()
        for bucket in self._buckets:
            if bucket.work is None:
                _start(bucket)
        ended: dict[int, Any] = {}
        for bucket in self._buckets:
            try:
                if self.marks is None:
                    self._wires.wait(bucket.work, timeout=self._timeout)
                else:
                    joined(bucket.work, self._timeout, self._device)
            except LostRank as error:
                where = f"gradients of stage {bucket.stages[0]} over ranks {', '.join(map(str, bucket.ranks))}"
                raise LostRank(f"{where}: {error}") from None
            for stage in bucket.stages:
                if self.marks is None:
                    ended[stage] = max(ended.get(stage, 0), bucket.ended or time.monotonic_ns())
                else:
                    ended[stage] = self.marks.mark()
            _restore(bucket)
        return ended


def _start(bucket: Bucket) -> None:
    parts = [
        torch.zeros_like(local(p.detach())) if p.grad is None else local(laid_out_as(p.grad, p)) for p in bucket.parameters
    ]
    flat = torch.cat([part.reshape(-1) for part in parts])
    pieces = torch.split(flat, [part.numel() for part in parts])
    for parameter, part, piece in zip(bucket.parameters, parts, pieces, strict=True):
        parameter.grad = as_local_of(piece.view(part.shape), parameter)
    bucket.ended, bucket.work = 0, bucket.backend.allreduce([flat])
    if flat.is_cuda:  # marks say it there; a callback would wait on streams that nothing joins again, as a capture needs
        return

    def stamp(_: Any) -> None:
        bucket.ended = time.monotonic_ns()

    bucket.work.get_future().add_done_callback(stamp)


def _restore(bucket: Bucket) -> None:
    """Add the sums to what was there before the step."""
    for parameter, kept in zip(bucket.parameters, bucket.kept, strict=True):
        if kept is not None:
            assert parameter.grad is not None
            parameter.grad = kept.add_(parameter.grad)
    bucket.work, bucket.kept = None, []


def _same(wires: Wires, ranks: Sequence[int], tensor: Tensor, giver: int) -> None:
    """Give all ranks the value of the rank `giver`."""
    if giver == wires.rank:
        for other in ranks:
            if other != giver:
                send_tensor(wires, tensor, other)
    else:
        receive_tensor(wires, tensor, giver)
