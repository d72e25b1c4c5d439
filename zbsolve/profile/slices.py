"""A profile's step in sequence slices: where the sequence is cut, and what a slice costs with causal attention (SlimPipe,
arXiv 2504.14519; Seq1F1B, arXiv 2406.03488).

A slice that begins at part a of the sequence and ends at part b takes (b − a) of all work but attention's, and b² − a² of
attention's: of n even ones slice j takes 1/n and (2j + 1)/n². Bytes, messages and weight gradients take b − a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import ceil, isclose, isfinite, sqrt
from typing import Any, NamedTuple

import numpy as np

from ..build.slices import with_slices
from ..layer import Layer, Link, layer_ranges
from ..problem import Problem
from ..util.errors import BadInput
from .vocabulary import ShardCosts, ShardPasses, VocabularyCosts

EVEN_WORK = "even-work"
SEQUENCE = "sequence"  # the fact of a profile that says how many tokens a sequence has
# A number of even slices, "8", "8:even-work" (each takes as long), or "4,2,1,1" or numbers: how long each is.
Slices = int | str | Sequence[float]
Cuts = tuple[float, ...]  # where slices begin and the last one ends, as parts of the sequence: 0, …, 1
WHOLE: Cuts = (0.0, 1.0)
ROUNDED = 1e-6  # µs that a line may be below 0 in a file
MAX_SLICES = 10_000  # of a sequence; steps have a million forwards at the most
TIMES = ("F", "B", "W", "BW", "X", "all_to_all")
OF_ATTENTION = {"F": "attention_F", "B": "attention_B", "BW": "attention_B", "X": "attention_F"}
SIZES = ("held_until_B", "held_until_W", "held_from_B", "output_bytes", "transient", "output_kept", "input_unneeded")


class NotSliced(BadInput):
    """The tokens of a profile's sequences do not make these slices; others they may."""


class Said(NamedTuple):
    """How many slices, and how long each is in proportion; (): all alike, or as even_work says."""

    number: int
    lengths: tuple[float, ...] = ()
    even_work: bool = False


def said_of(slices: Slices) -> Said:
    """What was said of slices. Raises BadInput for what makes no sense whatever the profile is."""
    if isinstance(slices, str):
        number, colon, rest = slices.partition(":")
        parts = number.split(",")
        try:
            lengths = tuple(map(float, parts))
        except ValueError:
            raise _not_slices(slices) from None
        if (colon and (rest != EVEN_WORK or len(parts) > 1)) or (len(parts) == 1 and not _is_whole(number)):
            raise _not_slices(slices)
        slices = int(number) if len(parts) == 1 else lengths
        if colon:
            return said_of(slices)._replace(even_work=True)
    if isinstance(slices, Sequence | np.ndarray):
        lengths = tuple(map(float, slices))
        if not lengths or not all(isfinite(one) and one > 0 for one in lengths):
            raise BadInput("slices: lengths are numbers above 0")
        return Said(len(lengths), lengths)
    if isinstance(slices, bool) or not isinstance(slices, int | np.integer) or slices < 1:
        raise BadInput(f"slices: at least 1 is needed, got {slices}")
    if slices > MAX_SLICES:
        raise BadInput(f"slices: {slices} are more than zbsolve handles ({MAX_SLICES})")
    return Said(int(slices))


def _is_whole(said: str) -> bool:
    return said.strip().removeprefix("-").isdecimal()


def _not_slices(said: str) -> BadInput:
    kinds = f"a number such as 8, 8:{EVEN_WORK}, or lengths such as 4,2,1,1"
    auto = "; auto alone tries numbers of both kinds" if said.strip().lower().startswith("auto") else ""
    return BadInput(f"slices '{said[:40]}': {kinds}{auto}")


def cuts_of(slices: Slices, layers: Sequence[Layer], sequence: Any = None) -> Cuts:
    """Where the sequence is cut; sequence: its tokens, if known. Cuts of slices that take as long are whole tokens then.
    Raises BadInput where no layer says what attention takes, or the tokens do not make these slices."""
    said = said_of(slices)
    if said.number == 1:
        return WHOLE
    check_attention(layers)
    tokens = sequence if isinstance(sequence, int) and sequence > 0 else None
    if tokens is not None:
        _check_tokens(said, tokens)
    if said.lengths:
        return (0.0, *(one / sum(said.lengths) for one in accumulate(said.lengths[:-1])), 1.0)
    if said.even_work:
        return _cuts_of_even_work(said.number, layers, tokens)
    return tuple(i / said.number for i in range(said.number + 1))


def check_attention(layers: Sequence[Layer]) -> None:
    """Raise BadInput where nobody knows how much of the layers' time is causal attention's."""
    if not any(one.attention_F for one in layers):
        raise BadInput(
            "slices: the profile knows no causal attention: give its layers' fields 'attention_F', 'attention_B' (µs) and "
            "'kv_bytes', or take zbsolve profile --slices or --estimate"
        )


