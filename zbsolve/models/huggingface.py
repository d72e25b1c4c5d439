"""Hugging Face causal language models by config class, with random weights (none are downloaded):
`hf:LlamaConfig{"num_hidden_layers": 4, "hidden_size": 512}@batch=1,length=512`. A model of any architecture is split into an
embedding, its decoder layers and a head, by calling the library's own forward in three ways:

* without decoder layers and without the last norm: this is the embedding;
* with a decoder layer that records its arguments: these are given to each decoder layer with its input;
* with the inner model replaced by the last norm: this is the head.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..util.errors import BadInput, raised
from ..util.text import did_you_mean
from .huggingface_given import (
    Answer,
    Balance,
    Given,
    Held,
    Sample,
    Sums,
    balance_of,
    causal_of,
    final_norm,
    given_to,
    hear,
    heard,
    inner_of,
    of_eight_words,
    owner_of,
    without_layers,
    without_norm,
)
from .huggingface_halves import COUNTS, halves_model, weight_path
from .losses import capped
from .model import DTYPES, Model, Setting, language_model, parse_setting
from .published_models import random_tokens, typed
from .slicing import AttentionRule, in_slice, slice_offset, sliced_attention, visible

NAME = "zbsolve"


def transformers_attention() -> str:
    """Register `sliced_attention` in transformers, and return its name there: AutoModelForCausalLM.from_config(config,
    attn_implementation=transformers_attention()). Without slices it does the same as the library's "sdpa", with the same
    masks. (Models that ask whether their attention is called "sdpa" may behave differently.)

    In slices a layer's attention sees the keys of earlier slices. It supports grouped queries, `sliding_window`, `scaling`,
    masks (chunks, padding) over the slice's queries and all keys so far, and documents=, which the library's models pass on
    to attention, as in `sliced_attention`. Raises BadInput if transformers has no attention interface. Attention in slices
    raises BadInput for dropout, soft caps and other settings that slices do not support.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError:
        raise BadInput("transformers_attention: no transformers, or one without an attention interface") from None
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


