"""Offload from the command line: numbers, solve, check, show, pictures, traces, compare, export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zbsolve import HostLink, Profile, Schedule
from zbsolve.cli import main
from zbsolve.schedule.handover import lacking

NUMBERS = (
    "numbers --ranks 2 --chunks 2 --F 12ms --B 14ms --W 9ms --activation 0.5GiB/0.5GiB host-bandwidth=50GB/s,48GB/s "
    "host-bandwidth-both=40GB/s host-memory=60GiB host-ranks=2 host-latency=10us"
)
SOLVE = "--ranks 2 --microbatches 4 --placement vee --effort 0.05"


def run(line: str, folder: Path) -> int:
    return main([part.replace("@", f"{folder}/") for part in line.split()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile, a schedule with offload in a memory that fits no microbatch without, and a plain one."""
    found = tmp_path_factory.mktemp("offload")
    assert run(f"{NUMBERS} -o @p.json", found) == 0
    assert run(f"solve @p.json {SOLVE} --memory 1.5GiB --offload full -o @s.json", found) == 0
    assert run(f"solve @p.json {SOLVE} -o @plain.json", found) == 0
    return found


def test_numbers_say_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{NUMBERS} -o @p.json", tmp_path) == 0
    out = capsys.readouterr().out
    assert "takes 10 µs and its bytes at 50.0 GB/s and back at 48.0, at 40.0 GB/s and back at 40.0 both ways at once" in out
    assert "of all layers together, copies of all activations take k = 0.77 times as long as computing: all fits" in out
    assert Profile.load(tmp_path / "p.json").host == HostLink(10, 50_000, 48_000, 40_000, 40_000, 60 * 2**30, 2)
    for bandwidth, fits in (
        ("25GB/s", "k = 1.23 times as long as computing: 81% of them fits beside it, more than half"),
        ("10GB/s", "33%"),
    ):
        assert (
            run(
                f"numbers --ranks 1 --F 12ms --B 14ms --W 9ms --activation 1GiB host-bandwidth={bandwidth} -o @q.json",
                tmp_path,
            )
            == 0
        )
        assert fits in capsys.readouterr().out


def test_what_does_not_fit_without_is_solved_with_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"solve @p.json {SOLVE} --memory 1.5GiB", folder) == 1
    said = capsys.readouterr().err
    assert "needs 2147483648 bytes (2.00 GiB) for one microbatch" in said
    assert said.endswith("leave of 1.5GiB; recompute and offload keep less\n")
    assert run("check @s.json", folder) == 0
    schedule = Schedule.load(folder / "s.json")
    assert max(schedule.timeline().peak_bytes) <= 1.5 * 2**30
    capsys.readouterr()
    assert run(f"solve @p.json {SOLVE} --memory 1.5GiB --offload full", folder) == 0
    out = capsys.readouterr().out
    assert "of 60.0 GiB" in out
    assert "of the busiest of these stages' ranks, copies of all activations take k = 0.77" in out
    assert run(f"solve @p.json {SOLVE} --memory 1.5GiB --offload full --json", folder) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["copies"]["k"] == pytest.approx(0.767, abs=0.001)
    assert found["pools"][0]["name"] == "host:0"


