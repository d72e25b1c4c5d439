"""Warnings about a profile's numbers, and about a schedule that was made for another model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ..features.cuts import cuts_of
from ..features.slices import slice_times
from ..layer import Layer, layer_ranges
from ..util.text import printable
from .profile import Profile

LONG_SPLIT, SHORT_SPLIT = 1.1, 0.9  # there is a warning if (B + W) / BW is above or below


def doubts(profile: Profile) -> list[str]:
    """A line for each doubt: warnings of the profiler, B + W far from BW, and slices far from their fitted lines."""
    warned = profile.facts.get("warnings", [])
    notes = [printable(str(note)) for note in warned] if isinstance(warned, list) else []
    return [*dict.fromkeys((*notes, *split_doubts(profile.layers), *filter(None, [layer_errors_note(profile)])))]


def split_doubts(layers: Sequence[Layer]) -> list[str]:
    """A line if B and W together take far more or far less than BW; only if both are known."""
    apart, fused = sum(layer.B + layer.W for layer in layers), sum(layer.BW for layer in layers)
    if not apart or not fused or SHORT_SPLIT * fused <= apart <= LONG_SPLIT * fused:
        return []
    ratio = f"(B + W) / BW is {apart / fused:.2f}"
    if apart > fused:
        return [f"{ratio}: splitting the backward costs more than many bubbles; compare with --fused"]
    return [f"{ratio}: B and W do the work of BW, so much of what they gain on a schedule with BW is no schedule's merit"]


def other_model(source: str, model: str) -> str:
    """A warning if a schedule's times (`source`: see `Problem.source`) are of another model; "" if they are of this model,
    or were typed in. Folders of the model's file are not compared."""
    same = f": {_short(model)}, " in f"{_short(source)}, "
    if same or not source or source.startswith("given"):
        return ""
    times = re.sub(r" \((?:[^()]|\([^()]*\))*\)", "", source)  # without notes in brackets, which are long
    return f"WARNING: the schedule was made by the times '{printable(times)}', and the model here is {printable(model)}"


def model_said_by(source: str) -> str:
    """The model at the end of a schedule's `Problem.source`. Settings of a Hugging Face model have ": " in them."""
    front, brace, settings = source.partition("{")
    return front.rpartition(": ")[2] + brace + settings


def _short(name: str) -> str:
    """A name that ends in `folder/file.py:function` or `package.module:function`, without the folders."""
    return re.sub(r"\S*[/\\.](?=[^/\\.\s:]+:\w+$)", "", name.replace(".py:", ":"))


NOTABLE = 0.01  # a share of a stage's passes


def rounding_note(profile: Profile, counts: Sequence[int]) -> str:
    """A line about the time that changes most by rounding to whole µs, if that is more than 1 % of its stage's passes;
    otherwise "". counts: layers of each stage."""
    largest = max(chain.from_iterable(_changes(profile, i, here) for i, here in enumerate(layer_ranges(counts))))
    share, what, exact = largest
    if share <= NOTABLE:
        return ""
    return (
        f"times are rounded to whole µs: {what}, {exact:.3g} µs, counts as {round(exact)} µs. Give times 1,000 times as "
        "long to keep them"
    )


def _changes(profile: Profile, stage: int, here: range) -> list[tuple[float, str, float]]:
    """(share of the stage's passes that rounding changes, the time's name, its µs) of each time of a stage."""
    layers = [profile.layers[i] for i in here]
    kinds = ("F", "BW") if profile.fused_only else ("F", "B", "W")
    times = {f"{kind} of stage {stage}": sum(getattr(layer, kind) for layer in layers) for kind in kinds}
    work = sum(times.values())
    if layers:
        times[f"the message of stage {stage}"] = profile.link.message(layers[-1])
    return [(abs(round(time) - time) / work if work else 0.0, what, time) for what, time in times.items()]


NOTABLE_ERROR = 0.10  # of a slice's time
SMALL = 0.01  # of all layers' time: shorter layers do not count
KINDS = ("F", "B", "W", "BW")
ADVICE = "time them longer (profile --seconds), or take fewer, longer slices"


def layer_errors_note(profile: Profile) -> str:
    """A line if measured slices of a layer differ from their fitted line by more than 10 %, about the layer with the largest
    difference in µs; otherwise "". Layers with less than 1 % of all layers' time do not count."""
    groups = [(f"layer '{printable(layer.name)}'", [layer]) for layer in profile.layers]
    return _farthest(profile, groups, KINDS, SMALL)


def stage_errors_note(profile: Profile, counts: Sequence[int], fused: bool) -> str:
    """The same for stages, with the differences of their layers added up. counts: layers of each stage."""
    stages = enumerate(layer_ranges(counts))
    groups = [(f"stage {stage}", [profile.layers[i] for i in here]) for stage, here in stages]
    return _farthest(profile, groups, ("F", "BW") if fused else ("F", "B", "W"), 0.0)


def _farthest(profile: Profile, groups: Sequence[tuple[str, list[Layer]]], kinds: Sequence[str], small: float) -> str:
    """A line about the group of layers and the kind of pass with the largest difference in µs. small: see `SMALL`."""
    cuts, errors, far = _cuts(profile), _errors(profile), list[tuple[float, float, str]]()
    for kind in kinds if errors else ():
        times = {layer: sum(slice_times([layer], kind, cuts)) for layer in profile.layers}
        least = small * sum(times[layer] for layer in profile.layers)
        for name, layers in groups:
            apart = sum(errors.get(_alike(layer), {}).get(kind, 0.0) * times[layer] for layer in layers)
            if apart > NOTABLE_ERROR * (total := sum(times[layer] for layer in layers)) and total > least:
                far.append((apart, apart / total, f"{kind} of {name}"))
    if not far:
        return ""
    _, share, what = max(far)
    return f"slices: {what} was timed up to {share:.0%} apart from the lines that its slices take times from: {ADVICE}"


def _cuts(profile: Profile) -> Any:
    """The cuts of the slices that were timed; () if none were."""
    facts = profile.facts.get("slices")
    lengths = facts.get("lengths") if isinstance(facts, dict) else None
    return cuts_of([float(length) for length in lengths], profile.layers) if lengths else ()


def _errors(profile: Profile) -> dict[Layer, dict[str, float]]:
    """Layer, whatever it is called, → kind → the largest distance of a slice that was timed, as a part of its line's."""
    facts = profile.facts.get("slices")
    named = facts.get("line_errors") if isinstance(facts, dict) and facts.get("lengths") else None
    if not isinstance(named, dict):
        return {}
    return {_alike(layer): named[layer.name] for layer in profile.layers if isinstance(named.get(layer.name), dict)}


def _alike(layer: Layer) -> Layer:
    return replace(layer, name="")
