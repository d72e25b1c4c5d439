"""From a model's layers to one rank's shard of its vocabulary: rows of the output layer and of the embedding are cut out,
and each rank looks up the tokens in its rows (arXiv 2411.05288, section 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...build.vocabulary import barriers_of
from ...models.model import Place
from ...problem import Problem
from ...util.errors import BadInput
from ..backward.deferral import accumulate
from ..base.values import Layout, full
from ..connecting import Given, Own, Whole
from .loss import embedding_of, recognised
from .shard import OutputShard, readable, shard_rows

NAMES = ("input_ids", "ids", "tokens")  # keys of the tokens in a batch that is a dict


class EmbeddingShard(NamedTuple):
    """Rows first … first + w − 1 of an embedding of `vocabulary` rows: weight (w, h), which may also be an output shard's.
    padding: the token whose row gets no gradient. scale: factor of its vectors, in the weight's dtype (√h in Gemma)."""

    weight: nn.Parameter
    first: int
    vocabulary: int
    padding: int | None = None
    scale: float = 1.0


def tokens_of(inputs: Any) -> Tensor:
    """A microbatch's tokens: its input, or an entry of it if that is a dict. Raises BadInput."""
    tokens = inputs
    if isinstance(inputs, Mapping):
        tokens = next((inputs[name] for name in NAMES if name in inputs), None)
    if not isinstance(tokens, Tensor):
        keys = f" with {', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else ""
        names = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"
        raise BadInput(
            f"inputs: a sharded embedding takes a tensor of tokens, or a dict with one as {names}, "
            f"not a {type(inputs).__name__}{keys}"
        )
    return tokens


def look_up(shard: EmbeddingShard, tokens: Tensor) -> Tensor:
    """tokens (…), integers → vectors (…, h) in the weight's dtype, zeros where a token is in another shard. It keeps
    nothing, and allocates its result and one temporary tensor of that size. Raises BadInput for a token outside of the
    vocabulary; on a GPU its vector is NaN instead, so that nothing waits for the device."""
    wrong = (tokens < 0) | (tokens >= shard.vocabulary)
    if readable(tokens) and wrong.any():
        raise BadInput(f"tokens: {int(tokens[wrong][0])} is not in a vocabulary of {shard.vocabulary} words")
    with torch.no_grad():
        width = shard.weight.shape[0]
        local = tokens - shard.first
        here = (local >= 0) & (local < width)
        if not width:
            vectors = shard.weight.new_zeros(*tokens.shape, shard.weight.shape[1])
        else:
            rows = shard.weight.index_select(0, local.clamp(0, width - 1).flatten())
            vectors = rows.view(*tokens.shape, -1).masked_fill_(~here[..., None], 0)
        if shard.scale != 1:
            vectors.mul_(shard.scale)
        return vectors.masked_fill_(wrong[..., None], torch.nan)


def add_gradient(shard: EmbeddingShard, tokens: Tensor, gradient: Tensor) -> None:
    """Add the gradient of the shard's rows to `.grad`. gradient: of the whole embedding's output, (…, h), the same on all
    shards. Allocates another gradient of the weight's size meanwhile, as autograd does."""
    if not shard.weight.requires_grad:
        return
    with torch.no_grad():
        width = shard.weight.shape[0]
        local = tokens - shard.first
        outside = (local < 0) | (local >= width)
        if shard.padding is not None:
            outside |= tokens == shard.padding
        # A further row stands for all tokens outside, and is the padding row, which the kernel leaves out.
        index = local.masked_fill(outside, width)
        gradient = gradient.to(shard.weight.dtype)
        if shard.scale != 1:
            gradient = gradient * shard.scale
        made = torch.ops.aten.embedding_dense_backward(gradient, index, width + 1, width, False)
        accumulate(shard.weight, made[:width])


NAME = "vocabulary"  # of a shard among a rank's modules


class Homes(NamedTuple):
    """The ranks of a sharded vocabulary. rank, size: this one, and their number. stages: of the model. routes: see
    `Problem.routes`. barriers: 1 or 2 (algorithm 2 or 1)."""

    rank: int
    size: int
    stages: int
    routes: Sequence[Sequence[int]]
    barriers: int

    def last(self, microbatch: int) -> int:
        """The rank of the microbatch's last stage."""
        return self.routes[microbatch % len(self.routes)][self.stages - 1]

    def first(self, microbatch: int) -> int:
        """The rank of its first stage."""
        return self.routes[microbatch % len(self.routes)][0]


