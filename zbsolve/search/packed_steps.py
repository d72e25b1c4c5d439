"""Batches of sequences of any lengths, packed into microbatches, with a schedule for each class of lengths that comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log, log1p
from typing import Any

import numpy as np

from ..features.cuts import SEQUENCE, tokens_of
from ..features.feature import AUTO
from ..features.lengths import Lengths
from ..features.packing import Packing, pack
from ..profile.profile import Profile
from ..schedule import Schedule
from ..step import Step
from ..timeline import Floats
from ..util.errors import BadInput
from .auto import solve_auto


@dataclass
class PackedSteps:
    """What a data loader asks for each batch: which sequences go into which microbatch, and the schedule of such a step.

    profile, step: as `solve_auto` takes them; the step says no lengths. The profile says how many tokens its sequence has
        (fact `sequence`), and what attention takes.
    grain: by which share batches of one class may differ in their work, and single microbatches from the average. A
        schedule is of the class's work, which is rounded up.
    options: of `solve_auto`, for a class that comes for the first time.
    known: the schedules so far.

    A batch of a class that came before takes some milliseconds. Raises BadInput.
    """

    profile: Profile
    step: Step
    grain: float = 0.25
    options: dict[str, Any] = field(default_factory=lambda: {"effort": 0.5})
    known: dict[Lengths, Schedule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = tokens_of(self.profile.facts.get(SEQUENCE)) or 0
        if not self.tokens:
            raise BadInput(f"profile: facts: '{SEQUENCE}' is missing: how many tokens its sequence has")
        if not self.grain > 0 or self.step.lengths or self.step.sizes:
            raise BadInput(f"packed steps: a grain above 0 (it is {self.grain:g}), and a step without lengths and sizes")
        layers = self.profile.layers
        attention = sum(layer.attention_F + layer.attention_B for layer in layers)
        fixed = sum(layer.fixed_F + (layer.fixed_B + layer.fixed_W if layer.B else layer.fixed_BW) for layer in layers)
        linear = sum(layer.work for layer in layers) - attention - fixed
        self.attention = attention / linear / self.tokens if linear > 0 else 0.0

    def batch(self, lengths: Sequence[float]) -> tuple[Packing, Schedule]:
        """The microbatches of a batch, in the order of the schedule, and that. lengths: tokens of each sequence."""
        packing = pack(lengths, self.step.microbatches, self.attention)
        kind = self._class(packing, np.asarray(lengths, np.float64))
        if kind not in self.known:
            step = replace(self.step, lengths=kind, order=AUTO)
            self.known[kind] = solve_auto(self.profile, step, **self.options)[0]
        schedule = self.known[kind]
        return packing.placed(schedule.problem), schedule

    def _class(self, packing: Packing, lengths: Floats) -> Lengths:
        """As `--lengths` says them. Packing evens out work, so what differs is how much a microbatch has on average, and how
        long sequences are; and of single microbatches what is far from the average, such as one sequence alone."""
        mean = sum(packing.works) / len(packing.works)
        each = self._level(float((lengths**2).sum() / lengths.sum()))
        tokens = self._level(mean) / (1 + self.attention * each)
        shares = (max(self.grain, round(work / mean / self.grain) * self.grain) for work in packing.works)
        return tuple((share * tokens, min(each, share * tokens)) for share in sorted(shares, reverse=True))

    def _level(self, value: float) -> float:
        """The least power of 1 + grain from a value on, in tokens of the profile's sequence."""
        return float(self.tokens * (1 + self.grain) ** ceil(log(value / self.tokens) / log1p(self.grain)))