def _check_tokens(said: Said, tokens: int) -> None:
    if said.number > tokens:
        raise NotSliced(f"slices: {said.number} slices of a sequence of {tokens} tokens")
    total = sum(said.lengths)
    if said.lengths and not (isclose(total, 1) or isclose(tokens % total, 0)):
        raise NotSliced(f"slices: lengths add up to {total:g}, which divides neither 1 nor the sequence's {tokens} tokens")
    if not said.lengths and not said.even_work and tokens % said.number:
        even = f"; {said.number}:{EVEN_WORK} need not"
        raise NotSliced(f"slices: {said.number} even slices do not divide the sequence's {tokens} tokens{even}")


def _cuts_of_even_work(count: int, layers: Sequence[Layer], tokens: int | None) -> Cuts:
    """Where a·x² + (t − a)·x = k/n·t, with t all layers' work and a attention's part of it (Seq1F1B, section 3.3)."""
    work = sum(one.work for one in layers)
    attention = sum(one.attention_F + one.attention_B for one in layers)
    rest = work - attention
    found = [(sqrt(rest**2 + 4 * attention * work * k / count) - rest) / (2 * attention) for k in range(1, count)]
    cuts = (0.0, *(one if tokens is None else round(one * tokens) / tokens for one in found), 1.0)
    if any(b <= a for a, b in pairwise(cuts)):
        raise NotSliced(f"slices: {count} slices that take as long are not a token each")
    return cuts


def split_by(cuts: Cuts, total: float, attention: float = 0.0) -> list[int]:
    """`total` of a whole sequence, of which `attention` is causal attention's, slice by slice: whole numbers that add up to
    it."""
    until = [round((total - attention) * at + attention * at**2) for at in cuts]
    return [b - a for a, b in pairwise(until)]


def time_of(layer: Layer, kind: str) -> float:
    """µs of a pass of a whole sequence; of an X whose time nobody knows F's."""
    return (layer.X or layer.F) if kind == "X" else float(getattr(layer, kind))


def slice_times(layers: Sequence[Layer], kind: str, cuts: Cuts) -> list[int]:
    """µs of a kind of pass of these layers together, slice by slice."""
    attention = sum(getattr(one, OF_ATTENTION[kind]) for one in layers) if kind in OF_ATTENTION else 0.0
    parts = split_by(cuts, sum(time_of(one, kind) for one in layers), attention)
    extra = [sum(row) for row in zip(*(_extra_times(one, kind, cuts) for one in layers), strict=True)]
    return [max(0, part + round(more)) for part, more in zip(parts, extra, strict=True)]


def _extra_times(layer: Layer, kind: str, cuts: Cuts) -> list[float]:
    """µs of each slice beyond its part, where that was measured. What is above 0 (launches, kernels that are less efficient,
    gradients added up) is of a slice whatever its length; what is below 0 goes with its length."""
    if layer.slice_extra is None:
        return [0.0] * (len(cuts) - 1)
    number, (each, later) = layer.slice_extra.number, getattr(layer.slice_extra, "F" if kind == "X" else kind)
    found = []
    for before, (a, b) in enumerate(pairwise(cuts)):
        length, begin = (b - a) * number, a * number  # in slices of the measurement
        found.append(each * (1 if each > 0 else length) + later * (before if later > 0 else length * begin))
    return found


class Overheads(NamedTuple):
    """Of all layers' F and backward in slices: what they take together over what the whole sequence takes, and which part of
    it each slice takes whatever its length."""

    ratio: float
    share: float


def overheads(layers: Sequence[Layer], cuts: Cuts) -> Overheads | None:
    """None where slices were not measured."""
    if not any(one.slice_extra for one in layers):
        return None
    kinds = ("F", "BW") if any(one.BW for one in layers) else ("F", "B", "W")
    whole = sum(time_of(one, kind) for one in layers for kind in kinds)
    taken = sum(sum(slice_times([one], kind, cuts)) for one in layers for kind in kinds)
    lines = [getattr(one.slice_extra, kind) for one in layers if one.slice_extra for kind in kinds]
    fixed = (len(cuts) - 1) * sum(max(0.0, each) for each, _ in lines)
    return Overheads(taken / whole, min(1.0, fixed / taken)) if whole and taken else None


def negative_slice(layer: Layer) -> str:
    """Which of the even slices that a layer's lines are about would take less than no time, in words; or ""."""
    if layer.slice_extra is None:
        return ""
    number = layer.slice_extra.number
    for kind in ("F", "B", "W", "BW"):
        first, later = getattr(layer.slice_extra, kind)
        attention = getattr(layer, OF_ATTENTION[kind]) if kind in OF_ATTENTION else 0.0
        rest = (time_of(layer, kind) - attention) / number
        for j in (0, number - 1):  # a line is lowest at an end
            if (time := rest + (2 * j + 1) * attention / number**2 + first + later * j) < -ROUNDED:
                return f"field '{kind}': slice {j} of {number} would take {time:g} µs"
    return ""


