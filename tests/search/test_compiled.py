"""Kernels are compiled before a search's time begins, never within it."""

import sys

import pytest
from numba.core.dispatcher import Dispatcher

from zbsolve import Problem, pipeline, plan, solve
from zbsolve.build import with_offload, with_sharding
from zbsolve.planner import CLUSTERS, Shape, planning
from zbsolve.search.solver import compiled

TIMES = {"F": [30, 41, 33, 52], "B": [43, 47, 53, 31], "W": [22, 21, 17, 25]}


def kernels() -> dict[str, int]:
    """How many signatures each compiled function has that Python calls or that is compiled anew; none: not called yet."""
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("zbsolve")]
    found = [k for module in modules for k in module.values() if isinstance(k, Dispatcher)]
    return {f"{kernel.__module__}.{kernel.__name__}": len(kernel.signatures) for kernel in found}


@pytest.mark.parametrize(
    ("placement", "microbatches", "capacity", "objective"),
    [
        ((0, 1, 2, 3), 24, 3, "span"),
        ((0, 1, 0, 1), 7, 5, "makespan"),
        ((0, 1, 1, 0), 9, 4, "makespan"),
        ((0, 1, 1, 0), 16, 4, "span"),
        ((0, 1, 2, 3), 5, None, "makespan"),
    ],
)
@pytest.mark.slow
def test_no_search_compiles_anything(placement, microbatches, capacity, objective):
    problem = pipeline(
        **TIMES,
        comm=3,
        placement=placement,
        microbatches=microbatches,
        held_until_W=1,
        capacity=None if capacity is None else [capacity] * (max(placement) + 1),
        objective=objective,
    )
    assert anew(problem) == {}


@pytest.mark.slow
def test_nor_where_copies_or_gathers_take_memory():
    plain = pipeline(**TIMES, comm=3, microbatches=12, held_until_W=1, capacity=[6] * 4)
    assert anew(with_offload(plain, [9] * 4, [9] * 4)) == {}
    assert anew(with_sharding(plain, [9] * 4, [9] * 4, parameter_bytes=1, gathers=2)) == {}


def anew(problem: Problem) -> dict[str, int]:
    """Kernels that a search compiled, or loaded, within its time."""
    compiled()
    assert any(kernels().values())
    before = kernels()
    solve(problem, effort=0.5)
    now = kernels()
    return {name: now[name] for name in now if now[name] != before.get(name)}


def test_no_plan_compiles_bounds_within_its_time():
    planning.compiled()
    before = {name: count for name, count in kernels().items() if "planner" in name}
    assert any(before.values())
    plan(Shape.gpt(1024, 8, 6, vocabulary=8192), 4, 8, CLUSTERS["h100"], effort=0.1)
    assert {name: count for name, count in kernels().items() if "planner" in name} == before
