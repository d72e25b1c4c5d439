"""One rank's shard of a vocabulary: what its passes make of each microbatch, and what they send to the other shards.

The last stage's rank broadcasts hidden states and gets the sum of the shards' input gradients. Statistics of labels go from
each shard to all. Where the input embedding is sharded too, the first stage's rank gets the sum of the shards' look-ups, and
broadcasts its gradient. Sums are made in the type of what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...tables import Ints
from ...util.errors import BadInput
from ..base.handler import Graph, Handler
from ..base.part import Part, RankState, Run, share_of_loss
from ..base.program import Action
from ..connecting import Connecting
from .collectives import Collectives, Homes
from .parts import EmbeddingShard, Shard, add_gradient, look_up, tokens_of
from .shard import Kept, Merged, OutputShard, input_gradient, merge, pass_s, pass_t


def used_here(tensors: Iterable[Tensor]) -> None:
    """Tensors that another stream made are used by the current one, too, so their memory waits for it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class VocabularyShard(Part):
    """This rank's shard and its microbatches. output: the rows of the output layer; embedding: of the input embedding, where
    that is sharded. share: a microbatch's part of the step's loss (1/m). training: a backward follows; else nothing is kept
    for one."""

    name = "vocabulary"
    no_ahead = "the vocabulary is sharded: forwards alone would wait for its collectives"

    def __init__(
        self,
        homes: Homes,
        output: OutputShard,
        embedding: EmbeddingShard | None,
        collectives: Collectives,
        share: float,
        training: bool = True,
    ) -> None:
        self.homes, self.output, self.embedding, self.collectives, self.share = homes, output, embedding, collectives, share
        self.training = training
        self._given: dict[int, Tensor] = {}  # the last stage's outputs, until they are broadcast
        self._form: dict[int, tuple[torch.Size, torch.dtype, bool]] = {}
        self._hidden: dict[int, Tensor] = {}
        self._kept: dict[int, Kept] = {}
        self._merged: dict[int, Merged] = {}
        self._units: dict[int, float] = {}
        self._gradients: dict[int, Tensor] = {}
        self._vectors: dict[int, Tensor] = {}  # the embedding's, of the first stage's rank
        self._scattered: dict[int, Tensor] = {}  # and their gradients

    @classmethod
    def of(cls, c: Connecting) -> VocabularyShard | None:
        """The part of a rank, connected to the others; None where the vocabulary is whole. All ranks call this."""
        shard = c.made(Shard)
        if shard is None:
            return None
        collectives = Collectives.of(c.group, c.device, c.peers.timeout, c.hooks.emulated)
        found = cls(shard.homes, shard.output, shard.embedding, collectives, 1 / c.problem.microbatches)
        if found.embeds(0) and 0 in c.stages:
            c.stages[0].takes_batch = False
        return found

    def around(self, kind: str, run: Run) -> Run:
        """The last stage's outputs and their gradients go through the shards, as do the first stage's inputs where the input
        embedding is sharded too."""

        def forward(state: Any, action: Action, given: Any) -> Any:
            if self.embeds(action.stage):
                given = state.data.inputs[action.part], self.embedded(action.part)
            y = run(state, action, given)
            if not self.ends(action.stage):
                return y
            self.give(action.part, y)

        def backward(state: Any, action: Action, given: Any) -> Any:
            if self.ends(action.stage):
                given = self.gradient(action.part)
            found = run(state, action, given)
            if self.embeds(action.stage):
                self.give_gradient(action.part, found)
            return found

        return {"F": forward, "B": backward, "BW": backward}.get(kind, run)

    def for_forwards(self, stages: Any = None) -> VocabularyShard:
        """The same shard for forwards alone. S leaves the input gradient out, and VR tells statistics alone, as both do with
        two barriers."""
        homes, collectives = replace(self.homes, barriers=2), self.collectives.in_real_time()
        return VocabularyShard(homes, self.output, self.embedding, collectives, self.share, training=False)

    def begin(self, data: Any) -> None:
        """A step begins."""
        self.collectives.begin_step()
        self.collectives.marks = self.marks

    def no_activations(self) -> Iterable[Tensor | None]:
        """Gradients of the shard's parameters."""
        return (p.grad for p in self.parameters())

    def own_parameters(self) -> dict[int, list[tuple[str, nn.Parameter]]]:
        """Behind the model's stages come shards, one a rank."""
        return {self.homes.stages + self.homes.rank: self.named_parameters()}

    def break_off(self) -> None:
        """End this rank's connections."""
        self.collectives.break_off()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter of the shard that is trained, with its name."""
        pairs = [("vocabulary weight", self.output.weight), ("vocabulary bias", self.output.bias)]
        if self.embedding is not None and self.embedding.weight is not self.output.weight:
            pairs.append(("vocabulary embedding", self.embedding.weight))
        return [(name, p) for name, p in pairs if p is not None and p.requires_grad]

    def parameters(self) -> list[nn.Parameter]:
        """The same without names."""
        return [p for _, p in self.named_parameters()]

    def ends(self, stage: int) -> bool:
        """Is it the model's last stage, whose outputs are the hidden states?"""
        return stage == self.homes.stages - 1

    def give(self, microbatch: int, hidden: Any) -> None:
        """The last stage's F: its output. Raises BadInput where that is not one tensor of the output layer's width."""
        width = self.output.weight.shape[1]
        if not isinstance(hidden, Tensor) or hidden.shape[-1] != width:
            raise BadInput(f"its output is not one tensor (…, {width}), which a sharded output layer needs")
        self._given[microbatch] = hidden

    def gradient(self, microbatch: int) -> list[Tensor | None]:
        """The gradient of that output, behind VR or VG; [] where it needs none."""
        found, (shape, kind, needed) = self._gradients.pop(microbatch), self._form.pop(microbatch)
        return [found.to(kind).view(shape)] if needed else []

    def broadcast(self, action: Action, labels: Tensor) -> None:
        """VB: hidden states of the last stage's rank to all. Raises BadInput where labels do not fit."""
        m, root = action.part, self.homes.last(action.part)
        weight, kind = self.output.weight, self._kind()
        if root == self.homes.rank:
            given = self._given.pop(m)
            if self.training:
                self._form[m] = given.shape, given.dtype, given.requires_grad
            if labels.numel() != given.shape[:-1].numel():
                raise BadInput(f"labels {tuple(labels.shape)} do not fit hidden states {tuple(given.shape)}")
            hidden = given.detach().reshape(-1, weight.shape[1]).to(kind)
        else:
            hidden = torch.empty(labels.numel(), weight.shape[1], dtype=kind, device=weight.device)
        self._hidden[m] = hidden
        self._begin(action, partial(self._broadcast, hidden, root))

    def scores(self, microbatch: int, labels: Tensor, weight: float) -> None:
        """S. weight: what the microbatch's loss counts, by the mean microbatch's, and is scaled by. Raises BadInput."""
        hidden = self._hidden.pop(microbatch)
        kept = self._kept[microbatch] = pass_s(self.output, hidden, labels, self.homes.barriers)
        if not self.training:
            kept.drop()
        self._units[microbatch] = weight * self.share

    def merge(self, action: Action, made: Callable[[Tensor], None]) -> None:
        """VR: all that a shard must hear of the others, and with one barrier the sum of the input gradient. made: gets the
        loss, on the last stage's rank."""
        m, root = action.part, self.homes.last(action.part)
        kept, part = self._kept[m], self._kept[m].partial

        def work() -> None:
            everything = kept.statistics.new_empty(self.homes.size, *kept.statistics.shape)
            group = self.collectives.group
            sent = dist.all_gather(list(everything.unbind()), kept.statistics, group=group, async_op=True)
            self.collectives.wait(sent)
            self._merged[m] = merge(self.output, kept, everything, self._units[m])
            if part is not None:
                used_here([] if kept.partial_slope is None else [kept.partial_slope])  # it goes before this is done
                part.copy_(input_gradient(self.output, kept, self._merged[m]).view(part.shape))
                self._sum(part, root)

        def over() -> None:
            nonlocal part
            used_here(self._merged[m])
            if root == self.homes.rank:
                made(self._merged[m].loss)
                if part is not None:
                    self._gradients[m] = part
            part = None
            if not self.training:
                self._merged_microbatch(m)

        self._begin(action, work, over)

    def weights(self, microbatch: int) -> None:
        """T: adds to the gradients of the shard's parameters."""
        kept, merged = self._merged_microbatch(microbatch)
        found = pass_t(self.output, kept, merged, self.homes.barriers)
        if found is not None:
            self._gradients[microbatch] = found

    def input_gradient(self, action: Action) -> None:
        """VG: the sum of the shards' input gradients, to the last stage's rank."""
        m, root = action.part, self.homes.last(action.part)
        found = self._gradients.pop(m)

        def over() -> None:
            nonlocal found
            if root == self.homes.rank:
                self._gradients[m] = found
            del found

        self._begin(action, partial(self._sum, found, root), over, waits=root == self.homes.rank)

    def embeds(self, stage: int) -> bool:
        """Is it the model's first stage, and takes the embedding's vectors from here?"""
        return stage == 0 and self.embedding is not None

    def embedded(self, microbatch: int) -> Tensor:
        """The vectors of a microbatch, behind VE, on the first stage's rank."""
        assert self.embedding is not None
        return self._vectors.pop(microbatch).requires_grad_(self.embedding.weight.requires_grad)

    def give_gradient(self, microbatch: int, gradients: Sequence[Tensor]) -> None:
        """The first stage's backward: the gradient of those vectors, or nothing where they need none."""
        if gradients:
            self._scattered[microbatch] = gradients[0]

    def look_up(self, action: Action, tokens: Tensor) -> None:
        """VE: the sum of the shards' look-ups, to the first stage's rank."""
        shard, m, root = self.embedding, action.part, self.homes.first(action.part)
        assert shard is not None
        if root == self.homes.rank:
            self._vectors[m] = shard.weight.new_empty(*tokens.shape, shard.weight.shape[1], requires_grad=False)
        target = self._vectors.get(m)

        def work() -> None:
            found = look_up(shard, tokens)
            if target is not None:
                found = target.copy_(found)
            self._sum(found, root)

        self._begin(action, work)

    def scatter(self, action: Action, tokens: Tensor) -> None:
        """VS: the gradient of the vectors from the first stage's rank to all, which add it to their rows'."""
        shard, m, root = self.embedding, action.part, self.homes.first(action.part)
        assert shard is not None
        if not shard.weight.requires_grad:
            self._begin(action, lambda: None)
            return
        sent = [self._scattered.pop(m)] if root == self.homes.rank else []
        shape = *tokens.shape, shard.weight.shape[1]

        def work() -> None:
            if not sent:
                sent.append(shard.weight.new_empty(shape, requires_grad=False))
            given, sent[0] = sent[0], sent[0].to(shard.weight.dtype).contiguous()
            if sent[0] is not given:
                used_here([given])
            self._broadcast(sent[0], root)

        def over() -> None:
            add_gradient(shard, tokens, sent.pop())

        self._begin(action, work, over)

    def _merged_microbatch(self, microbatch: int) -> tuple[Kept, Merged]:
        """What S and VR made of it, once."""
        del self._units[microbatch]
        return self._kept.pop(microbatch), self._merged.pop(microbatch)

    def _kind(self) -> torch.dtype:
        """The type of hidden states on their way: that in which the output layer multiplies."""
        weight = self.output.weight
        if torch.is_autocast_enabled(weight.device.type) and weight.dtype != torch.float64:
            return torch.get_autocast_dtype(weight.device.type)
        return weight.dtype

    def _begin(
        self, action: Action, work: Callable[[], None], over: Callable[[], None] = lambda: None, waits: bool = True
    ) -> None:
        self.collectives.begin(action.name, work, over, waits)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        group, source = self.collectives.group, self.collectives.root(root)
        self.collectives.wait(dist.broadcast(tensor, source, group=group, async_op=True))

    def _sum(self, tensor: Tensor, root: int) -> None:
        group, destination = self.collectives.group, self.collectives.root(root)
        self.collectives.wait(dist.reduce(tensor, destination, group=group, async_op=True))


