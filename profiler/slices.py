"""What slices of a sequence take: F, B, W and BW of a few of them, a line through each, and attention by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.backward.values import leaves_of, trained
from zbsolve.exec.feed import moved
from zbsolve.exec.slices.check import check_stage
from zbsolve.exec.slices.cutting import Cutting
from zbsolve.exec.slices.stage import StageSlices
from zbsolve.exec.slices.store import gradient_bytes
from zbsolve.exec.slices.trial import IGNORED, LAYERS, LOSS
from zbsolve.layer import Layer, Line, SliceExtra
from zbsolve.models.model import Model
from zbsolve.models.slicing import AttentionRule, running_slice, whole_attention
from zbsolve.profile.slices import OF_ATTENTION, SEQUENCE, Slices, said_of, slice_times
from zbsolve.util.errors import BadInput

from .dataflow import Flow, example, naming, place
from .stage_rounds import PassTimer, alone, rotated
from .timing import Bench, Progress

KINDS = ("F", "B", "W", "BW")
POSITIONS = 5  # of a sequence's slices that are timed at the most
MAX_COPIES = 4
WARM_ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 2, 10, 60  # with B and W, and with BW, in turn
TIME_SHARE = 0.5  # of the time for layers
_NEVER = -1.0  # a growth
_TRAINED = ("query", "key", "value")
Samples = dict[str, list[float]]  # "F/3": of slice 3; "attention_F"


class _Call(NamedTuple):
    """What attention was called with in a whole sequence."""

    query: Tensor
    key: Tensor
    value: Tensor
    rule: AttentionRule


class _Calls:
    """Stands for one slice that is the whole sequence, and notes what attention is called with."""

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
    """What was measured. lengths: tokens of each slice. samples: layer → kind and slice → µs. kv_bytes: layer → bytes of a
    sequence's keys and values, and of their gradients as they are gathered."""

    lengths: tuple[int, ...]
    samples: dict[int, Samples]
    kv_bytes: dict[int, tuple[int, int]]

    @property
    def cuts(self) -> tuple[float, ...]:
        """As `zbsolve.profile.slices` has them."""
        return tuple(one / sum(self.lengths) for one in accumulate(self.lengths, initial=0))

    def named(self, names: Sequence[str]) -> dict[str, list[float]]:
        """All samples by name, as in a profile. names: of the model's layers."""
        slices = f"slices/{len(self.lengths)}"
        return {f"{slices}/{names[i]}/{kind}": row for i, rows in self.samples.items() for kind, row in rows.items()}


class Fitted(NamedTuple):
    """Layers with what their slices take. errors: layer → kind → the largest distance of a slice that was timed from the
    line, as a part of it. notes: what was measured and cannot be."""

    layers: tuple[Layer, ...]
    errors: dict[str, dict[str, float]]
    notes: list[str]

    def facts(self, times: SliceTimes) -> dict[str, Any]:
        """What a profile says of its slices."""
        said = {"lengths": list(times.lengths), "timed": sorted(_positions(len(times.lengths))), "line_errors": self.errors}
        return {SEQUENCE: sum(times.lengths), "slices": said}


def cutting_of(slices: Slices, model: Model) -> Cutting | None:
    """How the model's sequences are cut; None: they are not. Raises BadInput, also where they do not make these slices."""
    said = said_of(slices)
    if said.number == 1:
        return None
    if said.even_work:
        raise BadInput("--slices: which slices take as long, only a profile says: measure even ones, or give lengths")
    cutting = Cutting(said.number, said.lengths)
    cutting.parts({0: model.batch(0, 0)[0]}, f"--slices: model '{model.name}'")
    return cutting


def time_slices(
    model: Model, through: Flow, kinds: Sequence[int], cutting: Cutting, bench: Bench, progress: Progress
) -> SliceTimes:
    """Times of the layers `kinds` in slices, one after the other. Raises BadInput naming the layer that cannot be cut, and
    for a model without causal attention in `sliced_attention`."""
    timer, samples, sizes = PassTimer(bench.device), dict[int, Samples](), dict[int, tuple[int, int]]()
    tokens = _tokens(model)
    seconds = bench.seconds * TIME_SHARE / len(kinds)
    calls = {}
    for i in kinds:
        progress(f"slices: can {place(model, i)} be cut")
        with naming(f"model '{model.name}': {place(model, i)} in slices"):
            calls[i] = _calls(model, i, through, bench, tokens)
    if not any(calls.values()):
        raise BadInput(f"--slices: model '{model.name}' has no causal attention that calls zbsolve.exec.sliced_attention")
    for i in kinds:
        progress(f"slices of {place(model, i)}")
        with naming(f"model '{model.name}': {place(model, i)} in slices"):
            samples[i] = _sampled(_rounds(model, i, through, cutting, bench, timer, calls[i]), seconds)
        held = [one for call in calls.pop(i) for one in (call.key, call.value)]
        sizes[i] = sum(one.nbytes for one in held), sum(map(gradient_bytes, held))
    return SliceTimes(tuple(cutting.tokens(tokens, "--slices")), samples, sizes)


def _tokens(model: Model) -> int:
    return next(int(leaf.shape[1]) for leaf in leaves_of(model.batch(0, 0)[0]) if isinstance(leaf, Tensor))


