"""Microbatches of unlike lengths: how many tokens each has, and in which order they come.

A microbatch of l times a profile's sequence takes l times as long at all but causal attention, whose part takes l² times as
long; it keeps and sends l times the bytes. Which microbatch comes first is a decision: lanes run in the order of numbers, so
another order is another numbering. Ranks and microbatches that are unlike by a profile's factors are here, too, and `pack`,
which makes microbatches of even work from sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from math import inf
from typing import Any

import numpy as np

from ..build.mixing import checked_room
from ..layer import layer_ranges
from ..problem import Ints, Problem
from ..timeline import Floats
from ..util.errors import BadInput
from ..util.files import read_text
from .cuts import SEQUENCE, tokens_of
from .feature import AUTO, Choices, Feature, Field, Moves, Named, Now, is_auto

MESSAGES_ALIKE = "messages_alike"  # the fact that messages take as long for microbatches that differ


def _build_uneven(problem: Problem, staged: Any) -> Problem:
    profile = staged.profile
    problem = problem.slowed(profile.rank_factors) if profile.rank_factors else problem
    if not profile.microbatch_factors:
        return problem
    problem = replace(problem, capacity=None if staged.left is None else tuple(staged.left))
    latency = inf if profile.facts.get(MESSAGES_ALIKE) else profile.link.latency
    return checked_room(problem.scaled(profile.microbatch_factors, latency))


UNEVEN = Feature("unlike ranks and microbatches", build=_build_uneven)


Lengths = tuple[float, ...]  # tokens of each microbatch
FREE, GIVEN = "free", "given"
# Orders by name, as the numbers of microbatches of ascending lengths.
SHAPES = ("shortest first", "longest first", "longest in the middle", "shortest in the middle")


class Multiples(tuple[float, ...]):
    """How many times as long as the profile's sequence each microbatch is, in place of its tokens."""

    __slots__ = ()


def checked_sum(what: str, each: Sequence[float], batch: str | None) -> None:
    """Raise BadInput where they do not add up to what somebody says that the batch has; None: nobody does."""
    if batch is not None and batch.removesuffix("x").strip() != f"{sum(each):.12g}":
        raise BadInput(f"{what}: they add up to {sum(each):.12g}, and the batch has '{batch[:40]}'")


def _read(said: str) -> Lengths:
    """Lengths from "512,1024,768", "0.5x,1x,2x", "512,1024:1536" (1536 in all), or the first column of a file. Raises
    BadInput."""
    where, text = "lengths", said
    if not said.replace("x", "").replace(",", "").replace(".", "").replace(" ", "").isdecimal():
        where = said
        rows = [line.split(",")[0].strip() for line in read_text(said).splitlines() if line.strip()]
        text = ",".join(rows[not rows[0][:1].isdecimal() :]) if rows else ""
    words, lengths = [word.strip() for word in text.split(",")], []
    multiples = words[0].endswith("x")
    for number, word in enumerate(words):
        try:
            lengths.append(float(word.removesuffix("x")))
        except ValueError:
            raise BadInput(f"{where}: length {number} is '{word[:40]}', and no number") from None
        if word.endswith("x") != multiples:
            raise BadInput(f"{where}: length {number} is '{word[:40]}': all are tokens, or all multiples such as 0.5x")
    return Multiples(lengths) if multiples else tuple(lengths)


def _check(step: Any) -> None:
    lengths = step.lengths
    if lengths and len(lengths) != step.microbatches:
        raise BadInput(f"lengths: {len(lengths)} lengths for {step.microbatches} microbatches: one of each is needed")
    for number, length in enumerate(lengths):
        if not 0 < length < inf:
            raise BadInput(f"lengths: length {number} is {length}: above 0 is needed")
    if step.order not in (GIVEN, AUTO):
        raise BadInput(f"order '{step.order}': {GIVEN} or {FREE}")
    if is_auto(step.order) and not _unlike(step):
        raise BadInput("order 'free': microbatches are alike: give their lengths or sizes")


def _unlike(step: Any) -> Sequence[float]:
    """What microbatches have, where a step says that of each."""
    found: Sequence[float] = step.lengths or (() if is_auto(step.sizes) else step.sizes)
    return found


