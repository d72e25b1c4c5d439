"""Other people's schedules come in: grids by hand, torch's CSV, and what is said where they do not hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zbsolve import BadInput, Profile, Schedule, Step, preset, verify
from zbsolve.cli import main
from zbsolve.interchange.importing import Imported, import_schedule, read_text_grid
from zbsolve.interchange.torch_csv import torch_order
from zbsolve.profile.named_steps import step_for
from zbsolve.systems.table import SYSTEMS, System

from ..support.profiles import equal_layers, toy_profile

BY_HAND = """# 1F1B by hand
rank 0: F0 F1  .  .  B0 F2 B1 F3 B2 B3
rank 1:  . F0  -  B0 F1 B1 F2 B2 F3 B3
"""


def imported(text: str, profile: Profile | None = None, **step) -> Imported:
    return import_schedule(read_text_grid(text, "grid.txt"), profile or equal_layers(), **step)


def test_a_grid_by_hand_is_1f1b() -> None:
    found = imported(BY_HAND)
    assert found.violations == ()
    problem = Step(2, 4, fused=True).problem(equal_layers())
    assert found.schedule.problem == problem
    assert found.schedule.order == preset("1f1b", problem).order


@pytest.mark.parametrize("separator", ["\t", ",", ", ", "   "])
def test_separators_labels_stages_and_case(separator: str) -> None:
    text = "\n".join(separator.join(line.split()) for line in ("0f0 0F1 . 0b0 0B1", "1F0 1B0 1F1 1B1"))
    found = imported(f"\ufeff0:{text}\r\n\n# the end\n")
    assert found.violations == ()
    assert found.schedule.order["compute:0"] == ("0F0", "0F1", "0BW0", "0BW1")


@pytest.mark.parametrize(
    ("name", "placement", "fused"),
    [
        ("1f1b", "single", True),
        ("1f1b-split", "single", False),
        ("interleaved", "loop", True),
        ("zb-h1", "single", False),
        ("zb-v", "vee", False),
        ("1f1b-v", "vee", True),
    ],
)
def test_torchs_csv_comes_back_as_it_went(name: str, placement: str, fused: bool) -> None:
    schedule = preset(name, Step(4, 8, placement, fused=fused).problem(equal_layers(16)))
    order = torch_order(schedule)
    found = imported(order.csv, equal_layers(16))
    assert found.violations == ()
    assert found.order.format == ("text grid" if fused else "torch CSV")
    assert found.schedule.problem == schedule.problem
    assert order.relabelled or found.schedule.order == schedule.order
    assert found.schedule.timeline().value == schedule.timeline().value


PLAIN = [one for one in SYSTEMS if not one.feature]


@pytest.mark.parametrize("one", PLAIN, ids=lambda one: one.name)
def test_every_named_schedule_comes_back_from_its_grid(one: System) -> None:
    """In two directions, too, where a stage is on two ranks: the same problem and the same order."""
    profile = equal_layers(16)
    schedule = preset(one.name, step_for(one.name, profile, Step(4, 8, one.placement)).problem(profile))
    found = imported("\n".join(" ".join(schedule.order[f"compute:{rank}"]) for rank in range(4)), profile)
    assert found.violations == ()
    assert found.schedule.problem == schedule.problem
    assert found.schedule.order == schedule.order


def test_torchs_own_dump_with_communication() -> None:
    """What torch's runtime writes itself: communication is skipped, overlapped passes run one after the other."""
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0I0,0W0,,0REDUCE_GRAD\n1UNSHARD,1RECV_F0,1F0,1I0,1SEND_B0,1W0,1REDUCE_GRAD\n"
    found = imported(text)
    assert found.violations == ()
    assert found.order.format == "torch CSV with communication"
    assert found.schedule.order == {"compute:0": ("0F0", "0B0", "0W0"), "compute:1": ("1F0", "1B0", "1W0")}
    overlapped = imported("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    assert overlapped.schedule.order["compute:1"] == ("1F0", "1F1", "1BW0", "1BW1")
    (note,) = overlapped.order.notes
    assert "1 cell has a forward and a backward at once (OVERLAP_F_B), first at line 2, cell 2" in note
    assert found.order.notes == ()


def test_overlapped_pairs_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two passes in place of one with a time of its own: a line says so."""
    (tmp_path / "o.csv").write_text("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,(1F1;1B1)OVERLAP_F_B,1F2,1B2\n")
    equal_layers().save(tmp_path / "p.json")
    order, profile, out = (str(tmp_path / name) for name in ("o.csv", "p.json", "s.json"))
    assert main(["import", order, "--profile", profile, "-o", out]) == 0
    said = capsys.readouterr()
    assert said.err.count("2 cells have a forward and a backward at once (OVERLAP_F_B), first at line 1, cell 3") == 1


def test_a_mixture_of_fused_and_split_backwards() -> None:
    """torch's spelling mixes both: the step has a BW here, B and W there, with the profile's times for each."""
    found = imported("0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1B1,1W0\n")
    assert found.violations == ()
    problem = found.schedule.problem
    times = {one.name: one.duration for one in problem.passes}
    assert (times["0B0"], times["0W0"], times["0BW1"]) == (48, 32, 80)
    assert set(times) == {"0F0", "0F1", "0B0", "0W0", "0BW1", "1F0", "1F1", "1B0", "1W0", "1BW1"}
    ours = imported("0F0 0F1 0B0 0W0 0BW1\n1F0 1B0 1F1 1BW1 1W0\n")
    assert ours.schedule.problem == problem


def test_recompute_is_read_or_asked_for() -> None:
    assert imported(BY_HAND, recompute="all").schedule.order["compute:1"][:3] == ("1F0", "1X0", "1BW0")
    shown = imported("0F0 0X0 0B0\n1F0 1B0")
    assert shown.violations == ()
    assert [one.name for one in shown.schedule.problem.passes if one.kind == "X"] == ["0X0"]


def test_two_directions_are_routes() -> None:
    """A stage on two ranks: microbatches take their routes in turn."""
    found = imported("0F0 1F1 1B1 0B0\n1F0 1B0 0F1 0B1", equal_layers(2))
    assert found.schedule.problem.routes == ((0, 1), (1, 0))
    assert found.violations == ()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "F0 F1 B0 B0\nF0 B0 F1 B1",
            [
                "grid.txt: doubled: rank 0 lists 0BW0 2 times (0BW0: line 1, cell 3 and line 1, cell 4)",
                "grid.txt: missing: rank 0 does not list 0BW1",
            ],
        ),
        (
            "F0 B0\n# a comment\nB0 F0",
            [
                "grid.txt: deadlock: these passes wait for each other: 1F0 → 1BW0 → 1F0 "
                "(1F0: line 3, cell 2; 1BW0: line 3, cell 1)"
            ],
        ),
        (
            "0F0 0F1 0B0 0B1\n0F0 1F1 1B1 1B0",
            [
                "grid.txt: misplaced: rank 1 lists 0F0, which belongs to rank 0 (0F0: line 1, cell 1 and line 2, cell 1)",
                "grid.txt: missing: rank 1 does not list 1F0",
            ],
        ),
        (
            "F0 F1 B0 B1 W0 W1\nF0 B0 F1 W0 B1",
            ["grid.txt: missing: rank 1 does not list 1W1"],
        ),
    ],
)
def test_what_does_not_hold_is_told_with_its_place(text: str, lines: list[str]) -> None:
    assert list(imported(text).told()) == lines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("F0 Q1", "grid.txt: line 1, cell 2: 'Q1' is no pass: write 0F3"),
        ("0F0 0F1.1", "line 1, cell 2: '0F1.1' is no pass"),
        ("F0 1F1", "grid.txt: line 1, cell 1: F0 names no stage, but 1F1 does"),
        ("# nothing\n", "grid.txt: there are no passes in it"),
        (". . .\n", "grid.txt: there are no passes in it"),
        ("1: F0 B0", "grid.txt: line 1: it is labelled 1, but rows are ranks 0, 1, … and this is row 0"),
        ("0F0 0B0 3F0 3B0", "grid.txt: no rank has a pass of stage 1"),
        ("0F0 0B0\n0F0 0B0", "grid.txt: rank 1 has no stage of its own"),
        ("F1 F2 B1 B2", "grid.txt: microbatches count from 0, and the lowest in the file is 1"),
        ("F999999999 B0", "grid.txt: line 1, cell 1: 0F999999999 makes 1 stages of 1000000000 microbatches"),
    ],
)
def test_what_cannot_be_read_is_refused_by_line_and_cell(text: str, said: str) -> None:
    with pytest.raises(BadInput) as error:
        imported(text)
    assert said in str(error.value)


def test_too_much_memory_says_how_much_on_which_rank_and_what_would_do() -> None:
    """Four microbatches at once where there is no room for them on rank 0; with what is said to do, it holds."""
    text = "F0 F1 F2 F3 B0 B1 B2 B3\nF0 B0 F1 B1 F2 B2 F3 B3"
    tight = imported(text, toy_profile(), memory=9_000)
    assert [line.split(" bytes")[0] for line in tight.told()] == ["grid.txt: memory: rank 0 holds 1200"]
    assert imported(text, toy_profile(), memory=tight.needs).violations == ()
    assert imported(text, toy_profile(), memory=int(tight.needs) - 1).violations != ()
    apart = imported(text, toy_profile(), memory="9000,99000")
    assert apart.needs == f"{tight.needs},99000"
    assert imported(text, toy_profile(), memory=apart.needs).violations == ()


def test_the_command_writes_a_schedule_with_its_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid, profile, output = (tmp_path / name for name in ("grid.txt", "profile.json", "schedule.json"))
    grid.write_text(BY_HAND)
    equal_layers().save(profile)
    assert main(["import", str(grid), "--profile", str(profile), "-o", str(output)]) == 0
    said = capsys.readouterr().out
    assert "\nimported: grid.txt (text grid); its own bound: for its passes on its ranks; problem " in said
    schedule = Schedule.load(output)
    assert verify(schedule.problem, schedule) == ()
    assert (schedule.certificate.value, schedule.certificate.bound) == (600, 600)
    assert main(["check", str(output), "--bound"]) == 0
    assert main(["import", str(grid), "--profile", str(profile)]) == 0
    assert "peak" in capsys.readouterr().out
    assert main(["import", str(grid), "--profile", str(profile), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == 600


def test_the_command_writes_nothing_that_does_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid, profile, output = (tmp_path / name for name in ("grid.txt", "profile.json", "schedule.json"))
    grid.write_text("F0 F1 F2 F3 B0 B1 B2 B3\nF0 F1 F2 F3 B0 B1 B2 B3")
    toy_profile().save(profile)
    command = ["import", str(grid), "--profile", str(profile), "--memory", "9000"]
    assert main([*command, "-o", str(output)]) == 1
    said = capsys.readouterr()
    assert "rank 0 holds 1200 bytes" in said.out
    assert "it holds" in said.out
    assert "was not written" in said.err
    assert not output.exists()
    assert main([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["rule"] == "memory"


def test_a_bound_is_proven_for_a_schedule_without_a_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A grid that wastes time: what could be saved is said, and written on demand."""
    bare, proven = tmp_path / "bare.json", tmp_path / "proven.json"
    imported("F0 F1 B0 B1\nF0 B0 F1 B1").schedule.save(bare)
    assert main(["check", str(bare), "--bound", "--seconds", "5"]) == 0
    assert "makespan 360 µs, proven optimal: no order" in capsys.readouterr().out
    imported("F0 B0 F1 B1\nF0 B0 F1 B1").schedule.save(bare)
    assert main(["check", str(bare), "--bound", "--seconds", "5", "-o", str(proven)]) == 0
    assert "no order of these passes takes less than 360 µs, so another saves 25.00% at most" in capsys.readouterr().out
    assert Schedule.load(proven).certificate.bound == 360
    assert main(["check", str(proven), "--bound"]) == 0
    assert main(["check", str(bare), "-o", str(proven)]) == 2
