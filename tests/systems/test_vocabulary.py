"""The named schedules with a sharded vocabulary (arXiv 2411.05288): bubbles, memory, and `solve` in the same memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmarks.profiles import kept
from zbsolve import BadInput, Problem, Schedule, pipeline, solve, verify
from zbsolve.build import Vocabulary, with_vocabulary
from zbsolve.systems import preset, presets_of, problem_for

NAMES = {"1f1b-vocab": "1f1b", "zb-h1-vocab": "zb-h1", "v-half-vocab": "v-half"}
SHARDS = (50, 50), (0, 0), (8, 3), (300, 150)  # µs of S and T beside passes of 100 µs


def step(name: str, p: int, m: int, barriers: int, shard: tuple[int, int] = (50, 50), **collectives: int) -> Problem:
    """Each stage holds one byte a microbatch; passes of 100 µs but that of V-Half's chunks are half as long."""
    costs = Vocabulary(*shard, barriers=barriers, **collectives)
    times = (50,) * 3 if name == "v-half-vocab" else (100,) * 3
    return problem_for(name, p, m, *times, held_until_W=1, vocabulary=costs)


@pytest.mark.parametrize(("p", "m", "barriers"), [(2, 6, 1), (4, 8, 1), (4, 13, 2), (5, 20, 1), (8, 24, 2)])
def test_1f1b_keeps_its_bubble_and_holds_a_microbatch_a_barrier(p: int, m: int, barriers: int) -> None:
    """The paper's comparison: the bubble is 1F1B's, rank r holds p − r + 1 (Vocab-2) or p − r + 2 (Vocab-1) microbatches."""
    for shard in SHARDS:
        problem = step("1f1b-vocab", p, m, barriers, shard)
        timeline = preset("1f1b-vocab", problem).timeline()
        assert timeline.makespan - problem.work <= (p - 1) * 300
        assert timeline.peak_bytes == tuple(p - rank + barriers for rank in range(p))


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_bubble_and_memory_on_more_ranks(name: str, barriers: int) -> None:
    """Beside the same schedule without shards: a microbatch more for each barrier, and in the ramps at most a slot more."""
    for p, shard in product((4, 8), SHARDS):
        problem = step(name, p, 4 * p, barriers, shard)
        plain = problem_for(NAMES[name], p, 4 * p, *(problem.passes.duration[0],) * 3, held_until_W=1)
        schedule, before = preset(name, problem), preset(NAMES[name], plain).timeline()
        timeline, longest = schedule.timeline(), max(*shard, 100)
        assert verify(problem, schedule) == ()
        assert timeline.makespan - problem.work <= before.makespan - plain.work + barriers * longest
        chunks = plain.stages // p
        assert max(timeline.peak_bytes) == max(before.peak_bytes) + barriers * chunks
        if name != "1f1b-vocab":
            assert len(set(timeline.peak_bytes)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_collectives_hide_behind_computing(name: str) -> None:
    """They cost something in the ramps only: 40 more microbatches take their work and no more. Lookups for those that come
    later keep no broadcast waiting, and their words are not held from the step's start on."""
    for barriers in (1, 2):
        collectives = {"broadcast": 20, "reduce": 30, "lookup": 10, "held_hidden": 3}
        few, many = (step(name, 4, m, barriers, **collectives) for m in (24, 64))
        first, second = (preset(name, one).timeline() for one in (few, many))
        assert second.makespan - first.makespan <= 1.001 * (many.work - few.work)
        assert second.peak_bytes == first.peak_bytes


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_ranks_and_microbatches_and_uneven_stages(name: str) -> None:
    for p, m, barriers in ((1, 1, 1), (1, 3, 2), (2, 1, 1), (3, 2, 2), (4, 3, 2), (5, 7, 1)):
        problem = step(name, p, m, barriers, (7, 9), broadcast=3, reduce=4, lookup=2)
        assert verify(problem, preset(name, problem)) == ()
        stages = 2 * p if name == "v-half-vocab" else p
        F = list(range(10, 10 + stages))
        uneven = problem_for(name, p, m, F, F, F, held_until_B=2, held_until_W=1, comm=3)
        assert verify(uneven, preset(name, uneven)) == ()


@pytest.mark.parametrize("name", NAMES)
def test_shards_come_in_one_order_on_all_ranks(name: str) -> None:
    """By microbatch, so that collectives meet; and every rank runs S of a microbatch before the last stage's backward."""
    schedule = preset(name, step(name, 4, 12, 2, broadcast=20, reduce=30))
    timeline, last = schedule.timeline(), schedule.problem.stages - 5
    for kind, rank in product("ST", range(4)):
        order = [one for one in schedule.order[f"compute:{rank}"] if kind in one]
        assert order == [f"{last + 1 + rank}{kind}{j}" for j in range(12)]
    backward = "BW" if name == "1f1b-vocab" else "B"
    for rank, j in product(range(4), range(12)):
        assert timeline[f"{last + 1 + rank}S{j}"][1] <= timeline[f"{last}{backward}{j}"][0]


@pytest.mark.parametrize(
    ("name", "p", "m", "barriers"), [("1f1b-vocab", 4, 8, 1), ("zb-h1-vocab", 4, 12, 2), ("v-half-vocab", 4, 8, 1)]
)
def test_solve_is_never_worse_in_the_same_memory(name: str, p: int, m: int, barriers: int) -> None:
    problem = step(name, p, m, barriers, (40, 30), broadcast=5, reduce=10)
    named = preset(name, problem).timeline()
    limited = replace(problem, capacity=tuple(int(peak) for peak in named.peak_bytes))
    certificate = solve(limited, effort=0.1).certificate
    assert certificate is not None
    assert problem.work < certificate.bound <= certificate.value <= named.makespan
    assert name in [one for one, _ in presets_of(limited)]


@pytest.mark.parametrize("name", NAMES)
def test_its_memory_holds_under_any_timing(name: str) -> None:
    problem = step(name, 4, 8, 2, broadcast=20, reduce=30)
    schedule = preset(name, problem)
    peaks, rng = schedule.timeline().peak_bytes, np.random.default_rng(0)
    for _ in range(10):
        times = np.rint(problem.passes.duration * rng.choice([0.2, 0.5, 1, 2, 5], len(problem.passes))).astype(np.int64)
        other = replace(problem, passes=replace(problem.passes, duration=times))
        assert Schedule(other, schedule.order, schedule.syncs).timeline().peak_bytes == peaks


def test_collectives_in_one_order_do_not_hold_up_earlier_ones() -> None:
    """Qwen 2 7B on 16 ranks: the first stage's rank has no use for the last stage's first hidden states before its last
    forward of the warm-up. Where it came to them then, that forward waited for an embedding behind them."""
    problem = replace(kept("estimated-qwen2-7b-h100"), capacity=None).problem(16, 18, vocabulary="sharded", memory="40GiB")
    schedule = preset("zb-h1-vocab", problem)
    assert schedule.timeline().makespan == preset("zb-h1-vocab", replace(problem, capacity=None)).timeline().makespan


def test_wrong_use_is_named() -> None:
    split = with_vocabulary(pipeline(2, 2, 2, placement=(0, 1), microbatches=4), Vocabulary(1, 1))
    for name, problem, text in (
        ("1f1b-vocab", pipeline(2, BW=4, placement=(0, 1), microbatches=4), "1f1b-vocab: the vocabulary is not sharded"),
        ("1f1b-vocab", split, "1f1b-vocab: needs one backward BW"),
        ("v-half-vocab", split, "v-half-vocab: is defined for placement vee only; for single there are .*zb-h1-vocab"),
        (
            "zb-h1",
            split,
            "zb-h1: is defined where the vocabulary is not sharded; for single there are .*1f1b-vocab, .*zb-h1-vocab",
        ),
    ):
        with pytest.raises(BadInput, match=text):
            preset(name, problem)
