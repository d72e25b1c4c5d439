"""Models by name: a preset such as `gpt-tiny`, or your own as `module:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbsolve.errors import BadInput

Place = tuple[int, str]  # (layer, name of the parameter inside it)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Model:
    """A model as a row of layers.

    layers: builders, each makes one layer, with the same numbers whichever rank calls it. layer_names: a name each.
    batch(microbatch, step): inputs and targets. loss(output, target): a mean, one number. tied: groups of places that
    hold one parameter (the first of a group gives the starting values).
    """

    name: str
    layers: tuple[Callable[[], nn.Module], ...]
    layer_names: tuple[str, ...]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    tied: tuple[tuple[Place, ...], ...] = ()

    def build(self, layers: Sequence[int] | None = None) -> list[nn.Module]:
        """The layers numbered `layers` (all without), tied among each other where both are there; a tied parameter
        whose first place is not among them has that place's starting values."""
        numbers = list(range(len(self.layers))) if layers is None else list(layers)
        made = {i: self.layers[i]() for i in numbers}
        for group in self.tied:
            here = [(i, path) for i, path in group if i in made]
            if not here:
                continue
            first, path = group[0]
            owner = made[first] if first in made else self.layers[first]()
            shared = owner.get_parameter(path)
            for i, name in here:
                parent, _, last = name.rpartition(".")
                setattr(made[i].get_submodule(parent), last, shared)
        return [made[i] for i in numbers]


@dataclass(frozen=True, slots=True)
class Setting:
    """What `@key=value,…` behind a name changes: samples a microbatch, their length, blocks, type; None: as published."""

    batch: int | None = None
    length: int | None = None
    layers: int | None = None
    dtype: str | None = None

    def named(self, name: str) -> str:
        """The name that gives this model again."""
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) is not None]
        return f"{name}@{','.join(parts)}" if parts else name


def parse_setting(text: str, spec: str) -> Setting:
    """A Setting from `batch=1,length=512`. Raises BadInput."""
    values: dict[str, Any] = {}
    for part in text.split(",") if text else []:
        key, _, value = part.strip().partition("=")
        if key not in Setting.__dataclass_fields__ or not value:
            raise BadInput(f"model '{spec}': '{part.strip()}' is none of batch=, length=, layers=, dtype=")
        if key == "dtype":
            if value not in DTYPES:
                raise BadInput(f"model '{spec}': dtype '{value}' is none of {', '.join(DTYPES)}")
            values[key] = value
        elif not value.isdecimal() or not 0 < int(value) < 10**9:
            raise BadInput(f"model '{spec}': {key} '{value}' is not a positive whole number")
        else:
            values[key] = int(value)
    return Setting(**values)


def load(spec: str, seed: int = 0) -> Model:
    """The model called `spec`: a preset (`gpt-tiny`, or a published one such as `llama3-8b@layers=2,length=512`),
    `module:function`, `file.py:function`, or a Hugging Face config such as `hf:LlamaConfig{"num_hidden_layers": 4}`.

    `mlp-24` has 24 small layers.

    `module:function`: the function returns `(layers, sample)` or `(layers, sample, loss)`. layers: an ordered list of
    modules, an nn.ModuleList or an nn.Sequential; sample: `(input, target)`, or just an input; without a loss it must be
    just the input, and the loss is the mean square of the output. Raises BadInput.
    """
    from .presets import PRESETS, STAND_IN, mlp
    from .published import PUBLISHED, published

    if spec.startswith("hf:"):
        from .huggingface import causal_model

        return causal_model(spec, seed)
    name, _, rest = spec.partition("@")
    if name in PUBLISHED:
        return published(name, seed, parse_setting(rest, spec))
    if spec in PRESETS:
        return PRESETS[spec](seed)
    if match := STAND_IN.fullmatch(spec):
        return mlp(seed, int(match[1]), spec)
    if ":" in spec:
        return _own(spec, seed)
    known = [*PRESETS, *PUBLISHED]
    if name in PRESETS:
        raise BadInput(f"model '{spec}': {name} takes no '@{rest}'; published models do: {', '.join(PUBLISHED)}")
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise BadInput(f"model '{spec}': unknown{hint} (presets: {', '.join(known)}, mlp-N; or your own as module:function)")


