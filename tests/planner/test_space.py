"""The space of layouts: who is in it, what cannot fit, what is dominated."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import zbsolve
from benchmarks.planner import rows_in
from zbsolve.features.cuts import cuts_of
from zbsolve.features.slices import widest_slice
from zbsolve.features.vocabulary import on_stages
from zbsolve.partition.layer import layer_ranges
from zbsolve.planner import CLUSTERS, Cluster, Layout, Shape, layout_profile
from zbsolve.planner.bounds.layout_rules import dominators
from zbsolve.planner.candidate import Unsolved, step_of
from zbsolve.planner.costs.columns import Costs
from zbsolve.planner.costs.layer_formulas import after_exchange
from zbsolve.planner.costs.rank_costs import costs_of, fullest, least_bytes, roles
from zbsolve.planner.costs.sharding import shards_of
from zbsolve.planner.layout import (
    FULL,
    LOOP,
    NO_OFFLOAD,
    NONE,
    OFFLOADS,
    SELECTIVE,
    SHARDED,
    SINGLE,
    VEE,
    WHOLE,
    table_of,
)
from zbsolve.planner.space import SLICES, layouts
from zbsolve.util.errors import BadInput, Infeasible

from ..support.partitions import partitions

A100, H100 = CLUSTERS["a100"], CLUSTERS["h100"]
SMALL = Shape.gpt(1024, 8, 6)
PLACED = [(1, 1, SINGLE), (2, 1, SINGLE), (3, 1, SINGLE), (2, 2, LOOP), (2, 2, VEE), (3, 2, VEE), (2, 3, LOOP)]
# Sizes as they are published (2407.21783, Table 3), sequences as the recipes have them.
LLAMA = {
    "LLAMA3_8B": Shape("llama3-8b", 32, 4096, 32, 8, 128, 14_336, 8192, 128_256, gated=True, fused=True),
    "LLAMA3_70B": Shape("llama3-70b", 80, 8192, 64, 8, 128, 28_672, 8192, 128_256, gated=True, fused=True),
    "LLAMA3.1_405B": Shape("llama3-405b", 126, 16_384, 128, 8, 128, 53_248, 8192, 128_256, gated=True, fused=True),
}
DENSE = [row for row in rows_in("megatron-bridge.csv") if row["model"] in LLAMA and row["cp"] == "1"]


def published_rows(row: dict[str, str], cluster: Cluster) -> tuple[Layout, dict[str, int]]:
    """The layouts that a row of the table may mean, and its numbers. Rows without FSDP shard optimizer states."""
    number = {name: int(row[name] or 1) for name in ("gpus", "gbs", "mbs", "tp", "pp", "vp", "ga")}
    table = layouts(LLAMA[row["model"]], number["gpus"], number["gbs"], cluster)
    dp = number["gpus"] // number["tp"] // number["pp"]
    zero = 3 if row["fsdp"] == "1" else 1
    wanted = {"dp": dp, "tp": number["tp"], "pp": number["pp"], "chunks": number["vp"], "size": number["mbs"], "zero": zero}
    return table.rows(np.logical_and.reduce([getattr(table, name) == value for name, value in wanted.items()])), number


@pytest.mark.parametrize("row", DENSE, ids=lambda row: f"{row['system']}-{row['model']}")
def test_published_configurations_are_legal(row: dict[str, str]) -> None:
    """Megatron-Bridge's performance summary, 25.11: dense models without context parallelism."""
    here, number = published_rows(row, H100)
    assert len(here.dp)
    assert set(here.count.tolist()) == {number["ga"]}


