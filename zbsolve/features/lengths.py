"""Microbatches of different lengths: how many tokens each has, and their order.

A microbatch that is l times as long as a profile's takes l times as long in all but causal attention, which takes l² times
as long; it keeps and sends l times the bytes. Which microbatch comes first can be decided: lanes run in the order of
numbers, so another order is another numbering. Also here: ranks and microbatches that differ by a profile's factors, and
sequences of a batch that `pack` puts into microbatches of even work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from ..build.mixing import checked_room
from ..partition.layer import layer_ranges
from ..problem import Problem
from ..schedule.timeline import Floats
from ..util.errors import BadInput
from ..util.files import read_text
from .cuts import SEQUENCE, tokens_of
from .feature import AUTO, Choices, Feature, Field, Moves, Named, Now, is_auto
from .packing import pack
from .slices import time_of

MICROBATCH, SEQUENCES = "microbatch", "sequences"  # the fact with the number of sequences in a profile's microbatch
ROUNDING = 1e-9
NUMBER = re.compile(r"[-+]?\.?\d")  # a word that begins so is no name of a column
MESSAGES_ALIKE = "messages_alike"  # the fact that messages of all microbatches take the same time


def _build_uneven(problem: Problem, staged: Any) -> Problem:
    profile = staged.profile
    problem = problem.slowed(profile.rank_factors) if profile.rank_factors else problem
    if not profile.microbatch_factors:
        return problem
    problem = replace(problem, capacity=None if staged.left is None else tuple(staged.left))
    latency = inf if profile.facts.get(MESSAGES_ALIKE) else profile.link.latency
    return checked_room(problem.scaled(profile.microbatch_factors, latency))


UNEVEN = Feature("unlike ranks and microbatches", build=_build_uneven)


Packed = tuple[float, float]  # tokens of a microbatch, and of each of its sequences (Σ l² / Σ l where these differ)
Lengths = tuple[float | Packed, ...]  # tokens of each microbatch
FREE, GIVEN = "free", "given"
# Named orders, by ascending or descending length of the microbatches.
SHAPES = ("shortest first", "longest first", "longest in the middle", "shortest in the middle")


class Multiples(tuple[float | Packed, ...]):
    """The length of each microbatch as a multiple of the profile's sequence, instead of tokens."""

    __slots__ = ()


class Sample(tuple[tuple[float, ...], ...]):
    """Batches of a data loader: for each, the tokens of its sequences."""

    __slots__ = ()

    def typical(self, microbatches: int) -> Lengths:
        """Pack each batch into `microbatches` by tokens (see `pack`), the fullest first. Returns the median over
        batches of the first ones, of the second ones, and so on."""
        rows = []
        for batch in self:
            each = np.asarray(batch)
            packed = pack(batch, microbatches).microbatches
            rows.append([(each[list(row)].sum(), (each[list(row)] ** 2).sum()) for row in packed])
        tokens, squares = np.moveaxis(np.median(rows, axis=0), 1, 0)
        return tuple(zip(tokens.tolist(), (squares / tokens).tolist(), strict=True))


def checked_sum(what: str, each: Sequence[float], batch: str | None) -> None:
    """Raise BadInput where the values do not have the sum that the user gave for the batch (None: none was given)."""
    if batch is not None and batch.removesuffix("x").strip() != f"{sum(each):.12g}":
        raise BadInput(f"{what}: they add up to {sum(each):.12g}, and the batch has '{batch[:40]}'")


def _read(text: str) -> Lengths | Sample:
    """Lengths from "512,1024,768", "0.5x,1x,2x", "4096@512,2048" (4096 tokens of sequences of 512), "512,1024:1536" (1536 in
    all), the first column of a file, or a file with the sequences of a batch on each line. Raises BadInput."""
    where, batch = "lengths", None
    if re.fullmatch(r"[\d.x@:, ]+", text) or ("," in text and not os.path.exists(text)):
        words, colon, total = text.partition(":")
        rows, batch = [words.split(",")], total if colon else None
    else:
        where = text
        rows = [
            re.split(r"[,;\s]+", line.strip(" ,;\t\r")) for line in read_text(text).splitlines() if line.strip(" ,;\t\r")
        ]
        names = rows.pop(0) if rows and not any(NUMBER.match(word) for word in rows[0]) else []
        if rows and not names and len(rows[0]) > 1 and all(map(NUMBER.match, rows[0])):
            batches = [_numbers(row, f"{where}: line {i}") for i, row in enumerate(rows, 1)]
            return Sample(tuple(float(_tokens(length)) for length in row) for row in batches)
        rows = [_column(rows, names, where)]
    lengths = _numbers(rows[0], where)
    if not lengths:
        raise BadInput(f"{where}: no lengths: a file has one a line")
    checked_sum("lengths", [_tokens(length) for length in lengths], batch)
    return lengths


