"""A Hugging Face model taken apart into layers, without knowing its architecture.

The library's own forward runs with its layers taken out: that is the embedding. It runs with a layer that notes what it is
called with: that is what every decoder layer gets with its input. And it runs with its inner model replaced: that is the
head.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..util.errors import BadInput
from ..util.own_code import raised
from .huggingface_routers import Balance, Sums, hear, heard
from .losses import capped
from .published_models import typed


class Sample(NamedTuple):
    """A microbatch: samples, their length, and the type that layers compute in."""

    batch: int
    length: int
    dtype: torch.dtype


def causal_of(config: Any) -> Any:
    """The library's own model of a config, with random numbers."""
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    return build(config)


def _without_layers(config: Any) -> Any:
    """The causal model with an empty list of layers. It is built with one layer, because some initialise by their number."""
    bare = copy.deepcopy(config)
    bare.num_hidden_layers = 1
    bare.output_router_logits = False  # no router is left: `huggingface_routers` makes that loss
    causal = causal_of(bare)
    owner, name = owner_of(causal, 1)
    setattr(owner, name, nn.ModuleList())
    causal.config.num_hidden_layers = 0
    return causal


def owner_of(causal: Any, count: int) -> tuple[nn.Module, str]:
    """The module that holds the decoder layers, and their name there: the outermost list of modules that is as long as the
    config says. Raises BadInput."""
    for module in causal.base_model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name
    raise BadInput(f"hf: {type(causal).__name__} has no list of {count} layers")


def _final_norm(causal: Any) -> tuple[nn.Module, str] | None:
    """The norm behind the last layer: by its name in the module that holds the layers."""
    owner, _ = owner_of(causal, 0)
    names = [name for name, _ in owner.named_children() if "norm" in name or name == "ln_f"]
    return (owner, names[-1]) if names else None


class Embedding(nn.Module):
    """Token numbers → what goes into the first layer: the model's own forward without layers and without its last norm."""

    def __init__(self, config: Any, balance: Balance | None = None) -> None:
        super().__init__()
        self.balance = balance
        causal = _without_layers(config)
        norm = _final_norm(causal)
        if norm is not None:
            setattr(*norm, nn.Identity())
        self.base = causal.base_model
        self.token_weight = _path(self, causal.get_input_embeddings())

    def forward(self, ids: Tensor) -> Tensor | Sums:
        """(batch, length) → (batch, length, width); with the sums that balance experts, where the config asks for that."""
        result: Tensor = self.base(input_ids=ids, use_cache=False)[0]
        return result if self.balance is None else self.balance.begun(result)

    def token_embedding(self) -> tuple[str, float]:
        """See `exec.vocabulary.loss`. Raises BadInput where the embedding does more than multiply its vectors."""
        name = self.token_weight.removesuffix(".weight")
        table: Any = self.get_submodule(name)
        return name, 1.0 if type(table) is nn.Embedding else _with_numbers(lambda: self._scale(table))

    def _scale(self, table: Any) -> float:
        """By what an embedding multiplies its vectors. Raises BadInput where it does more."""
        try:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                like: Any = _without_layers(_of_eight_words(self.base.config)).get_input_embeddings()
            rows = torch.linspace(1, 2, 4 * table.embedding_dim, device="cpu").to(table.weight.dtype).view(4, -1)
            like.weight, like.padding_idx = nn.Parameter(rows, requires_grad=False), None
            found = like(torch.arange(4, device="cpu"))
            scale = float(found[0, 0])
            known = type(like) is type(table) and bool(found.equal(rows * scale))
        except Exception as error:
            raise BadInput(f"hf: embedding {type(table).__name__}: {raised(error)}") from error
        if not known:
            raise BadInput(f"hf: embedding {type(table).__name__} does more than multiply its vectors")
        return scale


class Noted(Exception):
    """Carries the arguments that a decoder layer is called with."""


class _Note(nn.Module):
    """Stands where a decoder layer was."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Raises Noted."""
        raise Noted(args, kwargs)


def given_to(config: Any, i: int, attention: str | None, sample: Sample) -> Any:
    """What layer i gets with its input: positions, masks. It is found with a small vocabulary; nothing of it is a
    weight."""
    small = _of_eight_words(config)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        small.layer_types = [kinds[i]]
    # Layers of one kind get equal tensors: found once.
    return _noted(json.dumps([small.to_dict(), type(config).__name__], default=str), _Unkeyed(small), attention, sample)


def _of_eight_words(config: Any) -> Any:
    small = copy.deepcopy(config)
    small.vocab_size = 8
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, None)
    return small


