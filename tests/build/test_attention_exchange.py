"""Attention that ranks make for each other: parts, edges, bytes and lags by hand, what is handed over, and its bound."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from tests.support.exchange_bound import bound_over_exchanges
from tests.support.exhaustive import optimum
from tests.support.stream_checks import solve_is_exact
from zbsolve import BadInput, Problem, pipeline, preset, solve, verify
from zbsolve.build import AttentionExchange, Handing, with_attention_exchange, with_links, without_links
from zbsolve.build.attention_balance import balanced, even_slots, one_forward_one_backward
from zbsolve.build.attention_costs import queries_travel, traffic
from zbsolve.exec.emulate import Times


def step(p: int, m: int, n: int, rest: int, unit: int, ratio: float = 2.0, **more: Any) -> Problem:
    """n even slices: F of slice j takes `rest`, and (j + ½)·`unit` for its attention; BW `ratio` times as much."""
    times = [rest + (2 * j + 1) * unit // 2 for j in range(n)]
    return pipeline([times] * p, BW=[[round(ratio * one) for one in times]] * p, microbatches=m, slices=n, **more)


def costs(unit: int, ratio: float = 2.0, **more: Any) -> AttentionExchange:
    return AttentionExchange(unit, round(ratio * unit), **more)


def arcs(problem: Problem, *names: str) -> set[tuple[str, str, int, int]]:
    """Edges between these passes: before, after, lag and bytes."""
    e, of = problem.edges, problem.names
    rows = zip(e.before.tolist(), e.after.tolist(), e.lag.tolist(), e.bytes.tolist(), strict=True)
    return {(of[a], of[b], lag, size) for a, b, lag, size in rows if {of[a], of[b]} <= set(names)}


def test_parts_edges_and_bytes_are_those_of_hand_numbers() -> None:
    """0F0.1 of 40 + 1.5 · 20 µs hands half of its 20 µs to rank 1; 10 µs of its 40 come before attention. All queries
    travel: 64 bytes and half of 160 of keys there, 64 + 8 back, at 8 bytes a µs."""
    plain = step(2, 1, 2, 40, 20, held_until_B=1000, held_keys=100)
    said = costs(20, query_bytes=64, key_bytes=160, statistic_bytes=8, latency=3, bytes_per_us=8, blocks=2)
    at = plain.index
    problem = with_attention_exchange(plain, said, [Handing(at["0F0.1"], 1, at["1F0"])])
    took = {name: int(problem.passes.duration[problem.index[name]]) for name in problem.names}
    assert [took[name] for name in ("0FQ0.1", "0FA0.1", "0FH0.1", "0F0.1")] == [10, 20, 10, 30]
    assert sum(took.values()) == plain.passes.duration.sum()
    assert problem.passes.rank[problem.index["0FH0.1"]] == 1
    assert problem.stage_ranks == ((0,), (1,))
    assert arcs(problem, "0FQ0.1", "0FA0.1", "0FH0.1", "0F0.1", "1F0") == {
        ("0FQ0.1", "0FA0.1", 0, 0),
        ("0FA0.1", "0F0.1", 0, 0),
        ("0FA0.1", "0F0.1", 0, 72),  # what comes back
        ("0FQ0.1", "0FH0.1", 3 + 144 // 8, 0),
        ("0FH0.1", "0F0.1", 3 + 72 // 8, 0),
        ("1F0", "0FH0.1", 0, 144 + 72),
    }
    # What waited for F waits for its last part, bytes are held from its first one.
    assert arcs(problem, "0F0", "0FQ0.1", "0F0.1", "1F0.1", "0BW0.1") == {
        ("0F0", "0FQ0.1", 0, 0),
        ("0F0", "0F0.1", 0, 0),
        ("0F0.1", "1F0.1", 0, 0),
        ("0F0.1", "0BW0.1", 0, 0),
        ("0FQ0.1", "0BW0.1", 0, 1000),
        ("0FQ0.1", "0BW0.1", 0, 100),
    }


def test_helpers_behind_one_pass_hold_memory_one_after_the_other() -> None:
    plain = step(3, 1, 3, 40, 20)
    at = plain.index
    said = costs(20, query_bytes=64, blocks=2)
    behind = [Handing(at[name], 1, at["2F0"]) for name in ("0F0.1", "0F0.2")]
    ahead = [Handing(at[name], 1, -1, at["2F0"]) for name in ("0F0.1", "0F0.2")]
    names = ("2F0", "0FH0.1", "0FH0.2")
    held = {(a, b) for a, b, _, size in arcs(with_attention_exchange(plain, said, behind), *names) if size}
    assert held == {("2F0", "0FH0.1"), ("0FH0.1", "0FH0.2")}
    held = {(a, b) for a, b, _, size in arcs(with_attention_exchange(plain, said, ahead), *names) if size}
    assert held == {("0FH0.1", "0FH0.2"), ("0FH0.2", "2F0")}


def test_what_travels_is_the_cheaper_of_the_two() -> None:
    """All queries and some keys, or some queries and all keys: which is fewer bytes does not depend on how much is handed
    over. With as many heads of keys as of queries it is the first from the third slice on, with eight times fewer from the
    ninth, forwards."""
    rng = random.Random(5)
    for _ in range(200):
        q, k, s = rng.randint(1, 400), rng.randint(1, 400), rng.randint(0, 9)
        earlier, blocks, backward = rng.randint(1, 20), rng.randint(1, 8), rng.random() < 0.5
        handed = rng.randint(1, earlier * blocks)
        part = handed / (earlier * blocks)
        both, whole = (2, 4 * q + s) if backward else (1, 2 * q + s)
        first, second = whole + both * part * earlier * k, part * whole + both * earlier * k
        said = AttentionExchange([1], [1], [q], [k], [s], blocks=blocks)
        forth, back = traffic(said, np.array([0]), np.array([earlier]), np.array([handed]), np.array([backward]))
        assert abs(int(forth[0] + back[0]) - min(first, second)) <= 2
        assert part == 1 or queries_travel(q, k, s, earlier, backward) == (first <= second + 1e-6)
    assert [bool(queries_travel(64, 128, 1, j, False)) for j in (1, 2)] == [False, True]
    assert [bool(queries_travel(64, 16, 1, j, False)) for j in (8, 9)] == [False, True]


@pytest.mark.parametrize(("p", "m", "n"), [(2, 1, 2), (4, 3, 4), (5, 3, 3), (8, 2, 16)])
def test_the_reference_is_slimpipes_order(p: int, m: int, n: int) -> None:
    for backward in ({"BW": [2] * p}, {"B": [1] * p, "W": [1] * p}):
        problem = pipeline([1] * p, **backward, microbatches=m, slices=n)
        assert one_forward_one_backward(problem).order == preset("slimpipe", problem).order
    problem = pipeline([1] * p, BW=[2] * p, microbatches=m, slices=n)
    assert even_slots(problem).tolist() == preset("slimpipe", problem).timeline().start.tolist()


@pytest.mark.parametrize(
    ("p", "m", "n", "rest", "plain", "most"),
    [(4, 1, 8, 0, 0.41, 0.11), (4, 2, 8, 8000, 0.25, 0.17), (8, 2, 16, 0, 0.42, 0.12), (16, 4, 16, 16000, 0.35, 0.205)],
)
def test_ranks_that_would_wait_help(p: int, m: int, n: int, rest: int, plain: float, most: float) -> None:
    """Even slices that take unlike times leave SlimPipe's order far from (p − 1)/(mn + p − 1), its bubble with even times
    (arXiv 2504.14519, section 4.1); attention handed over brings it there, or below: ranks help while the pipeline fills."""
    problem = step(p, m, n, rest, 1000, held_until_B=100)
    usual = preset("slimpipe", problem).timeline()
    exchanged = with_attention_exchange(problem, costs(1000))
    schedule = preset("slimpipe", exchanged)
    assert verify(exchanged, schedule) == ()
    timeline = schedule.timeline()
    assert usual.bubble_rate > plain
    assert 1 - problem.work / timeline.makespan < most < (p - 1) / (m * n + p - 1) + 0.02
    assert timeline.peak_bytes == usual.peak_bytes
    assert bound_over_exchanges(problem, costs(1000)) <= timeline.makespan
    assert problem.passes.duration.sum() == exchanged.passes.duration.sum()


def test_a_rank_that_waits_takes_so_much_that_both_are_done_first() -> None:
    """0F0.1 is in attention from 49 to 85 µs, of which 24 µs in 4 blocks can be handed over; rank 2 and 3 wait. By the time
    of messages less is handed over, and nothing where they take longer than all of it."""
    problem = step(4, 1, 6, 30, 24)
    schedule = one_forward_one_backward(problem)
    assert schedule.timeline()["0F0.1"] == (42, 42 + 30 + 36)
    for there, back in ((0, 0), (5, 0), (0, 12), (40, 40)):
        said = costs(24, blocks=4, query_bytes=there, key_bytes=1000, statistic_bytes=back, bytes_per_us=1).checked(4)
        said = said._replace(key_bytes=np.array([0] * 4), query_bytes=np.array([there] * 4))
        first = balanced(schedule, said)[0]
        sent, returned = there, there + back
        done = [36, *(max(36 - 6 * x, sent + 6 * x + returned) for x in range(1, 5))]
        if min(done) < 36:
            assert (problem.names[first.row], first.behind, first.blocks) == ("0F0.1", -1, done.index(min(done)))
            assert problem.passes.rank[first.ahead] in (2, 3)
        else:
            assert problem.names[first.row] != "0F0.1"


@pytest.mark.parametrize("shared", ["rank", "pair", "1+1"])
def test_messages_of_the_exchange_wait_for_links(shared: str) -> None:
    """0F0.1 and 0F1.1 hand attention to rank 1, given last first: lanes still run by number, and so does the bound. Each way
    takes 2 µs and 1 µs behind it, on the link of the messages between stages."""

    def linked(shared: str, *microbatches: int) -> Problem:
        plain = step(2, len(microbatches), 2, 4, 8, comm=3)
        handed = [Handing(plain.index[f"0F{m}.1"], 1, plain.index[f"1F{m}"]) for m in microbatches]
        said = costs(8, query_bytes=2, key_bytes=2, latency=1, bytes_per_us=2, blocks=2)
        given = with_links(plain, shared, 1) if shared else plain
        exchanged = with_attention_exchange(given, said, handed)
        return with_links(exchanged, shared, 1) if shared else exchanged

    problem = linked(shared, 1, 0)
    assert arcs(problem, "0FQ0.1", "0FS0.1", "1FH0.1", "0FH0.1", "0FR0.1", "0F0.1") >= {
        ("0FQ0.1", "0FS0.1", 0, 0),
        ("0FS0.1", "0FH0.1", 1, 0),
        ("0FH0.1", "0FR0.1", 0, 0),
        ("0FR0.1", "0F0.1", 1, 0),
    }
    streams = {one.name: one.streams for one in map(problem.passes.__getitem__, range(len(problem.passes)))}
    assert streams["0FS0.1"] == streams["0MF0"] != streams["0FR0.1"] == streams["1MB0"]
    assert [problem.names[i] for lane in problem.lanes for i in lane if "FS" in problem.names[i]] == ["0FS0.1", "0FS1.1"]
    back, lags = without_links(problem), linked("", 1, 0)
    assert arcs(back, *back.names) == arcs(lags, *lags.names)
    with pytest.raises(BadInput, match="emulate: not with attention for another rank on links that messages share"):
        Times.of(preset("slimpipe", problem), "schedule")
    solve_is_exact(linked(shared, 0))


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_no_exchange_undercuts_the_bound(ratio: float) -> None:
    """Exhaustive: every step with up to two handings, behind every pass of the helper; and the one that is chosen is near
    the best of them."""
    problem, said = step(2, 1, 2, 4, 8, ratio), costs(8, ratio, blocks=2, before=0.5)
    low = bound_over_exchanges(problem, said)
    late = [problem.index[name] for name in ("0F0.1", "1F0.1", "0BW0.1", "1BW0.1")]
    own = [np.flatnonzero(problem.passes.rank == rank).tolist() for rank in (0, 1)]
    values = [optimum(problem)]
    for count in (1, 2):
        for rows in combinations(late, count):
            others = [own[1 - int(problem.passes.rank[row])] for row in rows]
            for behind, blocks in product(product(*others), product((1, 2), repeat=count)):
                handed = [Handing(*one) for one in zip(rows, blocks, behind, strict=True)]
                values.append(optimum(with_attention_exchange(problem, said, handed)))
    reached = [one for one in values if one is not None]
    assert low <= min(reached) < values[0]
    chosen = with_attention_exchange(problem, said)
    assert chosen.passes.are("FH", "BH").any()
    assert solve(chosen, effort=0.3).certificate.value == optimum(chosen) <= 1.1 * min(reached)


def test_it_goes_on_top_of_other_builders() -> None:
    """Recompute, a split backward, several stages a rank: the same work, and schedules that hold. The order on which it was
    decided has a name on all of them, and the search finds none that is longer."""
    rows = [[20, 30, 40, 50]] * 4
    for more in (
        {"BW": rows, "recompute": "all", "held_input": 1, "held_until_B": 9},
        {"B": rows, "W": [9] * 4, "held_until_W": 3, "held_from_B": 2},
        {"BW": rows, "placement": (0, 1, 0, 1), "recompute": "all", "comm": 2},
        {"BW": rows, "placement": "vee", "comm": 2, "held_keys": 1, "held_gradients": 1},
    ):
        plain = pipeline(rows, **more, microbatches=2, slices=4)
        problem = with_attention_exchange(plain, AttentionExchange(10, 10, query_bytes=1, key_bytes=1))
        assert len(problem.passes) > len(plain.passes)
        assert problem.passes.duration.sum() == plain.passes.duration.sum()
        assert problem.routes == plain.routes
        found, named = solve(problem, effort=0.05), preset("slimpipe", problem)
        assert verify(problem, found) == verify(problem, named) == ()
        assert found.certificate.value <= named.timeline().value


def test_a_rank_may_help_behind_a_recompute() -> None:
    """No part of a backward waits for an X here, but the part that rank 0 makes of rank 1's forward does."""
    plain = step(2, 2, 2, 4, 8, recompute="all")
    helped = [Handing(plain.index["1F1.1"], 1, plain.index["0X0"])]
    problem = with_attention_exchange(plain, costs(8, blocks=2, before=0.5), helped)
    named = preset("slimpipe", problem)
    assert verify(problem, named) == ()
    order = named.order["compute:0"]
    assert order.index("1FH1.1") == order.index("0X0") + 1


