"""A bound that holds whatever stages keep: that of a schedule holds for its own choice."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from ..features.feature import is_auto
from ..features.offload import FULL, NO_OFFLOAD
from ..ilp.bounds.any_choice import bound_over_choices
from ..ilp.bounds.closed_forms import closed_form
from ..profile.profile import Profile
from ..step import Step
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
