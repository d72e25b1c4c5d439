"""Splits a model's output layer, loss and input embedding from it for sharding, with the executor's own functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.vocabulary.loss import embedding_of, recognised
from zbsolve.exec.vocabulary.parts import EmbeddingShard, add_gradient, look_up, tokens_of, without_embedding, without_output
from zbsolve.exec.vocabulary.shard import Merged, OutputShard, blocks, input_gradient, merge, pass_s, pass_t, shard_rows
from zbsolve.models.losses import CrossEntropy
from zbsolve.models.model import Model
from zbsolve.util.errors import BadInput

from .dataflow import Flow, example
from .stage_rounds import built

RANKS = (2, 4, 8, 16, 32, 64)  # for which shards are examined
Around = Callable[[str, Callable[[], Any]], Any]  # runs a pass of this name, possibly with other work before and after


class Rest(NamedTuple):
    """The rest of a layer. stage: runs it, as an inner one; given: its input. number: the layer's."""

    stage: Stage
    given: Any
    number: int

    @property
    def parameter_bytes(self) -> int:
        """Bytes of its parameters, trained or not."""
        return sum(p.nbytes for layer in self.stage.layers for p in layer.parameters())


@dataclass(frozen=True)
class Cut:
    """The parts of a model that a sharded vocabulary replaces. loss: of logits. weight (V, h), bias (V,) or None: of the
    output layer. table, scale: the input embedding's rows, (V, h), if it is sharded, and the factor of its vectors; tied:
    these rows are the output's weight. rests: the rest of the last layer and, with a table, of the first. hidden: last
    hidden states of a microbatch, (…, h); tokens, labels: of that microbatch (tokens with a table). ranks: numbers of shards
    that are examined."""

    loss: CrossEntropy
    weight: nn.Parameter
    bias: nn.Parameter | None
    table: nn.Parameter | None
    scale: float
    tied: bool
    rests: tuple[Rest, ...]
    hidden: Tensor
    tokens: Any
    labels: Tensor
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """V."""
        return int(self.weight.shape[0])

    def output(self, ranks: int, rows: Callable[[Tensor], Iterator[slice]] = blocks) -> OutputShard:
        """The largest shard of the output layer, with its own parameters and gradients. rows: yields blocks of logits for
        S."""
        bias = None if self.bias is None else self._shard(self.bias, ranks)
        return OutputShard(self._shard(self.weight, ranks), bias, 0, self.size, self.loss, rows)

    def embedding(self, ranks: int) -> EmbeddingShard | None:
        """The largest shard of the embedding, likewise, if that is sharded."""
        return None if self.table is None else EmbeddingShard(self._shard(self.table, ranks), 0, self.size, scale=self.scale)

    def parameter_bytes(self, ranks: int, *, frozen: bool = False) -> int:
        """Bytes of a shard's parameters; `frozen`: of those that are not trained."""
        own = [tensor for tensor in (self.weight, self.bias, None if self.tied else self.table) if tensor is not None]
        rows = len(shard_rows(self.size, ranks, 0))
        return sum(parameter.nbytes // self.size * rows for parameter in own if not (frozen and parameter.requires_grad))

    def _shard(self, parameter: nn.Parameter, ranks: int) -> nn.Parameter:
        part = parameter.detach()[: len(shard_rows(self.size, ranks, 0))].clone()
        shard = nn.Parameter(part, requires_grad=parameter.requires_grad)
        shard.grad = torch.zeros_like(shard) if shard.requires_grad else None
        return shard


def cut_of(model: Model, through: Flow, batch: tuple[Any, Any], make: Callable[..., Tensor] = torch.empty) -> Cut:
    """The vocabulary of `model`, whose first and last layers are built here, on the batch's device. make: creates a tensor's
    values (see `example`). Raises BadInput if the output layer or the loss cannot be sharded."""
    last = len(model.layers) - 1
    if through.sides:
        raise BadInput("side inputs do not go with a sharded vocabulary yet")
    if not last:
        raise BadInput("layer 0: a model of one layer has no vocabulary to shard")
    inputs, labels = batch
    if not isinstance(labels, Tensor):
        raise BadInput("the labels of a batch are not one tensor")
    device = labels.device
    first, end = built(model, [0, last], device)
    path, loss = recognised(end, model.loss, last)
    output: Any = end.get_submodule(path)
    embedding = _table(first, output)
    rests = [Rest(Stage([without_output(end, path)], last), example(through.inputs[last], make, device), last)]
    table, scale, tokens = None, 1.0, None
    if embedding is not None:
        (table_path, scale), tokens = embedding, tokens_of(inputs)
        table = first.get_parameter(_weight(table_path))
        vectors = make((*tokens.shape, table.shape[1]), device=device).to(table.dtype).requires_grad_()
        # An inner stage, since the embedding's vectors need a gradient.
        rests.append(Rest(Stage([without_embedding(first, table_path)], 1), (inputs, vectors), 0))
    tied = table is not None and table is output.weight
    if not tied and any((last, _weight(path)) in map(tuple, group) for group in model.tied):
        raise BadInput(f"layer {last}: its output layer is tied to what is no input embedding")
    hidden = make((*labels.shape, output.in_features), device=device).to(output.weight.dtype)
    ranks = tuple(rank for rank in RANKS if rank <= output.out_features)
    return Cut(loss, output.weight, output.bias, table, scale, tied, tuple(rests), hidden, tokens, labels, ranks)


def _weight(path: str) -> str:
    return f"{path}.weight" if path else "weight"


def _table(first: nn.Module, output: nn.Linear) -> tuple[str, float] | None:
    """The name of the input embedding inside the first layer, and the factor of its vectors, if it can be sharded together
    with the output layer."""
    try:
        path, scale = embedding_of(first, 0)
    except BadInput:
        return None
    return (path, scale) if first.get_parameter(_weight(path)).shape[0] == output.out_features else None


def run_shard(output: OutputShard, hidden: Tensor, labels: Tensor, ranks: int, barriers: int, around: Around) -> None:
    """S, the shard's own work at the barrier ("merge"), and T of one microbatch, in order. ranks: the number of shards in
    total, for which this one is representative."""
    kept = around("S", lambda: pass_s(output, hidden, labels, barriers))

    def barrier() -> Merged:
        total = merge(output, kept, kept.statistics.expand(ranks, *kept.statistics.shape))
        if barriers == 1:
            input_gradient(output, kept, total)
        return total

    merged = around("merge", barrier)
    around("T", lambda: pass_t(output, kept, merged, barriers))


def run_table(shard: EmbeddingShard, tokens: Tensor, around: Around) -> None:
    """The embedding look-up of one microbatch ("VE"), and the gradient of the shard's rows ("VS")."""
    vectors = around("VE", lambda: look_up(shard, tokens))
    around("VS", lambda: add_gradient(shard, tokens, vectors))