def _calls(model: Model, i: int, through: Flow, bench: Bench, tokens: int) -> list[_Call]:
    """What layer i calls attention with. Raises BadInput where the layer cannot be cut."""
    layer = model.build([i])[0].to(bench.device)
    x = model.batch(0, 0)[0] if i == 0 else example(through.inputs[i], torch.randn)
    last = i == len(model.layers) - 1
    batch = moved(x, bench.device), moved(model.batch(0, 0)[1], bench.device)
    check_stage([layer], i, model.loss if last else None, batch, tokens)
    calls = _Calls()
    with torch.no_grad(), running_slice(calls):
        layer(batch[0])
    return calls.found


def _rounds(
    model: Model, i: int, through: Flow, cutting: Cutting, bench: Bench, timer: PassTimer, calls: Sequence[_Call]
) -> Iterator[Samples]:
    """Samples of rounds without end: all slices of a microbatch of each copy of layer i, copies in turn so that a pass finds
    nothing in the cache that training would not leave there; and attention of the whole sequence."""
    sets = rotated(model, [i], through.inputs, bench.device, bench.cache, None, bench.parts)
    stages, feed = [one[0] for one in sets][:MAX_COPIES], alone(model, i, through.inputs[i], bench.device)
    for stage in stages:
        stage.slices = StageSlices(cutting)
        stage.slices.looked |= {LAYERS, LOSS, IGNORED}
    timed, step = _positions(cutting.count), 0
    while True:
        split = step % 2 == 0
        _turn(stages, cutting, [feed(m, step) for m in range(len(stages))], timer, split)
        if calls:
            _time_attention(calls, timer)
        found: Samples = {}
        for _, kind, device_us, _ in timer.drain():
            name, _, number = kind.partition("/")
            if not number or (int(number) in timed and (split or name == "BW")):  # problems know one F
                found.setdefault(kind, []).append(device_us)
        yield found
        step += 1


def _positions(count: int) -> set[int]:
    """Numbers of slices that are timed, first and last among them."""
    return {round(one) for one in np.linspace(0, count - 1, min(POSITIONS, count)).tolist()}


def _turn(stages: Sequence[Stage], cutting: Cutting, given: list[tuple[Any, Any]], timer: PassTimer, split: bool) -> None:
    """All slices of a microbatch on each stage, forward in order and backward the other way round."""
    parts = [
        (cutting.parts({0: x}, "input"), _targets(stage, cutting, y)) for stage, (x, y) in zip(stages, given, strict=True)
    ]
    gradients: dict[tuple[int, int], Any] = {}
    for j in range(cutting.count):
        for m, stage in enumerate(stages):
            x, target = (row[j] for row in parts[m])
            y = timer.run(stage.first, f"F/{j}", stage.forward, j, x, target, split=split)
            gradients[m, j] = None if stage.loss is not None else [torch.ones_like(one) for one in trained(y)]
    for j in reversed(range(cutting.count)):
        for m, stage in enumerate(stages):
            timer.run(stage.first, f"{'B' if split else 'BW'}/{j}", stage.backward, j, gradients.pop((m, j)))
    for j in range(cutting.count if split else 0):
        for stage in stages:
            timer.run(stage.first, f"W/{j}", stage.weights, j)


def _targets(stage: Stage, cutting: Cutting, target: Any) -> Mapping[int, Any]:
    return dict.fromkeys(range(cutting.count)) if stage.loss is None else cutting.parts({0: target}, "targets")


def _time_attention(calls: Sequence[_Call], timer: PassTimer) -> None:
    """All attention of a layer over a whole sequence, by itself."""
    wanted = [getattr(call, name).requires_grad_() for call in calls for name in _TRAINED]
    ys = timer.run(0, OF_ATTENTION["F"], lambda: [_attention(call) for call in calls])
    timer.run(0, OF_ATTENTION["B"], torch.autograd.grad, ys, wanted, [torch.ones_like(y) for y in ys])


def _sampled(rounds: Iterator[Samples], seconds: float) -> Samples:
    """Samples of rounds behind some that warm up, for so many seconds, but of a few rounds in any case."""
    for _ in range(WARM_ROUNDS):
        next(rounds)
    found: Samples = {}
    begin = time.monotonic()
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.monotonic() - begin > seconds:
            break
        for kind, row in next(rounds).items():
            found.setdefault(kind, []).extend(row)
    return found


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
    layer = replace(layer, **attention, **_key_bytes(*times.kv_bytes[kind]))
    lines: dict[str, Any] = {}
    timed = {name: _of_slices(medians, name) for name in KINDS}
    for name, rows in timed.items():
        parts, growth = slice_times([layer], name, times.cuts), _NEVER
        if name in OF_ATTENTION and any(times.kv_bytes[kind]):
            growth = 2 * getattr(layer, OF_ATTENTION[name]) / len(parts) ** 2
        lines[name], fell = _line({j: one - parts[j] for j, one in rows.items()}, times.cuts, growth)
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


def _line(beyond: dict[int, float], cuts: Sequence[float], growth: float) -> tuple[Line, float]:
    """The least squares' line through what slices take beyond their parts, slice → µs, in the form that `SliceExtra` has it;
    and by how many µs a slice times fall, where they should not. growth: of the parts, from a slice to the next; _NEVER: the
    line is constant."""
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
        if later >= -growth:
            return (first, later), 0.0
        fell = -(later + growth)
        y = y + growth * steps
    flat = float(y.mean()) if y.mean() > 0 else float(y @ lengths / (lengths @ lengths))
    return (flat, -growth if fell else 0.0), fell
