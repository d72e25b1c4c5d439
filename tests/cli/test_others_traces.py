"""Commands take runs that other engines recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zbsolve import Profile, Schedule
from zbsolve.cli import main
from zbsolve.interchange.traces.reading import read_trace
from zbsolve.util.files import MAX_BYTES

from ..support.recorded import PRIMUS


def test_show_draws_the_run_beside_its_medians(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", str(PRIMUS)]) == 0
    said = capsys.readouterr().out
    assert "7 plan" in said
    assert "    run" in said
    assert "measured makespan 3,244.70 ms (median step)" in said
    assert main(["show", str(PRIMUS), "-o", str(tmp_path / "x.html")]) == 0
    assert "primus-pp8" in (tmp_path / "x.html").read_text()


@pytest.mark.slow
def test_compare_sets_a_run_beside_its_medians_or_a_schedule(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["compare", str(PRIMUS), "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert (alone["predicted"], alone["measured"]) == (3_202_876, 3_244_700)
    profile = str(tmp_path / "p.json")
    assert main(["profile", "--from-trace", str(PRIMUS), "-o", profile]) == 0
    assert len(Profile.load(profile).layers) == 8
    schedule = str(tmp_path / "s.json")
    solve = ["solve", profile, "--ranks", "8", "--microbatches", "16", "--partition", "1,1,1,1,1,1,1,1"]
    assert main([*solve, "--method", "1f1b", "-o", schedule]) == 0
    capsys.readouterr()
    assert main(["compare", schedule, str(PRIMUS), "--json"]) == 0
    beside = json.loads(capsys.readouterr().out)
    assert beside["measured"] == alone["measured"]
    assert beside["predicted"] == Schedule.load(schedule).timeline().makespan == pytest.approx(3_202_876, rel=1e-4)


def test_a_run_of_other_passes_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    numbers = ["numbers", "--ranks", "8", "--F", "1ms", "--B", "1ms", "--W", "1ms", "-o", str(tmp_path / "p.json")]
    assert main(numbers) == 0
    solve = ["solve", str(tmp_path / "p.json"), "--ranks", "8", "--microbatches", "16", "--method", "1f1b-split"]
    assert main([*solve, "-o", str(tmp_path / "s.json")]) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "s.json"), str(PRIMUS)]) == 2
    assert "a run of other passes than the schedule's: 0B0" in capsys.readouterr().err


def test_the_question_is_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file to write; with no time to search, what is known already."""
    assert main(["profile", "--from-trace", str(PRIMUS), "--seconds", "0"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Primus pipeline events: 8 ranks, 8 stages (single), 16 microbatches, 19 steps")
    assert said[2].split() == ["stage", "rank", "F,", "ms", "BW,", "ms", "message,", "ms"]
    assert said[10].split() == ["7", "7", "66.87", "±0.2%", "75.14", "±0.3%", "–"]
    assert sum(line.startswith("stall: ") for line in said) == 4
    assert said[11] == (
        "messages block their sender: with its inputs there, a pass began 792 µs after one that sends, and 5 µs after "
        "one that does not; a message takes 805 µs"
    )
    assert said[-1] == (
        "today's step takes 3,244.70 ms, of which bubble 30.0% (its order by the medians of all steps: 3,202.88 ms); "
        "balancing stages would save 152.23 ms of today's"
    )
    assert main(["profile", "--from-trace", str(PRIMUS), "--seconds", "0.5", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [one["placement"] for one in body["today"]["found"]] == ["single", "vee", "loop"]
    assert all(one["bound"] <= one["value"] for one in body["today"]["found"])
    assert "the best schedule in the same memory (8 microbatches in flight)" in body["today"]["line"]
    first = body["stages"][0]
    assert (first["ranks"], first["message"]) == ([0], 720)
    assert first["passes"]["F"]["quartiles"][0] < first["passes"]["F"]["median"] < first["passes"]["F"]["quartiles"][1]
    assert [one["name"] for one in body["stalls"]] == ["0F7", "3F10", "2F8", "1F4"]


def test_a_step_with_more_in_it_than_passes_and_messages_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The first step alone, whose warm-up lies between passes; of others nothing is told."""
    for name, told in (("1", True), ("2", False)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text((PRIMUS / "config.json").read_text())
        for path in PRIMUS.glob("pp_rank_*.json"):
            (folder / path.name).write_text(json.dumps({name: json.loads(path.read_text())[name]}))
        assert main(["profile", "--from-trace", str(folder), "--seconds", "0"]) == 0
        line = "by its passes and messages alone a step takes 16.1% less: ranks also did something else\n"
        assert (line in capsys.readouterr().out) == told


def test_schedules_side_by_side_may_be_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(PRIMUS), str(PRIMUS), str(PRIMUS), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["schedules"]
    assert [row["value"] for row in rows] == [3_202_876] * 3
    assert main(["compare", str(PRIMUS), str(PRIMUS)]) == 0
    assert "predicted 3,202.88 ms, measured 3,244.70 ms" in capsys.readouterr().out


def test_a_run_may_be_kept_in_a_file_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = read_trace(PRIMUS)
    trace.save(tmp_path / "t.json")
    again = read_trace(tmp_path / "t.json")
    assert again.problem == trace.problem
    assert again.facts == trace.facts
    assert [dict(step) for step in again.steps] == [dict(step) for step in trace.steps]
    assert main(["show", str(PRIMUS), "-o", str(tmp_path / "x.trace.json")]) == 0
    assert main(["profile", "--from-trace", str(tmp_path / "x.trace.json")]) == 2
    assert "no pass has a label PP:" in capsys.readouterr().err


def test_a_huge_file_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.write(b'{"traceEvents": [')
        file.truncate(MAX_BYTES + 1)
    assert main(["profile", "--from-trace", str(tmp_path / "x.json")]) == 2
    assert f"x.json: a file of more than {MAX_BYTES} bytes is not read" in capsys.readouterr().err
