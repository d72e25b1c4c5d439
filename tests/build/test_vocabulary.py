"""The output layer, the loss and the embedding on all ranks (arXiv 2411.05288): what waits for what, what is held."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from zbsolve import Problem, Schedule, pipeline, solve, verify
from zbsolve.build import Vocabulary, with_offload, with_updates, with_vocabulary
from zbsolve.greedy.side_stream import held_by_others, without_side_streams
from zbsolve.util.errors import BadInput

from ..support.exact_streams import optimum
from ..support.stream_checks import bounds_hold, cp_is_exact
from ..support.vocabulary_problems import random_vocabulary

HIDDEN, SHARD = 1, 10


def plain(ranks: int = 2, microbatches: int = 1, **how) -> Problem:
    return pipeline([10] * ranks, [20] * ranks, [5] * ranks, microbatches=microbatches, held_until_W=100, **how)


def waits(problem: Problem, name: str) -> set[str]:
    edges, i = problem.edges, problem.index[name]
    return {problem.names[a] for a in edges.before[edges.after == i].tolist()}


def test_one_barrier_joins_all_ranks_before_the_last_backward() -> None:
    problem = with_vocabulary(plain(), Vocabulary(6, 3, broadcast=1, reduce=2, held_shard=SHARD, held_hidden=HIDDEN))
    assert problem.placement == (0, 1, 0, 1)
    assert [waits(problem, name) for name in ("2VB0", "3VB0", "2S0", "3S0")] == [{"1F0"}, {"1F0"}, {"2VB0"}, {"3VB0"}]
    for rank in (0, 1):
        assert waits(problem, f"{2 + rank}VR0") == {"2S0", "3S0"}
        assert waits(problem, f"{2 + rank}T0") == {f"{2 + rank}VB0", f"{2 + rank}S0", f"{2 + rank}VR0"}
    assert waits(problem, "1B0") == {"1F0", "3VR0"}
    best = solve(problem, effort=0.2)
    assert best.certificate.value == best.certificate.bound == 10 + 10 + 1 + 6 + 2 + 20 + 20 + 5


def test_two_barriers_put_the_gradients_before_the_last_backward() -> None:
    problem = with_vocabulary(plain(), Vocabulary(6, 3, broadcast=1, reduce=2, barriers=2, statistics=4))
    assert waits(problem, "3VG0") == {"2T0", "3T0"}
    assert waits(problem, "2VG0") == {"2T0"}
    assert waits(problem, "1B0") == {"1F0", "3VG0"}
    assert solve(problem, effort=0.2).certificate.value == 10 + 10 + 1 + 6 + 4 + 3 + 2 + 20 + 20 + 5


def test_the_embedding_comes_before_the_first_forward_and_goes_behind_its_backward() -> None:
    problem = with_vocabulary(plain(), Vocabulary(6, 3, lookup=4, held_hidden=HIDDEN))
    assert waits(problem, "0F0") == {"2VE0", "3VE0"}
    assert waits(problem, "2VS0") == waits(problem, "3VS0") == {"0B0"}


@pytest.mark.parametrize(("barriers", "transient"), [(1, 2), (2, 2)])
def test_what_shards_hold_is_counted(barriers: int, transient: int) -> None:
    """Of one microbatch: activations, what S keeps, the hidden states and the input gradient's part."""
    how = {"barriers": barriers, "broadcast": 1, "reduce": 2, "held_shard": SHARD, "held_hidden": HIDDEN}
    assert (
        solve(with_vocabulary(plain(), Vocabulary(6, 3, **how)), effort=0.2).timeline().peak_bytes
        == (100 + SHARD + transient,) * 2
    )


def test_without_collectives_other_passes_hold_what_they_held() -> None:
    """S takes the hidden states that VB holds for T, and its part of the gradient stays until T, which waits for VR."""
    costs = {"held_shard": SHARD, "held_hidden": HIDDEN, "lookup": 1, "reduce": 2}
    for barriers, taken in ((1, SHARD + 2 * HIDDEN), (2, SHARD + HIDDEN)):
        problem = replace(with_vocabulary(plain(), Vocabulary(6, 3, barriers=barriers, **costs)), capacity=(300, 300))
        left = without_side_streams(problem)
        assert left.passes.kinds == ("F", "B", "W", "S", "T")
        assert [int(left.taken[left.index[name]]) for name in ("2S0", "3S0", "0F0")] == [taken, taken, 100]
        assert [int(left.freed[left.index[name]]) for name in ("2T0", "3T0", "0W0")] == [taken, taken, 100]
        assert held_by_others(problem)  # what the embedding's collectives hold is 3 of 300 bytes at most
        assert not held_by_others(replace(problem, capacity=(102, 110)))


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_bound_is_above_the_optimum_and_both_searches_find_it(first: int) -> None:
    tried = 0
    for problem in map(random_vocabulary, range(first, first + 20)):
        if len(problem.passes) > 18:
            continue
        tried += optimum(problem) is not None
        bounds_hold(problem)
        cp_is_exact(problem)
    assert tried > 3


def test_solve_finds_proves_and_keeps_within_memory_under_any_timing() -> None:
    over = 0
    for seed in range(100, 112):
        problem = random_vocabulary(seed, ranks=3, microbatches=5)
        schedule = solve(problem, effort=0.1)
        assert verify(problem, schedule) == ()
        rng, p = np.random.default_rng(seed), problem.passes
        for _ in range(10):
            times = np.rint(10 * p.duration * rng.choice([0.1, 0.5, 1, 2, 10], len(p))).astype(np.int64)
            other = replace(problem, passes=replace(p, duration=times))
            over += any(np.greater(Schedule(other, schedule.order, schedule.syncs).timeline().peak_bytes, problem.room))
    assert over == 0


def test_wrong_numbers_are_named() -> None:
    step = plain()
    for how, said in (
        ({"S": [1, 2, 3]}, r"vocabulary: S: 3 values, 2 are needed"),
        ({"T": -1}, r"vocabulary: T\[0\]: -1 is negative"),
        ({"barriers": 3}, "vocabulary: barriers: 3: 1 "),
    ):
        with pytest.raises(BadInput, match=said):
            with_vocabulary(step, Vocabulary(**{"S": 1, "T": 1, **how}))
    with pytest.raises(BadInput, match="vocabulary: None: a `Vocabulary` is needed"):
        with_vocabulary(step, None)  # type: ignore[arg-type]
    sharded = with_vocabulary(step, Vocabulary(1, 1))
    with pytest.raises(BadInput, match="vocabulary: the problem has vocabulary already"):
        with_vocabulary(sharded, Vocabulary(1, 1))
    with pytest.raises(BadInput, match="has offload already: put vocabulary in before"):
        with_vocabulary(with_offload(step, 1, 1), Vocabulary(1, 1))
    with pytest.raises(BadInput, match="has updates already: put vocabulary in before"):
        with_vocabulary(with_updates(step, every=1, delay=1, time=1), Vocabulary(1, 1))
    with pytest.raises(BadInput, match="stage 1 has no B or BW of each microbatch"):
        with_vocabulary(
            step.only(np.array([i for i, name in enumerate(step.names) if name not in ("1B0", "1W0")])), Vocabulary(1, 1)
        )
