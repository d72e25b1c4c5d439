"""A Hugging Face causal language model made from its config, and the same without its decoder layers."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ..util.errors import BadInput


def causal_of(config: Any) -> Any:
    """The library's own model of a config, with random numbers."""
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    return build(config)


def without_layers(config: Any) -> Any:
    """The causal model with an empty list of layers. It is built with one layer, because some initialise by their number."""
    bare = copy.deepcopy(config)
    bare.num_hidden_layers = 1
    bare.output_router_logits = False  # no router is left: `huggingface_routers` makes that loss
    causal = causal_of(bare)
    owner, name = owner_of(causal, 1)
    setattr(owner, name, nn.ModuleList())
    causal.config.num_hidden_layers = 0
    return causal


def inner_of(causal: Any) -> tuple[str, Any]:
    """The model inside, which makes hidden states, and its name there. Some (Llama 4's) are not what their prefix names."""
    if causal.base_model is not causal:
        return causal.base_model_prefix, causal.base_model
    found = [(name, child) for name, child in causal.named_children() if hasattr(child, "get_input_embeddings")]
    if not found:
        raise BadInput(f"hf: {type(causal).__name__} has no model inside")
    return found[0]


def owner_of(causal: Any, count: int) -> tuple[nn.Module, str]:
    """The module that holds the decoder layers, and their name there: the outermost list of modules that is as long as the
    config says. Raises BadInput."""
    for module in inner_of(causal)[1].modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name
    raise BadInput(f"hf: {type(causal).__name__} has no list of {count} layers")


def of_eight_words(config: Any) -> Any:
    """A config that differs in its vocabulary: what is no weight of tokens is as it was."""
    small = copy.deepcopy(config)
    small.vocab_size = 8
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, None)
    return small
