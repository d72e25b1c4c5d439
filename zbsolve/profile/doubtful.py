"""Doubts about a profile's numbers, and about a schedule that was made for another model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..features.table import FEATURES
from ..partition.layer import Layer, layer_ranges
from ..util.text import printable
from .profile import Profile

LONG_SPLIT, SHORT_SPLIT = 1.1, 0.9  # limits of (B + W) / BW for a warning


def doubts(profile: Profile) -> list[str]:
    """The profiler's warnings, B and W far from BW, and what features doubt of their costs; a line each."""
    warned = profile.facts.get("warnings", [])
    notes = [printable(str(note)) for note in warned] if isinstance(warned, list) else []
    further = filter(None, (feature.doubt(profile) for feature in FEATURES))
    return [*dict.fromkeys((*notes, *split_doubts(profile.layers), *further))]


def split_doubts(layers: Sequence[Layer]) -> list[str]:
    """A warning if B and W together take much more or much less than BW, for layers that have both."""
    apart, fused = sum(layer.B + layer.W for layer in layers), sum(layer.BW for layer in layers)
    if not apart or not fused or SHORT_SPLIT * fused <= apart <= LONG_SPLIT * fused:
        return []
    ratio = f"(B + W) / BW is {apart / fused:.2f}"
    if apart > fused:
        return [f"{ratio}: splitting the backward costs more than many bubbles; compare with --fused"]
    return [f"{ratio}: B and W do the work of BW, so much of what they gain on a schedule with BW is no schedule's merit"]


def other_model(source: str, model: str) -> str:
    """A warning if a schedule's times, from `source` (see `Problem.source`), are of another model; "" if they are of this
    one, or given by the user. The same function of the same file may be in another folder."""
    same = f": {_short(model)}, " in f"{_short(source)}, "
    if same or not source or source.startswith("given"):
        return ""
    times = re.sub(r" \((?:[^()]|\([^()]*\))*\)", "", source)  # without notes in brackets, which fill lines
    return f"WARNING: the schedule was made by the times '{printable(times)}', and the model here is {printable(model)}"


def model_said_by(source: str) -> str:
    """The model at the end of a schedule's `Problem.source`. (Settings of a Hugging Face model contain ": ".)"""
    front, brace, settings = source.partition("{")
    return front.rpartition(": ")[2] + brace + settings


def _short(name: str) -> str:
    """A name that ends in `folder/file.py:function` or `package.module:function`, without the folders."""
    return re.sub(r"\S*[/\\.](?=[^/\\.\s:]+:\w+$)", "", name.replace(".py:", ":"))


NOTABLE = 0.01  # a share of a stage's passes


def rounding_note(profile: Profile, counts: Sequence[int]) -> str:
    """A note if rounding to whole µs changes a time by more than 1 % of its stage's passes, about the time with the largest
    change; else "". counts: layers of each stage."""
    share, what, exact = max(change for i, here in enumerate(layer_ranges(counts)) for change in _changes(profile, i, here))
    if share <= NOTABLE:
        return ""
    return (
        f"times are rounded to whole µs: {what}, {exact:.3g} µs, counts as {round(exact)} µs. Give times 1,000 times as "
        "long to keep them"
    )


def _changes(profile: Profile, stage: int, numbers: range) -> list[tuple[float, str, float]]:
    """For each time of a stage: (change by rounding as a share of the stage's passes, name, µs)."""
    layers = [profile.layers[i] for i in numbers]
    kinds = ("F", "BW") if profile.fused_only else ("F", "B", "W")
    times = {f"{kind} of stage {stage}": sum(getattr(layer, kind) for layer in layers) for kind in kinds}
    work = sum(times.values())
    if layers:
        times[f"the message of stage {stage}"] = profile.link.message(layers[-1])
    return [(abs(round(time) - time) / work if work else 0.0, what, time) for what, time in times.items()]
