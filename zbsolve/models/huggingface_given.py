"""Parts of a Hugging Face causal language model, made from its config: the model without decoder layers; the further
arguments of a decoder layer (positions, masks), and the part of these for a slice of the sequence; losses of routers."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..util.errors import BadInput
from .losses import OnTop, auxiliary_loss
from .model import in_eval_mode
from .published_models import typed
from .slicing import slice_offset


def causal_of(config: Any) -> Any:
    """The library's own model of a config, with random numbers."""
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    return build(config)


def without_layers(config: Any) -> Any:
    """The causal model with an empty list of layers. It is built with one layer, as some models divide by their number."""
    bare = copy.deepcopy(config)
    bare.num_hidden_layers = 1
    if bare.num_hidden_layers != 1:  # some configs compute it from the list of kinds
        _set_kind(bare, bare.layer_types[0])
    bare.output_router_logits = False  # without routers the model cannot compute their loss: `Balance` does
    causal = causal_of(bare)
    owner, name = owner_of(causal, 1)
    setattr(owner, name, nn.ModuleList())
    causal.config.num_hidden_layers = 0
    return causal


def inner_of(causal: Any) -> tuple[str, Any]:
    """(name, module) of the inner model, which computes hidden states. Some (Llama 4's) are not under their prefix."""
    if causal.base_model is not causal:
        return causal.base_model_prefix, causal.base_model
    inner = [(name, child) for name, child in causal.named_children() if hasattr(child, "get_input_embeddings")]
    if not inner:
        raise BadInput(f"hf: {type(causal).__name__} has no model inside")
    return inner[0]


def owner_of(causal: Any, count: int) -> tuple[nn.Module, str]:
    """The module that contains the list of decoder layers, and the list's name there. It is the outermost ModuleList with
    `count` modules. Raises BadInput."""
    for module in inner_of(causal)[1].modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name
    raise BadInput(f"hf: {type(causal).__name__} has no list of {count} layers")


def final_norm(causal: Any) -> tuple[nn.Module, str] | None:
    """(owner, name) of the norm after the last layer, found by its name in the module that contains the layers."""
    owner, _ = owner_of(causal, 0)
    names = [name for name, _ in owner.named_children() if "norm" in name or name == "ln_f"]
    return (owner, names[-1]) if names else None


def without_norm(causal: Any) -> Any:
    """A model without layers, with the identity in place of its last norm."""
    norm = final_norm(causal)
    if norm is not None:
        setattr(*norm, nn.Identity())
    return causal


def of_eight_words(config: Any) -> Any:
    """The config with a vocabulary of eight tokens: everything but the token weights stays as it is, and is made faster."""
    small = copy.deepcopy(config)
    small.vocab_size = 8
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        try:
            setattr(small, name, None)
        except Exception:  # the library's check: this config needs a token
            setattr(small, name, 7)
    return small


def check_all_run(config: Any) -> None:
    """Raise BadInput for a model that leaves layers out at random."""
    for name in ("encoder_layerdrop", "decoder_layerdrop", "layerdrop"):
        if getattr(config, name, 0):
            raise BadInput(f"hf: {name} leaves layers out at random: set it to 0")


class Sample(NamedTuple):
    """A microbatch: the number of sequences, their length in tokens, and the type that layers compute in."""

    batch: int
    length: int
    dtype: torch.dtype


class Given(NamedTuple):
    """Arguments of a layer beside its input. value: (positional, named) arguments. along: for each leaf of value, the
    dimensions along the sequence. batch: the number of sequences that they were made for."""

    value: Any
    along: tuple[tuple[int, ...], ...]
    batch: int


class Here(NamedTuple):
    """The tokens that a layer is called with: number of sequences, position of the first token, tokens of a sequence."""

    batch: int
    first: int
    length: int


def part_of(leaf: Tensor, along: tuple[int, ...], batch: int, here: Here) -> Tensor:
    """The part of a leaf (made for `batch` sequences) that the tokens `here` need. along: its dimensions along the sequence.
    Masks have two: the second, of keys, keeps all up to these tokens. Raises BadInput if the sequence is too short."""
    if 0 not in along and leaf.dim() > 1 and leaf.shape[0] == batch != here.batch:
        leaf = leaf[:1].expand(here.batch, *leaf.shape[1:])  # it is the same for all sequences: it does not depend on tokens
    if not along:
        return leaf
    length = leaf.shape[along[0]]
    if here.first + here.length > length:
        raise BadInput(f"hf: position {here.first + here.length - 1} of a sequence of {length} tokens")
    if here.length == length:
        return leaf
    for n, dimension in enumerate(along):
        first = 0 if n else here.first
        leaf = leaf.narrow(dimension, first, here.first + here.length - first)
    return leaf