def _shard(state: RankState) -> VocabularyShard:
    return state.part(VocabularyShard)


def _broadcast(state: RankState, action: Action, given: Any) -> Any:
    _shard(state).broadcast(action, state.data.targets[action.part])


def _scores(state: RankState, action: Action, given: Any) -> Any:
    m, data = action.part, state.data
    _shard(state).scores(m, data.targets[m], data.share(m) * data.scale)


def _merge(state: RankState, action: Action, given: Any) -> Any:
    share = state.data.share(action.part)

    def made(loss: Any) -> None:
        state.losses.append(loss if share == 1 else share_of_loss(loss, share))

    _shard(state).merge(action, made)


def _weights(state: RankState, action: Action, given: Any) -> Any:
    _shard(state).weights(action.part)


def _embedded(state: RankState, action: Action, given: Any) -> Any:
    _shard(state).look_up(action, tokens_of(state.data.inputs[action.part]))


def _embedding_gradient(state: RankState, action: Action, given: Any) -> Any:
    _shard(state).scatter(action, tokens_of(state.data.inputs[action.part]))


def _settle(state: RankState, name: str, sure: bool) -> None:
    _shard(state).collectives.settle(name, sure)


def _ended(state: RankState, action: Action) -> Any:
    return _shard(state).collectives.ended(action.name)


