"""From a state to its answer, held against formulas of the literature, named schedules made elsewhere, and `verify`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from zbsolve import Infeasible, Profile, Schedule, preset, problem_for, verify
from zbsolve.cli.app import main
from zbsolve.explore.page import controls_page, table_part
from zbsolve.explore.playground import MAX_PASSES, Row, answer, compared
from zbsolve.explore.state import BEST, State, commands, own_placement
from zbsolve.util.errors import BadInput

from ..support.profiles import PROFILE, equal_layers

GIB = 2**30


def all_rows(state: State) -> tuple[Row, ...]:
    """The comparison when it is complete."""
    return list(compared(state, answer))[-1]


def test_textbook_times() -> None:
    """At F = B = W: 1F1B takes (m + p − 1)(F + B + W), ZB-H1 (p − 1)(F + B − W) more than the work; rank r of 1F1B holds
    p − r microbatches (arXiv 2401.10241, tables 1 and 2)."""
    state, p, m, t = State(), 4, 12, 10_000
    usual = answer(State(system="1f1b"))
    assert usual.certificate.value == (m + p - 1) * 3 * t
    assert usual.peaks == (4 * GIB, 3 * GIB, 2 * GIB, GIB)
    assert answer(State(system="zb-h1")).certificate.value == m * 3 * t + (p - 1) * t
    best = answer(state)
    assert best.certificate.value == best.certificate.bound == m * 3 * t + (p - 1) * t
    assert verify(best.schedule.problem, best.schedule) == ()


def test_one_state_has_one_answer() -> None:
    state = State(ranks=6, microbatches=10, placement="vee", memory=5, slow_part=2)
    first, second = answer(state), answer(state)
    assert first.schedule.order == second.schedule.order
    assert first.certificate == second.certificate


@pytest.mark.parametrize("placement", ["single", "vee", "loop4"])
def test_the_model_is_the_same_in_every_placement(placement: str) -> None:
    """A slower second part and an output layer of one part: the same work on every chunking, and the slower part where it
    lies in the model."""
    state = State(ranks=4, microbatches=8, placement=placement, slow_part=2, slow_factor=1.5, output=1, until_B=0.3)
    problem = answer(state).schedule.problem
    assert problem.passes.duration.sum() == 8 * 30_000 * (4 + 0.5 + 1)
    first = problem.rows("F", stage=problem.stages // 4)
    assert problem.passes.duration[first[0]] * problem.stages == 4 * 15_000
    assert problem.taken.sum() == pytest.approx(4 * 8 * 0.8 * GIB, rel=1e-8)


def test_memory_is_kept_or_the_rank_is_named() -> None:
    within = answer(State(ranks=8, microbatches=16, placement="vee", memory=4))
    assert max(within.peaks) <= 4 * GIB == within.capacity[0]  # type: ignore[index]
    assert verify(within.schedule.problem, within.schedule) == ()
    over = answer(State(ranks=8, microbatches=16, memory=4, system="1f1b"))
    assert "rank 0 needs" in over.over
    assert over.peaks[0] == 8 * GIB
    with pytest.raises(Infeasible, match=r"rank 0 needs .* for one microbatch"):
        answer(State(memory=0.5))


def test_the_comparison_has_every_system_once() -> None:
    """Values against the same schedules made by `problem_for` and `preset`."""
    state = State(ranks=4, microbatches=8, comm=0.5)
    rows = all_rows(state)
    assert rows[0].state == state
    names = [(row.state.system, row.state.placement) for row in rows]
    assert len(names) == len(set(names))
    assert {BEST, "1f1b", "dualpipe", "v-half", "interleaved"} <= {name for name, _ in names}
    for row in rows:
        if row.state.system in ("1f1b", "zb-v", "dualpipe", "interleaved", "v-half"):
            share = 2 if row.state.placement in ("vee", "loop") else 1
            times = (10_000 // share,) * 3
            held = {"held_until_B": GIB // 2 // share, "held_until_W": GIB // 2 // share, "comm": 500}
            problem = problem_for(row.state.system, 4, 8, *times, **held)
            assert row.answer is not None
            assert row.answer.certificate.value == preset(row.state.system, problem).timeline().makespan
    fitting = [row.answer.certificate.value for row in rows[1:] if row.answer]
    assert fitting == sorted(fitting)


def test_what_does_not_fit_comes_last_with_its_reason() -> None:
    rows = all_rows(State(ranks=5, microbatches=10, memory=3, placement="vee"))
    fits = [row.answer is not None and not row.answer.over for row in rows]
    assert fits == sorted(fits, reverse=True)
    assert [row.answer is not None and bool(row.answer.over) for row in rows].count(True) > 3
    (odd,) = (row for row in rows if row.state.system == "dualpipe")
    assert "5 ranks are no multiple of 2" in odd.why


def test_systems_that_cannot_run_stand_in_their_own_placement_and_share_a_row() -> None:
    rows = list(compared(State(microbatches=4), lambda state: answer(state, equal_layers(4))))[-1]
    for name, placement in (("interleaved", "loop"), ("zb-v", "vee"), ("1f1b", "single")):
        (row,) = (row for row in rows if row.state.system == name)
        assert own_placement(row.state) == placement
        assert (row.answer is None) == (placement != "single")
    cells = re.findall("<tr.*?</tr>", table_part(rows), re.DOTALL)
    (shared,) = (one for one in cells if ">zb-v<" in one)
    assert ">v-half<" in shared
    assert "<td>vee</td>" in shared
    assert ">interleaved<" not in shared


def test_a_shorter_placement_is_said() -> None:
    """Two stages a rank fill the pipe in half the time: 12 · 30 ms and 3 · 5 ms in place of 3 · 10 ms."""
    rows = all_rows(State())
    said = re.search("Shorter in another placement: (.*)</p>", table_part(rows))
    assert said is not None
    best = next(row for row in rows if row.state == State(placement="loop"))
    words = re.sub("<.*?>", "", said[1])
    assert words == "best found in loop takes 3.8% less, 375.00 ms."
    assert 'data-placement="loop"' in said[1]
    assert "Shorter in" not in table_part(all_rows(best.state))


def test_a_placement_that_cannot_be_is_named() -> None:
    rows = all_rows(State(ranks=3, microbatches=6))
    (row,) = (row for row in rows if row.state.system == "dualpipe")
    assert row.answer is None
    assert own_placement(row.state) == "mirror"


def test_a_profile_gives_layers_and_links() -> None:
    found = answer(State(ranks=2, microbatches=4, F=99), equal_layers(8))
    assert found.schedule.problem.layers == (4, 4)
    assert found.certificate.value == 4 * 4 * 30 + 40  # the work of a rank, and rank 1 waits for the first F of rank 0


def test_too_large_a_step_is_refused() -> None:
    with pytest.raises(BadInput, match=f"microbatches: .* more than this page shows \\({MAX_PASSES:,}\\)"):
        answer(State(ranks=64, microbatches=512, placement="loop4"))


def check_commands(query: str, profile: Profile | None, path: str) -> None:
    """The command lines of a state, run, give its schedule and certificate."""
    found = answer(State.parse(f"ranks=2&microbatches=6&{query}"), profile)
    for line in commands(found.state, path, found.options):
        assert main(shlex.split(line)[1:]) == 0
    made = Schedule.load("schedule.json")
    assert made.problem.digest == found.schedule.problem.digest
    assert made.order == found.schedule.order
    assert made.certificate == found.certificate


@pytest.mark.parametrize("query", ["system=zb-v&memory=1", "placement=vee&recompute=all", "system=1f1b", "partition=1,7"])
def test_the_command_gives_the_same_schedule(query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profile = equal_layers(8)
    profile.save("profile.json")
    check_commands(query, profile, "profile.json")


@pytest.mark.parametrize(
    "query", ["offload=half&replicas=2", "slices=2&attention_exchange=yes", "vocabulary=sharded", "shards=2&gathers=4"]
)
def test_every_feature_has_a_control(query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of the page is that of the options of the same names."""
    monkeypatch.chdir(tmp_path)
    PROFILE.save("profile.json")
    check_commands(query, PROFILE, "profile.json")
    assert all(f'name="{one.partition("=")[0]}"' in controls_page(State(), PROFILE) for one in query.split("&"))


@pytest.mark.parametrize(
    "query",
    [
        "",
        "system=dualpipe-v&comm=0.3&until_B=0.333333",
        "placement=loop4&slow_part=2&output=0.7&F=3.333333",
        "placement=0,1,1&backward=fused&memory=5.5",
        "system=interleaved&objective=span",
    ],
)
def test_the_commands_give_the_same_without_a_profile(query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_commands(query, None, "")