def _column(rows: Sequence[Sequence[str]], names: Sequence[str], where: str) -> list[str]:
    """The column of a table that has the lengths: the only one, or the only one whose name says so."""
    said = [place for place, name in enumerate(names) if re.search("len|token", name, re.IGNORECASE)]
    if len(names) > 1 and len(said) != 1:
        many = "several" if said else "none"
        raise BadInput(f"{where}: columns {', '.join(names)[:80]}: {many} named length or tokens, and one is needed")
    column, place = list[str](), said[0] if said else 0
    for number, row in enumerate(rows, 1):
        if place >= len(row):
            raise BadInput(f"{where}: row {number} has no {names[place]}")
        column.append(row[place])
    return column


def _numbers(words: Sequence[str], where: str) -> Lengths:
    lengths = list[float | Packed]()
    multiples = bool(words) and words[0].strip().endswith("x")
    for number, word in enumerate(map(str.strip, words)):
        parts = word.split("@")
        try:
            values = [float(part.removesuffix("x")) for part in parts]
        except ValueError:
            raise BadInput(f"{where}: length {number} is '{word[:40]}', and no number") from None
        if any(part.endswith("x") != multiples for part in parts):
            raise BadInput(f"{where}: length {number} is '{word[:40]}': all are tokens, or all multiples such as 0.5x")
        if len(values) > 2:
            raise BadInput(f"{where}: length {number} is '{word[:40]}': tokens, or tokens@of each sequence")
        lengths.append(values[0] if len(values) == 1 else (values[0], values[1]))
    return Multiples(lengths) if multiples else tuple(lengths)


def _tokens(length: float | Packed) -> float:
    return length[0] if isinstance(length, tuple) else length


def _as_text(length: float | Packed) -> str:
    return f"{length[0]:g}@{length[1]:g}" if isinstance(length, tuple) else f"{length:g}"


def _check(step: Any) -> None:
    if isinstance(step.lengths, Sample):
        for number, batch in enumerate(step.lengths, 1):
            if len(batch) < step.microbatches:
                raise BadInput(f"lengths: batch {number} has {len(batch)} sequences for {step.microbatches} microbatches")
    elif step.lengths and len(step.lengths) != step.microbatches:
        raise BadInput(f"lengths: {len(step.lengths)} lengths for {step.microbatches} microbatches: one of each is needed")
    for number, length in enumerate(_lengths(step)):
        for tokens in length if isinstance(length, tuple) else (length,):
            if not 0 < tokens < inf:
                raise BadInput(f"lengths: length {number} is {tokens}: above 0 is needed")
        if isinstance(length, tuple) and length[1] > length[0] * (1 + ROUNDING):
            raise BadInput(f"lengths: length {number} is {_as_text(length)}: a sequence of more tokens than all have")
    if step.order not in (GIVEN, AUTO):
        raise BadInput(f"order '{step.order}': {GIVEN} or {FREE}")
    if is_auto(step.order) and not _unlike(step):
        alike = "microbatches are alike: give their lengths or sizes"
        raise BadInput(f"order 'free': {'sizes that the search decides come in turn' if is_auto(step.sizes) else alike}")


def _lengths(step: Any) -> Lengths:
    """The length of each microbatch; for a sample of batches, the typical ones."""
    return step.lengths.typical(step.microbatches) if isinstance(step.lengths, Sample) else step.lengths


def _unlike(step: Any) -> Lengths:
    """The length or size of each microbatch, if the step has them."""
    return _lengths(step) or (() if is_auto(step.sizes) else step.sizes)


def sequences_of(profile: Any) -> int:
    """The number of sequences in a profile's microbatch; 1 if it does not say."""
    facts = profile.facts.get(MICROBATCH)
    known = facts.get(SEQUENCES) if isinstance(facts, dict) else None
    return known if isinstance(known, int) and not isinstance(known, bool) and known > 0 else 1


