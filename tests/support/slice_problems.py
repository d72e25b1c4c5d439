"""Seeded random steps whose microbatches are cut into slices."""

from __future__ import annotations

import random

from zbsolve import Problem, pipeline
from zbsolve.build import Vocabulary, with_offload, with_recompute, with_slices, with_vocabulary


def random_slices(seed: int, ranks: int = 2, microbatches: int = 2, slices: int = 3, objective: str = "makespan") -> Problem:
    """A random step of slices with times and bytes of their own; some recompute, offload or have a sharded vocabulary, where
    passes stay few. Memory is short or not."""
    rng = random.Random(seed)
    p, m, n = rng.randint(1, ranks), rng.randint(1, microbatches), rng.randint(2, slices)
    placement = rng.choice([tuple(range(p)), tuple(range(p)), (*range(p), *reversed(range(p)))])
    stages = len(placement)

    def some(low: int, high: int) -> list[list[int]]:
        rows = [[rng.randint(low, high) for _ in range(n)] for _ in range(stages)]
        return [row * m for row in rows]

    more = rng.choice(["", "", "X", "O", "S"]) if stages * m * n <= 6 else ""
    fused = more != "" or rng.random() < 0.5
    backward = {"BW": some(1, 7)} if fused else {"B": some(1, 5), "W": some(0, 5)}
    held, keys, gradients = some(1, 3), rng.randint(0, 1), rng.randint(0, 1)
    need = [sum(sum(held[s][:n]) for s in range(stages) if placement[s] == r) for r in range(p)]
    need = [one + (keys + gradients) * n * placement.count(r) for r, one in enumerate(need)]
    capacity = [int(one * rng.choice([1, 1, 1.25, 1.5])) + 2 * (more == "S") for one in need]
    step = pipeline(
        some(1, 5),
        placement=placement,
        microbatches=m * n,
        comm=rng.choice([0, 2]),
        held_until_W=held,
        capacity=rng.choice([capacity, capacity, None]),
        objective=objective,
        **backward,
    )
    if more == "X":
        step = with_recompute(step, [0], held_input=rng.randint(0, 1))
    if more == "O":
        step = with_offload(step, rng.randint(1, 3), rng.randint(1, 3))
    if more == "S":
        step = with_vocabulary(step, Vocabulary(2, 1, broadcast=1, reduce=1, held_hidden=1))
    return with_slices(step, n, held_keys=keys, held_gradients=gradients)
