"""Slices of sequences in a profile's step: the cost of a slice with causal attention (SlimPipe, arXiv 2504.14519; Seq1F1B,
arXiv 2406.03488). `cuts` says where the sequence is cut.

A slice from part a of the sequence to part b takes (b − a) of all work except attention's, and b² − a² of attention's: of n
even ones, slice j takes 1/n and (2j + 1)/n². Bytes, messages and weight gradients take b − a.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from ..build.slices import with_slices
from ..partition.layer import Layer, Link, layer_ranges
from ..problem import Problem
from ..problem.tables import Ints
from ..schedule.timeline import Floats
from ..util.text import counted, printable
from .cuts import CHOICES, MAX_SLICES, SEQUENCE, WHOLE, Cuts, cuts_of, is_even, lengths_of, said_of, tokens_of, whole_tokens
from .feature import Feature, Field, OfRun, is_auto
from .vocabulary import on_all_ranks

ROUNDED = 1e-6  # µs by which a line in a file may be below 0
ROUNDED_DOWN = 0.5  # µs that rounding takes from a sum at most
TIMES = ("F", "B", "W", "BW", "X", "all_to_all")
OF_ATTENTION = {"F": "attention_F", "B": "attention_B", "BW": "attention_B", "X": "attention_F"}
SIZES = ("held_until_B", "held_until_W", "held_from_B", "output_bytes", "transient", "output_kept", "input_unneeded")


def split_by(cuts: Cuts, total: float, attention: float = 0.0) -> list[int]:
    """Split `total` µs or bytes, of which `attention` is causal attention's, into slices: integers with that sum."""
    until = [round((total - attention) * at + attention * at**2) for at in cuts]
    return [b - a for a, b in pairwise(until)]


def time_of(layer: Layer, kind: str) -> float:
    """µs of a pass over a whole sequence; for an X of unknown duration that of F."""
    return (layer.X or layer.F) if kind == "X" else float(getattr(layer, kind))


def slice_times(layers: Sequence[Layer], kind: str, cuts: Cuts) -> list[int]:
    """µs of a kind of pass of these layers together, for each slice."""
    attention = sum(getattr(layer, OF_ATTENTION[kind]) for layer in layers) if kind in OF_ATTENTION else 0.0
    parts = split_by(cuts, sum(time_of(layer, kind) for layer in layers), attention)
    extra = [sum(row) for row in zip(*(_extra_times(layer, kind, cuts) for layer in layers), strict=True)]
    return [max(0, part + round(more)) for part, more in zip(parts, extra, strict=True)]


def _extra_times(layer: Layer, kind: str, cuts: Cuts) -> list[float]:
    """µs of each slice beyond its part of the whole, if measured. What is positive (launches, less efficient kernels, sums
    of gradients) counts for each slice of any length; what is negative is proportional to its length."""
    if layer.slice_extra is None:
        return [0.0] * (len(cuts) - 1)
    number, (each, later) = layer.slice_extra.number, getattr(layer.slice_extra, "F" if kind == "X" else kind)
    times = []
    for before, (a, b) in enumerate(pairwise(cuts)):
        length, begin = (b - a) * number, a * number  # in units of the measured slices
        times.append(each * (1 if each > 0 else length) + later * (before if later > 0 else length * begin))
    return times


def least_extra(layers: Sequence[Layer], kind: str, counts: Ints) -> Floats:
    """A lower bound on the µs by which passes of a kind of these layers exceed the whole sequence's, in `counts` slices of
    any lengths; shape of `counts`. Terms proportional to length have the same sum as for even slices. Terms that also depend
    on position are at most half of that for one slice as long as the sequence, after it. Each slice may be rounded down."""
    least, measured = np.zeros(len(counts)), [layer for layer in layers if layer.slice_extra is not None]
    for extra in (layer.slice_extra for layer in measured):
        assert extra is not None
        each, later = getattr(extra, "F" if kind == "X" else kind, (0.0, 0.0))
        least += each * (counts if each > 0 else extra.number)
        least += later * (counts * (counts - 1) / 2 if later > 0 else extra.number**2 / 2)
    return least - ROUNDED_DOWN * counts * bool(measured)


class Overheads(NamedTuple):
    """For F and backward of all layers in slices: their time together divided by that of the whole sequence, and the share
    of it that does not depend on a slice's length."""

    ratio: float
    share: float


def overheads(layers: Sequence[Layer], cuts: Cuts) -> Overheads | None:
    """The overheads of slices with these cuts; None if slices were not measured."""
    if not any(layer.slice_extra for layer in layers):
        return None
    kinds = ("F", "BW") if any(layer.BW for layer in layers) else ("F", "B", "W")
    whole = sum(time_of(layer, kind) for layer in layers for kind in kinds)
    taken = sum(sum(slice_times([layer], kind, cuts)) for layer in layers for kind in kinds)
    lines = [getattr(layer.slice_extra, kind) for layer in layers if layer.slice_extra for kind in kinds]
    fixed = (len(cuts) - 1) * sum(max(0.0, each) for each, _ in lines)
    return Overheads(taken / whole, min(1.0, fixed / taken)) if whole and taken else None


