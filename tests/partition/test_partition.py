"""Layers → stages: every dynamic programme against all partitions; submeshes; the command `partition`."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import combinations, product
from math import ceil

import numpy as np
import pytest

from zbsolve import BadInput, Infeasible, Layer, Link, Problem, Profile, Schedule, Step, solve
from zbsolve.build import Vocabulary, with_vocabulary
from zbsolve.cli import main
from zbsolve.ilp.cp import solve_cp
from zbsolve.interchange.megatron import layout_of
from zbsolve.partition.by_name import (
    NAMES,
    greedy_step,
    moves_between,
    named_partitions,
    neighbours,
    partition_by_name,
    partitioned,
)
from zbsolve.partition.cuts import alpa, balanced, balanced_ranks, equal, spans, submeshes
from zbsolve.partition.file import Partition, mesh_partitions, on_devices, parse_partition, spread_over
from zbsolve.partition.stage_costs import StageCosts, least_step
from zbsolve.partition.stage_memory import Common, StageMemory
from zbsolve.placement import parse_routes
from zbsolve.show.profile_report import partitions_as_text
from zbsolve.util.text import counted

from ..support.partitions import partitions


def random_profile(rng: random.Random, layers: int, factors: tuple[float, ...] = ()) -> Profile:
    """Unlike layers with a light embedding and a heavy output layer."""
    rows = [
        Layer(
            f"layer{i}",
            *(rng.randint(1, 9) * (0.5 if i == 0 else 3 if i == layers - 1 else 1) for _ in range(3)),
            12.5,
            rng.randint(1, 6),
            rng.randint(1, 6),
            rng.randint(1, 4),
            rng.randint(1, 30),
        )
        for i in range(layers)
    ]
    return Profile("measured", "toy", tuple(rows), Link(1.0, 20.0), 2.0, None, {}, {}, factors)


def with_all_to_alls(profile: Profile, rng: random.Random) -> Profile:
    """A mixture of experts in some layers; some of their all-to-alls take longer than the work."""
    return replace(profile, layers=tuple(replace(c, all_to_all=rng.choice([0.0, 2.0, 9.0])) for c in profile.layers))


def costs_of(
    profile: Profile, placement: str, ranks: int, microbatches: int, limit: int | tuple[int, ...] | None = None
) -> StageCosts:
    return StageCosts.of(profile, parse_routes(placement, ranks), microbatches, limit)


# The dynamic programmes


def test_balanced_is_exact_in_the_maximum_and_then_the_squares():
    rng = random.Random(5)
    for _ in range(40):
        layers, stages = rng.randint(4, 8), rng.randint(1, 4)
        costs = [rng.randint(1, 9) for _ in range(layers)]
        factors = rng.choice([[1.0] * stages, [rng.choice([1.0, 1.5, 2.0]) for _ in range(stages)]])

        def worth(counts, costs=costs, factors=factors):
            ends = np.cumsum([0, *counts])
            times = [sum(costs[a:b]) * f for a, b, f in zip(ends, ends[1:], factors, strict=False)]
            return max(times), sum(t * t for t in times)

        assert worth(balanced(costs, stages, factors)) == min(map(worth, partitions(layers, stages)))
    with pytest.raises(BadInput, match="2 layers do not make 3 stages"):
        balanced([1, 2], 3)


def test_equal_is_what_people_use_today():
    assert equal(["embedding", *["block"] * 8, "head"], 4) == (3, 2, 2, 3)
    assert equal(["block"] * 8, 4) == (2, 2, 2, 2)
    assert equal(["block"] * 9, 4) == (3, 2, 2, 2)
    assert equal(["embedding", *["dense", "experts"] * 3, "norm", "head"], 2) == (4, 5)
    assert equal(["embedding", "block", "block", "head"], 4) == (1, 1, 1, 1)
    with pytest.raises(BadInput, match="1 layers do not make 2 stages"):
        equal(["block"], 2)


def test_alpa_on_submeshes_is_exact():
    """All partitions, all submeshes, with memory that depends on how many stages follow (arXiv 2201.12023, eq. 2-5)."""
    rng, infeasible = random.Random(11), 0
    for case in range(60):
        layers, (nodes, per_node) = rng.randint(2, 5), rng.choice([(1, 4), (2, 2), (3, 1), (2, 4)])
        sizes, devices, m = submeshes(nodes, per_node), nodes * per_node, rng.choice([1, 3, 20])
        work = [rng.randint(1, 40) for _ in range(layers)]
        kept = [rng.randint(1, 9) for _ in range(layers)]
        entry = np.array([0.0, *(rng.randint(0, 9) for _ in range(layers))])
        room = rng.choice([float("inf"), 8.0, 14.0, 30.0])
        waste = {size: rng.randint(0, 5) for size in sizes}

        def time(a, b, size, work=work, waste=waste):
            return round(12 * sum(work[a:b]) / size) + waste[size]

        def fits(a, b, size, s, kept=kept, room=room, m=m):
            return min(m, s) * sum(kept[a:b]) / size <= room

        def cost(s, layers=layers, sizes=sizes, time=time, fits=fits):
            cube = np.full((len(sizes), layers + 1, layers + 1), np.inf)
            for n, (a, b) in product(range(len(sizes)), combinations(range(layers + 1), 2)):
                cube[n, a, b] = time(a, b, sizes[n]) if fits(a, b, sizes[n], s) else np.inf
            return cube

        best = float("inf")
        for stages in range(1, min(layers, devices) + 1):
            for counts, chosen in product(partitions(layers, stages), product(sizes, repeat=stages)):
                ends = np.cumsum([0, *counts]).tolist()
                parts = list(zip(ends, ends[1:], chosen, strict=False))
                if sum(chosen) == devices and all(fits(a, b, n, stages - s) for s, (a, b, n) in enumerate(parts)):
                    times = [time(*part) for part in parts]
                    best = min(best, sum(times) + sum(entry[ends[:-1]]) + (m - 1) * max(times))
        arguments = {"beyond": lambda s, entry=entry: entry[:, None], "sizes": sizes, "devices": devices}
        if best == float("inf"):
            infeasible += 1
            with pytest.raises(Infeasible, match="no partition fits the memory, where stages hold"):
                alpa(cost, layers, range(1, min(layers, devices) + 1), m, **arguments)
            continue
        found = alpa(cost, layers, range(1, min(layers, devices) + 1), m, **arguments)
        assert found.cost == best, case
        ends = np.cumsum([0, *(count for count, _ in found.stages)]).tolist()
        times = [time(a, b, n) for a, b, (_, n) in zip(ends, ends[1:], found.stages, strict=False)]
        assert sum(n for _, n in found.stages) == devices
        assert sum(times) + sum(entry[ends[:-1]]) + (m - 1) * max(times) == best
    assert 0 < infeasible < 30


def test_submeshes_are_alpas():
    assert submeshes(1, 8) == (1, 2, 4, 8)
    assert submeshes(3, 4) == (1, 2, 4, 8, 12)
    with pytest.raises(BadInput, match="power of two"):
        submeshes(2, 6)


# Profiles


def test_named_partitions_of_a_profile_are_the_best_of_their_kind():
    rng = random.Random(3)
    for _ in range(12):
        factors = rng.choice([(), (1.0, 1.5, 0.75)])
        profile, m = random_profile(rng, 7, factors), rng.choice([1, 4, 9])
        limit = rng.choice([None, None, 60])
        costs = costs_of(profile, "single", 3, m, limit)
        every = [partitioned(costs, "", counts) for counts in partitions(7, 3)]
        fitting = [one for one in every if limit is None or max(one.need) <= limit]
        if not fitting:
            with pytest.raises(Infeasible):
                partition_by_name(costs, "alpa")
            continue
        found = {name: partitioned(costs, name, partition_by_name(costs, name)) for name in NAMES}
        assert found["alpa"].estimate == pytest.approx(min(one.estimate for one in fitting))
        assert limit is None or max(found["alpa"].need) <= limit
        assert max(found["balanced"].times) == pytest.approx(min(max(one.times) for one in every))
        assert max(found["memory"].need) == min(max(one.need) for one in every)


def test_partitions_count_the_memory_of_each_rank():
    """Where stages lie on other ranks than their own number, too."""
    rng, fitted = random.Random(8), 0
    for placement in ("single", "2,0,1") * 6:
        limits = tuple(rng.choice([40, 60, 90, 200]) for _ in range(3))
        costs = costs_of(random_profile(rng, 7), placement, 3, rng.choice([1, 4]), limits)
        every = [partitioned(costs, "", counts) for counts in partitions(7, 3)]
        shares = [max(need / room for need, room in zip(one.need, limits, strict=True)) for one in every]
        least = partitioned(costs, "memory", partition_by_name(costs, "memory")).need
        if min(shares) <= 1:  # else a split may be better that holds fewer microbatches
            assert max(need / room for need, room in zip(least, limits, strict=True)) == pytest.approx(min(shares))
        fitting = [one.estimate for one, share in zip(every, shares, strict=True) if share <= 1]
        if fitting:
            found = partitioned(costs, "alpa", partition_by_name(costs, "alpa"))
            assert (costs.fits(found.need), found.estimate) == (True, pytest.approx(min(fitting)))
            fitted += len(fitting) < len(every)
    assert fitted > 2


def test_a_split_that_holds_one_microbatch_is_found() -> None:
    """As full as in 1F1B, one layer on each of ranks 0 and 1 is emptiest; then the last rank cannot hold one microbatch."""
    held = [(1, 2, 1, 0), (0, 1, 1, 3), (3, 2, 1, 3), (0, 1, 0, 3), (1, 1, 0, 1), (0, 2, 1, 1)]
    layers = tuple(Layer(f"{i}", 4, 3, 3, 6, *row) for i, row in enumerate(held))
    profile, step = Profile("given", "six", layers, Link(3.0, 1.0), 1.0, None, {}, {}), Step(3, 2, memory=15)
    with pytest.raises(Infeasible):
        replace(step, partition=(1, 1, 4)).problem(profile)
    assert replace(step, partition="memory").problem(profile).layers == (1, 4, 1)


def test_all_to_alls_count_in_the_estimate_and_are_spread():
    """On a stream of their own: in the sum always, in the maximum where a rank's take longer than its work."""
    rng = random.Random(6)
    for placement in ("single", "single", "single", "vee"):
        profile, m = with_all_to_alls(random_profile(rng, 6), rng), rng.choice([1, 5, 30])
        costs = costs_of(profile, placement, 3 if placement == "single" else 2, m)
        found = {}
        for counts in partitions(6, costs.stages):
            ends = np.cumsum([0, *counts]).tolist()
            stages = [profile.layers[a:b] for a, b in zip(ends, ends[1:], strict=False)]
            work, beside = np.zeros(max(costs.routes[0]) + 1), np.zeros(max(costs.routes[0]) + 1)
            for rank, stage in zip(costs.routes[0], stages, strict=True):
                work[rank] += sum(c.F + c.B + c.W for c in stage)
                beside[rank] += sum(2 * c.all_to_all for c in stage)
            cuts = [i for i, (a, b) in enumerate(zip(costs.routes[0], costs.routes[0][1:], strict=False), 1) if a != b]
            sent = sum(2 * (1.0 + profile.layers[ends[i] - 1].output_bytes / 20.0) for i in cuts)
            found[counts] = work.sum() + beside.sum() + sent + (m - 1) * max(*work, *beside)
            assert partitioned(costs, "", counts).estimate == pytest.approx(found[counts])
        assert found[partition_by_name(costs, "alpa")] == pytest.approx(min(found.values()))
    layers = [Layer(f"block{i}", 1.0, 1.0, 1.0, 2.0, 1, 1, 1, 1, all_to_all=20.0 * (i < 4)) for i in range(8)]
    profile = Profile("estimated: by hand", "experts", tuple(layers), Link(0.0, 1000.0), 4.0, None, {}, {})
    costs = costs_of(profile, "single", 2, 16)
    assert partition_by_name(costs, "balanced") == (4, 4)
    assert partition_by_name(costs, "alpa") == (2, 6)  # 80 µs of all-to-alls on each, where 160 would be on one
    assert [one.layers for one in mesh_partitions(costs, 2, {2: 0.5}) if one.name == "alpa"] == [(2, 6)]


