"""What `solve` prints and puts into its JSON: peaks a rank, and the changes against 1F1B."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from zbsolve import Layer, Link, Profile, Schedule, pipeline, preset, solve
from zbsolve.build import with_offload
from zbsolve.cli.app import main
from zbsolve.show.sentences import certificate_lines
from zbsolve.show.solved_text import MAX_RANKS, Solved, changes, solved_as_text

from ..support.profiles import equal_layers

STEP = {"F": [10] * 4, "B": [12] * 4, "W": [8] * 4, "microbatches": 8, "held_until_B": 1 << 20, "held_until_W": 1 << 20}


@pytest.fixture
def profile(tmp_path) -> str:
    equal_layers().save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def test_the_changes_are_those_of_fused_1f1b(profile: str, tmp_path, capsys) -> None:
    out = str(tmp_path / "schedule.json")
    assert main(["solve", profile, "--ranks", "4", "--microbatches", "8", "--effort", "0.2", "--json", "-o", out]) == 0
    body = json.loads(capsys.readouterr().out)
    usual = preset("1f1b", Profile.load(profile).problem(4, 8, fused=True)).timeline()
    assert body["against_1f1b"]["value"] == usual.makespan == 11 * 60
    assert tuple(body["against_1f1b"]["peaks"]) == usual.peak_bytes
    assert body["against_1f1b"]["time_change"] == pytest.approx(body["value"] / 660 - 1)
    assert body["against_1f1b"]["memory_change"] == pytest.approx(max(body["peaks"]) / max(usual.peak_bytes) - 1)
    assert main(["check", out]) == 0


@pytest.mark.parametrize(
    ("placement", "stages", "each", "stages_a_rank"),
    [
        ("single", 4, "1", [1, 1, 1, 1]),
        ("loop", 8, "2", [2, 2, 2, 2]),
        ("0,1,2,3,0", 5, "1 to 2", [2, 1, 1, 1]),
        ("single/3,2,1,0", 4, "2", [2, 2, 2, 2]),
    ],
)
def test_every_answer_says_where_stages_are(
    placement: str, stages: int, each: str, stages_a_rank: list[int], profile: str, capsys
) -> None:
    step = ["solve", profile, "--ranks", "4", "--microbatches", "4", "--placement", placement, "--effort", "0.02"]
    assert main(step) == 0
    assert f"\nplacement {placement}: {stages} stages on 4 ranks, {each} a rank\n" in capsys.readouterr().out
    assert main([*step, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["placement"], body["stages"], body["stages_a_rank"]) == (placement, stages, stages_a_rank)


def test_memory_without_room_for_1f1b_is_told(profile: str, capsys) -> None:
    step = ["solve", profile, "--ranks", "4", "--microbatches", "8", "--effort", "0.1", "--memory"]
    for memory, told in (("1200", False), ("1199", True)):  # 1F1B holds four microbatches of 300 bytes
        assert main([*step, memory]) == 0
        assert ("; rank 0 has no room for 1F1B's 1.17 KiB" in capsys.readouterr().out) == told


def test_a_placement_of_two_stages_a_rank_is_held_against_1f1b_of_one(profile: str, capsys) -> None:
    step = [profile, "--ranks", "4", "--microbatches", "8", "--placement", "vee", "--effort", "0.1"]
    assert main(["solve", *step]) == 0
    assert "\nagainst 1F1B on these ranks: " in capsys.readouterr().out
    assert main(["solve", *step, "--partition", "1,1,1,1,1,1,1,1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["against_1f1b"]["value"] == 660


def test_a_proof_about_a_split_backward_says_that_a_fused_one_is_another_problem(tmp_path, capsys) -> None:
    """Where one pass takes notably less than B and W, 1F1B with it may be shorter than what is proven optimal."""
    path = str(tmp_path / "p.json")
    slow = replace(equal_layers(), layers=tuple(replace(one, BW=0.7 * (one.B + one.W)) for one in equal_layers().layers))
    slow.save(path)
    step = ["solve", path, "--ranks", "2", "--microbatches", "8", "--effort", "0.1"]
    assert main(step) == 0
    said = capsys.readouterr().out
    assert "proven optimal" in said
    assert said.splitlines()[-1] == (
        "all of this is about B and W apart. One pass BW takes 30.0% less than both, and 1F1B, which runs it, is shorter "
        "than this: that is another problem, which --fused solves"
    )
    assert main([*step, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fused_saves"] == pytest.approx(0.3)
    assert main([*step, "--fused"]) == 0
    assert "another problem" not in capsys.readouterr().out
    replace(slow, layers=equal_layers().layers).save(path)
    assert main(step) == 0
    assert "another problem" not in capsys.readouterr().out


def test_peaks_of_each_rank_stand_beside_their_room() -> None:
    problem = pipeline(**STEP, capacity=[8 << 20, 9 << 20, 9 << 20, 8 << 20])
    schedule = solve(problem, effort=0.2)
    lines = solved_as_text(Solved(schedule)).splitlines()
    (room,) = [line.split() for line in lines if line.startswith("room for them")]
    (held,) = [line.split() for line in lines if line.startswith("activations, MiB")]
    assert room[3:] == ["8.00", "9.00", "9.00", "8.00"]
    assert [float(one) for one in held[2:]] == [peak / 2**20 for peak in schedule.timeline().peak_bytes]


def test_a_small_model_on_a_large_device_has_a_unit_of_its_own() -> None:
    problem = pipeline(**STEP, capacity=[70 << 30] * 4)
    lines = solved_as_text(Solved(solve(problem, effort=0.05))).splitlines()
    (held,) = [line for line in lines if line.startswith("activations, MiB ")]
    (room,) = [line for line in lines if line.startswith("room for them, GiB ")]
    assert room.split()[4:] == ["70.0"] * 4
    assert min(float(one) for one in held.split()[2:]) >= 1


def test_the_lengths_of_uneven_slices_are_said(tmp_path, capsys) -> None:
    """In tokens, rounded; in parts where nobody knows how many there are; even ones are not told."""
    path = str(tmp_path / "long.json")
    step = ["solve", path, "--ranks", "4", "--microbatches", "2", "--fused", "--effort", "0.02"]
    known = replace(equal_layers(), layers=(LONG,) * 4, link=Link(2.0, 8.0), facts={"sequence": 128})
    for profile, slices, line in (
        (known, "3,2,1", "slices of 64 43 21 tokens"),
        (known, "3", "slices of 43×2 42 tokens"),
        (replace(known, facts={}), "2,1,1", "slices of 50.0% 25.0%×2 of the sequence"),
        (known, "4", ""),
    ):
        profile.save(path)
        assert main([*step, "--slices", slices, *["--json"] * (slices == "3,2,1")]) == 0
        said = capsys.readouterr().out
        if slices == "3,2,1":
            assert json.loads(said)["slice_lengths"] == [64, 43, 21]
        else:
            assert [one for one in said.splitlines() if one.startswith("slices of")] == [line] * bool(line)


def test_offload_that_holds_more_than_1f1b_says_why() -> None:
    """Copies that take long: without a limit forwards run ahead of them; in 1F1B's memory nothing is said."""
    step = {"F": [10] * 2, "BW": [20] * 2, "microbatches": 8, "held_until_W": 1 << 20}
    usual = preset("1f1b", pipeline(**step))
    free = solve(with_offload(pipeline(**step), 40, 40), effort=0.05)
    tight = solve(with_offload(pipeline(**step, capacity=usual.timeline().peak_bytes), 40, 40), effort=0.05)
    line = "offload: the fullest rank holds more than 1F1B without it"
    assert max(free.timeline().peak_bytes) > max(usual.timeline().peak_bytes)
    for schedule, told in ((free, True), (tight, False)):
        assert (line in solved_as_text(Solved(schedule, usual, copies=2.0))) == told