def seeded(seed: int, layer: int, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A builder whose random numbers depend on (seed, layer) only; torch's generator is left as it was."""

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed * 1_000_003 + layer)
            return build()

    return make


def _own(spec: str, seed: int) -> Model:
    """The user's model: the function is called once, in every process that needs it."""
    place, _, name = spec.rpartition(":")
    function = getattr(_module(place, spec), name, None)
    if not callable(function):
        raise BadInput(f"model '{spec}': {place} has no function '{name}'")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            answer = function()
        except Exception as error:
            raise BadInput(f"model '{spec}': {name}() raised {type(error).__name__}: {one_line(error)}") from None
    if not isinstance(answer, tuple) or len(answer) not in (2, 3):
        raise BadInput(f"model '{spec}': {name}() must return (layers, sample) or (layers, sample, loss)")
    layers = _named(answer[0], f"model '{spec}': {name}()")
    sample = answer[1] if isinstance(answer[1], tuple) else (answer[1], torch.zeros(()))
    if len(sample) != 2 or not all(isinstance(part, Tensor) for part in sample):
        raise BadInput(f"model '{spec}': the sample of {name}() must be a tensor or (input, target)")
    if len(answer) == 2 and isinstance(answer[1], tuple):
        raise BadInput(
            f"model '{spec}': {name}() gives a target, so it must give a loss too: (layers, sample, loss)"
            "; in (layers, sample) the sample is the input alone"
        )
    inputs, targets = sample
    return Model(
        spec,
        tuple(partial(_same, layer) for _, layer in layers),
        tuple(called for called, _ in layers),
        lambda microbatch, step: (inputs, targets),
        answer[2] if len(answer) == 3 else _mean_square,
        _shared([layer for _, layer in layers]),
    )


def _named(given: Any, where: str) -> list[tuple[str, nn.Module]]:
    """The layers of a list, nn.ModuleList or nn.Sequential, each with its name there, or its number and class."""
    if isinstance(given, nn.Sequential) and type(given).forward is not nn.Sequential.forward:
        raise BadInput(
            f"{where} returns a {type(given).__name__}, whose forward is its own: return the layers in their order"
        )
    if isinstance(given, nn.Sequential | nn.ModuleList):
        rows = list(given._modules.items())
    else:
        rows = [(str(i), layer) for i, layer in enumerate(given)] if isinstance(given, list | tuple) else []
    found = [(f"{name}.{type(one).__name__}" if name.isdecimal() else name, one) for name, one in rows if one is not None]
    if not found or not all(isinstance(layer, nn.Module) for _, layer in found):
        raise BadInput(f"{where} must return a list of nn.Modules, an nn.ModuleList or an nn.Sequential first")
    return found


def _same(layer: nn.Module) -> nn.Module:
    return layer


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def one_line(error: BaseException) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split()) or "no message"


def _module(place: str, spec: str) -> Any:
    """A module by name (the current directory counts) or by the path of its file."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        if not Path(place).is_file():
            raise BadInput(f"model '{spec}': no such file: {place}")
        found = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules.setdefault(found.name, module)
        found.loader.exec_module(module)
        return module
    except BadInput:
        raise
    except ModuleNotFoundError as error:
        raise BadInput(f"model '{spec}': no module named '{error.name}'") from None
    except Exception as error:
        raise BadInput(f"model '{spec}': importing {place} raised {type(error).__name__}: {one_line(error)}") from None


def _shared(layers: Sequence[nn.Module]) -> tuple[tuple[Place, ...], ...]:
    """Parameters that more than one layer holds."""
    places: dict[int, list[Place]] = {}
    for i, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            places.setdefault(id(parameter), []).append((i, name))
    return tuple(tuple(group) for group in places.values() if len(group) > 1)