def test_bytes_of_a_stage_are_those_of_its_problem():
    """Also where two layers count one tensor, and where B keeps more for W than it frees."""
    rng = random.Random(4)
    for _ in range(10):
        what = ("held_until_B", "held_until_W", "held_from_B", "output_kept", "input_unneeded")
        profile = random_profile(rng, 6)
        profile = replace(profile, layers=tuple(replace(c, **{w: rng.randint(0, 9) for w in what}) for c in profile.layers))
        kept = costs_of(profile, "single", 2, 1).kept
        for a, b in combinations(range(7), 2):
            stage = {name: column[0] for name, column in StageMemory(profile.layers[a:b]).held([b - a]).items()}
            assert kept[a, b] == sum(stage.values())


@pytest.mark.parametrize(("placement", "ranks"), [("single", 3), ("vee", 2), ("loop", 2), ("mirror", 2)])
def test_a_rank_has_once_what_its_layers_share(placement, ranks):
    """What a partition needs is what its problem takes off the memory: tied layers on one rank have their parameters once,
    on two each has a copy; of passes, one runs at a time."""
    rng, stages = random.Random(9), len(parse_routes(placement, ranks)[0])
    for _ in range(8):
        rows = random_profile(rng, 6).layers
        tied = ((rng.randint(1, 4), (0, 5)), (rng.randint(1, 2), tuple(sorted(rng.sample(range(6), 3)))))
        layers = tuple(replace(c, parameter_bytes=c.parameter_bytes + 6, transient=rng.randint(0, 9)) for c in rows)
        profile = replace(random_profile(rng, 6), layers=layers, tied=tied)
        costs = costs_of(profile, placement, ranks, 1)
        for counts in partitions(6, stages):
            problem = profile.problem(ranks, 1 + (placement == "mirror"), placement, 10_000, layers=counts)
            beside = [10_000 - room for room in problem.capacity]
            taken = np.zeros(ranks)
            for stage, count in enumerate(counts):
                a = sum(counts[:stage])
                taken[costs.shares[:, stage] > 0] += costs.kept[a, a + count]
            assert partitioned(costs, "", counts).need == tuple(int(n) for n in taken + beside)
            if placement == "single":
                cuts = np.cumsum([0, *counts])
                assert partitioned(costs, "", counts).need == tuple(costs.bytes(s)[cuts[s], cuts[s + 1]] for s in range(3))


