"""What whole µs make of a profile's times: schedules count in them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..layer import layer_ranges
from .profile import Profile

NOTABLE = 0.01  # a share of a stage's passes


def rounding_note(profile: Profile, counts: Sequence[int]) -> str:
    """A line where rounding to whole µs changes a time by more than 1 % of what its stage's passes take, about the time that
    it changes most; "" where it does not. counts: layers of each stage."""
    found = max(chain.from_iterable(_changes(profile, i, here) for i, here in enumerate(layer_ranges(counts))))
    share, what, exact = found
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
