"""Schedules side by side: published numbers, times that add up, differences by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zbsolve import BadInput, Schedule, pipeline, preset, solve
from zbsolve.search.certify import proven
from zbsolve.show import compare_schedules, schedules_as_text
from zbsolve.show.schedule_comparison import TimeShares, time_shares
from zbsolve.show.schedule_comparison_text import comparison_as_page, verdict_line


def step(m: int = 8, **options):
    return pipeline([1] * 4, BW=[1] * 4, microbatches=m, held_until_W=1, **options)


def test_1f1b_has_its_published_numbers() -> None:
    """1F1B with p=4, m=8 and passes of 1 takes 22, of which 6 are bubble; ranks hold 4, 3, 2 and 1 microbatches."""
    row = compare_schedules([("1f1b", preset("1f1b", step()))]).rows[0]
    assert (row.value, row.bubble, row.peaks) == (22, pytest.approx(6 / 22), (4, 3, 2, 1))
    assert row.shares[0] == TimeShares(work=16, warm_up=3, steady=0, cool_down=3)
    assert row.shares[3] == TimeShares(work=16, warm_up=3, steady=0, cool_down=3)


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_shares_add_up_to_the_value(name: str, objective: str) -> None:
    problem = pipeline([3, 4, 5], [4, 4, 5], [2, 2, 1], microbatches=5, comm=2, objective=objective)
    if name in ("gpipe", "1f1b"):
        problem = pipeline([3, 4, 5], BW=[6, 6, 6], microbatches=5, comm=2, objective=objective)
    schedule = preset(name, problem)
    for rank in range(3):
        one = time_shares(schedule, rank)
        assert one.work + one.warm_up + one.steady + one.cool_down == schedule.timeline().value
        assert min(one.warm_up, one.steady, one.cool_down) >= 0


def test_differences_name_the_first_pass_a_rank() -> None:
    problem = pipeline([1, 1], BW=[1, 1], microbatches=2)
    one = Schedule(problem, {"compute:0": ("0F0", "0F1", "0BW0", "0BW1"), "compute:1": ("1F0", "1BW0", "1F1", "1BW1")})
    other = Schedule(problem, {"compute:0": ("0F0", "0F1", "0BW0", "0BW1"), "compute:1": ("1F0", "1F1", "1BW0", "1BW1")})
    rows = compare_schedules([("one", one), ("other", other)]).rows
    assert rows[0].difference is None
    assert rows[1].difference.first == ((1, 1, "1BW0", "1F1"),)
    assert rows[1].difference.moved == 3  # 1F1 follows 1F0, 1BW0 follows 1F1, 1BW1 follows 1BW0
    assert "rank 1, place 2: 1F1 in place of 1BW0" in schedules_as_text(compare_schedules([("one", one), ("other", other)]))


def test_other_work_is_absent_with_the_reason() -> None:
    first = preset("1f1b", step())
    others = {
        "fewer": (preset("1f1b", step(6)), "a step of 6 microbatches, not 8: not the same work"),
        "span": (preset("1f1b", step(objective="span")), "its objective is span, not makespan"),
        "deeper": (preset("1f1b", pipeline([1] * 2, BW=[1] * 2, microbatches=8)), "on 2 ranks, not 4"),
    }
    named = [("first", first), *((name, schedule) for name, (schedule, _) in others.items())]
    comparison = compare_schedules(named, [("mine", "no such file")])
    assert [row.name for row in comparison.rows] == ["first"]
    assert comparison.absent == (("mine", "no such file"), *((name, why) for name, (_, why) in others.items()))
    text = schedules_as_text(comparison)
    assert all(f"{name}: cannot be: {why}" in text for name, why in comparison.absent)
    with pytest.raises(BadInput, match="mine: no such file"):
        compare_schedules([], [("mine", "no such file")])


def test_the_text_says_which_is_best_and_what_is_proven() -> None:
    split = pipeline([1] * 4, [1] * 4, [1] * 4, microbatches=8)
    fused = preset("1f1b", pipeline([1] * 4, BW=[2] * 4, microbatches=8))
    comparison = compare_schedules([("1f1b", fused), ("best", solve(split, effort=0.2))])
    assert comparison.best.name == "best"
    text = schedules_as_text(comparison)
    assert "best against 1f1b: passes F BW → F B W\n" in text
    assert f"best takes {1 - comparison.best.value / 33:.2%} less time than 1f1b" in text
    assert comparison.to_json()["schedules"][1]["certificate"]["value"] == comparison.best.value


def test_of_many_ranks_the_largest_and_the_smallest_peak_are_shown() -> None:
    wide = preset("1f1b", pipeline([1] * 20, BW=[1] * 20, microbatches=20, held_until_W=1))
    text = schedules_as_text(compare_schedules([("wide", wide)]))
    assert "wide      20 B on rank 0 to 1 B on rank 19" in text


def test_schedules_of_one_problem_share_the_highest_bound() -> None:
    """A weak bound beside a strong one of the same problem is raised; a bound of another problem, or above a row, is not."""
    weak, other = (solve(step(m), method="greedy", effort=0.05) for m in (8, 8))
    proven = weak.certificate
    assert proven is not None
    low = weak.certified(replace(proven, bound=1, proof="weak"))
    rows = compare_schedules([("low", low), ("other", other)]).rows
    assert [row.certificate.bound for row in rows] == [proven.bound] * 2
    assert rows[0].certificate.proof == proven.proof
    high = other.certified(replace(proven, bound=proven.value + 1))
    elsewhere = low.certified(replace(low.certificate, digest="another"))
    for beside in (high, elsewhere):
        assert compare_schedules([("low", low), ("beside", beside)]).rows[0].certificate.bound == 1


def test_a_bound_that_only_a_file_says_is_neither_shared_nor_called_proven() -> None:
    """GPipe's file says that nothing is shorter."""
    gpipe = preset("gpipe", pipeline([10] * 4, [10] * 4, [10] * 4, microbatches=6))
    honest = proven(gpipe)
    assert honest.certificate is not None
    false = proven(honest.certified(replace(honest.certificate, bound=240)))
    assert verdict_line(compare_schedules([("false", false)])).endswith("but a file says: no order of its passes is shorter")
    compared = compare_schedules([("honest", honest), ("false", false)])
    assert verdict_line(compared).endswith("proven: no order of its passes takes more than 12.50% less")