def test_submeshes_share_what_is_tied():
    rows = [Layer(f"l{i}", 10, 10, 10, 20, 2, 2, 100, 4) for i in range(4)]
    profile = Profile("measured", "tied", tuple(rows), Link(0.0, 100.0), 1.0, None, {}, {}, (), ((60, (0, 1)), (40, (1, 3))))
    assert spread_over(profile, (2, 2), (2, 2)).tied == ((30, (0, 1)),)
    found = spread_over(profile, (2, 2), (2, 2)).problem(2, 1, memory=1000)
    assert [1000 - room for room in found.capacity] == [100 - 30 + 8, 100 + 8]
    costs = costs_of(profile, "single", 4, 1)
    (one,) = [one for one in mesh_partitions(costs, 4, {4: 1.0}) if one.name == "equal"]
    assert (one.layers, one.devices, one.need) == ((4,), (4,), (100 - 15 - 10 + 4 * 2,))


def test_stages_that_share_a_rank_are_balanced_together():
    """With vee the first and the last stage share rank 0: the heavy output layer leaves rank 0 little else."""
    layers = [Layer(f"block{i}", 10, 10, 10, 20, 4, 4, 10, 8) for i in range(11)]
    head = Layer("head", 30, 30, 30, 60, 4, 4, 50, 8)
    profile = Profile("measured", "toy", (*layers, head), Link(0.0, 1.0), 2.0, None, {}, {})
    costs = costs_of(profile, "vee", 3, 8)
    loads = {}
    for counts in partitions(12, 6):
        times = partitioned(costs, "", counts).times
        loads[counts] = max(times[r] + times[5 - r] for r in range(3))
    counts = partition_by_name(costs, "alpa")
    assert loads[counts] == min(loads.values()) == 150
    assert partitioned(costs, "alpa", counts).estimate == 420 + 4 * 16 + 7 * 150  # stages 2 and 3 are neighbours on rank 2
    tight = costs_of(profile, "vee", 3, 8, max(partitioned(costs, "", partition_by_name(costs, "memory")).need))
    assert tight.fits(partitioned(tight, "alpa", partition_by_name(tight, "alpa")).need)