def _check(*before: str) -> Any:
    """A pass is behind those of these kinds of its shard, and on its rank; and no update of weights is in the step."""

    def check(graph: Graph, rows: Ints) -> None:
        for row in rows.tolist():
            one = graph.one(row)
            if graph.problem.round:
                raise BadInput(f"pass {one.name}: run does not know updates in a step whose vocabulary is sharded")
            for kind in before:
                other = graph.need(kind, one)
                if not graph.ordered(other, row):
                    raise BadInput(f"pass {one.name}: no edge orders it behind {graph.problem.names[other]}")
                if graph.one(other).rank != one.rank:
                    raise BadInput(f"pass {one.name}: {graph.problem.names[other]} is on another rank")

    return check


def _collective(run: Any, check: Any, does: str, reads: str = "") -> Handler:
    return Handler(run, check, reads=reads, does=does, settle=_settle, ended=_ended, sliced=True)


HANDLERS = {
    "VB": _collective(_broadcast, _check(), "broadcast", reads="targets"),
    "S": Handler(_scores, _check("VB"), reads="targets", makes="its scores", sliced=True),
    "VR": _collective(_merge, _check("S"), "merge"),
    "T": Handler(_weights, _check("S", "VR", "VB"), adds_gradients=True, sliced=True),
    "VG": _collective(lambda state, action, _: _shard(state).input_gradient(action), _check("T"), "sum"),
    "VE": _collective(_embedded, _check(), "embedding", reads="inputs"),
    "VS": _collective(_embedding_gradient, _check(), "embedding", reads="inputs"),
}
