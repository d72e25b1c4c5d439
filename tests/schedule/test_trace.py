"""Traces: what is in them, their files, and what Perfetto and torch's profiler show of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zbsolve import BadInput, Schedule, Timeline, Trace, preset
from zbsolve.cli import main
from zbsolve.exec.run.launch import run_local
from zbsolve.models.presets import mlp
from zbsolve.schedule.trace import Switch
from zbsolve.show.tracks import schedule_as_trace

from ..support.exec_tools import a_problem, random_schedule, run_here
from ..support.runs import one_f_one_b, random_run, run_of, trace_of

METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}
NS = 1e-3


def faults(text: str) -> list[str]:
    """What is wrong with a file by the Trace Event Format, and for Perfetto's reader of it; [] where nothing is.

    JSON Object Format: `traceEvents` and an optional `displayTimeUnit`. Events: `ph`, `pid`, `tid` whole numbers, `ts` and
    `dur` in µs. Complete events (X) of one thread nest or do not touch. Metadata (M): `process_name`, `thread_name`,
    `…_sort_index`. Counters (C): arguments are numbers. Flow events (s, f): `cat`, `name` and `id` make one arrow; a start
    binds to the slice around it, an end with `bp: "e"` as well. Perfetto reads ids that are texts as hexadecimal numbers.
    """
    body = json.loads(text, parse_constant=lambda word: f"not JSON: {word}")
    if not isinstance(body, dict) or body.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        return ["no JSON Object Format"]
    events = body["traceEvents"]
    return [*(f for e in events for f in _event(e)), *_nesting(events), *_flows(events)]


def _event(e: dict[str, Any]) -> Iterator[str]:
    phase = e.get("ph")
    if phase not in ("X", "M", "C", "s", "f"):
        yield f"unknown phase {phase}"
    for number in ("pid", "tid"):
        if type(e.get(number, 0)) is not int:
            yield f"{number} of {e} is no whole number"
    if not isinstance(e.get("name"), str):
        yield f"{e} has no name"
    if phase != "M" and not (isinstance(e.get("ts"), int | float) and e["ts"] >= 0):
        yield f"{e} has no time"
    if phase == "X" and not (isinstance(e.get("dur"), int | float) and e["dur"] >= 0 and "tid" in e and "cat" in e):
        yield f"{e} is not complete"
    if phase == "M":
        value = next(iter(e["args"].values()))
        if not isinstance(value, METADATA.get(e["name"], type(None))):
            yield f"{e} is no metadata"
    if phase == "C" and not all(type(v) in (int, float) for v in e["args"].values()):
        yield f"{e} counts no numbers"


def _slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            found.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    return {track: sorted(slices, key=lambda one: (one[0], -one[1])) for track, slices in found.items()}


def _nesting(events: list[dict[str, Any]]) -> Iterator[str]:
    for track, slices in _slices(events).items():
        open_until: list[float] = []
        for start, end in slices:
            while open_until and open_until[-1] <= start + NS:
                open_until.pop()
            if open_until and end > open_until[-1] + NS:
                yield f"slices of {track} overlap at {start}"
            open_until.append(end)


def _flows(events: list[dict[str, Any]]) -> Iterator[str]:
    slices = _slices(events)
    ends: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for e in events:
        if e["ph"] not in ("s", "f"):
            continue
        number = e.get("id")
        if type(number) is not int and not (isinstance(number, str) and re.fullmatch(r"(0x)?[0-9a-fA-F]+", number)):
            yield f"Perfetto cannot read the id of {e}"
        if e["ph"] == "f" and e.get("bp") != "e":
            yield f"{e} binds to the next slice"
        if not any(a <= e["ts"] - NS and e["ts"] + NS <= b for a, b in slices.get((e["pid"], e["tid"]), [])):
            yield f"{e} has no slice around it"
        ends.setdefault((e["cat"], e["name"], str(number)), []).append(e)
    for key, pair in ends.items():
        if Counter(e["ph"] for e in pair) != {"s": 1, "f": 1}:
            yield f"arrow {key} has not one start and one end"
        elif [e["ts"] for e in pair if e["ph"] == "s"] > [e["ts"] for e in pair if e["ph"] == "f"]:
            yield f"arrow {key} goes back in time"


@pytest.fixture
def schedule() -> Schedule:
    return one_f_one_b(4, 8, capacity=15)


@pytest.fixture
def trace(schedule: Schedule) -> Trace:
    count = len(schedule.problem.passes)
    made = trace_of(schedule, *(random_run(schedule, i) for i in range(3)))
    return replace(made, host=(np.arange(count) / 4,) * 3, held=np.arange(count))


def test_a_file_keeps_everything(trace: Trace, tmp_path: Path) -> None:
    trace = replace(trace, syncs=(("0F0", "0F1"),))
    trace.save(tmp_path / "t.json")
    again = Trace.load(tmp_path / "t.json")
    assert again.problem == trace.problem
    assert again.schedule == trace.schedule
    assert again.syncs == trace.syncs
    assert [dict(step) for step in again.steps] == [dict(step) for step in trace.steps]
    for mine, read in zip((*trace.host, *trace.ready, trace.held), (*again.host, *again.ready, again.held), strict=True):
        assert (mine == read).all()
    body = json.loads((tmp_path / "t.json").read_text())
    for column in (*body["steps"], *body["ready"], *body["wait"], *body["host"], body["held"]):
        assert set(column) == set(trace.problem.names)


def test_a_file_without_host_times_and_bytes_is_read(trace: Trace) -> None:
    body = trace.to_json()
    for name in ("host", "held", "syncs", "wait"):
        del body[name]
    again = Trace.from_json(body)
    assert (again.host, again.held, again.syncs) == ((), None, ())


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("host", [{}, {}, {}], "field 'host' does not name every pass"),
        ("host", [], ""),
        ("host", [None], r"field 'host'\[0\] has a wrong type \(null, not object\)"),
        ("held", {"0F0": 1.0}, "field 'held' does not name every pass"),
        ("held", {"0F0": "x"}, r"field 'held'\[...\] has a wrong type \(str, not float\)"),
        ("syncs", [["0F0"]], r"field 'syncs'\[0\] is \['0F0'\]; array of length 2 is needed"),
        ("order", {"compute:0": ["0F0", {}]}, r"field 'order'\[...\]\[1\] has a wrong type \(object, not str\)"),
        ("order", {"compute:0": ["0F0"]}, "field 'order' does not list exactly the problem's passes"),
        ("order", {"compute:0": "0F0"}, "field 'order' does not list exactly the problem's passes"),
        ("switches", [{"step": 3, "order": {}}], "field 'switches' has no steps that go up, from 1 to 2"),
        ("switches", [{"step": 3}], r"switches\[0\]: field 'order' is missing"),
        ("order", {"compute:0": 7}, r"field 'order'\[...\] has a wrong type \(int, not "),
    ],
)
def test_damaged_fields_are_named(trace: Trace, field: str, value: object, text: str) -> None:
    body = {**trace.to_json(), field: value}
    if not text:
        assert Trace.from_json(body).host == ()
        return
    with pytest.raises(BadInput, match=f"^t.json: {text}"):
        Trace.from_json(body, "t.json")


def test_numbers_that_are_none(trace: Trace) -> None:
    """Perfetto reads JSON, which knows no NaN."""
    body = trace.to_json()
    with pytest.raises(BadInput, match="field 'held': pass 0F1 has no finite number"):
        Trace.from_json({**body, "held": {**body["held"], "0F1": float("nan")}})
    unknown = Trace.from_json({**body, "ready": [{**one, "0F1": float("nan")} for one in body["ready"]]})
    assert unknown.waits(0)[trace.problem.index["0F1"]] == 0
    assert faults(schedule_as_trace(unknown.planned(), unknown)) == []


def test_one_column_of_host_times_a_step(trace: Trace) -> None:
    body = trace.to_json()
    with pytest.raises(BadInput, match="field 'host' has 2 columns for 3 steps"):
        Trace.from_json({**body, "host": body["host"][:2]})


def test_a_run_that_switched(trace: Trace, tmp_path: Path) -> None:
    """Steps of each order by themselves; a file keeps from which step on each ran."""
    other = preset("zb-h1", trace.problem)
    later = trace_of(other, *(random_run(other, i) for i in range(2)))
    both = {name: (*getattr(trace, name), *getattr(later, name)) for name in ("steps", "ready", "losses", "peaks")}
    replace(trace, host=(), **both, switches=(Switch(3, dict(other.order)),)).save(tmp_path / "t.json")
    whole = Trace.load(tmp_path / "t.json")
    first, last = whole.by_order()
    assert (len(first.steps), len(last.steps)) == (3, 2)
    assert (first.schedule, last.schedule) == (trace.schedule, later.schedule) == (whole.ran(2), whole.ran(3))
    assert whole.replayed(4).value == later.replayed(1).value
    assert (whole.waits(4) == later.waits(1)).all()
    body = whole.to_json()
    body["switches"][0]["step"] = 5
    with pytest.raises(BadInput, match="field 'switches' has no steps that go up, from 1 to 4"):
        Trace.from_json(body)


def test_a_pass_that_was_shorter_than_its_message_is_replayed() -> None:
    """It sends for all of its time; a step with the problem's own times is replayed as predicted."""
    schedule = one_f_one_b(3, 4, comm=5, blocking=True)
    trace = trace_of(schedule, random_run(schedule, 1))
    assert trace.problem.sending.max() == 5
    assert trace_of(schedule, _as_planned(schedule)).replayed(0).value == schedule.timeline().value
    step = trace.steps[0]
    row = trace.problem.index["0F1"]
    step.end[row] = step.start[row] + 2
    replayed = trace.replayed(0)
    assert replayed.problem.sending[row] == 2
    assert (replayed.problem.sending <= replayed.problem.passes.duration).all()
    assert trace.computed()[0, row] == 0
    assert trace.problem.sending[row] == 5