def factors_of(lengths: Sequence[float], profile: Any) -> tuple[float, ...]:
    """How many times as long as the profile's sequence each microbatch is. Raises BadInput where nobody knows."""
    if isinstance(lengths, Multiples):
        return tuple(lengths)
    tokens = tokens_of(profile.facts.get(SEQUENCE))
    if tokens is None:
        why = f"the profile does not say how many tokens its sequence has (fact '{SEQUENCE}')"
        raise BadInput(f"lengths: {why}: write them as multiples of it, such as 0.5x,1x,2x")
    return tuple(length / tokens for length in lengths)


def _model(profile: Any, step: Any) -> Any:
    """The profile with microbatches so long: what goes with l in times, bytes and messages."""
    if not step.lengths:
        return profile
    factors = factors_of(step.lengths, profile)
    return with_factors(profile, factors, "lengths")


def with_factors(profile: Any, factors: tuple[float, ...], what: str) -> Any:
    """The profile with microbatches so much larger, by a step's field `what`. Raises BadInput where they differ already."""
    if profile.microbatch_factors not in ((), factors):
        raise BadInput(f"{what}: the profile's microbatches differ already (field 'microbatch_factors')")
    return replace(profile, microbatch_factors=factors)


def _build(problem: Problem, staged: Any) -> Problem:
    """Attention's part of each pass goes with l²."""
    return grown(problem, staged, np.asarray(staged.profile.microbatch_factors) ** 2) if staged.step.lengths else problem


# Of kinds of passes what attention takes, and what does not go with the size, as layers have it.
UNLIKE = {
    "F": ("attention_F", "fixed_F"),
    "X": ("attention_F", "fixed_F"),
    "B": ("attention_B", "fixed_B"),
    "W": ("", "fixed_W"),
    "BW": ("attention_B", "fixed_BW"),
}


def grown(problem: Problem, staged: Any, attention: Floats) -> Problem:
    """A step whose passes all went with its microbatches' factors, where attention takes `attention` times as long as in the
    profile, shape (microbatches,), and what does not go with the size as long as there."""
    layers, p, factor = staged.model.layers, problem.passes, np.asarray(staged.profile.microbatch_factors)
    slow = np.asarray(staged.profile.rank_factors or (1.0,) * problem.ranks)
    duration = p.duration.astype(np.float64)
    for kind, names in UNLIKE.items():
        counts = problem.recomputed or staged.counts if kind == "X" else staged.counts
        runs = [here[:count] for here, count in zip(layer_ranges(staged.counts), counts, strict=True)]
        rows = problem.rows(kind)
        for name, times in zip(names, (attention, np.ones(len(factor))), strict=True):
            part = np.array([sum(getattr(layers[i], name, 0.0) for i in run) for run in runs])
            duration[rows] += (part[p.stage[rows]] * slow[p.rank[rows]]) * (times - factor)[p.microbatch[rows]]
    return replace(problem, passes=replace(p, duration=np.maximum(0, np.rint(duration)).astype(np.int64)))


def _choices(step: Any) -> list[Named]:
    """The orders of microbatches that are tried first, by name: as they are given, and some by length."""
    each = _unlike(step)
    order = np.argsort(each, kind="stable")
    up, down = order.tolist(), order[::-1].tolist()
    hill, valley = [*up[::2], *up[1::2][::-1]], [*down[::2], *down[1::2][::-1]]
    found = {GIVEN: list(range(len(up))), **dict(zip(SHAPES, (up, down, hill, valley), strict=True))}
    steps = {tuple(each[i] for i in numbers): (name, numbers) for name, numbers in reversed(found.items())}
    return [(f" order={name}", in_order(step, numbers)) for name, numbers in reversed(steps.values())]


def _moves(now: Now) -> Iterator[Named]:
    """Steps where one microbatch comes at another one's place, the longest first; and their names."""
    each = _unlike(now.step)
    numbers, seen = list(range(len(each))), {tuple(each)}
    for i in np.argsort(-np.asarray(each), kind="stable").tolist():
        rest = [number for number in numbers if number != i]
        for place in numbers:
            one = in_order(now.step, [*rest[:place], i, *rest[place:]])
            if (moved := tuple(_unlike(one))) not in seen:
                seen.add(moved)
                yield f" order={','.join(f'{length:g}' for length in moved)}", one


def in_order(step: Any, numbers: Sequence[int]) -> Any:
    """The step whose microbatch i is number `numbers[i]` of this one's."""
    each = _unlike(step)
    kind = Multiples if isinstance(each, Multiples) else tuple
    return replace(step, **{"lengths" if step.lengths else "sizes": kind(each[i] for i in numbers)}, order=GIVEN)


# --- Packing ---


SWAPS, NEAR = 500, 1e-3  # exchanges at most; a fullest microbatch that is so near its bound is good enough


