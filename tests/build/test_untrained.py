"""Stages in front that train nothing, and steps of forwards alone: by hand, and against exhaustive search."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from zbsolve import BadInput, Profile, Step, pipeline, preset, solve, verify
from zbsolve.build import with_exchange, with_recompute, without_backward
from zbsolve.build.untrained import untrained_stages, with_backward
from zbsolve.partition.layer import Layer, Link
from zbsolve.partition.stage_costs import least_step
from zbsolve.systems.table import presets_of

from ..support.exhaustive import optimum


def test_no_gradient_goes_to_stages_that_train_nothing() -> None:
    """8 microbatches of 4 and 12 ms behind a message of 5: 4 + 5 + 8 · 12. With a message back it would be 110."""
    for split in ({"BW": [0, 8]}, {"B": [0, 4], "W": [0, 4]}):
        problem = pipeline([4, 4], **split, comm=5, microbatches=8, untrained=1)  # type: ignore[arg-type]
        assert not problem.edges.carrying("gradient").any()
        assert problem.rows("B", "W", "BW", stage=0).tolist() == []
        for name in ("1f1b", "gpipe"):
            assert preset(name, problem).timeline().makespan == 105
        certificate = solve(problem, effort=0.1).certificate
        assert certificate is not None
        assert certificate.value == certificate.bound == 105


def test_a_step_of_forwards_alone() -> None:
    """Three stages of 1, 2 and 1 s with messages of 1.5 and 0.5: 10 · 2 + 4; with messages that block, 10 · 2.5 + 3.5."""
    for blocking, value in ((False, 24000), (True, 28500)):
        problem = pipeline([1000, 2000, 1000], microbatches=10, comm=[1500, 500], blocking=blocking)
        assert problem.passes.kinds == ("F",)
        certificate = solve(problem, effort=0.1).certificate
        assert certificate is not None
        assert certificate.value == certificate.bound == value
        assert preset("1f1b", problem).timeline().makespan == preset("gpipe", problem).timeline().makespan == value


def test_messages_that_block_go_with_the_gradient() -> None:
    """The second stage's backward ends with a message to the first, and without that it is shorter by it."""
    problem = pipeline([3, 3], BW=[0, 5], comm=2, microbatches=2, untrained=1, blocking=True)
    assert problem.passes.duration[problem.rows("BW")].tolist() == [5, 5]
    assert problem.passes.duration[problem.rows("F")].tolist() == [5, 5, 3, 3]


def test_what_nobody_frees_is_not_held() -> None:
    problem = pipeline(
        [3, 3], [0, 5], [0, 1], microbatches=2, untrained=1, held_until_B=[7, 7], recompute="all", capacity=[0, 9]
    )
    assert problem.taken[problem.rows("F", stage=0)].tolist() == [0, 0]
    assert problem.rows("X", stage=0).tolist() == []
    assert len(problem.rows("X")) == 2
    plain = pipeline([3, 3], [0, 5], [0, 1], microbatches=2, untrained=1)
    again = with_recompute(plain)  # a search of a step with passes X that no backward waits for ended with a ValueError
    assert again.passes.stage[again.rows("X")].tolist() == [1, 1]


def test_a_builder_says_it_too() -> None:
    whole = pipeline([3, 4, 5], [3, 4, 5], [1, 1, 1], comm=2, microbatches=3, AF=[1, 0, 1])
    front = without_backward(whole, 2)
    assert (untrained_stages(whole), untrained_stages(front), untrained_stages(without_backward(whole, 3))) == (0, 2, 3)
    assert without_backward(whole, 0) is whole
    assert len(front.rows("AB")) == 3
    exchanged = with_exchange(front, 4, replicas=True)
    assert exchanged.passes.stage[exchanged.rows("C")].tolist() == [2]
    with pytest.raises(BadInput, match="untrained: 4 stages: from 0 to 3"):
        without_backward(whole, 4)


def test_named_schedules_are_orders_of_the_whole_step() -> None:
    plain = pipeline([2] * 4, [2] * 4, [2] * 4, placement="loop", comm=1, microbatches=4)
    for front in range(1, 5):
        problem = without_backward(plain, front)
        again = with_backward(problem)
        assert len(again.passes) == len(plain.passes) * (3 if front < 4 else 2) // 3
        found = dict(presets_of(problem))
        assert "interleaved" in found
        assert all(verify(problem, one) == () for one in found.values())