def test_the_page_says_the_first_the_best_and_the_proof() -> None:
    """1F1B with p = 4, m = 8, F = 1 and BW = 2 takes 33, GPipe as long: (m + p − 1)(F + BW). Of equals the first is best."""
    fused = pipeline([1] * 4, BW=[2] * 4, microbatches=8, held_until_W=1)
    named = [("<gpipe>", preset("gpipe", fused)), ("1f1b", preset("1f1b", fused))]
    page = comparison_as_page(compare_schedules(named, [("mine", "no such file")]))
    assert "<h1>&lt;gpipe&gt; is the shortest of them</h1>" in page
    assert "<p>The shortest makespan of 4 ranks, 8 microbatches.</p>" in page  # stages and passes are not all alike
    assert "<dd>33 µs<small>the first, bubble 27.27%, peak 8 B</small></dd>" in page
    assert "Nothing: the first is the shortest of them." in page
    assert "<td>1f1b</td><td>single</td><td>33</td><td>+0.00%</td><td>27.27%</td>" in page
    assert "mine: cannot be: no such file" in page
    quick = solve(pipeline([1] * 4, [1] * 4, [1] * 4, microbatches=8, held_until_W=1), effort=0.2)
    page = comparison_as_page(compare_schedules([*named, ("best", quick)]))
    value = int(quick.timeline().value)
    assert f"<dt>best</dt><dd>{value} µs<small>{value / 33 - 1:+.2%}, bubble {1 - 24 / value:.2%}" in page
    assert "<p>best against &lt;gpipe&gt;: passes F BW → F B W</p>" in page