def factors_of(lengths: Lengths, profile: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """By which factors all but attention, and attention, take longer than in the profile's microbatch. In a plain microbatch
    all sequences have the given length; a packed one has that many tokens. Raises BadInput without that number."""
    tokens = 1 if isinstance(lengths, Multiples) else tokens_of(profile.facts.get(SEQUENCE))
    if tokens is None:
        why = f"the profile does not say how many tokens its sequence has (fact '{SEQUENCE}')"
        raise BadInput(f"lengths: {why}: write them as multiples of it, such as 0.5x,1x,2x")
    several = tokens * sequences_of(profile)
    rows = [(a[0] / several, a[1] / tokens) if isinstance(a, tuple) else (a / tokens, a / tokens) for a in lengths]
    return tuple(a for a, _ in rows), tuple(a * b for a, b in rows)


def _model(profile: Any, step: Any) -> Any:
    """The profile with such microbatches: times, bytes and messages that are proportional to the length."""
    if not step.lengths:
        return profile
    return with_factors(profile, factors_of(_lengths(step), profile)[0], "lengths")


def with_factors(profile: Any, factors: tuple[float, ...], what: str) -> Any:
    """The profile with larger microbatches, by a step's field `what`. Raises BadInput if they differ already."""
    if profile.microbatch_factors not in ((), factors):
        raise BadInput(f"{what}: the profile's microbatches differ already (field 'microbatch_factors')")
    return replace(profile, microbatch_factors=factors)


def _build(problem: Problem, staged: Any) -> Problem:
    """Correct attention's part of each pass, which grows with the square of the sequence."""
    if not staged.step.lengths:
        return problem
    return grown(problem, staged, np.asarray(factors_of(_lengths(staged.step), staged.profile)[1]))


# Kind of pass → fields of a layer: the time of attention, and the time that does not depend on the size.
UNLIKE = {
    "F": ("attention_F", "fixed_F"),
    "X": ("attention_F", "fixed_F"),
    "B": ("attention_B", "fixed_B"),
    "W": ("", "fixed_W"),
    "BW": ("attention_B", "fixed_BW"),
}


def grown(problem: Problem, staged: Any, attention: Floats) -> Problem:
    """A step in which all passes were multiplied by the factors of their microbatch, corrected: attention takes `attention`
    times as long as in the profile, shape (microbatches,), and what does not depend on the size takes as long as there."""
    layers, p, factor = staged.model.layers, problem.passes, np.asarray(staged.profile.microbatch_factors)
    slow = np.asarray(staged.profile.rank_factors or (1.0,) * problem.ranks)
    duration = p.duration.astype(np.float64)
    for kind, names in UNLIKE.items():
        counts = problem.recomputed or staged.counts if kind == "X" else staged.counts
        runs = [[layers[i] for i in here[:n]] for here, n in zip(layer_ranges(staged.counts), counts, strict=True)]
        if kind != "X":
            runs = [[*run, *staged.costs.beside(stage)] for stage, run in enumerate(runs)]
        rows = problem.rows(kind)
        usual = np.array([round(sum(time_of(layer, kind) for layer in run)) for run in runs])
        exact = np.rint(usual[p.stage[rows]] * slow[p.rank[rows]]) * factor[p.microbatch[rows]]
        duration[rows] += exact - np.rint(exact)  # undo rounding, to round only once
        for name, times in zip(names, (attention, np.ones(len(factor))), strict=True):
            part = np.array([sum(getattr(layer, name, 0.0) for layer in run) for run in runs])
            duration[rows] += (part[p.stage[rows]] * slow[p.rank[rows]]) * (times - factor)[p.microbatch[rows]]
    return replace(problem, passes=replace(p, duration=np.maximum(0, np.rint(duration)).astype(np.int64)))


def _choices(step: Any) -> list[Named]:
    """The orders of microbatches that are tried first, by name: the given one, and some by length."""
    each = _unlike(step)
    order = np.argsort([_tokens(length) for length in each], kind="stable")
    up, down = order.tolist(), order[::-1].tolist()
    hill, valley = [*up[::2], *up[1::2][::-1]], [*down[::2], *down[1::2][::-1]]
    orders = {GIVEN: list(range(len(up))), **dict(zip(SHAPES, (up, down, hill, valley), strict=True))}
    steps = {tuple(each[i] for i in numbers): (name, numbers) for name, numbers in reversed(orders.items())}
    said = {turn: f": {','.join(map(_as_text, turn))}" * ("middle" in name) for turn, (name, _) in steps.items()}
    return [(f" order={name}{said[turn]}", in_order(step, rows)) for turn, (name, rows) in reversed(steps.items())]


def _moves(now: Now) -> Iterator[Named]:
    """Steps in which one microbatch moves to another place, the longest first, with their names."""
    each = _unlike(now.step)
    numbers, seen = list(range(len(each))), {tuple(each)}
    for i in np.argsort([-_tokens(length) for length in each], kind="stable").tolist():
        others = [number for number in numbers if number != i]
        for place in numbers:
            moved_step = in_order(now.step, [*others[:place], i, *others[place:]])
            if (moved := tuple(_unlike(moved_step))) not in seen:
                seen.add(moved)
                yield f" order={','.join(map(_as_text, moved))}", moved_step


def in_order(step: Any, numbers: Sequence[int]) -> Any:
    """The step in which microbatch i is number `numbers[i]` of this one."""
    each = _unlike(step)
    kind = Multiples if isinstance(each, Multiples) else tuple
    return replace(step, **{"lengths" if step.lengths else "sizes": kind(each[i] for i in numbers)}, order=GIVEN)


LENGTHS = Feature(
    "lengths",
    (
        Field(
            "lengths",
            (),
            "tokens of each microbatch: 512,1024,768, multiples of the profile's sequence such as 0.5x,1x, 4096@512: of "
            "sequences of 512; or a file with one a line, or with the sequences of a batch on each line, which are packed "
            "(default: all as profiled)",
            "LENGTHS",
            read=_read,
            fixed="microbatches take",
        ),
        Field(
            "order",
            GIVEN,
            "of microbatches with --lengths or --sizes: as given, or free: the search decides (default: given)",
            choices=(GIVEN, FREE),
            read=lambda text: AUTO if text == FREE else text,
            closed=GIVEN,
            fixed="comes first",
        ),
    ),
    _check,
    _build,
    _model,
    Choices(("order",), _choices, apart=False),
    (Moves("orders", ("order",), _moves),),
    holds={"lengths": lambda seen: bool(seen.step.lengths)},
)
