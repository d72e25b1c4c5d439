"""Runs that Primus and Megatron recorded: order, clocks, times; a real one; and what cannot be used."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from zbsolve import Schedule, Trace
from zbsolve.interchange.traces import primus_events
from zbsolve.interchange.traces.reading import read_trace
from zbsolve.interchange.traces.to_trace import aligned, gaps_of, least_delays, problem_of
from zbsolve.profile import from_trace
from zbsolve.profile.lengths import stalls_of

from ...support.recorded import PRIMUS, a_schedule, changed, primus_folder, refused
from ...support.runs import run_of, trace_of


@pytest.fixture(scope="module")
def primus() -> Trace:
    return read_trace(PRIMUS)


@pytest.mark.parametrize(
    ("placement", "split", "places"),
    [("single", False, False), ("loop", False, False), ("loop", False, True), ("single", True, True), ("vee", True, True)],
)
def test_a_run_as_predicted_gives_its_schedule_back(placement: str, split: bool, places: bool, tmp_path: Path) -> None:
    """Order, placement, times and messages, with clocks apart; chunks and microbatches told by Megatron's rule where the
    files do not say them."""
    schedule = a_schedule(placement, split)
    found = read_trace(primus_folder(tmp_path / "run", schedule, places=places))
    assert found.problem.placement == schedule.problem.placement
    assert found.schedule == dict(schedule.order)
    assert np.abs(found.problem.passes.duration - schedule.problem.passes.duration).max() <= 1
    assert found.steps[0].makespan == pytest.approx(schedule.timeline().makespan, abs=2)
    assert found.replayed(0).makespan == pytest.approx(schedule.timeline().makespan, rel=0.01)


def test_a_real_run_is_replayed(primus: Trace) -> None:
    """8 GPUs, 19 steps: each step's own times replay 0.36 % short, 0.40 % of the whole schedule function; medians 1.29 %."""
    measured = np.array([step.makespan for step in primus.steps])
    replayed = np.array([primus.replayed(i).makespan for i in range(len(primus.steps))])
    assert (replayed / measured - 1).mean() == pytest.approx(-0.0036, abs=1e-4)
    assert np.abs(replayed / measured - 1).max() < 0.005
    totals = json.loads((PRIMUS / "pp_rank_0.json").read_text())
    whole = np.array([1e3 * totals[name]["total"] for name in primus.facts["steps"]])
    assert (replayed / whole - 1).mean() == pytest.approx(-0.0040, abs=1e-4)
    assert primus.planned().timeline().makespan == 3_202_876
    assert primus.median().makespan == pytest.approx(3_244_700, abs=1)


def test_a_real_run_with_messages_beside_compute_replays_shorter() -> None:
    """What was published of this run, a step of 3,189 ms and 0.7 % short by its own times, had messages beside compute, and
    each as long as the shortest one of its link and step (0.67 to 0.70 ms; they take 0.72 to 0.85 in the median)."""
    everything = aligned(primus_events.read(PRIMUS).checked())
    recording = replace(everything, steps=everything.steps[1:])
    beside = problem_of(recording)
    order = {f"compute:{rank}": names for rank, names in enumerate(recording.steps[0].order)}
    shortest: dict[tuple[int, int], list[float]] = {}
    for step in everything.steps:
        for pair, delay in least_delays(step).items():
            shortest.setdefault(pair, []).append(delay)
    p, e = beside.passes, beside.edges
    pairs = zip(p.rank[e.before].tolist(), p.rank[e.after].tolist(), strict=True)
    lags = np.array([round(median(shortest[pair])) if pair[0] != pair[1] else 0 for pair in pairs])
    assert set(lags.tolist()) == {0, 671, 683, 685, 691, 699, 704}
    published = replace(beside, edges=replace(e, lag=lags))
    assert Schedule(published, order).timeline().makespan == 3_188_588
    took = [
        np.array([step.by_name[name].end - step.by_name[name].start for name in beside.names]) for step in recording.steps
    ]
    own = [replace(published, passes=replace(p, duration=np.rint(one).astype(np.int64))) for one in took]
    replays = [
        Schedule(one, order).timeline().makespan / step.length - 1 for one, step in zip(own, recording.steps, strict=True)
    ]
    assert np.mean(replays) == pytest.approx(-0.0071, abs=1e-4)


def test_a_real_run_shows_that_messages_hold_their_sender_up(primus: Trace) -> None:
    """Behind a pass that sends, a rank stands idle for as long as a message takes; behind one that does not, for 5 µs."""
    problem, gaps = primus.problem, primus.facts["blocking"]
    assert (round(gaps["sending"]), round(gaps["silent"]), round(gaps["message"])) == (792, 5, 805)
    assert set(problem.edges.sent.tolist()) - {0} == {720, 788, 800, 805, 808, 848, 852}
    assert not problem.edges.lag.any()
    assert from_trace(primus).link.blocking
    row = problem.index["7F0"]
    assert problem.sending[row] == 0
    for step, sent in zip(primus.steps, primus.sent, strict=True):
        assert (sent <= problem.sending).all()
        assert (step.end - step.start > sent).all()


