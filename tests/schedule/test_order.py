"""Orders: rows inside, the names that anybody sees, a row of names a stream in files."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from zbsolve import BadInput, Pass, Problem, Schedule, pipeline, verify
from zbsolve.cli import main
from zbsolve.schedule.order import Order, order_from
from zbsolve.systems import preset
from zbsolve.util import columns


@pytest.fixture(scope="module")
def problem() -> Problem:
    return pipeline([3] * 3, [4] * 3, [2] * 3, microbatches=5, held_until_B=2, held_until_W=1, comm=1, capacity=30)


def test_an_order_is_the_mapping_of_its_names(problem: Problem) -> None:
    names = dict(preset("zb-h1", problem).order)
    order = order_from(problem, {stream: " ".join(row) for stream, row in names.items()})
    assert isinstance(order, Order)
    assert order == names
    assert dict(order) == names
    assert order != {**names, "compute:0": ()}
    assert order == order_from(problem, {stream: list(row) for stream, row in names.items()})
    assert ("compute:1" in order, "compute:9" in order, len(order)) == (True, False, 3)


def test_an_order_owns_its_rows(problem: Problem) -> None:
    """A search goes on in the arrays that it made a schedule from."""
    names = dict(preset("zb-h1", problem).order)
    rows = {stream: one.copy() for stream, one in preset("zb-h1", problem).sequences.items()}
    found = Schedule.of(problem, rows)
    for one in rows.values():
        one[:] = one[::-1].copy()
    assert verify(problem, found) == ()
    assert found.order == names


def test_an_order_holds_for_other_times_of_the_same_passes(problem: Problem) -> None:
    """By row where the tables agree, by name where they do not."""
    found = Schedule.of(problem, preset("1f1b", problem).sequences)
    freer = replace(problem, capacity=None)
    assert verify(freer, Schedule(freer, found.order)) == ()
    turned = problem.only(problem.rows("W", "B", "F")[::-1])
    assert verify(turned, Schedule(turned, found.order)) == ()
    with pytest.raises(BadInput, match=r"pass 0F[34] is not in the problem"):
        _ = Schedule(problem.head(3), found.order).sequences


@pytest.mark.parametrize("row", ["0F0 9F9", "0F0 0Z0", "0F0 F1 0", "0F0,0F1", "0F0 0F0.1", "0F٣"])
def test_names_that_are_not_in_the_problem_stay_as_they_are_said(problem: Problem, row: str) -> None:
    order = order_from(problem, {"compute:0": row})
    assert order["compute:0"] == tuple(row.split())
    assert "unknown" in {one.rule for one in verify(problem, Schedule(problem, order))}


def test_slices_have_names_too() -> None:
    problem = Problem.of([Pass("F", 0, 0, 0, 1), Pass("F", 0, 0, 0, 1, slice=1)], [])
    order = order_from(problem, {"compute:0": "0F0.1 0F0"})
    assert verify(problem, Schedule(problem, order)) == ()
    assert Schedule(problem, order).sequences["compute:0"].tolist() == [1, 0]


@pytest.mark.parametrize("name", ["s.json", "s.json.gz"])
def test_files_are_compressed_by_name_and_read_by_content(problem: Problem, name: str, tmp_path: Path) -> None:
    schedule = preset("zb-h1", problem)
    schedule.save(tmp_path / name)
    (tmp_path / "other").write_bytes((tmp_path / name).read_bytes())
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    found = Schedule.load(tmp_path / "other")
    assert (found.problem, found.order) == (problem, schedule.order)
    assert main(["check", str(tmp_path / name)]) == 0


def test_damaged_gzip_is_one_line(problem: Problem, tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps({"zbsolve": "schedule"}).encode())
    for damaged in (whole[:-9], whole[:12] + b"x" * 30):
        (tmp_path / "s.json.gz").write_bytes(damaged)
        with pytest.raises(BadInput, match="damaged gzip file"):
            Schedule.load(tmp_path / "s.json.gz")


def test_a_person_reads_a_rank_in_a_line(problem: Problem, tmp_path: Path) -> None:
    preset("1f1b", problem).save(tmp_path / "s.json")
    assert ' "compute:2": "2F0 2B0 2W0 2F1 2B1 2W1' in (tmp_path / "s.json").read_text()


def test_loops_give_the_same_compiled(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many passes a compiled loop finds the same times, turns and violations."""
    found = preset("zb-h1", problem)
    start, turn = found.timeline().start.tolist(), found.timeline().turn
    tight = replace(problem, capacity=(4,) * 3)
    expected = [str(one) for one in verify(tight, Schedule(tight, found.order))]
    monkeypatch.setattr(columns, "MANY_ROWS", 1)
    again = Schedule(problem, found.order)
    assert again.timeline().start.tolist() == start
    assert again.timeline().turn.tolist() == turn.tolist()
    assert [str(one) for one in verify(tight, Schedule(tight, found.order))] == expected != []
    stuck = Schedule(problem, {stream: row[::-1] for stream, row in found.order.items()})
    assert [one.rule for one in verify(problem, stuck)] == ["deadlock"]
