"""Messages that share a link: hand numbers, exhaustive optima, what a profile says, what runs."""

from __future__ import annotations

import random

import pytest

from zbsolve import BadInput, Problem, pipeline, solve, verify
from zbsolve.build import with_cards, with_exchange, with_links, with_sharding, without_links

from ..support.stream_checks import bounds_hold, cp_is_exact, solve_is_exact


def random_links(seed: int) -> Problem:
    """Two or three ranks, one to three microbatches, links of all kinds, some with memory and with sums or gathers."""
    rng = random.Random(seed)
    placement = rng.choice([(0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0, 2, 1)])
    ranks, stages = max(placement) + 1, len(placement)
    fused = rng.random() < 0.4
    m = rng.randint(1, {2: 3, 3: 2, 4: 1 + fused}[stages])  # larger ones have too many orders
    times = [[rng.randint(1, 6) for _ in placement] for _ in range(3)]
    backward = {"BW": times[1]} if fused else {"B": times[1], "W": times[2]}
    room = {} if rng.random() < 0.5 else {"capacity": [rng.choice([4, 6])] * ranks, "held_until_B": 1, "held_until_W": 1}
    comm = [rng.randint(0, 9) for _ in placement[1:]]
    problem = pipeline(times[0], **backward, placement=placement, microbatches=m, comm=comm, **room)
    beside = rng.choice(["", "", "sums", "gathers"])
    if beside == "sums":
        problem = with_exchange(problem, [rng.randint(1, 6) for _ in placement], replicas=True)
    if beside == "gathers":
        problem = with_sharding(problem, rng.randint(1, 4), rng.randint(1, 4))
    shared = rng.choice(["rank", "rank", "pair", "1+1" if ranks == 2 else rng.choice(["1+2", "2+1"])])
    problem = with_links(problem, shared, rng.randint(0, 3))
    return with_cards(problem) if shared == "rank" and rng.random() < 0.7 else problem