def test_a_choice_that_leaves_nothing_to_offload_only_loses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where all stages recompute and messages have no bytes, F keeps nothing."""
    assert run(f"solve @p.json {SOLVE} --offload full --recompute auto", folder) == 0
    assert "recompute=all" in capsys.readouterr().out
    assert run(f"solve @p.json {SOLVE} --offload full --recompute all", folder) == 2
    assert "offload: no stage keeps anything from its F that a later pass frees" in capsys.readouterr().err


def test_pictures_and_traces_have_the_copies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x.svg", "x.html", "x.trace.json"):
        assert run(f"show @s.json -o @{name}", folder) == 0
    assert "offload to the host" in (folder / "x.svg").read_text()
    assert "host:0: " in (folder / "x.html").read_text()
    events = json.loads((folder / "x.trace.json").read_text())["traceEvents"]
    assert {one["args"]["name"] for one in events if one["name"] == "thread_name"} >= {"d2h:0", "h2d:1"}
    host = [one["args"]["bytes"] for one in events if one["ph"] == "C" and one["name"] == "host:0"]
    assert max(host) == Schedule.load(folder / "s.json").timeline().pool_peaks[0]
    capsys.readouterr()
    assert run("show @s.json", folder) == 0
    out = capsys.readouterr().out
    assert "    d2h │" in out
    assert "R reload from the host" in out
    assert "host:0: " in out


def test_a_shared_bus_is_on_all_its_ranks(folder: Path) -> None:
    assert run(f"{NUMBERS} host-bus=2 -o @bus.json", folder) == 0
    assert run(f"solve @bus.json {SOLVE} --offload 0:0.5,3:1 -o @b.json", folder) == 0
    assert run("show @b.json -o @b.trace.json", folder) == 0
    events = json.loads((folder / "b.trace.json").read_text())["traceEvents"]
    named = {one["pid"] for one in events if one["name"] == "thread_name" and one["args"]["name"] == "bus:0"}
    assert named == {one["pid"] for one in events if one.get("cat") in ("O", "R")} == {0}
    assert run(f"solve @bus.json {SOLVE} --offload full -o @b.json", folder) == 0
    assert run("show @b.json -o @b.trace.json", folder) == 0
    events = json.loads((folder / "b.trace.json").read_text())["traceEvents"]
    assert {one["pid"] for one in events if one["name"] == "thread_name" and one["args"]["name"] == "bus:0"} == {0, 1}


def test_compare_and_frontier(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"solve @p.json {SOLVE} --offload half --method zb-v,auto --effort 0.1", folder) == 0
    assert "zb-v" in capsys.readouterr().out
    assert run(f"solve @p.json {SOLVE} --offload full --frontier 2 -o @f.json", folder) == 0
    least = min(one["memory"] for one in json.loads((folder / "f.json").read_text())["points"])
    assert least < 2 * 2**30  # one microbatch of a rank's two stages


@pytest.mark.parametrize("engine", ["torch-csv", "jaxpp", "colossalai", "primus", "deepspeed", "megatron"])
def test_engines_without_copies_are_named(folder: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"export @s.json --to {engine} -o @out", folder) == 2
    said = capsys.readouterr().err.strip()
    assert re.search(r"has no passes of kind (B, W, )?O, R \(only", said)
    assert "\n" not in said
    assert not (folder / "out").exists()


WRONG: list[Any] = [
    (f"solve @none.json {SOLVE} --offload full", "offload: the profile knows no host link: give its field 'host'"),
    (f"solve @p.json {SOLVE} --offload 7:1", "offload: there is no stage 7 (they are 0 to 3)"),
    (f"solve @p.json {SOLVE} --offload 0:1.5", "offload: fraction of stage 0 is 1.5, not from 0 to 1"),
    (f"solve @p.json {SOLVE} --offload much", "offload 'much': none, full, half, or fractions such as"),
    ("solve @s.json --offload full", "its problem says what is offloaded: leave it out"),
    ("numbers --ranks 1 --F 1 --BW 1 host-bandwidth=0GB/s -o @x", "host: bandwidth 'd2h' is 0 bytes a µs"),
    ("numbers --ranks 1 --F 1 --BW 1 host-bandwidth=-5GB/s -o @x", "a bandwidth may not be negative"),
    ("numbers --ranks 1 --F 1 --BW 1 host-memory=5GiB -o @x", "host-memory: host-bandwidth is needed too"),
    ("numbers --ranks 1 --F 1 --BW 1 host-bandwidth=1,2,3 -o @x", "one bandwidth, or two"),
    (
        "numbers --ranks 1 --F 1 --BW 1 host-bandwidth=9GB/s,8GB/s host-bandwidth-both=8.5GB/s -o @x",
        "host-bandwidth-both: 8.5GB/s a direction is more than host-bandwidth 9GB/s,8GB/s",
    ),
]


@pytest.mark.parametrize(("line", "said"), WRONG)
def test_wrong_use_is_one_line(folder: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("numbers --ranks 2 --chunks 2 --F 12ms --BW 20ms --activation 1GiB -o @none.json", folder)
    capsys.readouterr()
    assert run(line, folder) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "x").exists()


def test_a_host_too_small_for_one_microbatch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{NUMBERS.replace('60GiB', '1000MB')} -o @small.json", folder) == 0
    assert run(f"solve @small.json {SOLVE} --offload full -o @never.json", folder) == 1
    said = capsys.readouterr().err
    assert "offload: host memory 'host:0' needs 1073741824 bytes (1.00 GiB) for one microbatch, but has 1000000000" in said
    assert not (folder / "never.json").exists()


@pytest.mark.slow
def test_llama_70b_on_sixteen_h100s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages a rank, in 93 GiB: beside parameters and optimizer states 6.5 GiB are left on rank 0, and one microbatch
    holds 7.2 GiB. So no schedule exists, whatever its order. With offload one is found, and holds."""
    assert run("profile llama3-70b --estimate h100 -o @llama.json", tmp_path) == 0
    assert "k = 0.93 times as long as computing: all fits beside it" in capsys.readouterr().out
    solve = "solve @llama.json --ranks 16 --microbatches 32 --placement vee --memory 93GiB --effort 0.1 -o @s.json"
    assert run(solve, tmp_path) == 1
    assert "capacity: rank 0 needs 7675723788 bytes (7.15 GiB) for one microbatch" in capsys.readouterr().err
    assert not (tmp_path / "s.json").exists()
    for what in ("half", "full"):
        assert run(f"{solve} --offload {what}", tmp_path) == 0
        assert run("check @s.json", tmp_path) == 0
        schedule = Schedule.load(tmp_path / "s.json")
        problem = schedule.problem
        assert problem.capacity is not None
        assert all(peak <= room for peak, room in zip(schedule.timeline().peak_bytes, problem.capacity, strict=True))
        assert all(peak <= pool.capacity for peak, pool in zip(schedule.timeline().pool_peaks, problem.pools, strict=True))
        assert not lacking(schedule).any()
        assert len(problem.rows("O")) == 32 * (16 if what == "half" else 32)