def _as_planned(schedule: Schedule) -> tuple[Timeline, np.ndarray]:
    none = np.zeros(len(schedule.problem.passes))
    return run_of(schedule, none, none)


def test_waiting_is_idle_time_before_inputs_are_there(schedule: Schedule) -> None:
    """On the prediction itself every gap is waiting: passes start as soon as they can."""
    timeline, precedence = schedule.timeline(), schedule.precedence()
    ready = np.zeros(len(schedule.problem.passes))
    edges = slice(0, len(schedule.problem.edges))
    before, after = precedence.before[edges], precedence.after[edges]
    np.maximum.at(ready, after, timeline.end[before] + precedence.lag[edges])
    waits = trace_of(schedule, (timeline, ready)).waits(0)
    for names in schedule.order.values():
        at = 0.0
        for name in names:
            start, end = timeline[name]
            assert waits[schedule.problem.index[name]] == start - at
            at = end
    assert waits.max() > 0


def test_the_schedule_that_ran(schedule: Schedule, trace: Trace) -> None:
    planned = trace.planned()
    assert planned.problem == schedule.problem
    assert planned.order == schedule.order
    assert dict(planned.timeline()) == dict(schedule.timeline())


# --- Perfetto ---


def test_events_are_in_the_trace_event_format(schedule: Schedule, trace: Trace) -> None:
    for run in (None, trace, replace(trace, host=(), held=None)):
        assert faults(schedule_as_trace(schedule, run)) == []
    order = a_problem((0, 2, 1, 1, 0), 4)
    assert faults(schedule_as_trace(random_schedule(order, 3))) == []


