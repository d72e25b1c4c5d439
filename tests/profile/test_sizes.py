"""Microbatches of unlike sizes: times, bytes and messages follow them, and what is proven about memory counts with that."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path

import pytest

from zbsolve import BadInput, Infeasible, Profile, Step, solve, verify
from zbsolve.build.mixing import checked_room
from zbsolve.cli import main
from zbsolve.partition.layer import HostLink, Layer, Link
from zbsolve.partition.stage_costs import StageCosts, least_step
from zbsolve.problem import Problem

from ..support.exhaustive import optimum

MIB = 2**20
# Times and bytes of a public profile of two stages, in microbatches of eight sizes, whose published order takes 123.678 ms.
FACTORS = (0.25, 0.25, 0.25, 0.25, 0.75, 1.75, 2.0, 2.5)
FIRST = Layer("first", 7322.5, 8113.6, 23.8, 8137.4, 19825664, 0, 0, 0, message=106.7)
SECOND = Layer("second", 7136.9, 4412.4, 187.5, 4599.9, 225620480, 206569472, 0, 0)
PUBLIC = Profile("given", "two stages", (FIRST, SECOND), Link(0.0, 1e12), 0.0, None, {}, {}, microbatch_factors=FACTORS)


def test_the_largest_microbatch_has_to_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """412 MiB of a microbatch of size 1 are 1,030 of the largest: 500 do not do, and nobody says they are proven to."""
    path, out = str(tmp_path / "p.json"), str(tmp_path / "s.json")
    PUBLIC.save(path)
    argv = ["solve", path, "--ranks", "2", "--microbatches", "8", "--effort", "0.2", "-o", out]
    assert main([*argv, "--memory", "500MiB"]) == 1
    assert "needs 1080474880 bytes (1.01 GiB) for microbatch 7 alone" in capsys.readouterr().err
    assert main([*argv, "--memory", "1031MiB"]) == 0
    assert "123.678 ms, proven optimal" in capsys.readouterr().out
    problem = PUBLIC.problem(2, 8)
    assert max(problem.taken[problem.rows("F", stage=1)]) == round(2.5 * 225620480) + round(2.5 * 206569472)


def test_messages_follow_sizes_behind_their_latency() -> None:
    """10 µs and 100 bytes at 5 a µs; a run's messages were measured by themselves, and stay."""
    layers = (Layer("a", 100, 100, 50, 150, 40, 20, 0, 100), Layer("b", 100, 100, 50, 150, 40, 20, 0, 0))
    profile = Profile("given", "two", layers, Link(10.0, 5.0), 0.0, None, {}, {}, microbatch_factors=(1.0, 0.5, 2.0))

    def lags(one: Profile) -> list[int]:
        found: list[int] = one.problem(2, 3, fused=True).edges.lag[:6].tolist()
        return found

    assert lags(profile) == [30, 20, 50] * 2
    assert lags(replace(profile, facts={"messages_alike": True})) == [30] * 6
    blocking = profile.problem(2, 3, fused=True, blocking=True)
    assert blocking.passes.duration[blocking.rows("F", stage=0)].tolist() == [130, 70, 250]
    assert profile.problem(2, 3).messages is not None
    assert profile.problem(2, 3).messages.as_json() == {"sizes": (200,), "reserved": (400, 400)}  # type: ignore[union-attr]


def test_what_a_rank_keeps_free_is_for_the_largest() -> None:
    """Transient bytes and messages at both ends, two each, in a microbatch of size 2."""
    layers = tuple(replace(one, transient=30, output_bytes=100) for one in (FIRST, SECOND))
    costs = StageCosts.of(replace(PUBLIC, layers=layers, microbatch_factors=(1.0, 2.0)), ((0, 1),), 2)
    assert costs.memory.of_ranks((1, 1), costs.routes)[1] == (60 + 400, 60 + 400)
    assert costs.kept[1, 2] == 2 * (225620480 + 206569472)
    alike = replace(costs, microbatch_factors=())
    assert alike.memory.of_ranks((1, 1), alike.routes)[1] == (230, 230)


