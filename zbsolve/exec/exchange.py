"""Sums of gradients over ranks: of parameters that several ranks of a pipeline hold, and over the replicas of a pipeline.

Several ranks hold a parameter that is tied between stages, or whose stage is on several ranks (routes). They start from the
same value and sum their gradients. Each such sum has its own process group, so ranks may run their passes C in different
orders. With data parallelism each replica has its part of the batch, and gradients become the mean over the replicas.

A stage's pass C starts its sums, which run beside the passes after it. Without a pass C, sums over replicas start after the
last pass that adds to the stage's gradients, and sums over ranks of the pipeline at the end of the step. Whoever reads
gradients waits for the mean; the end of a step waits for the sums that passes C have started.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..kinds import kinds_that
from ..models.model import Place
from ..problem.tables import Ints
from ..util.errors import BadInput
from .base.handler import Graph, Handler
from .base.part import Part, RankState, asked
from .base.program import Action
from .base.torch_private import own_backend
from .base.values import as_local_of, is_dtensor, laid_out_as, local, local_bytes
from .connecting import Connecting
from .layers import tie
from .mesh import PipelineMesh, group_along, ranks_along
from .transport.wires import abort, all_of, break_off_groups, connect, digest, joined, stamped, waiting

Key = tuple[tuple[int, ...], tuple[int, ...], str]  # stages, ranks, dtype
LARGE_BYTES = 1 << 20  # from this size on a gradient is summed in place; smaller ones are concatenated first


@dataclass(frozen=True, slots=True)
class Sum:
    """A running sum over a group of ranks, of gradients of one dtype. small: parameters whose gradients `flat` has
    concatenated; behind these it has a count for each of `parameters`: how many ranks have a gradient. large: the other
    parameters, with their gradients. Of a DTensor the local tensor is summed. works: the work handles. ended: when each of
    them was done, monotonic ns, if that is recorded."""

    parameters: Sequence[nn.Parameter]
    small: Sequence[nn.Parameter]
    flat: Tensor
    large: Sequence[tuple[nn.Parameter, Tensor]]
    works: Sequence[Any]
    ended: list[int] = field(default_factory=list)

    @classmethod
    @torch.no_grad()
    def started(cls, parameters: Sequence[nn.Parameter], begin: Callable[[Tensor], Any], timed: bool) -> Sum:
        """Start to sum. begin: starts the sum of one tensor over the ranks, and returns its work handle. timed: record when
        sums are done. (On a GPU marks do that: a callback would wait on streams that a capture never joins.)"""
        small = [p for p in parameters if local_bytes(p) < LARGE_BYTES]
        large = [(p, _gradient(p).contiguous()) for p in parameters if local_bytes(p) >= LARGE_BYTES]
        there = local(parameters[0]).new_ones(len(parameters))  # (a copy from the host would wait for the device)
        for i, p in enumerate(parameters):
            if p.grad is None:
                there[i].zero_()
        flat = torch.cat([*(_gradient(p).reshape(-1) for p in small), there])
        total = cls(parameters, small, flat, large, [begin(tensor) for tensor in (flat, *(grad for _, grad in large))])
        for work in total.works if timed and not flat.is_cuda else ():
            stamped(work, total.ended)
        return total

    def wait(self, what: str, timeout: timedelta) -> int:
        """Wait for the sums. Returns when the last one was done, monotonic ns. Raises LostRank naming `what`."""
        with waiting(what):
            for work in self.works:
                joined(work, timeout, self.flat.device)
        return max(self.ended) if len(self.ended) == len(self.works) else time.monotonic_ns()

    @torch.no_grad()
    def give(self, count: int = 1) -> None:
        """Put the sums, divided by `count`, into `.grad`. A parameter without a gradient on any rank still has none."""
        pieces, there = self.flat[: -len(self.parameters)], self.flat[-len(self.parameters) :]
        missing = any(p.grad is None for p in self.parameters)  # read the counts only then: on a GPU that waits
        nowhere = {id(p) for p, n in zip(self.parameters, there.tolist(), strict=True) if not n} if missing else set()
        shapes = [local(p).shape for p in self.small]
        pairs = zip(self.small, torch.split(pieces, [shape.numel() for shape in shapes]), strict=True) if shapes else ()
        sums = [(p, piece.view(shape)) for (p, piece), shape in zip(pairs, shapes, strict=True)]
        for p, total in (*sums, *self.large):
            if id(p) in nowhere:
                continue
            total.div_(count)
            if p.grad is None:
                p.grad = as_local_of(torch.empty_like(local(p)).copy_(total), p)
            elif (part := local(p.grad)).data_ptr() != total.data_ptr():
                part.copy_(total)


def _gradient(p: nn.Parameter) -> Tensor:
    """The local gradient, dense and with its parameter's placements from now on, so that all ranks sum the same part."""
    if p.grad is None:
        return torch.zeros_like(local(p))
    p.grad = laid_out_as(p.grad, p) if p.grad.layout == torch.strided else p.grad.to_dense()
    return local(p.grad)