def test_the_check_of_the_format_sees_faults(schedule: Schedule) -> None:
    body = json.loads(schedule_as_trace(schedule))

    def with_change(phase: str, **change: Any) -> str:
        changed = [dict(e) for e in body["traceEvents"]]
        first = next(e for e in changed if e["ph"] == phase)
        first.update(change)
        return json.dumps({**body, "traceEvents": changed})

    assert "Perfetto cannot read the id" in faults(with_change("s", id="predicted0"))[0]
    assert "has not one start and one end" in faults(with_change("f", id=10**6))[0]
    assert "has no slice around it" in faults(with_change("s", ts=10**6))[0]
    assert "binds to the next slice" in faults(with_change("f", bp="n"))[0]
    assert "overlap" in faults(with_change("X", dur=15.5))[0]
    assert "is no metadata" in faults(with_change("M", args={"name": 3}))[0]
    assert "counts no numbers" in faults(with_change("C", args={"bytes": "3"}))[0]
    assert "unknown phase" in faults(with_change("C", ph="Q"))[0]


def test_events_have_a_track_a_stream_and_an_arrow_a_message(schedule: Schedule, trace: Trace) -> None:
    found = json.loads(schedule_as_trace(schedule, trace))["traceEvents"]
    slices = [e for e in found if e["ph"] == "X"]
    assert len(slices) == 2 * len(schedule.problem.passes)
    assert {e["pid"] for e in slices} == set(range(8))
    assert len({(e["pid"], e["tid"]) for e in slices}) == 8
    starts, ends = ([e for e in found if e["ph"] == ph] for ph in "sf")
    assert len(starts) == len(ends) == 2 * 2 * 3 * 8  # two runs, F and B, three boundaries, eight microbatches
    assert all(s["pid"] // 4 == e["pid"] // 4 for s, e in zip(starts, ends, strict=True))  # never from one run to the other


def test_events_tell_waiting_host_time_and_bytes(schedule: Schedule, trace: Trace) -> None:
    found = json.loads(schedule_as_trace(schedule, trace))["traceEvents"]
    step, waits = trace.median(), trace.waits(trace.median_step)
    for e in found:
        if e["ph"] == "X" and e["pid"] >= 4:
            row = schedule.problem.index[e["name"]]
            assert (e["ts"], e["dur"]) == (step.start[row], step.end[row] - step.start[row])
            assert e["args"]["wait"] == pytest.approx(waits[row], abs=1e-3)
            assert (e["args"]["host"], e["args"]["held"]) == (row / 4, row)
        elif e["ph"] == "X":
            assert "wait" not in e["args"]
    counted = {(e["pid"], e["ts"], e["args"]["bytes"]) for e in found if e["ph"] == "C" and e["pid"] >= 4}
    ranks = schedule.problem.passes.rank.tolist()
    begins = {(4 + rank, 0, 0) for rank in ranks}
    assert counted == begins | {(4 + rank, step.end[row], row) for row, rank in enumerate(ranks)}


def test_show_takes_a_trace_alone(schedule: Schedule, trace: Trace, tmp_path: Path, capsys: Any) -> None:
    plan, run = tmp_path / "s.json", tmp_path / "t.json"
    schedule.save(plan)
    trace.save(run)
    one, other = tmp_path / "one.trace.json", tmp_path / "other.trace.json"
    assert main(["show", str(run), "-o", str(one)]) == 0
    assert main(["show", str(plan), "--trace", str(run), "-o", str(other)]) == 0
    assert one.read_text() == other.read_text()
    assert main(["show", str(run)]) == 0
    assert "measured" in capsys.readouterr().out
    assert main(["show", str(run), "--trace", str(run)]) == 2
    assert "holds a trace, and --trace names another" in capsys.readouterr().err


# --- what the executor measures ---


@pytest.mark.usefixtures("forked")
def test_a_run_measures_host_time_and_bytes() -> None:
    schedule = random_schedule(a_problem((0, 1), 4))
    trace = run_local(schedule, "mlp-tiny", steps=2, warmup=1)
    assert len(trace.host) == 2
    assert trace.held is not None
    assert trace.held.max() == max(trace.peaks[0])
    for step, host in zip(trace.steps, trace.host, strict=True):
        assert (host > 0).all()
        for names in schedule.order.values():  # what is neither a pass nor the interpreter is waiting for a message
            rows = [schedule.problem.index[name] for name in names]
            gaps = step.start[rows[1:]] - step.end[rows[:-1]]
            assert (host[rows[1:]] <= gaps + 1e-3).all()
            free = [i for i, name in enumerate(names) if i and "W" in name]
            assert np.allclose(host[[rows[i] for i in free]], gaps[[i - 1 for i in free]], atol=1e-3)
    assert faults(schedule_as_trace(schedule, trace)) == []


def test_torchs_profiler_sees_pass_names() -> None:
    schedule = random_schedule(a_problem((0, 1, 0), 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run_here(schedule, mlp(0))
    labels = [e.name for e in seen.events() if e.name.startswith("zbsolve:")]
    assert sorted(labels) == sorted(f"zbsolve:{name}" for name in schedule.problem.names)
