"""What each family of layouts lost by: those with one value of one field, whatever their other fields are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .layout import FIELDS, named
from .solved_space import SolvedSpace


class Family(NamedTuple):
    """field: of `FIELDS`; value: as a person reads it. lost: share of the plan's step by which each of its layouts is longer
    at least; below 0 where a bound leaves it in the race, infinite where none has room. A dominated
    layout loses what the one loses that dominates it, at least."""

    field: str
    value: str
    layouts: int
    lost: float


def families(space: SolvedSpace) -> list[Family]:
    """Every family of the space, field by field."""
    layout, by = space.bounds.layout, space.bounds.by
    step = np.where(by >= 0, space.bounds.step[by], space.bounds.step)
    found = []
    for name in FIELDS:
        column = np.asarray(getattr(layout, name))
        for value in np.unique(column).tolist():
            mine = column == value
            lost = float(step[mine].min()) / space.value - 1
            found.append(Family(name, named(name, value), int(mine.sum()), lost))
    return found