def random_step(rng: random.Random) -> Any:
    """Up to four stages with two or three microbatches, where some in front, or all, train nothing."""
    placement = rng.choice([(0, 1), (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1)])
    stages, m = len(placement), 2 if len(placement) == 4 else rng.randint(2, 3)
    fused = stages == 4 or rng.random() < 0.5

    def each(low: int, high: int) -> list[int]:
        return [rng.randint(low, high) for _ in range(stages)]

    backward = {"BW": each(1, 9)} if fused else {"B": each(1, 6), "W": each(1, 5)}
    held = {"held_until_B": each(0, 3), "held_until_W": each(0, 3)}
    kept = [a + b for a, b in zip(*held.values(), strict=True)]
    need = [sum(size for size, home in zip(kept, placement, strict=True) if home == rank) for rank in range(3)]
    return pipeline(
        each(1, 7),
        **backward,  # type: ignore[arg-type]
        **held,  # type: ignore[arg-type]
        placement=placement,
        microbatches=m,
        comm=rng.choice([0, 2, each(0, 5)[:-1]]),
        blocking=rng.random() < 0.3,
        capacity=rng.choice([None, [int(n * rng.choice([1, 1.5, 2])) for n in need[: max(placement) + 1]]]),
        objective=rng.choice(["makespan", "makespan", "span"]),
        untrained=rng.randint(1, stages),
    )


@pytest.mark.parametrize("seed", range(40))
def test_bounds_hold_against_exhaustive_search(seed: int) -> None:
    problem = random_step(random.Random(seed))
    found = solve(problem, effort=0.2, seed=seed)
    assert verify(problem, found) == ()
    assert found.certificate is not None
    best = optimum(problem)
    assert best is not None
    assert found.certificate.bound <= best <= found.certificate.value
    assert all(verify(problem, one) == () or problem.capacity for _, one in presets_of(problem))


TOWER = tuple(Layer(f"t{i}", 4, 0, 0, 0, 0, 0, 40, 8, frozen_bytes=40) for i in range(2))
TRAINED = tuple(Layer(f"l{i}", 4, 3, 2, 5, 2, 1, 40, 8) for i in range(2))


def test_a_profile_says_what_trains_nothing() -> None:
    """Layers in front whose backwards take no time and whose parameters are not trained; of a stage all of them."""
    profile = Profile("given", "tower", (*TOWER, *TRAINED), Link(3.0, 1e9), 4.0, None, {}, {})
    assert untrained_stages(profile.problem(2, 4, layers=(2, 2))) == 1
    assert untrained_stages(profile.problem(2, 4, layers=(1, 3))) == 1
    assert untrained_stages(profile.problem(2, 4, layers=(3, 1))) == 0
    assert untrained_stages(profile.problem(4, 4)) == 2
    trained = replace(profile, layers=(replace(TOWER[0], frozen_bytes=39), *profile.layers[1:]))
    assert untrained_stages(trained.problem(4, 4)) == 0
    alone = replace(profile, layers=TOWER)
    assert alone.problem(2, 4).passes.kinds == ("F",)
    for shards, replicas in ((2, 1), (1, 2)):
        problem = profile.problem(2, 4, layers=(2, 2), shards=shards, replicas=replicas)
        found = solve(problem, effort=0.1)
        assert verify(problem, found) == ()
        assert set(problem.passes.stage[problem.rows("RS", "C")].tolist()) == {1}


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_over_all_splits_counts_no_gradient_to_the_front(seed: int) -> None:
    rng = random.Random(seed)
    front = rng.randint(1, 3)
    tower = [replace(TOWER[0], F=rng.randint(1, 6)) for _ in range(front)]
    times = [[rng.randint(1, 6) for _ in range(3)] for _ in range(rng.randint(1, 2))]
    rest = [replace(TRAINED[0], F=F, B=B, W=W) for F, B, W in times]
    profile = Profile("given", "any", (*tower, *rest), Link(float(rng.randint(1, 9)), 1e9), 4.0, None, {}, {})
    bound = least_step(Step(2, 2).costs(profile), "makespan")
    count = len(profile.layers)
    values = [optimum(profile.problem(2, 2, layers=(i, count - i)), lanes=False) for i in range(1, count)]
    assert all(value is not None and bound <= value for value in values)


def test_slices_of_stages_that_train_nothing_keep_keys_until_their_last_forward() -> None:
    """Two slices a microbatch: the first one's 5 bytes lie there until the second has run, and no gradient of them is."""
    held = {"held_keys": 5, "held_gradients": 7}
    step = pipeline([2, 2], [0, 3], [0, 1], microbatches=2, slices=2, untrained=1, **held)  # type: ignore[arg-type]
    assert step.taken[step.rows("F", stage=0)].tolist() == [5, 0, 5, 0]
    assert step.taken[step.rows("F", stage=1)].tolist() == [5, 5, 5, 5]
    best = optimum(step)
    found = solve(step, effort=0.2)
    assert verify(step, found) == ()
    assert best is not None
    assert found.certificate is not None
    assert found.certificate.bound <= best <= found.certificate.value
    assert optimum(replace(step, capacity=(4, 99))) is None
    assert optimum(replace(step, capacity=(5, 99))) is not None
