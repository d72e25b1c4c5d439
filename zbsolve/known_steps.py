"""What step a problem was made of, told from its passes, and that step on another profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .build.joined import with_fused_backward
from .features.table import FEATURES
from .kinds import TABLE, WORK
from .partition.file import SPREAD
from .problem import Problem
from .profile.profile import Profile
from .step import STEP_FIELDS, Step
from .tables import Bools
from .util.errors import BadInput


def step_again(problem: Problem, profile: Profile, memory: str | int | None = None, replicas: int | None = None) -> Problem:
    """The step that a problem is of, on a profile's times and sizes.

    A problem says what its step is but for two numbers: over how many ranks parameters are sharded, which is refused, and
    over how many replicas gradients are summed, where it has passes C. memory: bytes a rank; None: the profile's capacity.
    Raises BadInput, Infeasible.
    """
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
    """The same, but for what a problem does not say: without sums of gradients where `replicas` is 1, and never with
    passes that gather or reduce parameters."""
    if not (profile.microbatch_factors or problem.sizes) and _of_unlike_lengths(problem):
        raise BadInput("its microbatches differ in length, and it does not say how: solve it anew with the lengths")
    asked = Step(**_words(problem), memory=memory)
    return with_backwards_of(replace(asked, replicas=replicas), profile, *_backwards(problem))


def _of_unlike_lengths(problem: Problem) -> bool:
    """Whether forwards of a stage, of whole sequences on one rank, take unlike times."""
    if problem.slices > 1 or len(problem.routes) > 1:
        return False
    return any(len(np.unique(problem.passes.duration[rows[rows >= 0]])) > 1 for rows in problem.grid("F"))


def _words(problem: Problem) -> dict[str, Any]:
    """What a problem's passes say of its `Step`, but for its backwards, which may be of both kinds."""
    words = {field.name: field.told(problem) for field in STEP_FIELDS if field.name != "fused"}
    return {name: value for name, value in words.items() if value is not None}


def _backwards(problem: Problem) -> tuple[Bools, Bools]:
    """Which microbatches of which stages have a BW, and which a B or W; shape (stages, microbatches) each."""
    stages = problem.model_stages
    return problem.grid("BW")[:stages] >= 0, problem.grid("B", "W")[:stages] >= 0


def with_backwards_of(asked: Step, profile: Profile, whole: Bools, split: Bools) -> Problem:
    """The step where `whole`, shape (stages, microbatches), says which backwards are one pass BW, and `split` which have a B
    or a W. Where it has some of each, the problem is a mixture of both. Raises BadInput, Infeasible."""
    if not (whole & ~split).any():
        return asked.problem(profile)
    if not split.any():
        return asked.with_backward(profile, fused=True).problem(profile)
    fused = asked.with_backward(profile, fused=True).problem(profile)
    rows = fused.grid("BW")[: len(whole)]
    times = np.where(rows >= 0, (fused.passes.duration - fused.sending)[rows], 0)
    return with_fused_backward(asked.with_backward(profile, fused=False).problem(profile), whole & ~split, times)
