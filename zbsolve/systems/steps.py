"""A profile's step as a named schedule runs it: the one meaning of a name wherever schedules are compared."""

from __future__ import annotations

from dataclasses import replace

from ..features.cuts import EVEN_WORK
from ..features.feature import AUTO
from ..features.offload import NO_OFFLOAD
from ..features.sharded_vocabulary import LAST, REDISTRIBUTE
from ..partition.file import Partition
from ..problem import Problem
from ..profile.profile import Profile
from ..schedule import Schedule
from ..step import Step
from ..util.errors import BadInput, Infeasible
from .table import SYSTEMS, preset, system

USUAL = "1f1b"


def step_for(name: str, profile: Profile, step: Step) -> Step:
    """`step` with the backward of a named system, fused or split, whatever the step says: 1F1B is fused.

    name: of the system.
    profile: what the step is of.
    step: stages, placement and all else stay (see `Step.with_backward`). Slices take as long as each other where the system
        cuts so.

    Raises BadInput, Infeasible.
    """
    one = system(name)
    if profile.fused_only and not one.fused:
        raise BadInput(f"{name}: needs B and W apart, and profile '{profile.model}' has one backward BW alone")
    if one.even_work and isinstance(step.slices, int) and step.slices > 1:
        step = replace(step, slices=f"{step.slices}:{EVEN_WORK}")
    return step.with_backward(profile, one.fused)


def check_backward(name: str, problem: Problem, path: str) -> None:
    """Raise BadInput where a problem, that of the file at `path`, does not have the backward of the system called `name`:
    its order on the other backward is another schedule. Only a profile knows the times of both."""
    one, kinds = system(name), problem.passes.kinds
    if one.fused and "W" in kinds:
        said = f"{name}: needs one backward BW, and {path} has B and W apart"
    elif not one.fused and "BW" in kinds:
        said = f"{name}: needs B and W apart, and {path} has one backward BW"
    else:
        return
    other = one.split or next((fused.name for fused in SYSTEMS if fused.split == name), "")
    same = f"the same order there is {other}; " if other else ""
    raise BadInput(f"{said}: {same}name a profile, which has the times of both")


def usual_schedule(profile: Profile, step: Step, layers: tuple[int, ...]) -> Schedule | None:
    """1F1B of the profile on the step's ranks, without a limit of memory: what people run today, to hold others against.

    layers: of each stage, where those are to be kept, as they are where each rank has one stage. Else they are the step's
    partition, or balanced where that is left to the search, or the vocabulary is sharded, as it is not here. None where no
    layers make one stage a rank.
    """
    kept, whole = step.partition, step.vocabulary in (None, LAST, REDISTRIBUTE)
    if len(layers) == step.ranks and whole and not isinstance(kept, Partition):
        kept = layers
    elif kept in (None, AUTO) or not isinstance(kept, str | Partition):
        kept = "balanced"
    try:
        whole_sequences = step.closed.in_slices(1)
        plain = replace(
            whole_sequences, placement="single", partition=kept, memory=None, offload=NO_OFFLOAD, vocabulary=None
        )
        return preset(USUAL, step_for(USUAL, profile, plain).problem(replace(profile, capacity=None)))
    except (BadInput, Infeasible):
        return None
