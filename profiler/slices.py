"""Times of slices of a sequence: F, B, W and BW of a few of them, and attention by itself; and the lines fitted to those
times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.values import leaves_of, trained
from zbsolve.exec.feed import moved
from zbsolve.exec.slices.comparing import Sequences, compare
from zbsolve.exec.slices.cutting import Cutting
from zbsolve.exec.slices.stage import StageSlices
from zbsolve.exec.slices.store import gradient_bytes
from zbsolve.features.cuts import SEQUENCE, Slices, said_of
from zbsolve.features.slices import OF_ATTENTION, slice_times
from zbsolve.layer import Layer, Line, SliceExtra
from zbsolve.models.model import Model
from zbsolve.models.slicing import AttentionRule, running_slice, whole_attention
from zbsolve.util.errors import BadInput, is_out_of_memory

from .dataflow import naming, place
from .stage_rounds import PassTimer, Sample, Samples, alone, built, sampled
from .timing import Measuring, Part

_NEVER = -1.0  # a growth


class Fitted(NamedTuple):
    """Layers with the costs of their slices. errors: layer → kind → the largest deviation of a timed slice from its line,
    relative to it. notes: measured values that are impossible."""

    layers: tuple[Layer, ...]
    errors: dict[str, dict[str, float]]
    notes: list[str]

    def facts(self, times: SliceTimes) -> dict[str, Any]:
        """A profile's facts about its slices."""
        facts = {"lengths": list(times.lengths), "timed": sorted(positions(len(times.lengths))), "line_errors": self.errors}
        return {SEQUENCE: sum(times.lengths), "slices": facts}


def fitted(layers: Sequence[Layer], times: SliceTimes, kinds: Sequence[int]) -> Fitted:
    """The layers, as measured whole, with slice costs of an equal layer; kinds: that layer's number, for each. Times of
    slices are then those of the lines. Lines of W, and of layers without attention, are constant, and others must not fall:
    where they do, by chance, that is noted, and the line is constant too."""
    errors: dict[str, dict[str, float]] = {}
    notes: list[str] = []
    fits = []
    for layer, kind in zip(layers, kinds, strict=True):
        own: list[str] = []
        fit, worst = _fitted(layer, times, kind, own)
        fits.append(fit)
        if layer is layers[kind]:
            errors[layer.name], notes = worst, notes + own
    return Fitted(tuple(fits), errors, notes)


def _fitted(layer: Layer, times: SliceTimes, kind: int, notes: list[str]) -> tuple[Layer, dict[str, float]]:
    medians = {name: median(row) for name, row in times.samples[kind].items()}
    most = {"attention_F": layer.F, "attention_B": min(layer.B, layer.BW)}
    attention: dict[str, Any] = {name: min(medians.get(name, 0.0), limit) for name, limit in most.items()}
    for name, whole in most.items():
        if medians.get(name, 0.0) > whole:
            more = f"{medians[name]:,.0f} µs by itself, more than the {whole:,.0f} µs of the whole pass"
            notes.append(f"slices: {layer.name}: {name} was {more}: taken as all of it")
    keys, gradients = times.kv_bytes[kind]
    layer = replace(layer, **attention, kv_bytes=keys, kv_gradient_bytes=0 if gradients == keys else gradients)
    lines: dict[str, Any] = {}
    timed: dict[str, dict[int, float]] = {name: {} for name in KINDS}  # kind → slice → µs
    for name, _, number in (key.partition("/") for key in medians if "/" in key):
        timed[name][int(number)] = medians[f"{name}/{number}"]
    for name, rows in timed.items():
        parts, growth = slice_times([layer], name, times.cuts), _NEVER
        if name in OF_ATTENTION and any(times.kv_bytes[kind]):
            growth = 2 * getattr(layer, OF_ATTENTION[name]) / len(parts) ** 2
        even = slice_times([layer], name, tuple(i / len(parts) for i in range(len(parts) + 1)))[0]
        lines[name], fell = _line({j: us - parts[j] for j, us in rows.items()}, times.cuts, growth, even)
        if fell:
            part = fell * (len(parts) - 1) / mean(rows.values())
            notes.append(f"slices: {layer.name}: {name} falls by {part:.0%} to the last slice: taken as constant")
    layer = replace(layer, slice_extra=SliceExtra(len(times.lengths), **lines))
    return layer, {name: _error(rows, slice_times([layer], name, times.cuts)) for name, rows in timed.items()}


