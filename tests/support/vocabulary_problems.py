"""Seeded random steps whose vocabulary is sharded."""

from __future__ import annotations

import random

from zbsolve import Problem, pipeline
from zbsolve.build import Vocabulary, with_vocabulary


def random_vocabulary(seed: int, ranks: int = 2, microbatches: int = 2, objective: str = "makespan") -> Problem:
    """A random step with a sharded vocabulary, one barrier or two, with the embedding or without; memory is short or not."""
    rng = random.Random(seed)
    p, m = rng.randint(1, ranks), rng.randint(1, microbatches)
    placement = rng.choice([tuple(range(p)), tuple(range(p)), (*range(p), *reversed(range(p)))])
    stages = len(placement)

    def some(low: int, high: int, count: int = stages) -> list[int]:
        return [rng.randint(low, high) for _ in range(count)]

    backward = {"BW": some(1, 7)} if rng.random() < 0.5 else {"B": some(1, 5), "W": some(0, 5)}
    held, hidden, shard = some(1, 3), rng.randint(0, 1), some(0, 2, p)
    need = [shard[r] + 4 * hidden + sum(held[s] for s in range(stages) if placement[s] == r) for r in range(p)]
    capacity = [int(one * rng.choice([1, 1, 1.5, 2])) for one in need]
    step = pipeline(
        some(1, 5),
        placement=placement,
        microbatches=m,
        comm=rng.choice([0, 2]),
        held_until_W=held,
        capacity=rng.choice([capacity, capacity, None]),
        objective=objective,
        **backward,
    )
    costs = Vocabulary(
        some(1, 4, p),
        some(0, 4, p),
        broadcast=some(0, 2, p),
        reduce=some(0, 3, p),
        lookup=rng.choice([None, None, 1]),
        held_shard=shard,
        held_hidden=hidden,
        barriers=rng.choice([1, 2]),
        statistics=some(0, 2, p),
    )
    return with_vocabulary(step, costs)
