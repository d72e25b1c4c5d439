"""In which order features come into a step."""

from __future__ import annotations

from ..kinds import OVERLAP
from ..problem import Problem
from ..util.errors import BadInput


def check_before(problem: Problem, feature: str, *later: str) -> None:
    """Raise BadInput where a step has the feature already (see `kinds.Kind`), or one of those that come in behind it."""
    if problem.passes.that(feature=feature).any():
        raise BadInput(f"{feature}: the problem has {feature} already")
    check_apart(problem, feature, *later)


def check_apart(problem: Problem, feature: str, *later: str) -> None:
    """Raise BadInput where a step has a feature that comes in behind this one: one of `later`, or passes of several stages
    as one (see `joined`), of which no other feature knows what they are of."""
    for one in (*later, OVERLAP):
        if problem.passes.that(feature=one).any():
            raise BadInput(f"{feature}: the problem has {one} already: put {feature} in before")
