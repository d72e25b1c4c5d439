"""The part of a very long step that a picture shows: what comes before its rounds, a round, and what comes behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..problem import Ints
from ..schedule import Schedule
from ..util.text import format_time
from .check import checked_starts, earliest_starts, value_of
from .files import MAX_UNROLLED, check_unrolled
from .repeated import RepeatedSchedule, rank_lanes


def schedule_to_show(long: RepeatedSchedule, where: str) -> Schedule:
    """All passes, where they may be taken one by one; else as few rounds as leave every pass its time in the whole step, but
    for the time of the rounds that are left out. Its source says what is shown, and its certificate is the whole step's.
    Raises BadInput for a schedule that does not hold."""
    if long.passes <= MAX_UNROLLED:
        return long.unrolled()
    start = checked_starts(long)
    part = next(filter(None, (_with_copies(long, copies, start) for copies in range(1, long.round.copies + 1))))
    check_unrolled(part, where)
    shown, whole = part.sample(), long.certificate
    return shown if whole is None else shown.certified(replace(whole, objective=f"the whole step's {whole.objective}"))


def _with_copies(long: RepeatedSchedule, copies: int, start: Ints) -> RepeatedSchedule | None:
    """The order with so few copies of the round; None where a pass then runs at another time than behind all of them."""
    one, round, out = long.one, long.round, long.round.copies - copies
    few = long.few - out * round.every
    begins = (int(round.begin[lanes].sum()) for lanes in rank_lanes(one))
    cuts = (
        slice(first, first + out * round.every * own.size // long.few) for first, own in zip(begins, long.order, strict=True)
    )
    order = tuple(np.delete(own, cut) for own, cut in zip(long.order, cuts, strict=True))
    behind = np.arange(few) >= round.begin[:, None] + copies * round.every
    wanted = np.take_along_axis(start, np.arange(few) + behind * out * round.every, axis=1) - behind * out * round.period
    if (earliest_starts(one, few, order) != wanted).any():
        return None
    whole = format_time(value_of(one, start) + long.further * round.period)
    said = f"part of a step of {long.microbatches:,} microbatches and {whole}: {out + long.further:,} of its "
    said += f"{round.copies + long.further:,} rounds, {format_time(round.period)} each, are left out"
    named = replace(one, source=f"{said}; {one.source}" if one.source else said)
    return RepeatedSchedule(named, few, few, order, round)