def test_copies_and_slices_follow_sizes() -> None:
    """Offload copies as much as the microbatch holds; keys and values of slices, which others read, are as many."""
    host = HostLink(0.0, 1.0, 1.0, 1.0, 1.0)
    layers = tuple(Layer(str(i), 100, 100, 50, 150, 40, 20, 0, 100, kv_bytes=8, attention_F=10) for i in range(2))
    profile = Profile("given", "two", layers, Link(0.0, 5.0), 0.0, None, {}, {}, host=host, microbatch_factors=(1.0, 3.0))
    moved = profile.problem(2, 2, offload="full")
    copies = moved.rows("O", stage=0)
    assert moved.passes.duration[copies].tolist() == [60, 180]
    assert moved.freed[copies].tolist() == [60, 180]
    for one, factor in ((profile, 3), (replace(profile, microbatch_factors=()), 1)):
        sliced = one.problem(2, 2, slices=2)
        large = sliced.in_microbatch & (sliced.passes.microbatch == 1)
        assert sliced.taken[large].sum() == factor * sliced.taken[~large].sum()


def random_profile(rng: random.Random, most: int) -> Profile:
    """Two or three layers, two to `most` microbatches of unlike sizes, and a link."""

    def layer(i: int) -> Layer:
        times = [rng.randint(2, 9) for _ in range(3)]
        return Layer(str(i), *times, sum(times[1:]), rng.randint(0, 6), rng.randint(0, 4), 0, 10 * rng.randint(0, 3))

    factors = tuple(rng.choice([0.5, 1.0, 1.5, 2.0, 3.0]) for _ in range(rng.randint(2, most)))
    layers = tuple(layer(i) for i in range(rng.randint(2, 3)))
    return Profile(
        "given", "any", layers, Link(float(rng.randint(0, 2)), 10.0), 0.0, None, {}, {}, (), microbatch_factors=factors
    )


@pytest.mark.parametrize("seed", range(24))
def test_bounds_hold_and_what_is_refused_has_no_schedule(seed: int) -> None:
    """Against exhaustive search: the value and bound of `solve`, the bound over all splits, and steps that do not fit."""
    rng = random.Random(seed)
    fused = rng.random() < 0.6
    profile = random_profile(rng, 3 if fused else 2)  # three whose backward is split take all orders half a minute
    m = len(profile.microbatch_factors)
    free = profile.problem(2, m, fused=fused, blocking=seed % 4 == 0)
    p, pairs = free.passes, product(range(2), range(m))
    need = max(free.taken[(p.rank == rank) & (p.microbatch == i)].sum() for rank, i in pairs)
    problem = replace(free, capacity=(max(1, int(need * rng.choice([0.8, 1, 1.4, 2]))),) * 2, messages=None)
    best = optimum(problem, lanes=False)
    try:
        checked_room(problem)
    except Infeasible:
        assert best is None
        return
    assert best is not None
    found = solve(problem, effort=0.2)
    assert verify(problem, found) == ()
    assert found.certificate is not None
    assert found.certificate.bound <= optimum(problem) <= found.certificate.value
    assert best <= found.certificate.value
    step = Step(2, m, fused=fused)
    whole = least_step(step.costs(profile), "makespan")
    splits = [(i, len(profile.layers) - i) for i in range(1, len(profile.layers))]
    assert all(whole <= (optimum(profile.problem(2, m, layers=one, fused=fused), lanes=False) or 0) for one in splits)


def test_named_schedules_and_files_have_them(tmp_path: Path) -> None:
    problem = PUBLIC.problem(2, 8)
    problem.save(tmp_path / "p.json")
    assert Problem.load(tmp_path / "p.json") == problem
    assert ceil(problem.edges.bytes.max() / MIB) == ceil(2.5 * 225620480 / MIB)
    with pytest.raises(BadInput, match="knows how long 8 microbatches are"):
        PUBLIC.problem(2, 4)
