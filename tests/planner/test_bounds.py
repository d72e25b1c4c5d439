"""Bounds of layouts against exhaustive search over partitions and schedules, and against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import zbsolve
from zbsolve import Infeasible, Layer, Link, Profile
from zbsolve.features.vocabulary import ShardCosts, ShardPasses, VocabularyCosts, without_vocabulary
from zbsolve.partition.layer import HostLink
from zbsolve.planner import CLUSTERS, SHAPES, Cluster, Layout, Shape, layout_profile
from zbsolve.planner.bounds.bound_row import bound_rows, chain_bounds
from zbsolve.planner.bounds.idle_kernels import before_backward, behind_forward
from zbsolve.planner.bounds.layout_rules import MEMORY, NEVER, RULES, pipeline_bounds, work_bounds
from zbsolve.planner.bounds.memory_kernels import kept_for
from zbsolve.planner.candidate import Unsolved, step_of
from zbsolve.planner.costs.columns import Common, Costs, Exchanges, Part
from zbsolve.planner.costs.layer_formulas import Times
from zbsolve.planner.costs.offload import copies_of, kept_of
from zbsolve.planner.costs.rank_costs import costs_of, least_bytes
from zbsolve.planner.costs.sharding import gathered_of, replicas_of, shards_of
from zbsolve.planner.layout import (
    FULL,
    FULL_OFFLOAD,
    HALF_OFFLOAD,
    LOOP,
    NO_OFFLOAD,
    SELECTIVE,
    SHARDED,
    SINGLE,
    VEE,
    WHOLE,
    table_of,
)
from zbsolve.planner.space import layouts
from zbsolve.util.kernels import kernel
from zbsolve.verifier import verify

from ..support import exact_streams
from ..support.exhaustive import optimum
from ..support.partitions import partitions
from ..support.plans import layout_bounds

A100 = CLUSTERS["a100"]
SMALL = Shape.gpt(1024, 8, 6)
NO_MEMORY = 10**9
LITTLE = (24 * 10**9, 28 * 10**9)  # for GPT 18.4B on 8 ranks
GRADIENTS = SMALL  # whose gradients are twice as many bytes as its parameters
# Ranks, chunks, placement, microbatches, blocks: what exhaustive search can do.
CASES = [
    *[(1, 1, SINGLE, 2, 2), (2, 1, SINGLE, 2, 2), (2, 1, SINGLE, 3, 1), (2, 1, SINGLE, 2, 4), (3, 1, SINGLE, 2, 2)],
    *[(3, 1, SINGLE, 2, 3), (2, 2, VEE, 2, 2), (2, 2, VEE, 1, 4), (2, 2, LOOP, 2, 2), (2, 2, LOOP, 1, 4)],
]
EXCHANGED = [(1, 1, SINGLE, 2, 2), (2, 1, SINGLE, 2, 2), (3, 1, SINGLE, 1, 2), (2, 2, VEE, 1, 3), (2, 2, LOOP, 1, 3)]
GATHERED = [*EXCHANGED[1:4], (2, 2, VEE, 2, 2), (2, 2, LOOP, 2, 2)]
SEARCHED = [(2, 2, VEE, 4, 6), (2, 2, LOOP, 5, 6), (3, 2, VEE, 6, 8), (2, 1, SINGLE, 6, 6), (3, 1, SINGLE, 5, 7)]


def random_profile(
    rng: np.random.Generator, blocks: int, tied: bool, sent: int, times: range = range(1, 9), head: int = 12
) -> Profile:
    """Layers with small whole numbers: an embedding, blocks all alike with passes of `times`, a head with passes below
    `head`; sometimes one part dwarfs the rest."""
    F, B, W = (int(rng.integers(times.start, times.stop)) for _ in range(3))
    hf, hb, hw = (int(rng.integers(0, head)) for _ in range(3))
    sizes = rng.integers(0, 4, 8).tolist()
    table, held = sizes[0], (1 + sizes[1], sizes[2])
    block = Layer("block", F, B, W, B + W, *held, sizes[3], sizes[7], held_from_B=sizes[4], transient=sizes[5])
    return Profile(
        "given",
        "random",
        (
            Layer("embedding", int(rng.integers(0, 6)) * bool(table), 0, 0, 0, 0, 0, table, sizes[7]),
            *[block] * blocks,
            Layer("head", hf, hb, hw, hb + hw, sizes[6], sizes[2], table, 0),
        ),
        Link(sent, 1e12, blocking=True),
        2.0,
        None,
        {},
        {},
        tied=((table, (0, blocks + 1)),) if tied and table else (),
    )


def with_random_vocabulary(rng: np.random.Generator, profile: Profile, ranks: int) -> Profile:
    """The profile with a vocabulary in so many shards; a norm's bytes stay of the head."""
    S, T, kept, hidden, transient, size, norm = (
        int(one) for one in rng.integers((0, 0, 0, 0, 0, 1, 0), (6, 5, 3, 3, 4, 3, 3))
    )
    broadcast, statistics, lookup = (float(one) for one in rng.integers(0, 3, 3))
    bare = {"F": 0, "B": 0, "W": 0, "BW": 0, "held_until_W": 0, "parameter_bytes": 0}
    rests = (replace(profile.layers[0], **bare), replace(profile.layers[-1], **bare, held_until_B=norm))
    passes, two = ShardPasses(S, T, kept, transient), ShardPasses(0, S + T, kept, transient)
    collectives = {"broadcast": broadcast, "reduce": broadcast, "statistics": statistics}
    row = ShardCosts(ranks, passes, two, size, lookup, **collectives)
    last = len(profile.layers) - 1
    costs = VocabularyCosts("given", 100, hidden, 1, last, rests[1], (row,), 0, rests[0], bool(profile.tied))
    return replace(profile, vocabulary=costs)


