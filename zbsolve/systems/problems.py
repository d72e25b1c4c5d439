"""A problem to see a named schedule on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import placement as placements
from ..build.numbers import Numbers
from ..build.offload import Host, with_offload
from ..build.plain import pipeline
from ..build.updates import with_updates
from ..build.vocabulary import Vocabulary, with_vocabulary
from ..problem import Problem
from ..util.errors import BadInput
from .entry import System
from .table import SYSTEMS, system

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
    one = system(name)
    _check_options(one, options)
    update = {"time": options.pop("update", 0), "parameter_bytes": options.pop("parameter_bytes", 0)}
    out, back = options.pop("O", F), options.pop("R", F)
    vocabulary = options.pop("vocabulary", None)
    if one.copies is not None and not {"held_until_B", "held_until_W"} & set(options):
        options["held_until_W"] = 1
    if one.slices:
        options.setdefault("slices", max(2, ranks))
    routes = placements.parse_routes(one.placement, ranks)
    times: dict[str, Any] = {"BW": _sum(B, W)} if one.fused else {"B": B, "W": W}
    step = pipeline(F, placement=routes, microbatches=microbatches, **times, **options)
    if one.copies is not None:
        return with_offload(step, out, back, which=one.copies(step, out, back), host=Host(shared_bus=1))
    if one.vocabulary:
        half = (max(F) if isinstance(F, Sequence) else F) // 2
        return with_vocabulary(step, vocabulary or Vocabulary(half, half))
    if one.rounds is None:
        return step
    every, delay = one.rounds(ranks, microbatches)
    return with_updates(step, every=every, delay=delay, **update)


def _check_options(one: System, options: dict[str, Any]) -> None:
    """Raise BadInput for an option of other systems."""
    for name, field in OWN.items():
        if options.get(name) is not None and not getattr(one, field):
            those = ", ".join(other.name for other in SYSTEMS if getattr(other, field))
            raise BadInput(f"{one.name}: has no option '{name}', which is for {those}")


def _sum(B: Any, W: Any) -> Any:
    if isinstance(B, Sequence) and isinstance(W, Sequence):
        return [_sum(b, w) for b, w in zip(B, W, strict=True)]
    if isinstance(B, Sequence) or isinstance(W, Sequence):
        raise BadInput("B and W: give both as one number, or both as one a stage")
    return B + W