def test_of_many_ranks_the_fullest_is_named() -> None:
    ranks = MAX_RANKS + 1
    schedule = solve(pipeline([10] * ranks, BW=[20] * ranks, microbatches=4, held_until_W=1024), effort=0.1)
    (line,) = [one for one in solved_as_text(Solved(schedule)).splitlines() if one.startswith("activations")]
    assert re.fullmatch(r"activations: [\d.]+ KiB on rank \d+, the fullest; [\d.]+ KiB on the emptiest", line)


def test_a_gap_is_never_shown_as_nothing() -> None:
    schedule = solve(pipeline(**STEP), effort=0.1)
    assert schedule.certificate is not None
    value = schedule.certificate.value
    assert "proven optimal" in certificate_lines(schedule)[0]
    wide = schedule.certified(replace(schedule.certificate, value=10**7, bound=10**7 - 1))
    assert "not proven optimal" in certificate_lines(wide)[0]
    assert "another saves less than 0.01% at most" in certificate_lines(wide)[0]
    assert changes(schedule, schedule) == (0.0, 0.0)
    assert value == schedule.timeline().value


def test_with_memory_preferred_both_numbers_are_said(profile: str, capsys) -> None:
    assert main(["solve", profile, "--ranks", "4", "--microbatches", "24", "--prefer", "memory", "--effort", "0.5"]) == 0
    said = capsys.readouterr().out
    match = re.search(r"memory was preferred: ([\d.]+)% more time \(.*\), ([\d.]+)% less memory on the fullest rank", said)
    assert match is not None
    assert 0 < float(match[1]) <= 1.0
    assert float(match[2]) > 0
    assert "against 1F1B" in said


