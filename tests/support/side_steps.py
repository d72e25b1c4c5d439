"""What tests/exec/test_sides.py runs on gloo ranks: models with side inputs, every message counted."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from zbsolve import Problem, pipeline
from zbsolve.build import with_side_inputs
from zbsolve.models.by_name import load
from zbsolve.models.model import Model
from zbsolve.models.sides import names_of
from zbsolve.partition.layer import Given, Layer, begun_stages
from zbsolve.partition.stage_memory import side_inputs

from .exec_tools import batch_of
from .trials import Trial

MICROBATCHES = 4


def doubled(name: str) -> Model:
    """A model of `side_models` in float64, whose layers are made anew whenever they are built."""
    torch.set_default_dtype(torch.float64)
    model = load(f"tests.support.side_models:{name}", 0)
    return replace(model, layers=tuple(partial(deepcopy, build()) for build in model.layers))


def step_of(model: Model, placement: Sequence[int], counts: Sequence[int], fused: bool, **how: Any) -> Problem:
    """A step with the side inputs of the model; whole numbers have no gradient."""
    layers = []
    for i, layer in enumerate(model.build()):
        gives, takes, begins = names_of(layer, i)
        given = tuple(Given(name, 8, gradient=name != "words") for name in gives)
        layers.append(Layer(str(i), 1, 1, 1, 1, 0, 0, 0, 0, gives=given, takes=takes, begins=begins))
    times = {"BW": [20] * len(counts)} if fused else {"B": [10] * len(counts), "W": [10] * len(counts)}
    where = {"placement": tuple(placement), "microbatches": MICROBATCHES, "comm": 3, "layers": tuple(counts), "X": 10}
    plain = pipeline([10] * len(counts), **times, **where | how)
    return with_side_inputs(plain, *side_inputs(layers, counts), begins=begun_stages(layers, counts))


def trial_of(model: Model, problem: Problem, **how: Any) -> Trial:
    """Steps of a model by name, whose pipelines beside each other have batches of their own."""
    how |= {"layers": model.build, "loss": model.loss}
    return Trial(problem=problem, batch=lambda place, step: batch_of(model, MICROBATCHES, place), **how)
