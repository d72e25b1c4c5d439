"""A profile's step with replicas: how long the sums of gradients take, and what a schedule makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zbsolve import BadInput, Profile, Schedule, Step, preset, solve, verify
from zbsolve.cli import main
from zbsolve.partition.layer import NO_LINK, Layer, Link

LAYERS = tuple(Layer(f"l{i}", 30, 40, 20, 60, 2, 1, 1000 * (i + 1), 8) for i in range(4))
PROFILE = Profile("estimated: by hand", "small", LAYERS, Link(1.0, 100.0), 4.0, None, {}, {}, shard_link=Link(5.0, 50.0))


def sums(profile: Profile, *step: object, **options: object) -> list[int]:
    """µs of each pass C of the step, stage by stage and rank by rank."""
    problem = profile.problem(*step, **options)  # type: ignore[arg-type]
    return problem.passes.duration[problem.rows("C")].tolist()


def test_a_sum_is_an_all_reduce_over_the_replicas() -> None:
    """Latency 5 µs and 3/4 of 1000 … 4000 bytes at 50 bytes a µs, twice."""
    assert sums(PROFILE, 4, 4, replicas=4) == [40, 70, 100, 130]
    assert sums(PROFILE, 2, 4, "vee", replicas=4, fused=True) == [40, 70, 100, 130]
    assert sums(replace(PROFILE, shard_link=None), 4, 4, replicas=4) == [17, 32, 47, 62]
    assert PROFILE.problem(4, 4, replicas=1) == PROFILE.problem(4, 4)
    bare = (replace(LAYERS[0], parameter_bytes=0), *LAYERS[1:])  # and nothing to sum takes no time
    assert sums(replace(PROFILE, layers=bare), 4, 4, replicas=4)[0] == 0
    # In two directions over the stage's two ranks, too: 2 µs and twice a half of the bytes at 100 bytes a µs.
    assert sums(PROFILE, 4, 4, "mirror", replicas=4)[::2] == [40 + 12, 70 + 22, 100 + 32, 130 + 42]


def test_what_stages_of_a_rank_share_is_summed_once() -> None:
    """The first and the last layer hold one parameter of 500 bytes. On one rank the earlier stage sums it."""
    tied = replace(PROFILE, tied=((500, (0, 3)),))
    assert sums(tied, 4, 4, replicas=2) == sums(PROFILE, 4, 4, replicas=2)
    more = sums(PROFILE, 2, 4, "vee", replicas=2)
    assert sums(tied, 2, 4, "vee", replicas=2) == [*more[:3], more[3] - 10]


def test_sums_are_data_like_any_other() -> None:
    """The last stage's sum is hidden behind the passes of others, the first one's is not: it begins when the last W ends."""
    slow = replace(PROFILE, shard_link=Link(0.0, 10.0))
    step = Step(4, 4, fused=True, replicas=2)
    assert step.problem(slow) == slow.problem(4, 4, fused=True, replicas=2)
    found, without = (preset("1f1b", one.problem(slow)) for one in (step, replace(step, replicas=1)))
    times = found.timeline()
    assert [times["3C0"][0], times["0C0"][0]] == [times["3BW3"][1], times["0BW3"][1]]
    assert times.makespan == max(times[f"{s}C0"][1] for s in range(4)) > without.timeline().makespan
    assert verify(found.problem, found) == ()
    free = step.problem(replace(slow, shard_link=NO_LINK))  # takes no time, and changes nothing
    assert preset("1f1b", free).timeline().makespan == without.timeline().makespan
    assert solve(free, effort=0.05).certificate.value == solve(without.problem, effort=0.05).certificate.value


def test_the_command_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = str(tmp_path / "p.json"), str(tmp_path / "s.json")
    replace(PROFILE, shard_link=None).save(path)
    step = ["--ranks", "4", "--microbatches", "4"]
    assert main(["solve", path, *step, "--replicas", "2", "--method", "1f1b", "-o", out]) == 0
    assert "sums over replicas go over the pipeline's link" in capsys.readouterr().err
    assert Schedule.load(out).order["comm:3"] == ("3C0",)
    assert main(["solve", out, "--replicas", "2"]) == 2
    assert main(["solve", path, *step, "--replicas", "2", "--shards", "2"]) == 2
    wrong = capsys.readouterr().err.splitlines()
    assert wrong[0].endswith("holds a schedule, and its problem says what is summed over replicas: leave it out")
    assert "sharded parameters are reduced over their own group" in wrong[1]


def test_wrong_use_is_named() -> None:
    with pytest.raises(BadInput, match="replicas: at least 1 is needed, got 0"):
        PROFILE.problem(4, 4, replicas=0)
    with pytest.raises(BadInput, match="replicas: sharded parameters are reduced over their own group"):
        Step(4, 4, replicas=2, shards=4)
    bare = replace(PROFILE, shard_link=None)
    assert Step(4, 4, replicas=4).notes(PROFILE) == Step(4, 4).notes(bare) == ()
    assert Step(4, 4, replicas=4).notes(bare)[0].startswith("sums over replicas go over the pipeline's link")