def test_shifts_move_one_layer():
    assert neighbours((2, 1)) == [(1, 2)]
    assert set(neighbours((2, 2, 1))) == {(1, 3, 1), (1, 2, 2), (3, 1, 1), (2, 1, 2)}


def test_layers_moved_between_two_partitions() -> None:
    assert moves_between((3, 2, 2, 1), (2, 2, 3, 1)) == [(0, 2, 1)]
    assert moves_between((5, 1, 1, 1), (2, 2, 2, 2)) == [(0, 1, 1), (0, 2, 1), (0, 3, 1)]
    assert moves_between((1, 3, 1, 3), (3, 1, 2, 2)) == [(1, 0, 2), (3, 2, 1)]
    assert moves_between((2, 2), (2, 2)) == []


@pytest.mark.slow
def test_no_partition_has_a_schedule_below_the_bound():
    """All partitions, each solved to the end; the bound must not be idle either."""
    rng, tight = random.Random(8), 0
    for case in range(10):
        placement, ranks = rng.choice([("single", 2), ("single", 3), ("vee", 2), ("loop", 2), ("mirror", 2)])
        stages = len(parse_routes(placement, ranks)[0])
        factors = rng.choice([(), tuple(rng.choice([1.0, 1.3, 1.7]) for _ in range(ranks))])
        profile, m = random_profile(rng, stages + 1, factors), rng.choice([1, 2, 3])
        if case % 2:
            profile = with_all_to_alls(profile, rng)
        for objective in ("makespan",) if case % 2 else ("makespan", "span"):
            best = None
            for counts in partitions(stages + 1, stages):
                problem = profile.problem(ranks, m, parse_routes(placement, ranks), None, objective, counts)
                result = solve_cp(problem, None, 0, 10.0)
                assert result.schedule is not None
                # For the span a later first pass can shorten a window, so a value may stay a little above its bound.
                assert 0 <= result.schedule.timeline().value - result.bound <= (2 if objective == "span" else 0), case
                best = result.bound if best is None else min(best, result.bound)
            bound = least_step(costs_of(profile, placement, ranks, m), objective)
            assert bound <= best
            tight += bound > 0.9 * best
    assert tight > 3


@pytest.mark.parametrize("placement", ["single", "vee", "loop"])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_every_partition_counts_what_ranks_wait_for(placement: str, seed: int) -> None:
    """More than the work of a rank, where times are whole, too; all partitions, each solved to the end."""
    rng = random.Random(seed)
    plain, m = random_profile(rng, 5), rng.choice([1, 2, 3])
    layers = tuple(replace(one, **{kind: float(rng.randint(1, 9)) for kind in "FBW"}) for one in plain.layers)
    profile = replace(plain, layers=layers)
    routes, even = parse_routes(placement, 2), ceil(m * sum(one.F + one.B + one.W for one in layers) / 2)

    def problems(of: Profile) -> list[Problem]:
        return [of.problem(2, m, routes, layers=counts) for counts in partitions(5, len(routes[0]))]

    bound = least_step(costs_of(profile, placement, 2, m), "makespan")
    assert bound > even
    assert bound <= min(solve_cp(one, None, 0, 10.0).bound for one in problems(profile))
    shorter = replace(profile, layers=tuple(replace(one, F=one.F + 0.3) for one in layers))  # by rounding
    best = min(solve_cp(one, None, 0, 10.0).bound for one in problems(shorter))
    assert least_step(costs_of(shorter, placement, 2, m), "makespan") <= best