class _Unkeyed:
    """A config that goes with a key. It equals any other, so a cache looks at the key alone."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unkeyed)

    def __hash__(self) -> int:
        return 0


@cache
def _noted(key: str, held: _Unkeyed, attention: str | None, sample: Sample) -> Any:
    """What a layer of this kind is called with. key: all of the config that counts."""

    def note() -> Any:
        causal = _without_layers(held.config)
        owner, name = owner_of(causal, 0)
        row = nn.ModuleList([_Note()])
        if attention is not None:
            setattr(row[0], "attention_type", attention)  # noqa: B010 - a plain attribute, which Module does not declare
        setattr(owner, name, row)
        causal.config.num_hidden_layers = 1
        try:
            with torch.no_grad():
                causal.base_model(input_ids=torch.zeros(sample.batch, sample.length, dtype=torch.long), use_cache=False)
        except Noted as found:
            return found.args
        raise BadInput(f"hf: {type(causal).__name__} does not call its layers")

    with torch.random.fork_rng(devices=[]):
        return typed(note, sample.dtype)


class Layer(nn.Module):
    """Decoder layer i, called as the model calls it. It holds what it gets with its input as buffers."""

    def __init__(self, config: Any, kind: type[nn.Module], i: int, given: Any, balance: Balance | None = None) -> None:
        super().__init__()
        self.balance = balance
        self.layer = kind(config, i)
        with suppress(AttributeError):
            self.layer.apply(_initialiser(config))
        if balance is not None:
            hear(self.layer, balance)
        leaves, self.form = tree_flatten(given)
        self.fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.register_buffer(f"given{n}", leaf, persistent=False)

    def forward(self, x: Any) -> Any:
        """(batch, length, width) → the same shape; with the sums that balance experts, as `Embedding` gives them."""
        if self.balance is None:
            return self._hidden(x)
        with heard() as logits:
            y = self._hidden(x["hidden"])
        return self.balance.added(x, y, logits)

    def _hidden(self, x: Tensor) -> Tensor:
        leaves = [getattr(self, f"given{n}", fixed) for n, fixed in enumerate(self.fixed)]
        args, kwargs = tree_unflatten(leaves, self.form)
        y = self.layer(x, *args, **kwargs)
        result: Tensor = y[0] if isinstance(y, tuple) else y
        return result


def _initialiser(config: Any) -> Callable[[nn.Module], None]:
    """How the library initialises a module of this model."""
    with torch.device("meta"):
        causal = _without_layers(config)
    causal.config = config
    result: Callable[[nn.Module], None] = causal._init_weights
    return result


class _Answer:
    """What an inner model returns: the hidden states, first and by name. Anything else is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, i: Any) -> Any:
        return self.last_hidden_state if i == 0 else ()

    def __getattr__(self, name: str) -> None:
        return None


class _Inner(nn.Module):
    """Stands where the inner model was, and where the parts of it were that some heads call instead (OPT's decoder)."""

    def __init__(self, norm: nn.Module, parts: frozenset[str]) -> None:
        super().__init__()
        self.norm = norm
        self.parts = parts

    def __getattr__(self, name: str) -> Any:
        return self if name in self.__dict__.get("parts", ()) else super().__getattr__(name)

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Answer:
        """The last norm of what the head is given."""
        return _Answer(self.norm(inputs_embeds))


class Head(nn.Module):
    """What comes out of the last layer → scores: the model's own forward, whose inner model is replaced by the last norm."""

    def __init__(self, config: Any, balance: Balance | None = None) -> None:
        super().__init__()
        self.balance = balance
        causal = _without_layers(config)
        norm = _final_norm(causal)
        parts = frozenset(name for name, _ in causal.base_model.named_children())
        inner = _Inner(getattr(*norm) if norm else nn.Identity(), parts - {"norm"})
        # Tied to an embedding that this layer does not hold: a weight of its own, which Model.build ties again.
        output = causal.get_output_embeddings()
        output.weight = nn.Parameter(output.weight.detach().clone())
        self.token_weight = "causal." + _path(causal, output)
        setattr(causal, causal.base_model_prefix, inner)
        self.causal = causal

    def forward(self, x: Any) -> Tensor:
        """(batch, length, width) → (batch, length, vocabulary). The loss that balances experts is added here."""
        if self.balance is not None:
            self.balance.add_loss(x)
            x = x["hidden"]
        result: Tensor = self.causal(inputs_embeds=x, use_cache=False).logits
        return result

    def output_layer(self) -> tuple[str, float]:
        """See `exec.vocabulary.loss`. Raises BadInput where the model does more to its logits than a soft cap."""
        name, cap = self.token_weight.removesuffix(".weight"), self._cap()
        words = self.get_parameter(self.token_weight).shape[0]
        if not _with_numbers(lambda: self._only_caps(name, cap, words)):
            raise BadInput(f"hf: {type(self.causal).__name__} does more to its logits than a soft cap")
        return name, cap

    def _only_caps(self, name: str, cap: float, words: int) -> bool:
        x = torch.linspace(-100, 100, words, device="cpu").view(1, 1, -1)
        return self._behind_output(name, x).allclose(capped(x, cap))

    def _cap(self) -> float:
        return float(getattr(self.causal.config, "final_logit_softcapping", None) or 0)

    def _behind_output(self, name: str, x: Tensor) -> Tensor:
        """What the model makes of logits `x`: norm and output layer hand on what they get. Raises BadInput."""
        norm = getattr(self.causal, self.causal.base_model_prefix).norm
        memo: dict[int, Any] = {id(part): nn.Identity() for part in (norm, self.get_submodule(name))}
        try:
            found: Tensor = copy.deepcopy(self.causal, memo)(inputs_embeds=x, use_cache=False).logits
        except Exception as error:
            raise BadInput(
                f"hf: {type(self.causal).__name__}: what comes behind its output layer: {raised(error)}"
            ) from error
        return found


def _with_numbers(look: Callable[[], Any]) -> Any:
    """What `look` finds by real tensors, also while fake ones are made: modes of torch are on in one thread only."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(look).result()


def is_tied(shell: Any) -> bool:
    """Does a model share its token weight between embedding and head?"""
    return bool(getattr(shell.config, "tie_word_embeddings", False)) and shell.get_output_embeddings() is not None


def weight_name(end: type[Embedding] | type[Head], config: Any) -> str:
    """The name of the token weight inside the embedding or the head."""
    with torch.device("meta"):
        return str(end(config).token_weight)


def _path(root: nn.Module, wanted: nn.Module) -> str:
    return str(next(name for name, module in root.named_modules() if module is wanted)) + ".weight"
