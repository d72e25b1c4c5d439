"""Seeded random steps whose microbatches are cut into slices."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from zbsolve import Problem, Schedule, pipeline, preset
from zbsolve.build import AttentionExchange, Vocabulary, with_offload, with_recompute, with_slices, with_vocabulary
from zbsolve.systems import problem_for


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


def paper_order(seed: int, passes: int = 1200) -> tuple[str, Schedule]:
    """A paper's order (see `systems.slices`) of a random step of so many passes at most, and a line that says which: times
    of slices with more and more attention, or all alike; keys and gradients or none; with SlimPipe's exchange or without.
    The step's capacity is what the order takes, of each rank or of the fullest."""
    rng = random.Random(seed)
    name = rng.choice(["seq1f1b", "seq1f1b-i", "seq1f1b-zb", "slimpipe", "slimpipe", "terapipe"])
    p, m, n = rng.randint(2, 8), rng.randint(1, 6), rng.randint(2, 32)
    stages = p * (2 if name == "seq1f1b-i" else 1)
    kinds = 3 if name == "seq1f1b-zb" else 2
    m = max(1, min(m, passes // (stages * kinds * n)))
    n = max(2, min(n, passes // (stages * kinds * m)))
    attention, each = rng.choice([0, 0, 5, 40]), rng.randint(20, 400)

    def times(factor: float, rises: float = 1) -> list[list[int]]:
        row = [round(factor * each + rises * factor * attention * j) for j in range(n)]
        return [row] * stages

    backward, weights = rng.uniform(0.7, 2.0), rng.uniform(0.3, 1.0)
    keys = rng.choice([0, rng.randint(1, 5)])
    how: dict[str, Any] = {
        "comm": rng.choice([0, each // 10]),
        "slices": n,
        "held_keys": keys,
        "held_gradients": rng.choice([0, keys]),
    }
    how |= {"held_until_B": rng.randint(0, 6), "held_until_W": rng.randint(1, 9)}
    if name == "slimpipe" and attention and rng.random() < 0.5:
        per_slice = {"forward": attention, "backward": round(attention * backward), "query_bytes": rng.randint(0, 2)}
        how |= {"attention_exchange": AttentionExchange(**per_slice), "layers": (1,) * stages}
    problem = problem_for(name, p, m, times(1), times(backward), times(weights, 0), **how)
    taken = preset(name, problem).timeline().peak_bytes
    capacity = rng.choice([taken, (max(taken),) * p])
    exchanged = ", exchange" if "attention_exchange" in how else ""
    return f"{seed}: {name} p={p} m={m} n={n}{exchanged}", preset(name, replace(problem, capacity=capacity))
