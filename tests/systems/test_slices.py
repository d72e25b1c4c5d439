"""The named schedules of sequence slices: bubbles and memory of the papers, and `solve` in the same memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zbsolve import BadInput, Infeasible, Layer, Link, Profile, Step, pipeline, solve, verify
from zbsolve.build import AttentionExchange, Handing, with_attention_exchange, with_slices
from zbsolve.profile.named_steps import step_for
from zbsolve.search.least_peak import LeastPeak
from zbsolve.systems import PRESETS, preset, presets_of, problem_for

from ..support.slice_problems import paper_order

NAMES = ("slimpipe", "seq1f1b", "terapipe")


@pytest.mark.parametrize(("p", "m", "n"), [(2, 1, 2), (4, 3, 4), (4, 2, 8), (8, 2, 32), (5, 3, 3)])
def test_bubble_and_slices_held(p: int, m: int, n: int) -> None:
    """SlimPipe: bubble (p − 1)/(mn + p − 1), rank r holds n + p − r − 1 slices, where there are as many. TeraPipe: all."""
    for name in NAMES:
        problem = problem_for(name, p, m, 100, 120, 80, slices=n, held_until_W=1)
        schedule = preset(name, problem)
        timeline = schedule.timeline()
        assert verify(problem, schedule) == ()
        assert timeline.bubble_rate == pytest.approx((p - 1) / (m * n + p - 1))
        most = (m * n,) * p if name == "terapipe" else tuple(min(n + p - r - 1, m * n) for r in range(p))
        assert timeline.peak_bytes == most


def test_memory_of_a_rank_falls_from_p_microbatches_to_about_one() -> None:
    """SlimPipe's accumulated activations, M/p·(1 + (p − 1)/n), beside 1F1B's M = p microbatches of a rank's share."""
    p, m, whole = 8, 8, 96
    usual = preset("1f1b", pipeline([96] * p, BW=[192] * p, microbatches=2 * p, held_until_B=whole))
    assert max(usual.timeline().peak_bytes) == p * whole
    for n in (2, 4, 8, 16, 32):
        problem = problem_for("slimpipe", p, m, 96 // n, 96 // n, 96 // n, slices=n, held_until_W=whole // n)
        assert max(preset("slimpipe", problem).timeline().peak_bytes) == whole * (1 + (p - 1) / n)


@pytest.mark.parametrize(("p", "m", "n"), [(2, 1, 2), (4, 3, 4), (4, 2, 8), (8, 2, 32), (4, 5, 2), (8, 3, 5), (4, 3, 7)])
def test_interleaved_slices_and_slices_with_weight_gradients_left(p: int, m: int, n: int) -> None:
    """Seq1F1B-I (2406.03488, section 3.2): 2(p − r − 1) + (v − 1)p + n chunk forwards first where n ≤ p, else a whole
    microbatch and 2(p − r − 1) more; 1F1B's bubble of v times as many units. With ZB-H1's weight gradients n + p − 1 slices
    on every rank, and (p − 1)(F + B − W) of a slice at F = B = W."""
    problem = problem_for("seq1f1b-i", p, m, 100, 120, 80, slices=n, held_until_W=1)
    schedule = preset("seq1f1b-i", problem)
    timeline = schedule.timeline()
    assert verify(problem, schedule) == ()
    assert timeline.bubble_rate == pytest.approx((p - 1) / (2 * m * n + p - 1))
    if n >= p or (p % n == 0 and m % (p // n) == 0):
        units = 2 * n if n >= p else p + n
        assert timeline.peak_bytes == tuple(min(2 * (p - r - 1) + units, 2 * m * n) for r in range(p))
    problem = problem_for("seq1f1b-zb", p, m, 100, 100, 100, slices=n, held_until_W=1)
    timeline = preset("seq1f1b-zb", problem).timeline()
    if m * n >= 2 * p:  # with fewer units weight gradients run out
        assert timeline.makespan == m * n * 300 + (p - 1) * (100 + 100 - 100)
    assert set(timeline.peak_bytes) == {min(n + p - 1, m * n)}


def _causal(length: float, attention: float, n: int) -> list[int]:
    """µs of n even slices of a sequence that takes `length` and, of attention, `attention`."""
    return [round(length / n + attention * (2 * j + 1) / n**2) for j in range(n)]


@pytest.mark.parametrize(
    ("split", "p", "m", "n", "attention"), [(True, 4, 3, 4, 2), (False, 4, 3, 4, 2), (True, 3, 2, 8, 0)]
)
@pytest.mark.parametrize("placement", ["single", "loop"])
def test_solve_is_not_worse_in_the_same_memory(
    split: bool, p: int, m: int, n: int, attention: float, placement: str
) -> None:
    """Each order's memory, with keys, gradients and slices that take longer and longer."""
    stages = p * (2 if placement == "loop" else 1)
    forward, backward, weights = ([_causal(1000, 1000 * a * attention, n)] * stages for a in (1, 2.5, 0))
    times = {"B": backward, "W": weights} if split else {"BW": [[b + 900 // n for b in row] for row in backward]}
    step = {"microbatches": m, "slices": n, "placement": placement, "held_until_W": 2, "held_keys": 1, "comm": 3}
    usual = dict(presets_of(pipeline(forward, **times, **step)))
    assert set(usual) == {"seq1f1b-i"} if placement == "loop" else set(usual) >= {"slimpipe", "terapipe"}
    for schedule in usual.values():
        timeline = schedule.timeline()
        found = solve(pipeline(forward, **times, **step, capacity=timeline.peak_bytes), effort=0.1, prefer=None)
        assert found.certificate.bound <= found.certificate.value <= timeline.makespan


@pytest.mark.parametrize("seed", range(12))
def test_solve_is_never_worse_than_a_papers_order_in_its_own_memory(seed: int) -> None:
    """Random steps; `python -m benchmarks slices slices_search` tries more and larger ones."""
    _, named = paper_order(seed, passes=240)
    assert verify(named.problem, named) == ()
    certificate = solve(named.problem, effort=0.02, prefer=None).certificate
    assert certificate.bound <= certificate.value <= named.timeline().makespan


def test_orders_come_however_little_time_there_is() -> None:
    """Of 64 slices of one sequence every pass is a lane: bounds in closed form once took longer than the whole search."""
    rows = [[100 + 4 * j for j in range(64)]] * 8
    named = preset("slimpipe", problem_for("slimpipe", 8, 1, rows, rows, rows, slices=64, held_until_W=1))
    assert len(named.problem.lanes) == len(named.problem.passes) == 1024
    problem = replace(named.problem, capacity=named.timeline().peak_bytes)
    assert solve(problem, seconds=1e-3, prefer=None).certificate.value <= named.timeline().makespan


@pytest.mark.parametrize("m", [1, 8])
def test_the_least_memory_of_32_slices_on_8_ranks_is_proven_where_nothing_limits_it(m: int) -> None:
    """One microbatch of a rank's share, 32 slices, of one sequence; 39 slices of several: no schedule as short has less."""
    told: list[LeastPeak] = []
    problem = problem_for("slimpipe", 8, m, 10, 10, 10, slices=32, held_until_W=1)
    found = solve(problem, effort=0.1, peaks=told.append)
    assert found.certificate.status == "optimal"
    assert max(found.timeline().peak_bytes) == told[-1].floor == (32 if m == 1 else 39)


def test_of_32_slices_on_8_ranks_a_rank_needs_little_more_than_one_microbatch_and_that_is_the_least() -> None:
    """SlimPipe's accumulated activations, 1 + (p − 1)/n microbatches of a rank's share, beside 1F1B's p: the least of all
    schedules that are as short, which is proven. The first backward of the last stage waits for all n slices, so no schedule
    at all has less than one microbatch."""
    p, m, n = 8, 4, 32
    problem = problem_for("slimpipe", p, m, 10, 10, 10, slices=n, held_until_W=1)
    usual, told = preset("slimpipe", problem).timeline(), []
    found = solve(problem, effort=0.3, peaks=told.append)
    assert found.certificate.status == "optimal"
    assert found.certificate.value == usual.makespan == 30 * (m * n + p - 1)
    assert max(found.timeline().peak_bytes) == max(usual.peak_bytes) == n + p - 1 == told[-1].floor
    assert told[-1].proven
    with pytest.raises(Infeasible, match="rank 0 needs 32 bytes for the slices of one microbatch, but has 31 bytes"):
        problem_for("slimpipe", p, m, 10, 10, 10, slices=n, held_until_W=1, capacity=n - 1)


def test_seq1f1b_cuts_slices_of_equal_work() -> None:
    """`--method seq1f1b` of n slices has them as long as each other (2406.03488, section 3.3), where SlimPipe's are even."""
    times = {"F": 100.0, "B": 100.0, "W": 100.0, "BW": 200.0, "attention_F": 50.0, "attention_B": 50.0}
    sizes = {"held_until_B": 9, "held_until_W": 0, "parameter_bytes": 1, "output_bytes": 1, "kv_bytes": 2}
    layers = tuple(Layer(f"{i}", **times, **sizes) for i in range(4))
    profile = Profile("given", "four", layers, Link(1, 1e9), 1.0, None, {}, {})
    step = Step(4, 3, slices=4)
    cut, even = (step_for(name, profile, step) for name in ("seq1f1b", "slimpipe"))
    assert (cut.slices, even.slices) == ("4:even-work", 4)
    work = [one.problem(profile).passes.duration.reshape(-1, 4) for one in (cut, even)]
    first = [rows[0] + rows[-1] for rows in work]  # F and BW of a microbatch's four slices
    assert max(first[0]) - min(first[0]) <= 3 < max(first[1]) - min(first[1])
    with pytest.raises(BadInput, match="seq1f1b-zb: needs B and W apart"):
        preset("seq1f1b-zb", problem_for("slimpipe", 2, 2))


def test_other_orders_say_that_they_know_no_slices() -> None:
    problem = with_slices(pipeline([1] * 4, [1] * 4, [1] * 4, microbatches=8), 2)
    assert {name for name, _ in presets_of(problem)} == {*NAMES, "seq1f1b-zb"}
    for name in set(PRESETS) - {*NAMES, "seq1f1b-zb"}:
        with pytest.raises(BadInput):
            preset(name, problem)
    for name in ("1f1b-split", "gpipe", "zb-h1"):
        with pytest.raises(BadInput, match=f"{name}: is an order of whole sequences, and the step has 2 slices of each"):
            preset(name, problem)
    exchanged = with_attention_exchange(
        problem, AttentionExchange(0, 0), [Handing(problem.index["0F0.1"], 1, problem.index["1F0"])]
    )
    with pytest.raises(BadInput, match="terapipe: says nothing of attention that ranks make for each other"):
        preset("terapipe", exchanged)
    with pytest.raises(BadInput, match="slimpipe: the step has no slices"):
        preset("slimpipe", pipeline([1] * 4, [1] * 4, microbatches=8))
    with pytest.raises(BadInput, match=r"placement single only; for vee there are no named ones"):
        preset("slimpipe", pipeline([1] * 4, [1] * 4, [1] * 4, microbatches=2, slices=2, placement="vee"))