def test_the_bound_of_every_partition_of_equal_layers() -> None:
    """On 2 ranks of two stages, F = BW = 1, L = 8 (SlackPipe's fixture, whose best is 34): rank 1 waits for F and BW of a
    layer, so (64 + 2) / 2. With BW = 2 on 8 ranks, L = 128 and 8 microbatches a rank's work is 384, and so is the way of one
    microbatch, which is behind 7 others' BW of a stage of 8 layers or more."""

    def bound(ranks: int, microbatches: int, layers: int, backward: float) -> int:
        each = tuple(Layer(f"l{i}", 1.0, 0.0, 0.0, backward, 0, 0, 0, 8) for i in range(layers))
        profile = Profile("given", "equal", each, Link(0.0, 1e12), 0.0, None, {}, {})
        return least_step(Step(ranks, microbatches, "loop", fused=True).costs(profile), "makespan")

    assert bound(2, 4, 8, 1.0) == 33
    assert bound(8, 8, 128, 2.0) >= 384 + 7 * 16


@pytest.mark.parametrize(("placement", "ranks"), [("single", 2), ("single", 3), ("vee", 2)])
@pytest.mark.parametrize("barriers", [1, 2])
def test_the_bound_of_every_partition_counts_shards_of_a_vocabulary(placement: str, ranks: int, barriers: int) -> None:
    """All partitions, each solved to the end. Shards that take as long as the layers raise it, and never too far."""
    rng, routes = random.Random(barriers), parse_routes(placement, ranks)
    stages, m = len(routes[0]), 2
    for factors in ((), (1.3, 1.0, 1.7)[:ranks]):
        profile, S, T = random_profile(rng, stages + 1, factors), rng.choice([9.5, 20.5]), rng.choice([0.0, 3.5, 11.0])
        times = [[round(one * factor) for factor in factors or (1,) * ranks] for one in (round(S), round(T))]
        problems = [profile.problem(ranks, m, routes, layers=one) for one in partitions(stages + 1, stages)]
        costs = Vocabulary(*times, broadcast=1, reduce=1, barriers=barriers)
        found = [solve_cp(with_vocabulary(one, costs), None, 0, 20.0, effort=3.0).schedule for one in problems]
        best = min(one.timeline().value for one in found if one is not None)
        parts = StageCosts.of(profile, routes, m, common=Common(S, T, barriers))
        whole = least_step(costs_of(profile, placement, ranks, m), "makespan")
        assert whole + m * (S - 1) <= least_step(parts, "makespan") <= best


@pytest.mark.parametrize(("placement", "ranks"), [("single", 2), ("single", 3), ("vee", 2)])
def test_the_bound_of_every_partition_knows_the_lengths_of_microbatches(placement: str, ranks: int) -> None:
    """Also where a long microbatch is alone, and where all are short: m times the layers' own time is above the best."""
    rng, tight = random.Random(3), 0
    stages = len(parse_routes(placement, ranks)[0])
    for lengths in ((0.3, 0.5), (0.25, 2.5, 0.5), (1.7, 1.2)):
        plain = random_profile(rng, stages + 1)
        layers = tuple(replace(one, F=100 * one.F, B=100 * one.B, W=100 * one.W) for one in plain.layers)
        profile = replace(plain, layers=layers, microbatch_factors=lengths)
        problems = [profile.problem(ranks, len(lengths), placement, layers=one) for one in partitions(stages + 1, stages)]
        assert not any(one.alike for one in problems)
        best = min(solve_cp(one, None, 0, 10.0).bound for one in problems)
        bound = least_step(costs_of(profile, placement, ranks, len(lengths)), "makespan")
        assert bound <= best
        tight += bound > 0.8 * best
        alike = least_step(costs_of(replace(profile, microbatch_factors=()), placement, ranks, len(lengths)), "makespan")
        assert alike > best or max(lengths) > 1
    assert tight


# Slow ranks


def test_a_slow_rank_gets_less():
    layers = tuple(Layer(f"layer{i}", 10, 10, 10, 20, 1, 1, 1, 1) for i in range(12))
    profile = Profile("measured", "toy", layers, Link(0.0, 1.0), 4.0, None, {}, {}, (1.0, 2.0, 1.0))
    problem = profile.problem(3, 4)
    assert problem.layers == (5, 2, 5)
    durations = {problem.names[i]: int(t) for i, t in enumerate(problem.passes.duration)}
    assert (durations["0F0"], durations["1F0"], durations["1W3"], durations["2B1"]) == (50, 40, 40, 50)
    mirrored = profile.problem(3, 4, ((0, 1, 2), (2, 1, 0)), layers=(4, 4, 4))
    assert {int(mirrored.passes.duration[mirrored.index[name]]) for name in ("1F0", "1F1")} == {80}
    with pytest.raises(BadInput, match=r"knows how fast 3 ranks are \(field 'rank_factors'\), not 4"):
        profile.problem(4, 4)