@pytest.mark.parametrize("row", [row for row in DENSE if row["gpus"] == "8" and row["system"] in ("B200", "H100")])
@pytest.mark.slow
def test_no_published_configuration_beats_the_plan(row: dict[str, str]) -> None:
    """By the same numbers, in Megatron's order, as far as it fits the memory: with whole vocabulary and sequences, whatever
    it makes again. The bound over the space holds for it too."""
    cluster, shape = H100 if row["system"] == "H100" else CLUSTERS["b200"], LLAMA[row["model"]]
    here, number = published_rows(row, cluster)
    values = []
    for layout in map(
        here.row,
        np.flatnonzero(
            (here.vocabulary == WHOLE) & (here.slices == 1) & (here.offload == NO_OFFLOAD) & (here.placement != VEE)
        ),
    ):
        step, profile = step_of(layout, cluster.memory, fused=True), layout_profile(shape, layout, cluster)
        try:
            unsolved = Unsolved.of(shape, layout, cluster, step, profile)
            schedule = zbsolve.solve(unsolved.problem, method="1f1b" if layout.chunks == 1 else "interleaved")
        except Infeasible:
            continue
        values.append(unsolved.solved(schedule).value)
    found = zbsolve.plan(shape, number["gpus"], number["gbs"], cluster, effort=0.2)
    assert values
    assert found.bound <= found.best.value <= min(values)


def test_there_are_published_configurations() -> None:
    assert len(DENSE) == 8


