"""The finder: a schedule at once, then better ones, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from ..greedy.block_search import block_schedules
from ..greedy.list_scheduler import Policy, deepest_first
from ..greedy.policy_annealing import improve_policies, starting_policies
from ..systems.table import presets_of
from .state import BLOCK_SOLVER, LARGE_PASSES, State


def quick(state: State, starts: list[Policy], policies: bool) -> Iterator[None]:
    """A schedule at once; then, where asked for, the best of the starting policies (kept in `starts`); and named ones."""
    state.offer_policy(deepest_first(state.problem), "greedy")
    yield
    if policies:
        yield from _policies(state, starts)
    yield from _named(state)


def _policies(state: State, starts: list[Policy]) -> Iterator[None]:
    problem, clock = state.problem, state.clock
    starts += starting_policies(problem, clock, 0.1 * clock.left)
    for policy in starts[:2]:
        clock.spend(len(problem.passes) * 1e-6)
        state.offer_policy(policy, "greedy")
        yield


def _named(state: State) -> Iterator[None]:
    for name, named in presets_of(state.problem, searched=False):
        if state.done:
            return
        room = state.problem.capacity
        if room is None or all(np.less_equal(named.timeline().peak_bytes, room)):
            state.offer(named, name)
        if state.schedule is not named:
            state.leads.append(named)
        yield


def find(state: State, seed: int, starts: list[Policy]) -> Iterator[None]:
    """Better schedules: annealed policies and building blocks in turn, then neighbourhoods of the best."""
    problem, clock = state.problem, state.clock
    total = clock.left
    annealed = _annealed(state, seed, total, starts)
    # Trying policies takes long on a large problem: blocks need not wait for them.
    sources = [_blocks(state, seed, total), annealed if starts else chain(_policies(state, starts), annealed)]
    while sources and not state.done:
        for source in list(sources):
            try:
                next(source)
            except StopIteration:
                sources.remove(source)
            yield
    # A question about memory has no use for them: near what is just possible CP-SAT counts little of the time that it takes.
    if len(problem.passes) <= LARGE_PASSES and state.schedule is not None and state.enough is None:
        from ..ilp.neighbourhood_search import better_neighbours

        first = state.schedule
        for schedule in better_neighbours(lambda: state.schedule or first, clock, seed, lambda: state.target):
            if schedule is not None:
                state.offer(schedule, "lns")
            yield


def _annealed(state: State, seed: int, total: float, starts: list[Policy]) -> Iterator[None]:
    for policy in improve_policies(state.problem, starts, state.clock, seed, 0.7 * total):
        if policy is not None:
            state.offer_policy(policy, "annealed policy")
        yield


def _blocks(state: State, seed: int, total: float) -> Iterator[None]:
    for schedule in block_schedules(state.problem, state.clock, 0.7 * total, seed, state.target, lambda: state.leads):
        state.offer(schedule, BLOCK_SOLVER)
        yield
