"""Messages that share a link: hand numbers, exhaustive optima, what a profile says, a published comparison."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from zbsolve import BadInput, Layer, Link, Problem, Profile, pipeline, preset, solve, verify
from zbsolve.build import with_cards, with_exchange, with_links, with_sharding, with_slices, without_links
from zbsolve.exec.lowering import check_runs
from zbsolve.interchange.torch_csv import torch_order
from zbsolve.profile.given import given_profile
from zbsolve.schedule.handover import most_waiting
from zbsolve.show.tracks import tracks_of

from ..support.exec_tools import random_schedule
from ..support.stream_checks import bounds_hold, solve_is_exact


def random_links(seed: int) -> Problem:
    """Two or three ranks, one to three microbatches, links of all kinds, some with memory and with sums or gathers."""
    rng = random.Random(seed)
    placement = rng.choice([(0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0, 2, 1)])
    ranks, stages = max(placement) + 1, len(placement)
    fused = rng.random() < 0.4
    m = rng.randint(1, {2: 3, 3: 2, 4: 1 + fused}[stages])  # larger ones have too many orders
    times = [[rng.randint(1, 6) for _ in placement] for _ in range(3)]
    backward = {"BW": times[1]} if fused else {"B": times[1], "W": times[2]}
    room = {} if rng.random() < 0.5 else {"capacity": [rng.choice([4, 6])] * ranks, "held_until_B": 1, "held_until_W": 1}
    comm = [rng.randint(0, 9) for _ in placement[1:]]
    problem = pipeline(times[0], **backward, placement=placement, microbatches=m, comm=comm, **room)
    beside = rng.choice(["", "", "sums", "gathers"])
    if beside == "sums":
        problem = with_exchange(problem, [rng.randint(1, 6) for _ in placement], replicas=True)
    if beside == "gathers":
        problem = with_sharding(problem, rng.randint(1, 4), rng.randint(1, 4))
    shared = rng.choice(["rank", "rank", "pair", "1+1" if ranks == 2 else rng.choice(["1+2", "2+1"])])
    problem = with_links(problem, shared, rng.randint(0, 3))
    return with_cards(problem) if shared == "rank" and rng.random() < 0.7 else problem


@pytest.mark.parametrize("seed", range(40))
def test_bounds_and_values_on_random_links(seed: int) -> None:
    problem = random_links(seed)
    if len(problem.passes) > 26:
        problem = problem.head(1)
    bounds_hold(problem)
    if seed % 4 == 0:
        solve_is_exact(problem)


def small(m: int = 3, **more: object) -> Problem:
    """Two ranks, F = BW = 1 µs, a message of 6 µs."""
    return pipeline([1, 1], BW=[1, 1], microbatches=m, comm=6, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("shared", ["rank", "pair", "1+1"])
def test_messages_wait_for_each_other(shared: str) -> None:
    """5 µs of each message on the link, 1 µs behind it: forwards' go out at 1, 6 and 11, so 1F2 runs from 17 and 1BW2 from
    18; backwards' at 9, 14 and 19, so 0BW2 runs from 25 to 26. As lags: rank 1 works from 7 to 13, and 0BW2 ends at 20."""
    problem = with_links(small(), shared, 1)
    e, names = problem.edges, problem.names
    found = {(names[a], names[b], lag) for a, b, lag in zip(e.before, e.after, e.lag.tolist(), strict=True)}
    assert found >= {("0F1", "0MF1", 0), ("0MF1", "1F1", 1), ("1BW2", "1MB2", 0), ("1MB2", "0BW2", 1)}
    schedule, free = solve(problem, effort=0.3), solve(small(), effort=0.3)
    assert (schedule.certificate.value, schedule.certificate.bound) == (26, 26)  # type: ignore[union-attr]
    assert free.certificate.value == 20  # type: ignore[union-attr]
    assert [schedule.timeline()[f"0MF{i}"] for i in range(3)] == [(1, 6), (6, 11), (11, 16)]
    back = without_links(problem)
    assert sorted(zip(back.edges.lag.tolist(), back.edges.carries.tolist(), strict=True)) == sorted(
        zip(small().edges.lag.tolist(), small().edges.carries.tolist(), strict=True)
    )
    assert without_links(small()) == small()
    assert torch_order(schedule).rows[0][:3] == ("0F0", "0F1", "0F2")  # engines send by themselves


