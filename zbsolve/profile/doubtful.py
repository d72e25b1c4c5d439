"""What is to be doubted of a profile's numbers, and of a schedule that was made for another model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..layer import Layer
from ..util.text import printable
from .profile import Profile
from .slice_errors import layer_errors_note

LONG_SPLIT, SHORT_SPLIT = 1.1, 0.9  # (B + W) / BW above and below which a warning says so


def doubts(profile: Profile) -> list[str]:
    """What the profiler warned of, B and W far from BW, and slices far from the lines that stand for them; a line each."""
    said = profile.facts.get("warnings", [])
    notes = [printable(str(note)) for note in said] if isinstance(said, list) else []
    return [*dict.fromkeys((*notes, *split_doubts(profile.layers), *filter(None, [layer_errors_note(profile)])))]


def split_doubts(layers: Sequence[Layer]) -> list[str]:
    """A line where B and W together take far more or far less than BW, of layers that know both."""
    apart, fused = sum(one.B + one.W for one in layers), sum(one.BW for one in layers)
    if not apart or not fused or SHORT_SPLIT * fused <= apart <= LONG_SPLIT * fused:
        return []
    found = f"(B + W) / BW is {apart / fused:.2f}"
    if apart > fused:
        return [f"{found}: splitting the backward costs more than many bubbles; compare with --fused"]
    return [f"{found}: B and W do the work of BW, so much of what they gain on a schedule with BW is no schedule's merit"]


def other_model(source: str, model: str) -> str:
    """A line where a schedule's times, from `source` (see `Problem.source`), are of another model; "" where they are of this
    one, or numbers that somebody gave. The same function of the same file may lie in another folder."""
    same = f": {_short(model)}, " in f"{_short(source)}, "
    if same or not source or source.startswith("given"):
        return ""
    told = re.sub(r" \((?:[^()]|\([^()]*\))*\)", "", source)  # without notes in brackets, which fill lines
    return f"WARNING: the schedule was made by the times '{printable(told)}', and the model here is {printable(model)}"


def model_said_by(source: str) -> str:
    """The model at the end of a schedule's `Problem.source`. Settings of a Hugging Face model have ": " in them."""
    front, brace, settings = source.partition("{")
    return front.rpartition(": ")[2] + brace + settings


def _short(name: str) -> str:
    """A name that ends in `folder/file.py:function` or `package.module:function`, without the folders."""
    return re.sub(r"\S*[/\\.](?=[^/\\.\s:]+:\w+$)", "", name.replace(".py:", ":"))
