"""Emulated devices: their clocks are the prediction, the wall clock never runs ahead of them."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, Trace, pipeline, solve
from zbsolve.build import AttentionExchange, with_exchange
from zbsolve.cli import main
from zbsolve.exec import emulate
from zbsolve.exec.base.part import Hooks
from zbsolve.exec.base.program import Message
from zbsolve.exec.emulate import Board, EmulatedDevice, Times
from zbsolve.exec.lowering import lower
from zbsolve.exec.one_device import OneDevice
from zbsolve.interchange.importing import import_schedule, read_order
from zbsolve.models.by_name import load
from zbsolve.models.presets import mlp
from zbsolve.problem.placement import mirror
from zbsolve.profile import ShardCosts, ShardPasses, VocabularyCosts
from zbsolve.profile.profile import Layer, Link, Profile
from zbsolve.systems import preset

from ..support.exec_tools import Wall, a_problem, in_turns, random_schedule

PROFILE = Profile(
    "measured",
    "mlp-tiny",
    tuple(Layer(f"layer{i}", 10 * i + 1, 20, 30, 50, 0, 0, 0, 1000) for i in range(8)),
    Link(5, 100),
    4,
    None,
    {},
    {},
)


def test_times_of_the_schedule_itself() -> None:
    times = Times.of(random_schedule(a_problem((0, 1, 1, 0), 2)), "schedule")
    assert times.passes["2B1"] == 10
    assert times.links[("0F0", "1F0")] == times.links[("3B1", "2B1")] == 3
    assert ("1F0", "2F0") not in times.links  # on one rank


@pytest.mark.parametrize("fused", [False, True])
def test_times_of_a_profile(tmp_path: Path, fused: bool) -> None:
    path = str(tmp_path / "profile.json")
    PROFILE.save(path)
    times = Times.of(random_schedule(a_problem((0, 1), 2, fused=fused)), path)
    assert times.passes["0F1"] == 1 + 11 + 21 + 31
    assert times.passes["1BW0" if fused else "1W0"] == (200 if fused else 120)
    assert times.links[("0F0", "1F0")] == 15
    assert times.source == "measured: mlp-tiny"


def test_times_of_a_profile_where_some_backwards_are_one_pass(tmp_path: Path) -> None:
    path, order = str(tmp_path / "profile.json"), tmp_path / "order.txt"
    PROFILE.save(path)
    order.write_text("F0 F1 B0 W0 B1 W1\nF0 BW0 F1 BW1\n", encoding="utf-8")
    schedule = import_schedule(read_order(order), PROFILE).schedule
    assert schedule.problem.layers == (5, 3)
    assert {"0B0": 100, "0W0": 150, "1BW0": 150}.items() <= Times.of(schedule, path).passes.items()


@pytest.mark.parametrize("slices", [3, "4,2,1,1"])
def test_times_of_a_profile_in_slices(tmp_path: Path, slices: Any) -> None:
    path = str(tmp_path / "profile.json")
    layers = tuple(replace(one, attention_F=one.F / 2, attention_B=9, kv_bytes=80) for one in PROFILE.layers)
    replace(PROFILE, layers=layers).save(path)
    problem = Profile.load(path).problem(2, 2, (0, 1, 1, 0), slices=slices)
    assert problem.slices > 2
    assert {one.duration for one in problem.passes if one.kind == "F" and not one.stage} != {problem.passes[0].duration}
    times = Times.of(
        random_schedule(replace(problem, passes=replace(problem.passes, duration=0 * problem.passes.rank))), path
    )
    assert times.passes == dict(zip(problem.names, problem.passes.duration.tolist(), strict=True))


def test_a_message_that_blocks_is_time_of_its_sender(tmp_path: Path) -> None:
    """As the schedule has it, whatever the profile's link says; the device is busy until the message is there."""
    problem = PROFILE.problem(2, 2, layers=(4, 4), fused=True, blocking=True)
    own = Times.of(random_schedule(problem), "schedule")
    assert own.passes["0F1"] == 1 + 11 + 21 + 31 + 15
    assert own.passes["1F1"] == 41 + 51 + 61 + 71
    assert own.links[("0F0", "1F0")] == own.links[("1BW0", "0BW0")] == 0
    for blocking in (False, True):
        path = str(tmp_path / "profile.json")
        replace(PROFILE, link=replace(PROFILE.link, latency=25, blocking=blocking)).save(path)
        times = Times.of(random_schedule(problem), path)
        assert (times.passes["0F1"], times.links[("0F0", "1F0")]) == (64 + 35, 0)
    free = Times.of(random_schedule(PROFILE.problem(2, 2, layers=(4, 4), fused=True, blocking=False)), path)
    assert (free.passes["0F1"], free.links[("0F0", "1F0")]) == (64, 35)