def check_combination(cuts: Cuts, routes: int, shards: int, further: bool, layers: Sequence[Layer]) -> None:
    """Raise BadInput for what does not go with slices. further: whether stages offload, or the vocabulary is sharded."""
    if cuts == WHOLE:
        return
    if routes > 1:
        raise BadInput("slices: microbatches take several routes, and the slices of one must stay on the same ranks")
    if shards > 1:
        raise BadInput(f"slices: sharded parameters (shards: {shards}) do not go with slices")
    if not is_even(cuts) and (further or any(one.all_to_all for one in layers)):
        raise BadInput("slices: uneven ones do not go with offload, a sharded vocabulary or all-to-alls")


def is_even(cuts: Cuts) -> bool:
    """Whether all slices are as long."""
    return all(isclose(b - a, cuts[1]) for a, b in pairwise(cuts))


def widest_slice(profile: Any, cuts: Cuts) -> Any:
    """The profile where a sequence is the widest slice of this one's, at the mean of positions: times, bytes and messages
    are parts, parameters whole. `microbatch_factors` are repeated for each slice."""
    if cuts == WHOLE:
        return profile
    share, link = max(b - a for a, b in pairwise(cuts)), profile.link
    factors = tuple(np.repeat(profile.microbatch_factors, len(cuts) - 1).tolist())
    costs = profile.vocabulary
    return replace(
        profile,
        layers=tuple(part_of_layer(one, share, link) for one in profile.layers),
        microbatch_factors=factors,
        vocabulary=None if costs is None else _part_of_vocabulary(costs, share, link),
    )


def without_keys(layer: Layer) -> Layer:
    """The layer without its keys and values among what its F keeps: `with_slices` counts them."""
    first = min(layer.kv_bytes, layer.held_until_B)
    later = min(layer.kv_bytes - first, layer.held_until_W)  # B frees them, and makes as much that waits for W
    return replace(
        layer,
        held_until_B=layer.held_until_B - first,
        held_until_W=layer.held_until_W - later,
        held_from_B=layer.held_from_B + later,
        kv_bytes=0,
    )


def part_of_layer(layer: Layer, share: float, link: Link) -> Layer:
    """A layer of so much of the sequence, without its keys and values."""
    bare = without_keys(layer)
    times = {name: getattr(bare, name) * share for name in TIMES}
    sizes = {name: ceil(getattr(bare, name) * share) for name in SIZES}
    # A gradient of the parameters is as large for a part of the sequence.
    sizes["transient"] = max(sizes["transient"], min(layer.transient, layer.parameter_bytes))
    message = _part_of_message(bare.message, share, link)
    return replace(bare, **times, **sizes, message=message, attention_F=0, attention_B=0, slice_extra=None)


def _part_of_message(time: float, share: float, link: Link) -> float:
    """µs of a message that took `time` whole: the link's latency stays."""
    return min(time, link.latency + max(0.0, time - link.latency) * share)


def _part_of_vocabulary(costs: VocabularyCosts, share: float, link: Link) -> VocabularyCosts:
    rests = (costs.output_rest, costs.embedding_rest)
    output, embedding = (None if one is None else part_of_layer(one, share, link) for one in rests)
    assert output is not None
    return replace(
        costs,
        hidden_bytes=ceil(costs.hidden_bytes * share),
        statistic_bytes=ceil(costs.statistic_bytes * share),
        output_rest=output,
        embedding_rest=embedding,
        shards=tuple(_part_of_shard(one, share, link) for one in costs.shards),
    )


def _part_of_shard(row: ShardCosts, share: float, link: Link) -> ShardCosts:
    def passes(one: ShardPasses) -> ShardPasses:
        times = {name: getattr(one, name) * share for name in ("S", "T", "merge")}
        return replace(one, **times, held=ceil(one.held * share), transient=ceil(one.transient * share))

    times = (row.broadcast, row.reduce, row.statistics)
    broadcast, reduce, statistics = (None if one is None else _part_of_message(one, share, link) for one in times)
    found = replace(row, broadcast=broadcast, reduce=reduce, statistics=statistics, lookup=row.lookup * share)
    return replace(found, one=passes(row.one), two=passes(row.two))


def sliced_step(problem: Problem, cuts: Cuts, layers: Sequence[Layer], counts: Sequence[int]) -> Problem:
    """`problem`, a step with a microbatch for each slice, with its slices (see `with_slices`). layers: of the whole
    sequence; counts: of each stage. Raises BadInput, Infeasible."""
    if cuts == WHOLE:
        return problem
    none = [0] * (len(cuts) - 1)  # of shards of a vocabulary, which come behind the model's stages
    keys = [split_by(cuts, sum(layers[i].kv_bytes for i in here)) for here in layer_ranges(counts)]
    gathered = [
        split_by(cuts, sum(layers[i].kv_gradient_bytes or layers[i].kv_bytes for i in here)) for here in layer_ranges(counts)
    ]
    more = [none] * (problem.stages - len(keys))
    lengths = () if is_even(cuts) else [b - a for a, b in pairwise(cuts)]
    return with_slices(problem, len(cuts) - 1, held_keys=keys + more, held_gradients=gathered + more, lengths=lengths)