LONG = Layer("block", 160, 240, 96, 320, 120, 80, 50, 64, attention_F=64, attention_B=128, kv_bytes=40)
IN_SLICES = ["--ranks", "4", "--microbatches", "2", "--slices", "4", "--fused", "--attention-exchange"]


def test_an_exchange_of_attention_says_what_it_gains(tmp_path, capsys) -> None:
    """How many passes hand attention over, and SlimPipe's order with it and without; 1F1B is of whole sequences."""
    path, out = str(tmp_path / "long.json"), str(tmp_path / "schedule.json")
    long = replace(equal_layers(), layers=(LONG,) * 4, link=Link(2.0, 8.0))
    long.save(path)
    assert main(["solve", path, *IN_SLICES, "--method", "slimpipe", "--json", "-o", out]) == 0
    body = json.loads(capsys.readouterr().out)
    problem, found = Schedule.load(out).problem, body["attention_exchange"]
    helping = problem.rows("FH", "BH")
    assert found["handed"] == len(helping) > 0
    assert found["possible"] == 4 * 2 * 3 * 2
    assert found["time"] == int(problem.passes.duration[helping].sum())
    plain = long.problem(4, 2, slices=4, fused=True)
    assert found["without"] == preset("slimpipe", plain).timeline().makespan > found["value"] == body["value"]
    assert body["against_1f1b"]["value"] == preset("1f1b", long.problem(4, 2, fused=True)).timeline().makespan
    assert main(["solve", path, *IN_SLICES, "--method", "slimpipe"]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("attention exchange")]
    assert line.startswith(
        f"attention exchange: {found['handed']} of 48 passes hand attention over, {found['time']} µs in all"
    )
    assert f"({found['without']:,} µs → {found['value']:,} µs)" in line
    assert main(["solve", out, "--effort", "0.01"]) == 0  # a schedule file does not know the step without
    assert f"{found['handed']} of 48 passes hand attention over, {found['time']} µs in all\n" in capsys.readouterr().out
    replace(long, link=Link(2000.0, 8.0)).save(path)
    assert main(["solve", path, *IN_SLICES, "--method", "slimpipe"]) == 0
    assert "attention exchange: no pass hands attention over, so nothing changes" in capsys.readouterr().out