def test_messages_of_a_stage_on_links_of_their_own_do_not_wait_for_each_other() -> None:
    """Two directions: what rank 1 sends of microbatch 0 goes to rank 2, and of microbatch 1 to rank 0."""
    mirror = pipeline([[7, 4], 3, 1], BW=[[10, 9], 2, [7, 11]], placement=((0, 1, 2), (2, 1, 0)), microbatches=2, comm=6)
    problem = with_links(mirror, "pair")
    solve_is_exact(problem)
    assert solve(problem, effort=0.1).certificate.value == 60


def test_a_sum_and_a_message_share_a_card() -> None:
    """1BW0 ends at 9. Its message goes first, to 14: 0BW0 runs from 15 and 0C0 to 20; 1C0 waits for the card until 14."""
    plain = with_exchange(small(1), 4, replicas=True)
    for problem, start in ((with_cards(with_links(plain, "rank", 1)), 14), (with_links(plain, "rank", 1), 9)):
        schedule = solve(problem, effort=0.3)
        assert schedule.certificate.value == schedule.certificate.bound == 20  # type: ignore[union-attr]
        assert schedule.timeline()["1C0"][0] == start
    assert problem.members.keys() >= {"in:0", "out:0", "in:1", "out:1"}
    assert {track.stream: track.rank for track in tracks_of(problem)}["in:0"] == 0


def test_only_messages_between_sites_share_their_link() -> None:
    problem = with_links(pipeline([1] * 4, BW=[1] * 4, microbatches=2, comm=[2, 9, 2]), "2+2", 3)
    assert [name for name in problem.names if "M" in name] == ["1MF0", "1MF1", "2MB0", "2MB1"]
    assert problem.streams[4:] == ("site:0-1", "site:1-0")
    assert sorted({*problem.edges.lag.tolist()}) == [0, 2, 3]


def test_messages_of_larger_microbatches_take_longer_on_the_link_alone() -> None:
    larger = with_links(small(2), "rank", 1).scaled([1, 2])
    assert larger.passes.duration[larger.rows("MF", "MB")].tolist() == [5, 10, 5, 10]
    assert set(larger.edges.lag.tolist()) == {0, 1}


def test_slices_have_messages_of_their_own() -> None:
    sliced = with_links(with_slices(pipeline([1, 1], BW=[1, 1], microbatches=4, comm=6), 2), "pair", 1)
    assert {"0MF0", "0MF0.1", "1MB1.1"} <= set(sliced.names)
    assert verify(sliced, random_schedule(sliced)) == ()


LAYERS = (Layer("one", 10, 10, 10, 20, 8, 0, 4, 40),) * 4
PROFILE = Profile("given", "four", LAYERS, Link(5.0, 1.0), 0.0, None, {}, {})


def test_what_a_profile_says(tmp_path: object) -> None:
    between = replace(PROFILE, site_link=Link(100.0, 0.5, shared="2+2"))
    shared = replace(PROFILE, link=Link(5.0, 1.0, shared="rank"))
    for profile, sent, lags in ((between, {80}, {0, 45, 100}), (shared, {40}, {0, 5}), (PROFILE, set(), {0, 45})):
        again = Profile.from_json(profile.to_json())
        assert again == profile
        problem = again.problem(4, 3)
        rows = np.flatnonzero(problem.passes.that(feature="links"))
        assert set(problem.passes.duration[rows].tolist()) == sent
        assert set(problem.edges.lag.tolist()) == lags
    sums = shared.problem(4, 3, replicas=2)
    assert ("comm:1", "out:1", "in:1") in {one.streams for one in sums.passes}
    apart = replace(shared, shard_link=Link(1.0, 9.0)).problem(4, 3, replicas=2)
    assert ("comm:1",) in {one.streams for one in apart.passes}
    assert "shared" not in PROFILE.to_json()["link"]
    assert "site_link" not in PROFILE.to_json()


