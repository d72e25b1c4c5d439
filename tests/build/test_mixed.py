"""Steps of microbatches of several kinds: against steps whose rows of numbers are written out, and against factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, Infeasible, Problem, Profile, pipeline
from zbsolve.build import mixed, with_offload, with_recompute, with_updates
from zbsolve.partition.layer import Layer, Link
from zbsolve.problem import MessageRoom

SHORT: dict[str, Any] = {"F": [10, 12], "B": [11, 13], "W": [8, 9], "held_until_B": [3, 4], "held_until_W": [1, 2]}
LONG: dict[str, Any] = {"F": [20, 31], "B": [23, 25], "W": [9, 18], "held_until_B": [7, 6], "held_until_W": [1, 5]}
KINDS = [0, 1, 1, 0]


def step(kind: dict[str, Any], comm: Any, **more: Any) -> Problem:
    return pipeline(**{"microbatches": 4, **kind, "comm": comm, **more})


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    "build",
    [
        lambda one: one,
        lambda one: with_recompute(one, "0", held_input=2),
        lambda one: with_updates(one, 3, every=2, delay=2),
    ],
)
def test_microbatches_have_the_numbers_of_their_kind(build: Callable[[Problem], Problem], blocking: bool) -> None:
    """The same step with a row of numbers a stage, one a microbatch."""
    pairs = {name: zip(SHORT[name], LONG[name], strict=True) for name in SHORT}
    rows = {name: [[pair[kind] for kind in KINDS] for pair in each] for name, each in pairs.items()}
    short, long = (build(step(one, comm, blocking=blocking)) for one, comm in ((SHORT, 2), (LONG, 5)))
    assert mixed([short, long], KINDS) == build(step(rows, [[2, 5, 5, 2]], blocking=blocking))
    assert mixed([short, long], [1] * 4) == long


def test_kinds_that_differ_by_a_factor_are_scaled() -> None:
    problem = with_offload(step(SHORT, 2), 6, 8, fraction=0.5)
    assert mixed([problem, problem.scaled([3] * 4)], KINDS) == problem.scaled([1, 3, 3, 1])


def test_ranks_have_the_least_memory_and_what_is_of_the_step_takes_the_most() -> None:
    short, long = (replace(step(one, 2), capacity=limit) for one, limit in ((SHORT, (30, 20)), (LONG, (25, 40))))
    assert mixed([short, long], KINDS).capacity == (25, 20)
    assert mixed([replace(short, capacity=None), long], KINDS).capacity == (25, 40)
    rooms = [replace(one, messages=MessageRoom((size,), (size, 9))) for one, size in ((short, 4), (long, 6))]
    assert mixed(rooms, KINDS).messages == MessageRoom((6,), (6, 9))
    late, early = with_updates(short, 3, every=4, delay=1), with_updates(long, 5, every=4, delay=1)
    both = mixed([late, early], KINDS)
    assert set(both.passes.duration[both.rows("U")].tolist()) == {5}
    # A long microbatch holds 7 + 1 bytes on rank 0, of which a short step knows nothing.
    with pytest.raises(Infeasible, match="rank 0 needs 8 bytes for microbatch 1 alone, but has 7 bytes"):
        mixed([replace(short, capacity=(7, 20)), long], KINDS)


def test_kinds_of_a_profile_need_not_be_multiples_of_each_other() -> None:
    """Attention grows with the square of the length, all else with the length. On one rank times add up."""

    def profile(*times: float) -> Profile:
        layers = tuple(
            Layer(f"l{i}", F=t, B=t, W=t, BW=2 * t, held_until_B=8, held_until_W=8, parameter_bytes=0, output_bytes=4)
            for i, t in enumerate(times)
        )
        return Profile("given", "toy", layers, Link(0.0, 1.0), 4.0, None, {}, {})

    problems = [profile(*times).problem(1, 4, layers=[2]) for times in ((10, 10), (20, 40))]
    assert mixed(problems, KINDS).work == 3 * (2 * 20 + 2 * 60)


def test_what_does_not_go_together_is_refused() -> None:
    problem = step(SHORT, 2)
    others = {
        "passes": step(SHORT, 2, microbatches=3),
        "edges": replace(problem, edges=problem.edges.only(np.arange(3))),
        "layers a stage": replace(problem, layers=(1, 2)),
        "objective": replace(problem, objective="span"),
    }
    for what, other in others.items():
        with pytest.raises(BadInput, match=f"problems: number 1 has other {what}"):
            mixed([problem, other], KINDS)
    for kinds in ([0, 1, 0], [0, 1, 2, 0], [0, 1, -1, 0]):
        with pytest.raises(BadInput, match=r"kinds: .* names not one of 2 problems for each of 4 microbatches"):
            mixed([problem, problem], kinds)
