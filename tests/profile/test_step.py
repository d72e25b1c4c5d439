"""`Step`: one noun for what turns a profile into a problem."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zbsolve import BadInput, Infeasible, Step, frontier
from zbsolve.partition.file import Partition, parse_partition
from zbsolve.profile.named_steps import usual_schedule
from zbsolve.profile.step import OPEN, STEP_FIELDS

from ..support.profiles import equal_layers, toy_profile


@pytest.mark.parametrize("more", [{}, {"fused": True}, {"recompute": "all"}, {"placement": "vee"}, {"objective": "span"}])
def test_a_step_is_what_profiles_make_of_the_same_numbers(more: dict[str, object]) -> None:
    profile = equal_layers(9)
    assert Step(2, 4, **more).problem(profile) == profile.problem(2, 4, **more)
    assert Step(2, 4, memory="2MB", **more).problem(profile).capacity == profile.problem(2, 4, memory="2MB", **more).capacity


def test_partitions_by_name_by_count_and_from_a_file(tmp_path: Path) -> None:
    profile, step = replace(toy_profile(), capacity=None), Step(2, 3)
    assert replace(step, partition="balanced").problem(profile).layers == (2, 2)
    assert replace(step, partition=(1, 3)).problem(profile).layers == (1, 3)
    path = tmp_path / "partition.json"
    Partition("toy", "single", (1, 3), (1, 2)).save(path)
    loaded = parse_partition(str(path))
    spread = replace(step, partition=loaded).problem(profile)
    assert spread.layers == (1, 3)
    assert spread.source == "estimated: measured, spread over submeshes: toy"
    with pytest.raises(BadInput, match=r"partition.json: it is for placement 'single', not 'vee'"):
        replace(step, placement="vee", partition=loaded).problem(profile)
    with pytest.raises(BadInput, match=r"layers: \(1, 2\) does not split 4 layers into 2 stages"):
        replace(step, partition=(1, 2)).problem(profile)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"ranks": 0}, "ranks: at least 1 is needed, got 0"),
        ({"microbatches": 0}, "microbatches: at least 1 is needed, got 0"),
        ({"objective": "fast"}, "objective 'fast': one of makespan span"),
        ({"placement": "around"}, "placement 'around'"),
        ({"partition": "best"}, "partition 'best'"),
        ({"memory": "much"}, "memory 'much'"),
        ({"recompute": "5"}, "there is no stage 5"),
    ],
)
def test_what_makes_no_sense_is_refused_before_there_is_a_profile(change: dict[str, object], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        Step(**{"ranks": 2, "microbatches": 4, **change})


def test_a_whole_number_may_have_0_as_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [replace(row, default=0) if row.name == "replicas" else row for row in STEP_FIELDS]
    monkeypatch.setattr("zbsolve.profile.step.STEP_FIELDS", rows)
    assert Step(2, 4, replicas=0).replicas == 0
    with pytest.raises(BadInput, match="replicas: at least 1 is needed, got -1"):
        Step(2, 4, replicas=-1)


def test_auto_is_for_a_race() -> None:
    assert Step(2, 4, "auto").auto
    assert Step(2, 4, partition="auto").auto
    assert not Step(2, 4).auto
    for name in OPEN:
        beside = {"lengths": (1, 2, 3, 4)} if name == "order" else {}
        step = Step(2, 4, **{name: "auto"}, **beside)
        with pytest.raises(BadInput, match=f"{name} 'auto': one problem needs it named"):
            step.problem(toy_profile())
        assert step.closed == (step if name in ("placement", "partition") else Step(2, 4, **beside))
    open_choices = Step(2, 4, recompute="auto", offload="auto")
    with pytest.raises(BadInput, match="recompute 'auto'"):
        frontier(toy_profile(), open_choices)
    assert usual_schedule(toy_profile(), open_choices, ()) is not None  # 1F1B, beside what is found


def test_memory_is_the_devices_unless_said() -> None:
    profile = replace(toy_profile(), capacity=9_000)
    room = 9_000 - 8_000 - 2 * 40  # less parameters and states, and two messages
    assert Step(2, 3).problem(profile).capacity == (room, room)
    assert Step(2, 3, memory=10_000).problem(profile).capacity == (room + 1_000, room + 1_000)
    with pytest.raises(Infeasible, match="memory: rank 0 needs 8000 bytes"):
        Step(2, 3, memory=1_000).problem(profile)
