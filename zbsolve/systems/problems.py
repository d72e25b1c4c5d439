"""A problem to see a named schedule on, and a profile's step as a named schedule runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .. import placement as placements
from ..build.numbers import Numbers
from ..build.offload import Host, with_offload
from ..build.plain import pipeline
from ..build.updates import with_updates
from ..build.vocabulary import Vocabulary, with_vocabulary
from ..features.cuts import EVEN_WORK
from ..features.feature import AUTO
from ..features.offload import NO_OFFLOAD
from ..features.sharded_vocabulary import BARRIERS
from ..partition.file import Partition
from ..problem import Problem
from ..profile.profile import Profile
from ..schedule import Schedule
from ..step import Step
from ..util.errors import BadInput, Infeasible
from .table import SYSTEMS, System, preset, system

# Options that only some systems take → the field that says which.
OWN = {
    "O": "copies",
    "R": "copies",
    "vocabulary": "vocabulary",
    "slices": "slices",
    "update": "rounds",
    "parameter_bytes": "rounds",
}


def problem_for(
    name: str, ranks: int, microbatches: int, F: Numbers = 1, B: Numbers = 1, W: Numbers = 1, **options: Any
) -> Problem:
    """A problem on which a named system is defined: its placement, its kinds of passes, its updates.

    name: as `zbsolve systems` lists it.
    ranks, microbatches: how many.
    F, B, W: µs a stage.
    options: others go to `pipeline` (AF: the all-to-alls that DualPipe is about), but these depend on the system.
        update, parameter_bytes: µs and bytes of a stage's update and weights, for asynchronous systems.
        O, R: µs a stage of copies out and back, for those that offload: by default as long as F, with one byte held by F.
        vocabulary: costs of shards, for those with a sharded vocabulary: by default one barrier, S and T half of the longest
            F.
        slices: how many, of which times are, for those with slices: by default one a rank.

    Raises BadInput for an unknown system, and for options or numbers that it does not allow.
    """
    entry = system(name)
    _check_options(entry, options)
    update = {"time": options.pop("update", 0), "parameter_bytes": options.pop("parameter_bytes", 0)}
    out, back = options.pop("O", F), options.pop("R", F)
    vocabulary = options.pop("vocabulary", None)
    if entry.copies is not None and not {"held_until_B", "held_until_W"} & set(options):
        options["held_until_W"] = 1
    if entry.slices:
        options.setdefault("slices", max(2, ranks))
    routes = placements.parse_routes(entry.placement, ranks)
    times: dict[str, Any] = {"BW": _sum(B, W)} if entry.fused else {"B": B, "W": W}
    step = pipeline(F, placement=routes, microbatches=microbatches, **times, **options)
    if entry.copies is not None:
        return with_offload(step, out, back, which=entry.copies(step, out, back), host=Host(shared_bus=1))
    if entry.vocabulary:
        half = (max(F) if isinstance(F, Sequence) else F) // 2
        return with_vocabulary(step, vocabulary or Vocabulary(half, half))
    if entry.rounds is None:
        return step
    every, delay = entry.rounds(ranks, microbatches)
    return with_updates(step, every=every, delay=delay, **update)


def _check_options(entry: System, options: dict[str, Any]) -> None:
    for name, field in OWN.items():
        if options.get(name) is not None and not getattr(entry, field):
            those = ", ".join(other.name for other in SYSTEMS if getattr(other, field))
            raise BadInput(f"{entry.name}: has no option '{name}', which is for {those}")


def _sum(B: Any, W: Any) -> Any:
    if isinstance(B, Sequence) and isinstance(W, Sequence):
        return [_sum(b, w) for b, w in zip(B, W, strict=True)]
    if isinstance(B, Sequence) or isinstance(W, Sequence):
        raise BadInput("B and W: give both as one number, or both as one a stage")
    return B + W


# --- Of a profile: the one meaning of a name wherever schedules are compared ---


USUAL = "1f1b"


def step_for(name: str, profile: Profile, step: Step) -> Step:
    """`step` with the backward of a named system, fused or split, whatever the step says: 1F1B is fused.

    name: of the system.
    profile: what the step is of.
    step: stages, placement and all else stay (see `Step.with_backward`). Slices take as long as each other where the system
        cuts so.

    Raises BadInput, Infeasible.
    """
    entry = system(name)
    if profile.fused_only and not entry.fused:
        raise BadInput(f"{name}: needs B and W apart, and profile '{profile.model}' has one backward BW alone")
    if entry.even_work and isinstance(step.slices, int) and step.slices > 1:
        step = replace(step, slices=f"{step.slices}:{EVEN_WORK}")
    return step.with_backward(profile, entry.fused)


def check_backward(name: str, problem: Problem, path: str) -> None:
    """Raise BadInput where a problem, that of the file at `path`, does not have the backward of the system called `name`:
    its order on the other backward is another schedule. Only a profile knows the times of both."""
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
    """1F1B of the profile on the step's ranks, without a limit of memory: what people run today, to hold others against.

    layers: of each stage, where those are to be kept, as they are where each rank has one stage. Else they are the step's
    partition, or balanced where that is left to the search, or the vocabulary is sharded, as it is not here. None where no
    layers make one stage a rank.
    """
    kept = step.partition
    if len(layers) == step.ranks and step.vocabulary not in (*BARRIERS, AUTO) and not isinstance(kept, Partition):
        kept = layers
    elif kept in (None, AUTO) or not isinstance(kept, str | Partition):
        kept = "balanced"
    try:
        whole = {"slices": 1, "attention_exchange": False, "offload": NO_OFFLOAD, "vocabulary": None}
        plain = replace(step.closed, placement="single", partition=kept, memory=None, **whole)
        return preset(USUAL, step_for(USUAL, profile, plain).problem(replace(profile, capacity=None)))
    except (BadInput, Infeasible):
        return None