def shards_of_profile(profile: Profile) -> Common:
    """Of the only row of its vocabulary; zeros where there is none."""
    costs = profile.vocabulary
    if costs is None:
        return Common(*[np.array([0])] * len(Common._fields))
    row = costs.shards[0]
    one, sent = row.one, row.broadcast
    gap, held = 2 * sent + one.S + row.statistics, 2 * costs.hidden_bytes + one.held
    states, pending = profile.states * row.parameter_bytes, costs.hidden_bytes + one.held
    columns = one.S, one.T, gap, row.lookup + sent, states, one.transient, held, pending
    return Common(*(np.array([int(x)]) for x in columns))


def exchanges_of_profile(profile: Profile, layout: Layout) -> Exchanges:
    """Of a profile whose `shard_link` sums gradients, or gathers parameters, in whole µs a byte. Its vocabulary is whole."""
    replicas, shards = replicas_of(layout), shards_of(layout)
    turns = 2 * (replicas - 1) / replicas + (shards - 1) / shards
    each = turns / profile.shard_link.bytes_per_us if profile.shard_link else 0.0
    first, block, last = (int(each * profile.layers[i].parameter_bytes) for i in (0, 1, -1))
    alone = 0 if profile.tied and layout.placement == VEE else first
    total = first + (len(profile.layers) - 2) * block + last
    gathers = (block, first) if shards > 1 else (0, 0)
    columns = block, first, min(block, alone), first, 2 * total if shards > 1 else total, *gathers
    return Exchanges(*(np.array([one]) for one in columns))


def costs_of_profile(profile: Profile, layout: Layout) -> Costs:
    """The same numbers as a table of one row; of copies with the profile's link to host memory."""
    shard = shards_of_profile(profile)
    profile = profile if profile.vocabulary is None else without_vocabulary(profile)
    first, block, last = (profile.layers[i] for i in (0, 1, -1))

    def row(*values: float) -> tuple[np.ndarray, ...]:
        return tuple(np.array([int(one)]) for one in values)

    times = (Times(*row(one.F, one.B, one.W)) for one in (block, first, last))
    held = row(*(one.held_until_B + one.held_until_W for one in (block, last)))
    (pending,) = row(block.held_until_W + block.held_from_B)
    table, host = table_of([layout]), profile.host
    cluster = A100 if host is None else replace(A100, copies=Link(host.latency, host.d2h_both))
    most = sum(one.held_until_B + one.held_until_W for one in profile.layers)
    always, *sometimes = (
        int(one[0]) for one in gathered_of(GRADIENTS.state_parts[1] / 2, table, table.offload == NO_OFFLOAD)
    )
    states = [(profile.states / shards_of(layout) + always) * one.parameter_bytes for one in (block, first)]
    away = host.memory if host and host.memory and layout.offload else 0
    gathered = row(*(one * block.parameter_bytes for one in sometimes), away)
    sizes = row(profile.link.latency, *states), row(block.transient, 2 * block.output_bytes)
    chain = first.F + (len(profile.layers) - 2) * (block.F + block.B) + last.F + last.B
    part = Part(*row(block.F, block.B, first.F, profile.link.latency, chain, block.F, block.B))
    ends = shard, *row(1), part, copies_of(*held, most, table, cluster), exchanges_of_profile(profile, layout)
    kept = kept_of(*held, pending, table)
    return Costs(len(profile.layers) - 2, *times, *sizes[0], bool(profile.tied), kept, *sizes[1], *ends, *gathered)


def least_value(
    profile: Profile,
    layout: Layout,
    memory: int,
    fused: bool,
    search: Callable[[zbsolve.Problem], int | None] = optimum,
) -> float:
    """The optimum over all partitions and all orders; infinite where nothing fits."""
    best = np.inf
    for counts in partitions(len(profile.layers), layout.stages):
        step = step_of(layout, memory, counts, fused)
        try:
            found = search(step.problem(profile))
        except Infeasible:
            continue
        best = min(best, np.inf if found is None else found)
    return best


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_partition_and_no_schedule_is_below_the_bound(case: tuple[int, ...]) -> None:
    """Random times and bytes, with and without memory, fused and split (several microbatches of several stages a rank have
    too many orders with W apart)."""
    pp, chunks, placement, count, blocks = case
    layout, rng, tight = Layout(1, 1, pp, chunks, placement, 1, count), np.random.default_rng(case), 0
    table = table_of([layout])
    for trial in range(6):
        sent = int(rng.integers(0, 3)) if pp > 1 else 0
        profile = random_profile(rng, blocks, bool(trial % 2), sent)
        costs = costs_of_profile(profile, layout)
        least = int(least_bytes(costs, table)[0])
        for memory in (NO_MEMORY, least + int(rng.integers(0, 6)), least - 1):
            bound = int(pipeline_bounds(costs, table, memory)[0][0])
            best = least_value(profile, layout, memory, fused=trial % 3 == 0 or chunks * count > 3)
            assert (bound == NEVER) <= np.isinf(best)
            assert bound <= best
            tight += bound == best
            if memory < least:
                assert np.isinf(best)
    assert tight > 0 or pp == 3 or chunks > 1  # bounds that are always loose prove little


@pytest.mark.parametrize("case", EXCHANGED, ids=str)
def test_no_partition_and_no_schedule_exchanges_gradients_below_the_bound(case: tuple[int, ...]) -> None:
    """Replicas whose exchange takes from nothing to most of the step, as passes of the graph."""
    pp, chunks, placement, count, blocks = case
    layout, rng, tight = Layout(2, 1, pp, chunks, placement, 1, count), np.random.default_rng(case), 0
    table = table_of([layout])
    for trial in range(6):
        link = Link(0.0, 1 / int(rng.choice([1, 3, 30])))
        profile = replace(random_profile(rng, blocks, bool(trial % 2), int(rng.integers(0, 3))), shard_link=link)
        costs = costs_of_profile(profile, layout)
        for memory in (NO_MEMORY, int(least_bytes(costs, table)[0]) + int(rng.integers(0, 6))):
            bound = int(pipeline_bounds(costs, table, memory)[0][0])
            best = least_value(profile, layout, memory, fused=trial % 3 == 0 or chunks > 1, search=exact_streams.optimum)
            assert NEVER < bound <= best or np.isinf(best)
            tight += bound >= 0.9 * best
    assert tight > 1 or chunks > 1  # bounds that are always loose prove little


