"""Sequences of a batch in microbatches: every assignment, hand numbers, the order of a schedule, classes that come again."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from zbsolve import BadInput, Layer, Link, PackedSteps, Profile, Step, pack, pipeline

# 96 µs of F and 112 of B go with the tokens, W with all 96; attention takes 64 and 128 for 64 tokens.
BLOCK = Layer("block", 160, 240, 96, 320, 120, 80, 50, 64, attention_F=64, attention_B=128, kv_bytes=40)
PROFILE = Profile("given", "long", (BLOCK,) * 2, Link(2.0, 8.0), 4.0, None, {"sequence": 64}, {})


@pytest.mark.parametrize("seed", range(6))
def test_packing_against_every_assignment(seed: int) -> None:
    """Eight sequences in three microbatches, 3^8 ways: the bound is below the best of them, and so near is what is found."""
    random = np.random.default_rng(seed)
    lengths, attention = random.integers(1, 4000, 8).tolist(), float(random.choice([0.0, 1e-3]))
    found = pack(lengths, 3, attention)
    work = np.array([length * (1 + attention * length) for length in lengths])
    every = np.array(list(product(range(3), repeat=8)))
    fullest = np.max([(work * (every == number)).sum(axis=1) for number in range(3)], axis=0).min()
    assert found.bound <= fullest + 1e-6
    assert fullest - 1e-6 <= found.works[0] <= 1.06 * fullest
    assert sorted(i for one in found.microbatches for i in one) == list(range(8))
    assert found.works == pytest.approx([work[list(one)].sum() for one in found.microbatches])
    assert list(found.works) == sorted(found.works, reverse=True)


def test_packing_by_hand() -> None:
    """5 4 3 3 3 in two: longest first makes 5 3 3 and 4 3; an exchange 5 4 and 3 3 3. The longest alone is a bound, and of
    equal sequences so are those that must lie together: 3 of 5 in two."""
    found = pack([5, 4, 3, 3, 3], 2)
    assert found.microbatches in (((0, 1), (2, 3, 4)), ((2, 3, 4), (0, 1)))
    assert (found.works, found.bound, found.gap) == ((9, 9), 9, 0)
    assert pack([10, 1, 1], 2, 0.1).bound == pack([10, 1, 1], 2, 0.1).works[0] == 20
    assert pack([1] * 5, 2).bound == pack([1] * 5, 2).works[0] == 3


def test_a_large_batch_is_packed_within_a_thousandth() -> None:
    lengths = np.random.default_rng(0).lognormal(7, 1, 1000).clip(16, 32768)
    assert pack(lengths.tolist(), 32, 1e-4).gap < 1e-3


def test_what_cannot_be_packed_says_why() -> None:
    several = (([3, 0], 1, "length 1 is 0"), ([1, 2], 3, "2 sequences in 3"), ([1], 0, "1 sequences in 0"))
    for lengths, microbatches, why in several:
        with pytest.raises(BadInput, match=why):
            pack(lengths, microbatches)


def test_microbatches_go_where_a_step_has_them() -> None:
    """The step's second microbatch takes longest, then its third."""
    step = pipeline([[1, 9, 5]], BW=[2], microbatches=3)
    found = pack([4, 1, 2], 3).placed(step)
    assert (found.microbatches, found.works) == (((1,), (0,), (2,)), (1, 4, 2))
    assert found.gap == 0
    with pytest.raises(BadInput, match="packing: 2 microbatches for a step of 3"):
        pack([4, 1, 2], 2).placed(step)


def test_a_class_is_solved_once() -> None:
    """Attention of 192 µs in 496 a sequence of 64 tokens: a token of a sequence of l takes 1 + l · 192 / 304 / 64. In the
    last batch one sequence alone takes twice the average, and more."""
    steps = PackedSteps(PROFILE, Step(2, 3), grain=0.5, options={"effort": 0.1})
    assert steps.attention == pytest.approx(192 / 304 / 64)
    first, schedule = steps.batch([32, 30, 60, 40, 50, 44])
    again, same = steps.batch([42, 31, 33, 61, 38, 49])
    assert same is schedule
    assert len(steps.known) == 1
    assert sorted(i for one in again.microbatches for i in one) == list(range(6))
    long, other = steps.batch([32, 30, 200, 40, 50, 44])
    assert other is not schedule
    takes = np.bincount(other.problem.passes.microbatch, other.problem.passes.duration)
    assert long.microbatches[int(takes.argmax())] == (2,)
    assert max(long.works) > 1.5 * sum(long.works) / 3 > max(first.works)


def test_a_class_is_no_shorter_than_its_batches() -> None:
    """Work is rounded up, by no more than the grain: its schedule takes what the batch's own lengths do, or up to so much
    more."""
    steps = PackedSteps(PROFILE, Step(2, 2, fused=True), grain=0.25, options={"effort": 0.1})
    lengths = [32, 30, 60, 40]
    packing, schedule = steps.batch(lengths)
    own = sum(length * (1 + steps.attention * length) for length in lengths)
    one = 64 * (1 + steps.attention * 64)
    work = schedule.problem.busy[0] / Step(2, 1, fused=True).problem(PROFILE).busy[0] * one
    assert own * 0.95 <= work <= own * 1.25 * 1.05
    assert sum(packing.works) == pytest.approx(own)


def test_what_steps_cannot_be_packed_says_why() -> None:
    with pytest.raises(BadInput, match="profile: facts: 'sequence' is missing"):
        PackedSteps(Profile("given", "one", (BLOCK,), Link(0.0, 1.0), 0.0, None, {}, {}), Step(1, 2))
    with pytest.raises(BadInput, match=r"a grain above 0 \(it is 0\)"):
        PackedSteps(PROFILE, Step(2, 2), grain=0)
    with pytest.raises(BadInput, match="a step without lengths and sizes"):
        PackedSteps(PROFILE, Step(2, 2, lengths=(1, 2)))
