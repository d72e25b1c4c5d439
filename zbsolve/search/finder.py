"""The finder: gives the sources of schedules their time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from .sources import AHEAD, FIRST, LAST, TURNS, Arm, Search, arms_of
from .state import State

TURNS_SHARE = 0.7  # of the time: what is left is for neighbourhoods of the best


def search_of(state: State, seed: int, early: bool = True) -> Search:
    """A search that nothing has looked for yet. early: try starting policies at once."""
    return Search(state, seed, partial(_search_small, seed=seed), early)


def quick(search: Search) -> Iterator[None]:
    """A schedule at once; where none holds, one microbatch after the other."""
    for arm in arms_of(FIRST, search):
        yield from arm


def find(search: Search) -> Iterator[None]:
    """Better schedules: those of smaller problems, then those of sources in turn, then what is near the best."""
    state, share = search.state, search.clock.part(TURNS_SHARE)
    if state.enough is None:
        for arm in arms_of(AHEAD, search):
            yield from arm
    yield from _turns(search, share.left)
    if state.schedule is not None and state.enough is None:
        yield from _in_turns(state, list(arms_of(LAST, search)))


def _search_small(state: State, seed: int) -> Iterator[None]:
    """A search for a problem with fewer microbatches, without neighbourhoods: one of them takes as long as all of it."""
    search = search_of(state, seed)
    yield from quick(search)
    yield from _turns(search, state.clock.left)


def _turns(search: Search, seconds: float) -> Iterator[None]:
    """Sources in turn, for so many seconds."""
    search.seconds, arms = seconds, list[Arm]()
    for arm in arms_of(TURNS, search):
        arms.append(arm)
        search.turns = len(arms)
    yield from _in_turns(search.state, arms)


def _in_turns(state: State, arms: list[Arm]) -> Iterator[None]:
    """Arms until all end or nothing is left to gain, always the one that has had the least time so far: none waits for
    another that gains little by little."""
    used = [0.0] * len(arms)
    while arms and not state.done:
        turn, began = int(np.argmin(used)), state.clock.used
        try:
            next(arms[turn])
            used[turn] += state.clock.used - began
        except StopIteration:
            del arms[turn], used[turn]
        yield
