"""A schedule's order timed again on a profile: on its own it is the same; on another each pass has that one's times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zbsolve import BadInput, HostLink, Infeasible, Problem, Profile, Schedule, Step, pipeline, preset, solve, verify
from zbsolve.features.vocabulary import ShardCosts, ShardPasses, VocabularyCosts
from zbsolve.interchange.importing import import_schedule, read_order
from zbsolve.partition.layer import Layer, Link
from zbsolve.search.today import timed_again

from ..support.profiles import equal_layers

HOST = HostLink(2, 0.5, 0.5, 0.5, 0.5, 10**7, 2)
OWN: dict[str, Any] = {"X": 900, "attention_F": 300, "attention_B": 500, "kv_bytes": 100}
LAYERS = tuple(
    Layer(f"layer{i}", 1000 + 7 * i, 1500, 900, 2300, 200, 800, 4000, 200 if i < 7 else 0, **OWN) for i in range(8)
)
SHARDS = ShardCosts(2, ShardPasses(450, 300, 70, 60), ShardPasses(350, 400, 70, 60), 2000)
VOCABULARY = VocabularyCosts("given", 64, 8, 2, 7, replace(LAYERS[7], F=100, B=100, W=50, BW=150), (SHARDS,))
PROFILE = Profile(
    "given",
    "toy",
    LAYERS,
    Link(1, 1000),
    4.0,
    None,
    {},
    {},
    host=HOST,
    shard_link=Link(5, 200),
    vocabulary=VOCABULARY,
)
NEW = replace(
    PROFILE,
    layers=tuple(replace(one, F=2.5 * one.F, B=2 * one.B, W=1.5 * one.W, BW=1.75 * one.BW) for one in LAYERS),
    link=Link(3, 500),
)
STEPS: dict[str, dict[str, Any]] = {
    "single": {},
    "fused": {"fused": True},
    "span": {"objective": "span"},
    "loop": {"placement": "loop"},
    "any placement": {"placement": "0,1,0,1,1,0"},
    "uneven": {"partition": (5, 3)},
    "tight": {"memory": 73_000},
    "recompute": {"recompute": "0", "placement": "vee"},
    "offload": {"offload": "half", "placement": "vee"},
    "offload of some": {"offload": ((0.5, 0.0, 0.5, 0.5), (0.25, 0.25, 0.25, 0.0))},
    "blocking": {"blocking": True},
    "slices": {"slices": 2},
    "uneven slices": {"slices": (5, 3)},
    "slices that exchange attention": {"slices": 4, "attention_exchange": True},
    "a sharded vocabulary": {"vocabulary": "sharded"},
    "two barriers": {"vocabulary": "two-barriers", "fused": True},
    "mirror": {"placement": ((0, 1), (1, 0)), "replicas": 2},
    "replicas": {"replicas": 2},
}


def problem_of(profile: Profile, words: dict[str, Any]) -> Problem:
    return Step(2, 4, **words).problem(profile)


@pytest.mark.parametrize("name", STEPS)
def test_on_its_own_profile_it_is_the_same(name: str) -> None:
    """Of each kind of step, from the schedule alone: the same problem, so the same schedule with its own certificate."""
    words = STEPS[name]
    schedule = solve(problem_of(PROFILE, words), effort=0.05)
    again = timed_again(schedule, PROFILE, memory=words.get("memory"), replicas=words.get("replicas"))
    assert again is schedule


@pytest.mark.parametrize("name", [name for name in STEPS if "exchange" not in name])
def test_on_another_profile_it_has_that_ones_times(name: str) -> None:
    """The problem is that of the step on the new profile, the order is the schedule's, and what is proven is of the new."""
    words = STEPS[name]
    schedule, wanted = solve(problem_of(PROFILE, words), effort=0.05), problem_of(NEW, words)
    again = timed_again(schedule, NEW, memory=words.get("memory"), replicas=words.get("replicas"))
    assert again.problem == wanted
    assert again.order == schedule.order
    assert verify(wanted, again) == ()
    assert again.certificate is not None
    assert again.certificate.value == Schedule(wanted, schedule.order, schedule.syncs).timeline().value
    assert again.certificate.bound <= again.certificate.value != schedule.certificate.value  # type: ignore[union-attr]


def test_where_some_backwards_are_one_pass(tmp_path: Path) -> None:
    """A file with BW of one stage, and B and W of the other."""
    (tmp_path / "some.txt").write_text("F0 F1 B0 W0 B1 W1\nF0 BW0 F1 BW1\n", encoding="utf-8")
    order = read_order(tmp_path / "some.txt")
    mixed, wanted = (import_schedule(order, profile).schedule for profile in (PROFILE, NEW))
    assert set(mixed.problem.passes.kinds) == {"F", "B", "W", "BW"}
    again = timed_again(mixed, NEW)
    assert (again.problem, again.order) == (wanted.problem, wanted.order)


def test_an_order_that_was_the_best_may_not_be(tmp_path: Path) -> None:
    """Twice the times: the same order takes twice as long, and is proven as before. With other shares it is not the best."""
    old = equal_layers(4)
    twice = replace(old, layers=tuple(replace(one, F=20, B=24, W=16, BW=40) for one in old.layers))
    schedule = solve(Step(4, 8).problem(old), effort=0.1)
    schedule.save(tmp_path / "s.json")
    again = timed_again(Schedule.load(tmp_path / "s.json"), twice)
    assert again.timeline().value == 2 * schedule.timeline().value
    longer = replace(old, layers=(replace(old.layers[0], F=100), *old.layers[1:]))
    assert timed_again(schedule, longer).timeline().value >= solve(Step(4, 8).problem(longer), effort=0.1).timeline().value


def test_what_cannot_be_told_is_refused_in_one_line() -> None:
    plain = solve(problem_of(PROFILE, {}), effort=0.05)
    fewer = replace(PROFILE, layers=PROFILE.layers[:6])
    with pytest.raises(BadInput, match="an order for 8 layers, and the profile has 6"):
        timed_again(plain, fewer)
    with pytest.raises(BadInput, match="does not say how many layers"):
        timed_again(preset("1f1b", pipeline([3, 3], BW=[4, 4], microbatches=4)), PROFILE)
    shared = solve(problem_of(PROFILE, {"replicas": 2}), effort=0.05)
    with pytest.raises(BadInput, match="over how many replicas"):
        timed_again(shared, PROFILE)
    sharded = solve(problem_of(PROFILE, {"shards": 2}), effort=0.05)
    with pytest.raises(BadInput, match="over how many ranks parameters are sharded"):
        timed_again(sharded, PROFILE)
    gpipe = preset("gpipe", problem_of(PROFILE, {"fused": True}))
    with pytest.raises(BadInput, match=r"by the profile's times: memory: rank 0"):
        timed_again(gpipe, PROFILE, memory=74_000)
    with pytest.raises(Infeasible):
        timed_again(gpipe, PROFILE, memory=66_000)
    helped = solve(problem_of(PROFILE, STEPS["slices that exchange attention"]), effort=0.05)
    with pytest.raises(BadInput, match=r"it alone has 1BA1\.3"):  # by other times other attention goes away
        timed_again(helped, NEW)
    moving = replace(PROFILE, layers=tuple(replace(one, all_to_all=50) for one in LAYERS))
    with pytest.raises(BadInput, match="the profile's step alone has 0AB0, 0AB1"):
        timed_again(plain, moving)
