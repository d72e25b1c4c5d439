"""Side inputs in a profile's step: which layers give and take them, their bytes, and where a row of stages begins."""

from __future__ import annotations

from typing import Any

from ..build.mixing import checked_room
from ..build.sides import rows_begun, with_side_inputs
from ..partition.layer import begun_stages
from ..partition.stage_memory import side_inputs
from ..problem import Problem
from .feature import Feature, OfRun, needs_base

NAME = "side inputs"


def has_sides(profile: Any) -> bool:
    """Does a layer give or take side inputs, or begin a row of its own?"""
    return any(any(layer.names) for layer in profile.layers)


def _build(problem: Problem, staged: Any) -> Problem:
    if not has_sides(staged.profile):
        return problem
    sides = side_inputs(staged.model.layers, staged.counts, staged.profile.link)
    whole = with_side_inputs(problem, *sides, begins=begun_stages(staged.model.layers, staged.counts))
    return whole if staged.profile.microbatch_factors else checked_room(whole)


def _ran(problem: Problem) -> bool:
    return bool(problem.edges.beside.any() or rows_begun(problem))


SIDES = Feature(
    NAME,
    build=_build,
    of_run=OfRun(needs_base(_ran, "its step has side inputs", "what they are")),
    holds={NAME: lambda seen: seen.profile is not None and has_sides(seen.profile)},
)
