"""Batches of sequences of any lengths, packed into microbatches, with a schedule for each class of lengths that comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..features.cuts import SEQUENCE, tokens_of
from ..features.feature import AUTO
from ..features.packing import Packing, pack
from ..profile.profile import Profile
from ..schedule import Schedule
from ..step import Step
from ..util.errors import BadInput
from .auto import solve_auto

Class = tuple[tuple[float, float], ...]  # of each microbatch, the fullest first: tokens, and of each sequence, rounded


@dataclass
class PackedSteps:
    """What a data loader asks for each batch: which sequences go into which microbatch, and the schedule of such a step.

    profile, step: as `solve_auto` takes them; the step says no lengths. The profile says how many tokens its sequence has
        (fact `sequence`), and what attention takes.
    grain: tokens, in sequences of the profile, that batches of one class may differ by in a microbatch. A schedule is of the
        class's tokens, which are rounded to the nearest.
    options: of `solve_auto`, for a class that comes for the first time.
    known: the schedules so far.

    A batch of a class that came before takes some milliseconds. Raises BadInput.
    """

    profile: Profile
    step: Step
    grain: float = 0.25
    options: dict[str, Any] = field(default_factory=lambda: {"effort": 0.5})
    known: dict[Class, Schedule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = tokens_of(self.profile.facts.get(SEQUENCE)) or 0
        if not self.tokens:
            raise BadInput(f"profile: facts: '{SEQUENCE}' is missing: how many tokens its sequence has")
        if not self.grain > 0 or self.step.lengths or self.step.sizes:
            raise BadInput(f"packed steps: a grain above 0 (it is {self.grain:g}), and a step without lengths and sizes")
        layers = self.profile.layers
        attention = sum(one.attention_F + one.attention_B for one in layers)
        fixed = sum(one.fixed_F + (one.fixed_B + one.fixed_W if one.B else one.fixed_BW) for one in layers)
        rest = sum(one.work for one in layers) - attention - fixed
        self.attention = attention / rest / self.tokens if rest > 0 else 0.0

    def batch(self, lengths: Sequence[float]) -> tuple[Packing, Schedule]:
        """The microbatches of a batch, in the order of the schedule, and that. lengths: tokens of each sequence."""
        packing = pack(lengths, self.step.microbatches, self.attention)
        kind = self._class(packing, np.asarray(lengths, np.float64))
        if kind not in self.known:
            step = replace(self.step, lengths=kind, order=AUTO)
            self.known[kind] = solve_auto(self.profile, step, **self.options)[0]
        schedule = self.known[kind]
        return packing.placed(schedule.problem), schedule

    def _class(self, packing: Packing, lengths: np.ndarray[Any, Any]) -> Class:
        rows, grain = list[tuple[float, float]](), self.grain * self.tokens
        for one in packing.microbatches:
            each = lengths[list(one)]
            tokens = max(1.0, round(each.sum() / grain)) * grain
            rows.append((tokens, min(tokens, max(1.0, round((each**2).sum() / each.sum() / grain)) * grain)))
        return tuple(sorted(rows, reverse=True))