@pytest.mark.parametrize(("placement", "split"), [("single", False), ("loop", False), ("single", True), ("vee", True)])
def test_a_run_whose_messages_hold_their_sender_up(placement: str, split: bool, tmp_path: Path) -> None:
    """Times, order and the link of a prediction come back; the profile says so, too."""
    schedule = a_schedule(placement, split, blocking=True)
    found = read_trace(primus_folder(tmp_path / "run", schedule, places=True))
    assert found.facts["blocking"]["silent"] < 1
    assert found.facts["blocking"]["sending"] == pytest.approx(40, abs=1)
    assert np.abs(found.problem.passes.duration - schedule.problem.passes.duration).max() <= 2
    assert np.abs(found.problem.edges.sent - schedule.problem.edges.sent).max() <= 1
    assert not found.problem.edges.lag.any()
    for i, step in enumerate(found.steps):
        assert step.makespan == pytest.approx(schedule.timeline().makespan, abs=2)
        assert found.replayed(i).makespan == pytest.approx(schedule.timeline().makespan, rel=0.005)
    profile = from_trace(found)
    assert profile.link.blocking
    again = profile.problem(4, 8, found.problem.placement)
    assert again.passes.duration.tolist() == pytest.approx(found.problem.passes.duration.tolist(), abs=1)


@pytest.mark.parametrize(("gap", "told"), [(0, False), (15, False), (30, True), (40, True), (75, True), (90, False)])
@pytest.mark.parametrize("launch", [0, 20])
def test_gaps_tell_it_where_they_are_about_a_message_long(gap: int, told: bool, launch: int) -> None:
    """Of 40 µs: each pass begins `launch` µs later than it could, and `gap` more behind one that sends."""
    schedule = a_schedule("single", split=False)
    problem = schedule.problem
    sends = np.isin(np.arange(len(problem.passes)), problem.edges.before[problem.edges.lag > 0])
    late = np.full(len(sends), launch)
    for rows in schedule.sequences.values():
        late[rows[1:]] += gap * sends[rows[:-1]]
    gaps = gaps_of(trace_of(schedule, run_of(schedule, np.zeros(len(sends)), late)))
    assert (gaps.sending, gaps.silent, gaps.message) == (gap + launch, launch, 40)
    assert gaps.blocked == told


def test_messages_beside_compute_stay_there(tmp_path: Path) -> None:
    found = read_trace(primus_folder(tmp_path / "run", a_schedule("single", split=False), places=True))
    assert "blocking" not in found.facts
    assert not found.problem.sending.any()
    assert found.sent == ()


def test_what_a_run_sent_is_kept_in_a_file(primus: Trace, tmp_path: Path) -> None:
    few = replace(primus, steps=primus.steps[:2], ready=primus.ready[:2], sent=primus.sent[:2])
    few.save(tmp_path / "run.json")
    again = Trace.load(tmp_path / "run.json")
    assert np.array_equal(again.sent, few.sent)
    assert [again.replayed(i).value for i in range(2)] == [few.replayed(i).value for i in range(2)]
    assert np.array_equal(again.computed(), few.computed())


def test_a_real_run_has_one_time_for_all_ranks(primus: Trace) -> None:
    """No message arrives before it was sent; messages take 0.72 to 0.85 ms in the median, 0.59 at least."""
    edges, rank = primus.problem.edges, primus.problem.passes.rank
    apart = rank[edges.before] != rank[edges.after]
    for step, sent in zip(primus.steps, primus.sent, strict=True):
        assert (step.start[edges.after] - step.end[edges.before] + sent[edges.before])[apart].min() > 590
    assert primus.facts["clocks"] == "aligned by messages"
    assert primus.facts["left_out"] == ["warm-up: the first 1 of 20 steps, over 1.25 times as long as the median"]


def test_a_real_run_has_four_stalls(primus: Trace) -> None:
    """Four F took five to six times as long; two of them made their steps 0.2 s longer, two hid behind waiting."""
    found = stalls_of(primus)
    assert [(primus.facts["steps"][one.step], one.name) for one in found] == [
        ("11", "0F7"),
        ("18", "3F10"),
        ("16", "2F8"),
        ("15", "1F4"),
    ]
    saved = {one.name: one.measured - one.without for one in found}
    assert saved["3F10"] == pytest.approx(241_140, abs=1)
    assert saved["2F8"] == pytest.approx(206_224, abs=1)
    assert saved["0F7"] == saved["1F4"] == 0


def test_its_profile_predicts_its_medians(primus: Trace) -> None:
    profile = from_trace(primus)
    assert (profile.source, profile.model, len(profile.layers), profile.fused_only) == ("measured", "primus-pp8", 8, True)
    assert len(profile.samples["stage3.layer0/F"]) == 19 * 16
    again = profile.problem(8, 16)
    assert (again.passes.duration == primus.problem.passes.duration).all()
    timeline = Schedule(again, primus.schedule).timeline()
    assert timeline.makespan == pytest.approx(primus.planned().timeline().makespan, rel=1e-4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return primus_folder(tmp_path / "run", a_schedule("single", split=False), places=True)


def test_a_missing_rank_is_named(folder: Path) -> None:
    (folder / "pp_rank_2.json").unlink()
    refused(folder, str(folder), "rank 2", "pp_rank_2.json is missing", "pp_size 4")


def test_a_file_of_a_rank_too_many_is_told(folder: Path) -> None:
    shutil.copy(folder / "pp_rank_0.json", folder / "pp_rank_4.json")
    assert read_trace(folder).facts["left_out"] == ["the files of rank 4: config.json says pp_size 4"]


def test_a_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, "config.json: no such file")