def test_rank_factors_are_kept_and_checked(tmp_path):
    path = tmp_path / "p.json"
    profile = random_profile(random.Random(1), 4, (1.0, 1.25))
    profile.save(path)
    assert Profile.load(path) == profile
    body = json.loads(path.read_text())
    for wrong in ([1, 0], [1, "x"], 3, [True, 1]):
        path.write_text(json.dumps(body | {"rank_factors": wrong}))
        with pytest.raises(BadInput, match=r"field 'rank_factors'(\[\d\])? (is 0|has a wrong type)"):
            Profile.load(path)
    del body["rank_factors"]
    path.write_text(json.dumps(body))
    assert Profile.load(path) == replace(profile, rank_factors=())


def test_lengths_of_microbatches_are_kept_and_checked(tmp_path):
    """They make steps of as many microbatches alone; a file without them is as before there were such."""
    path = tmp_path / "p.json"
    plain = random_profile(random.Random(1), 4)
    profile = replace(plain, microbatch_factors=(1.0, 2.5, 0.5), rank_factors=(1.0, 1.3))
    profile.save(path)
    assert Profile.load(path) == profile
    problem = profile.problem(2, 3)
    assert problem == replace(profile, microbatch_factors=()).problem(2, 3).scaled((1.0, 2.5, 0.5), profile.link.latency)
    known = r"knows how long 3 microbatches are \(field 'microbatch_factors'\), not 4"
    with pytest.raises(BadInput, match=known):
        profile.problem(2, 4)
    body = json.loads(path.read_text())
    for wrong in ([1, 0], [1, "x"], 3):
        path.write_text(json.dumps(body | {"microbatch_factors": wrong}))
        with pytest.raises(BadInput, match=r"field 'microbatch_factors'(\[\d\])? (is 0|has a wrong type)"):
            Profile.load(path)
    plain.save(path)
    assert "microbatch_factors" not in json.loads(path.read_text())


# Submeshes


def transformer(capacity: int | None = None) -> Profile:
    block = Layer("block", 100, 110, 90, 195, 40, 60, 120, 1000)
    layers = [replace(block, name=f"block{i}") for i in range(6)]
    ends = Layer("embedding", 2, 0, 4, 4, 0, 4, 300, 1000), Layer("head", 220, 230, 200, 420, 90, 30, 300, 8)
    return Profile("measured", "toy", (ends[0], *layers, ends[1]), Link(1.0, 400.0), 4.0, capacity, {}, {})


def test_a_layer_on_several_devices():
    profile = transformer()
    assert on_devices(profile.layers, profile.link, 1) == profile.layers
    block = on_devices(profile.layers, profile.link, 4)[1]
    ring = 2 * 3 * (1.0 + 1000 / 4 / 400)  # 2 (d − 1) messages of a d-th of the output
    times = [getattr(block, kind) for kind in ("F", "B", "W")]
    assert times == pytest.approx([25 + 2 * ring, 27.5 + 2 * ring, 22.5])
    assert (block.held_until_B, block.held_until_W, block.parameter_bytes, block.output_bytes) == (10, 15, 30, 1000)
    (block,) = on_devices((replace(transformer().layers[1], buffer_bytes=9),), profile.link, 2, {2: 0.8})
    assert (block.buffer_bytes, block.begins) == (5, False)
    assert type(block.begins) is bool  # as files have it
    assert on_devices(profile.layers, profile.link, 2)[0].B == 0  # an embedding has no input gradient to wait for
    forward = [on_devices(profile.layers, profile.link, 2)[-1].F, on_devices(profile.layers, profile.link, 2, {2: 0.8})[1].F]
    assert forward == pytest.approx([110 + 2 * 2 * (1.0 + 8 / 2 / 400), 62.5])
    with pytest.raises(BadInput, match="no efficiency is given for 4 devices"):
        on_devices(profile.layers, profile.link, 4, {2: 0.9})


def test_submeshes_beat_equal_ones_and_make_a_problem():
    profile = transformer()
    plain, best = mesh_partitions(costs_of(profile, "single", 8, 16), 4)
    assert len(set(plain.devices)) == 1
    assert sum(best.devices) == sum(plain.devices) == 8
    assert best.estimate < plain.estimate
    wide = spread_over(profile, best.layers, best.devices)
    assert wide.source.startswith("estimated: ")
    problem = wide.problem(len(best.layers), 16, layers=best.layers)
    for stage, time in enumerate(best.times):
        passes = [int(problem.passes.duration[problem.index[f"{stage}{kind}0"]]) for kind in "FBW"]
        assert sum(passes) == pytest.approx(time, abs=1.5)


def test_submeshes_keep_to_the_memory():
    free = mesh_partitions(costs_of(transformer(), "single", 8, 16), 4, {2: 0.9, 4: 0.6})[1]
    room = int(0.8 * max(free.need))
    tight = mesh_partitions(costs_of(transformer(), "single", 8, 16, room), 4, {2: 0.9, 4: 0.6})[1]
    assert max(tight.need) <= room
    assert tight.estimate > free.estimate
    with pytest.raises(Infeasible):
        mesh_partitions(costs_of(transformer(), "single", 8, 16, 100), 4)
    with pytest.raises(BadInput, match="8 devices are not whole nodes of 3"):
        mesh_partitions(costs_of(transformer(), "single", 8, 16), 3)
    with pytest.raises(BadInput, match="8 devices are not whole nodes of 0"):
        mesh_partitions(costs_of(transformer(), "single", 8, 16), 0)
    with pytest.raises(BadInput, match="placement single"):
        mesh_partitions(costs_of(transformer(), "vee", 4, 16), 2)


