"""Recompute: stages that free their activations after F and compute them again before B, in passes X; for all of their
layers, or for the first ones, as in Megatron's `--recompute-method block`.

Its builder (`with_recompute`) runs in `plain_step`, since only that knows what fits without the activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..build.recompute import ALL, Recompute, recompute_in_words, recomputed_layers, recomputed_stages
from ..kinds import RECOMPUTE as NAME
from ..problem import Problem
from .feature import Feature, Field, is_auto


def _check(step: Any) -> None:
    if step.stages and not is_auto(step.recompute):
        recomputed_stages(step.recompute, step.stages)


def in_part(recompute: Recompute) -> bool:
    """Does it name a part of a stage's layers?"""
    return ":" in recompute if isinstance(recompute, str) else isinstance(recompute, Mapping)


def _told(problem: Problem) -> tuple[int, ...] | str:
    if problem.recomputed:
        return recompute_in_words(problem.recomputed, problem.layers)
    return tuple(np.unique(problem.passes.stage[problem.rows("X")]).tolist())


def _meant(recompute: Recompute, problem: Problem) -> str:
    layers = problem.layers or (1,) * problem.model_stages
    return recompute_in_words(recomputed_layers(recompute, layers), layers) or "none"


RECOMPUTE = Feature(
    NAME,
    (
        Field(
            "recompute",
            (),
            "all, or 0,4-7: stages that drop activations after F, for a pass X; 0:3,4-7:1 or all:2: those of their first "
            "3, 1 or 2 layers; auto: the search decides",
            "STAGES",
            closed=(),
            told=_told,
            meant=_meant,
            offered=(ALL,),
        ),
    ),
    _check,
    holds={"recompute of part of a stage": lambda seen: in_part(seen.step.recompute)},
)
