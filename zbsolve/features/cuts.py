"""Where a sequence is cut into slices: the user's `slices`, as parts of the sequence and as tokens; what a search tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import isclose, isfinite, sqrt
from typing import Any, NamedTuple

import numpy as np

from ..partition.layer import Layer
from ..util.errors import BadInput, Unfit
from .feature import Choices, Ladder, Named
from .offload import NO_OFFLOAD
from .vocabulary import BARRIERS

EVEN_WORK = "even-work"
SEQUENCE = "sequence"  # the fact of a profile with the number of tokens of a sequence
# A number of even slices, "8", "8:even-work" (slices of equal time), or lengths in proportion: "4,2,1,1" or numbers.
Slices = int | str | Sequence[float]
Cuts = tuple[float, ...]  # where slices begin, and the last one ends, as parts of the sequence: 0, …, 1
WHOLE: Cuts = (0.0, 1.0)
MAX_SLICES = 10_000  # of a sequence; a step has at most a million forwards
ROUNDING = 1e-9  # tokens by which a quotient may be below an integer


class Said(NamedTuple):
    """A parsed value of `slices`: their number, and their lengths in proportion; (): equal, or by even_work."""

    number: int
    lengths: tuple[float, ...] = ()
    even_work: bool = False


def said_of(slices: Slices) -> Said:
    """Parse a value of `slices`. Raises BadInput for what makes no sense with any profile."""
    if isinstance(slices, str):
        number, colon, how = slices.partition(":")
        parts = number.split(",")
        try:
            lengths = tuple(map(float, parts))
        except ValueError:
            raise _not_slices(slices) from None
        whole = len(parts) > 1 or number.strip().removeprefix("-").isdecimal()
        if not whole or (colon and (how != EVEN_WORK or len(parts) > 1)):
            raise _not_slices(slices)
        slices = int(number) if len(parts) == 1 else lengths
        if colon:
            return said_of(slices)._replace(even_work=True)
    if isinstance(slices, Sequence | np.ndarray):
        lengths = tuple(map(float, slices))
        if not lengths or not all(isfinite(length) and length > 0 for length in lengths):
            raise BadInput("slices: lengths are numbers above 0")
        return Said(len(lengths), lengths)
    if isinstance(slices, bool) or not isinstance(slices, int | np.integer) or slices < 1:
        raise BadInput(f"slices: at least 1 is needed, got {slices}")
    if slices > MAX_SLICES:
        raise BadInput(f"slices: {slices} are more than zbsolve handles ({MAX_SLICES})")
    return Said(int(slices))


def _not_slices(text: str) -> BadInput:
    kinds = f"a number such as 8, 8:{EVEN_WORK}, or lengths such as 4,2,1,1"
    auto = "; auto alone tries numbers of both kinds" if text.strip().lower().startswith("auto") else ""
    return BadInput(f"slices '{text[:40]}': {kinds}{auto}")


def cuts_of(slices: Slices, layers: Sequence[Layer], sequence: Any = None) -> Cuts:
    """Where the sequence is cut. sequence: its number of tokens, if known; then slices are whole tokens (see
    `whole_tokens`). Raises BadInput where no layer has the time of attention, and Unfit for more slices than tokens."""
    asked = said_of(slices)
    if asked.number == 1:
        return WHOLE
    check_attention(layers)
    lengths = asked.lengths or (1.0,) * asked.number
    cuts, tokens = _cuts_at(lengths), tokens_of(sequence)
    if asked.even_work:
        # a·x² + (t − a)·x = k/n·t, with t all layers' work and a attention's part of it (Seq1F1B, section 3.3)
        work = sum(layer.work for layer in layers)
        attention = sum(layer.attention_F + layer.attention_B for layer in layers)
        plain, n = work - attention, asked.number
        inner = ((sqrt(plain**2 + 4 * attention * work * k / n) - plain) / (2 * attention) for k in range(1, n))
        cuts = (0.0, *inner, 1.0)
        lengths = tuple(lengths_of(cuts))
    if tokens is None or (not asked.lengths and not asked.even_work and tokens % asked.number == 0):
        return cuts
    return _cuts_at(whole_tokens(lengths, tokens))


def tokens_of(sequence: Any) -> int | None:
    """The number of tokens of a sequence, from a profile's fact; None if that is not given."""
    return sequence if isinstance(sequence, int) and not isinstance(sequence, bool) and sequence > 0 else None