@dataclass(frozen=True)
class Packing:
    """Sequences in microbatches. microbatches: numbers of each one's sequences, that of the most work first; works: their
    work; bound: the fullest microbatch of any packing has at least so much. Work is in tokens without attention."""

    microbatches: tuple[tuple[int, ...], ...]
    works: tuple[float, ...]
    bound: float

    @property
    def gap(self) -> float:
        """The share of its work that the fullest microbatch could be spared at most."""
        return 1 - self.bound / self.works[0]


def pack(lengths: Sequence[float], microbatches: int, attention: float = 0.0) -> Packing:
    """Sequences of a batch in so many microbatches of even work.

    lengths: tokens of each sequence.
    microbatches: how many; each gets one sequence at least.
    attention: what a token's attention takes for each token of its sequence, over what else a token takes: a sequence of l
        tokens is l · (1 + attention · l) of work.

    Longest work first (at most 4/3 of the least possible: Graham, 1969), then the fullest microbatch exchanges sequences
    with others while that helps. Raises BadInput.
    """
    length = np.asarray(lengths, np.float64)
    wrong = np.flatnonzero(~((length > 0) & (length < inf)))
    if len(wrong):
        raise BadInput(f"lengths: length {wrong[0]} is {length[wrong[0]]:g}: above 0 is needed")
    if not 1 <= microbatches <= len(length) or not 0 <= attention < inf:
        raise BadInput(f"pack: {len(length)} sequences in {microbatches} microbatches, attention {attention}")
    work = length * (1 + attention * length)
    down = np.argsort(-work, kind="stable")
    ranked, most = work[down], (len(work) - 1) // microbatches
    # Of the k · microbatches + 1 longest, k + 1 are together somewhere.
    together = (ranked[k * microbatches - k : k * microbatches + 1].sum() for k in range(1, most + 1))
    bound = float(max(ranked[0], work.sum() / microbatches, *together, 0.0))
    where, rooms = np.zeros(len(work), np.int64), [(0.0, number) for number in range(microbatches)]
    for i in down.tolist():
        load, where[i] = rooms[0]
        heapreplace(rooms, (load + work[i], int(where[i])))
    loads = _evened(work, where, bound * (1 + NEAR))
    order = np.argsort(-loads, kind="stable").tolist()
    return Packing(
        tuple(tuple(np.flatnonzero(where == number).tolist()) for number in order),
        tuple(loads[order].tolist()),
        min(bound, float(loads.max())),
    )


def _evened(work: Floats, where: Ints, enough: float) -> Floats:
    """Let the fullest microbatch hand over a sequence, or exchange it, where both get less full than it was. where: the
    microbatch of each sequence, changed here. Returns the work of each."""
    count = int(where.max()) + 1
    loads = np.asarray(np.bincount(where, work, count), np.float64)
    each = np.append(work, np.zeros(count))  # nothing, of each, is exchanged too
    for _ in range(SWAPS):
        top = int(loads.argmax())
        if loads[top] <= enough:
            break
        home = np.append(where, np.arange(count))
        mine, theirs = np.flatnonzero(where == top), np.flatnonzero(home != top)
        less = each[mine][:, None] - each[theirs]
        fuller = np.maximum(loads[top] - less, loads[home[theirs]] + less)
        given, taken = divmod(int(fuller.argmin()), len(theirs))
        if fuller[given, taken] >= loads[top] * (1 - 1e-12):
            break
        other = int(home[theirs[taken]])
        where[mine[given]] = other
        if theirs[taken] < len(work):
            where[theirs[taken]] = top
        loads[[top, other]] += np.array([-1, 1]) * less[given, taken]
    return loads


LENGTHS = Feature(
    "lengths",
    (
        Field(
            "lengths",
            (),
            "tokens of each microbatch: 512,1024,768, multiples of the profile's sequence such as 0.5x,1x, or a file with "
            "one a line (default: all as profiled)",
            "LENGTHS",
            read=_read,
            fixed="microbatches take",
        ),
        Field(
            "order",
            GIVEN,
            "of microbatches with --lengths: as given, or free: which comes first is for the search to decide "
            "(default: given)",
            choices=(GIVEN, FREE),
            read=lambda said: AUTO if said == FREE else said,
            closed=GIVEN,
            fixed="comes first",
        ),
    ),
    _check,
    _build,
    _model,
    Choices(("order",), _choices, apart=False),
    (Moves("orders", ("order",), _moves),),
)
