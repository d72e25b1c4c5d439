"""Problems for named schedules: an example problem for each, and a profile's step with a named schedule's backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..build.numbers import Numbers
from ..build.offload import Host, with_offload
from ..build.plain import pipeline
from ..build.updates import with_updates
from ..build.vocabulary import Vocabulary, with_vocabulary
from ..features.cuts import EVEN_WORK
from ..features.feature import AUTO
from ..features.table import usual
from ..features.vocabulary import on_all_ranks
from ..kinds import OFFLOAD, SLICES, UPDATES, VOCABULARY
from ..partition.file import Partition
from ..problem import Problem
from ..problem import placement as placements
from ..profile.profile import Profile
from ..profile.step import Step
from ..schedule import Schedule
from ..util.errors import BadInput, Infeasible
from .table import SYSTEMS, System, preset, system

# Option that only some systems take → the feature of these.
OWN = {
    **dict.fromkeys(("O", "R"), OFFLOAD),
    "vocabulary": VOCABULARY,
    "slices": SLICES,
    **dict.fromkeys(("update", "parameter_bytes"), UPDATES),
}


def problem_for(
    name: str, ranks: int, microbatches: int, F: Numbers = 1, B: Numbers = 1, W: Numbers = 1, **options: Any
) -> Problem:
    """A problem on which a named system is defined: its placement, its kinds of passes, its updates.

    name: as `zbsolve show systems` lists it.
    ranks, microbatches: their numbers.
    F, B, W: µs, one number or one for each stage.
    options: arguments of `pipeline` (such as AF, the all-to-alls of DualPipe), and some for certain systems:
        update, parameter_bytes: µs of a stage's update and bytes of its weights, for asynchronous systems.
        O, R: µs of copies out and back, for systems that offload; by default the same as F, with one byte held by F.
        vocabulary: costs of shards, for systems with a sharded vocabulary; by default one barrier, and S and T are half of
            the longest F.
        slices: their number, for systems with slices (F, B, W are then of a slice); by default one for each rank.

    Raises BadInput for an unknown system, and for options or numbers that it does not allow.
    """
    entry = system(name)
    _check_options(entry, options)
    update = {"time": options.pop("update", 0), "parameter_bytes": options.pop("parameter_bytes", 0)}
    out, back = options.pop("O", F), options.pop("R", F)
    vocabulary = options.pop("vocabulary", None)
    if entry.copies is not None and not {"held_until_B", "held_until_W"} & set(options):
        options["held_until_W"] = 1
    if entry.feature == SLICES:
        options.setdefault("slices", max(2, ranks))
    routes = placements.parse_routes(entry.placement, ranks)
    times: dict[str, Any] = {"BW": _sum(B, W)} if entry.fused else {"B": B, "W": W}
    step = pipeline(F, placement=routes, microbatches=microbatches, **times, **options)
    if entry.copies is not None:
        return with_offload(step, out, back, which=entry.copies(step, out, back), host=Host(shared_bus=1))
    if entry.feature == VOCABULARY:
        half = (max(F) if isinstance(F, Sequence) else F) // 2
        return with_vocabulary(step, vocabulary or Vocabulary(half, half))
    if entry.rounds is None:
        return step
    every, delay = entry.rounds(ranks, microbatches)
    return with_updates(step, every=every, delay=delay, **update)


def _check_options(entry: System, options: dict[str, Any]) -> None:
    for name, feature in OWN.items():
        if options.get(name) is not None and entry.feature != feature:
            those = ", ".join(other.name for other in SYSTEMS if other.feature == feature)
            raise BadInput(f"{entry.name}: has no option '{name}', which is for {those}")


def _sum(B: Any, W: Any) -> Any:
    if isinstance(B, Sequence) and isinstance(W, Sequence):
        return [_sum(b, w) for b, w in zip(B, W, strict=True)]
    if isinstance(B, Sequence) or isinstance(W, Sequence):
        raise BadInput("B and W: give both as one number, or both as one a stage")
    return B + W


# --- A profile's step for a named system: every comparison of schedules uses it ---


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
