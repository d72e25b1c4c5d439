"""A profile's step with its vocabulary on the last stage, redistributed or sharded: what is built, what fits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from zbsolve import BadInput, Batch, HostLink, Infeasible, Problem, Profile, solve, solve_auto, verify
from zbsolve.features.feature import AUTO
from zbsolve.partition.file import Partition
from zbsolve.partition.layer import Layer, Link
from zbsolve.profile import ShardCosts, ShardPasses, VocabularyCosts
from zbsolve.profile.step import Step
from zbsolve.show.solved_step import solved

from ..support.exact_streams import optimum
from ..support.stream_checks import bounds_hold, cp_is_exact


def block(name: str, time: float, parameters: int = 100) -> Layer:
    return Layer(name, time, time, time, 2 * time, 10, 20, parameters, 8)


# An embedding, six blocks, and an output layer as long as four of them, of which one ninth is no matrix product.
COSTS = VocabularyCosts(
    "given",
    size=64,
    hidden_bytes=8,
    statistic_bytes=2,
    output=7,
    output_rest=block("head", 0, 4),
    shards=(ShardCosts(2, ShardPasses(40, 20, 50, 70), ShardPasses(20, 40, 50, 70), 400, 2.0),),
    embedding=0,
    embedding_rest=block("embedding", 0, 0),
)
LAYERS = (
    block("embedding", 0, 800),
    *(block(f"block{i}", 10) for i in range(6)),
    replace(block("head", 40, 804), held_until_W=100),
)
HOST = HostLink(1.0, 8.0, 8.0, 8.0, 8.0)
PROFILE = Profile("given", "small", LAYERS, Link(0.0, 8.0), 4.0, None, {}, {}, host=HOST, vocabulary=COSTS)


def test_last_is_equal_and_redistribute_is_balanced() -> None:
    found = {one: Step(2, 4, vocabulary=one).problem(PROFILE) for one in (None, "last", "redistribute", "sharded")}
    assert {one: problem.layers for one, problem in found.items()} == {
        None: (6, 2),
        "last": (4, 4),
        "redistribute": (6, 2),
        "sharded": (4, 4),
    }
    assert found[None] == found["redistribute"] == PROFILE.problem(2, 4, vocabulary="redistribute")
    assert found["last"] == PROFILE.problem(2, 4, vocabulary="last") == Step(2, 4, partition="equal").problem(PROFILE)
    assert found["sharded"] == PROFILE.problem(2, 4, vocabulary="sharded")
    assert [problem.work for problem in found.values()] == [4 * 150, 4 * 210, 4 * 150, 4 * 150]
    given = Step(2, 4, partition=(5, 3), vocabulary="last").problem(PROFILE)
    assert given == Step(2, 4, partition=(5, 3)).problem(PROFILE)


def test_passes_come_from_the_profile_and_run_as_slowly_as_their_rank() -> None:
    slow = replace(PROFILE, rank_factors=(1.0, 2.0), microbatch_factors=(1.0, 3.0))
    problem = slow.problem(2, 2, layers=(4, 4), vocabulary="sharded")
    times = dict(zip(problem.names, problem.passes.duration.tolist(), strict=True))
    assert [times[name] for name in ("2S0", "3S0", "3T0", "2S1", "2VB1", "2VR1", "2VE1")] == [40, 80, 40, 120, 3, 3, 9]
    two = slow.problem(2, 2, layers=(4, 4), vocabulary="two-barriers")
    assert [int(two.passes.duration[two.index[name]]) for name in ("2S0", "2T0")] == [20, 40]
    assert two.model_stages == 2
    assert two.stages == 4
    replicated = slow.problem(2, 2, layers=(4, 4), vocabulary="sharded", replicas=2)  # 1 byte of 8 a µs: stages 300 and
    assert replicated.passes.duration[replicated.rows("C")].tolist() == [38, 38, 50, 50]  # 304 bytes, shards 400


def test_shards_take_memory_from_every_rank() -> None:
    plain, sharded = (Step(2, 4, partition=(4, 4), memory=20_000, vocabulary=one) for one in (None, "sharded"))
    one, other = (step.problem(PROFILE) for step in (plain, sharded))
    assert one.capacity == (20_000 - 4 * 1100 - 16, 20_000 - 4 * 1104 - 16)
    assert other.capacity == (20_000 - 4 * 700 - 16 - 70, 20_000 - 4 * 704 - 16 - 70)
    schedule = solve(other, effort=0.1)
    peaks = schedule.timeline().peak_bytes
    assert sharded.needs(PROFILE, schedule) == (4 * 700 + 86 + peaks[0], 4 * 704 + 86 + peaks[1])
    held = 30 * 4 + 50 + 2 * 8  # four layers of one microbatch, what S keeps, hidden states and their gradient
    with pytest.raises(Infeasible, match=f"needs {held} bytes for one microbatch, but has {held - 2} bytes, with its shard"):
        replace(sharded, memory=4 * 704 + 86 + held - 2).problem(PROFILE)
    tight = replace(sharded, memory=4 * 704 + 86 + held + 8).problem(PROFILE)  # rank 0 has the embedding's output too
    assert verify(tight, solve(tight, effort=0.1)) == ()


@pytest.mark.parametrize("offload", ["full", "half", "1:0.5", (1.0, 0.0), (True, False), ((1.0, 0.0), (0.0, 0.0))])
def test_stages_offload_and_shards_do_not(offload: Any) -> None:
    problem = Step(2, 2, partition=(4, 4), vocabulary="sharded", offload=offload).problem(PROFILE)
    alone = Step(2, 2, partition=(4, 4), offload=offload).problem(PROFILE)
    assert [name for name in problem.names if "O" in name] == [name for name in alone.names if "O" in name] != []
    assert verify(problem, solve(problem, effort=0.1)) == ()


def random_step(seed: int) -> Problem:
    """A small step of a random profile with a sharded vocabulary, with little memory or without a limit."""
    rng = random.Random(seed)
    layers = [replace(block("", rng.randint(1, 4)), B=rng.randint(1, 5), held_until_W=rng.randint(0, 9)) for _ in range(4)]
    shards = [ShardPasses(rng.randint(1, 5), rng.randint(0, 5), rng.randint(0, 20), rng.randint(0, 9)) for _ in range(2)]
    sharded = replace(COSTS, output=3, shards=(ShardCosts(2, *shards, 10),), output_rest=block("head", rng.randint(0, 1)))
    if rng.random() < 0.6:
        sharded = replace(sharded, embedding=None, embedding_rest=None)
    profile = replace(
        PROFILE, layers=tuple(layers), vocabulary=sharded, link=Link(0.0, rng.choice([4.0, 8.0, 1e9])), states=0
    )
    how = {"vocabulary": rng.choice(["sharded", "two-barriers"]), "fused": rng.random() < 0.4}
    step = Step(2, rng.choice([1, 1, 2]), recompute=rng.choice([(), (), "0"]), **how)
    for memory in rng.sample([None, 100, 130, 160, 200], 3):
        try:
            return replace(step, memory=memory).problem(profile)
        except Infeasible:
            continue
    return step.problem(profile)


@pytest.mark.parametrize("first", [0, 15])
def test_no_bound_is_above_the_optimum_and_both_searches_find_it(first: int) -> None:
    tried = 0
    for problem in map(random_step, range(first, first + 15)):
        if len(problem.passes) > 20:
            continue
        tried += optimum(problem) is not None
        bounds_hold(problem)
        cp_is_exact(problem)
    assert tried > 3


@pytest.mark.parametrize(
    ("change", "how", "line"),
    [
        ({}, {"vocabulary": "split"}, "vocabulary 'split': one of last, redistribute, sharded, two-barriers, auto"),
        ({"vocabulary": None}, {"vocabulary": "sharded"}, "vocabulary: the profile has no field"),
        ({"vocabulary": replace(COSTS, size=2)}, {"ranks": 4}, "vocabulary: 2 words cannot be sharded over 4 ranks"),
        ({}, {"ranks": 1}, "sharded vocabulary: is over 2 ranks or more, and there is one"),
        ({}, {"shards": 2}, "sharded vocabulary: goes without sharded parameters"),
        ({}, {"shards": 2, "vocabulary": "auto"}, "sharded vocabulary: goes without sharded parameters"),
        ({}, {"vocabulary": "last", "partition": "alpa"}, "partition 'alpa': vocabulary 'last' has the partition 'equal'"),
        (
            {},
            {"partition": Partition("small", "single", (4, 4), (2, 2))},
            "stages on submeshes have their vocabulary",
        ),
    ],
)
def test_wrong_use_is_named(change: dict[str, Any], how: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        Step(**{"ranks": 2, "microbatches": 2, "vocabulary": "sharded", **how}).problem(replace(PROFILE, **change))


@pytest.mark.parametrize("said", [{"sizes": Batch(6)}, {"sizes": (1, 2, 3), "order": AUTO}])
def test_bounds_over_sizes_and_orders_count_every_place_of_an_open_vocabulary(said: dict[str, Any]) -> None:
    """A sharded one takes 935 µs, less than any that is not: 951."""
    step = Step(2, 3, vocabulary=AUTO, **said)
    schedule, tried = solve_auto(PROFILE, step, effort=0.1)
    ((bound,),) = (each.values() for each in solved((PROFILE, step), schedule, tried).bounds.values())
    assert 930 <= bound <= schedule.timeline().value < 951