def timed_slices(profile: Any) -> tuple[Cuts, Mapping[str, Mapping[str, float]]] | None:
    """The cuts with which slices were timed; and layer → kind → the largest distance of a slice from its line, as a part of
    the line's. None where none were timed."""
    facts = profile.facts.get("slices")
    lengths = facts.get("lengths") if isinstance(facts, dict) else None
    if not lengths:
        return None
    errors = facts.get("line_errors")
    known = {name: row for name, row in errors.items() if isinstance(row, dict)} if isinstance(errors, dict) else {}
    return cuts_of([float(length) for length in lengths], profile.layers), known


def negative_slice(layer: Layer) -> str:
    """An even slice of the measured number that would take a negative time, in words; or ""."""
    if layer.slice_extra is None:
        return ""
    number = layer.slice_extra.number
    for kind in ("F", "B", "W", "BW"):
        first, later = getattr(layer.slice_extra, kind)
        attention = getattr(layer, OF_ATTENTION[kind]) if kind in OF_ATTENTION else 0.0
        plain = (time_of(layer, kind) - attention) / number
        for j in (0, number - 1):  # a line has its minimum at an end
            if (time := plain + (2 * j + 1) * attention / number**2 + first + later * j) < -ROUNDED:
                return f"field '{kind}': slice {j} of {number} would take {time:g} µs"
    return ""


def widest_slice(profile: Any, cuts: Cuts) -> Any:
    """The profile of sequences that are the widest slice of these, at the mean of its positions: times, bytes and messages
    are reduced, parameters are not. `microbatch_factors` are repeated for each slice."""
    if cuts == WHOLE:
        return profile
    share, link, costs = max(b - a for a, b in pairwise(cuts)), profile.link, profile.vocabulary
    part = partial(part_of_layer, share=share, link=link)
    factors = tuple(np.repeat(profile.microbatch_factors, len(cuts) - 1).tolist())
    shards = None if costs is None else costs.part(share, link, part)
    return replace(profile, layers=tuple(map(part, profile.layers)), microbatch_factors=factors, vocabulary=shards)


def without_keys(layer: Layer) -> Layer:
    """The layer without the keys and values that its F keeps, as `with_slices` counts these."""
    first = min(layer.kv_bytes, layer.held_until_B)
    later = min(layer.kv_bytes - first, layer.held_until_W)  # B frees them, and keeps as much for W
    return replace(
        layer,
        held_until_B=layer.held_until_B - first,
        held_until_W=layer.held_until_W - later,
        held_from_B=layer.held_from_B + later,
        kv_bytes=0,
    )


def part_of_layer(layer: Layer, share: float, link: Link) -> Layer:
    """A layer for this share of the sequence, without its keys and values."""
    bare = without_keys(layer)
    times = {name: getattr(bare, name) * share for name in TIMES}
    sizes = {name: ceil(getattr(bare, name) * share) for name in SIZES}
    # The gradient of the parameters is not smaller for a part of the sequence.
    sizes["transient"] = max(sizes["transient"], min(layer.transient, layer.parameter_bytes))
    message = link.part_of(bare.message, share)
    return replace(bare, **times, **sizes, message=message, attention_F=0, attention_B=0, slice_extra=None)


class OfAnySlices(NamedTuple):
    """bound: a lower bound of every schedule, whole or in slices, µs. longer_from: with so many slices or more, up to the
    tokens of the sequence, every schedule is longer than the value that was asked about; None: not proven."""

    bound: int
    longer_from: int | None


def bound_of_any_slices(profile: Any, step: Any, whole: Any, value: int) -> OfAnySlices | None:
    """A lower bound for a step, whole or in any slices: the busiest rank's work. whole: the same step with closed fields,
    named layers, no memory limit, and without slices. value: µs, see `OfAnySlices.longer_from`.

    Slices share the time of the whole sequence, and each has its measured extra (see `SliceExtra`), whatever its length. An
    extra in proportion to length has the same sum for any lengths; one in proportion to length and position sums to at most
    half of its slope times the sequence. With attention exchange the mean over ranks counts. None if ranks or microbatches
    differ, if messages block their sender, or if a vocabulary is sharded: rounded parts may be below the whole there.
    Raises BadInput, Infeasible.
    """
    blocking = profile.link.blocking if step.blocking is None else step.blocking
    unlike = profile.rank_factors or profile.microbatch_factors
    if unlike or blocking or on_all_ranks(step):
        return None
    problem = whole.problem(replace(profile, capacity=None))
    works = _works(profile, problem, step.microbatches, tokens_of(profile.facts.get(SEQUENCE)) or MAX_SLICES)
    least = np.ceil(works.mean(axis=0) if step.attention_exchange else works.max(axis=0)).astype(np.int64)
    short = np.flatnonzero(least <= value)
    last = int(short[-1]) if len(short) else -1
    longer = None if last + 1 == len(least) else last + 3
    return OfAnySlices(min(problem.work, int(least.min())), longer) if len(least) else None


