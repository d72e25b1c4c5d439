"""A profile's step as a named schedule runs it: the one meaning of a name wherever schedules are compared."""

from __future__ import annotations

from ..profile.profile import Profile
from ..step import Step
from ..util.errors import BadInput
from .table import system


def step_for(name: str, profile: Profile, step: Step) -> Step:
    """`step` with the backward of the system called `name`, fused or split, whatever the step says: 1F1B is fused. Stages,
    placement and all else stay (see `Step.with_backward`). Raises BadInput, Infeasible."""
    if profile.fused_only and not system(name).fused:
        raise BadInput(f"{name}: needs B and W apart, and profile '{profile.model}' has one backward BW alone")
    return step.with_backward(profile, system(name).fused)
