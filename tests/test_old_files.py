"""Files of version 0.1.0 load and mean the same: see data/v0.1."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from zbsolve import Profile, Schedule, Trace, verify
from zbsolve.bench.runs import Report
from zbsolve.cli import main
from zbsolve.partition.file import Partition

FOLDER = Path(__file__).parent / "data" / "v0.1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
SCHEDULES = sorted(name for name in EXPECTED if name.startswith("schedule-"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_mean_the_same(name: str) -> None:
    expected, schedule = EXPECTED[name], Schedule.load(FOLDER / name)
    timeline, certificate = schedule.timeline(), schedule.certificate
    assert schedule.problem.digest == expected["digest"]
    assert (timeline.makespan, timeline.span) == (expected["makespan"], expected["span"])
    assert list(timeline.peak_bytes) == expected["peaks"]
    assert list(schedule.critical_path()) == expected["critical"]
    assert len(verify(schedule.problem, schedule)) == expected["violations"]
    assert (certificate and certificate.value) == expected["value"]
    assert (certificate and certificate.bound) == expected["bound"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_edges_of_old_files_carry_what_builders_say_today(name: str, tmp_path: Path) -> None:
    """The rule for old files and the builders agree: written anew, with what edges carry, nothing differs."""
    old = Schedule.load(FOLDER / name)
    old.save(tmp_path / "new.json")
    said = json.loads((tmp_path / "new.json").read_text(encoding="utf-8"))
    assert "carries" not in json.loads((FOLDER / name).read_text(encoding="utf-8"))["problem"]["edges"]
    assert said["version"] == 2
    assert set(re.findall(r"(?:^|[ ,\[])(\d+)", str(said["problem"]["edges"]["carries"]))) == {"0", "1", "2"}
    again = Schedule.load(tmp_path / "new.json")
    assert (again.problem.edges.carries == old.problem.edges.carries).all()
    assert again.to_json() == old.to_json()


def test_profiles_make_the_same_problems(tmp_path: Path) -> None:
    profile, expected = Profile.load(FOLDER / "profile.json"), EXPECTED["profile.json"]
    assert profile.problem(2, 4, "single").digest == expected["digest"]
    split = (1, 1, 2, 2)  # today's default is the equal one, (2, 2, 1, 1)
    assert profile.problem(2, 4, "vee", fused=True, memory="100KiB", layers=split).digest == expected["digest_vee"]
    profile.save(tmp_path / "profile.json")
    assert (tmp_path / "profile.json").read_text() == (FOLDER / "profile.json").read_text()


def test_traces_partitions_and_reports_load(tmp_path: Path) -> None:
    trace = Trace.load(FOLDER / "trace.json")
    assert (len(trace.steps), trace.problem.digest) == (1, "14cbe56b03c0d553")
    assert np.isclose(trace.steps[0].makespan, 2761.631)
    partition = Partition.load(FOLDER / "partition.json")
    assert (partition.layers, partition.devices) == ((3, 3), (1, 1))
    report = Report.load(FOLDER / "bench.json")
    assert (report.suite, len(report.results)) == ("small", 15)


def test_commands_take_them(capsys: pytest.CaptureFixture[str]) -> None:
    for name in SCHEDULES:
        assert main(["check", str(FOLDER / name)]) == 0
    assert main(["check", "--bound", str(FOLDER / "schedule-single.json")]) == 0
    assert main(["show", str(FOLDER / "trace.json")]) == 0
    assert "proven again" in capsys.readouterr().out