def sharded_layers(problem: Problem, count: int) -> list[int]:
    """The numbers of the layers, of `count`, of which every rank has a shard; [] where the vocabulary is not sharded."""
    if not barriers_of(problem):
        return []
    return sorted({count - 1, *([0] if "VE" in problem.passes.kinds else [])})


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's shard, taken out of a model. module: its parameters under names of their own; places: such a name → the
    parameter's places in the model; shapes: such a name → the shape of all rows."""

    homes: Homes
    output: OutputShard
    embedding: EmbeddingShard | None
    module: nn.Module
    places: Mapping[str, Sequence[Place]]
    shapes: Mapping[str, torch.Size]

    def has(self, group: Sequence[Place]) -> bool:
        """Is this group of places, which hold the same parameter, in the shard?"""
        return any(tuple(place) in own for own in self.places.values() for place in group)


def with_shard(own: Own, given: Given) -> Own:
    """`own` with this rank's shard of a vocabulary. It is cut out of the `sharded_layers`, including those that other ranks
    own; of the rank's own ones, the rest stays. Raises BadInput."""
    problem, names, last, layers = own.view.step, own.names, len(own.names) - 1, dict(own.layers)
    sharded = sharded_layers(problem, len(names))
    if not sharded:
        return own
    if given.mesh is not None and given.mesh.others:
        raise BadInput(f"mesh: a sharded vocabulary knows no dimension {given.mesh.others[0]}, only pp and those of data")
    if NAME in names:
        raise BadInput(f"layers: one is called '{NAME}', which is the name of a rank's shard")
    homes = Homes(own.program.rank, problem.ranks, problem.model_stages, problem.routes, barriers_of(problem))
    module = _Rows(homes.size, homes.rank, given.device)
    path, entropy = recognised(layers[last], given.loss, last)
    linear: Any = layers[last].get_submodule(path)
    first = module.cut("weight", linear.weight, (last, _inside(path, "weight")))
    if linear.bias is not None:
        module.cut("bias", linear.bias, (last, _inside(path, "bias")))
    output = OutputShard(module.weight, getattr(module, "bias", None), first, linear.out_features, entropy)
    embedding = _embedding(module, layers, own.tied) if 0 in sharded else None
    _check_tied(module.places, own.tied)
    layers[last] = without_output(layers[last], path)
    shard = Shard(homes, output, embedding, module, module.places, module.shapes)
    kept = {i: layer for i, layer in layers.items() if names[i] in own.module}
    whole = nn.ModuleDict({names[i]: layer for i, layer in kept.items()} | {NAME: module})
    tied = tuple(group for group in own.tied if not shard.has(group))
    made, known = {**own.made, Shard: shard}, WholeVocabulary(shard, names, given.group, given.device)
    return replace(own, layers=kept, module=whole, tied=tied, loss=None, made=made, whole=known)


