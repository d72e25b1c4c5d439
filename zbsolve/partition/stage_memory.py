"""Bytes that stages of layers keep and need. Problems and partitions both count memory here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..build.sides import SideInput
from ..problem import MessageRoom
from .cuts import Floats
from .layer import NO_LINK, Layer, Link, Tied, layer_ranges, side_values

MESSAGES = 2  # messages counted at each end of a stage: one received and one sent
Place = int | NDArray[np.int64]  # a cut lies before this layer; several cuts are an array


class Common(NamedTuple):
    """What every rank has beside its stages. S, T: µs of these passes for one microbatch; barriers: how many of both a
    microbatch's backward waits for, 0 where ranks have nothing; parameter_bytes, and frozen_bytes, the part of them not
    trained; transient: the most bytes that S or T takes while it runs, beside what is kept."""

    S: float = 0.0
    T: float = 0.0
    barriers: int = 0
    parameter_bytes: int = 0
    transient: int = 0
    frozen_bytes: int = 0

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that are trained."""
        return self.parameter_bytes - self.frozen_bytes


NONE = Common()


@dataclass(frozen=True)
class StageMemory:
    """The memory of a stage of layers a … b − 1, for any cuts a < b: whole numbers, or arrays of them that broadcast.

    layers: of the whole model; `Layer` has the bytes of each. tied: as in a `Profile`.
    states: bytes of parameters, gradients and optimizer state for each byte of trained parameters; frozen ones count once.
    group: ranks that divide all of these among them. common: what every rank has beside its stages.
    gradients: bytes of a gradient before it is reduced, for each byte of its parameter.
    largest: size of the largest microbatch over that of the layers. It scales what ranks keep free for messages and running
    passes, and the most that one microbatch keeps.
    """

    layers: tuple[Layer, ...]
    states: float = 0.0
    tied: Tied = ()
    group: int = 1
    common: Common = NONE
    gradients: float = 1.0
    largest: float = 1.0

    def _total(self, *names: str) -> Floats:
        """[a]: the sum of these bytes over the layers before a."""
        each = [sum(getattr(layer, name) for name in names) for layer in self.layers]
        return np.concatenate([[0.0], np.cumsum(np.array(each, np.float64))])

    @cached_property
    def _counted_twice(self) -> Floats:
        """[a]: bytes of tensors that two neighbouring layers both count, summed over pairs whose first layer is before a."""
        twice = [0 if b.begins else max(a.output_kept, b.input_unneeded) for a, b in pairwise(self.layers)]
        return np.concatenate([[0.0], np.cumsum(np.array(twice, np.float64)), [0.0]])

    @cached_property
    def _totals(self) -> tuple[Floats, Floats]:
        """[a], twice: bytes that the layers before a keep after F, and after B."""
        return self._total("held_until_B", "held_until_W"), self._total("held_until_W", "held_from_B")

    @cached_property
    def _parameter_totals(self) -> dict[bool, Floats]:
        """Trained (True) or frozen (False) → [a]: bytes of such parameters of the layers before a."""
        return {True: self._total("trained_bytes"), False: self._total("frozen_bytes")}

    @cached_property
    def _buffers(self) -> Floats:
        return self._total("buffer_bytes")

    def after_f(self, a: Place, b: Place) -> Any:
        """Bytes of one microbatch between F and B: summed over layers, but once where two neighbours count one tensor."""
        total, twice = self._totals[0], self._counted_twice
        return np.maximum(0.0, total[b] - total[a] - (twice[np.asarray(b) - 1] - twice[a]))

    def after_b(self, a: Place, b: Place) -> Any:
        """Bytes of one microbatch between B and W."""
        return self._totals[1][b] - self._totals[1][a]

    def kept(self, a: Place, b: Place) -> Any:
        """The most bytes that the largest microbatch keeps."""
        return self.largest * np.maximum(self.after_f(a, b), self.after_b(a, b))

    def held(self, counts: Sequence[int], again: Sequence[int] = ()) -> dict[str, list[int]]:
        """`held_until_B`, `held_until_W` and `held_from_B` of each stage, bytes, as `pipeline` takes them. Within a stage,
        what one layer's B frees is room for what another's B makes. counts: layers of each stage; again: how many of these,
        the first ones, recompute. A tensor between them and the others is made twice, so it counts twice."""
        sizes: dict[str, list[int]] = {"held_until_B": [], "held_until_W": [], "held_from_B": []}
        for here, count in zip(layer_ranges(counts), again or [0] * len(counts), strict=True):
            after_f, after_b = (int(kept(here.start, here.stop)) for kept in (self.after_f, self.after_b))
            if 0 < count < len(here):
                after_f = int(self.after_f(here.start, here.start + count)) + self.kept_beside(here, count)
            sizes["held_until_B"].append(max(0, after_f - after_b))
            sizes["held_until_W"].append(min(after_f, after_b))
            sizes["held_from_B"].append(max(0, after_b - after_f))
        return sizes

    def kept_beside(self, here: range, again: int) -> int:
        """Bytes that F keeps of the layers of a stage that do not recompute: all but its first `again`."""
        return int(self.after_f(here.start + again, here.stop)) if again < len(here) else 0

    def fixed(self, *stages: tuple[Place, Place]) -> Any:
        """Bytes of parameters, gradients and optimizer state on one rank with these stages (a, b), its part where a
        group divides them. Shared parameters count once; what every rank has is added, and buffers, which nobody divides."""
        trained = self._parameters(True, *stages) + self.common.trained_bytes
        frozen = self._parameters(False, *stages) + self.common.frozen_bytes
        buffers = np.sum([self._buffers[b] - self._buffers[a] for a, b in stages], axis=0)
        return (self.states * trained + min(1.0, self.states) * frozen) / self.group + min(1.0, self.states) * buffers

    def gathered(self, *stages: tuple[Place, Place]) -> Any:
        """Bytes of gathered parameters and of unreduced gradients, for all these stages at once; 0 without a group."""
        trained, frozen = (self._parameters(kind, *stages) for kind in (True, False))
        return (1 + self.gradients) * trained + frozen if self.group > 1 else 0 * trained

    def parameters(self, counts: Sequence[int]) -> list[int]:
        """Bytes of the parameters of each stage. counts: layers of each stage."""
        stages = [(here.start, here.stop) for here in layer_ranges(counts)]
        return [int(self._parameters(True, stage) + self._parameters(False, stage)) for stage in stages]

    def trained(self, counts: Sequence[int]) -> list[int]:
        """Bytes of the trained parameters of each stage. counts: layers of each stage."""
        return [int(self._parameters(True, (here.start, here.stop))) for here in layer_ranges(counts)]

    def unreduced(self, counts: Sequence[int]) -> list[int]:
        """Bytes of the gradients of each stage before they are reduced. counts: layers of each stage."""
        return [int(self.gradients * size) for size in self.trained(counts)]

    def own_trained(self, counts: Sequence[int], routes: Sequence[Sequence[int]]) -> list[int]:
        """Bytes of the trained parameters of each stage, without those that an earlier stage of its rank holds too: the rank
        reduces their gradients once, with that earlier stage, whose backwards end last. Over several ranks, the most."""
        ranges = [(here.start, here.stop) for here in layer_ranges(counts)]
        sizes = [0] * len(ranges)
        for stages in _stages_of(routes):
            for n, stage in enumerate(stages):
                before = [ranges[other] for other in stages[:n]]
                there = self._parameters(True, *before) if before else 0
                sizes[stage] = max(sizes[stage], int(self._parameters(True, *before, ranges[stage]) - there))
        return sizes

    def _parameters(self, trained: bool, *stages: tuple[Place, Place]) -> Any:
        total = self._parameter_totals[trained]
        held = np.sum([total[b] - total[a] for a, b in stages], axis=0)
        for size, group in self.tied:
            if any(self.layers[i].frozen_bytes < size for i in group) != trained:
                continue  # of a shared parameter that is not trained all its layers have as many frozen bytes
            before = np.concatenate([[0], np.cumsum(np.isin(np.arange(len(self.layers)), group))])
            here = np.sum([before[b] - before[a] for a, b in stages], axis=0)
            held = held - size * np.maximum(0, here - 1)
        return held

    @cached_property
    def _messages(self) -> Floats:
        """[a]: bytes kept free on each side of a cut before layer a for its messages; 0 before the first layer, before one
        that begins a row, and after the last."""
        pairs = pairwise(self.layers)
        sent = [0 if b.begins else MESSAGES * ceil(self.largest * a.output_bytes) for a, b in pairs]
        return np.array([0, *sent, 0], np.float64)

    def messages(self, a: Place, b: Place) -> Any:
        """Bytes kept free for messages at both ends of a stage, `MESSAGES` at each. Where a rank runs far ahead of the next,
        more of them wait, and the schedule counts them (see `handover`)."""
        return self._messages[a] + self._messages[b]

    @cached_property
    def _transient(self) -> Floats:
        """[a, b]: the most `transient` bytes of layers a … b − 1, or of S and T. Shape (layers + 1, layers + 1)."""
        most = most_within([layer.transient for layer in self.layers])
        return np.ceil(self.largest * np.maximum(most, self.common.transient))

    def transient(self, a: Place, b: Place) -> Any:
        """The most bytes that a pass, also S and T, takes while it runs beside what is kept before or after it."""
        return self._transient[a, b]

    def of_ranks(
        self, counts: Sequence[int], routes: Sequence[Sequence[int]], again: Sequence[int] = ()
    ) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Bytes that each rank needs beside activations, in two parts: parameters with gradients and optimizer state; and
        messages at the ends of its stages together with the most that one pass takes while it runs.

        counts: layers of each stage; routes: stage → rank, each. again: how many layers of each stage, the first ones,
        recompute. While such a layer runs, what it would keep without that is in memory too.
        """
        fixed, moving, ranges = [], [], layer_ranges(counts)
        for stages, messages in zip(_stages_of(routes), self.message_room(counts, routes).reserved, strict=True):
            fixed.append(float(self.fixed(*((ranges[stage].start, ranges[stage].stop) for stage in stages))))
            most = max(self._inside(ranges[stage], again[stage] if again else 0) for stage in stages)
            moving.append(most + messages)
        return tuple(fixed), tuple(moving)

    def message_room(self, counts: Sequence[int], routes: Sequence[Sequence[int]]) -> MessageRoom:
        """Bytes of the messages between stages, and what each rank keeps free for them. counts, routes: as in `of_ranks`."""
        ranges = layer_ranges(counts)
        sizes = tuple(int(self._messages[here.stop]) // MESSAGES for here in ranges[:-1])
        ends = [[(ranges[stage].start, ranges[stage].stop) for stage in stages] for stages in _stages_of(routes)]
        reserved, sides = [sum(int(self.messages(*end)) for end in pairs) for pairs in ends], dict[tuple[int, int], int]()
        for side in side_inputs(self.layers, counts):
            firsts = {(route[side.giver], rank, stages[0]) for route in routes for rank, stages in side.of_ranks(route)}
            away, size = [first for first in firsts if first[0] != first[1]], ceil(self.largest * side.bytes)
            for stage in {first for _, _, first in away}:
                sides[side.giver, stage] = sides.get((side.giver, stage), 0) + size
            for rank in (rank for home, taker, _ in away for rank in (home, taker)):
                reserved[rank] += MESSAGES * size
        return MessageRoom(sizes, tuple(reserved), tuple((*ends, size) for ends, size in sides.items()))

    def _inside(self, here: range, again: int) -> int:
        dropping = (self.layers[i] for i in here[:again])
        inside = max((c.transient + c.held_until_B + c.held_until_W for c in dropping), default=0)
        return max(ceil(self.largest * inside), int(self.transient(here.start, here.stop)))


def side_inputs(layers: Sequence[Layer], counts: Sequence[int], link: Link = NO_LINK) -> tuple[SideInput, ...]:
    """What stages give each other beside the row of layers; sizes with the same giver and takers are added. counts: layers
    of each stage; link: for the times of messages. Raises BadInput where layers do not give what others take."""
    values = side_values([layer.names for layer in layers])
    stage = [s for s, count in enumerate(counts) for _ in range(count)]
    sizes: dict[tuple[int, tuple[int, ...], bool], tuple[int, int]] = {}
    for layer in layers:
        for name, nbytes, gradient, kept in layer.gives:
            giver, takers = values[name]
            ends = stage[giver], tuple(sorted({stage[i] for i in takers})), gradient
            before = sizes.get(ends, (0, 0))
            sizes[ends] = before[0] + nbytes, before[1] + kept
    return tuple(
        SideInput(giver, takers, size, round(link.time(size)), way, kept)
        for (giver, takers, way), (size, kept) in sizes.items()
    )


def most_within(each: Sequence[float] | Floats) -> Floats:
    """[a, b]: the largest value of layers a … b − 1, shape (layers + 1, layers + 1)."""
    most = np.zeros((len(each) + 1, len(each) + 1))
    for a in range(len(each)):
        most[a, a + 1 :] = np.maximum.accumulate(each[a:])
    return most


def _stages_of(routes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The stages on each rank, ascending. routes: stage → rank, each."""
    homes = [set(ranks) for ranks in zip(*routes, strict=True)]
    return [[stage for stage, ranks in enumerate(homes) if rank in ranks] for rank in range(max(routes[0]) + 1)]
