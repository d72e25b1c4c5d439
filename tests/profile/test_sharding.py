"""A profile's step with sharded parameters: what is counted where, and how long gathers take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zbsolve import BadInput, Infeasible, Profile, Step, solve_auto
from zbsolve.partition.layer import Layer, Link

LAYERS = tuple(Layer(f"l{i}", 30, 40, 20, 60, 2, 1, 1000 * (i + 1), 8) for i in range(4))
PROFILE = Profile("estimated: by hand", "small", LAYERS, Link(1.0, 100.0), 4.0, 40_000, {}, {}, shard_link=Link(5.0, 50.0))


def test_what_is_sharded_is_fixed_and_what_is_gathered_is_on_edges() -> None:
    """Four stages of 1000 … 4000 bytes of parameters over 4 ranks: a rank keeps a quarter of four times as much."""
    problem = PROFILE.problem(4, 4, shards=4)
    plain = PROFILE.problem(4, 4)
    assert problem.capacity is not None
    assert plain.capacity is not None
    assert [a - b for a, b in zip(problem.capacity, plain.capacity, strict=True)] == [3000 * s for s in (1, 2, 3, 4)]
    rows = {one.name: one for one in problem.passes}
    # latency 5, and 3/4 of the bytes at 50 bytes a µs
    assert [rows[f"{s}AG0"].duration for s in range(4)] == [20, 35, 50, 65]
    assert [rows[f"{s}RS0"].duration for s in range(4)] == [20, 35, 50, 65]
    assert [int(problem.taken[problem.index[f"{s}AG0"]]) for s in range(4)] == [1000, 2000, 3000, 4000]
    assert PROFILE.problem(4, 4, shards=1) == plain
    assert {one.name for one in PROFILE.problem(2, 4, "vee", shards=4, gathers=(1, 2, 1, 1)).passes} >= {"1AG1", "1AGB1"}


def test_files_and_links(tmp_path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE
    bare = replace(PROFILE, shard_link=None)
    bare.save(tmp_path / "q.json")
    assert "shard_link" not in (tmp_path / "q.json").read_text()
    assert Step(4, 4, shards=4).notes(PROFILE) == Step(4, 4).notes(bare) == ()
    assert "the pipeline's link" in Step(4, 4, shards=4).notes(bare)[0]
    found = bare.problem(4, 4, shards=4)
    assert found.passes[found.index["0AG0"]].duration == round(1 + 750 / 100)


def test_the_number_of_gathers_is_raced() -> None:
    """Where parameters of two stages do not fit at once, only several gathers have a schedule; the certificate is for it."""
    step = Step(2, 4, "loop", partition="equal", shards=8, gathers="auto", memory=12_000)
    schedule, tried = solve_auto(PROFILE, step, effort=0.5)
    assert [one.placement for one in tried] == ["loop gathers=1", "loop gathers=2", "loop gathers=4"]
    assert [one.value for one in tried if one.why == ""] == [schedule.certificate.value]
    assert tried[0].value is None
    assert "AGB" in schedule.problem.passes.kinds
    assert schedule.certificate.digest == schedule.problem.digest


def test_wrong_use_is_named() -> None:
    with pytest.raises(BadInput, match="shards: at least 1 is needed, got 0"):
        PROFILE.problem(4, 4, shards=0)
    with pytest.raises(BadInput, match="gathers: 2: nothing is gathered without shards"):
        Step(4, 4, gathers=2)
    with pytest.raises(BadInput, match="gathers 'often': auto, a number, or one a stage"):
        Step(4, 4, shards=2, gathers="often")
    with pytest.raises(BadInput, match="sharding: gathers: 2 values, 4 are needed"):
        PROFILE.problem(4, 4, shards=2, gathers=(1, 2))
    with pytest.raises(Infeasible, match="sharding: rank 3 needs 8003 bytes"):
        PROFILE.problem(4, 4, shards=4, memory=12_000)