def test_wrong_exchanges_are_refused_in_a_line() -> None:
    plain, said = step(2, 1, 2, 40, 20), costs(20)
    at = plain.index
    with pytest.raises(BadInput, match="no slices: put slices in before"):
        with_attention_exchange(pipeline([1, 1], BW=[1, 1], microbatches=2), said)
    with pytest.raises(BadInput, match="slices are uneven"):
        with_attention_exchange(replace(plain, slice_lengths=(2.0, 1.0)), said)
    with pytest.raises(BadInput, match="has one already"):
        with_attention_exchange(with_attention_exchange(plain, said), said)
    with pytest.raises(BadInput, match=r"pass 0BW0.1: its attention takes 600 µs, and all of it 140 µs"):
        with_attention_exchange(plain, costs(200))
    for handing, why in (
        (Handing(99, 1, 0), "row 99 is no forward"),
        (Handing(at["0F0.1"], 1, at["0F0"]), "pass 0F0.1: row 0 is no pass of another rank"),
        (Handing(at["0F0.1"], 9, at["1F0"]), "pass 0F0.1: 9 blocks of the 8"),
        (Handing(at["0F0"], 1, at["1F0"]), "pass 0F0: 1 blocks of the 0"),
    ):
        with pytest.raises(BadInput, match=why):
            with_attention_exchange(plain, said, [handing])
    with pytest.raises(BadInput, match=r"pass 0F0\.1 hands over twice"):
        with_attention_exchange(plain, said, [Handing(at["0F0.1"], 1, at["1F0"])] * 2)
    for wrong in ({"blocks": 0}, {"before": 2}, {"bytes_per_us": 0}, {"query_bytes": -1}):
        with pytest.raises(BadInput, match="attention exchange"):
            with_attention_exchange(plain, costs(20, **wrong))
