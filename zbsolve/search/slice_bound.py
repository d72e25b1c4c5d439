"""A bound that holds for any number of slices of any lengths: that of a schedule holds for its own slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..features.cuts import MAX_SLICES, SEQUENCE, tokens_of
from ..features.feature import is_auto
from ..features.offload import NO_OFFLOAD
from ..features.sharded_vocabulary import BARRIERS
from ..features.slices import least_extra
from ..layer import layer_ranges
from ..problem import Problem
from ..profile.profile import Profile
from ..step import Step
from ..timeline import Floats


class OfAnySlices(NamedTuple):
    """bound: µs that no schedule in two slices or more takes less than. longer_from: so many slices or more, as many as the
    sequence's tokens allow, all take longer than the value that was asked about; None: nothing is proven of that."""

    bound: int
    longer_from: int | None


def bound_of_any_slices(profile: Profile, step: Step, layers: Sequence[int], value: int) -> OfAnySlices | None:
    """What the busiest rank computes, in any slices, beside schedules of `value` µs. layers: of each stage.

    Slices share out what a whole sequence takes, and where they were measured each takes more beside, however long it is
    (see `SliceExtra`). What goes with length is in sum the same for any lengths; what goes with length and position is at
    most half of what its slope makes of the sequence. Where ranks make each other's attention, the mean over ranks counts.
    None where ranks or microbatches are unlike, messages occupy their senders or a vocabulary is sharded: rounded parts may
    be below the whole there. Raises BadInput, Infeasible.
    """
    blocking = profile.link.blocking if step.blocking is None else step.blocking
    unlike = profile.rank_factors or profile.microbatch_factors
    if unlike or blocking or is_auto(step.vocabulary) or step.vocabulary in BARRIERS:
        return None
    whole = replace(step, slices=1, attention_exchange=False, partition=tuple(layers), memory=None, offload=NO_OFFLOAD)
    problem = replace(whole, recompute=() if is_auto(step.recompute) else step.recompute).problem(
        replace(profile, capacity=None)
    )
    works = _works(profile, problem, step.microbatches, tokens_of(profile.facts.get(SEQUENCE)) or MAX_SLICES)
    least = np.ceil(works.mean(axis=0) if step.attention_exchange else works.max(axis=0)).astype(np.int64)
    short = np.flatnonzero(least <= value)
    last = int(short[-1]) if len(short) else -1
    return None if not len(least) else OfAnySlices(int(least.min()), None if last + 1 == len(least) else last + 3)


def _works(profile: Profile, problem: Problem, microbatches: int, tokens: int) -> Floats:
    """µs that each rank computes at least in 2, 3, … slices, as many as there are tokens; shape (ranks, numbers)."""
    counts = np.arange(2, min(tokens, MAX_SLICES) + 1)
    p = problem.passes
    works = np.bincount(p.rank, p.duration, problem.ranks)[:, None] + np.zeros(len(counts))
    ranks = problem.routes[0]
    for stage, here in enumerate(layer_ranges(problem.layers)):
        for kind in p.kinds:
            if (p.are(kind) & (p.stage == stage)).any():
                works[ranks[stage]] += microbatches * least_extra([profile.layers[i] for i in here], kind, counts)
    return works
