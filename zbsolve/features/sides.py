"""A profile's step with side inputs: layers say what they give and take, of how many bytes, and where a row begins."""

from __future__ import annotations

from typing import Any

from ..build.mixing import checked_room
from ..build.sides import with_side_inputs
from ..layer import begun_stages
from ..partition.stage_memory import side_inputs
from ..problem import Problem
from .feature import Apart, Feature
from .links import SENDER, SHARE, SITES

NAME = "side inputs"


def has_sides(profile: Any) -> bool:
    """Whether a layer gives or takes some, or begins a row of its own."""
    return any(any(layer.names) for layer in profile.layers)


def _build(problem: Problem, staged: Any) -> Problem:
    if not has_sides(staged.profile):
        return problem
    sides = side_inputs(staged.model.layers, staged.counts, staged.profile.link)
    whole = with_side_inputs(problem, *sides, begins=begun_stages(staged.model.layers, staged.counts))
    return whole if staged.profile.microbatch_factors else checked_room(whole)


NOT_YET = "all-to-all", "submeshes", SHARE, SITES  # others say it themselves
SIDES = Feature(
    NAME,
    build=_build,
    holds={NAME: lambda seen: seen.profile is not None and has_sides(seen.profile)},
    apart=(
        *(Apart(NAME, other, f"do not go with {other} yet") for other in NOT_YET),
        Apart(NAME, SENDER, "messages of this link occupy their sender, and theirs do not"),
    ),
)