# The command


@pytest.fixture
def measured(tmp_path):
    path = tmp_path / "profile.json"
    transformer(20_000).save(path)
    return str(path)


def test_a_profile_shows_its_partitions(measured, capsys):
    assert main(["show", measured, "--ranks", "3"]) == 0
    shown = capsys.readouterr().out
    assert "against equal" in shown
    assert "m = 12" in shown
    assert "estimate" not in shown  # Alpa's sum is not of the step that runs
    assert "embedding … block" in shown
    assert main(["show", measured, "--ranks", "3", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in body["partitions"]] == list(NAMES)
    costs = Step(2, 8, "vee", memory="4KB").costs(transformer(20_000))
    assert "with one microbatch" in partitions_as_text(costs, named_partitions(costs))


def saved_on_submeshes(path, microbatches, scaling=None):
    """Alpa's partition on two nodes of four devices, in a file."""
    costs = Step(8, microbatches).costs(transformer(20_000))
    found = mesh_partitions(costs, 4, scaling)[1]
    Partition("toy", "single", found.layers, found.devices, scaling).save(path)
    return Partition.load(path)


def test_solve_takes_a_partition(measured, tmp_path, capsys):
    out, schedule = str(tmp_path / "partition.json"), str(tmp_path / "schedule.json")
    step = ["solve", measured, "--microbatches", "4", "--effort", "0.1", "-o", schedule]
    for text, layers in (("2,3,3", (2, 3, 3)), ("equal", (3, 2, 3)), ("balanced", (4, 3, 1))):
        assert main([*step, "--ranks", "3", "--partition", text]) == 0
        assert Schedule.load(schedule).problem.layers == layers
    scaled = saved_on_submeshes(out, 32, {2: 0.9, 4: 1.0})
    assert (sum(scaled.devices), scaled.scaling) == (8, {2: 0.9, 4: 1.0})
    best = saved_on_submeshes(out, 4)
    assert len(best.layers) < 8
    assert main([*step, "--ranks", str(len(best.layers)), "--partition", out]) == 0
    problem = Schedule.load(schedule).problem
    assert (problem.layers, problem.source) == (best.layers, "estimated: measured, spread over submeshes: toy")
    capsys.readouterr()
    for ranks, text, line in (
        ("8", out, f"it has {len(best.layers)} stages, not 8"),
        ("3", "3,3", "does not split 8 layers into 3 stages"),
        ("3", "even", "partition 'even': not auto, equal, balanced"),
        ("3", "none.json", "none.json: no such file"),
    ):
        assert main([*step, "--ranks", ranks, "--partition", text]) == 2
        assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--ranks", "9"], "8 layers do not make 9 stages"),
        (["--ranks", "0"], "ranks: at least 1"),
        (["--ranks", "2", "--microbatches", "-1"], "microbatches: at least 1"),
        (["--json"], "--json: is of no use for"),
    ],
)
def test_bad_use_is_one_line(measured, capsys, arguments, line):
    assert main(["show", measured, *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("5, 5,6", (5, 5, 6)),
        ("4×13", (4,) * 13),
        ("5 4×6 5", (5, 4, 4, 4, 4, 4, 4, 5)),
        ("5,4x2", (5, 4, 4)),
        ("Et*3|t*4|t*2L", (4, 4, 3)),
        ("Ettt|(tt|)*29,m|L", (4, *[2] * 29, 1, 1)),  # of Megatron's own documentation
        ("E,t*3|(t*4|)*2 t,L", (4, 4, 4, 2)),
        ("E,t*10,m*3,L*4", (1, 10, 3, 4)),
        ("Ett", (3,)),
    ],
)
def test_layers_a_stage_as_people_write_them(text, layers):
    assert parse_partition(text) == layers


@pytest.mark.parametrize("text", ["5,,5", "9|2", "5×", "t||t", "|t", "((t|)*2t|)*2", "Et*x|L", "t*99999|t", "", "m8"])
def test_other_text_is_no_partition(text):
    with pytest.raises(BadInput, match=rf"partition '{re.escape(text)}': not auto, .* Megatron's layout such as"):
        parse_partition(text)


def test_what_export_says_to_megatron_is_a_partition():
    counts = (3, 2, 2, 4)
    assert parse_partition(layout_of("E" + "t" * 9 + "L", counts, 4)) == counts
    assert parse_partition(counted(counts)) == counts


def test_partition_files_name_the_field(tmp_path):
    path = tmp_path / "p.json"
    Partition("toy", "single", (2, 1), (1, 2), {2: 0.5}).save(path)
    body = json.loads(path.read_text())
    for change, line in (
        ({"layers": [2, 0]}, "field 'layers'"),
        ({"devices": [1]}, "field 'devices'"),
        ({"scaling": 3}, "field 'scaling'"),
        ({"scaling": {"2": 2}}, "field 'scaling'"),
    ):
        path.write_text(json.dumps(body | change))
        with pytest.raises(BadInput, match=line):
            Partition.load(path)