class _Rows(nn.Module):
    """The rows of one rank of `ranks`, from some parameters of a model, as parameters."""

    weight: nn.Parameter

    def __init__(self, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__()
        self.ranks, self.rank, self.device = ranks, rank, device
        self.places: dict[str, list[Place]] = {}
        self.shapes: dict[str, torch.Size] = {}

    def cut(self, name: str, parameter: nn.Parameter, place: Place) -> int:
        """Cut the rows out of the parameter at `place`, as `name`. Returns the number of the first. Raises BadInput."""
        rows = shard_rows(len(parameter), self.ranks, self.rank)
        part = parameter.detach()[rows.start : rows.stop].to(self.device).clone()
        setattr(self, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        self.places[name], self.shapes[name] = [place], parameter.shape
        return rows.start


def _embedding(module: _Rows, layers: dict[int, nn.Module], tied: Sequence[Sequence[Place]]) -> EmbeddingShard:
    """The rank's rows of the embedding, which is removed from layer 0. If it is tied to the output layer, both have the same
    parameter. Raises BadInput."""
    path, scale = embedding_of(layers[0], 0)
    whole: Any = layers[0].get_submodule(path)
    place, (other,) = (0, _inside(path, "weight")), module.places["weight"]
    if any({place, other} <= {(i, name) for i, name in group} for group in tied):
        module.places["weight"] = [other, place]
        first = shard_rows(whole.num_embeddings, module.ranks, module.rank).start
        weight = module.weight
    else:
        first = module.cut("embedding", whole.weight, place)
        weight = module.get_parameter("embedding")
    layers[0] = without_embedding(layers[0], path)
    return EmbeddingShard(weight, first, whole.num_embeddings, whole.padding_idx, scale)


def _check_tied(places: Mapping[str, Sequence[Place]], tied: Sequence[Sequence[Place]]) -> None:
    """Raise BadInput where a sharded parameter is tied to one that is not sharded."""
    own = {place for group in places.values() for place in group}
    for group in ([(i, name) for i, name in pairs] for pairs in tied):
        here, others = own.intersection(group), sorted(set(group) - own)
        if here and others:
            (i, name), (j, other) = min(here), others[0]
            raise BadInput(
                f"layer {i}: its {name} is sharded over the vocabulary, but tied to layer {j}'s {other}, which is not: "
                "shard the input embedding too (passes VE and VS)"
            )


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Passing:
    """A tensor on its way around a removed part of a layer, while the layer's forward runs."""

    value: Tensor | None = None

    def taken(self) -> Tensor:
        """The tensor, once. Raises BadInput where there is none."""
        tensor, self.value = self.value, None
        if tensor is None:
            raise BadInput("its forward does not call its output layer or embedding once: a sharded vocabulary needs that")
        return tensor


class Standing(nn.Module):
    """Takes the place of an output layer: its input is the output of the whole layer. looks_up: of an embedding: it returns
    the vectors that are given with the tokens."""

    def __init__(self, passing: Passing, looks_up: bool = False) -> None:
        super().__init__()
        self._passing, self._looks_up = passing, looks_up

    def forward(self, x: Tensor) -> Tensor:
        if self._looks_up:
            return self._passing.taken().view(*x.shape, -1)
        self._passing.value = x
        return x


def without_output(layer: nn.Module, path: str) -> nn.Module:
    """A copy of `layer` with the same parameters that returns the input of its output layer at `path` ("": itself)."""
    if not path:
        return nn.Identity()
    passing, forward = Passing(), type(layer).forward

    def run(self: Any, x: Any) -> Tensor:
        forward(self, x)  # its result is not used
        return self._passing.taken()

    return _around(_copied(layer, path, Standing(passing)), run, passing)


def without_embedding(layer: nn.Module, path: str) -> nn.Module:
    """A copy of `layer` with the same parameters but without the embedding at `path` ("": itself). It takes (input, vectors)
    in place of the input."""
    passing = Passing()
    vectors = Standing(passing, looks_up=True)
    bare = _copied(layer, path, vectors) if path else nn.Sequential(vectors)
    forward = type(bare).forward

    def run(self: Any, given: tuple[Any, Tensor]) -> Any:
        inputs, self._passing.value = given
        return forward(self, inputs)

    return _around(bare, run, passing)


def _around(layer: nn.Module, forward: Any, passing: Passing) -> nn.Module:
    """The layer, in a class of its own with this forward. (Hooks would do, but graphs do not run them.)"""
    kind: Any = type(layer)
    layer._passing = passing  # type: ignore[assignment]
    layer.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return layer


def _copied(layer: nn.Module, path: str, other: nn.Module) -> nn.Module:
    """The layer with `other` at `path`. All its modules are new; parameters and buffers are the same."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
    return deepcopy(layer, memo | {id(layer.get_submodule(path)): other})


class WholeVocabulary(Whole):
    """Maps the parameters of a rank's shard. names: of all layers. group: the pipeline's process group."""

    def __init__(self, shard: Shard, names: Sequence[str], group: Any, device: torch.device) -> None:
        super().__init__({f"{NAME}.{own}": [f"{names[i]}.{path}" for i, path in at] for own, at in shard.places.items()})
        self.shard, self.group, self.device = shard, group, device

    @cached_property
    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group, self.device.type)

    def spread(self, name: str, part: Tensor) -> Any:
        from torch.distributed.tensor import Shard as Rows

        if name not in self.cut:
            return part
        own = self.cut[name].removeprefix(f"{NAME}.")
        if part.shape != self.shard.module.get_parameter(own).shape:
            raise BadInput(f"{name}, which is sharded, has another shape: {tuple(part.shape)}")
        return Layout(self._mesh, (Rows(0),), self.shard.shapes[own]).whole(part.detach())

    def values(self, what: Callable[[nn.Parameter], Tensor | None]) -> dict[Place, Tensor | None]:
        compared: dict[Place, Tensor | None] = {}
        for own, places in self.shard.places.items():
            name, *_ = self.keys[f"{NAME}.{own}"]
            if (p := self.shard.module.get_parameter(own)).requires_grad:
                part = what(p)
                compared |= dict.fromkeys(places, None if part is None else full(self.spread(name, part)))
        return compared
