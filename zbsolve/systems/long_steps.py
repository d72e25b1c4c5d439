"""Schedules of the literature for steps of very many microbatches, by lanes alone: no table of the step's passes is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from ..problem import Ints, Problem
from ..util.errors import BadInput
from .one_direction import gis_rows, interleaved_zb_rows, one_f_one_b_rows, zb_h1_rows
from .plain_step import PlainStep, Rows, step_in_lanes
from .vee import zb_v_rows


class LongSystem(NamedTuple):
    """A system whose order repeats by itself. split: whether it is for steps whose B and W are apart. grouped: its rounds
    have as many microbatches as there are ranks, else one."""

    name: str
    rows: Callable[[PlainStep], Rows]
    split: bool
    grouped: bool = False


LONG_SYSTEMS = (
    LongSystem("1f1b", one_f_one_b_rows, split=False),
    LongSystem("gis", gis_rows, split=False, grouped=True),
    LongSystem("zb-h1", zb_h1_rows, split=True),
    LongSystem("interleaved-zb", interleaved_zb_rows, split=True, grouped=True),
    LongSystem("zb-v", zb_v_rows, split=True),
)


def long_systems_of(one: Problem) -> Iterator[LongSystem]:
    """The systems that are defined for a step of which `one` is a microbatch."""
    for system in LONG_SYSTEMS:
        with suppress(BadInput):
            step = step_in_lanes(one, 1, system.name)
            system.rows(step)
            if step.split == system.split:
                yield system


def lane_order(one: Problem, microbatches: int, system: LongSystem) -> tuple[Ints, ...]:
    """The lanes of each rank, rows of `one`, in the order in which it runs them: see `long_steps.RepeatedSchedule`."""
    return tuple(system.rows(step_in_lanes(one, microbatches, system.name)).values())
