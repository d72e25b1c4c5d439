"""Lines through what slices of a sequence were timed to take: a profile's layers with their slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from zbsolve.features.cuts import SEQUENCE
from zbsolve.features.slices import OF_ATTENTION, slice_times
from zbsolve.layer import Layer, Line, SliceExtra

from .slices import KINDS, SliceTimes, positions

_NEVER = -1.0  # a growth


class Fitted(NamedTuple):
    """Layers with what their slices take. errors: layer → kind → the largest distance of a slice that was timed from the
    line, as a part of it. notes: what was measured and cannot be."""

    layers: tuple[Layer, ...]
    errors: dict[str, dict[str, float]]
    notes: list[str]

    def facts(self, times: SliceTimes) -> dict[str, Any]:
        """What a profile says of its slices."""
        said = {"lengths": list(times.lengths), "timed": sorted(positions(len(times.lengths))), "line_errors": self.errors}
        return {SEQUENCE: sum(times.lengths), "slices": said}


def fitted(layers: Sequence[Layer], times: SliceTimes, kinds: Sequence[int]) -> Fitted:
    """The layers, as they were measured whole, with what slices of an equal one take; kinds: the number of that, for each.
    Times of slices are then what the lines say. Lines of W, and of layers without attention, are constant, and others do
    not fall: where they do, by chance, that is noted, and the line is constant too."""
    errors: dict[str, dict[str, float]] = {}
    notes: list[str] = []
    found = []
    for layer, kind in zip(layers, kinds, strict=True):
        own: list[str] = []
        said, worst = _fitted(layer, times, kind, own)
        found.append(said)
        if layer is layers[kind]:
            errors[layer.name], notes = worst, notes + own
    return Fitted(tuple(found), errors, notes)


def _key_bytes(keys: int, gradients: int) -> dict[str, Any]:
    """A layer's fields."""
    return {"kv_bytes": keys, "kv_gradient_bytes": 0 if gradients == keys else gradients}


def _fitted(layer: Layer, times: SliceTimes, kind: int, notes: list[str]) -> tuple[Layer, dict[str, float]]:
    medians = {name: median(row) for name, row in times.samples[kind].items()}
    most = {"attention_F": layer.F, "attention_B": min(layer.B, layer.BW)}
    attention: dict[str, Any] = {name: min(medians.get(name, 0.0), one) for name, one in most.items()}
    for name, one in most.items():
        if medians.get(name, 0.0) > one:
            more = f"{medians[name]:,.0f} µs by itself, more than the {one:,.0f} µs of the whole pass"
            notes.append(f"slices: {layer.name}: {name} was {more}: taken as all of it")
    layer = replace(layer, **attention, **_key_bytes(*times.kv_bytes[kind]))
    lines: dict[str, Any] = {}
    timed = {name: _of_slices(medians, name) for name in KINDS}
    for name, rows in timed.items():
        parts, growth = slice_times([layer], name, times.cuts), _NEVER
        if name in OF_ATTENTION and any(times.kv_bytes[kind]):
            growth = 2 * getattr(layer, OF_ATTENTION[name]) / len(parts) ** 2
        even = slice_times([layer], name, tuple(i / len(parts) for i in range(len(parts) + 1)))[0]
        lines[name], fell = _line({j: one - parts[j] for j, one in rows.items()}, times.cuts, growth, even)
        if fell:
            part = fell * (len(parts) - 1) / mean(rows.values())
            notes.append(f"slices: {layer.name}: {name} falls by {part:.0%} to the last slice: taken as constant")
    layer = replace(layer, slice_extra=SliceExtra(len(times.lengths), **lines))
    return layer, {name: _error(rows, slice_times([layer], name, times.cuts)) for name, rows in timed.items()}


def _of_slices(medians: dict[str, float], name: str) -> dict[int, float]:
    """Slice → µs of a kind."""
    return {int(key.partition("/")[2]): one for key, one in medians.items() if key.startswith(f"{name}/")}


def _error(rows: dict[int, float], said: Sequence[int]) -> float:
    return max(abs(one - said[j]) / max(said[j], 1) for j, one in rows.items())


def _line(beyond: dict[int, float], cuts: Sequence[float], growth: float, even: float) -> tuple[Line, float]:
    """The least squares' line through what slices take beyond their parts, slice → µs, in the form that `SliceExtra` has it;
    and by how many µs a slice times fall, where they should not. growth: of the parts, from a slice to the next; _NEVER: the
    line is constant. even: the part of the first of as many even slices, so that no slice takes less than no time."""
    count, here = len(cuts) - 1, sorted(beyond)
    y = np.array([beyond[j] for j in here])
    lengths, begins = np.array([(cuts[j + 1] - cuts[j], cuts[j]) for j in here]).T * count
    ones, before, steps = np.ones(len(here)), np.array(here, float), lengths * begins
    fell = 0.0
    if growth >= 0:

        def missed(line: Line) -> float:
            """Squares that are left where the line is read as `SliceExtra` reads it, whichever form it was fitted in."""
            first, later = line
            said = first * (ones if first > 0 else lengths) + later * (before if later > 0 else steps)
            return float(((y - said) ** 2).sum())

        forms = (np.stack(columns, 1) for columns in product((ones, lengths), (before, steps)))
        tried = [np.linalg.lstsq(form, y, rcond=None)[0].tolist() for form in forms]
        first, later = min(((a, b) for a, b in tried), key=missed)
        if first < -even:
            first, rest = -float(even), np.stack((before, steps), 1)
            slopes = [(y + even * lengths) @ form / (form @ form) for form in rest.T]
            later = min((float(one) for one in slopes), key=lambda one: missed((first, one)))
        if later >= -growth:
            return (first, later), 0.0
        fell = -(later + growth)
        y = y + growth * steps
    flat = float(y.mean()) if y.mean() > 0 else float(y @ lengths / (lengths @ lengths))
    return (flat, -growth if fell else 0.0), fell
