"""Schedules of all kinds, with the programs that ranks on GPUs run, for what they wait for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from zbsolve import Problem, Schedule, ZbsolveError, pipeline, preset, updates
from zbsolve.build import (
    Host,
    Vocabulary,
    with_exchange,
    with_links,
    with_offload,
    with_sharding,
    with_slices,
    with_vocabulary,
)
from zbsolve.problem.placement import mirror
from zbsolve.systems import problem_for
from zbsolve.systems.table import SYSTEMS

PLACEMENTS: tuple[tuple[int, ...], ...] = (
    *((0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0)),
    *((0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 2, 1, 3, 0, 1), (1, 0, 0, 2, 1), (0, 0, 1)),
)


def systems(ranks: tuple[int, ...], times: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[str, Schedule]]:
    """Every system of the table by name, on so many ranks, with one to three times as many microbatches, where it allows
    them; messages take time or none."""
    for system, p, factor, each, comm in product(SYSTEMS, ranks, (1, 2, 3), times, (0, 2)):
        more = {"exchange": 1} if system.placement == "mirror" and comm else {}
        try:
            yield system.name, preset(system.name, problem_for(system.name, p, factor * p, *each, comm=comm, **more))
        except ZbsolveError:  # it does not allow these numbers
            continue


def step(rng: random.Random, low: int = 1, **more: Any) -> Problem:
    """A random step on two to four ranks, of `low` µs a pass at least."""
    placement = more.pop("placement", None) or rng.choice(PLACEMENTS)
    stages = len(placement) if isinstance(placement[0], int) else len(placement[0])

    def some(least: int) -> list[int]:
        return [rng.randint(least, rng.choice((1, 3, 20))) for _ in range(stages)]

    backward = {"BW": some(low)} if more.pop("fused", rng.random() < 0.5) else {"B": some(low), "W": some(0)}
    m = more.pop("microbatches", None) or rng.randint(1, 5)
    return pipeline(some(low), placement=placement, microbatches=m, comm=rng.choice((0, 0, 3, 20)), **backward, **more)


def sharded_vocabulary(rng: random.Random) -> Problem:
    """One or two barriers, with the embedding or without."""
    one = step(rng)

    def some(low: int, high: int) -> list[int]:
        return [rng.randint(low, high) for _ in range(one.ranks)]

    more = {"lookup": rng.choice([None, 1]), "barriers": rng.choice([1, 2]), "statistics": some(0, 2)}
    return with_vocabulary(one, Vocabulary(some(1, 9), some(0, 9), broadcast=some(0, 4), reduce=some(0, 9), **more))


def two_directions(rng: random.Random, **more: Any) -> Problem:
    """Microbatches go down the ranks and up."""
    return step(rng, placement=mirror(rng.choice((2, 4))), microbatches=2 * rng.randint(1, 3), **more)


def offloaded(rng: random.Random) -> Problem:
    """Copies on streams of each rank, or over a bus that ranks share."""
    host = Host(shared_bus=1) if rng.random() < 0.3 else Host()
    return with_offload(step(rng, fused=True, held_until_W=2), rng.randint(1, 9), rng.randint(1, 9), host=host)


KINDS: dict[str, Callable[[random.Random], Problem]] = {
    "plain": step,
    "passes without time": lambda rng: step(rng, low=0),
    "recompute": lambda rng: step(rng, recompute="all"),
    "updates": lambda rng: updates(step(rng, microbatches=4), 1, every=2, delay=rng.choice((1, 2))),
    "all-to-all": lambda rng: step(rng, AF=rng.randint(0, 9), AB=rng.randint(0, 9)),
    "links": lambda rng: with_links(step(rng), rng.choice(("rank", "pair")), rng.randint(0, 9)),
    "offload": offloaded,
    "sharding": lambda rng: with_sharding(
        step(rng), gather=rng.randint(0, 9), reduce=rng.randint(0, 9), parameter_bytes=3, gradient_bytes=2, gathers=1
    ),
    "sums over replicas": lambda rng: with_exchange(step(rng), rng.randint(0, 9), replicas=True),
    "two directions": two_directions,
    "sums over ranks": lambda rng: two_directions(rng, exchange=rng.randint(0, 9)),
    "vocabulary": sharded_vocabulary,
    "slices": lambda rng: with_slices(step(rng, placement=rng.choice(PLACEMENTS[:6]), microbatches=6), rng.choice((2, 3))),
}


def random_problem(kind: str, seed: int) -> Problem:
    """One of these kinds of steps."""
    return KINDS[kind](random.Random(f"{kind} {seed}"))