def test_bytes_that_wait_for_a_link_lie_on_its_sender() -> None:
    """Rank 0 has made its three messages of 40 bytes at 30, and the first is on the link until 50."""
    slow = replace(PROFILE, link=Link(5.0, 1.0, shared="rank"))
    assert most_waiting(preset("gpipe", slow.problem(4, 3)))[0] == 120


def test_numbers_say_it() -> None:
    words = {"ranks": "4", "F": "10ms", "BW": "20ms"}
    one = given_profile({**words, "comm": "12ms", "latency": "2ms", "shared": "rank"})
    problem = one.problem(4, 2)
    assert set(problem.passes.duration[problem.rows("MF")].tolist()) == {10_000}
    sites = {"sites": "1+3", "site-latency": "10ms", "site-bandwidth": "1GB/s", "message-bytes": "4MB"}
    assert given_profile({**words, **sites}).site_link == Link(10_000.0, 1000.0, shared="1+3")
    for wrong, line in (
        ({"comm": "12ms", "shared": "card"}, "shared 'card': rank, pair, or sites by their ranks such as 4+4"),
        ({"comm": "12ms", "latency": "2ms"}, "comm says how long messages take: leave out latency and bandwidth"),
        ({"comm": "12ms", "shared": "2+2"}, "field 'link': sites are of 'site_link'"),
        ({"sites": "2+2"}, "sites: message-bytes, site-latency and site-bandwidth say how long messages take, not comm"),
        ({**sites, "sites": "4"}, "shared '4': rank, pair, or sites by their ranks such as 4+4"),
    ):
        with pytest.raises(BadInput) as error:
            given_profile({**words, **wrong})
        assert str(error.value) == line


def test_wrong_use() -> None:
    for problem, shared, line in (
        (small(blocking=True), "rank", "links: messages of this step occupy their sender, so they wait for no link"),
        (small(), "2+2", "sites '2+2': of 4 ranks, and there are 2"),
    ):
        with pytest.raises(BadInput) as error:
            with_links(problem, shared)
        assert str(error.value) == line
    problem = small()
    silent = replace(problem, edges=replace(problem.edges, carries=0 * problem.edges.carries))
    with pytest.raises(BadInput, match="links: edge 0F0 → 1F0 takes a message's time, but hands on no activation"):
        with_links(silent, "pair")
    linked = with_links(small(1), "pair", 1)
    carries = np.where(linked.edges.after == linked.index["1MB0"], 0, linked.edges.carries)
    with pytest.raises(BadInput, match="pass 1MB0: no edge on its rank brings what it sends"):
        check_runs(replace(linked, edges=replace(linked.edges, carries=carries)))


def crosspipe(fused: bool = False) -> Problem:
    """M70 on two sites of four stages, 16 microbatches, in 1F1B's memory; messages between the sites take twice F of their
    link. F is 38 ms (CrossPipe, ATC'25, section 7.1); B and W follow from 1F1B's and ZB-H1's times without delays (Table 5,
    first row: 0.151 = 23/16 (F + BW), 0.133 = F + B + W + 7/16 (F + B − W))."""
    backward = {"BW": [67_000] * 8} if fused else {"B": [46_500] * 8, "W": [20_500] * 8}
    room = {"held_until_W": 1, "capacity": [8] * 8}
    plain = pipeline([38_000] * 8, **backward, microbatches=16, comm=[0, 0, 0, 76_000, 0, 0, 0], **room)  # type: ignore[arg-type]
    return with_links(plain, "4+4")


def test_crosspipes_comparison() -> None:
    """Up to 21.9 % less than the best static order with messages of their own (section 7.1, measured). By the model: the
    best static order is ZB-H1, and what is proven best takes 21.8 % less."""
    static = [preset(name, crosspipe(name == "1f1b")).timeline().makespan for name in ("1f1b", "zb-h1")]
    found = solve(crosspipe(), effort=0.5).certificate
    assert found is not None
    assert found.value == found.bound
    assert 1 - found.value / min(static) == pytest.approx(0.219, abs=0.002)
