"""Bounds that hold whatever stages keep, and for any number of slices of any lengths. A schedule's own bound holds for its
own choice and slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..features.cuts import MAX_SLICES, SEQUENCE, tokens_of
from ..features.feature import is_auto
from ..features.offload import FULL, NO_OFFLOAD
from ..features.sharded_vocabulary import BARRIERS
from ..features.slices import least_extra
from ..ilp.bounds.any_choice import bound_over_choices
from ..ilp.bounds.closed_forms import closed_form
from ..layer import layer_ranges
from ..problem import Problem
from ..profile.profile import Profile
from ..step import Step
from ..timeline import Floats
from ..util.errors import Infeasible
from .choices import vocabularies


def bound_of_every_choice(profile: Profile, step: Step) -> int:
    """µs that no schedule of the step takes less than, whatever is recomputed or offloaded where that is open.

    Passes that make activations again, and copies, only come on top of the step that keeps all, and memory only takes
    schedules away: so bounds of that step without a limit of memory hold. Copies that are given count where nothing can be
    recomputed, which would make them shorter. Where copies alone are open, bounds of `bound_over_choices` within the memory
    hold too. Where the vocabulary's place is open, the least of its choices counts. Raises BadInput for an open placement,
    partition or number of gathers.
    """
    if is_auto(step.vocabulary):
        return min(bound_of_every_choice(profile, one) for _, one in vocabularies(step))
    again, away = is_auto(step.recompute), is_auto(step.offload)
    step = replace(step, recompute=() if again else step.recompute)
    plain = replace(step, offload=NO_OFFLOAD if away or again else step.offload, memory=None)
    host = None if profile.host is None else replace(profile.host, memory=None)
    bounds = [closed_form(plain.problem(replace(profile, capacity=None, host=host))).value]
    if away and not again:
        with suppress(Infeasible):  # copying less may fit where a copy of all does not: then the first alone holds
            bounds.append(bound_over_choices(replace(step, offload=FULL).problem(profile)).value)
    return max(bounds)


def bound_of_every_vocabulary(profile: Profile, step: Step, known: Mapping[str, int]) -> int:
    """`bound_of_every_choice` of a step that leaves open where the vocabulary is, and nothing else; known: bounds that were
    proven of its choices, by the names of `vocabularies`. Raises BadInput."""
    return min(max(bound_of_every_choice(profile, one), known.get(name, 0)) for name, one in vocabularies(step))


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