def _error(rows: dict[int, float], line: Sequence[int]) -> float:
    return max(abs(us - line[j]) / max(line[j], 1) for j, us in rows.items())


def _line(beyond: dict[int, float], cuts: Sequence[float], growth: float, even: float) -> tuple[Line, float]:
    """The least-squares line through what slices take beyond their parts, slice → µs, in the form of `SliceExtra`; and by
    how many µs slice times fall although they should not. growth: of the parts, from one slice to the next; _NEVER: the line
    is constant. even: the first slice's part if all are even, so that no slice takes negative time."""
    count, here = len(cuts) - 1, sorted(beyond)
    y = np.array([beyond[j] for j in here])
    lengths, begins = np.array([(cuts[j + 1] - cuts[j], cuts[j]) for j in here]).T * count
    ones, before, steps = np.ones(len(here)), np.array(here, float), lengths * begins
    fell = 0.0
    if growth >= 0:

        def missed(line: Line) -> float:
            """The sum of squared residuals, where the line is read as by `SliceExtra`, in whichever form it was fitted."""
            first, later = line
            values = first * (ones if first > 0 else lengths) + later * (before if later > 0 else steps)
            return float(((y - values) ** 2).sum())

        forms = (np.stack(columns, 1) for columns in product((ones, lengths), (before, steps)))
        tried = [np.linalg.lstsq(form, y, rcond=None)[0].tolist() for form in forms]
        first, later = min(((a, b) for a, b in tried), key=missed)
        if first < -even:
            first, later_forms = -float(even), np.stack((before, steps), 1)
            slopes = [(y + even * lengths) @ form / (form @ form) for form in later_forms.T]
            later = min((float(slope) for slope in slopes), key=lambda rate: missed((first, rate)))
        if later >= -growth:
            return (first, later), 0.0
        fell = -(later + growth)
        y = y + growth * steps
    flat = float(y.mean()) if y.mean() > 0 else float(y @ lengths / (lengths @ lengths))
    return (flat, -growth if fell else 0.0), fell


KINDS = ("F", "B", "W", "BW")
POSITIONS = 5  # of a sequence's slices that are timed, at most
MAX_COPIES = 4
ROUNDS = (2, 10, 60)  # warm, fewest and most, with B and W, and with BW, in turn
TIME_SHARE = 0.5  # of the time for layers
_TRAINED = ("query", "key", "value")


class _Call(NamedTuple):
    """The arguments of one attention call for a whole sequence."""

    query: Tensor
    key: Tensor
    value: Tensor
    rule: AttentionRule


class _Calls:
    """Acts as a single slice that is the whole sequence, and records the arguments of attention."""

    offset = 0

    def __init__(self) -> None:
        self.found: list[_Call] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See `Slicing`."""
        self.found.append(_Call(query.detach(), key.detach(), value.detach(), rule))
        return _attention(self.found[-1])


def _attention(call: _Call) -> Tensor:
    query, key, value, rule = call
    grouped = query.shape[1] != key.shape[1]
    return whole_attention(query, key, value, rule, is_causal=True, scale=rule.scale, enable_gqa=grouped)


@dataclass(frozen=True)
class SliceTimes:
    """Measurements. lengths: tokens of each slice. samples: layer → kind and slice → µs: "F/3", of slice 3, or
    "attention_F". kv_bytes: layer → bytes of a sequence's keys and values, and of their gradients as accumulated."""

    lengths: tuple[int, ...]
    samples: dict[int, Samples]
    kv_bytes: dict[int, tuple[int, int]]

    @property
    def cuts(self) -> tuple[float, ...]:
        """The boundaries of slices, as in `zbsolve.features.cuts`."""
        return tuple(length / sum(self.lengths) for length in accumulate(self.lengths, initial=0))

    def named(self, names: Sequence[str]) -> dict[str, list[float]]:
        """All samples by name, as in a profile. names: of the model's layers."""
        slices = f"slices/{len(self.lengths)}"
        return {f"{slices}/{names[i]}/{kind}": row for i, rows in self.samples.items() for kind, row in rows.items()}


