"""Ranks of unlike speed and microbatches of unlike size, as a profile says.

No field of a step says them: they change all passes that come before them."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from ..build.one_microbatch import checked_room
from ..problem import Problem
from .feature import Feature

MESSAGES_ALIKE = "messages_alike"  # the fact that messages take as long for microbatches that differ


def _build(problem: Problem, staged: Any) -> Problem:
    profile = staged.profile
    problem = problem.slowed(profile.rank_factors) if profile.rank_factors else problem
    if not profile.microbatch_factors:
        return problem
    problem = replace(problem, capacity=None if staged.left is None else tuple(staged.left))
    latency = inf if profile.facts.get(MESSAGES_ALIKE) else profile.link.latency
    return checked_room(problem.scaled(profile.microbatch_factors, latency))


UNEVEN = Feature("unlike ranks and microbatches", build=_build)