def test_times_of_a_profile_with_recompute(tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    layers = [replace(layer, X=7) for layer in PROFILE.layers]
    replace(PROFILE, layers=tuple(layers)).save(path)
    problem = PROFILE.problem(2, 2, recompute=(0,))
    times = Times.of(random_schedule(problem), path)
    assert times.passes["0X1"] == 7 * problem.layers[0]
    assert "1X1" not in times.passes


def test_a_profile_that_does_not_fit(tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    PROFILE.save(path)
    with pytest.raises(BadInput, match="a profile of 8 layers, but the schedule is for 4"):
        Times.of(random_schedule(a_problem((0, 1), 2, layers=4)), path)
    with pytest.raises(BadInput, match="give a file"):
        Times.of(random_schedule(a_problem((0, 1), 2)), "-")


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    found = Wall()
    monkeypatch.setattr(emulate, "time", found)
    return found


def alone(passes: int) -> Board:
    """A board for ranks in one process."""
    return Board(np.zeros((Board.FIELDS, passes), np.int64))


def test_a_device_makes_up_for_one_pass_and_waits_for_more(wall: Wall) -> None:
    problem = pipeline([100, 100], [100, 0], microbatches=3, layers=[1, 1])
    board, names = alone(len(problem.names)), problem.names
    device = EmulatedDevice(Times.of(random_schedule(problem), "schedule"), problem.index, board)
    device.begin()
    wall.now = 7_000  # the first pass of a step starts when it really does
    start, wall.now = wall.now, 47_000  # its real work took 40 µs
    device.finish("0F0", start)
    assert wall.now == device.clock == 107_000
    wall.now += 150_000  # a late wake-up, by half a pass
    device.finish("0F1", wall.now)
    assert device.clock == 207_000
    assert wall.now == 257_000  # it goes on at once
    device.finish("0F2", wall.now)
    assert wall.now == device.clock == 307_000  # made up
    start, wall.now = wall.now, wall.now + 450_000
    device.finish("0B0", start)
    assert (
        device.clock == wall.now - 100_000 == 657_000
    )  # 350 µs late: one pass's time is made up, the device waits for the rest
    counts = {"passes": 4, "longer_than_emulated": 1, "late": 2, "worst_late_us": 350.0, "waited": 1}
    assert board.facts() == counts
    device.forget(names)
    assert board.facts() == dict.fromkeys(counts, 0)
    assert board.end[problem.index["0B0"]] == 657_000


def test_a_message_takes_its_links_time(wall: Wall) -> None:
    problem = pipeline([10, 10], BW=[10, 10], microbatches=1, comm=5, layers=[1, 1])
    schedule = random_schedule(problem)
    board = alone(len(problem.names))
    sender, receiver = (EmulatedDevice(Times.of(schedule, "schedule"), problem.index, board) for _ in range(2))
    message = next(action.takes for action in lower(schedule)[1].actions if action.name == "1F0")
    assert isinstance(message, Message)
    sender.finish("0F0", 0)
    assert receiver.arrived(message, 11_000) == wall.now == 15_000  # it is here at 11 µs already
    wall.now = 20_000
    assert receiver.arrived(message, 19_000) == 19_000  # really late
    assert receiver.clock == 15_000


@pytest.mark.parametrize("around", [{}, {"AF": 4, "AB": 25}, {"AF": [0, 3, 0, 9], "AB": 0}])
@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_the_devices_clocks_are_the_prediction(
    placement: tuple[int, ...], around: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the nanosecond, in every step, whatever order the ranks really run in; here no work is ever late."""
    monkeypatch.setattr(emulate, "time", Wall())
    monkeypatch.setattr(emulate, "sleep_until", lambda due: due)
    around = {kind: value[: len(placement)] if isinstance(value, list) else value for kind, value in around.items()}
    schedule, model = random_schedule(a_problem(placement, 4, **around), 2), mlp(0)
    names, ranks, rng = schedule.problem.names, schedule.problem.ranks, random.Random(0)
    board, times = alone(len(names)), Times.of(schedule, "schedule")
    hooks = [Hooks(emulated=EmulatedDevice(times, schedule.problem.index, board)) for _ in range(ranks)]
    one = OneDevice(model, schedule, hooks=hooks)
    batches = {m: model.batch(m, 0) for m in one.microbatches}
    predicted = schedule.timeline()
    for _ in range(2):
        in_turns(one, rng.choice)
        one.step({m: x for m, (x, _) in batches.items()}, {m: y for m, (_, y) in batches.items()})
        np.testing.assert_array_equal(board.end - board.end.min(), (predicted.end - predicted.end.min()) * 1000)


def test_a_model_of_any_number_of_layers() -> None:
    assert len(load("mlp-24").build()) == 24
    assert len(load("mlp-tiny").build()) == 8


@pytest.mark.usefixtures("forked")
def test_ranks_keep_to_their_devices_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asserts what no noise can break: nothing happens before it would on the devices, and gradients are right."""
    problem = pipeline(
        [4_000, 6_000, 5_000, 4_000], [5_000] * 4, [3_000] * 4, placement="vee", microbatches=3, comm=1_500, layers=[2] * 4
    )
    schedule, path, out = random_schedule(problem), str(tmp_path / "schedule.json"), str(tmp_path / "trace.json")
    schedule.save(path)
    options = ["--local", "--emulate", "schedule", "--steps", "2", "--warmup", "1", "--check"]
    assert main(["run", path, "--model", "mlp-tiny", *options, "-o", out]) == 0
    said = capsys.readouterr().out
    assert "emulated (the schedule's problem): of 72 passes" in said
    assert re.search(
        r"^peak activations and messages, rank by rank: [\d.]+ \w+, [\d.]+ \w+$", said, re.M
    )  # nothing predicted them: the model stands in
    predicted = schedule.timeline()
    for step in Trace.load(out).steps:
        began = step.start.min()
        assert (step.start - began >= predicted.start - 1).all()  # columns are rounded to µs in between
        assert (step.end - began >= predicted.end - 1).all()
    assert main(["compare", path, out, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["emulated"].startswith("measured on emulated devices, times of the schedule's problem: ")
    assert result["predicted"] == predicted.makespan
    assert result["measured"] >= result["predicted"] - 1


def test_a_pass_does_its_work_in_the_time_of_its_parts_too(wall: Wall) -> None:
    times = Times("", {"0FQ0.1": 10, "0FA0.1": 20, "0F0.1": 5, "0F0.2": 40}, {}, parts=("0FQ0.1", "0FA0.1"))
    device = EmulatedDevice(times, {name: i for i, name in enumerate(times.passes)}, board := alone(4))
    for late, waited in ((0, 0), (90_000, 1)):
        device.begin()
        start = wall.now
        assert device.finish("0FQ0.1", start) == (start, start + 10_000)
        assert device.finish("0FA0.1", wall.now) == (start + 10_000, start + 30_000)
        assert wall.now == start  # nobody slept: the whole pass works now
        wall.now += 34_000 + late
        assert device.finish("0F0.1", start) == (start + 30_000, max(start + 35_000, wall.now))
        assert device.clock == (wall.now - 35_000 if late else start + 35_000)  # all three passes' time can be made up
        assert board.facts()["waited"] == board.facts()["longer_than_emulated"] == waited
        assert device.finish("0F0.2", wall.now)[1] == device.clock == start + (129_000 if late else 75_000)


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_ranks_that_help_each_other_keep_to_their_devices_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts of passes and helpers have times of their own, though what they do is done together."""
    rows = [[12_000, 18_000, 24_000, 30_000]] * 2
    costs = AttentionExchange(6_000, 9_000, query_bytes=5, key_bytes=5, latency=1_000)
    problem = pipeline(
        rows, BW=[[40_000] * 4] * 2, microbatches=2, slices=4, comm=1_500, layers=[5, 5], attention_exchange=costs
    )
    schedule, path, out = preset("slimpipe", problem), str(tmp_path / "schedule.json"), str(tmp_path / "trace.json")
    assert problem.passes.are("FH").any()
    assert problem.passes.are("BH").any()
    schedule.save(path)
    options = ["--local", "--emulate", "schedule", "--steps", "1", "--warmup", "1", "--check"]
    assert main(["run", path, "--model", "gpt-tiny", *options, "-o", out]) == 0
    assert "emulated (the schedule's problem)" in capsys.readouterr().out
    predicted = schedule.timeline()
    (step,) = Trace.load(out).steps
    began = step.start.min()
    assert (step.start - began >= predicted.start - 1).all()
    assert (step.end - began >= predicted.end - 1).all()
    with pytest.raises(BadInput, match="ranks make attention for each other: emulate the schedule's own times"):
        Times.of(schedule, "profile.json")


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("beside", [{"AF": 6_000}, {"exchange": 9_000}])
def test_what_runs_beside_compute(beside: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Again what no noise can break: nothing ends before it would, what waits for them waits, and nobody else does."""
    problem = pipeline(4_000, 5_000, 3_000, placement=mirror(2), microbatches=4, comm=1_500, layers=[4] * 2, **beside)
    schedule, path, out = preset("dualpipe", problem), str(tmp_path / "schedule.json"), str(tmp_path / "trace.json")
    schedule.save(path)
    options = ["--local", "--emulate", "schedule", "--steps", "2", "--warmup", "1", "--check"]
    assert main(["run", path, "--model", "mlp-tiny", *options, "-o", out]) == 0
    assert "check: right" in capsys.readouterr().out
    predicted, edges = schedule.timeline(), problem.edges
    for step in Trace.load(out).steps:
        began = step.start.min()
        assert (step.end - began >= predicted.end - 1).all()
        awake = ~np.isin(edges.after, problem.side_stream) if "AF" in beside else np.ones(len(edges), bool)
        assert (step.start[edges.after] >= step.end[edges.before] - 1)[awake].all()
    assert main(["compare", path, out, "--json"]) == 0
    kinds = {one["kind"]: one for one in json.loads(capsys.readouterr().out)["kinds"]}
    assert ("AF" in kinds) == ("AF" in beside)
    for kind in kinds.keys() & {"AF", "AB"}:  # a clock beside: no sleep of a rank is in it, nor does it lack one
        assert (kinds[kind]["low"], kinds[kind]["high"]) == pytest.approx((6_000, 6_000), abs=0.01)


@pytest.mark.usefixtures("forked")
def test_sums_over_replicas_have_their_devices_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two pipelines of one rank with two stages. What the last stage's sum takes is hidden beside the first one's backward,
    and the first one's, which waits for it on its stream, is not: four F and the last stage's two BW end at 28 ms, its sum
    at 48, and the other sum takes 9 behind it."""
    step = pipeline(4_000, BW=6_000, placement=(0, 0), microbatches=2, layers=[4] * 2)
    problem = with_exchange(step, [9_000, 20_000], replicas=True)
    schedule, path, out = solve(problem, method="greedy"), str(tmp_path / "schedule.json"), str(tmp_path / "trace.json")
    schedule.save(path)
    options = ["--local", "--mesh", "dp=2", "--emulate", "schedule", "--steps", "1", "--warmup", "1", "--check"]
    assert main(["run", path, "--model", "mlp-tiny", *options, "-o", out]) == 0
    assert "check: right" in capsys.readouterr().out
    predicted, (measured,) = schedule.timeline(), Trace.load(out).steps
    began = measured.start.min()
    assert predicted["0C0"] == (48_000, 57_000)
    assert (measured.start - began >= predicted.start - 1).all()
    assert (measured.end - began >= predicted.end - 1).all()  # later by as much as the real sum on a busy machine


def test_times_of_all_to_alls(tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    PROFILE.save(path)
    times = Times.of(random_schedule(a_problem((0, 1), 2, AF=[9, 8], AB=7)), path)
    assert (times.passes["0F1"], times.passes["0AF1"], times.passes["1AB1"]) == (64, 9, 7)
    assert times.links["0AF0", "1F0"] == times.links["1AB1", "0B1"] == 15
    assert times.waits["0AF0"] == [("0F0", 0)]
    assert times.side_streams["0AF0"] == "comm:0"
    layers = tuple(replace(layer, all_to_all=50.0 * (i < 2)) for i, layer in enumerate(PROFILE.layers))
    replace(PROFILE, layers=layers).save(path)
    again = Times.of(random_schedule(a_problem((0, 1), 2, AF=[9, 8], AB=7)), path)
    sent = {name: us for name, us in again.passes.items() if "A" in name}
    assert sent == {name: 100 * (name[0] == "0") for name in times.passes if "A" in name}
    own = Times.of(random_schedule(a_problem((0, 1), 2, AF=[9, 8], AB=7)), "schedule").links
    assert {pair: again.links[pair] for pair in own} == {pair: times.links[pair] for pair in own}
    assert again.passes.keys() == times.passes.keys()
    for schedule in (random_schedule(a_problem((0, 1), 2)), random_schedule(a_problem((0, 1), 2, AF=[0, 8], AB=7))):
        with pytest.raises(BadInput, match=r"profile.json: has a time for pass 0AF0, which the schedule lacks: solve it"):
            Times.of(schedule, path)
    PROFILE.save(path)
    exchanged = pipeline(4, BW=5, placement=mirror(2), microbatches=2, exchange=9, layers=[4] * 2)
    assert Times.of(random_schedule(exchanged), path).passes["0C0"] == 9
    plain = Times.of(random_schedule(a_problem((0, 1), 2, recompute="all")), path)
    assert plain.links["0F0", "1F0"] == 15
    assert "0AF0" not in plain.passes


@pytest.mark.parametrize("embedding", [None, 0])
@pytest.mark.parametrize("vocabulary", ["sharded", "two-barriers"])
def test_times_of_a_sharded_vocabulary(tmp_path: Path, vocabulary: str, embedding: int | None) -> None:
    """S, T and collectives take what the profile says of them, on any placement and beside recompute."""
    path = str(tmp_path / "profile.json")
    rest = replace(PROFILE.layers[7], F=1)
    row = ShardCosts(2, ShardPasses(40, 20, 8, 4, 3), ShardPasses(20, 40, 8, 4), 64, 2.0, broadcast=9.0)
    table = None if embedding is None else PROFILE.layers[0]
    costs = VocabularyCosts("measured", 64, 8, 2, 7, rest, (row,), embedding, table)
    profile = replace(PROFILE, vocabulary=costs)
    profile.save(path)
    for how in ({"placement": "single"}, {"placement": "vee", "recompute": (0, 1)}, {"placement": "single", "fused": True}):
        schedule = random_schedule(profile.problem(2, 4, vocabulary=vocabulary, **how))
        own, told = Times.of(schedule, "schedule"), Times.of(schedule, path)
        assert (told.passes, told.links, told.waits) == (own.passes, own.links, own.waits)
    problem = profile.problem(2, 4, vocabulary=vocabulary, layers=(4, 4))
    slow = replace(row, one=replace(row.one, S=80), two=replace(row.two, T=90), broadcast=19.0)
    replace(profile, vocabulary=replace(costs, shards=(slow,))).save(path)
    times = Times.of(random_schedule(problem), path).passes
    assert [times[name] for name in ("2S0", "3T1", "2VB0")] == ([80, 20, 19] if vocabulary == "sharded" else [20, 90, 19])
    PROFILE.save(path)
    with pytest.raises(BadInput, match=r"/profile.json: vocabulary: the profile has no field 'vocabulary'"):
        Times.of(random_schedule(problem), path)


def test_a_wrong_profile_is_said_before_any_rank_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "schedule.json")
    random_schedule(a_problem((0, 1), 2)).save(path)
    assert main(["run", path, "--model", "mlp-tiny", "--local", "--emulate", str(tmp_path / "no.json")]) == 2
    assert "no.json: no such file" in capsys.readouterr().err