@pytest.mark.parametrize("case", GATHERED, ids=str)
def test_no_partition_and_no_schedule_gathers_below_the_bound(case: tuple[int, ...]) -> None:
    """Stages that gather their parameters once and reduce their gradients once, which take twice the bytes, from nothing to
    most of the step and of the memory."""
    pp, chunks, placement, count, blocks = case
    layout, rng, near = Layout(2, 1, pp, chunks, placement, 1, count, zero=2), np.random.default_rng(case), 0
    table = table_of([layout])
    for trial in range(6):
        link = Link(0.0, 1 / (2 * int(rng.choice([1, 3, 30]))))
        profile = replace(
            random_profile(rng, blocks, bool(trial % 2), int(rng.integers(0, 3))), shard_link=link, gradients=2.0
        )
        costs = costs_of_profile(profile, layout)
        least = int(least_bytes(costs, table)[0])
        for memory in (NO_MEMORY, least + int(rng.integers(0, 12)), least - 1):
            bound = int(pipeline_bounds(costs, table, memory)[0][0])
            best = least_value(profile, layout, memory, fused=trial % 3 == 0 or chunks > 1, search=exact_streams.optimum)
            assert (bound == NEVER) <= np.isinf(best)
            assert bound <= best
            assert memory >= least or np.isinf(best)
            near += bound >= 0.85 * best
    assert near > 2 or chunks > 1  # bounds that are always loose prove little


def test_gathers_come_before_the_first_pass_and_take_memory() -> None:
    """A rank gathers its blocks before its first pass and reduces them behind its last one. Their parameters and gradients
    lie beside 18 bytes a parameter over 8 replicas."""
    shape, cluster = SHAPES["gpt-18.4b"], A100
    layout = Layout(8, 1, 8, 1, SINGLE, 1, 64, zero=2)
    table = table_of([layout])
    costs = costs_of(shape, table, cluster)
    assert costs.states[0] == 18 * shape.matrices // 8 + 6 * shape.matrices
    bound, exchange = int(pipeline_bounds(costs, table, None)[0][0]), costs.exchange
    without = costs._replace(exchange=type(exchange)(*(0 * one for one in exchange)))
    assert bound >= 64 * 5 * int(costs.block.work[0]) + 5 * int((exchange.before + exchange.block)[0])
    assert bound >= int(pipeline_bounds(without, table, None)[0][0]) + int((exchange.table_before + exchange.least)[0])
    several = table_of([layout._replace(chunks=2, placement=LOOP)])
    costs = costs_of(shape, several, cluster)
    assert costs.states[0] == 18 * shape.matrices // 8
    assert costs.from_F[0] == 2 * shape.matrices
    assert costs.from_B[0] == 4 * shape.matrices
    reduced = costs._replace(from_B=0 * costs.from_B)  # gradients are there for no time
    kept = reduced._replace(from_F=0 * costs.from_F)  # nor are parameters
    little, more = ([int(pipeline_bounds(one, several, size)[0][0]) for one in (costs, reduced, kept)] for size in LITTLE)
    assert little[0] == NEVER < little[2] < 0.9 * little[1]
    assert more[0] > 1.4 * more[1] > 1.4 * more[2]


def test_gathered_stages_have_their_gradients_one_after_the_other() -> None:
    """Of S + n blocks of gpt-175b on a rank n are on the stage whose first B begins: 2 (S + n) + 4 n bytes a parameter are
    there. 12 blocks of a rank fit on three stages; on two they do not, whatever is copied away."""
    shape, memory = SHAPES["gpt-175b"], 80 * 10**9
    layout = Layout(64, 1, 8, 2, LOOP, 1, 24, recompute=SELECTIVE, zero=2, offload=FULL_OFFLOAD)
    for chunks, placement, fits in ((2, LOOP, False), (2, VEE, False), (3, LOOP, True)):
        table = table_of([layout._replace(chunks=chunks, placement=placement)])
        blocks, left = 0, memory - 12 * 18 * shape.matrices // 64
        for _ in range(chunks):
            blocks += (left - blocks * 2 * shape.matrices) // (6 * shape.matrices)
        assert (blocks >= 12) == fits
        assert (int(pipeline_bounds(costs_of(shape, table, A100), table, memory)[0][0]) > NEVER) == fits


def vee_with_slow_messages() -> Profile:
    """Blocks of 2, 1 and 1 µs whose messages take 13: found by exhaustive search, when the turn counted as a message."""
    block = Layer("block", 2, 1, 1, 2, 2, 3, 3, 0, transient=3)
    layers = (Layer("embedding", 0, 0, 0, 0, 0, 0, 1, 0), *[block] * 4, Layer("head", 0, 0, 0, 0, 1, 3, 1, 0))
    return Profile("given", "slow messages", layers, Link(13, 1e12, blocking=True), 2.0, None, {}, {})


def test_the_turn_of_a_v_sends_no_message() -> None:
    profile, layout = vee_with_slow_messages(), Layout(1, 1, 2, 2, VEE, 1, 2)
    costs, table = costs_of_profile(profile, layout), table_of([layout])
    assert least_bytes(costs, table)[0] == 33
    for memory, least in ((34, 106), (38, 85)):
        assert least_value(profile, layout, memory, fused=True) == least
        assert int(pipeline_bounds(costs, table, memory)[0][0]) <= least