class SlicePart(Part):
    """Slices of sequences in a measurement. cutting: how these are cut."""

    with_sides = False

    def __init__(self, cutting: Cutting) -> None:
        super().__init__()
        self.cutting = cutting

    @classmethod
    def asked(cls, slices: Slices, model: Model, whole: bool) -> list[Part]:
        """The part for these slices; none for one. whole: only whole sequences can be timed, because of other options.
        Raises BadInput, also if the model's sequences do not yield these slices."""
        spec = said_of(slices)
        if spec.number == 1:
            return []
        if spec.even_work:
            raise BadInput("--slices: which slices take as long, only a profile says: measure even ones, or give lengths")
        cutting = Cutting(spec.number, spec.lengths)
        cutting.parts({0: model.batch(0, 0)[0]}, f"--slices: model '{model.name}'")
        if whole:
            raise BadInput("--slices: are measured with --split layers and without --mesh")
        return [cls(cutting)]

    def before(self, what: Measuring) -> None:
        """Time the slices."""
        self.times = time_slices(what, self.cutting)
        self.samples = self.times.named(what.model.layer_names)

    def on_layers(self, layers: tuple[Layer, ...], kinds: Sequence[int]) -> tuple[Layer, ...]:
        """The layers with the lines of their slices."""
        fits = fitted(layers, self.times, kinds)
        self.facts, self.notes = fits.facts(self.times), fits.notes
        return fits.layers


def time_slices(what: Measuring, cutting: Cutting) -> SliceTimes:
    """Times of layers in slices, with the layers of each slice in order as a rank would run them; if memory does not suffice
    for that, one layer at a time. Raises BadInput naming the layer that cannot be split, and for a model without causal
    attention in `sliced_attention`."""
    model = what.model
    tokens = next(int(leaf.shape[1]) for leaf in leaves_of(model.batch(0, 0)[0]) if isinstance(leaf, Tensor))
    calls = dict[int, list[_Call]]()
    for i in what.layers:
        what.progress(f"slices: can {place(model, i)} be cut")
        with naming(f"model '{model.name}': {place(model, i)} in slices"):
            calls[i] = _calls(what, i, cutting)
    if not any(calls.values()):
        raise BadInput(f"--slices: model '{model.name}' has no causal attention that calls zbsolve.exec.sliced_attention")
    samples = _timed_together(what, cutting, calls)
    held = {i: [tensor for call in calls[i] for tensor in (call.key, call.value)] for i in what.layers}
    sizes = {i: (sum(row.nbytes for row in rows), sum(map(gradient_bytes, rows))) for i, rows in held.items()}
    return SliceTimes(tuple(cutting.tokens(tokens, "--slices")), samples, sizes)


def _timed_together(what: Measuring, cutting: Cutting, calls: Mapping[int, Sequence[_Call]]) -> dict[int, Samples]:
    """Samples of each of these layers; if memory does not suffice for all, of one after the other."""
    timer = PassTimer(what.bench.device)
    what.progress(f"slices of {what.words}")
    try:
        return sampled(_rounds(what, cutting, timer, calls), what.bench.seconds * TIME_SHARE, ROUNDS)
    except Exception as error:
        if not is_out_of_memory(error) or len(what.layers) == 1:
            with naming(f"{what.failure(timer)} in slices"):
                raise
    alone_ones = (_timed_together(alone_one, cutting, calls) for alone_one in what.by_themselves())
    return {i: rows for samples in alone_ones for i, rows in samples.items()}