@dataclass(slots=True)
class Bucket:
    """Parameters with the same stages, ranks and dtype, in the same order on all their ranks. givers: for each, the rank
    whose value all start from. backend: of their process group. kept: their gradients from before the step. sum: the running
    one."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    parameters: list[nn.Parameter] = field(default_factory=list)
    givers: list[int] = field(default_factory=list)
    backend: Any = None
    kept: list[Tensor | None] = field(default_factory=list)
    sum: Sum | None = None

    def start(self) -> Sum:
        """Start the sum, if it is not running. Returns it."""
        if self.sum is None:
            self.sum = Sum.started(self.parameters, lambda tensor: self.backend.allreduce([tensor]), timed=True)
        return self.sum

    def end(self, total: Sum) -> None:
        """Add the finished sum to the gradients from before the step."""
        total.give()
        for p, kept in zip(self.parameters, self.kept, strict=True):
            if kept is not None:
                p.grad = kept if p.grad is None else kept.add_(p.grad)
        self.sum, self.kept = None, []


def buckets(
    homes: Sequence[Sequence[int]], stage_of: Sequence[int], layers: dict[int, nn.Module], groups: Iterable[Sequence[Place]]
) -> list[Bucket]:
    """One rank's buckets, in the same order on all ranks. homes: the ranks of each stage. stage_of: layer → stage. layers:
    of this rank. groups: of places (layer, name) with the same parameter; the first place of a group gives the starting
    value. Also ties `layers`: all places of a group get the same parameter object."""
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
    by_key: dict[Key, Bucket] = {}
    for _, stages, giver, parameter in sorted(rows.values(), key=lambda row: row[0]):
        ranks = tuple(sorted({rank for s in stages for rank in homes[s]}))
        if len(ranks) > 1:
            key = tuple(sorted(stages)), ranks, str(parameter.dtype)
            bucket = by_key.setdefault(key, Bucket(key[0], ranks))
            bucket.parameters.append(parameter)
            bucket.givers.append(min(homes[giver]))
    return [by_key[key] for key in sorted(by_key)]


class Shared(Part):
    """The parameters that this rank shares with other ranks of its pipeline. Making it gives them the same values on all
    ranks, which all make one. exchanged: stages with passes C on this rank. If an earlier part must complete gradients
    first, they are summed after that, at the end of the step. Raises LostRank."""

    name, any_order = "exchange", True

    def __init__(self, c: Connecting) -> None:
        self._wires, self._timeout, self._device = c.wires, c.peers.timeout, c.device
        self._behind = asked(c.parts, "wait_gradients")
        passes = () if self._behind else c.own.program.actions
        self.exchanged = frozenset(action.stage for action in passes if action.kind in HANDLERS)
        stage_of = [s for s, count in enumerate(c.own.counts) for _ in range(count)]
        common = buckets(c.problem.stage_ranks, stage_of, c.own.layers, c.own.tied)
        token, kind = c.wires.token(), "gloo" if c.device.type == "cpu" else "nccl"

        def broadcast(bucket: Bucket, giver: int, row: Tensor) -> None:
            c.wires.wait(bucket.backend.broadcast(row, bucket.ranks.index(giver)))

        for bucket in common:
            place = bucket.ranks.index(c.wires.rank), len(bucket.ranks)
            name = f"zbsolve/{token}/{bucket.stages} {bucket.parameters[0].dtype}"
            bucket.backend = own_backend(kind, name, place, self._timeout)
            # NCCL makes a communicator at its first use, which blocks the host until all ranks do so: here.
            for parameter, giver in zip(bucket.parameters, bucket.givers, strict=True):
                begin_from(local(parameter.detach()), partial(broadcast, bucket, giver))
            bucket.parameters = [p for p in bucket.parameters if p.requires_grad]
        self._buckets = [bucket for bucket in common if bucket.parameters]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that other ranks of the pipeline hold too."""
        return [p for bucket in self._buckets for p in bucket.parameters]

    def no_activations(self) -> list[Tensor]:
        return [bucket.sum.flat for bucket in self._buckets if bucket.sum is not None]

    def elsewhere(self) -> list[nn.Parameter]:
        return [p for bucket in self._buckets if bucket.ranks[0] != self._wires.rank for p in bucket.parameters]

    def begin_gradients(self) -> None:
        """A step begins. Only its own gradients are to be summed, so older ones are put aside."""
        for bucket in self._buckets:
            bucket.kept = [p.grad for p in bucket.parameters]
            for parameter in bucket.parameters:
                parameter.grad = None

    def exchange(self, stage: int) -> None:
        """The pass C of a stage: start its sums. Never waits. Sums over tied stages start at the end of the step: ranks may
        come to them in different orders (see `docs/nccl.md`)."""
        for bucket in self._buckets if stage in self.exchanged else ():
            if bucket.stages == (stage,):
                bucket.start()

    def forget(self) -> None:
        """The step has failed: restore the gradients from before it."""
        for bucket in self._buckets:
            for parameter, kept in zip(bucket.parameters, bucket.kept, strict=False):
                parameter.grad = kept
            bucket.sum, bucket.kept = None, []

    def break_off(self) -> None:
        if self._device.type == "cuda":
            abort(bucket.backend for bucket in self._buckets)

    close = break_off

    def sums(self) -> dict[int, Any]:
        for wait in self._behind if self._buckets else ():
            wait()
        totals = [bucket.start() for bucket in self._buckets]
        ended: dict[int, Any] = {}
        for bucket, total in zip(self._buckets, totals, strict=True):
            what = f"gradients of stage {bucket.stages[0]} over ranks {', '.join(map(str, bucket.ranks))}"
            when = total.wait(what, self._timeout)
            for stage in bucket.stages:
                ended[stage] = max(ended.get(stage, 0), when) if self.marks is None else self.marks.mark()
            bucket.end(total)
        return ended