@pytest.mark.parametrize("case", [(3, 1, SINGLE, 2, 2), (2, 2, VEE, 2, 2), (2, 2, LOOP, 2, 3)], ids=str)
@pytest.mark.slow
def test_times_of_0(case: tuple[int, ...]) -> None:
    """Passes that round to 0 µs, heads that take no time, messages that take most of it."""
    pp, chunks, placement, count, blocks = case
    layout, rng = Layout(1, 1, pp, chunks, placement, 1, count), np.random.default_rng(case)
    table = table_of([layout])
    for trial in range(8 if pp == 2 else 4):  # orders of three ranks take seconds each
        head, sent = (1, 12)[trial % 2], int(rng.integers(1, 9))
        profile = random_profile(rng, blocks, bool(trial % 3), sent, range(2), head)
        costs = costs_of_profile(profile, layout)
        for memory in (NO_MEMORY, int(least_bytes(costs, table)[0]) + int(rng.integers(0, 6))):
            bound = int(pipeline_bounds(costs, table, memory)[0][0])
            assert bound <= least_value(profile, layout, memory, fused=chunks > 1)


def test_no_schedule_in_slices_is_below_the_bound() -> None:
    """Random small models and layouts in slices, in much and little memory, on a random partition: passes add up to what the
    bound counts with, no schedule that is found is shorter, and below the least memory no step is built."""
    solved = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        sizes = 256 * int(rng.integers(1, 5)), 8, int(rng.integers(2, 9)), int(rng.choice([256, 4096])), 8192
        shape = replace(Shape.gpt(*sizes), tied=bool(seed % 2))
        cluster = replace(A100, launch=float(rng.choice([0, 3, 300])), host=float(rng.choice([0, 1500])))
        table = layouts(shape, 4, 8, cluster)
        able = np.flatnonzero((table.slices > 1) & (table.stages * table.slices * table.count <= 150))
        one = table.rows(rng.choice(able, 1))
        layout, costs = one.row(0), costs_of(shape, one, cluster)
        profile, least = layout_profile(shape, layout, cluster), int(least_bytes(costs, one)[0])
        memory = int(least * float(rng.choice([1.5, 2, 10])))
        cuts = np.sort(rng.choice(np.arange(1, shape.stages), layout.stages - 1, replace=False))
        step = step_of(layout, memory, tuple(np.diff([0, *cuts, shape.stages]).tolist()))
        with pytest.raises(Infeasible):
            replace(step, memory=least - 1).problem(profile)
        bound = int(pipeline_bounds(costs, one, memory)[0][0])
        try:
            problem = step.problem(profile)
            schedule = zbsolve.solve(problem, method="greedy", effort=0.01, prefer=None)
        except (Infeasible, zbsolve.NotFound):
            continue
        passes = costs.blocks * costs.block.work + costs.embedding.work + costs.head.work
        messages = 2 * (layout.stages - 1 - (layout.placement == VEE)) * costs.sent
        shards = layout.pp * (costs.common.S + costs.common.T)
        assert problem.passes.duration[problem.computing].sum() == layout.count * int((passes + messages + shards)[0])
        assert 0 < bound <= schedule.timeline().makespan
        solved += 1
    assert solved >= 6


def test_one_rank_is_exact() -> None:
    """Its work, whatever the order."""
    rng = np.random.default_rng(3)
    profile, layout = random_profile(rng, 3, False, 0), Layout(count=5)
    work = 5 * sum(one.F + one.B + one.W for one in profile.layers)
    assert pipeline_bounds(costs_of_profile(profile, layout), table_of([layout]), NO_MEMORY)[0][0] == work


