"""The table of problems that every solver is tried on, and seeded random ones."""

from __future__ import annotations

import random

from zbsolve import Problem, pipeline


def uniform(placement, ranks, microbatches, times=(1, 1, 1), capacity=None, objective="makespan", comm=0) -> Problem:
    """Alike stages; activations are held from F's start to W's end, capacity counts them."""
    stages = ranks if placement == "single" else 2 * ranks
    f, b, w = times
    return pipeline(
        [f] * stages,
        [b] * stages,
        [w] * stages,
        placement=placement,
        microbatches=microbatches,
        comm=comm,
        held_until_W=1,
        capacity=capacity,
        objective=objective,
    )


# name: (problem, its optimum as exhaustive search finds it, see test_solvers)
SMALL: dict[str, Problem] = {
    "single p2 m2": uniform("single", 2, 2),
    "single p2 m3 span": uniform("single", 2, 3, (3, 4, 2), 2, "span", 1),
    "single p3 m2 uneven": pipeline([3, 5, 2], [4, 1, 6], [2, 2, 1], microbatches=2, comm=1, objective="span"),
    "one microbatch": uniform("single", 3, 1, (3, 4, 2), 1),
    "one rank": pipeline([3, 2], [2, 4], [1, 1], placement=(0, 0), microbatches=2, held_until_B=1, capacity=2),
    "fused": pipeline([2, 3], BW=[5, 4], microbatches=3, held_until_W=1, capacity=[2, 1], objective="span"),
    "no W time": pipeline([2, 3], [3, 3], [0, 0], microbatches=3, held_until_B=1, held_until_W=1, capacity=4),
    "long W": pipeline([1, 1], [1, 1], [9, 8], microbatches=3, held_until_B=2, held_until_W=1, capacity=[6, 3]),
    "vee p2 m2": uniform("vee", 2, 2, (3, 4, 2), 2),
    "loop p2 m2 span": uniform("loop", 2, 2, (1, 2, 1), 3, "span", 1),
    "arbitrary": pipeline([2, 1, 3], [1, 2, 2], [1, 1, 1], placement=(0, 1, 0), microbatches=2, comm={(0, 1): 2, (1, 0): 1}),
    "all-to-all": pipeline([3, 2], [2, 4], [2, 1], microbatches=2, AF=2, AB=[1, 3], comm=1, held_until_W=1, capacity=[2, 1]),
    "all-to-all span": pipeline([2, 2], BW=[3, 4], microbatches=2, AF=[3, 0], objective="span"),
    "exchange": pipeline(2, BW=3, placement=((0, 1), (1, 0)), microbatches=2, exchange=4),
    "recompute": pipeline(
        [2, 3],
        [3, 2],
        [1, 2],
        microbatches=2,
        comm=1,
        recompute="all",
        held_input=1,
        held_until_B=3,
        held_until_W=2,
        capacity=6,
    ),
    "recompute on one stage": pipeline(
        [2, 3],
        [3, 2],
        [1, 2],
        microbatches=2,
        recompute=[0],
        X=1,
        held_input=4,
        held_until_B=1,
        held_until_W=2,
        capacity=[6, 3],
    ),
    "recompute fused": pipeline(
        [2, 3], BW=[4, 3], microbatches=3, recompute="all", held_input=1, held_until_B=5, capacity=6, objective="span"
    ),
    "uneven capacity": pipeline(
        [2, 2], [3, 3], [1, 1], microbatches=3, held_until_B=[3, 1], held_until_W=[1, 2], capacity=[5, 6], objective="span"
    ),
}


def random_problem(seed: int, ranks: int = 8, microbatches: int = 24) -> Problem:
    """Uneven stages, odd capacities, any placement: at most `ranks` and `microbatches`."""
    rng = random.Random(seed)
    p = rng.randint(1, ranks)
    placement = rng.choice([tuple(range(p)), tuple(range(p)) * 2, (*range(p), *reversed(range(p))), None])
    if placement is None:
        free = [*range(p), *(rng.randrange(p) for _ in range(rng.randint(0, p)))]
        rng.shuffle(free)
        placement = tuple(free)
    stages = len(placement)
    kind = rng.choice(["even", "uneven", "no W", "long W", "fused"])
    scale = {"even": 1, "uneven": rng.randint(2, 60)}.get(kind, 9)

    def times(low: int = 1) -> list[int]:
        base = rng.randint(low, scale)
        return [base] * stages if kind == "even" else [rng.randint(low, scale) for _ in range(stages)]

    held_b, held_w = [rng.randint(0, 5) for _ in range(stages)], [rng.randint(0, 5) for _ in range(stages)]
    need = [0] * p
    for s, rank in enumerate(placement):
        need[rank] += held_b[s] + held_w[s]
    capacity = [int(n * rng.choice([1, 1, 1.5, 2, 3.3, p])) for n in need]
    backward = {"BW": times()} if kind == "fused" else {"B": times(), "W": [0] * stages if kind == "no W" else times()}
    return pipeline(
        times(),
        placement=placement,
        microbatches=rng.randint(1, microbatches),
        comm=rng.choice([0, rng.randint(0, 9)]),
        held_until_B=held_b,
        held_until_W=held_w,
        capacity=rng.choice([capacity, capacity, None]),
        objective=rng.choice(["makespan", "span"]),
        **backward,
    )