def test_spans():
    assert spans([1, 2, 4])[0].tolist() == [float("inf"), 1, 3, 7]


def test_where_ranks_hold_several_stages_their_work_is_balanced():
    """Costs 1 to 8 on a V of two ranks: 2,1,2,3 gives 18 to both; balancing stages alone leaves 15 and 21."""
    costs, routes = [float(c) for c in range(1, 9)], ((0, 1, 1, 0),)
    found = balanced_ranks(costs, routes)
    cuts = [sum(found[:i]) for i in range(5)]
    work = [0.0, 0.0]
    for stage, rank in enumerate(routes[0]):
        work[rank] += sum(costs[cuts[stage] : cuts[stage + 1]])
    ideal = min(max(sum(costs[:a]) + sum(costs[c:]), sum(costs[a:c])) for a in range(1, 6) for c in range(a + 2, 8))
    assert max(work) == ideal
    assert balanced_ranks(costs, ((0, 1, 2),)) == balanced(costs, 3)
    assert balanced_ranks([1.0] * 8, ((0, 1, 1, 0),)) == (2, 2, 2, 2)


def with_ends(
    blocks: int, embedding: float, head: float, split: tuple[int, int, int], capacity: int | None = None
) -> Profile:
    """So many like blocks between an embedding, which has a W of so many µs alone, and an output layer of so many blocks."""
    F, B, W = split
    block = Layer("block", F, B, W, B + W, 4, 4, 10, 8)
    first = Layer("embedding", 2, 0, embedding, embedding, 0, 1, 30, 8)
    last = Layer("head", F * head, B * head, W * head, (B + W) * head, 3, 3, 30, 8)
    layers = (first, *(replace(block, name=f"block{i}") for i in range(blocks)), last)
    return Profile("measured", "toy", layers, Link(2.0, 1000.0), 2.0, capacity, {}, {})


@pytest.mark.parametrize(
    ("placement", "ranks", "microbatches", "profile", "gain"),
    [
        ("loop", 2, 2, with_ends(8, 80, 1, (100, 100, 100)), True),
        ("loop", 4, 4, with_ends(19, 8, 1, (100, 110, 90)), True),
        ("loop", 4, 8, with_ends(16, 8, 1, (100, 120, 70)), True),
        ("vee", 4, 8, with_ends(10, 320, 1, (100, 120, 70)), True),
        ("loop", 4, 12, with_ends(16, 8, 3.2, (100, 110, 90)), False),
        ("vee", 4, 8, with_ends(16, 80, 2, (100, 100, 100)), False),
        ("loop4", 2, 4, with_ends(8, 320, 3.2, (100, 110, 90)), False),
    ],
)
@pytest.mark.slow
def test_unless_told_no_split_is_longer_than_the_equal_one(
    placement: str, ranks: int, microbatches: int, profile: Profile, gain: bool
) -> None:
    """Evening the ranks' work alone is up to 6 % longer where that changes which rank is busiest, not how busy it is."""
    costs = costs_of(profile, placement, ranks, microbatches)
    evened, usual = balanced_ranks(costs.times, costs.routes), partition_by_name(costs, "equal")

    def value(layers: tuple[int, ...] | None) -> int:
        step = (ranks, microbatches, placement, None, "makespan", layers)
        return int(solve(profile.problem(*step), effort=0.1).timeline().value)

    found = profile.problem(ranks, microbatches, placement).layers
    assert found == partition_by_name(costs, "balanced")
    assert value(found) <= min(value(usual), value(evened))
    assert (value(evened) > value(usual)) == gain


def test_an_equal_split_that_does_not_fit_is_not_taken():
    """Layers 0 and 7 keep much; equal stages lay both on one rank."""
    plain = with_ends(8, 80, 1, (100, 100, 100))
    layers = tuple(replace(one, held_until_W=500) if i in (0, 7) else one for i, one in enumerate(plain.layers))
    profile = replace(plain, layers=layers)
    costs = costs_of(profile, "loop", 2, 2)
    usual, evened = partition_by_name(costs, "equal"), balanced_ranks(costs.times, costs.routes)
    needs = {one: max(partitioned(costs, "", one).need) for one in (usual, evened)}
    assert profile.problem(2, 2, "loop").layers == usual
    assert needs[evened] < needs[usual]
    assert profile.problem(2, 2, "loop", needs[evened]).layers == evened


def test_a_greedy_step_is_one_and_longer_ones_add_the_busiest_rank():
    """On one rank it is the work; on two it can be counted: stage times 1, 1 and two microbatches."""
    layers = tuple(Layer(f"layer{i}", 1, 1, 1, 2, 1, 1, 1, 1) for i in range(2))
    profile = Profile("measured", "toy", layers, Link(0.0, 1000.0), 2.0, None, {}, {})
    for microbatches, right in ((1, 5), (2, 7), (4, 13), (8, 25)):
        costs = costs_of(profile, "single", 2, microbatches)
        assert greedy_step(costs, (1, 1), costs.times) == pytest.approx(right, abs=0.1)
    alone = costs_of(profile, "0,0", 1, 3)
    assert greedy_step(alone, (1, 1), alone.times) == 18