def test_what_is_copied_is_held_while_its_passes_and_copies_run() -> None:
    """80 blocks on 8 ranks of 2 stages each are 10 on some rank, at best 5 a stage: m (5² + 5²) (F + O + R + B) block-µs, of
    which a rank has as many as blocks fit beside its states. The rank that has 10 has no more of them than that."""
    shape, cluster = SHAPES["llama3-70b"], CLUSTERS["h100"]
    table = table_of([Layout(8, 1, 8, 2, LOOP, 1, 64, zero=1, vocabulary=SHARDED, offload=FULL_OFFLOAD)])
    costs = costs_of(shape, table, cluster)
    found, rule = pipeline_bounds(costs, table, cluster.memory)
    held = costs.block.F[0] + costs.block.B[0] + costs.copies.out[0] + costs.copies.back[0]
    room = cluster.memory - 10 * costs.states[0] - costs.common.states[0]
    assert found[0] >= 64 * 50 * held / (room // costs.kept.copied[0])
    assert RULES[rule[0]] == MEMORY
    assert found[0] > 1.5 * pipeline_bounds(costs, table, None)[0][0]


def test_copies_to_the_host_wait_for_the_first_forward() -> None:
    """6 ranks have room for one block each, and for two microbatches. The first rank's first B comes after 6 F and 5 B, in
    110 µs. Three of its copies have ended by then: they begin after 10 µs and take 27 µs each. So it has run 5 F."""
    layout, nothing = Layout(1, 1, 6, 1, SINGLE, 1, 8, offload=FULL_OFFLOAD), Layer("nothing", 0, 0, 0, 0, 0, 0, 0, 0)
    host = HostLink(0.0, *[1 / 27] * 4, None, 1)
    layers = nothing, *[Layer("block", 10, 10, 20, 30, 1, 0, 5, 0)] * 6, nothing
    profile = Profile("given", "blocks", layers, Link(0, 1e12, blocking=True), 1.0, None, {}, {}, host=host)
    bound = int(pipeline_bounds(costs_of_profile(profile, layout), table_of([layout]), 7)[0][0])
    assert bound == 8 * 40 + 110 - 5 * 10
    problem = step_of(layout, 7, (2, 1, 1, 1, 1, 2), False).problem(profile)
    assert zbsolve.solve(problem, effort=0.05).timeline().makespan >= bound


@pytest.mark.parametrize("case", [(2, 3, LOOP), (2, 2, VEE), (3, 2, LOOP), (2, 4, LOOP)], ids=str)
@pytest.mark.slow
def test_where_half_is_copied_searches_find_nothing_below_the_bound(case: tuple[int, int, int]) -> None:
    """Nothing but blocks on ranks of which some stages copy, in room for a few of them; links to the host from slow to
    fast. Several random partitions of each."""
    pp, chunks, placement = case
    near = 0
    for trial in range(8):
        rng = np.random.default_rng((trial, *case))
        count, blocks = int(rng.integers(2, 7)), int(rng.integers(pp * chunks, pp * chunks + 3))
        layout = Layout(1, 1, pp, chunks, placement, 1, count, offload=HALF_OFFLOAD)
        times, held = (int(one) for one in rng.integers(2, 9, 3)), (int(rng.integers(1, 4)), int(rng.integers(0, 3)))
        F, B, W = times
        block, nothing = Layer("block", F, B, W, B + W, *held, 0, 0), Layer("nothing", 0, 0, 0, 0, 0, 0, 0, 0)
        host = HostLink(0.0, *[sum(held) / float(rng.choice([1, 3, 8, 15]))] * 4, None, 1)
        link = Link(int(rng.integers(0, 2)), 1e12, blocking=True)
        layers = nothing, *[block] * blocks, nothing
        profile = Profile("given", "blocks", layers, link, 2.0, None, {}, {}, host=host)
        costs, table = costs_of_profile(profile, layout), table_of([layout])
        memory = int(least_bytes(costs, table)[0]) + int(rng.integers(0, 9))
        bound = int(pipeline_bounds(costs, table, memory)[0][0])
        ways = list(partitions(blocks + 2, layout.stages))
        for at in rng.choice(len(ways), min(8, len(ways)), replace=False).tolist():
            step = step_of(layout, memory, ways[at], bool(trial % 2))
            try:
                value = zbsolve.solve(step.problem(profile), effort=0.01, prefer=None).timeline().makespan
            except (Infeasible, zbsolve.NotFound):
                continue
            assert NEVER < bound <= value
            near += bound >= 0.75 * value
    assert near > 0  # bounds that are always loose prove little


def test_weights_wait_behind_the_last_backward_as_far_as_memory_goes() -> None:
    """80 blocks on 16 ranks are 5 on each: rank 14 begins behind 70 blocks' F, and ends its last B before 70 blocks' B.
    Behind that it has T of all microbatches at most, and W of as many blocks as its memory keeps."""
    shape, cluster = SHAPES["llama3-70b"], CLUSTERS["h100"]
    table = table_of([Layout(4, 1, 16, 1, SINGLE, 1, 128, zero=1, vocabulary=SHARDED, offload=FULL_OFFLOAD)])
    costs = costs_of(shape, table, cluster)
    found, rule = pipeline_bounds(costs, table, cluster.memory)
    block, shard, sent = Times(*(int(one[0]) for one in costs.block)), costs.common, int(costs.sent[0])
    room = cluster.memory - 5 * costs.states[0] - shard.states[0]
    waits = room // costs.kept.pending[0] * block.W + 128 * shard.T[0]
    work = 128 * (5 * block.work + 2 * sent + shard.S[0] + shard.T[0])
    assert found[0] >= 70 * (block.F + block.B) + 27 * sent + work - waits - 5 * block.W
    assert RULES[rule[0]] == MEMORY
    assert found[0] > 1.03 * pipeline_bounds(costs, table, None)[0][0]


@pytest.mark.parametrize("case", [(3, SINGLE), (4, SINGLE), (3, LOOP), (3, VEE)], ids=str)
@pytest.mark.slow
def test_searches_find_nothing_below_the_bound_where_weights_wait_in_little_memory(case: tuple[int, int]) -> None:
    """All is copied, which takes little time or none; long B and W that keep much leave room for few W: most W
    come before the last B, which others wait for. One block a stage."""
    (pp, placement), near = case, 0
    for trial in range(12):
        rng = np.random.default_rng((trial, *case))
        chunks, count = 1 if placement == SINGLE else 2, int(rng.integers(3, 6))
        layout = Layout(1, 1, pp, chunks, placement, 1, count, offload=FULL_OFFLOAD)
        F, B, W = (int(one) for one in rng.integers((1, 6, 4), (3, 15, 12)))
        pending = int(rng.integers(2, 6))
        block = Layer("block", F, B, W, B + W, int(rng.integers(0, 2)), 1, 0, 0, held_from_B=pending)
        nothing = Layer("nothing", 0, 0, 0, 0, 0, 0, 0, 0)
        link, host = Link(0, 1e12, blocking=True), HostLink(0.0, *[float(rng.choice([5, 1e9]))] * 4, None, 1)
        layers = nothing, *[block] * (pp * chunks), nothing
        profile = Profile("given", "blocks", layers, link, 2.0, None, {}, {}, host=host)
        costs, table = costs_of_profile(profile, layout), table_of([layout])
        memory = int(rng.integers(1, 5)) * (1 + pending) + int(rng.integers(1, 4))
        bound = int(pipeline_bounds(costs, table, memory)[0][0])
        step = step_of(layout, memory, (2, *[1] * (pp * chunks - 2), 2))
        try:
            value = zbsolve.solve(step.problem(profile), effort=0.1, prefer=None).timeline().makespan
        except (Infeasible, zbsolve.NotFound):
            continue
        assert NEVER < bound <= value
        near += bound >= 0.95 * value
    assert near > 2  # bounds that are always loose prove little


def test_what_stays_is_held_while_what_stays_behind_it_runs() -> None:
    """80 blocks on 8 ranks of 3 stages, of which two copy: S of them stay, and take at least a share of all memory over
    time; the others lie on 16 stages, whose passes and copies take n² block-µs each."""
    shape, cluster = SHAPES["llama3-70b"], CLUSTERS["h100"]
    table = table_of([Layout(8, 1, 8, 3, LOOP, 1, 64, zero=1, vocabulary=SHARDED, offload=HALF_OFFLOAD)])
    costs = costs_of(shape, table, cluster)
    found, rule = pipeline_bounds(costs, table, cluster.memory)
    passes = int(costs.block.F[0] + costs.block.B[0])
    held = passes + int(costs.copies.out[0] + costs.copies.back[0])
    room = cluster.memory - 10 * costs.states[0] - costs.common.states[0] - costs.common.transient[0] - 4 * costs.waiting[0]
    least = min((80 - stay) ** 2 / 16 * held + passes * stay * (stay + 1) / 2 for stay in range(81))
    assert found[0] >= 64 * least / (8 * room / costs.kept.copied[0])
    assert RULES[rule[0]] == MEMORY
    assert found[0] > 1.5 * pipeline_bounds(costs, table, None)[0][0]


@pytest.mark.parametrize(
    ("block", "head", "memory", "least", "bound"),
    [
        (Layer("", 7, 8, 1, 9, 4, 1, 0, 1, held_from_B=3, transient=2), Layer("head", 6, 3, 9, 12, 2, 1, 0, 0), 12, 95, 94),
        (Layer("", 7, 5, 1, 6, 4, 2, 0, 2, held_from_B=1), Layer("head", 0, 0, 0, 0, 3, 2, 0, 0), 17, 52, 51),
    ],
)
def test_idle_time_of_three_ranks(block: Layer, head: Layer, memory: int, least: int, bound: int) -> None:
    """Two microbatches of two blocks whose messages take 2 µs, W apart. With a message too many behind the last F, the
    bounds were 96 and 53."""
    first = Layer("embedding", 1, 0, 0, 0, 0, 0, 1, block.output_bytes)
    link = Link(2, 1e12, blocking=True)
    profile = Profile("given", "idle", (first, block, block, head), link, 0.0, None, {}, {})
    layout = Layout(1, 1, 3, 1, SINGLE, 1, 2)
    costs, table = costs_of_profile(profile, layout), table_of([layout])
    assert least_value(profile, layout, memory, fused=False, search=exact_streams.optimum) == least
    assert int(pipeline_bounds(costs, table, memory)[0][0]) == bound


def test_a_stage_keeps_each_slice_until_it_comes_back() -> None:
    """96 blocks on 32 ranks are three on each, or four on some. The first rank keeps each quarter of a microbatch while that
    goes through all blocks and back, which takes a quarter of all their passes in the mean, but for rounding."""
    shape, cluster = SHAPES["gpt-175b"], A100
    table = table_of([Layout(16, 1, 32, 1, SINGLE, 1, 96, zero=1, vocabulary=SHARDED, slices=4)])
    costs = costs_of(shape, table, cluster)
    found, rule = pipeline_bounds(costs, table, cluster.memory)
    F, B, W = (int(one[0]) for one in costs.block)
    room = cluster.memory - 3 * costs.states[0] - costs.common.states[0] - costs.common.transient[0] - 2 * costs.waiting[0]
    way = 96 * (F + B) / 4 + 2 * 31 * costs.part.sent[0] + costs.common.gap[0] - 2 * 32
    held = 96 * 3 * way / (room / costs.kept.stays[0])
    assert found[0] >= min(held, 96 * 4 * (F + B + W))
    assert held > 1.05 * pipeline_bounds(costs, table, None)[0][0]
    assert RULES[rule[0]] == MEMORY


SLOW_NODES = replace(
    A100, node=2, launch=3.0, host=0.0, messages=80.0, inside=Link(30.0, 1_800.0), between=Link(30.0, 800.0)
)
UNEVEN_NODES = replace(
    A100, node=2, launch=0.0, host=500.0, messages=800.0, inside=Link(30.0, 18_000.0), between=Link(30.0, 8_000.0)
)
SMALL_LAYERS, LARGE_LAYERS = Shape.gpt(256, 8, 11, 256, 1024), Shape.gpt(1024, 8, 10, 256)
IN_THREES, IN_SIXES = Layout(1, 1, 4, 3, LOOP, 2, 4, FULL), Layout(2, 1, 2, 6, LOOP, 2, 2, FULL, zero=3)
IN_FIVES, IN_A_V = Layout(1, 2, 2, 5, LOOP, 2, 2, FULL), Layout(1, 1, 4, 2, VEE, 2, 2, FULL, vocabulary=SHARDED)
# Steps of few microbatches and long messages: shape, cluster, layout, memory, layers a stage.
LONG_MESSAGES = [
    (SMALL_LAYERS, SLOW_NODES, IN_THREES, 72_876_032, (2, *[1] * 11)),
    (SMALL_LAYERS, SLOW_NODES, IN_SIXES, 72_876_032, (2, *[1] * 11)),
    (LARGE_LAYERS, UNEVEN_NODES, IN_FIVES, 1_301_073_100, (2, *[1] * 8, 2)),
    (LARGE_LAYERS, UNEVEN_NODES, IN_A_V, 1_301_073_100, (2, 1, 1, 1, 1, 1, 2, 3)),
]


@pytest.mark.parametrize("case", LONG_MESSAGES, ids=lambda case: str(case[2]))
def test_a_rank_may_have_time_for_more_blocks_but_not_for_fewer(
    case: tuple[Shape, Cluster, Layout, int, tuple[int, ...]],
) -> None:
    """What a rank does at both ends of a step of few microbatches grows with its blocks by more than its work between does:
    numbers of blocks that were halved gave bounds above these schedules."""
    shape, cluster, layout, memory, layers = replace(case[0], tied=False), *case[1:]
    profile, table = layout_profile(shape, layout, cluster), table_of([layout])
    bound = int(pipeline_bounds(costs_of(shape, table, cluster), table, memory)[0][0])
    problem = step_of(layout, memory, layers, fused=False).problem(profile)
    schedule = zbsolve.solve(problem, effort=0.01, prefer=None)
    assert verify(problem, schedule) == ()
    assert 0.85 * schedule.timeline().makespan < bound <= schedule.timeline().makespan


@pytest.mark.parametrize("placement", [LOOP, VEE])
def test_a_rank_with_room_for_little_idles_at_both_ends(placement: int) -> None:
    """48 blocks on 8 ranks of 2 stages each are 6 on some rank that has neither embedding nor head, or more elsewhere. Until
    a microbatch has been through all blocks it has done no more F than fit, with a message each at most, and S and T of as
    many microbatches; behind its last F no more B and W, and all T. The first and last rank's stages may be empty: their
    messages may come in between."""
    shape, cluster = SHAPES["gpt-39.1b"], A100
    table = table_of([Layout(8, 1, 8, 2, placement, 1, 64, zero=1, vocabulary=SHARDED)])
    costs = costs_of(shape, table, cluster)
    found, rule = pipeline_bounds(costs, table, cluster.memory)
    block, shard, sent = Times(*(int(one[0]) for one in costs.block)), costs.common, int(costs.sent[0])
    room = cluster.memory - 6 * costs.states[0] - shard.states[0] - shard.transient[0] - 4 * costs.waiting[0]
    fits = (room - max(0, costs.transient[0] - shard.transient[0])) // costs.kept.stays[0]
    turns, gap = 15 - (placement == VEE), int(shard.gap[0])
    start = 48 * block.F + turns * sent + gap + shard.lookup[0] - fits * (block.F + sent) - fits / 6 * (shard.S + shard.T)[0]
    end = 48 * block.B + turns * sent + gap + shard.lookup[0] - (fits + 1) * (block.B + block.W + sent)
    end -= fits / 6 * shard.S[0] + 64 * shard.T[0]
    assert min(start, end) > 0
    assert found[0] >= work_bounds(costs, table)[0] + start + end - 2 * 64 * sent
    assert RULES[rule[0]] == MEMORY
    assert found[0] > 1.01 * pipeline_bounds(costs, table, None)[0][0]
    if placement == VEE:  # 42 blocks lie before or behind those of the rank with both middle stages
        late = [max(one * block.F, start + (42 - one) * block.B) + end + (42 - one) * block.F for one in range(43)]
        assert found[0] >= work_bounds(costs, table)[0] + min(late) - 2 * 64 * sent


@pytest.mark.parametrize("case", [(2, 2, VEE, 3, 3), (2, 2, VEE, 2, 4), (2, 2, LOOP, 3, 3), (2, 2, LOOP, 2, 4)], ids=str)
def test_no_partition_of_two_stages_a_rank_is_below_the_bound(case: tuple[int, ...]) -> None:
    """In little memory, now with an exchange of gradients: what each rank may have on both stages."""
    pp, chunks, placement, count, blocks = case
    near = 0
    for trial in range(6):
        rng = np.random.default_rng((trial, *case))
        layout = Layout(1 + trial % 2, 1, pp, chunks, placement, 1, count)
        link = Link(0.0, 1 / int(rng.choice([1, 3])))
        profile = replace(random_profile(rng, blocks, False, int(rng.integers(0, 3)), head=4), shard_link=link)
        costs, table = costs_of_profile(profile, layout), table_of([layout])
        memory = int(least_bytes(costs, table)[0]) + int(rng.integers(0, 6))
        bound = int(pipeline_bounds(costs, table, memory)[0][0])
        best = least_value(profile, layout, memory, fused=True, search=exact_streams.optimum)
        assert (bound == NEVER) <= np.isinf(best)
        assert bound <= best
        near += bound >= 0.75 * best
    assert near >= 2  # bounds that are always loose prove little


@pytest.mark.parametrize("case", [(2, 3, LOOP, 2, 5), (2, 2, LOOP, 3, 3), (2, 2, VEE, 2, 5), (2, 2, VEE, 3, 3)], ids=str)
@pytest.mark.slow
def test_blocks_alone_on_several_stages_a_rank(case: tuple[int, ...]) -> None:
    """Nothing but blocks, in room for a few of them: there bounds of idle time and of memory over time are sharpest."""
    pp, chunks, placement, count, blocks = case
    layout, near = Layout(1, 1, pp, chunks, placement, 1, count), 0
    table = table_of([layout])
    for trial in range(15):
        rng = np.random.default_rng((trial, *case))
        times, held = (int(one) for one in rng.integers(1, 9, 3)), (int(rng.integers(1, 4)), int(rng.integers(0, 3)))
        F, B, W = times
        block = Layer("block", F, B, W, B + W, *held, 0, 0)
        nothing = Layer("nothing", 0, 0, 0, 0, 0, 0, 0, 0)
        link = Link(int(rng.integers(0, 3)), 1e12, blocking=True)
        profile = Profile("given", "blocks", (nothing, *[block] * blocks, nothing), link, 2.0, None, {}, {})
        costs = costs_of_profile(profile, layout)
        memory = int(least_bytes(costs, table)[0]) + int(rng.integers(0, 8))
        bound = int(pipeline_bounds(costs, table, memory)[0][0])
        best = least_value(profile, layout, memory, fused=True, search=exact_streams.optimum)
        assert NEVER < bound <= best
        near += bound >= 0.9 * best
    assert near >= 3  # bounds that are always loose prove little


@pytest.mark.slow
def test_simple_bounds_are_no_higher_and_rules_say_what_binds() -> None:
    """The search by halving includes each simple bound. Less memory never lowers a bound."""
    shape = SMALL
    table = layouts(shape, 16, 32, A100)
    costs = costs_of(shape, table, A100)
    free, rules = pipeline_bounds(costs, table, None)
    assert (free >= work_bounds(costs, table)).all()
    assert (free >= chain_bounds(costs, table)).all()
    least = least_bytes(costs, table)
    some = table.rows(np.flatnonzero(table.pp > 1)[::7])
    costs = costs_of(shape, some, A100)
    tight, said = pipeline_bounds(costs, some, int(np.quantile(least, 0.6)))
    loose = pipeline_bounds(costs, some, None)[0]
    assert ((tight == NEVER) | (tight >= loose)).all()
    assert {RULES[i] for i in {*rules.tolist(), *said.tolist()}} == set(RULES)


@pytest.mark.slow
def test_a_step_is_never_below_its_bound() -> None:
    """Layouts of a real space, solved on their balanced partition: what follows the pipeline counts too."""
    shape = replace(SMALL, layers=10)
    table = layouts(shape, 8, 16, A100)
    rng = np.random.default_rng(4)
    some = table.rows(rng.choice(np.flatnonzero(table.pp > 1), 12, replace=False))
    memory = int(3 * np.median(least_bytes(costs_of(shape, some, A100), some)))
    bounds, solved = layout_bounds(shape, some, A100, memory), 0
    for i in range(len(some.dp)):
        layout = some.row(i)
        profile = layout_profile(shape, layout, A100)
        step = step_of(layout, memory)
        try:
            unsolved = Unsolved.of(shape, layout, A100, step, profile)
            schedule = zbsolve.solve(unsolved.problem, method="greedy", effort=0.01)
        except (Infeasible, zbsolve.NotFound):
            continue
        assert bounds.step[i] <= unsolved.solved(schedule).value
        solved += 1
    assert solved > 6


@pytest.mark.parametrize("vocabulary", [WHOLE, SHARDED])
@pytest.mark.parametrize("case", SEARCHED, ids=str)
@pytest.mark.slow
def test_searches_find_nothing_below_the_bound(case: tuple[int, ...], vocabulary: int) -> None:
    """More microbatches, in little memory: several random partitions of each random step."""
    (pp, count, blocks), placed = (case[0], *case[3:]), case[:3]
    layout, rng, near = Layout(1, 1, *placed, 1, count, vocabulary=vocabulary), np.random.default_rng(case), 0
    table = table_of([layout])
    for trial in range(3):
        profile = random_profile(rng, blocks, bool(trial % 2), int(rng.integers(0, 3)))
        profile = with_random_vocabulary(rng, profile, pp) if vocabulary == SHARDED else profile
        costs = costs_of_profile(profile, layout)
        memory = int(least_bytes(costs, table)[0]) + int(rng.integers(0, 3 * blocks))
        bound = int(pipeline_bounds(costs, table, memory)[0][0])
        ways = list(partitions(blocks + 2, layout.stages))
        for at in rng.choice(len(ways), 3).tolist():
            step = step_of(layout, memory, ways[at], trial == 0)
            try:
                value = zbsolve.solve(step.problem(profile), effort=0.02, prefer=None).timeline().makespan
            except (Infeasible, zbsolve.NotFound):
                continue
            assert NEVER < bound <= value
            near += bound >= 0.6 * value
    assert near > 0


@kernel
def waits(row, share, behind, after):  # type: ignore[no-untyped-def]
    place = row, share, behind, after
    return before_backward(*place), behind_forward(*place), kept_for(row, share[1], after, behind)


@pytest.mark.parametrize("seed", range(4))
def test_parts_take_as_long_as_bounds_say(seed: int) -> None:
    """The parts of one microbatch, in random partitions with one stage a rank: the first B and the end of the way back of
    every stage, and how long its parts are kept on average, which is close where a schedule waits for nothing else."""
    rng, nearest = np.random.default_rng(seed), 0.0
    shape = Shape.gpt(256 * int(rng.integers(1, 5)), 8, 9, int(rng.choice([1024, 16_384])), int(rng.choice([1024, 51_200])))
    cluster = replace(A100, launch=float(rng.choice([0, 3, 100])))
    table = layouts(shape, 4, 1, cluster)
    able = np.flatnonzero((table.slices > 1) & (table.pp == 4) & (table.chunks == 1) & (table.offload == NO_OFFLOAD))
    for layout in map(table.row, rng.choice(able, 4, replace=False).tolist()):
        row = bound_rows(costs_of(shape, table_of([layout]), cluster), table_of([layout]), None).view(np.recarray)[0]
        counts, slices = rng.multinomial(7, np.ones(4) / 4) + 1, int(layout.slices)
        step = step_of(layout, cluster.memory, tuple(counts.tolist()))
        problem = step.problem(layout_profile(shape, layout, cluster))
        timeline = zbsolve.solve(problem, method="greedy", effort=0.01).timeline()
        counts -= np.array([1, 0, 0, 1])  # embedding and head

        lanes = [f"{stage}{kind}0" for kind in "FB" for stage in range(4)]
        times = [timeline[f"{lane}.{part}".removesuffix(".0")] for lane in lanes for part in range(slices)]
        start, end = np.array(times).T.reshape(2, 2, 4, slices)
        for stage, own in enumerate(counts.tolist()):
            after, behind = int(counts[stage + 1 :].sum()), 3 - stage
            place = (int(counts[:stage].sum()), own), behind, after
            before, then, least = waits(row, *place)
            assert before <= start[1, stage].min()
            assert then - row.common.lookup <= end[1, 0].max() - end[0, stage].max()
            kept = float((end[1, stage] - start[0, stage]).mean())
            assert least <= kept
            nearest = max(nearest, least / kept)
    assert nearest > 0.9
