"""Microbatches of different sizes: how many sequences of the batch each has. The search can decide that.

A microbatch of s sequences takes a + b · s in each pass; a is the time that does not depend on the size (`fixed_F`, …). It
keeps and sends s times the bytes of one sequence. With small microbatches at both ends, ranks start and finish early; large
ones between them pay a less often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ..problem import Problem
from ..problem.tables import Ints
from ..schedule import Schedule
from ..schedule.timeline import Floats
from ..util.errors import BadInput, Infeasible
from ..util.text import counted
from .cuts import whole_tokens
from .feature import AUTO, Choices, Feature, Field, Moves, Named, Now, Open, is_auto
from .lengths import checked_sum, grown, sequences_of, with_factors

Sizes = tuple[int, ...]  # sequences of each microbatch
ANY, FEW = "any", 3  # FEW: how many shapes are tried for each number of microbatches if the number is open
SMALL = 8  # numbers of microbatches with sizes up to this are tried, too
OTHER = (0.75, 4 / 3)  # factors for the numbers of microbatches that are tried next
PAIRS, ROUNDS = 48, 40  # moves of sequences that are evaluated with the same order; how many are made one after the other


@dataclass(frozen=True)
class Batch(Open):
    """The value of `sizes` where the search decides.

    sequences: of the batch.
    any_number: in any number of microbatches up to the step's; else in exactly that number.
    """

    sequences: int
    any_number: bool = False


def _read(text: str) -> Sizes | str | Batch:
    """Sizes from "2,4,4,2", "2,4,4,2:12" (12 in all), "auto", "auto:12" or "auto:12:any". Raises BadInput."""
    kind, colon, tail = text.partition(":")
    if kind == AUTO:
        batch, behind, any_number = tail.partition(":")
        if colon and (not batch.isdecimal() or (behind and any_number != ANY)):
            raise BadInput(f"sizes '{text[:40]}': {AUTO}, {AUTO}:32 for a batch of 32 sequences, or {AUTO}:32:{ANY}")
        return Batch(int(batch), bool(behind)) if colon else AUTO
    words = [word.strip() for word in kind.split(",")]
    for number, word in enumerate(words):
        if not word.isdecimal():
            raise BadInput(f"sizes: size {number} is '{word[:40]}': a whole number of sequences is needed")
    sizes = tuple(map(int, words))
    checked_sum("sizes", sizes, tail if colon else None)
    return sizes


def _check(step: Any) -> None:
    sizes = step.sizes
    if isinstance(sizes, Batch):
        least = 1 if sizes.any_number else step.microbatches
        if sizes.sequences < least:
            raise BadInput(f"sizes: {sizes.sequences} sequences for {least} microbatches: each gets one at least")
    elif not is_auto(sizes):
        if sizes and len(sizes) != step.microbatches:
            raise BadInput(f"sizes: {len(sizes)} sizes for {step.microbatches} microbatches: one of each is needed")
        for number, size in enumerate(sizes):
            if size < 1:
                raise BadInput(f"sizes: size {number} is {size}: one sequence at least is needed")


def even(sequences: int, microbatches: int) -> Sizes:
    """Equal sizes; the first ones have one sequence more if the number does not divide them."""
    return whole_tokens((1.0,) * microbatches, sequences)


def _closed(step: Any) -> Sizes:
    """The sizes of a step where the search decides them: as even as possible; (): as in the profile."""
    enough = isinstance(step.sizes, Batch) and step.sizes.sequences >= step.microbatches
    return even(step.sizes.sequences, step.microbatches) if enough else ()


def _model(profile: Any, step: Any) -> Any:
    """The profile with microbatches of these sizes."""
    if not step.sizes or is_auto(step.sizes):
        return profile
    each = sequences_of(profile)
    return with_factors(profile, tuple(size / each for size in step.sizes), "sizes")


def _build(problem: Problem, staged: Any) -> Problem:
    """Correct times that do not depend on the size; attention is proportional to it."""
    factors = np.asarray(staged.profile.microbatch_factors)
    if not staged.step.sizes or (factors == 1).all():
        return problem
    return replace(grown(problem, staged, factors), sizes=staged.step.sizes)


# --- What is tried ---


def _shapes(microbatches: int, ranks: int) -> dict[str, Sequence[float]]:
    """Sizes in proportion, by name. All ranks are busy once as many microbatches as ranks have started."""
    growing, end = range(1, microbatches + 1), microbatches - 1
    ramp = [min(count, ranks, (microbatches + 1) // 2) for count in growing]
    return {
        "even": [1] * microbatches,
        "small at both ends": list(map(min, ramp, ramp[::-1])),
        "small first": ramp,
        "half at both ends": [1 if place in (0, end) else 2 for place in range(microbatches)],
        "small last": ramp[::-1],
        "growing": growing,
        "shrinking": growing[::-1],
    }


def _named(step: Any, sizes: Sizes, name: str = "") -> Named:
    """The step with these sizes, and its name."""
    return f" sizes={name or ','.join(map(str, sizes))}", replace(step, microbatches=len(sizes), sizes=sizes)


def _first(step: Any) -> list[Named]:
    """Even sizes, for at most as many microbatches as sequences."""
    if not isinstance(step.sizes, Batch):
        return [(" sizes=even", replace(step, sizes=()))]
    return [_named(step, even(step.sizes.sequences, min(step.microbatches, step.sizes.sequences)), "even")]


def batch_of(asked: Any, profile: Any) -> Batch:
    """The batch of a step where the search decides sizes."""
    return asked.sizes if isinstance(asked.sizes, Batch) else Batch(asked.microbatches * sequences_of(profile))


def numbers_of(asked: Any, profile: Any) -> Sequence[int]:
    """The numbers of microbatches that are allowed."""
    batch = batch_of(asked, profile)
    return range(1 if batch.any_number else asked.microbatches, min(asked.microbatches, batch.sequences) + 1)


def _further(now: Now) -> Iterator[Named]:
    """Sizes by name, for a profile that says how many sequences there are."""
    batch, numbers, ranks = batch_of(now.said, now.profile), numbers_of(now.said, now.profile), now.said.ranks
    # Also the fewest microbatches of at most 1, 2, … sequences each, as memory may limit the size.
    fewest = (-(-batch.sequences // size) for size in range(1, SMALL + 1))
    usual = *(2**k for k in range(20)), *(k * ranks for k in (1, 2, 3, 4, 6, 8)), numbers[-1]
    tried = sorted({*usual, *fewest} & set(numbers))
    seen = {now.step.sizes or even(batch.sequences, now.said.microbatches)}
    for count in tried:
        for name, shape in islice(_shapes(count, ranks).items(), FEW if batch.any_number else None):
            sizes = whole_tokens(shape, batch.sequences)
            if sizes not in seen:
                seen.add(sizes)
                yield _named(now.step, sizes, f"{name} of {count}" if batch.any_number else name)


def _moves(now: Now) -> Iterator[Named]:
    """Steps in which sequences move between microbatches: first the best that repeated moves find with the best step's
    order; then other numbers of microbatches, the nearest first; then single moves, the best by that order first."""
    step, numbers = now.step, numbers_of(now.said, now.profile)
    sizes = step.sizes or even(batch_of(now.said, now.profile).sequences, step.microbatches)
    order = None if now.schedule is None else _same_order(now, sizes)
    if order is not None:
        best = order.descended(sizes)
        if best != sizes:
            yield _named(step, best)
        near = [moved for _, moved in order.near(sizes)]
    else:
        near = [moved for moved, _ in _pairs(sizes)]
    others = {round(share * len(sizes)) for share in OTHER} | {len(sizes) - 1, len(sizes) + 1}
    for count in sorted(others - {len(sizes)}, key=lambda other: -abs(other - len(sizes))):
        if count in numbers:
            at = np.linspace(0, len(sizes) - 1, count)
            near.insert(0, whole_tokens(np.interp(at, np.arange(len(sizes)), sizes).tolist(), sum(sizes)))
    yield from (_named(step, moved) for moved in dict.fromkeys(near))


def _pairs(sizes: Sizes) -> Iterator[tuple[Sizes, tuple[int, int, int]]]:
    """Sizes after one microbatch gives sequences to another, with (count, from, to): one, or half of some difference."""
    for i, have in enumerate(sizes):
        for j, other in enumerate(sizes):
            for count in {1, max(1, (have - other) // 2), max(1, have // 2)} if i != j and have > 1 else ():
                moved = list(sizes)
                moved[i], moved[j] = have - count, other + count
                yield tuple(moved), (count, i, j)


@dataclass(frozen=True)
class _Order:
    """A fixed order of passes while sizes change. more, lag: µs by which each pass and edge grows with each sequence; of:
    the microbatch of each pass, or their number if it has none."""

    schedule: Schedule
    sizes: Sizes
    more: Ints
    lag: Ints
    of: Ints

    def value(self, sizes: Sizes) -> float:
        """An estimate of the step's µs with other sizes."""
        return float(self._timed(sizes).timeline().value)

    def _timed(self, sizes: Sizes) -> Schedule:
        problem, change = self.schedule.problem, np.append(np.subtract(sizes, self.sizes), 0)
        p, e = problem.passes, problem.edges
        duration = np.maximum(0, p.duration + self.more * change[self.of])
        lag = np.maximum(0, e.lag + self.lag * change[self.of[e.before]])
        changed = replace(problem, passes=replace(p, duration=duration), edges=replace(e, lag=lag), capacity=None)
        return replace(self.schedule, problem=changed, certificate=None)

    def near(self, sizes: Sizes) -> list[tuple[float, Sizes]]:
        """(time of the step, sizes) after single moves, the shortest first: those that take most from the longest path."""
        timed = self._timed(sizes)
        index = timed.problem.index
        path = np.array([index[name] for name in timed.critical_path()])
        weight = np.bincount(self.of[path], self.more[path], len(sizes) + 1)
        pairs = sorted(_pairs(sizes), key=lambda pair: pair[1][0] * (weight[pair[1][2]] - weight[pair[1][1]]))
        return sorted((self.value(moved), moved) for moved, _ in islice(pairs, PAIRS))

    def descended(self, sizes: Sizes) -> Sizes:
        """Sizes that no single move improves with this order."""
        best = self.value(sizes)
        for _ in range(ROUNDS):
            near = self.near(sizes)
            if not near or near[0][0] >= best:
                break
            best, sizes = near[0]
        return sizes


