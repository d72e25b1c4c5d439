"""Doubts about a profile's numbers, and about a schedule that was made for another model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from ..features.cuts import WHOLE
from ..features.slices import slice_times, timed_slices
from ..layer import Layer, layer_ranges
from ..util.text import printable
from .profile import Profile

LONG_SPLIT, SHORT_SPLIT = 1.1, 0.9  # limits of (B + W) / BW for a warning


def doubts(profile: Profile) -> list[str]:
    """The profiler's warnings, B and W far from BW, and slices far from the lines that model them; a line each."""
    warned = profile.facts.get("warnings", [])
    notes = [printable(str(note)) for note in warned] if isinstance(warned, list) else []
    return [*dict.fromkeys((*notes, *split_doubts(profile.layers), *filter(None, [layer_errors_note(profile)])))]


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
    largest = max(chain.from_iterable(_changes(profile, i, numbers) for i, numbers in enumerate(layer_ranges(counts))))
    share, what, exact = largest
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


NOTABLE_ERROR = 0.10  # of a slice's time
SMALL = 0.01  # of all layers' time: layers that take less are left out
KINDS = ("F", "B", "W", "BW")
ADVICE = "time them longer (profile --seconds), or take fewer, longer slices"


def layer_errors_note(profile: Profile) -> str:
    """A note if slices of a layer differ by more than 10 % from their line, about the largest difference in µs; else "".
    Layers that take less than 1 % of all layers' time are left out."""
    groups = [(f"layer '{printable(layer.name)}'", [layer]) for layer in profile.layers]
    return _farthest(profile, groups, KINDS, SMALL)


def stage_errors_note(profile: Profile, counts: Sequence[int], fused: bool) -> str:
    """The same for stages, whose layers may all differ in the same direction. counts: layers of each stage."""
    stages = enumerate(layer_ranges(counts))
    groups = [(f"stage {stage}", [profile.layers[i] for i in numbers]) for stage, numbers in stages]
    return _farthest(profile, groups, ("F", "BW") if fused else ("F", "B", "W"), 0.0)


def _farthest(profile: Profile, groups: Sequence[tuple[str, list[Layer]]], kinds: Sequence[str], small: float) -> str:
    """A note about the layers and the kind of pass whose slices differ most, in µs, from their lines. small: see `SMALL`."""
    cuts, named = timed_slices(profile) or (WHOLE, {})
    errors = {replace(layer, name=""): named[layer.name] for layer in profile.layers if layer.name in named}
    far = list[tuple[float, float, str]]()
    for kind in kinds if errors else ():
        times = {layer: sum(slice_times([layer], kind, cuts)) for layer in profile.layers}
        least = small * sum(times[layer] for layer in profile.layers)
        for name, layers in groups:
            apart = sum(errors.get(replace(layer, name=""), {}).get(kind, 0.0) * times[layer] for layer in layers)
            if apart > NOTABLE_ERROR * (total := sum(times[layer] for layer in layers)) and total > least:
                far.append((apart, apart / total, f"{kind} of {name}"))
    if not far:
        return ""
    _, share, what = max(far)
    return f"slices: {what} was timed up to {share:.0%} apart from the lines that its slices take times from: {ADVICE}"