class Answer:
    """Stands for the output of an inner model. It has the hidden states, by index 0 and by name; other fields are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, i: Any) -> Any:
        return self.last_hidden_state if i == 0 else ()

    def __getattr__(self, name: str) -> None:
        return None


class Held(nn.Module):
    """A layer that is called with the further arguments that its model gives it. These are in buffers; for a slice, or for
    a shorter sequence, the needed part is taken."""

    def __init__(self, layer: nn.Module, given: Given) -> None:
        super().__init__()
        self.layer = layer
        leaves, form = tree_flatten(given.value)
        self.numbers = tree_unflatten(list(range(len(leaves))), form)  # torch warns where a form is copied
        self.along, self.batch = given.along, given.batch
        self.fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.register_buffer(f"given{n}", leaf, persistent=False)

    def call(self, x: Tensor, others: Mapping[int, Any] = MappingProxyType({})) -> Any:
        """The layer's output. others: number of a leaf → value to use in its place."""
        here = Here(x.shape[0], slice_offset(), x.shape[1])
        args, kwargs = tree_map(lambda n: others[n] if n in others else self._leaf(n, here), self.numbers)
        return self.layer(x, *args, **kwargs)

    def _leaf(self, n: int, here: Here) -> Any:
        """The part of leaf n for these tokens."""
        leaf: Any = getattr(self, f"given{n}", self.fixed[n])
        return part_of(leaf, self.along[n], self.batch, here) if isinstance(leaf, Tensor) else leaf


Words = Mapping[str, str]


def words_of(layer: nn.Module) -> Words:
    """The layer's attributes that are strings, by name."""
    return {name: word for name, word in vars(layer).items() if isinstance(word, str) and not name.startswith("_")}


class Noted(Exception):
    """Raised by `Note`, with the arguments that it was called with."""


