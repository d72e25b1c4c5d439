"""One rank's shard of a vocabulary: what its passes compute for each microbatch, and what they send to other shards.

The last stage's rank broadcasts hidden states, and receives the sum of the shards' input gradients. Each shard sends its
statistics of labels to all. If the input embedding is sharded too, the first stage's rank receives the sum of the shards'
look-ups, and broadcasts its gradient. Sums have the dtype of what is sent.

All ranks start their collectives in the schedule's order, across all kinds. NCCL's kernels wait for their
peers on the device; if ranks started collectives of several communicators in different orders, they could wait for each
other for ever (NCCL's user guide, "Using multiple NCCL communicators concurrently").
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...problem.tables import Ints
from ...util.errors import BadInput
from ..base.handler import Graph, Handler, side_work_of
from ..base.part import Part, RankState, Run, share_of_loss
from ..base.program import Action
from ..choices import BACKENDS
from ..connecting import Connecting
from ..device.copying import SideWork
from ..transport.wires import break_off_groups, connect, joined, waiting
from .parts import Shard, add_gradient, look_up, tokens_of
from .shard import Kept, Merged, compute_type, input_gradient, merge, pass_s, pass_t

STREAM = "collectives"


class Collectives(SideWork):
    """The collectives of one rank. group: their own process group. timeout: to wait for any of them. emulated: the device
    (`emulate.EmulatedDevice`) whose times they take, if any."""

    def __init__(self, group: Any, device: torch.device, timeout: timedelta, emulated: Any = None) -> None:
        # Longer than the group's own timeout, whose error names what was waited for.
        super().__init__(device, timeout.total_seconds() + 1.0, device.type == "cuda")
        self.group, self.timeout, self._emulated = group, timeout, emulated
        self._untimed: dict[str, bool] = {}  # pass, in the emulated device's order → does it wait for other ranks?

    @classmethod
    def of(cls, group: Any, device: torch.device, timeout: timedelta, emulated: Any = None) -> Collectives:
        """The collectives of a pipeline's process group; all its ranks call this. On a GPU may raise TimeoutError."""
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(
            ranks, timeout, BACKENDS[device.type], use_local_synchronization=True, group_desc="zbsolve vocabulary"
        )
        connect([own], device, timeout)
        return cls(own, device, timeout, emulated)

    def in_real_time(self) -> Collectives:
        """The same group without an emulated device."""
        return self if self._emulated is None else Collectives(self.group, self.device, self.timeout)

    def begin_step(self, marks: Any) -> None:
        super().begin_step(marks)
        self._untimed.clear()

    def begin(
        self, name: str, work: Callable[[], None], over: Callable[[], None] = lambda: None, waits: bool = True
    ) -> None:
        """Start `work`, which uses the group, for pass `name`, after all earlier work; `over` is called when it is settled.
        waits: must other ranks do something first? If not, this rank's part takes its device's time alone. Never
        waits itself."""
        self.start(name, STREAM, work, over)
        self._untimed[name] = waits

    def settle(self, name: str, sure: bool = True) -> None:
        """As in `SideWork`, in an emulated device's time. Also raises LostRank."""
        if self._emulated is not None and name in self.begun and (sure or self.begun[name][0].known()):
            while name in self._untimed:  # a device's stream runs them one after the other
                earlier = next(iter(self._untimed))
                if self._untimed.pop(earlier):  # wait for it: then all devices have recorded when they reached it
                    self.copies.end(self.begun[earlier][0], self.seconds)
                self._emulated.run_on_side_stream(earlier)
        super().settle(name, sure)

    def wait(self, work: Any) -> None:
        """Inside a `work`: wait for one of torch's collectives. Raises LostRank."""
        with waiting("other shards of the vocabulary"):
            joined(work, self.timeout, self.device)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Inside a `work`: broadcast from the rank `root`."""
        source = dist.get_global_rank(self.group, root)
        self.wait(dist.broadcast(tensor, source, group=self.group, async_op=True))

    def sum(self, tensor: Tensor, root: int) -> None:
        """Inside a `work`: sum over all ranks, on the rank `root`."""
        destination = dist.get_global_rank(self.group, root)
        self.wait(dist.reduce(tensor, destination, group=self.group, async_op=True))


class VocabularyShard(Part):
    """This rank's shard and its microbatches. side: its collectives. share: the weight of a microbatch in the step's loss
    (1/m). training: a backward follows; else nothing is kept for one, S computes no input gradient, and VR exchanges only
    statistics, as with two barriers."""

    name = "vocabulary"
    no_ahead = "the vocabulary is sharded: forwards alone would wait for its collectives"
    no_outputs = (
        "the vocabulary is sharded, so no rank has all logits: load a checkpoint into a pipeline whose last stage has it"
    )

    def __init__(self, shard: Shard, side: Collectives, share: float, training: bool = True) -> None:
        self.shard, self.side, self.share, self.training = shard, side, share, training
        self.homes, self.output, self.embedding = shard.homes, shard.output, shard.embedding
        self.barriers = shard.homes.barriers if training else 2
        self._given: dict[int, Tensor] = {}  # the last stage's outputs, until they are broadcast
        self._form: dict[int, tuple[torch.Size, torch.dtype, bool]] = {}
        self._hidden: dict[int, Tensor] = {}
        self._kept: dict[int, Kept] = {}
        self._merged: dict[int, Merged] = {}
        self._units: dict[int, float] = {}
        self._gradients: dict[int, Tensor] = {}
        self._vectors: dict[int, Tensor] = {}  # of the embedding, on the first stage's rank
        self._scattered: dict[int, Tensor | None] = {}  # and their gradients

    @classmethod
    def of(cls, c: Connecting) -> VocabularyShard | None:
        """The part of a rank, connected to the others; None where the vocabulary is whole. All ranks call this."""
        shard = c.made(Shard)
        if shard is None:
            return None
        if shard.embedding is not None and 0 in c.stages:
            c.stages[0].takes_batch = False
        collectives = Collectives.of(c.given.group, c.device, c.peers.timeout, c.hooks.emulated)
        return cls(shard, collectives, 1 / c.problem.microbatches)

    def around(self, kind: str, run: Run) -> Run:
        """The last stage's outputs and their gradients pass through the shards, and so do the first stage's inputs if the
        input embedding is sharded."""
        last = self.homes.stages - 1

        def forward(state: Any, action: Action, given: Any) -> Any:
            if embeds(action):
                vectors = self._vectors.pop(action.part).requires_grad_(self.embedding.weight.requires_grad)  # type: ignore[union-attr]
                given = state.data.inputs[action.part], vectors
            y = run(state, action, given)
            if action.stage != last:
                return y
            width = self.output.weight.shape[1]
            if not isinstance(y, Tensor) or y.shape[-1] != width:
                raise BadInput(f"its output is not one tensor (…, {width}), which a sharded output layer needs")
            self._given[action.part] = y

        def backward(state: Any, action: Action, given: Any) -> Any:
            if action.stage == last:
                gradient, (shape, dtype, needed) = self._gradients.pop(action.part), self._form.pop(action.part)
                given = [gradient.to(dtype).view(shape)] if needed else []
            gradients = run(state, action, given)
            if embeds(action) and gradients:
                self._scattered[action.part] = gradients[0]
            return gradients

        def embeds(action: Action) -> bool:
            return action.stage == 0 and self.embedding is not None

        return {"F": forward, "B": backward, "BW": backward}.get(kind, run)

    def for_forwards(self, stages: Any = None) -> VocabularyShard:
        return VocabularyShard(self.shard, self.side.in_real_time(), self.share, training=False)

    def begin(self, data: Any) -> None:
        self.side.begin_step(self.marks)

    def own_parameters(self) -> dict[int, list[tuple[str, nn.Parameter]]]:
        """Shards are numbered after the model's stages, one for each rank."""
        return {self.homes.stages + self.homes.rank: self._named_parameters()}

    def break_off(self) -> None:
        break_off_groups([self.side.group], self.side.device)

    def broadcast(self, state: RankState, action: Action) -> None:
        """VB: broadcast the last stage's hidden states. Raises BadInput where labels do not fit."""
        m, root, labels = action.part, self.homes.last(action.part), state.data.targets[action.part]
        weight, dtype = self.output.weight, compute_type(self.output.weight)
        if root == self.homes.rank:
            given = self._given.pop(m)
            if self.training:
                self._form[m] = given.shape, given.dtype, given.requires_grad
            if labels.numel() != given.shape[:-1].numel():
                raise BadInput(f"labels {tuple(labels.shape)} do not fit hidden states {tuple(given.shape)}")
            hidden = given.detach().reshape(-1, weight.shape[1]).to(dtype)
        else:
            hidden = torch.empty(labels.numel(), weight.shape[1], dtype=dtype, device=weight.device)
        self._hidden[m] = hidden
        self.side.begin(action.name, partial(self.side.broadcast, hidden, root))

    def scores(self, state: RankState, action: Action) -> None:
        """S. Raises BadInput."""
        m, data = action.part, state.data
        kept = self._kept[m] = pass_s(self.output, self._hidden.pop(m), data.targets[m], self.barriers)
        if not self.training:
            kept.drop()
        self._units[m] = data.share(m) * data.scale * self.share

    def merge(self, state: RankState, action: Action) -> None:
        """VR: exchange statistics between shards; with one barrier also sum the input gradient. The last stage's
        rank gets the loss."""
        m, root, share = action.part, self.homes.last(action.part), state.data.share(action.part)
        kept, part, slope = self._kept[m], self._kept[m].partial, self._kept[m].partial_slope

        def work() -> None:
            everything = kept.statistics.new_empty(self.homes.size, *kept.statistics.shape)
            rows = list(everything.unbind())
            self.side.wait(dist.all_gather(rows, kept.statistics, group=self.side.group, async_op=True))
            self._merged[m] = merge(self.output, kept, everything, self._units[m])
            if part is not None:
                part.copy_(input_gradient(self.output, kept, self._merged[m]).view(part.shape))
                self.side.sum(part, root)

        def over() -> None:
            nonlocal part, slope
            if root == self.homes.rank:
                loss = self._merged[m].loss
                state.losses.append(loss if share == 1 else share_of_loss(loss, share))
                if part is not None:
                    self._gradients[m] = part
            part = slope = None  # not earlier: another stream may still read them
            if not self.training:
                self._taken(m)

        self.side.begin(action.name, work, over)

    def weights(self, state: RankState, action: Action) -> None:
        """T: add to the gradients of the shard's parameters."""
        gradient = pass_t(self.output, *self._taken(action.part), self.barriers)
        if gradient is not None:
            self._gradients[action.part] = gradient

    def input_gradient(self, state: RankState, action: Action) -> None:
        """VG: sum the shards' input gradients on the last stage's rank."""
        m, root = action.part, self.homes.last(action.part)
        gradient = self._gradients.pop(m)

        def over() -> None:
            nonlocal gradient
            if root == self.homes.rank:
                self._gradients[m] = gradient
            del gradient

        self.side.begin(action.name, partial(self.side.sum, gradient, root), over, waits=root == self.homes.rank)

    def look_up(self, state: RankState, action: Action) -> None:
        """VE: sum the shards' look-ups on the first stage's rank."""
        shard, m, root = self.embedding, action.part, self.homes.first(action.part)
        tokens = tokens_of(state.data.inputs[m])
        assert shard is not None
        if root == self.homes.rank:
            self._vectors[m] = shard.weight.new_empty(*tokens.shape, shard.weight.shape[1], requires_grad=False)
        target = self._vectors.get(m)

        def work() -> None:
            vectors = look_up(shard, tokens)
            self.side.sum(vectors if target is None else target.copy_(vectors), root)

        self.side.begin(action.name, work)

    def scatter(self, state: RankState, action: Action) -> None:
        """VS: broadcast the gradient of the vectors from the first stage's rank; all shards add it to their rows'."""
        shard, m, root = self.embedding, action.part, self.homes.first(action.part)
        tokens = tokens_of(state.data.inputs[m])
        assert shard is not None
        if not shard.weight.requires_grad:
            self.side.begin(action.name, lambda: None)
            return
        shape = *tokens.shape, shard.weight.shape[1]
        sent = list[Tensor]()
        if root == self.homes.rank:
            gradient = self._scattered.pop(m)  # None: no layer used the vectors
            given = shard.weight.new_zeros(shape, requires_grad=False) if gradient is None else gradient
            sent.append(given.to(shard.weight.dtype).contiguous())

        def work() -> None:
            if not sent:
                sent.append(shard.weight.new_empty(shape, requires_grad=False))
            self.side.broadcast(sent[0], root)

        self.side.begin(action.name, work, lambda: add_gradient(shard, tokens, sent.pop()))

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All trained parameters of the shard, with their names."""
        pairs = [("vocabulary weight", self.output.weight), ("vocabulary bias", self.output.bias)]
        if self.embedding is not None and self.embedding.weight is not self.output.weight:
            pairs.append(("vocabulary embedding", self.embedding.weight))
        return [(name, p) for name, p in pairs if p is not None and p.requires_grad]

    def _taken(self, microbatch: int) -> tuple[Kept, Merged]:
        """Remove and return the results of S and VR for a microbatch."""
        del self._units[microbatch]
        return self._kept.pop(microbatch), self._merged.pop(microbatch)


def _check(graph: Graph, rows: Ints) -> None:
    if graph.problem.round:
        raise BadInput(f"pass {graph.one(rows[0]).name}: run does not know updates in a step whose vocabulary is sharded")


def _handler(method: Callable[[VocabularyShard, RankState, Action], None], *orders: str, **more: Any) -> Handler:
    """A handler that calls the part's method."""

    def run(state: RankState, action: Action, given: Any) -> None:
        method(state.part(VocabularyShard), state, action)

    return Handler(run, _check, orders=orders, alone=True, in_parts=True, **more)


_SIDE = side_work_of(VocabularyShard)
HANDLERS = {
    "VB": _handler(VocabularyShard.broadcast, reads="targets", **_SIDE),
    "S": _handler(VocabularyShard.scores, "VB S", reads="targets", makes="its scores"),
    "VR": _handler(VocabularyShard.merge, "S VR", **_SIDE),
    "T": _handler(VocabularyShard.weights, "S T", "VR T", "VB T", adds_gradients=True),
    "VG": _handler(VocabularyShard.input_gradient, "T VG", **_SIDE),
    "VE": _handler(VocabularyShard.look_up, reads="inputs", **_SIDE),
    "VS": _handler(VocabularyShard.scatter, reads="inputs", **_SIDE),
}
