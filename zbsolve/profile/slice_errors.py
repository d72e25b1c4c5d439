"""How far timed slices lie from the lines that stand for them: what a schedule of slices is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..features.cuts import cuts_of
from ..features.slices import slice_times
from ..layer import Layer, layer_ranges
from ..util.text import printable
from .profile import Profile

NOTABLE = 0.10  # of a slice's time
SMALL = 0.01  # of all layers' time: who takes less does not count
KINDS = ("F", "B", "W", "BW")
ADVICE = "time them longer (profile --seconds), or take fewer, longer slices"


def layer_errors_note(profile: Profile) -> str:
    """A line where slices of a layer were timed more than 10 % apart from their line, about the one that is most µs apart;
    or "". What takes less than 1 % of all layers' time does not count."""
    cuts, errors = _cuts(profile), _errors(profile)
    found: list[tuple[float, float, str]] = []
    for kind in KINDS if errors else ():
        times = [sum(slice_times([layer], kind, cuts)) for layer in profile.layers]
        for layer, time in zip(profile.layers, times, strict=True):
            share = errors.get(_alike(layer), {}).get(kind, 0.0)
            if share > NOTABLE and time > SMALL * sum(times):
                found.append((share * time, share, f"{kind} of layer '{printable(layer.name)}'"))
    if not found:
        return ""
    _, share, what = max(found)
    return f"slices: {what} lies up to {share:.0%} of its time from the line through its slices: {ADVICE}"


def stage_errors_note(profile: Profile, counts: Sequence[int], fused: bool) -> str:
    """A line where slices of a stage's layers were timed more than 10 % apart from their lines, all at once; about the stage
    and the kind of pass that are most µs apart; or "". counts: layers of each stage."""
    cuts, errors = _cuts(profile), _errors(profile)
    if not errors:
        return ""
    far = []
    for stage, here in enumerate(layer_ranges(counts)):
        for kind in ("F", "BW") if fused else ("F", "B", "W"):
            rows = [(profile.layers[i], sum(slice_times([profile.layers[i]], kind, cuts))) for i in here]
            apart = sum(errors.get(_alike(layer), {}).get(kind, 0.0) * time for layer, time in rows)
            if apart > NOTABLE * (total := sum(time for _, time in rows)):
                far.append((apart, apart / total, f"{kind} of stage {stage}"))
    if not far:
        return ""
    _, share, what = max(far)
    return f"slices: {what} was timed up to {share:.0%} apart from the lines that its slices take times from: {ADVICE}"


def _cuts(profile: Profile) -> Any:
    """Those that were timed; () where none were."""
    said = profile.facts.get("slices")
    lengths = said.get("lengths") if isinstance(said, dict) else None
    return cuts_of([float(one) for one in lengths], profile.layers) if lengths else ()


def _errors(profile: Profile) -> dict[Layer, dict[str, float]]:
    """Layer, whatever it is called, → kind → the largest distance of a slice that was timed, as a part of its line's."""
    said = profile.facts.get("slices")
    named = said.get("line_errors") if isinstance(said, dict) and said.get("lengths") else None
    if not isinstance(named, dict):
        return {}
    return {_alike(one): named[one.name] for one in profile.layers if isinstance(named.get(one.name), dict)}


def _alike(layer: Layer) -> Layer:
    return replace(layer, name="")
