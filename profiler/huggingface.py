"""Hugging Face causal language models by config class, as a row of layers, with random numbers (no weights are fetched).

`hf:LlamaConfig{"num_hidden_layers": 4, "hidden_size": 512}@batch=1,length=512`. Nothing here knows an architecture: the
library's own forward runs with its layers taken out (that is the embedding), with a layer that notes what it is called
with (that is what every decoder layer gets beside its input), and with its inner model replaced (that is the head).
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zbsolve.errors import BadInput

from .models import DTYPES, Model, Setting, one_line, parse_setting, seeded
from .published import random_tokens, token_loss, typed

BATCH, LENGTH = 1, 512
# Fields of published config files that a class may not declare: the library reads them where they are there, or they are
# of no account for a training step.
UNDECLARED = {
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
            shell = _causal(config)
        row = getattr(*_owner(shell, config.num_hidden_layers))
        layers = [type(layer) for layer in row]
        given = [
            _given(config, i, getattr(layer, "attention_type", None), batch, length, dtype) for i, layer in enumerate(row)
        ]
        tied = _is_tied(shell)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(
            f"model '{spec}': its layers cannot be taken apart: {type(error).__name__}: {one_line(error)}"
        ) from None
    builders: list[Callable[[], nn.Module]] = [
        partial(Embedding, config),
        *(partial(Layer, config, kind, i, given[i]) for i, kind in enumerate(layers)),
        partial(Head, config),
    ]
    return Model(
        spec,
        tuple(seeded(seed, i, partial(typed, build, dtype)) for i, build in enumerate(builders)),
        ("embedding", *(f"block{i}" for i in range(len(layers))), "head"),
        partial(random_tokens, seed, int(config.vocab_size), batch, length),
        token_loss,
        (((0, _weight_name(Embedding, config)), (len(layers) + 1, _weight_name(Head, config))),) if tied else (),
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
        if key not in known and key not in getattr(cls, "attribute_map", {}) and key not in UNDECLARED:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise BadInput(f"model '{spec}': {name} has no field '{key}'{hint}")
    if parsed.layers:
        overrides["num_hidden_layers"] = parsed.layers
    stored = overrides.get("dtype", overrides.get("torch_dtype"))
    if parsed.dtype is None and stored in DTYPES:
        parsed = replace(parsed, dtype=stored)
    try:
        config = cls(**overrides)
    except Exception as error:
        raise BadInput(f"model '{spec}': {name}: {one_line(error)}") from None
    config.use_cache = False
    return config, parsed


def _causal(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    return build(config)


def _without_layers(config: Any) -> Any:
    """The causal model with an empty list of layers. It is built with one: some initialise by a share of their number."""
    bare = copy.deepcopy(config)
    bare.num_hidden_layers = 1
    causal = _causal(bare)
    owner, name = _owner(causal, 1)
    setattr(owner, name, nn.ModuleList())
    causal.config.num_hidden_layers = 0
    return causal


def _owner(causal: Any, count: int) -> tuple[nn.Module, str]:
    """Who holds the decoder layers, and by what name: the outermost list of modules that is as long as the config says."""
    for module in causal.base_model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name
    raise BadInput(f"hf: {type(causal).__name__} has no list of {count} layers")


def _final_norm(causal: Any) -> tuple[nn.Module, str] | None:
    """The norm behind the last layer: by its name in the module that holds the layers."""
    owner, _ = _owner(causal, 0)
    names = [name for name, _ in owner.named_children() if "norm" in name or name == "ln_f"]
    return (owner, names[-1]) if names else None


class Embedding(nn.Module):
    """Token numbers → what goes into the first layer: the model's own forward without layers and without its last norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        causal = _without_layers(config)
        norm = _final_norm(causal)
        if norm is not None:
            setattr(*norm, nn.Identity())
        self.base = causal.base_model
        self.token_weight = _path(self, causal.get_input_embeddings())

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.base(input_ids=ids, use_cache=False)[0]
        return result


class Noted(Exception):
    """Carries what a decoder layer is called with."""


class _Note(nn.Module):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise Noted(args, kwargs)


def _given(config: Any, i: int, attention: str | None, batch: int, length: int, dtype: torch.dtype) -> Any:
    """What layer i gets beside its input: positions, masks. Found with a small vocabulary; nothing of it is a weight."""
    small = copy.deepcopy(config)
    small.vocab_size = 8
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        small.layer_types = [kinds[i]]
    # Layers of one kind get equal tensors: found once.
    return _noted(
        json.dumps([small.to_dict(), type(config).__name__], default=str), _Held(small), attention, batch, length, dtype
    )


class _Held:
    """A config beside a key: equal to any other, so that a cache sees the key alone."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


@cache
def _noted(key: str, held: _Held, attention: str | None, batch: int, length: int, dtype: torch.dtype) -> Any:
    def note() -> Any:
        causal = _without_layers(held.config)
        owner, name = _owner(causal, 0)
        row = nn.ModuleList([_Note()])
        if attention is not None:
            setattr(row[0], "attention_type", attention)  # noqa: B010 - a plain attribute, which Module does not declare
        setattr(owner, name, row)
        causal.config.num_hidden_layers = 1
        try:
            with torch.no_grad():
                causal.base_model(input_ids=torch.zeros(batch, length, dtype=torch.long), use_cache=False)
        except Noted as found:
            return found.args
        raise BadInput(f"hf: {type(causal).__name__} does not call its layers")

    with torch.random.fork_rng(devices=[]):
        return typed(note, dtype)


class Layer(nn.Module):
    """Decoder layer i, called as the model calls it. What it gets beside its input is held as buffers."""

    def __init__(self, config: Any, kind: type[nn.Module], i: int, given: Any) -> None:
        super().__init__()
        self.layer = kind(config, i)
        with suppress(AttributeError):
            self.layer.apply(_initialiser(config))
        leaves, self.form = tree_flatten(given)
        self.fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.register_buffer(f"given{n}", leaf, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
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
    """What an inner model returns: the hidden states, first and by name; anything else is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, i: Any) -> Any:
        return self.last_hidden_state if i == 0 else ()

    def __getattr__(self, name: str) -> None:
        return None


class _Inner(nn.Module):
    """Stands where the inner model was, and where those parts of it were that some heads call instead (OPT's decoder)."""

    def __init__(self, norm: nn.Module, parts: frozenset[str]) -> None:
        super().__init__()
        self.norm = norm
        self.parts = parts

    def __getattr__(self, name: str) -> Any:
        return self if name in self.__dict__.get("parts", ()) else super().__getattr__(name)

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Answer:
        return _Answer(self.norm(inputs_embeds))


class Head(nn.Module):
    """What comes out of the last layer → scores: the model's own forward with its inner model replaced by the last norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
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

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.causal(inputs_embeds=x, use_cache=False).logits
        return result


def _is_tied(shell: Any) -> bool:
    return bool(getattr(shell.config, "tie_word_embeddings", False)) and shell.get_output_embeddings() is not None


def _weight_name(end: type[Embedding] | type[Head], config: Any) -> str:
    """The name of the token weight inside the embedding or the head."""
    with torch.device("meta"):
        return str(end(config).token_weight)


def _path(root: nn.Module, wanted: nn.Module) -> str:
    return str(next(name for name, module in root.named_modules() if module is wanted)) + ".weight"