def _calls(what: Measuring, i: int, cutting: Cutting) -> list[_Call]:
    """The arguments of attention in layer i. Raises BadInput if the layer cannot be split."""
    model, device = what.model, what.bench.device
    layer = built(model, [i], device)[0]
    x = model.batch(0, 0)[0] if i == 0 else what.through.example(i, torch.randn)
    last = i == len(model.layers) - 1
    batch = moved(x, device), moved(model.batch(0, 0)[1], device)
    sequences = Sequences([batch[0]] * 2, [batch[1]] * 2)
    compare([layer], i, model.loss if last else None, sequences, cutting)
    calls = _Calls()
    with torch.no_grad(), running_slice(calls):
        layer(batch[0])
    return calls.found


def _rounds(
    what: Measuring, cutting: Cutting, timer: PassTimer, calls: Mapping[int, Sequence[_Call]]
) -> Iterator[list[Sample]]:
    """Samples of an endless series of rounds: all slices of a microbatch for each copy of these layers, alternating so that
    a pass finds nothing in a cache that training would not leave there, in the first slice as in the others; and attention
    of whole sequences, layer by layer."""
    stages = [stage for row in what.copies()[:MAX_COPIES] for stage in row]
    feeds = {i: alone(what.model, i, what.through, what.bench.device) for i in what.layers}
    sliced = [(stage, StageSlices(cutting, compares=False)) for stage in stages]
    timed, step = positions(cutting.count), 0
    while True:
        split = step % 2 == 0
        _turn(sliced, cutting, [feeds[stage.first](m, step) for m, stage in enumerate(stages)], timer, split)
        for i in what.layers:
            if calls[i]:
                _time_attention(i, calls[i], timer)
        rows = [(row, row[1].partition("/")) for row in timer.drain()]
        # Problems have a single F.
        yield [row for row, (kind, _, n) in rows if not n or (int(n) in timed and (split or kind == "BW"))]
        step += 1


def positions(count: int) -> set[int]:
    """Numbers of the slices that are timed, including the first and the last."""
    return {round(point) for point in np.linspace(0, count - 1, min(POSITIONS, count)).tolist()}


def _turn(
    sliced: Sequence[tuple[Stage, StageSlices]],
    cutting: Cutting,
    inputs: list[tuple[Any, Any]],
    timer: PassTimer,
    split: bool,
) -> None:
    """All slices of a microbatch on each stage, forward in order and backward in reverse."""
    both = zip(sliced, inputs, strict=True)
    parts = [(cutting.parts({0: x}, "input"), _targets(stage, cutting, y)) for (stage, _), (x, y) in both]
    gradients: dict[tuple[int, int], Any] = {}
    for j in range(cutting.count):
        for m, (stage, slices) in enumerate(sliced):
            x, target = (row[j] for row in parts[m])
            with slices.forward(stage, j, x, target):
                y = timer.run(stage.first, f"F/{j}", stage.forward, j, x, target, split=split)
            gradients[m, j] = None if stage.loss is not None else [torch.ones_like(tensor) for tensor in trained(y)]
    for j in reversed(range(cutting.count)):
        for m, (stage, slices) in enumerate(sliced):
            with slices.backward(j):
                timer.run(stage.first, f"{'B' if split else 'BW'}/{j}", stage.backward, j, gradients.pop((m, j)))
    for j in range(cutting.count if split else 0):
        for stage, _ in sliced:
            timer.run(stage.first, f"W/{j}", stage.weights, j)


def _targets(stage: Stage, cutting: Cutting, target: Any) -> Mapping[int, Any]:
    return dict.fromkeys(range(cutting.count)) if stage.loss is None else cutting.parts({0: target}, "targets")


def _time_attention(i: int, calls: Sequence[_Call], timer: PassTimer) -> None:
    """All attention of layer i over a whole sequence, by itself."""
    wanted = [getattr(call, name).requires_grad_() for call in calls for name in _TRAINED]
    ys = timer.run(i, OF_ATTENTION["F"], lambda: [_attention(call) for call in calls])
    timer.run(i, OF_ATTENTION["B"], torch.autograd.grad, ys, wanted, [torch.ones_like(y) for y in ys])
