"""Runs in ByteDance's StragglerAnalysis format: a real one, and tables that cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbsolve import Trace
from zbsolve.interchange.traces.reading import read_trace

from ...support.recorded import SAMPLES, refused

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ST = SAMPLES / "bytedance-ST.parquet"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(ST)


def test_a_real_run_is_replayed(trace: Trace) -> None:
    """32 steps of two replicas, four stages: the longest path with each step's own times is 0.01 % short, that of the
    medians 0.15 % long. With messages beside compute it was 0.07 % short and 0.03 % long."""
    measured = np.array([step.makespan for step in trace.steps])
    replayed = np.array([trace.replayed(i).makespan for i in range(len(trace.steps))])
    assert len(measured) == 64
    assert (replayed / measured - 1).mean() == pytest.approx(-0.00006, abs=3e-5)
    assert trace.planned().timeline().makespan / np.median(measured) - 1 == pytest.approx(0.0015, abs=5e-5)
    assert trace.facts["blocking"]["silent"] < 5 < 770 < trace.facts["blocking"]["sending"] < 780
    assert "microbatch_factors" not in trace.facts
    assert trace.facts["replicas"] == 2
    assert trace.facts["steps"][:3] == ["23, replica 0", "23, replica 1", "25, replica 0"]


def test_its_last_stage_is_twice_as_long(trace: Trace) -> None:
    """What the trace was published for."""
    problem = trace.problem
    own = problem.passes.duration - problem.sending
    F, BW = ([int(own[problem.rows(kind, stage=s)[0]]) for s in range(4)] for kind in ("F", "BW"))
    assert F == [67_229, 67_634, 67_982, 140_157]
    assert BW == [143_895, 144_431, 145_578, 204_946]
    assert " ".join(trace.schedule["compute:3"]) == "3F0 3BW0 3F1 3BW1 3F2 3BW2 3F3 3BW3"
    assert all(400 < sent < 800 for sent in set(problem.edges.sent.tolist()) - {0})


@pytest.fixture
def table() -> Any:
    return parquet.read_table(ST)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def written(table: Any) -> Path:
        parquet.write_table(table, tmp_path / "x.parquet")
        return tmp_path / "x.parquet"

    return written


def test_another_schema_is_named(table: Any, write: Callable[[Any], Path]) -> None:
    refused(write(pa.table({"a": [1]})), "x.parquet", "column 'optype' is missing", "it has a")
    refused(write(table.drop_columns(["gmc"])), "x.parquet", "column 'gmc' is missing")
    late = table.set_column(table.column_names.index("start_ts"), "start_ts", pa.array(["soon"] * len(table)))
    refused(write(late), "column 'start_ts' has a wrong type")
    none = table.set_column(table.column_names.index("mb_id"), "mb_id", pa.array([None] * len(table), pa.int8()))
    refused(write(none), "column 'mb_id' has a wrong type")


def test_a_missing_stage_is_named(table: Any, write: Callable[[Any], Path]) -> None:
    stage = table["stage"].to_numpy()
    refused(write(table.filter(pa.array(stage != 1))), "no rank has a pass of stage 1")
    refused(write(table.filter(pa.array(stage < 3))), "stage 2 sends to stage 3, of which no row has a pass")


def test_steps_that_are_not_whole_are_left_out(table: Any, write: Callable[[Any], Path]) -> None:
    first = next(i for i, one in enumerate(table["optype"].to_pylist()) if one == "forward-compute")
    kept = np.arange(len(table)) != first
    assert read_trace(write(table.filter(pa.array(kept)))).facts["left_out"] == [
        "1 of 64 steps, which do not have 32 passes"
    ]


def test_clocks_that_do_not_fit_are_named(table: Any, write: Callable[[Any], Path]) -> None:
    """One clock is what the format says, so nothing is moved."""
    start, stage = table["start_ts"].to_numpy().copy(), table["stage"].to_numpy()
    start[stage == 2] -= 0.05
    moved = table.set_column(table.column_names.index("start_ts"), "start_ts", pa.array(start))
    refused(write(moved), "clocks do not fit", "on rank 2 began", "whose message it takes")


def test_few_steps_with_other_clocks_are_left_out(table: Any, write: Callable[[Any], Path]) -> None:
    start, stage, step = (table[name].to_numpy().copy() for name in ("start_ts", "stage", "step"))
    start[(stage == 2) & (step == 25)] -= 0.05
    found = read_trace(write(table.set_column(table.column_names.index("start_ts"), "start_ts", pa.array(start))))
    assert found.facts["left_out"] == ["2 of 64 steps, whose clocks do not fit (step 25, replica 0)"]
    assert len(found.steps) == 62


def test_combined_passes_are_named(table: Any, write: Callable[[Any], Path]) -> None:
    start, duration = table["start_ts"].to_numpy().copy(), table["duration"].to_numpy().copy()
    kinds = np.array(table["optype"].to_pylist())
    here = (table["step"].to_numpy() == 23) & (table["rank"].to_numpy() == 3) & (table["mb_id"].to_numpy() == 1)
    f, b = (int(np.flatnonzero(here & (kinds == kind))[0]) for kind in ("forward-compute", "backward-compute"))
    start[f], duration[f] = start[b], duration[b]
    both = table.set_column(table.column_names.index("start_ts"), "start_ts", pa.array(start))
    both = both.set_column(table.column_names.index("duration"), "duration", pa.array(duration))
    refused(write(both), "combined passes")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(ST.read_bytes()[:5000])
    refused(tmp_path / "x.parquet", "x.parquet: damaged parquet file")


def test_without_pyarrow_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(ST, "pip install 'zbsolve[parquet]'")
