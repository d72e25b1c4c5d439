"""Problems for named schedules: an example problem for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..build.numbers import Numbers
from ..build.offload import Host, with_offload
from ..build.plain import pipeline
from ..build.updates import with_updates
from ..build.vocabulary import Vocabulary, with_vocabulary
from ..kinds import OFFLOAD, SLICES, UPDATES, VOCABULARY
from ..problem import Problem
from ..problem import placement as placements
from ..util.errors import BadInput
from .table import SYSTEMS, System, system

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