OTHERS = "gradients of the other pipelines"


class Replicas(Part):
    """The mean of gradients over replicas of the pipeline, of which this one is number `place`. The sums of a stage start
    when its gradients are complete; those of parameters that ranks of the pipeline share come last. Raises TimeoutError
    where GPUs do not connect."""

    name, any_order = "replicas", True

    def __init__(self, c: Connecting) -> None:
        self.place, self.timeout, self._device = dist.get_rank(c.given.replicas), c.peers.timeout, c.device
        stages = {s: stage.parameters() for s, stage in c.stages.items()}
        shared = next(p for p in c.parts if isinstance(p, Shared))
        later, self._exchanged = shared.parameters(), shared.exchanged
        for number, named in ((n, named) for part in c.parts for n, named in part.own_parameters().items()):
            stages[number] = [p for _, p in named]
            if number not in self._exchanged:  # its gradients are complete only at the step's end, or at a pass C
                later += stages[number]
        groups = groups_of(c.given.mesh, c.given.replicas)
        self._groups = {id(p): groups(p) for parameters in stages.values() for p in parameters}
        self._distinct = list({id(g): g for g in (c.given.replicas, *self._groups.values()) if g is not None}.values())
        connect(self._distinct, self._device, self.timeout)
        self._later = {id(p): p for p in later if self._groups[id(p)] is not None}
        self._stages = {s: [p for p in parameters if self._groups[id(p)] is not None] for s, parameters in stages.items()}
        self._missing = Counter(id(p) for parameters in self._stages.values() for p in parameters)
        self._open = dict(self._missing)
        self._sums: list[tuple[Sum, int]] = []  # and what to divide it by

    def no_activations(self) -> list[Tensor]:
        return [total.flat for total, _ in self._sums]

    def done(self, stage: int) -> None:
        if stage not in self._exchanged:
            self._done(stage)

    def exchange(self, stage: int) -> None:
        """The pass C of `stage`: start its sums. Never waits."""
        if stage in self._exchanged:
            self._done(stage)

    def _done(self, stage: int) -> None:
        for p in self._stages[stage]:
            self._open[id(p)] -= 1
        self._start([p for p in self._stages[stage] if not self._open[id(p)] and id(p) not in self._later])

    def sums(self) -> dict[int, Any]:
        """Start the sums of parameters that ranks of the pipeline share, whose sum over those ranks is done by now. Wait for
        the sums of stages with passes C. Returns as in `Part.sums`. Raises LostRank."""
        self._start(list(self._later.values()))
        self._open = dict(self._missing)
        ended: dict[int, Any] = {}
        for stage in self._exchanged:
            own = {id(p) for p in self._stages.get(stage, ())}
            for total, _ in self._sums:
                if any(id(p) in own for p in total.parameters):
                    ended[stage] = max(ended.get(stage, 0), total.wait(OTHERS, self.timeout))
        return ended if self.marks is None else {stage: self.marks.mark() for stage in ended}

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        return bool(self._sums) and any(id(p) in self._missing for group in optimizer.param_groups for p in group["params"])

    def break_off(self) -> None:
        """On a GPU abort the communicators: others would wait for their kernels."""
        if self._device.type == "cuda":
            break_off_groups(self._distinct, self._device)

    def forget(self) -> None:
        self._sums, self._open = [], dict(self._missing)

    def wait_gradients(self) -> None:
        """Wait until `.grad` is the mean over all replicas, with the same bits in each. A parameter without a gradient in
        any replica still has none. Raises LostRank."""
        sums, self._sums = self._sums, []
        for total, count in sums:
            total.wait(OTHERS, self.timeout)
            total.give(count)

    def _start(self, parameters: Sequence[nn.Parameter]) -> None:
        alike: dict[tuple[torch.dtype, str], list[nn.Parameter]] = {}
        for p in parameters:
            alike.setdefault((p.dtype, self._groups[id(p)].group_name), []).append(p)
        for some in alike.values():
            group = self._groups[id(some[0])]
            begin = partial(dist.all_reduce, group=group, async_op=True)
            self._sums.append((Sum.started(some, begin, bool(self._exchanged)), dist.get_world_size(group)))


