"""Models by name: a preset such as `gpt-tiny`, a published one, a Hugging Face config, or your own as `module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..util.errors import BadInput, own_line, prefixed, raised
from ..util.text import did_you_mean
from .huggingface import causal_model
from .huggingface_whole import layers_of
from .model import Model, parse_setting, ties
from .own_batches import batches_of
from .presets import PRESETS, STAND_IN, mlp
from .published_models import PUBLISHED, published_model

NAMES = (*PRESETS, *PUBLISHED)


def load(spec: str, seed: int = 0) -> Model:
    """The model called `spec`: a preset (`gpt-tiny`, or a published one such as `llama3-8b@layers=2,length=512`),
    `module:function`, `file.py:function`, or a Hugging Face config such as `hf:LlamaConfig{"num_hidden_layers": 4}`.

    spec: the name; `mlp-24` has 24 small layers. seed: of weights and batches.

    The function of `module:function` returns `(layers, sample)` or `(layers, sample, loss)`. layers: a list of modules in
    order, an nn.ModuleList or an nn.Sequential. sample: `(input, target)`, or an input that is no tuple, each a tensor or a
    pytree of tensors; or a function (microbatch, step) → sample, or an iterable of samples (see `own_batches`). Without a
    loss the sample has no target, and the loss is the mean square of the output (the sum of these means over its
    floating-point tensors). Functions `parallelize`, `work` and `optimizer` in the same module become those of the model.
    Raises BadInput.
    """
    if spec.startswith("hf:"):
        return causal_model(spec, seed)
    name, _, setting = spec.partition("@")
    if name in PUBLISHED:
        return published_model(name, seed, parse_setting(setting, spec))
    if spec in PRESETS:
        return PRESETS[spec](seed)
    if match := STAND_IN.fullmatch(spec):
        return mlp(seed, int(match[1]), spec)
    if ":" in spec:
        return _own(spec, seed)
    if name in PRESETS:
        raise BadInput(f"model '{spec}': {name} takes no '@{setting}'; published models do: {', '.join(PUBLISHED)}")
    if spec.endswith(".py"):
        raise BadInput(f"model '{spec}': a file's function is missing: {spec}:function")
    hint = did_you_mean(name, NAMES, 3)
    raise BadInput(f"model '{spec}': unknown{hint} (presets: {', '.join(NAMES)}, mlp-N; or your own as module:function)")


def knows(spec: str) -> bool:
    """Whether `spec` is a known name, or one of a form that `load` can look for, such as `module:function`."""
    return ":" in spec or STAND_IN.fullmatch(spec) is not None or spec.partition("@")[0] in NAMES


def sized(spec: str, batch: int) -> str:
    """The name of the same model with `batch` sequences a microbatch; unchanged if it sets that, or takes no settings."""
    head, brace, tail = spec.rpartition("}")
    name, _, setting = tail.partition("@")
    if "batch=" in setting or not (spec.startswith("hf:") or spec.partition("@")[0] in PUBLISHED):
        return spec
    return f"{head}{brace}{name}@{setting}{',' if setting else ''}batch={batch}"


def _own(spec: str, seed: int) -> Model:
    """The user's model: the function is called once, in every process that needs it."""
    place, _, name = spec.rpartition(":")
    module = _module(place, spec)
    function = getattr(module, name, None)
    beside = {other: getattr(module, other, None) for other in ("parallelize", "work", "optimizer")}
    if not callable(function):
        raise BadInput(f"model '{spec}': {place} has no function '{name}'")
    for other, value in beside.items():
        if value is not None and not callable(value):
            raise BadInput(f"model '{spec}': {other} in {place} is no function")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            answer = function()
        except Exception as error:
            raise BadInput(f"model '{spec}': {name}() raised {raised(error)}") from error
    if not isinstance(answer, tuple) or len(answer) not in (2, 3):
        raise BadInput(f"model '{spec}': {name}() must return (layers, sample) or (layers, sample, loss)")
    with prefixed(f"model '{spec}': {name}()"):
        layers = _named(answer[0], answer[1])
    where = f"model '{spec}': the sample of {name}()"
    batches = batches_of(answer[1], seed, len(answer) == 3, where)
    return Model(
        spec,
        tuple(partial(_same, layer) for _, layer in layers),
        tuple(called for called, _ in layers),
        batches,
        answer[2] if len(answer) == 3 else _mean_square,
        ties(enumerate(layer for _, layer in layers)),
        **beside,
    )


def _named(layers: Any, sample: Any) -> list[tuple[str, nn.Module]]:
    """(name, layer) of the layers in a list, nn.ModuleList or nn.Sequential, or in a model that `layers_of` can split. Names
    are the container's; layers without one are named by number and class. Raises BadInput."""
    if isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential | nn.ModuleList):
        layers = layers_of(layers, sample[0] if isinstance(sample, tuple) else None)
    if isinstance(layers, nn.Sequential) and type(layers).forward is not nn.Sequential.forward:
        raise BadInput(f"returns a {type(layers).__name__}, whose forward is its own: return the layers in their order")
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        # `named_children` would list a module that occurs twice only once.
        children = layers.named_modules(remove_duplicate=False)
        rows = [(name, layer) for name, layer in children if name and "." not in name]
    else:
        rows = [(str(i), layer) for i, layer in enumerate(layers)] if isinstance(layers, list | tuple) else []
    named = [(f"{name}.{type(mod).__name__}" if name.isdecimal() else name, mod) for name, mod in rows if mod is not None]
    if not named or not all(isinstance(layer, nn.Module) for _, layer in named):
        raise BadInput("must return a list of nn.Modules, an nn.ModuleList or an nn.Sequential first")
    return named


def _same(layer: nn.Module) -> nn.Module:
    return layer


def _mean_square(output: Any, target: Any) -> Tensor:
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return reduce(torch.add, [tensor.float().pow(2).mean() for tensor in tensors])


def _module(place: str, spec: str) -> Any:
    """A module by its name (the current directory counts), or by the path of its file. Raises BadInput."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        if not Path(place).is_file():
            raise BadInput(f"model '{spec}': no such file: {place}")
        file_spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert file_spec is not None
        assert file_spec.loader is not None
        module = importlib.util.module_from_spec(file_spec)
        sys.modules.setdefault(file_spec.name, module)
        file_spec.loader.exec_module(module)
        return module
    except BadInput:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and not own_line(error):
            raise BadInput(f"model '{spec}': no module named '{error.name}'") from None
        raise BadInput(f"model '{spec}': importing {place} raised {raised(error)}") from error
