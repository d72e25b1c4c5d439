"""Finder and prover beside each other, a thread each, and on more cores further finders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice

from ..util.threads import POLL, run_threads
from .finder import find, search_of
from .prover import prove
from .state import State

SEED_STRIDE = 7919  # between the seeds of two finders
MAX_FINDERS, MAX_PASSES = 30, 1_000_000  # further finders at most; and passes of all of them, for memory


def search_side_by_side(state: State, seed: int, steps: Iterator[None]) -> None:
    """Finder and prover, and on more cores further finders with other seeds, until the gap is closed or time is up. What the
    prover leaves of the time goes to a finder too. steps: those of the first finder."""

    def prove_first() -> None:
        prove(state, seed)
        _find_on(state, next(further))

    def stop() -> None:
        state.clock.stop()
        for end in state.stoppers:
            end()

    further = (find(search_of(state, seed + SEED_STRIDE * k)) for k in count(1))
    more = min(state.contest.all_threads - 2, MAX_FINDERS, MAX_PASSES // len(state.problem.passes))
    jobs: list[Callable[[], None]] = [partial(_find_on, state, steps), prove_first]
    jobs += [partial(_find_on, state, one, place) for place, one in enumerate(islice(further, max(0, more)), 1)]
    try:
        run_threads(jobs, lambda: state.done, stop)
    finally:
        state.progress = None  # a worker in the middle of a kernel may end later


def _find_on(state: State, steps: Iterator[None], place: int = 0) -> None:
    """Take the finder's steps until the search is done. place: among further finders, from 1: while CP-SAT runs on several
    threads, as many of these wait as it has beside the prover's own."""
    for _ in steps:
        while 0 < place < state.exact_threads and not state.done:
            time.sleep(POLL)
        if state.done:
            return
