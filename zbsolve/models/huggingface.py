"""Hugging Face causal language models by config class, as a row of layers, with random numbers (no weights are fetched).

`hf:LlamaConfig{"num_hidden_layers": 4, "hidden_size": 512}@batch=1,length=512`. Nothing here knows an architecture
(see `huggingface_layers`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..util.errors import BadInput, raised
from ..util.text import did_you_mean
from .huggingface_given import Sample, balance_of, causal_of, given_to, owner_of
from .huggingface_layers import Embedding, Head, Layer, is_tied, weight_name
from .losses import CrossEntropy
from .model import DTYPES, Model, Setting, parse_setting, seeded
from .published_models import random_tokens, typed

BATCH, LENGTH = 1, 512
# Fields of published config files that a class may not declare: the library reads them where they are there, or a training
# step does not depend on them.
UNDECLARED_FIELDS = {
    *("head_dim", "sliding_window", "use_sliding_window", "max_window_layers", "attention_bias", "mlp_bias", "hidden_act"),
    *("rope_theta", "rope_scaling", "torch_dtype", "pretraining_tp", "cache_implementation", "auto_map"),
}


def causal_model(spec: str, seed: int) -> Model:
    """The model that `hf:ConfigClass{overrides}@setting` names. Raises BadInput where the library, the class or a key is
    missing, or where its layers cannot be taken apart."""
    config, setting = _config(spec)
    batch, length = setting.batch or BATCH, setting.length or LENGTH
    dtype = DTYPES[setting.dtype or "float32"]
    try:
        with torch.device("meta"):
            shell = causal_of(config)
        row = getattr(*owner_of(shell, config.num_hidden_layers))
        layers = [type(layer) for layer in row]
        given = [
            given_to(config, i, getattr(layer, "attention_type", None), Sample(batch, length, dtype))
            for i, layer in enumerate(row)
        ]
        tied = is_tied(shell)
        balance = balance_of(shell)
    except BadInput:
        raise
    except Exception as error:
        if "Unrecognized configuration class" in str(error):
            raise BadInput(
                f"model '{spec}': {type(config).__name__} is of no causal language model (a decoder alone)"
            ) from None
        raise BadInput(f"model '{spec}': its layers cannot be taken apart: {raised(error)}") from error
    builders: list[Callable[[], nn.Module]] = [
        partial(Embedding, config, balance),
        *(partial(Layer, config, kind, i, given[i], balance) for i, kind in enumerate(layers)),
        partial(Head, config, balance),
    ]
    return Model(
        spec,
        tuple(seeded(seed, i, partial(typed, build, dtype)) for i, build in enumerate(builders)),
        ("embedding", *(f"block{i}" for i in range(len(layers))), "head"),
        partial(random_tokens, seed, int(config.vocab_size), batch, length),
        CrossEntropy(),
        (((0, weight_name(Embedding, config)), (len(layers) + 1, weight_name(Head, config))),) if tied else (),
    )


def _config(spec: str) -> tuple[Any, Setting]:
    try:
        import transformers
    except ImportError:
        raise BadInput(f"model '{spec}': transformers is missing: install zbsolve[hf]") from None
    head, brace, rest = spec.removeprefix("hf:").partition("{")
    if brace:
        text, _, setting = rest.rpartition("}")
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
    known = cls().to_dict()
    for key in overrides:
        if key not in known and key not in getattr(cls, "attribute_map", {}) and key not in UNDECLARED_FIELDS:
            raise BadInput(f"model '{spec}': {name} has no field '{key}'{did_you_mean(key, known)}")
    if parsed.layers:
        overrides["num_hidden_layers"] = parsed.layers
    stored = overrides.get("dtype", overrides.get("torch_dtype"))
    if parsed.dtype is None and stored in DTYPES:
        parsed = replace(parsed, dtype=stored)
    try:
        config = cls(**overrides)
    except Exception as error:
        raise BadInput(f"model '{spec}': {name}: {raised(error)}") from error
    config.use_cache = False
    return config, parsed
