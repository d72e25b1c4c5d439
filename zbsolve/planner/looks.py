"""Looks: a short search of each layout that may be best, the most promising first, then of layouts near the best.

Greedy schedules say little of a layout. Of 30 layouts of GPT 39.1B on 64 A100s they were 4.7 % longer (median; 10 of them
more than 15 %) than those of a search three times as long as a look, the looks' own 0.1 % (at most 9 %). Fused backwards
gave a better look at 3 of 35, all of which had none below four times its bound with backwards in two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest

import numpy as np

from ..search.task import Task
from .bound_kernels import NEVER
from .candidate import Candidate, retimed, unsolved
from .estimates import estimated_steps, needless_offload
from .layout import VEE, Layout, rows_of
from .space_bounds import raised
from .space_race import SpaceRace

FIRST_LOOKS = 6  # layouts that get a schedule before all bounds are raised
LOOK_EFFORT = 0.1  # of a look
LOOK_SHARE = 0.5  # of the time goes to looks in the estimates' order at most
# Layouts near one of the best have the first of these in common with it, and keep less in another way.
GROUP, KEEPING = ("dp", "tp", "pp", "size"), ("recompute", "vocabulary", "slices", "offload")
NEAR_GROUPS, NEAR_SHARE = 3, 0.4  # share of the time left that goes to further looks at most
POOR = 1.5  # times its bound: a schedule whose layout gets a look with fused backwards too


def look_at_start(race: SpaceRace, start: Sequence[Candidate]) -> None:
    """Candidates of other plans whose layouts are in this race too: as they are ordered there, or solved afresh."""
    rows = []
    for one in start[:FIRST_LOOKS]:
        for row in rows_of(race.bounds.layout, one.layout).tolist():
            if race.bounds.pipeline[row] != NEVER and row not in race.looked_at:
                race.looked_at.add(row)
                rows.append(row)
                if (mine := retimed(one, race.model, race.cluster, race.memory)) is not None:
                    race.keep(mine)
    race.solve(task for row in rows for task in _look(race, row))


def first_looks(race: SpaceRace) -> None:
    """A look at each layout whose bound leaves it in the race, in the estimates' order, for a share of the time. After the
    first ones, bounds are raised wherever they leave a layout in the race."""
    enough = race.clock.left * (1 - LOOK_SHARE)
    for most in (FIRST_LOOKS, len(race.bounds.rule)):
        race.solve(_promising(race, most, enough))
        if race.stop():
            return
        race.bounds = raised(race.bounds, race.memory, race.value)


def further_looks(race: SpaceRace) -> None:
    """Looks at layouts near the best ones, then with fused backwards at those whose schedule is poor, for a share of the
    time: of layouts that keep less, estimates say little; and fused backwards are found where a search of others fails."""
    enough = race.clock.left * (1 - NEAR_SHARE)
    for looks in (_near_looks, _fused_looks):
        race.solve(looks(race, enough))


def _in_race(race: SpaceRace) -> list[int]:
    """Layouts without a look whose bound is below the best step, the most promising first."""
    step = race.bounds.step
    rows = np.argsort(estimated_steps(race.bounds, race.memory), kind="stable").tolist()
    return [row for row in rows if step[row] < race.value and row not in race.looked_at]


def _promising(race: SpaceRace, most: int, enough: float) -> Iterator[Task]:
    """Looks at so many layouts, until no more than `enough` is left on the clock."""
    rows = _in_race(race)
    layout = race.bounds.layout
    plain = [row for row in rows if not layout.vocabulary[row] and not layout.offload[row]][:most]
    return _while_left(race, list(dict.fromkeys([*plain, *rows[:most]] if most == FIRST_LOOKS else rows)), enough)


def _while_left(race: SpaceRace, rows: list[int], enough: float) -> Iterator[Task]:
    """Looks at these layouts, where their bounds are below the best step by then, until no more than `enough` is left."""
    for row in rows:
        if race.candidates and race.clock.left <= enough:
            return
        if race.bounds.step[row] < race.value:
            race.looked_at.add(row)
            yield from _look(race, row)


def _look(race: SpaceRace, row: int, fused: bool = False) -> Iterator[Task]:
    """A short search of the layout with backwards in two, or with fused ones."""
    race.clock.spend(LOOK_EFFORT)
    options = {"effort": LOOK_EFFORT, "seed": race.seed}
    for one in unsolved(race.model, race.bounds.layout.row(row), race.cluster, race.memory):
        if one.step.fused == fused:
            yield one.task(options)


def _near_looks(race: SpaceRace, enough: float) -> Iterator[Task]:
    """Looks at layouts near the best ones."""
    return _while_left(race, near(race), enough)


def near(race: SpaceRace) -> list[int]:
    """Layouts without a look on the ranks of the best ones that may be shorter: of each group in turn, one of each way to
    keep less, a V where it can be one, the least bound first. None of them moves activations to host memory for nothing."""
    layout, step = race.bounds.layout, race.bounds.step
    best = sorted(race.candidates, key=lambda one: one.value)
    groups = islice(dict.fromkeys(_group(one.layout) for one in best), NEAR_GROUPS)
    able = (step < race.value) & ~needless_offload(race.bounds, race.memory)
    found = []
    for group in groups:
        same = np.all([getattr(layout, name) == one for name, one in zip(GROUP, group, strict=True)], axis=0)
        rows = [row for row in np.flatnonzero(able & same).tolist() if row not in race.looked_at]
        first: dict[tuple[int, ...], int] = {}
        for row in sorted(rows, key=lambda row: (layout.placement[row] != VEE, step[row])):
            first.setdefault(tuple(int(getattr(layout, name)[row]) for name in KEEPING), row)
        found.append(sorted(first.values(), key=lambda row: step[row]))
    return [row for turn in zip_longest(*found) for row in turn if row is not None]


def _group(layout: Layout) -> tuple[int, ...]:
    """What layouts near each other have in common."""
    return tuple(int(getattr(layout, name)) for name in GROUP)


def _fused_looks(race: SpaceRace, enough: float) -> Iterator[Task]:
    """Looks with fused backwards at layouts that got no schedule or a poor one, the least bound first."""
    layout, step = race.bounds.layout, race.bounds.step
    good = {one.layout for one in race.candidates if one.value <= POOR * one.bound}
    for row in sorted(race.looked_at, key=lambda row: step[row]):
        if race.candidates and race.clock.left <= enough:
            return
        if step[row] < race.value and layout.row(row) not in good:
            yield from _look(race, row, fused=True)