class Note(nn.Module):
    """Replaces a decoder layer, to record its arguments. It has the layer's string attributes: some models read a layer's
    `attention_type` or `block_type`."""

    def __init__(self, words: Words) -> None:
        super().__init__()
        self.__dict__.update(words)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Raises Noted."""
        raise Noted(args, kwargs, x)


Made = dict[tuple[str, Sample], Given]


def given_to(config: Any, i: int, layer: nn.Module, sample: Sample, known: Made | None = None, noting: Any = None) -> Given:
    """The further arguments of layer i. They are found by running a model with a small vocabulary, made from the config, or
    the model that noting(config, words) gives, with a note as its one layer. known: what was found for other layers."""
    known = _given if known is None else known
    small, words = of_eight_words(config), words_of(layer)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        _set_kind(small, kinds[i])
    if own := small.to_dict().get("per_layer_config"):  # settings that differ from layer to layer
        small.per_layer_config = {0: own.get(str(i), own.get(i, {}))}
    key = json.dumps([small.to_dict(), kinds and kinds[i], words, type(config).__name__], default=str), sample
    if key not in known:  # layers of the same kind get equal tensors
        with torch.random.fork_rng(devices=[]):
            known[key] = typed(lambda: _noted((noting or _with_note)(small, words), sample), sample.dtype)
    return known[key]


_given: Made = {}


def _set_kind(config: Any, kind: str) -> None:
    """Change the config to one layer of this kind. If kinds are a property (Jamba's), a subclass overrides it."""
    cls = type(config)
    name = getattr(cls, "attribute_map", {}).get("layer_types", "layer_types")
    if isinstance(getattr(cls, name, None), property):
        config.__class__ = type(cls.__name__, (cls,), {name: property(lambda self: [kind])})
    else:
        config.layer_types = [kind]


def _noted(causal: Any, sample: Sample) -> Given:
    check_all_run(causal.config)
    with in_eval_mode(causal):  # it may share modules with a user's model
        value, other = (_called_with(causal, sample.batch, sample.length, word)[:2] for word in (0, 1))
        if not all(map(_same, tree_leaves(value), tree_leaves(other))):
            raise BadInput(f"hf: layers of {type(causal).__name__} are given what depends on the tokens")
        shorter = _called_with(causal, sample.batch, sample.length - 1, 0)[:2] if sample.length > 1 else None
        _check_first(causal, sample.length)
    return Given(value, _along(value, shorter, sample.length), sample.batch)


def _check_first(causal: Any, length: int) -> None:
    """Raise BadInput if the first layer's input differs from what the model without layers passes to its norm: then the
    model does more than run its layers, for example with several streams of hidden states."""
    x = _called_with(causal, 1, length, 0)[2]
    owner, name = owner_of(causal, 1)
    setattr(owner, name, nn.ModuleList())
    causal.config.num_hidden_layers = 0
    with torch.no_grad():
        ids = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        y = inner_of(without_norm(causal))[1](input_ids=ids, use_cache=False)[0]
    if not _same(x, y):
        shapes = "" if x.shape == y.shape else f": {tuple(x.shape)}, not {tuple(y.shape)}"
        why = f"what they get is not what it makes of its words without them{shapes}"
        raise BadInput(f"hf: {type(causal).__name__} does more than its layers one after the other: {why}")


def _same(leaf: Any, other: Any) -> bool:
    return not isinstance(leaf, Tensor) or (leaf.shape == other.shape and bool(torch.allclose(leaf, other, equal_nan=True)))


def _with_note(config: Any, words: Words) -> Any:
    causal = without_layers(config)
    owner, name = owner_of(causal, 0)
    setattr(owner, name, nn.ModuleList([Note(words)]))
    causal.config.num_hidden_layers = 1
    return causal


def _called_with(causal: Any, batch: int, length: int, word: int) -> Any:
    """(positional, named) arguments of the first layer and its input, for sequences of one repeated token, `word`."""
    ids = torch.full((batch, length), word, device=next(causal.get_input_embeddings().parameters()).device)
    try:
        with torch.no_grad():
            inner_of(causal)[1](input_ids=ids, use_cache=False)
    except Noted as found:
        return found.args
    raise BadInput(f"hf: {type(causal).__name__} does not call its layers")


def _along(value: Any, shorter: Any, length: int) -> tuple[tuple[int, ...], ...]:
    """For each leaf, the dimensions along the sequence: those that are shorter for a sequence with one token less. If the
    shorter sequence has no such tensor (a mask that only long ones need): dimensions of size `length`."""
    rows, others = (tree_leaves(tree) for tree in (value, shorter))
    others = others if len(others) == len(rows) else [None] * len(rows)
    return tuple(_dimensions(leaf, other, length) for leaf, other in zip(rows, others, strict=True))


def _dimensions(leaf: Any, other: Any, length: int) -> tuple[int, ...]:
    if not isinstance(leaf, Tensor):
        return ()
    same = other.shape if isinstance(other, Tensor) and other.dim() == leaf.dim() else None
    sizes = enumerate(leaf.shape)
    return tuple(i for i, size in sizes if (size == length if same is None else size != same[i]))


Sums = dict[str, Tensor]

_listening: list[list[Tensor]] = []  # lists that collect routers' logits; the innermost `heard` is last


@dataclass(frozen=True)
class Balance:
    """The auxiliary loss that balances experts. kind: the class of routers. place: index of the logits in a router's output.
    experts: their number; chosen: the number that a token uses. weight: of the loss."""

    kind: Any
    place: int
    experts: int
    chosen: int
    weight: float

    def begun(self, hidden: Tensor) -> Sums:
        """The input of the first layer: hidden states, and sums of 0. The sums need gradients, as in all later layers."""
        zeros = torch.zeros(self.experts, device=hidden.device)
        return {"hidden": hidden, "assigned": zeros, "shares": zeros + hidden.flatten()[:0].sum().float()}

    def added(self, before: Sums, hidden: Tensor, logits: list[Tensor]) -> Sums:
        """The output of a layer: hidden states, and the sums with this layer's: each expert's tokens and probabilities."""
        assigned, shares = before["assigned"], before["shares"]
        for tensor in logits:
            weights = tensor.softmax(-1)
            chosen = weights.topk(self.chosen, dim=-1).indices
            assigned = assigned + functional.one_hot(chosen, self.experts).sum((0, 1)).float()
            shares = shares + weights.float().sum(0)
        return {"hidden": hidden, "assigned": assigned, "shares": shares}

    def add_loss(self, sums: Sums) -> None:
        """Add the loss of all layers."""
        rows = sums["assigned"].sum() / self.chosen
        value = self.experts * (sums["assigned"] / rows * (sums["shares"] / rows)).sum()
        auxiliary_loss(self.weight * value)


def balance_of(causal: Any) -> Balance | None:
    """The auxiliary loss of a model whose config asks for it, otherwise None. Raises BadInput for a family with another
    loss."""
    if not getattr(causal.config, "output_router_logits", False):
        return None
    recorder: Any = (getattr(inner_of(causal)[1], "_can_record_outputs", None) or {}).get("router_logits")
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    known = hasattr(sys.modules[type(causal).__module__], "load_balancing_loss_func")
    kind: Any = getattr(recorder, "target_class", nn.Linear)
    if not known or kind is nn.Linear or not all(hasattr(causal, name) for name in names):
        raise BadInput(f"output_router_logits: the router loss of {type(causal).__name__} is not known: leave it out")
    experts, chosen, weight = (getattr(causal, name) for name in names)
    return Balance(kind, recorder.index, experts, chosen, weight)


def hear(layer: nn.Module, balance: Balance) -> None:
    """Make the routers in `layer` report their logits to `heard`."""
    for module in layer.modules():
        if isinstance(module, balance.kind):
            module.__class__ = _telling(balance.kind, balance.place)


def heard() -> AbstractContextManager[list[Tensor]]:
    """A context that collects the logits of all routers that run in it."""
    logits: list[Tensor] = []  # Dynamo traces no `list[Tensor]()`
    return OnTop(_listening, logits)


@cache
def _telling(kind: Any, place: int) -> Any:
    """A subclass of the router class `kind` that also reports its logits; the same one for all layers, as it is cached."""
    plain: Callable[..., Any] = kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        if _listening:
            _listening[-1].append(output[place])
        return output

    return type(kind.__name__, (kind,), {"forward": forward})
