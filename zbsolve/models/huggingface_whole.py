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
from .huggingface_given import Sample, balance_of, given_to, inner_of, owner_of, without_norm
from .huggingface_halves import copied, halves_of
from .losses import auxiliary_losses
from .sides import called, row_of

FEW = 16  # tokens on which the layers are compared with the model
CLOSE = 1e-3  # relative to the largest logit
PROMPTS = ("PROMPT_TUNING", "P_TUNING")  # virtual tokens before the embedded ones, and nothing else


def layers_of(model: Any, tokens: Any) -> nn.Sequential:
    """The layers of a causal or encoder-decoder model of transformers, also with adapters of peft: an embedding, a layer for
    each of its own, and a head that gives logits. They share the model's parameters. A model that peft made of an
    nn.Sequential gives that nn.Sequential.

    tokens: (batch, length) of a microbatch; of an encoder-decoder (the encoder's, the decoder's). Later ones may have more
    rows, and fewer tokens where the model is causal. Raises BadInput for a model that does more than its layers.
    """
    where = f"layers_of: {type(model).__name__}"
    try:
        base: Any = _without_peft(model)
        if isinstance(base, nn.Sequential):
            return base
        if not hasattr(base, "get_input_embeddings") or not hasattr(base, "config"):
            raise BadInput("no model of transformers, nor an nn.Sequential in one of peft: return its layers in their order")
        if tokens is None:
            raise BadInput("its layers depend on the shape of tokens: return (tokens, targets), or layers_of(model, tokens)")
        rows = _halves(base, *tokens) if getattr(base.config, "is_encoder_decoder", False) else _causal(model, base, tokens)
        layers = nn.Sequential(OrderedDict(rows))
        _check_same(model, layers, tokens)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None
    except Exception as error:
        raise BadInput(f"{where}: its layers cannot be taken apart: {raised(error)}") from error
    return layers


def _without_peft(model: Any) -> Any:
    """The model inside one of peft, whose adapters are in its layers. Raises BadInput for methods that are not in them."""
    if not hasattr(model, "get_base_model"):
        return model
    for config in model.peft_config.values():
        kind = getattr(config.peft_type, "value", str(config.peft_type))
        if kind == "ADALORA":
            raise BadInput("AdaLoRA adds a term of all adapters to the loss, and chooses ranks by all gradients: take LoRA")
        if config.is_prompt_learning and kind not in PROMPTS:
            raise BadInput(f"{kind} gives trained values to every layer at once: take adapters that are in layers")
    return model.get_base_model()


def _halves(base: Any, *tokens: Tensor) -> list[tuple[str, nn.Module]]:
    """(name, layer) of an encoder-decoder."""
    first, second = (Sample(ids.shape[0], ids.shape[1], base.dtype) for ids in tokens)
    return [(name, build()) for name, build in halves_of(base, first, second)[0]]


def _causal(model: Any, base: Any, tokens: Tensor) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of a causal model."""
    config = copy.deepcopy(base.config)
    config.dtype, config.use_cache = base.dtype, False
    row, balance = getattr(*owner_of(base, config.num_hidden_layers)), balance_of(base)
    bare_config = copy.deepcopy(config)
    bare_config.num_hidden_layers, bare_config.output_router_logits = 0, False
    instead = {id(row): nn.ModuleList(), id(base.config): bare_config}
    adapters = getattr(model, "peft_config", {}).values()
    virtual = sum(each.num_virtual_tokens for each in adapters if each.is_prompt_learning)
    sample = Sample(tokens.shape[0], tokens.shape[1] + virtual, base.dtype)
    front = copied(model, instead)
    bare = without_norm(front.get_base_model() if hasattr(front, "get_base_model") else front)
    if virtual:  # peft's own forward puts the virtual tokens before the others
        front.base_model = inner_of(bare)[1]
    yield "embedding", Embedding(bare, balance, front if virtual else None)
    given = with_numbers(lambda: [given_to(config, i, layer, sample) for i, layer in enumerate(row)])
    for i, layer in enumerate(row):
        yield f"block{i}", Layer(layer, config, given[i], balance)
    yield "head", Head(copied(base, instead), balance)


def _check_same(model: Any, layers: nn.Sequential, tokens: Any) -> None:
    """Compare the layers with the model on a few tokens, without dropout. Raises BadInput where they differ."""
    if any(p.is_meta or type(p).__name__ == "FakeTensor" for p in model.parameters()):
        return  # there are no numbers to compare
    few = tuple(ids[:1, :FEW] for ids in tokens) if isinstance(tokens, tuple) else tokens[:1, :FEW]
    names = dict(zip(("input_ids", "decoder_input_ids"), few if isinstance(few, tuple) else (few,), strict=False))
    with _in_eval_mode(model, layers), torch.no_grad(), torch.random.fork_rng(devices=[]), auxiliary_losses():
        right, found = model(**names, use_cache=False).logits, few
        for layer in layers:
            found = called(layer, found)
    found = row_of(found)
    if found.shape != right.shape:
        raise BadInput(f"does more than its layers: its logits are {tuple(right.shape)}, theirs {tuple(found.shape)}")
    apart = float((found - right).abs().max() / right.abs().max())
    if not apart < CLOSE:
        raise BadInput(f"does more than its layers one after the other: their logits differ from its own by {apart:.1g}")


@contextmanager
def _in_eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Inside, all modules are in eval mode; then as before."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