def test_every_layout_is_legal_and_none_is_missing() -> None:
    """All numbers below 13 are tried: those that are legal are the table, each once."""
    table, devices, batch = layouts(SMALL, 12, 24, A100), 12, 24
    rows = {table.row(i) for i in range(len(table.dp))}
    assert len(rows) == len(table.dp)
    splits = {
        (dp, tp, pp, size)
        for dp, tp, pp, size in product(range(1, 13), (1, 2, 4, 8), range(1, 13), range(1, 25))
        if dp * tp * pp == devices and pp <= SMALL.layers + 2 and batch % (dp * size) == 0
    }
    assert {(one.dp, one.tp, one.pp, one.size) for one in rows} == splits
    assert all(one.dp * one.size * one.count == batch for one in rows)
    for dp, tp, pp, size in splits:
        mine = [one for one in rows if (one.dp, one.tp, one.pp, one.size) == (dp, tp, pp, size)]
        places = 1 + (0 if pp == 1 else (8 // pp - 1) + (2 * pp <= 8))
        sliced = len(SLICES) if size == 1 and pp > 1 else 0
        ways = sliced + (len(OFFLOADS) if pp > 1 else 1)  # slices offload nothing
        each, by_stage = places * 3 * (1 + (tp > 1)), pp > 1 and dp > 1  # ZeRO 2 by stage: whole vocabularies and sequences
        full = ((4 if dp > 1 else 1) - by_stage) * (1 + (pp > 1)) * ways
        assert len(mine) == each * (full + by_stage * len(OFFLOADS))
        assert sum(one.vocabulary == SHARDED for one in mine) == (each * full // 2 if pp > 1 else 0)
        assert all(one.vocabulary == WHOLE and one.slices == 1 for one in mine if one.gathers_by_stage)
        assert {one.slices for one in mine} == ({1, *SLICES} if sliced else {1})
        assert {one.offload for one in mine} == (set(range(len(OFFLOADS))) if pp > 1 else {NO_OFFLOAD})
    assert not layouts(SMALL, devices, batch, replace(A100, copies=None)).offload.any()


@pytest.mark.parametrize(
    ("devices", "batch", "said"),
    [
        (0, 8, "devices 0, batch 8: at least 1 of each is needed"),
        (1009, 512, "batch 512: fewer sequences than 1009 devices make replicas: there are 1009 at least"),
        (1009, 2000, "batch 2000: no split of 1009 devices has a number of replicas that divides it: there are 1009"),
        (64, 1, None),
    ],
)
def test_what_has_no_layout_is_said(devices: int, batch: int, said: str | None) -> None:
    if said is None:
        assert (layouts(SMALL, devices, batch, A100).dp == 1).all()
        return
    with pytest.raises(BadInput) as error:
        layouts(SMALL, devices, batch, A100)
    assert str(error.value).startswith(said)


def test_the_fullest_rank_against_all_distributions() -> None:
    """Blocks on ranks whole: the least maximum, over every way to lay them."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        blocks, number = int(rng.integers(1, 7)), rng.integers(0, 3, 4)
        number[0] = max(1, number[0])
        fixed, unit, first = rng.integers(0, 40, 4), int(rng.integers(1, 20)), int(rng.integers(0, 9))
        ranks = np.repeat(fixed, number)
        ways = (n for n in product(range(blocks + 1), repeat=len(ranks)) if sum(n) == blocks)
        best = min(int((np.array(n) * unit + ranks + first * (np.array(n) > 0)).max()) for n in ways)
        assert fullest(blocks, np.array([unit]), fixed[:, None], number[:, None], first)[0] == best


@pytest.mark.parametrize(("pp", "chunks", "placement"), PLACED)
@pytest.mark.parametrize(
    ("recompute", "zero", "tied", "vocabulary"),
    [
        (NONE, 0, False, WHOLE),
        (SELECTIVE, 1, True, WHOLE),
        (FULL, 3, True, WHOLE),
        (NONE, 0, False, SHARDED),
        (FULL, 3, True, SHARDED),
    ],
)
def test_the_least_memory_is_that_of_some_partition(
    pp: int, chunks: int, placement: int, recompute: int, zero: int, tied: bool, vocabulary: int
) -> None:
    """Of every partition the fullest rank when one microbatch is on all stages, with a sharded vocabulary while its logits
    are made; below it no step is built."""
    if pp == 1:
        vocabulary = WHOLE
    layout = Layout(2, 2, pp, chunks, placement, 1, 4, recompute, 1, zero, vocabulary=vocabulary)
    shape = replace(SMALL, tied=tied)
    profile = replace(layout_profile(shape, layout, A100), capacity=None)
    step = replace(step_of(layout, 0), memory=None)
    costs, needs = step.costs(profile), []
    shard = None if vocabulary == WHOLE else profile.vocabulary.passes(pp, profile.link)
    logits = 0 if shard is None else 2 * shard.held_hidden + shard.held_shard
    for counts in partitions(shape.stages, layout.stages):
        fixed, moving = costs.memory.of_ranks(counts, costs.routes)
        kept = np.zeros(pp)
        for stage, here in enumerate(layer_ranges(counts)):
            kept[costs.routes[0][stage]] += costs.memory.after_f(here.start, here.stop)
        needs.append((max(np.array(fixed) + np.array(moving) + kept + logits), counts))
    least = int(least_bytes(costs_of(shape, table_of([layout]), A100), table_of([layout]))[0])
    need, counts = min(needs)
    assert least <= need
    assert need <= 1.25 * least  # every stage needs a layer here, and a rank without blocks no transient
    with pytest.raises(Infeasible):
        replace(step, partition=counts, memory=least - 1).problem(profile)


def test_costs_are_those_of_the_profiles() -> None:
    table = layouts(SMALL, 8, 16, A100)
    costs = costs_of(SMALL, table, A100)
    for i in np.random.default_rng(1).choice(len(table.dp), 40, replace=False).tolist():
        profile, slices = layout_profile(SMALL, table.row(i), A100), int(table.slices[i])
        part = widest_slice(profile, cuts_of(slices, profile.layers))
        shard, costs_of_shard = costs.common, part.vocabulary
        assert (costs_of_shard is None) == (table.vocabulary[i] == WHOLE)
        if costs_of_shard is not None:
            profile, _ = on_stages(profile, "sharded", int(table.pp[i]))
            part, said = on_stages(part, "sharded", int(table.pp[i]))
            one = costs_of_shard.passes(int(table.pp[i]), profile.link)
            assert [shard.S[i], shard.T[i], shard.lookup[i]] == [slices * one.S, slices * one.T, one.lookup]
            assert shard.gap[i] == one.broadcast + one.S + one.statistics + one.reduce
            assert shard.held[i] == 2 * one.held_hidden + one.held_shard
            assert shard.transient[i] == said.transient
            assert 0 <= profile.states * said.parameter_bytes - shard.states[i] < 1
        for times, layer in zip(
            (costs.embedding, costs.block, costs.head), (profile.layers[j] for j in (0, 1, -1)), strict=True
        ):
            extra = [0, 0, 0] if layer.slice_extra is None else [getattr(layer.slice_extra, one)[0] for one in "FBW"]
            whole = zip((layer.F, layer.B, layer.W), extra, strict=True)
            assert [column[i] for column in times] == [time + slices * more for time, more in whole]
        block, head = profile.layers[1], profile.layers[-1]
        if table.offload[i] == NO_OFFLOAD:
            for kept in ((costs.kept.moment, costs.kept.head_moment), (costs.kept.stays, costs.kept.head_stays)):
                assert kept[0][i] == block.held_until_B + block.held_until_W
                assert kept[1][i] == head.held_until_B + head.held_until_W
        beside, layout = 0.0, table.row(i)
        if layout.gathers_by_stage:  # parameters, and twice as many bytes of gradients
            beside = {NO_OFFLOAD: 3.0}.get(layout.offload, 1.0) if layout.placement == SINGLE else 0.0
            assert costs.from_F[i] == (layout.placement != SINGLE) * block.parameter_bytes
            assert profile.gradients == 2
        states = profile.states / shards_of(layout) + beside
        assert 0 <= states * block.parameter_bytes - costs.states[i] < 1
        if table.pp[i] > 1:
            assert costs.sent[i] == slices * round(profile.link.message(part.layers[1]))
        assert costs.transient[i] == part.layers[1].transient
        assert costs.waiting[i] == 2 * part.layers[1].output_bytes


def test_roles_are_those_of_placements() -> None:
    for pp, chunks, placement in PLACED:
        layout = Layout(1, 1, pp, chunks, placement)
        route = zbsolve.Step(pp, 1, layout.spot).routes[0]
        last = len(route) - 1
        seen = []
        for rank in range(pp):
            mine = [stage for stage, home in enumerate(route) if home == rank]
            sends = sum(stage < last and route[stage + 1] != rank for stage in mine)
            sends += sum(stage > 0 and route[stage - 1] != rank for stage in mine)
            ends = sum((stage > 0) + (stage < last) for stage in mine)
            seen.append((int(0 in mine), int(last in mine), sends, ends))
        on = roles(table_of([layout]))
        said = [
            (int(on.embedding[role, 0]), int(on.head[role, 0]), int(on.sends[role, 0]), int(on.ends[role, 0]))
            for role in range(4)
            for _ in range(int(on.number[role, 0]))
        ]
        assert sorted(said) == sorted(seen)


@pytest.mark.slow
def test_what_dominates_is_never_worse() -> None:
    """Of random dominated layouts: with any partition and any order the value, and the memory, are no better."""
    shape = SMALL
    table = layouts(shape, 16, 16, A100)
    costs = costs_of(shape, table, A100)
    by = dominators(shape, table, A100, costs)
    assert (by[by[by >= 0]] == -1).all()  # a dominator is not dominated itself
    rng = np.random.default_rng(2)
    some = rng.choice(np.flatnonzero((by >= 0) & (table.pp > 1)), 12, replace=False)
    for i in some.tolist():
        mine, better = table.row(i), table.row(int(by[i]))
        counts = next(partitions(shape.stages, mine.stages))
        found = []
        for layout in (mine, better):
            problem = step_of(layout, 1 << 45, counts).problem(layout_profile(shape, layout, A100))
            found.append((problem, float(after_exchange(1e9, layout, A100))))
        (worse, behind), (best, less) = found
        order = zbsolve.solve(worse, method="greedy", effort=0.01)
        same = zbsolve.Schedule(best, {name: order.order[name] for name in best.streams}, ())
        assert same.timeline().makespan + less <= order.timeline().makespan + behind
        assert all(a <= b for a, b in zip(same.timeline().peak_bytes, order.timeline().peak_bytes, strict=True))
        assert float(costs.states[by[i]]) <= float(costs.states[i])


def test_zero_1_leaves_nothing_to_zero_0() -> None:
    """It moves as much and updates less (1910.02054, section 7)."""
    table = layouts(SMALL, 16, 16, A100)
    costs: Costs = costs_of(SMALL, table, A100)
    by = dominators(SMALL, table, A100, costs)
    replicas = table.dp > 1
    assert (by[replicas & (table.zero == 0)] >= 0).all()
    assert ((by < 0) & (table.zero == 1)).any()
