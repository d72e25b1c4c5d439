"""Schedules in two directions against their papers' formulas."""

from __future__ import annotations

import pytest

from zbsolve import BadInput, pipeline, solve, verify
from zbsolve.problem.placement import mirror, parse_routes, vee
from zbsolve.systems import overlapped, preset


def mirrored(name, p, m, F=1, BW=None, B=None, W=None, pairs=1, **options):
    problem = pipeline(
        F, B, W, BW, placement=mirror(p, pairs), microbatches=m, **{"held_until_W": 1, **options}
    )  # one unit of memory a microbatch
    schedule = preset(name, problem)
    assert verify(problem, schedule) == ()
    return schedule.timeline()


@pytest.mark.parametrize(("p", "pairs"), [(2, 1), (4, 1), (6, 1), (8, 1), (8, 2), (12, 2), (12, 3)])
@pytest.mark.parametrize("units", [1, 2, 4])
def test_chimera_bubble_and_memory(p, pairs, units):
    """arXiv 2107.06925, table 2 (f pairs): bubble (p − 2f)/(2fm + p − 2f), activations (p − p/2f + 1) to p; F = B."""
    m = p * units
    timeline = mirrored("chimera", p, m, BW=1, pairs=pairs)
    bubble = (p - 2 * pairs) / (2 * pairs * m + p - 2 * pairs)
    assert timeline.bubble_rate == pytest.approx(bubble, abs=1e-12)
    assert (min(timeline.peak_bytes), max(timeline.peak_bytes)) == (p - p // (2 * pairs) + 1, p)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_gems_runs_one_microbatch_behind_the_other(p, m):
    """A period of (2p + 1)F with the full backward 2F: bubble (p − 1)/(p + 1/2); one microbatch held (derived)."""
    if p % 2:
        with pytest.raises(BadInput, match="3 ranks are no multiple of 2"):
            mirror(p)
        return
    timeline = mirrored("gems", p, m, BW=2)
    assert timeline.makespan == 3 * p + (m - 1) * (2 * p + 1)
    period = (mirrored("gems", p, m + 2, BW=2).makespan - timeline.makespan) / 2
    assert 1 - 3 / period == pytest.approx((p - 1) / (p + 1 / 2))
    assert set(timeline.peak_bytes) == {1}


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("more", [0, 2, 16])
def test_dualpipe_bubble_and_memory(p, more):
    """DeepSeek's table (deepseek-ai/DualPipe): activations p + 1, bubble (p/2 − 1)(F&B + B − 3W), B the full backward.

    There F&B is one block: its backward's successor waits for both. Here F and B of a pair are passes of their own, one
    after the other, so each pair's successors start earlier, and the bubble is (p/2 − 1)(F + B − W), B alone.
    """
    m, (F, B, W) = 2 * p + more, (3, 4, 2)
    timeline = mirrored("dualpipe", p, m, F, B=B, W=W)
    ours, theirs = (p // 2 - 1) * (F + B - W), (p // 2 - 1) * ((F + B + W) + (B + W) - 3 * W)
    assert timeline.makespan - m * (F + B + W) == ours <= theirs
    assert set(timeline.peak_bytes) == {p + 1}


@pytest.mark.parametrize("p", [2, 4, 8, 16])
@pytest.mark.parametrize("more", [0, 2, 16])
def test_dualpipe_as_published(p, more):
    """DeepSeek-V3 (arXiv 2412.19437), table 2, F = B's half = W = 1: a pair F&B is one block, here as long as its parts. The
    bubble is (p/2 − 1)(F&B + B − 3W), 6 on 8 ranks, with p + 1 activations; on half the ranks DualPipeV's is the same."""
    m = 2 * p + more
    bubble = (p // 2 - 1) * (3 + 2 - 3)
    for name, placement, work in (("dualpipe", mirror(p), 3 * m), ("dualpipe-v", vee(p // 2), 6 * m)):
        schedule = preset(name, pipeline(1, 1, 1, placement=placement, microbatches=m, held_until_W=1))
        blocks = overlapped(schedule, 3)
        assert verify(blocks.problem, blocks) == ()
        assert blocks.timeline().makespan - work == bubble
        assert set(blocks.timeline().peak_bytes) == {p + 1}


def test_pairs_take_the_time_that_was_measured_of_both():
    schedule = preset("dualpipe", pipeline(1, 1, 1, placement=mirror(2), microbatches=8))
    plain, quicker = (overlapped(schedule, times).timeline().makespan for times in (3, {(0, 1): 2, (1, 0): 3}))
    assert plain == 24
    assert quicker == 24 - 3  # each rank has three pairs of each kind, and no bubble
    with pytest.raises(BadInput, match=r"overlapped: no time of stages \(1, 0\) together"):
        overlapped(schedule, {(0, 1): 2})
    with pytest.raises(BadInput, match="overlapped: no forward stands before a full backward"):
        overlapped(preset("gpipe", pipeline(1, BW=2, placement=(0, 1), microbatches=4)), 3)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("more", [0, 2, 16])
def test_dualpipe_v_at_unit_times(p, more):
    """Activations as DualPipe on twice the ranks: 2p + 1 chunks; known before: p = 4, m = 8: makespan 51, 9 chunks."""
    m = 2 * p + more
    problem = pipeline(1, 1, 1, placement=vee(p), microbatches=m, held_until_W=1)
    schedule = preset("dualpipe-v", problem)
    assert verify(problem, schedule) == ()
    assert set(schedule.timeline().peak_bytes) == {2 * p + 1}
    assert schedule.timeline().makespan == 6 * m + p - 1
    if (p, m) == (4, 8):
        assert schedule.timeline().makespan == 51


def test_wrong_use_is_named():
    def on(placement, m, p=4):
        return pipeline(1, 1, 1, placement=parse_routes(placement, p), microbatches=m)

    with pytest.raises(BadInput, match="chimera: is defined for placement mirror only"):
        preset("chimera", on("single", 4))
    with pytest.raises(BadInput, match="chimera: 3 microbatches are not as many for each of its 2 pipelines"):
        preset("chimera", on("mirror", 3))
    with pytest.raises(
        BadInput, match="dualpipe: needs an even number of ranks and microbatches, at least 2 a rank; got 4 and 6"
    ):
        preset("dualpipe", on("mirror", 6))
    with pytest.raises(BadInput, match="dualpipe-v: needs at least 2 microbatches a rank; got 7 for 4 ranks"):
        preset("dualpipe-v", on("vee", 7))
    with pytest.raises(BadInput, match="dualpipe-v: is defined for placement vee only"):
        preset("dualpipe-v", on("loop", 8))
    with pytest.raises(BadInput, match="5 ranks are no multiple of 2"):
        on("mirror", 4, 5)
    with pytest.raises(BadInput, match="dualpipe: needs B and W apart"):
        preset("dualpipe", pipeline(1, BW=2, placement=mirror(2), microbatches=4))


@pytest.mark.parametrize("name", ["gems", "chimera", "dualpipe"])
def test_gradients_are_exchanged_once_both_replicas_have_theirs(name):
    problem = pipeline(3, 4, 2, placement=mirror(4), microbatches=8, exchange=7)
    schedule = preset(name, problem)
    assert verify(problem, schedule) == ()
    timeline = schedule.timeline()
    for stage in range(4):
        gradients = max(timeline[f"{stage}W{m}"][1] for m in range(8))
        for place in range(2):
            start, end = timeline[f"{stage}C{place}"]
            assert start >= gradients
            assert end == start + 7


def test_solve_is_never_worse_than_the_presets_in_their_own_memory():
    for name in ("chimera", "dualpipe"):
        free = pipeline(3, 4, 2, placement=mirror(4), microbatches=8, held_until_B=2, held_until_W=1)
        mine = preset(name, free).timeline()
        room = pipeline(
            3, 4, 2, placement=mirror(4), microbatches=8, held_until_B=2, held_until_W=1, capacity=list(mine.peak_bytes)
        )
        found = solve(room, effort=0.1).certificate
        assert found.bound <= found.value <= mine.makespan