def whole_tokens(lengths: Sequence[float], tokens: int) -> tuple[int, ...]:
    """The number of tokens of each slice, at least one: in proportion to `lengths`, by largest remainder, with ties to the
    first. Raises Unfit for more slices than tokens."""
    count = len(lengths)
    if count > tokens:
        raise Unfit(f"slices: {count} slices of a sequence of {tokens} tokens: each needs one")
    quotas = np.asarray(lengths, np.float64) / sum(lengths) * tokens
    counts = np.maximum(1, np.floor(quotas + ROUNDING)).astype(np.int64)
    missing = tokens - int(counts.sum())
    counts[np.argsort(counts - quotas, kind="stable")[: max(0, missing)]] += 1
    for _ in range(-missing):  # slices of less than a token got one: take it from those furthest above their part
        counts[np.argmax(np.where(counts > 1, counts - quotas, -np.inf))] -= 1
    return tuple(counts.tolist())


def lengths_of(cuts: Cuts) -> list[float]:
    """The length of each slice as a part of the sequence."""
    return [b - a for a, b in pairwise(cuts)]


def is_even(cuts: Cuts) -> bool:
    """Have all slices the same length?"""
    return all(isclose(length, cuts[1]) for length in lengths_of(cuts))


def _cuts_at(lengths: Sequence[float]) -> Cuts:
    return (0.0, *(total / sum(lengths) for total in accumulate(lengths[:-1])), 1.0)


def check_attention(layers: Sequence[Layer]) -> None:
    """Raise BadInput where the time of causal attention is unknown, or the keys and values of a layer with attention."""
    if not any(layer.attention_F for layer in layers):
        raise BadInput(
            "slices: the profile knows no causal attention: give its layers' fields 'attention_F', 'attention_B' (µs) and "
            "'kv_bytes', or take zbsolve profile --slices or --estimate"
        )
    for layer in layers:
        if why := without_kv_bytes(layer):
            raise BadInput(f"slices: layer '{layer.name}': {why}")


def without_kv_bytes(layer: Layer) -> str:
    """What is missing in a layer with causal attention but no keys and values, in words; or ""."""
    named = next((name for name in ("attention_F", "attention_B") if getattr(layer, name)), "")
    if not named or layer.kv_bytes:
        return ""
    return f"field 'kv_bytes' is 0, but attention (field '{named}') keeps keys and values"


MAX_SLICED = 20_000  # forwards of a step that a search tries with slices
EVEN, EXCHANGE = "even", "exchange"  # kinds of slices, besides equal work


def _choices(step: Any) -> list[Named]:
    """Numbers of slices, doubling up to 2p. With 2p, SlimPipe (arXiv 2504.14519) holds half a
    microbatch more than the one that it needs."""
    counts = [2**k for k in range(1, (2 * step.ranks).bit_length())]
    several = [(count, kind) for kind in kinds_of_slices(step, step) for count in counts if count <= most_slices(step)]
    return [in_slices(step, 1, EVEN), *(in_slices(step, number, kind) for number, kind in several if step.shards == 1)]


def kinds_of_slices(step: Any, said: Any) -> dict[str, str]:
    """The kinds of slices that are tried, with words: even ones; also with attention for other ranks, if `said` has that;
    and slices of equal time, as in Seq1F1B (arXiv 2406.03488, section 3.3), if they go with the step's other choices."""
    uneven = step.offload == NO_OFFLOAD and step.vocabulary not in BARRIERS
    there = {EVEN: True, EXCHANGE: said.attention_exchange, EVEN_WORK: uneven}
    return {kind: "of equal work" if kind == EVEN_WORK else kind for kind, goes in there.items() if goes}


def in_slices(step: Any, count: int, kind: str) -> Named:
    """The step in `count` slices of a kind, with its name."""
    slices: Slices = f"{count}:{EVEN_WORK}" if kind == EVEN_WORK and count > 1 else count
    sliced = replace(step, slices=slices, attention_exchange=kind == EXCHANGE and count > 1)
    return f" slices={slices}{f' {EXCHANGE}' if sliced.attention_exchange else ''}", sliced


def most_slices(step: Any, profile: Any = None) -> int:
    """The largest number of slices that is tried for a step."""
    tokens = None if profile is None else tokens_of(profile.facts.get(SEQUENCE))
    return min(tokens or MAX_SLICES, int(MAX_SLICED // (len(step.routes[0]) * step.microbatches)))


def _sliced(step: Any) -> tuple[int, str]:
    """The number and the kind of a step's slices."""
    asked = said_of(step.slices)
    return asked.number, EVEN_WORK if asked.even_work else EXCHANGE if step.attention_exchange else EVEN


CHOICES = Choices(("slices",), _choices, ladder=Ladder("slices", kinds_of_slices, in_slices, _sliced, most_slices))
