"""A profile's step for a named schedule, whose backward it takes: every comparison of schedules uses these."""

from __future__ import annotations

from dataclasses import replace

from ..features.cuts import EVEN_WORK
from ..features.feature import AUTO
from ..features.table import usual
from ..features.vocabulary import on_all_ranks
from ..partition.file import Partition
from ..problem import Problem
from ..schedule import Schedule
from ..systems.table import SYSTEMS, preset, system
from ..util.errors import BadInput, Infeasible
from .profile import Profile
from .step import Step

USUAL = "1f1b"


def step_for(name: str, profile: Profile, step: Step) -> Step:
    """`step` with the backward of a named system, fused or split: 1F1B's is fused.

    name: of the system.
    profile: the step's profile.
    step: its other fields stay (see `Step.with_backward`), but slices get equal times if the system needs that.

    Raises BadInput, Infeasible.
    """
    entry = system(name)
    if profile.fused_only and not entry.fused:
        raise BadInput(f"{name}: needs B and W apart, and profile '{profile.model}' has one backward BW alone")
    if entry.even_work and isinstance(step.slices, int) and step.slices > 1:
        step = replace(step, slices=f"{step.slices}:{EVEN_WORK}")
    return step.with_backward(profile, entry.fused)


def check_backward(name: str, problem: Problem, path: str) -> None:
    """Raise BadInput where a file's problem lacks the backward of the system `name`: only a profile has times of both."""
    entry, kinds = system(name), problem.passes.kinds
    if entry.fused and "W" in kinds:
        needs = f"{name}: needs one backward BW, and {path} has B and W apart"
    elif not entry.fused and "BW" in kinds:
        needs = f"{name}: needs B and W apart, and {path} has one backward BW"
    else:
        return
    other = entry.split or next((fused.name for fused in SYSTEMS if fused.split == name), "")
    same = f"the same order there is {other}; " if other else ""
    raise BadInput(f"{needs}: {same}name a profile, which has the times of both")


def usual_schedule(profile: Profile, step: Step, layers: tuple[int, ...]) -> Schedule | None:
    """1F1B of the profile on the step's ranks, without a memory limit, to compare other schedules with.

    layers: of each stage of the solved schedule. They are kept if each rank has one stage and the vocabulary is not sharded.
    Otherwise the partition is the step's, or balanced if that was left to the search. None if the layers cannot be split
    into one stage a rank.
    """
    kept = step.partition
    if len(layers) == step.ranks and not on_all_ranks(step) and not isinstance(kept, Partition):
        kept = layers
    elif kept in (None, AUTO) or not isinstance(kept, str | Partition):
        kept = "balanced"
    try:
        plain = replace(usual(step.closed), placement="single", partition=kept, memory=None)
        return preset(USUAL, step_for(USUAL, profile, plain).problem(replace(profile, capacity=None)))
    except (BadInput, Infeasible):
        return None
