"""Batches of sequences of different lengths: packed into microbatches, with one schedule for each class of batches."""

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
from ..profile.step import Step
from ..schedule import Schedule
from ..schedule.timeline import Floats
from ..util.errors import BadInput
from .auto import solve_auto


@dataclass
class PackedSteps:
    """For a data loader: which sequences of a batch go into which microbatch, and a schedule for that step.

    profile, step: as in `solve_auto`; the step has no lengths. The profile has the tokens of its sequence (fact `sequence`)
        and the times of attention.
    grain: the relative difference of work within a class of batches, and of single microbatches from the average. The
        schedule is made for the work of the class, which is rounded up.
    options: of `solve_auto`, for the first batch of a class.
    known: the schedules so far, by class.

    A batch of a known class takes some milliseconds. Raises BadInput.
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
        """The microbatches of a batch, in the order of its schedule, and the schedule. lengths: tokens of each sequence."""
        packing = pack(lengths, self.step.microbatches, self.attention)
        kind = self._class(packing, np.asarray(lengths, np.float64))
        if kind not in self.known:
            step = replace(self.step, lengths=kind, order=AUTO)
            self.known[kind] = solve_auto(self.profile, step, **self.options)[0]
        schedule = self.known[kind]
        return packing.placed(schedule.problem), schedule

    def _class(self, packing: Packing, lengths: Floats) -> Lengths:
        """The class of a batch, as lengths of microbatches (see `--lengths`). Packing evens out the work, so a class is the
        mean work and the mean length of sequences, both rounded; and the microbatches that are far from the mean work."""
        mean = sum(packing.works) / len(packing.works)
        each = self._level(float((lengths**2).sum() / lengths.sum()))
        tokens = self._level(mean) / (1 + self.attention * each)
        shares = (max(self.grain, round(work / mean / self.grain) * self.grain) for work in packing.works)
        return tuple((share * tokens, min(each, share * tokens)) for share in sorted(shares, reverse=True))

    def _level(self, value: float) -> float:
        """`value`, tokens, rounded up to the profile's sequence times a power of 1 + grain."""
        return float(self.tokens * (1 + self.grain) ** ceil(log(value / self.tokens) / log1p(self.grain)))
