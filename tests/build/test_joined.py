"""Passes that a rank runs as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zbsolve import BadInput, Infeasible, Problem, Schedule, pipeline, solve, verify
from zbsolve.build import with_all_to_all, with_exchange, with_joined, with_offload, with_recompute


def plain(microbatches: int = 3) -> Problem:
    return pipeline(1, 1, 1, placement=(0, 1), microbatches=microbatches, held_until_W=1)


def test_a_group_is_one_pass_that_all_others_wait_for() -> None:
    """Rank 0 by hand: 0F0, 0F1; 0F2 with the backward of 0 in 2 µs instead of 3; rank 1 waits for the whole of it."""
    problem = with_joined(plain(), [("0F2", "0B0", "0W0")], [2])
    assert "0FB2" in problem.names
    assert not {"0F2", "0B0", "0W0"} & set(problem.names)
    row = problem.index["0FB2"]
    assert (problem.passes.duration[row], problem.taken[row], problem.freed[row]) == (2, 1, 1)
    order = {
        "compute:0": ("0F0", "0F1", "0FB2", "0B1", "0W1", "0B2", "0W2"),
        "compute:1": ("1F0", "1B0", "1W0", "1F1", "1B1", "1W1", "1F2", "1B2", "1W2"),
    }
    schedule = Schedule(problem, order)
    assert verify(problem, schedule) == ()
    timeline = schedule.timeline()
    assert timeline["0FB2"] == (3, 5)  # behind 1B0, which ends at 3
    assert timeline["1F2"] == (7, 8)
    assert timeline.peak_bytes == (3, 1)  # it takes before it frees


def test_files_say_what_such_a_pass_is(tmp_path: Path) -> None:
    problem = with_joined(plain(), [("0F2", "0B0", "0W0")], [2])
    problem.save(tmp_path / "x.json")
    assert Problem.load(tmp_path / "x.json").digest == problem.digest


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([("0F2", "0B9")], "joined passes 0F2 0B9: there is no pass '0B9'"),
        ([("0F2",)], "joined passes 0F2: each group has several passes"),
        ([("0F2", "0B0"), ("0F1", "0B0")], "joined passes 0F1 0B0: each group has several passes, and no pass is in two"),
        ([("0F2", "1B0")], "joined passes 0F2 1B0: they run on different streams"),
        ([("0F0", "0B0")], "joined passes: they wait for each other: .*0FB0"),
    ],
)
def test_groups_that_cannot_be(groups: list[tuple[str, ...]], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        with_joined(plain(), groups, [2] * len(groups))
    for times, wrong in {
        (0,): "0 µs is not a positive time",
        (2.5,): "joined passes: times",
        (): "joined passes: times",
    }.items():
        with pytest.raises(BadInput, match=wrong):
            with_joined(plain(), [("0F2", "0B0")], times)


def test_no_feature_comes_in_behind() -> None:
    """A pass that is of two stages says one: sums of the other's gradients would not wait for it."""
    problem = with_joined(plain(), [("0F2", "0B0", "0W0")], [2])
    for name, add in {
        "exchange": lambda: with_exchange(problem, 5, replicas=True),
        "all-to-all": lambda: with_all_to_all(problem, 5),
        "offload": lambda: with_offload(problem, 1, 1),
        "recompute": lambda: with_recompute(problem, "all", X=1, held_input=0),
    }.items():
        with pytest.raises(BadInput, match=f"{name}: the problem has overlap already: put {name} in before"):
            add()


@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_against_the_optimum(seed: int) -> None:
    """Random groups on two ranks, in little memory: CP-SAT on the whole problem says what is best."""
    random = np.random.default_rng(seed)
    times = ([int(one) for one in random.integers(1, 5, 2)] for _ in range(3))
    objective, comm = ("makespan", "span")[seed % 2], int(random.integers(3))
    memory = {"held_until_B": 2, "held_until_W": 1, "capacity": [int(one) for one in random.integers(6, 12, 2)]}
    problem = pipeline(*times, placement=(0, 1), microbatches=4, comm=comm, objective=objective, **memory)
    pairs = [(rank, m) for rank in range(2) for m in range(2) if random.random() < 0.7]
    groups = [(f"{rank}F{m + 2 - rank}", f"{rank}B{m}", f"{rank}W{m}") for rank, m in pairs]
    joined = with_joined(problem, groups, [int(one) for one in random.integers(1, 8, len(groups))])
    try:
        best = solve(joined, method="cp", seconds=30, prefer=None).certificate
    except Infeasible:
        with pytest.raises(Infeasible):
            solve(joined, effort=0.3, prefer=None)
        return
    found = solve(joined, effort=0.1, prefer=None)
    assert best is not None
    assert found.certificate is not None
    assert best.gap == 0
    assert found.certificate.bound <= best.value <= found.certificate.value
    assert verify(joined, found) == ()