def _works(profile: Any, problem: Problem, microbatches: int, tokens: int) -> Floats:
    """µs that each rank computes at least in 2, 3, … slices, up to the number of tokens; shape (ranks, numbers)."""
    counts = np.arange(2, min(tokens, MAX_SLICES) + 1)
    p = problem.passes
    works = np.bincount(p.rank, p.duration, problem.ranks)[:, None] + np.zeros(len(counts))
    ranks = problem.routes[0]
    for stage, here in enumerate(layer_ranges(problem.layers)):
        for kind in p.kinds:
            if (p.are(kind) & (p.stage == stage)).any():
                works[ranks[stage]] += microbatches * least_extra([profile.layers[i] for i in here], kind, counts)
    return works


def _check(step: Any) -> None:
    if not is_auto(step.slices):
        said_of(step.slices)


def _build(problem: Problem, staged: Any) -> Problem:
    """Add slices to a step that has a microbatch for each slice (see `with_slices`). If the profile knows the number of
    tokens of a sequence, uneven slices have lengths in tokens."""
    cuts, layers, counts = staged.cuts, staged.model.layers, staged.counts
    if cuts == WHOLE:
        return problem
    stages = [[layers[i] for i in here] for here in layer_ranges(counts)]
    stages += [[]] * (problem.stages - len(stages))  # shards of a vocabulary are numbered after the model's stages
    keys = [split_by(cuts, sum(c.kv_bytes for c in stage)) for stage in stages]
    gathered = [split_by(cuts, sum(c.kv_gradient_bytes or c.kv_bytes for c in stage)) for stage in stages]
    tokens = tokens_of(staged.profile.facts.get(SEQUENCE))
    parts: Sequence[float] = () if is_even(cuts) else lengths_of(cuts)
    lengths = whole_tokens(parts, tokens) if parts and tokens is not None else parts
    return with_slices(problem, len(cuts) - 1, held_keys=keys, held_gradients=gathered, lengths=lengths)


NOTABLE_ERROR = 0.10  # of a slice's time
SMALL = 0.01  # of all layers' time: layers that take less are left out
ADVICE = "time them longer (profile --seconds), or take fewer, longer slices"


def layer_errors_note(profile: Any) -> str:
    """A note if slices of a layer differ by more than 10 % from their line, about the largest difference in µs; else "".
    Layers that take less than 1 % of all layers' time are left out."""
    groups = [(f"layer '{printable(layer.name)}'", [layer]) for layer in profile.layers]
    return _farthest(profile, groups, ("F", "B", "W", "BW"), SMALL)


def stage_errors_note(profile: Any, counts: Sequence[int], fused: bool) -> str:
    """The same for stages, whose layers may all differ in the same direction. counts: layers of each stage."""
    stages = enumerate(layer_ranges(counts))
    groups = [(f"stage {stage}", [profile.layers[i] for i in numbers]) for stage, numbers in stages]
    return _farthest(profile, groups, ("F", "BW") if fused else ("F", "B", "W"), 0.0)


def _farthest(profile: Any, groups: Sequence[tuple[str, list[Layer]]], kinds: Sequence[str], small: float) -> str:
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


def _untimed(problem: Problem, base: Any) -> str:
    whole = f"whose times are none of whole sequences: measure with zbsolve profile --slices {problem.slices}"
    return f"its sequences ran in {problem.slices} slices, {whole}" if problem.slices > 1 else ""


def _lengths_in_words(problem: Problem) -> list[str]:
    """A line with the lengths of uneven slices, in tokens or, if the sequence's length is not known, in per cent."""
    lengths = problem.slice_lengths
    if all(length.is_integer() for length in lengths):
        return [f"slices of {counted([int(length) for length in lengths])} tokens"] * bool(lengths)
    return [f"slices of {counted([f'{length / sum(lengths):.1%}' for length in lengths])} of the sequence"]


SLICES = Feature(
    "slices",
    (
        Field(
            "slices",
            1,
            "each sequence is cut into N even slices; 8:even-work: with equal times; 4,2,1,1: their lengths; auto: the best "
            "of 1, 2, 4, … up to twice the ranks, more while they save 0.1 %, and numbers between (default: 1)",
            "N",
            closed=1,
            told=lambda problem: (problem.slice_lengths or problem.slices) if problem.slices > 1 else None,
            fixed="is sliced",
            offered=("2", "4", "8", "16"),
        ),
    ),
    _check,
    _build,
    beside={"attention_exchange": False},  # which is between slices
    usual=False,
    choices=CHOICES,
    doubt=layer_errors_note,
    unsure=lambda profile, problem: (
        stage_errors_note(profile, problem.layers, "BW" in problem.passes.kinds) if problem.slices > 1 else ""
    ),
    lines=_lengths_in_words,
    facts=lambda problem: {"slice_lengths": list(problem.slice_lengths)} if problem.slice_lengths else {},
    of_run=OfRun(_untimed),
    holds={
        "slices": lambda seen: not is_auto(seen.step.slices) and said_of(seen.step.slices).number > 1,
        "whole sequences": lambda seen: not is_auto(seen.step.slices) and said_of(seen.step.slices).number == 1,
        "uneven slices": lambda seen: not is_even(seen.cuts),
    },
)