def _same_order(now: Now, sizes: Sizes) -> _Order | None:
    """The order of a schedule; None where a step with larger microbatches has other passes or edges."""
    free = replace(
        now.step, memory=None, sizes=tuple(size + 1 for size in sizes), partition=now.layers or now.step.partition
    )
    problem = now.schedule.problem
    try:
        larger = free.problem(replace(now.profile, capacity=None))
    except (BadInput, Infeasible):
        return None
    if not larger.passes.named_as(problem.passes) or len(larger.edges) != len(problem.edges):
        return None
    p, e = problem.passes, problem.edges
    of = np.where(problem.in_microbatch, p.microbatch, len(sizes))
    return _Order(now.schedule, sizes, larger.passes.duration - p.duration, larger.edges.lag - e.lag, of)


def of_sizes(profiles: Sequence[Any], names: Sequence[str]) -> Any:
    """One profile from several of the same model with different numbers of sequences in a microbatch. It is that of the
    fewest sequences, with each pass on a line through all times; `fixed_F`, … are the line's values at no sequences.

    Lines are least-squares fits without negative parts. Fact `sizes` has the sizes, `off_line` the largest relative distance
    of a pass of at least 1 µs from its line. Bytes are scaled from the fewest sequences. names: for errors. Raises BadInput.
    """
    order = sorted(range(len(profiles)), key=lambda i: sequences_of(profiles[i]))
    sizes = np.array([sequences_of(profiles[i]) for i in order], np.float64)
    base = profiles[order[0]]
    for i, size, before in zip(order[1:], sizes[1:], sizes, strict=False):
        if size == before:
            raise BadInput(f"{names[i]}: facts: a microbatch of {size:g} sequences, as in another profile")
        if [row.name for row in profiles[i].layers] != [row.name for row in base.layers]:
            raise BadInput(f"{names[i]}: layers: their names are not those of {names[order[0]]}")
    layers, off = [], [0.0]
    for number, layer in enumerate(base.layers):
        lines = dict[str, float]()
        for kind in ("F", "B", "W", "BW"):
            times = np.array([getattr(profiles[i].layers[number], kind) for i in order])
            fixed, each = _line(sizes, times)
            lines |= {kind: fixed + each * sizes[0], f"fixed_{kind}": fixed}
            some = times >= 1
            off += (np.abs(fixed + each * sizes - times)[some] / times[some]).tolist()
        layers.append(replace(layer, **lines))
    facts = {**base.facts, "sizes": sizes.astype(int).tolist(), "off_line": float(max(off))}
    return replace(base, layers=tuple(layers), facts=facts)


def _line(sizes: Floats, times: Floats) -> tuple[float, float]:
    """Least-squares fit: the time without sequences and the time of each one, both at least 0."""
    apart = sizes - sizes.mean()
    each = max(0.0, float(apart @ times / (apart @ apart)))
    fixed = float(times.mean() - each * sizes.mean())
    return (fixed, each) if fixed >= 0 else (0.0, float(sizes @ times / (sizes @ sizes)))


SIZES = Feature(
    "sizes",
    (
        Field(
            "sizes",
            (),
            "sequences of each microbatch: 2,4,4,2, or 2,4,4,2:12, which are 12 together; auto: the search decides, with "
            "as many together as profiled; auto:32: of 32; auto:32:any: in --microbatches or fewer (default: as profiled)",
            "SIZES",
            read=_read,
            closed=_closed,
            told=lambda problem: problem.sizes or None,
            fixed="microbatches take",
        ),
    ),
    _check,
    _build,
    _model,
    Choices(("sizes",), _first, _further),
    (Moves("sizes", ("sizes",), _moves),),
    lines=lambda problem: [f"sequences of the microbatches: {counted(problem.sizes)}"] * bool(problem.sizes),
)