def test_mixed_steps_are_named(folder: Path) -> None:
    path = folder / "pp_rank_3.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({"1": body["1"], "7": body["2"]}))
    refused(folder, "rank 3", "steps are mixed", "step 2")


def test_another_order_in_another_step_is_named(folder: Path) -> None:
    body = json.loads((folder / "pp_rank_1.json").read_text())["2"]
    body["fwd_minibatch"][:2] = [1, 0]
    changed(folder, 1, "2", **body)
    refused(folder, "step 2", "rank 1", "ran 1F1 at place 0", "steps are mixed")


def test_one_odd_step_of_many_is_left_out(tmp_path: Path) -> None:
    folder = primus_folder(tmp_path / "run", a_schedule("single", split=False), places=True, steps=12)
    body = json.loads((folder / "pp_rank_1.json").read_text())["7"]
    body["fwd_minibatch"][:2] = [1, 0]
    changed(folder, 1, "7", **body)
    found = read_trace(folder)
    assert len(found.steps) == 11
    assert found.facts["left_out"] == ["1 of 12 steps, which ran another order than most (step 7)"]


def test_combined_passes_are_named(folder: Path) -> None:
    body = json.loads((folder / "pp_rank_0.json").read_text())["1"]
    body["bwd_start"][0], body["bwd_end"][0] = body["fwd_start"][4], body["fwd_end"][4]
    changed(folder, 0, "1", **body)
    refused(folder, "step 1", "rank 0", "0F4", "0BW0", "combined passes")


def test_clocks_that_cannot_fit_are_named(folder: Path) -> None:
    """Rank 1's first forward seems to run 1 ms too early, all else where it did: no shift of a clock mends that."""
    body = json.loads((folder / "pp_rank_1.json").read_text())["1"]
    for name in ("fwd_start", "fwd_end"):
        body[name][0] -= 1.0
    changed(folder, 1, "1", **body)
    refused(folder, "step 1", "ranks 0 and 1", "clocks", "do not fit")


def test_wrong_fields_are_named(folder: Path) -> None:
    body = json.loads((folder / "pp_rank_1.json").read_text())["1"]
    changed(folder, 1, "1", fwd_end=body["fwd_end"][:-1])
    refused(folder, "pp_rank_1.json", "step 1", "'fwd_start' has 8 times and 'fwd_end' 7")
    changed(folder, 1, "1", fwd_end="soon")
    refused(folder, "pp_rank_1.json", "field 'fwd_end'", "wrong type")
    changed(folder, 1, "1", **body | {"bwd_chunk": [3] * 8})
    refused(folder, "pp_rank_1.json", "'bwd_chunk' has 3")
    changed(folder, 1, "1", **body | {"fwd_start": body["fwd_start"][::-1]})
    refused(folder, "pp_rank_1.json", "'fwd_start'[1]", "not in the order run")


def test_damaged_and_empty_files_are_named(folder: Path) -> None:
    (folder / "pp_rank_1.json").write_text('{"1": {"fwd_start": [1.0,')
    refused(folder, "pp_rank_1.json", "damaged JSON at line 1")
    (folder / "pp_rank_1.json").write_text("")
    refused(folder, "pp_rank_1.json", "damaged JSON")
    (folder / "pp_rank_1.json").write_text("{}")
    refused(folder, "rank 1", "steps are mixed")


def test_other_paths_are_told(folder: Path, tmp_path: Path) -> None:
    refused(folder / "pp_rank_0.json", "pp_rank_0.json", "name its folder")
    (tmp_path / "other").mkdir()
    refused(tmp_path / "other", "a folder without a trace")
    (tmp_path / "other" / "iteration_10").mkdir()
    refused(tmp_path / "other", "name one of its folders: iteration_10")
    (tmp_path / "empty").write_text("")
    refused(tmp_path / "empty", "an empty file")
    (tmp_path / "x.json").write_text('{"a": 1}')
    refused(tmp_path / "x.json", "no trace that zbsolve knows")
    refused(tmp_path / "nowhere", "no such file")


def test_a_huge_number_of_passes_is_refused(folder: Path) -> None:
    shutil.copy(PRIMUS / "pp_rank_0.json", folder)
    (folder / "config.json").write_text(json.dumps({"pp_size": 10**9, "vp_size": 1, "num_mbs": 16}))
    refused(folder, "rank 4", "missing")
    (folder / "config.json").write_text(json.dumps({"pp_size": 1, "vp_size": 10**9, "num_mbs": 16}))
    refused(folder, "pp_rank_0.json", "16 microbatches of 1000000000 chunks")
