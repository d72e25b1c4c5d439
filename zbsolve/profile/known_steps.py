"""From a problem back to its `Step`, as far as its passes tell, and the same step on another profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..build.joined import with_fused_backward
from ..features.table import FEATURES
from ..kinds import TABLE, WORK
from ..partition.file import SPREAD
from ..problem import Problem
from ..problem.tables import Bools
from ..util.errors import BadInput
from .profile import Profile
from .step import STEP_FIELDS, Step


def step_again(problem: Problem, profile: Profile, memory: str | int | None = None, replicas: int | None = None) -> Problem:
    """The problem of the same step, with the times and sizes of another profile.

    problem: tells its step, but for two numbers: over how many ranks parameters are sharded (such steps are refused), and
        over how many replicas gradients are summed.
    memory: bytes a rank; None: the profile's capacity. replicas: needed if the problem has passes C.

    Raises BadInput, Infeasible."""
    if not problem.layers:
        raise BadInput("it does not say how many layers each stage has, so the profile says nothing of its times")
    if sum(problem.layers) != len(profile.layers):
        raise BadInput(f"an order for {sum(problem.layers)} layers, and the profile has {len(profile.layers)}")
    if SPREAD in problem.source:
        raise BadInput("its stages lie on submeshes, and it does not say of how many devices: solve it with the profile")
    given = {} if replicas is None else {"replicas": replicas}
    for feature in FEATURES:
        kinds = [kind for kind in problem.passes.kinds if TABLE[kind].feature == feature.name]
        for field in [row for row in feature.fields if kinds and row.untold and row.name not in given]:
            raise BadInput(f"it has passes {' '.join(kinds)}, and does not say {field.untold}")
    works, e = problem.passes.that(feature=WORK), problem.edges
    if (works[e.before] & ((e.bytes > 0) | (e.carries > 0))).any() or (works[e.before] != works[e.after]).any():
        raise BadInput("it has work with a moment or bytes of its own (passes J): solve it anew with --work")
    return timed_by(problem, profile, memory, **given)


def timed_by(problem: Problem, profile: Profile, memory: str | int | None = None, replicas: int = 1) -> Problem:
    """`step_again` without its checks: no sums over replicas if `replicas` is 1, and never passes of sharding."""
    if not (profile.microbatch_factors or problem.sizes) and _of_unlike_lengths(problem):
        raise BadInput("its microbatches differ in length, and it does not say how: solve it anew with the lengths")
    asked = Step(**_words(problem), memory=memory)
    return with_backwards_of(replace(asked, replicas=replicas), profile, *_backwards(problem))


def _of_unlike_lengths(problem: Problem) -> bool:
    """Whether F of one stage takes different times; asked only of steps without slices and with one route."""
    if problem.slices > 1 or len(problem.routes) > 1:
        return False
    return any(len(np.unique(problem.passes.duration[rows[rows >= 0]])) > 1 for rows in problem.grid("F"))


def _words(problem: Problem) -> dict[str, Any]:
    """The fields of `Step` that a problem tells, except `fused`: it may have backwards of both kinds."""
    words = {field.name: field.told(problem) for field in STEP_FIELDS if field.name != "fused"}
    return {name: value for name, value in words.items() if value is not None}


def _backwards(problem: Problem) -> tuple[Bools, Bools]:
    """Which backwards are one pass BW, and which have a B or W; shape (stages, microbatches) each."""
    stages = problem.model_stages
    return problem.grid("BW")[:stages] >= 0, problem.grid("B", "W")[:stages] >= 0


def with_backwards_of(asked: Step, profile: Profile, whole: Bools, split: Bools) -> Problem:
    """The problem of a step whose backwards are one pass BW where `whole` says so, and B and W where `split` does; shape
    (stages, microbatches) each. Raises BadInput, Infeasible."""
    if not (whole & ~split).any():
        return asked.problem(profile)
    if not split.any():
        return asked.with_backward(profile, fused=True).problem(profile)
    fused = asked.with_backward(profile, fused=True).problem(profile)
    rows = fused.grid("BW")[: len(whole)]
    times = np.where(rows >= 0, (fused.passes.duration - fused.sending)[rows], 0)
    return with_fused_backward(asked.with_backward(profile, fused=False).problem(profile), whole & ~split, times)