# Arguments that layers pass on to attention and that do not change which keys are seen, or how.
IGNORED = {"position_ids", "cache_position", "past_key_values", "use_cache", "output_attentions", "output_hidden_states"}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """query: (batch, heads, length, width); key, value: (batch, groups, length, width) → (batch, length, heads, width)."""
    if not in_slice() and further.get("documents") is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        further.pop("documents", None)
        whole: Any = sdpa_attention_forward
        return whole(module, query, key, value, attention_mask, dropout, scaling, **further)
    name, given = type(module).__name__, {name: arg for name, arg in further.items() if arg is not None and arg is not False}
    _, window, documents = (given.pop(option, None) for option in ("is_causal", "sliding_window", "documents"))
    if unknown := sorted(given.keys() - IGNORED):
        raise BadInput(f"{name}: {unknown[0]}: sliced_attention has none")
    if dropout and in_slice():
        raise BadInput(f"{name}: attention in slices has no dropout, this has {dropout:g}{_dropout_named(module, dropout)}")
    mask = _more_than_rule(attention_mask, query.shape[-2], window)
    causal = mask is None and getattr(module, "is_causal", True) and further.get("is_causal") is not False
    settings = {"scale": scaling, "is_causal": causal, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    mixed = sliced_attention(query, key, value, mask, window=window, documents=documents, **settings)
    return mixed.transpose(1, 2).contiguous(), None


def _dropout_named(module: nn.Module, dropout: float) -> str:
    """The field of the config that sets this dropout, for a message; or ""."""
    config: Any = getattr(module, "config", None)
    names = [
        name for name, p in getattr(config, "__dict__", {}).items() if "att" in name and "drop" in name and p == dropout
    ]
    return f": set {names[0]} of {type(config).__name__} to 0" if names else ""


def _more_than_rule(mask: Tensor | None, queries: int, window: int | None) -> Tensor | None:
    """The mask; or None if it is the causal mask with this window, for the slice's queries and all keys up to theirs."""
    if mask is None:
        return None
    first = slice_offset()
    keys = first + queries
    wanted = visible((first, None), (0, None), queries, keys, AttentionRule(window=window), mask.device)
    if wanted is None:
        wanted = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(first)
    same = mask.dtype == torch.bool and mask.shape[-2:] == wanted.shape
    return None if same and bool((mask == wanted).all()) else mask


class Embedding(nn.Module):
    """Token numbers → input of the first decoder layer: the model's own forward without layers and without the last norm.

    causal: the model without layers and without the last norm. base: runs it; None: its inner model."""

    def __init__(self, causal: Any, balance: Balance | None = None, base: Any = None) -> None:
        super().__init__()
        self.balance = balance
        self.base = inner_of(causal)[1] if base is None else base
        self.token_weight = weight_path(self, causal.get_input_embeddings())

    def forward(self, ids: Tensor) -> Tensor | Sums:
        """(batch, length) → (batch, length, width); with the sums that balance experts, where the config asks for that."""
        result: Tensor = self.base(input_ids=ids, use_cache=False, **self._positions(ids))[0]
        return result if self.balance is None else self.balance.begun(result)

    def _positions(self, ids: Tensor) -> dict[str, Tensor]:
        """`position_ids` of a slice other than the first, if the model takes them."""
        first = slice_offset()
        if not first or "position_ids" not in inspect.signature(self.base.forward).parameters:
            return {}
        return {"position_ids": torch.arange(first, first + ids.shape[1], device=ids.device).expand_as(ids)}

    def token_embedding(self) -> tuple[str, float]:
        """See `exec.vocabulary.loss`. Raises BadInput where the embedding does more than multiply its vectors."""
        name = self.token_weight.removesuffix(".weight")
        table: Any = self.get_submodule(name)
        return name, 1.0 if type(table) is nn.Embedding else with_numbers(lambda: self._scale(table))

    def _scale(self, table: Any) -> float:
        """The factor by which the embedding multiplies its vectors. Raises BadInput if it does anything else to them."""
        try:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                like: Any = without_layers(of_eight_words(self.base.config)).get_input_embeddings()
            rows = torch.linspace(1, 2, 4 * table.embedding_dim, device="cpu").to(table.weight.dtype).view(4, -1)
            like.weight, like.padding_idx = nn.Parameter(rows, requires_grad=False), None
            scaled = like(torch.arange(4, device="cpu"))
            scale = float(scaled[0, 0])
            known = type(like) is type(table) and bool(scaled.equal(rows * scale))
        except Exception as error:
            raise BadInput(f"hf: embedding {type(table).__name__}: {raised(error)}") from error
        if not known:
            raise BadInput(f"hf: embedding {type(table).__name__} does more than multiply its vectors")
        return scale


class Layer(Held):
    """A decoder layer, called with what its model gives it."""

    def __init__(self, layer: nn.Module, config: Any, given: Given, balance: Balance | None = None) -> None:
        if balance is not None:
            hear(layer, balance)
        super().__init__(layer, given)
        self.balance = balance
        self.config, self.attention = config, getattr(config, "_attn_implementation", None)

    def forward(self, x: Any) -> Any:
        """(batch, length, width) → the same shape; with the sums that balance experts, as `Embedding` gives them."""
        if self.balance is None:
            return self._hidden(x)
        with heard() as logits:
            y = self._hidden(x["hidden"])
        return self.balance.added(x, y, logits)

    def _hidden(self, x: Tensor) -> Tensor:
        if in_slice() and self.attention not in ("sdpa", None):
            raise BadInput(f"hf: {type(self.layer).__name__}: slices do not reach its attention, '{self.attention}'")
        with _called_in_slices(self.config) if in_slice() else nullcontext():
            y = self.call(x)
        return y[0] if isinstance(y, tuple) else y


def _made_as(like: nn.Module, config: Any, i: int) -> nn.Module:
    """Decoder layer i, made alone and initialised. like: that layer as the library's model made it, possibly on the meta
    device. Raises BadInput if its model adds something to it, or constructs it differently."""
    kinds, kind = getattr(config, "layer_types", None), type(like)
    own = {"layer_type": kinds[i]} if kinds and "layer_type" in inspect.signature(kind).parameters else {}
    try:
        layer = kind(config, i, **own)
    except Exception as error:
        raise BadInput(f"hf: {kind.__name__} {i} alone: {raised(error)}") from error
    alone, its = ({name: x.shape for name, x in (*each.named_parameters(), *each.named_buffers())} for each in (layer, like))
    if alone != its:
        apart = next(name for name in its | alone if alone.get(name) != its.get(name))
        raise BadInput(f"hf: {kind.__name__} {i} alone is not what its model makes of it: see {apart}")
    with suppress(AttributeError):
        layer.apply(_initialiser(config))
    return layer


@contextmanager
def _called_in_slices(config: Any) -> Iterator[None]:
    """A context in which attention is `sliced_attention`. Elsewhere the name stays: some models need it to be "sdpa"."""
    before, config._attn_implementation = config._attn_implementation, transformers_attention()
    try:
        yield
    finally:
        config._attn_implementation = before


def _initialiser(config: Any) -> Callable[[nn.Module], None]:
    """How the library initialises a module of this model."""
    with torch.device("meta"):
        causal = without_layers(config)
    causal.config = config
    return causal._init_weights


class _Inner(nn.Module):
    """Replaces the inner model, and those of its parts that some heads call directly (OPT's decoder)."""

    def __init__(self, norm: nn.Module, parts: frozenset[str]) -> None:
        super().__init__()
        self.norm = norm
        self.parts = parts

    def __getattr__(self, name: str) -> Any:
        return self if name in self.__dict__.get("parts", ()) else super().__getattr__(name)

    def forward(self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any) -> Answer:
        """The last norm of the head's input. Raises BadInput if the model does not pass that on as `inputs_embeds`."""
        if inputs_embeds is None:
            raise BadInput("hf: the head of this model takes no inputs_embeds")
        return Answer(self.norm(inputs_embeds))


class Head(nn.Module):
    """Output of the last decoder layer → logits: the model's own forward, with the last norm in place of the inner model.

    causal: the model without layers."""

    def __init__(self, causal: Any, balance: Balance | None = None) -> None:
        super().__init__()
        self.balance = balance
        norm = final_norm(causal)
        parts = frozenset(name for name, _ in inner_of(causal)[1].named_children())
        inner = _Inner(getattr(*norm) if norm else nn.Identity(), parts - {"norm"})
        self.token_weight = "causal." + weight_path(causal, causal.get_output_embeddings())
        self.inner = inner_of(causal)[0]
        setattr(causal, self.inner, inner)
        self.causal = causal

    def forward(self, x: Any) -> Tensor:
        """(batch, length, width) → (batch, length, vocabulary). Adds the auxiliary loss that balances experts."""
        if self.balance is not None:
            self.balance.add_loss(x)
            x = x["hidden"]
        return self.causal(inputs_embeds=x, use_cache=False).logits

    def output_layer(self) -> tuple[str, float]:
        """See `exec.vocabulary.loss`. Raises BadInput where the model does more to its logits than a soft cap."""
        name, words = self.token_weight.removesuffix(".weight"), self.get_parameter(self.token_weight).shape[0]
        cap = float(getattr(self.causal.config, "final_logit_softcapping", None) or 0)

        def only_caps() -> bool:
            x = torch.linspace(-100, 100, words, device="cpu").view(1, 1, -1)
            return self._behind_output(name, x).allclose(capped(x, cap))

        if not with_numbers(only_caps):
            raise BadInput(f"hf: {type(self.causal).__name__} does more to its logits than a soft cap")
        return name, cap

    def _behind_output(self, name: str, x: Tensor) -> Tensor:
        """The model's logits if its output layer's result is `x` (norm and output layer are skipped). Raises BadInput."""
        norm = getattr(self.causal, self.inner).norm
        memo: dict[int, Any] = {id(part): nn.Identity() for part in (norm, self.get_submodule(name))}
        try:
            tensor: Tensor = copy.deepcopy(self.causal, memo)(inputs_embeds=x, use_cache=False).logits
        except Exception as error:
            raise BadInput(f"hf: {type(self.causal).__name__}: after its output layer: {raised(error)}") from error
        return tensor


def with_numbers(look: Callable[[], Any]) -> Any:
    """`look()`, computed with real tensors even inside a fake tensor mode: torch's modes affect one thread only."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(look).result()


def _block(config: Any, like: nn.Module, i: int, given: Given, balance: Balance | None) -> Layer:
    return Layer(_made_as(like, config, i), config, given, balance)


def _untied(causal: Any) -> Any:
    """The model with a separate weight in its output layer. The embedding is another layer; Model.build ties it again."""
    output = causal.get_output_embeddings()
    output.weight = nn.Parameter(output.weight.detach().clone())
    return causal


BATCH, LENGTH = 1, 512
# Fields in published config files that a config class need not declare: either the library reads them if they are present,
# or a training step does not depend on them.
UNDECLARED_FIELDS = {
    *("head_dim", "sliding_window", "use_sliding_window", "max_window_layers", "attention_bias", "mlp_bias", "hidden_act"),
    *("rope_theta", "rope_scaling", "torch_dtype", "pretraining_tp", "cache_implementation", "auto_map"),
}


def causal_model(spec: str, seed: int) -> Model:
    """The model named `hf:ConfigClass{overrides}@setting`. Raises BadInput if the library, the class or a key is missing, or
    if the model cannot be split into layers."""
    config, setting = _config(spec)
    batch, length = setting.batch or BATCH, setting.length or LENGTH
    dtype = DTYPES[setting.dtype or "float32"]
    sample = Sample(batch, length, dtype)
    try:
        if getattr(config, "is_encoder_decoder", False):
            return halves_model(spec, seed, config, sample)
        if not hasattr(config, "num_hidden_layers") and hasattr(config, "text_config"):
            whole, text = type(config).__name__, type(config.text_config).__name__
            raise BadInput(f"model '{spec}': {whole} is of several parts; {text} is that of the language model")
        with torch.device("meta"):
            shell = causal_of(config)
        row = getattr(*owner_of(shell, config.num_hidden_layers))
        given = [given_to(config, i, layer, sample) for i, layer in enumerate(row)]
        tied = getattr(config, "tie_word_embeddings", False) and shell.get_output_embeddings() is not None
        balance = balance_of(shell)
    except BadInput:
        raise
    except Exception as error:
        if "Unrecognized configuration class" in str(error):
            raise BadInput(
                f"model '{spec}': {type(config).__name__} is of no language model: a decoder, or an encoder and a decoder"
            ) from None
        raise BadInput(f"model '{spec}': its layers cannot be taken apart: {raised(error)}") from error
    builders: list[Callable[[], nn.Module]] = [
        lambda: Embedding(without_norm(without_layers(config)), balance),
        *(partial(_block, config, layer, i, given[i], balance) for i, layer in enumerate(row)),
        lambda: Head(_untied(without_layers(config)), balance),
    ]
    builders = [partial(typed, build, dtype) for build in builders]
    with torch.device("meta"):
        ends: list[Any] = [builders[0](), builders[-1]()] if tied else []
        names = [end.token_weight for end in ends]
    return language_model(spec, seed, builders, partial(random_tokens, seed, int(config.vocab_size), batch, length), names)


def _config(spec: str) -> tuple[Any, Setting]:
    try:
        import transformers
    except ImportError:
        raise BadInput(f"model '{spec}': transformers is missing: install zbsolve[hf]") from None
    head, brace, tail = spec.removeprefix("hf:").partition("{")
    if brace:
        text, _, setting = tail.rpartition("}")
        setting = setting.removeprefix("@")
    else:
        (head, _, setting), text = head.partition("@"), ""
    name = head.strip()
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PretrainedConfig)):
        raise BadInput(f"model '{spec}': transformers {transformers.__version__} has no config class '{name}'")
    try:
        overrides = json.loads("{" + text + "}")
    except ValueError as error:
        raise BadInput(f"model '{spec}': the overrides are not JSON: {error}") from None
    parsed = parse_setting(setting, spec)
    try:
        known = cls().to_dict()
    except Exception as error:
        raise BadInput(f"model '{spec}': {name}: {raised(error)}") from error
    taken = {*known, *getattr(cls, "attribute_map", {}), *UNDECLARED_FIELDS}
    for key in overrides:
        if key not in taken and not hasattr(cls, key):
            raise BadInput(f"model '{spec}': {name} has no field '{key}'{did_you_mean(key, known)}")
    if parsed.layers:
        overrides |= {count: parsed.layers for count in COUNTS if count in known or count == COUNTS[0]}
    stored = overrides.get("dtype", overrides.get("torch_dtype"))
    if parsed.dtype is None and stored in DTYPES:
        parsed = replace(parsed, dtype=stored)
    try:
        config = cls(**overrides)
    except Exception as error:
        raise BadInput(f"model '{spec}': {name}: {raised(error)}") from error
    if parsed.layers and parsed.layers != getattr(config, "num_hidden_layers", parsed.layers):
        raise BadInput(f"model '{spec}': layers: {name} counts them by another field: give that one")
    config.use_cache = False
    return config, parsed
