"""In which order features come into a step."""

from __future__ import annotations

from ..problem import Problem
from ..util.errors import BadInput


def check_before(problem: Problem, feature: str, *later: str) -> None:
    """Raise BadInput where a step has the feature already (see `kinds.Kind`), or one of those that come in behind it."""
    for one in (feature, *later):
        if problem.passes.that(feature=one).any():
            behind = "" if one == feature else f": put {feature} in before"
            raise BadInput(f"{feature}: the problem has {one} already{behind}")
