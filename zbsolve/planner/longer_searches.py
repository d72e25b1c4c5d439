"""Longer searches of a plan's best candidates, for the time that looks leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from ..search.task import Task
from .candidate import MIN_REPEATED, Candidate
from .space_race import ROUND, SpaceRace

# How many candidates are searched, time after time, and which share of the time left they get together.
SEARCHES = ((6, 0.3), (3, 0.3), (1, 0.4))
LEAST = 0.1  # of a search: with less, fewer are searched


def search_longer(race: SpaceRace) -> None:
    """More time for candidates whose own bound leaves them in the race: first those that are good and may become best, then
    those that are."""
    total = race.clock.left
    for turn, (keep, share) in enumerate(SEARCHES):
        keep = min(keep, max(1, int(share * total / LEAST)))
        race.candidates.sort(key=lambda one: one.value if turn else one.value + one.bound)
        able = [one for one in race.candidates if one.bound < race.value][:keep]
        if race.clock.left <= 0 or not able:
            return
        turns = ceil(len(able) / race.runner.count)  # so many one after the other
        for answer in race.runner.answers(_searches(race, able, share * total / turns, turn), ROUND):
            if answer.schedule is not None:
                race.keep(replace(answer.task.of, schedule=answer.schedule))


def _searches(race: SpaceRace, able: list[Candidate], amount: float, turn: int) -> Iterator[Task]:
    """A longer search for each of these, from its schedule, with other random numbers than the one before."""
    for one in able:
        if (limit := _spent(race, amount)) is None:
            return
        options = {**limit, "seed": race.seed + turn + 1, "hint": one.schedule}
        yield Task(one, one.schedule.problem, options, one.behind, many=MIN_REPEATED)


def _spent(race: SpaceRace, amount: float) -> dict[str, float] | None:
    """The limit of a search that takes so much of the clock, or what is left of it; None where nothing is."""
    amount = min(amount, race.clock.left)
    if amount <= 0:
        return None
    race.clock.spend(amount)
    return {"effort" if race.clock.counted else "seconds": amount}
