"""A whole model of transformers as layers, for example one with adapters of peft: `layers_of`."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..util.errors import BadInput, raised
from .huggingface import Embedding, Head, Layer, with_numbers
from .huggingface_given import Note, Sample, balance_of, given_to, inner_of, owner_of, without_norm
from .huggingface_halves import copied, halves_of
from .losses import auxiliary_losses
from .model import in_eval_mode
from .sides import called, row_of

FEW = 16  # tokens of a sequence on which the layers are compared with the model
CLOSE = 1e-3  # relative to the largest logit
PROMPTS = ("PROMPT_TUNING", "P_TUNING")  # virtual tokens before the embedded ones, and nothing else


def layers_of(model: Any, tokens: Any) -> nn.Sequential:
    """The layers of a model of transformers, also with adapters of peft, for `Pipeline`: an embedding, a layer for each of
    its own, and a head that gives logits. They share the model's modules.

    model: causal, or an encoder-decoder; or what peft made of an nn.Sequential, which is returned.
    tokens: (batch, length) of a microbatch; of an encoder-decoder (the encoder's, the decoder's). Later ones may have more
        rows (but for BLOOM), and fewer tokens where the model is causal.

    Raises BadInput for a model that does more than its layers.
    """
    try:
        base: Any = _without_peft(model)
        if isinstance(base, nn.Sequential):
            return base
        if not hasattr(base, "get_input_embeddings") or not hasattr(base, "config"):
            raise BadInput("no model of transformers, nor an nn.Sequential in one of peft: return its layers in their order")
        encoded = bool(getattr(base.config, "is_encoder_decoder", False))
        given = tokens if encoded and isinstance(tokens, tuple) else (tokens,)
        if len(given) != 1 + encoded or any(getattr(ids, "ndim", 0) != 2 or ids.is_floating_point() for ids in given):
            both = ", the encoder's and the decoder's" * encoded
            raise BadInput(f"it needs tokens, whole numbers of shape (batch, length){both}")
        with _without_cache(base):
            layers = nn.Sequential(OrderedDict(_halves(base, *given) if encoded else _causal(model, tokens)))
        _check_same(model, layers, given)
    except BadInput as error:
        raise BadInput(f"layers_of: {type(model).__name__}: {error}") from None
    except Exception as error:
        raise BadInput(f"layers_of: {type(model).__name__}: its layers cannot be taken apart: {raised(error)}") from error
    return layers


def _without_peft(model: Any) -> Any:
    """The model inside one of peft, whose adapters are in its layers. Raises BadInput for methods that are not in them."""
    if not hasattr(model, "get_base_model"):
        return model
    for config in model.peft_config.values():
        kind = getattr(config.peft_type, "value", str(config.peft_type))
        if config.is_prompt_learning and kind not in PROMPTS:
            raise BadInput(f"{kind} gives trained values to every layer at once: take adapters that are in layers")
        if config.is_prompt_learning and len(model.peft_config) > 1:
            raise BadInput(f"{kind} beside other adapters: the layers could not follow set_adapter: keep one adapter")
        if getattr(config, "alora_invocation_tokens", None):
            raise BadInput(f"{kind} with alora_invocation_tokens reads the tokens in every layer: leave these out")
        tuners = [cls for cls in type(model.base_model).__mro__ if "forward" in vars(cls)]
        if not config.is_prompt_learning and tuners[0].__name__ not in ("BaseTuner", "Module"):
            raise BadInput(f"{kind} does more than its layers, such as a term of all adapters in the loss: take another one")
    return model.get_base_model()


@contextmanager
def _without_cache(model: Any) -> Iterator[None]:
    """Inside, the model's configs ask for no cache."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values()
    before = [(config, getattr(config, "use_cache", None)) for config in configs]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config, used in before:
            config.use_cache = used


def _dtype(base: Any) -> torch.dtype:
    """The type that layers compute in: other weights may have 8 bits."""
    table: nn.Module = base.get_input_embeddings()
    return next(table.parameters()).dtype


def _halves(base: Any, *tokens: Tensor) -> list[tuple[str, nn.Module]]:
    """(name, layer) of an encoder-decoder."""
    first, second = (Sample(ids.shape[0], ids.shape[1], _dtype(base)) for ids in tokens)
    return [(name, build()) for name, build in halves_of(base, first, second)[0]]


def _causal(model: Any, tokens: Tensor) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of a causal model."""
    base = _without_peft(model)
    if not hasattr(base.config, "num_hidden_layers") or base.get_output_embeddings() is None:
        raise BadInput("it is of several parts, or has no head that gives logits of words: return its layers in their order")
    config: Any = copy.deepcopy(base.config)
    config.dtype = _dtype(base)
    row, balance = getattr(*owner_of(base, config.num_hidden_layers)), balance_of(base)
    adapters = getattr(model, "peft_config", {}).values()
    virtual = sum(each.num_virtual_tokens for each in adapters if each.is_prompt_learning)
    sample = Sample(tokens.shape[0], tokens.shape[1] + virtual, config.dtype)

    def with_row(whole: Any, layers: list[nn.Module], config: Any) -> Any:
        """The model with these layers and this config."""
        config.num_hidden_layers, config.output_router_logits = len(layers), False
        return copied(whole, {id(row): nn.ModuleList(layers), id(base.config): config})

    def given(known: Any, i: int, layer: nn.Module) -> Any:
        """What the model gives layer i; from the config alone where the model has no numbers."""
        if _has_numbers(base):
            return given_to(config, i, layer, sample, known, lambda small, words: with_row(base, [Note(words)], small))
        return with_numbers(lambda: given_to(config, i, layer, sample))

    front = with_row(model, [], copy.deepcopy(config))
    bare = without_norm(_without_peft(front))
    if virtual:  # peft's own forward puts the virtual tokens before the others
        front.base_model = inner_of(bare)[1]
    yield "embedding", Embedding(bare, balance, front if virtual else None)
    known: Any = {}
    for i, layer in enumerate(row):
        yield f"block{i}", Layer(layer, base.config, given(known, i, layer), balance)
    yield "head", Head(with_row(base, [], copy.deepcopy(config)), balance)


def _has_numbers(model: nn.Module) -> bool:
    return not any(p.is_meta or type(p).__name__ == "FakeTensor" for p in model.parameters())


def _check_same(model: Any, layers: nn.Sequential, tokens: tuple[Tensor, ...]) -> None:
    """Compare the layers with the model on a few tokens, without dropout. Raises BadInput where they differ."""
    if not _has_numbers(model):
        return
    few = tokens if len(tokens) > 1 else (tokens[0][:, :FEW],)
    found: Any = few if len(few) > 1 else few[0]
    with in_eval_mode(model, layers), torch.no_grad(), torch.random.fork_rng(devices=[]), auxiliary_losses():
        right = model(**dict(zip(("input_ids", "decoder_input_ids"), few, strict=False)), use_cache=False).logits
        for layer in layers:
            found = called(layer, found)
    found = row_of(found)
    if found.shape != right.shape:
        raise BadInput(f"does more than its layers: its logits are {tuple(right.shape)}, theirs {tuple(found.shape)}")
    apart = float((found - right).abs().max() / right.abs().max())
    if not apart < CLOSE:
        raise BadInput(f"does more than its layers one after the other: their logits differ from its own by {apart:.1g}")
