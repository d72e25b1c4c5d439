"""Recompute: stages that drop their activations after F and make them again before B, in passes X.

Its builder (`with_recompute`) is part of the plain step: only that knows what fits without the activations.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..build.recompute import recomputed_stages
from ..kinds import RECOMPUTE as NAME
from ..problem import Problem
from .feature import Feature, Field, is_auto


def _check(step: Any) -> None:
    if step.stages and not is_auto(step.recompute):
        recomputed_stages(step.recompute, step.stages)


def _told(problem: Problem) -> tuple[int, ...]:
    return tuple(np.unique(problem.passes.stage[problem.rows("X")]).tolist())


RECOMPUTE = Feature(
    NAME,
    (
        Field(
            "recompute",
            (),
            "all, or 0,4-7: stages that drop activations after F, for a pass X; auto: as the search decides",
            "STAGES",
            closed=(),
            told=_told,
        ),
    ),
    _check,
)