def optimizers_wait(concerns: Callable[[torch.optim.Optimizer], bool], wait: weakref.WeakMethod[Callable[[], None]]) -> Any:
    """Make every torch optimizer call `wait` before its step, if it `concerns` the optimizer (see `Part.concerns`). Returns
    a handle whose `remove` undoes this. wait: a weak reference, which does nothing once its owner is gone."""

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        waiting = wait()
        if waiting is not None and concerns(optimizer):
            waiting()

    return register_optimizer_step_pre_hook(before)


def begin_alike(group: Any, module: nn.Module, content: str) -> None:
    """Copy the first replica's values of `module` to all others. All ranks of `group`, those with the same stages, call
    this. Raises BadInput (see `check_same`)."""
    values = [*module.parameters(), *module.buffers()]
    check_same(group, content, next((t.device for t in values), torch.device("cpu")))
    for tensor in values:
        begin_from(local(tensor.detach()), partial(dist.broadcast, group=group, group_src=0))


def begin_from(tensor: Tensor, broadcast: Callable[[Tensor], Any]) -> None:
    """Broadcast a tensor in place, as bytes: frozen parameters may have dtypes that backends do not know."""
    whole = tensor.contiguous()
    broadcast(whole.view(-1).view(torch.uint8))
    if whole is not tensor:
        tensor.copy_(whole)


def check_same(group: Any, content: str, device: torch.device) -> None:
    """Raise BadInput where replicas have another schedule (`content` as text), and so another order of sums. All ranks of
    `group` call this."""
    marks = all_of(group, torch.tensor(digest(content), device=device), "other pipelines").tolist()
    for place, other in enumerate(marks):
        if other != marks[0]:
            raise BadInput(f"replicas: pipeline {place} has another schedule than pipeline 0")


def groups_of(mesh: PipelineMesh | None, group: Any) -> Callable[[nn.Parameter], Any]:
    """A function: parameter → the process group over which its gradient is averaged; None where it is not averaged. mesh:
    None: `group` has all replicas. A group over some of the data dimensions is made when a parameter first needs it. So all
    ranks must ask for the same parameters in the same order."""
    if mesh is None:
        everyone = set(dist.get_process_group_ranks(group))
        return lambda p: None if everyone <= _own_ranks(p) else group
    known: dict[tuple[str, ...], Any] = {mesh.data: group}
    along = {name: set(ranks_along(mesh.whole, (name,))) for name in mesh.data}

    def of(p: nn.Parameter) -> Any:
        own = _own_ranks(p)
        names = tuple(name for name in mesh.data if not (len(along[name]) > 1 and along[name] <= own))
        if names not in known:
            known[names] = group_along(mesh.whole, names)
        return known[names]

    return of


def _own_ranks(p: Any) -> set[int]:
    """The ranks of the mesh that a DTensor is on; none for a plain tensor."""
    return set(p.device_mesh.mesh.reshape(-1).tolist()) if is_dtensor(p) else set()


def _exchange(state: RankState, action: Action, given: Any) -> Any:
    """Start the sums. The end of the step waits for them."""
    for part in (state.find(Shared), state.find(Replicas)):
        if part is not None:
            part.exchange(action.stage)


def _check(graph: Graph, rows: Ints) -> None:
    """Check that a stage has no pass C, or one on each of its ranks after all passes that add to its gradients there."""
    problem, ranks_of_stage = graph.problem, dict[int, list[int]]()
    for row, summing in graph.each(rows):
        ranks_of_stage.setdefault(summing.stage, []).append(summing.rank)
        for gradient in problem.rows(*kinds_that(adds_gradients=True), stage=summing.stage, rank=summing.rank).tolist():
            graph.check_order(summing, gradient, row)
    for stage, ranks in ranks_of_stage.items():
        homes = problem.stage_ranks[stage]
        if sorted(ranks) != list(homes):
            raise BadInput(f"stage {stage}: it is on ranks {homes}, but its passes C are on ranks {sorted(ranks)}")


HANDLERS = {"C": Handler(_exchange, _check, ends_with_step=True, in_parts=True)}
