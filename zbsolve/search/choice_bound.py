"""A bound that holds whatever stages keep: that of a schedule holds for its own choice."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ..ilp.bounds.any_choice import bound_over_choices
from ..ilp.bounds.closed_forms import closed_form
from ..profile.offload import FULL, NO_OFFLOAD
from ..profile.profile import Profile
from ..step import Step
from ..util.errors import Infeasible
from .choices import is_open


def bound_of_every_choice(profile: Profile, step: Step) -> int:
    """µs that no schedule of the step takes less than, whatever is recomputed or offloaded where that is open.

    Passes that make activations again, and copies, only come on top of the step that keeps all, and memory only takes
    schedules away: so bounds of that step without a limit of memory hold. Copies that are given count where nothing can be
    recomputed, which would make them shorter. Where copies alone are open, bounds of `bound_over_choices` within the memory
    hold too. Raises BadInput for an open placement, partition or number of gathers.
    """
    again, away = is_open(step.recompute), is_open(step.offload)
    step = replace(step, recompute=() if again else step.recompute)
    plain = replace(step, offload=NO_OFFLOAD if away or again else step.offload, memory=None)
    host = None if profile.host is None else replace(profile.host, memory=None)
    bounds = [closed_form(plain.problem(replace(profile, capacity=None, host=host))).value]
    if away and not again:
        with suppress(Infeasible):  # copying less may fit where a copy of all does not: then the first alone holds
            bounds.append(bound_over_choices(replace(step, offload=FULL).problem(profile)).value)
    return max(bounds)
