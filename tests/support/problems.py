"""The table of problems that every solver is tried on, and seeded random ones."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from zbsolve import Problem, pipeline
from zbsolve.build import Host, with_exchange, with_offload, with_sharding


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
    "sums over replicas": with_exchange(
        pipeline([2, 3], [3, 2], [1, 2], microbatches=2, comm=1, held_until_B=1, held_until_W=1, capacity=[3, 2]),
        [6, 3],
        replicas=True,
    ),
    "sums over replicas span": with_exchange(
        pipeline([2, 1, 2, 3], BW=[3, 3, 1, 2], placement=(0, 1, 1, 0), microbatches=1, objective="span"),
        [3, 0, 7, 9],
        replicas=True,
    ),
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


def uneven_microbatches(seed: int, ranks: int = 3, most: int = 4) -> Problem:
    """A small problem whose microbatches differ by a factor each, by times, by messages, or by bytes; links of some block
    their sender. At most `most` microbatches."""
    rng = random.Random(seed)
    p, m = rng.randint(1, ranks), rng.randint(2, most)
    placement = rng.choice([tuple(range(p)), (*range(p), *reversed(range(p))), tuple(range(p)) * 2])
    if len(placement) > 4:
        placement = tuple(range(p))
    stages, what = len(placement), rng.choice(["factors", "times", "bytes", "messages", "all", "all"])

    def table(low: int, high: int, *kinds: str) -> list[list[int]]:
        rows = [[rng.randint(low, high)] * m for _ in range(stages)]
        return [[rng.randint(low, high) for _ in row] for row in rows] if what in (*kinds, "all") else rows

    until_b, until_w, from_b = (table(0, high, "bytes") for high in (4, 3, 2))
    need = [0] * p
    for i in range(m):
        for rank in range(p):
            mine = [s for s in range(stages) if placement[s] == rank]
            need[rank] = max(need[rank], sum(until_b[s][i] + until_w[s][i] + from_b[s][i] for s in mine))
    capacity = [int(n * rng.choice([1, 1.3, 1.7, 2.2, 3])) for n in need]
    low = rng.choice([0, 1, 1, 1])
    fused = rng.random() < 0.5
    backward = {"BW": table(low, 9, "times")} if fused else {"B": table(low, 6, "times"), "W": table(0, 5, "times")}
    problem = pipeline(
        table(low, 7, "times"),
        placement=placement,
        microbatches=m,
        comm=rng.choice([0, table(0, 4, "messages")[:-1] or 0]),
        blocking=rng.random() < 0.5,
        held_until_B=until_b,
        held_until_W=until_w,
        held_from_B=from_b,
        capacity=rng.choice([capacity, capacity, capacity, None]),
        objective=rng.choice(["makespan", "makespan", "span"]),
        **backward,
    )
    if what != "factors":
        return problem
    problem = problem.scaled(factors := [rng.choice([0.5, 1, 1, 2, 3]) for _ in range(m)])
    larger = None if problem.capacity is None else tuple(int(one * max(1, *factors)) for one in problem.capacity)
    return replace(problem, capacity=larger)


class _Drawn:
    """Ranks, placement, microbatches and times of the backward of a small random step; `rng` goes on from there."""

    def __init__(self, seed: int, ranks: int, microbatches: int) -> None:
        self.rng = rng = random.Random(seed)
        self.ranks = p = rng.randint(1, ranks)
        shapes = [tuple(range(p)), tuple(range(p)), tuple(range(p)) * 2, (*range(p), *reversed(range(p)))]
        self.placement = rng.choice(shapes)
        self.microbatches = rng.randint(1, microbatches)
        some = self.some
        self.backward = {"BW": some(1, 7)} if rng.random() < 0.3 else {"B": some(1, 5), "W": some(0, 5)}

    def some(self, low: int, high: int) -> list[int]:
        """A number a stage."""
        return [self.rng.randint(low, high) for _ in self.placement]


def random_offloaded(seed: int, ranks: int = 2, microbatches: int = 3, objective: str = "makespan") -> Problem:
    """A random step of which some stages offload; device and host memory are short or not."""
    drawn = _Drawn(seed, ranks, microbatches)
    rng, some, m = drawn.rng, drawn.some, drawn.microbatches
    sizes = {"held_until_B": some(0, 2), "held_until_W": some(1, 3)}
    step = pipeline(some(1, 5), placement=drawn.placement, microbatches=m, objective=objective, **sizes, **drawn.backward)
    fraction = [rng.choice([0, 0.5, 1, 1]) if min(2, size) > 1 else rng.choice([0, 1]) for size in sizes["held_until_W"]]
    one = np.bincount(step.passes.rank, np.where(step.passes.microbatch == 0, step.taken, 0), step.ranks)
    room = tuple(int(need * rng.choice([0.7, 1, 1, 1.2, 1.5, 2])) for need in one)
    whole = int(one.sum())
    host = Host(rng.choice([None, whole // 2, whole, 2 * whole]), rng.choice([None, 1]), rng.choice([0, 0, 1, drawn.ranks]))
    return with_offload(replace(step, capacity=room), some(0, 4), some(0, 4), fraction=fraction, host=host)


def random_sharded(seed: int, ranks: int = 3, microbatches: int = 3, objective: str = "makespan") -> Problem:
    """A random step with sharded parameters, and memory that is short or not. Raises Infeasible at times."""
    drawn = _Drawn(seed, ranks, microbatches)
    rng, some, m = drawn.rng, drawn.some, drawn.microbatches
    step = pipeline(
        some(1, 5),
        placement=drawn.placement,
        microbatches=m,
        comm=rng.choice([0, 0, 2]),
        held_until_B=some(0, 2),
        held_until_W=some(0, 3),
        AF=rng.choice([0, 0, 0, 2]),
        objective=objective,
        **drawn.backward,
    )
    gathers = [rng.randint(1, m) if rng.random() < 0.6 else 1 for _ in drawn.placement]
    sizes = {"parameter_bytes": some(0, 5), "gradient_bytes": some(0, 4), "gathers": gathers}
    whole = with_sharding(step, some(0, 6), some(0, 6), **sizes)
    if rng.random() < 0.15:
        return whole
    one = np.bincount(whole.passes.rank, np.where(whole.passes.microbatch == 0, whole.taken, 0), whole.ranks)
    room = tuple(int(need * rng.choice([0.6, 0.8, 1, 1, 1.2, 1.5, 2])) for need in one)
    return with_sharding(replace(step, capacity=room), some(0, 6), some(0, 6), **sizes)
