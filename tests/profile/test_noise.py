"""Steps whose times vary: each drawn step is the longest path, and no order undercuts its bound."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from math import exp
from pathlib import Path

import numpy as np
import pytest

from zbsolve import BadInput, Deadlock, Problem, Schedule, Timeline, Trace, pipeline, preset, solve, under_noise
from zbsolve.cli import main
from zbsolve.interchange.traces.reading import read_trace
from zbsolve.profile.noise import AIMS, Aim, Noise
from zbsolve.schedule.timeline import Floats

from ..support.exhaustive import optimum, orders
from ..support.profiles import equal_layers
from ..support.recorded import SAMPLES, a_schedule, primus_run
from ..support.runs import trace_of

NOISE = Noise(rank=0.02, microbatch=0.2, single=0.05, stall=0.02, times=8)


def step(ranks: int = 3, microbatches: int = 4, comm: int = 700) -> Problem:
    times = [1000 * (3 + i % 2) for i in range(ranks)]
    return pipeline(times, times, times, microbatches=microbatches, comm=comm)


def timed(problem: Problem, took: Floats) -> Problem:
    """The same step with these times, as whole µs."""
    return replace(problem, passes=replace(problem.passes, duration=np.rint(took).astype(np.int64)))


@pytest.mark.parametrize("blocking", [False, True])
def test_each_drawn_step_is_the_longest_path_of_its_times(blocking: bool) -> None:
    """Another simulation of the same times, rounded: at most half a µs a pass on the path. Sending is not stretched."""
    problem = pipeline([3000, 4000, 5000], [3000] * 3, [2000] * 3, microbatches=4, comm=700, blocking=blocking)
    schedule = preset("1f1b", problem)
    found = under_noise({"one": schedule}, NOISE, draws=20).spreads["one"]
    (took,) = NOISE.steps(problem, 20)
    assert (took > problem.sending).all()
    for value, row in zip(found.values, took, strict=True):
        again = Schedule(timed(problem, row), schedule.order, schedule.syncs).timeline().makespan
        assert abs(again - value) <= len(problem.passes) / 2
    assert found.values.std() > 0


def test_without_noise_every_step_is_as_given() -> None:
    schedule = preset("zb-h1", step())
    found = under_noise({"one": schedule}, Noise(), draws=3).spreads["one"]
    assert found.values.tolist() == [schedule.timeline().makespan] * 3
    assert found.critical.sum() == pytest.approx(1)


def test_a_rank_alone_by_hand() -> None:
    """30 µs times one factor a step: its median is 1, its mean exp(σ²/2), and its 95th percentile exp(1.645 σ)."""
    schedule = preset("1f1b", pipeline([10], [10], [10], microbatches=1))
    found = under_noise({"one": schedule}, Noise(rank=0.2)).spreads["one"]
    middle, off = found.mean
    assert abs(middle - 30 * exp(0.02)) < 2 * off < 0.5
    for share, deviations in ((0.5, 0.0), (0.95, 1.6449)):
        value, low, high = found.at(share)
        assert low < value < high
        assert low - 0.2 < 30 * exp(0.2 * deviations) < high + 0.2
    assert found.bounds == pytest.approx(found.values)


@pytest.mark.parametrize("seed", range(3))
def test_no_order_undercuts_a_bound(seed: int) -> None:
    """Against the exhaustive optimum of each drawn step, with its times rounded."""
    problem = step(2, 2, comm=500 * seed)
    found = under_noise({"one": preset("1f1b", problem)}, NOISE, draws=4, seed=seed).spreads["one"]
    (took,) = NOISE.steps(problem, 4, seed)
    for bound, value, row in zip(found.bounds, found.values, took, strict=True):
        best = optimum(timed(problem, row))
        assert best is not None
        assert bound <= best + len(problem.passes) / 2
        assert bound <= value + 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_bounds_count_memory(seed: int) -> None:
    """With room for one microbatch: above the bounds without a limit, but where a pass stalls, and of no drawn step above
    what exhaustive search finds."""
    free = pipeline([3000, 4000], BW=[6000, 5000], microbatches=3, comm=500 * seed, held_until_W=2)
    tight = replace(free, capacity=(3, 3))
    order = solve(tight, effort=0.05).order
    with_limit, without = (
        under_noise({"one": Schedule(one, order)}, NOISE, draws=4, seed=seed).spreads["one"] for one in (tight, free)
    )
    (took,) = NOISE.steps(tight, 4, seed)
    assert (with_limit.bounds >= without.bounds).all()
    assert (with_limit.bounds > without.bounds).sum() > 2
    for bound, row in zip(with_limit.bounds, took, strict=True):
        best = optimum(timed(tight, row))
        assert best is not None
        assert bound <= best + len(tight.passes) / 2


@pytest.mark.parametrize("seed", range(6))
def test_no_order_has_a_quantile_below_its_bound(seed: int) -> None:
    """Against every order of every stream, each held fixed in the same draws: none is below the bound at p50, p95 and p99,
    and the bound is of use."""
    random = np.random.default_rng(seed)
    F, B, W = random.integers(500, 3000, (3, 2)).tolist()
    problem = pipeline(F, B, W, microbatches=2, comm=int(random.integers(0, 900)))
    found = product(*(orders(problem, stream, lanes=True) for stream in problem.streams))
    every = [Schedule.of(problem, dict(zip(problem.streams, rows, strict=True))) for rows in found]
    named = {str(number): schedule for number, schedule in enumerate(every) if runs(schedule)}
    spreads = under_noise(named, NOISE, draws=60, seed=seed).spreads.values()
    for share in (0.5, 0.95, 0.99):
        best, (bound, low, high) = min(spread.at(share)[0] for spread in spreads), next(iter(spreads)).bound_at(share)
        assert 0.85 * best < bound <= best + 1e-6
        assert low <= bound <= high


def runs(schedule: Schedule) -> bool:
    try:
        return bool(schedule.timeline().makespan)
    except Deadlock:
        return False


def test_schedules_see_the_same_draws() -> None:
    """Of one problem all of them; of another placement those of ranks and of microbatches."""
    problem = step()
    one, same = (next(NOISE.steps(problem, 5, seed=1)) for _ in range(2))
    assert (one == same).all()
    lean = replace(NOISE, single=0.0, stall=0.0)
    first, other = (next(lean.steps(replace_times(6, placement), 5)) for placement in ("loop", "vee"))
    ranks = [pipeline([1] * 6, [1] * 6, microbatches=2, placement=p).passes.rank for p in ("loop", "vee")]
    assert (first[:, ranks[0] == ranks[1]] == other[:, ranks[0] == ranks[1]]).all()
    spreads = under_noise({"a": preset("1f1b", problem), "b": solve(problem, effort=0.1)}, NOISE, draws=500).spreads
    assert spreads["b"].shorter(spreads["a"]) > 0.9
    assert spreads["a"].bounds == pytest.approx(spreads["b"].bounds)


def replace_times(stages: int, placement: str) -> Problem:
    return pipeline([1000] * stages, [2000] * stages, microbatches=2, placement=placement)


def test_a_trace_says_how_times_vary() -> None:
    """Of steps that were drawn: deviations of ranks and microbatches within a tenth, stalls among what passes do alone."""
    problem, noise = step(4, 8), Noise(0.1, rank=0.05, microbatch=0.2, single=0.02, stall=0.01, times=6)
    schedule = preset("1f1b", problem)
    (took,) = noise.steps(problem, 200)
    steps = []
    for row in took:
        ran = Schedule(timed(problem, row), schedule.order, schedule.syncs).timeline()
        steps.append(Timeline(problem, ran.start, ran.end))
    ready = tuple(one.start for one in steps)
    trace = Trace(problem, dict(schedule.order), tuple(steps), ready, (0.0,) * 200, ((0,) * 4,) * 200, {})
    found = Noise.of(trace)
    assert found.step == pytest.approx(0.1, rel=0.2)
    assert found.rank == pytest.approx(0.05, rel=0.1)
    assert found.microbatch == pytest.approx(0.2, rel=0.1)
    assert found.single == pytest.approx(0.02, rel=0.1)
    assert found.times == pytest.approx(6, rel=0.1)
    assert found.stall == pytest.approx(0.01, rel=0.2)
    drawn = under_noise({"own": schedule}, replace(found, measured=None)).spreads["own"]
    told = under_noise({"own": schedule}, noise).spreads["own"]
    for share in (0.5, 0.95):
        assert drawn.at(share)[0] == pytest.approx(told.at(share)[0], rel=0.02)
    with pytest.raises(BadInput, match="run: 2 steps do not say how times vary: at least 3"):
        Noise.of(replace(trace, steps=trace.steps[:2]), "run")


@pytest.mark.parametrize("file", ["primus-pp8", "bytedance-ST.parquet"])
def test_real_steps_are_drawn_as_they_were(file: str) -> None:
    """Mean, median and 95th percentile of measured steps within 0.5 % by their own times, also where microbatches come in
    another order within 2 % (docs/noise.md has how close)."""
    trace = read_trace(SAMPLES / file)
    noise, measured = Noise.of(trace), [one.value for one in trace.steps]
    for how, off in ((noise, 0.005), (replace(noise, shuffled=True), 0.02)):
        found = under_noise({"own": trace.planned()}, how).spreads["own"]
        assert len(found.values) == (len(measured) if how is noise else 10_000)
        assert found.mean[0] == pytest.approx(np.mean(measured), rel=off)
        for share in (0.5, 0.95):
            assert found.at(share)[0] == pytest.approx(float(np.quantile(measured, share)), rel=off)


LAW = Noise(microbatch=0.25, single=0.01)


def varied_run(folder: Path, steps: int) -> tuple[Schedule, Trace]:
    """An order, and a run of it by that law: eight microbatches, whose lengths each step has anew."""
    schedule = a_schedule("single", split=False, times=100)
    took = np.concatenate([*LAW.steps(schedule.problem, steps)])
    ran = [Schedule(timed(schedule.problem, row), schedule.order) for row in took]
    return schedule, read_trace(primus_run(folder, ran))


def test_lengths_are_those_of_each_step(tmp_path: Path) -> None:
    """Where microbatches differ in length the problem has those of the median step. They count for nothing in others: each
    step by its own times is as measured. With factors beside them steps would be 5 % longer on average."""
    _, trace = varied_run(tmp_path / "run", 24)
    noise, measured = Noise.of(trace), [one.value for one in trace.steps]
    found, fitted, twice = (
        under_noise({"own": trace.planned()}, how).spreads["own"]
        for how in (noise, replace(noise, measured=None), replace(noise, measured=None, lengths=()))
    )
    assert len(noise.lengths) == 8
    assert found.values == pytest.approx(measured, rel=0.002)
    assert "24 measured steps" in str(noise)
    assert fitted.mean[0] == pytest.approx(found.mean[0], rel=0.02)
    assert twice.mean[0] > 1.05 * found.mean[0]


def test_steps_of_a_law_are_foreseen(tmp_path: Path) -> None:
    """Of 400 steps, their p50 and p95 are within 3 % of those of their law: as they were, with microbatches in another
    order, and as deviations."""
    schedule, trace = varied_run(tmp_path / "run", 400)
    noise, law = Noise.of(trace), under_noise({"own": schedule}, LAW, seed=9).spreads["own"]
    for how in (noise, replace(noise, shuffled=True), replace(noise, measured=None)):
        found = under_noise({"own": trace.planned()}, how, draws=2000).spreads["own"]
        for share in (0.5, 0.95):
            assert found.at(share)[0] == pytest.approx(law.at(share)[0], rel=0.03)


def test_measured_factors_by_hand() -> None:
    """Two ranks, two microbatches, three steps. In step 2 microbatch 1 takes twice as long on rank 1, forwards alone, and
    one backward takes none. Stages cut in two take their rank's factors, B and W those of BW; another number of
    microbatches any of the step's."""
    problem = pipeline([10, 20], BW=[20, 40], microbatches=2)
    took = np.tile(problem.passes.duration.astype(float), (3, 1))
    took[2, problem.index["1F1"]] = 40
    took[2, problem.index["0BW0"]] = 0
    schedule = preset("1f1b", problem)
    steps = []
    for row in took:
        ran = Schedule(timed(problem, row), schedule.order).timeline()
        steps.append(Timeline(problem, ran.start, ran.end))
    trace = replace(trace_of(schedule, (steps[0], steps[0].start)), steps=tuple(steps))
    noise = Noise.of(trace)
    assert np.concatenate([*noise.steps(problem, 4)]).tolist() == [*took.tolist(), took[0].tolist()]
    vee = pipeline([5, 5, 10, 10], [5, 5, 10, 10], [5, 5, 10, 10], microbatches=2, placement=(0, 1, 1, 0))
    (drawn,) = noise.steps(vee, 3)
    longer = {n: int(d / u) for n, d, u in zip(vee.names, drawn[2], vee.passes.duration, strict=True) if d != u}
    assert longer == {"1F1": 2, "2F1": 2, "0B0": 0, "3B0": 0, "0W0": 0, "3W0": 0}
    more = pipeline([10, 20], BW=[20, 40], microbatches=3)
    found = np.concatenate([*noise.steps(more, 300)])[2::3, more.rows("F", stage=1)]
    assert {*np.unique(found).tolist()} == {20, 40}


def test_words_say_it() -> None:
    assert Noise.read("rank=1%, microbatch=0.2,pass=3%,stall=0.1%x8") == Noise(0.0, 0.01, 0.2, 0.03, 0.001, 8.0)
    for text, why in (
        ("rank=1%,rank=2%", "noise 'rank=2%'"),
        ("speed=1%", "noise 'speed=1%'"),
        ("rank=-1%", "noise: rank '-1%': a share"),
        ("stall=1%", "a chance, and how many times as long"),
        ("stall=1%x8.8.8", "a chance, and how many times as long"),
        ("stall=1%x0.5", "a stall 1 to 1,000,000 times as long"),
        ("rank=300%", "deviations are 0 to 200%"),
        ("step=1", "noise: step '1': write 1% or 100%: without % a share is below 1"),
    ):
        with pytest.raises(BadInput, match=why):
            Noise.read(text)
    with pytest.raises(BadInput, match="span: schedules whose objective is the makespan"):
        under_noise({"span": preset("1f1b", replace(step(), objective="span"))}, NOISE)


def test_no_time_gets_negative() -> None:
    """By the largest noise that there is; a deviation below 0 is refused."""
    problem = step()
    for took in Noise(2.0, 2.0, 2.0, 2.0, stall=1.0, times=1e6).steps(problem, 300):
        assert (took > problem.sending).all()
    for wrong in (Noise, lambda rank: replace(NOISE, rank=rank)):
        with pytest.raises(BadInput, match="noise: deviations are 0 to 200%"):
            wrong(rank=-0.1)


def test_what_is_critical_by_hand() -> None:
    """Two ranks, one microbatch: all passes follow each other, so each is on every path, for its share of the time. With a
    second microbatch the longer rank's passes are, and of the other its first F and its last B."""
    schedule = preset("1f1b", pipeline([1, 3], BW=[2, 4], microbatches=1))
    found = under_noise({"one": schedule}, Noise(), draws=2).spreads["one"]
    assert found.often.tolist() == [1] * 4
    assert found.parts == pytest.approx({"1BW": 0.4, "1F": 0.3, "0BW": 0.2, "0F": 0.1})
    assert found.critical == pytest.approx([0.3, 0.7])
    schedule = preset("1f1b", pipeline([1, 3], BW=[2, 4], microbatches=2))
    found = under_noise({"one": schedule}, Noise(step=0.1), draws=50).spreads["one"]
    often = dict(zip(schedule.problem.names, found.often.tolist(), strict=True))
    assert {name for name, share in often.items() if share} == {"0F0", "1F0", "1BW0", "1F1", "1BW1", "0BW1"}
    assert found.parts == pytest.approx({"1BW": 8 / 17, "1F": 6 / 17, "0BW": 2 / 17, "0F": 1 / 17})
    assert found.to_json()["critical_often"]["1F1"] == 1


def test_less_is_of_the_same_steps() -> None:
    """A schedule whose every step takes 10 % less, at all that it may be best at; none is better than itself."""
    found = under_noise({"one": preset("1f1b", step())}, NOISE, draws=1000).spreads["one"]
    less = replace(found, values=0.9 * found.values)
    for what in AIMS:
        assert less.less(found, Aim(what, NOISE)) == pytest.approx((0.1, 0.1, 0.1))
        assert found.less(found, Aim(what, NOISE)) == (0, 0, 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem, paths = step(), [str(tmp_path / name) for name in ("a.json", "b.json")]
    preset("1f1b", problem).save(paths[0])
    solve(problem, effort=0.1).save(paths[1])
    assert main(["compare", *paths, "--noise", "microbatch=10%,pass=2%"]) == 0
    said = capsys.readouterr().out
    assert "10,000 steps where times vary: steps 0.0%, ranks 0.0%, microbatches 10.0%, passes 2.0%" in said
    assert "too few" not in said
    assert main(["compare", *paths, "--noise", str(SAMPLES / "primus-pp8"), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)["under_noise"]
    assert (body["noise"]["measured"], body["unbounded"]) == (19, ["p95", "p99"])
    assert (
        main(["compare", str(SAMPLES / "primus-pp8"), str(SAMPLES / "primus-pp8"), "--noise", str(SAMPLES / "primus-pp8")])
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "19 steps where times vary: 19 measured steps (steps 0.2%, ranks 0.5%, microbatches 0.3%, passes 2.3%, 0.08%" in said
    )
    assert "with their own times the order that ran takes -0.4%); too few for an upper end of p95 and p99" in said
    rows = body["schedules"]
    for path in paths:
        row = rows[path]
        assert row["bound"][0] <= row["mean"][0]
        assert row["p50"][0] <= row["p95"][0] <= row["p99"][0]
    equal_layers(4).save(tmp_path / "p.json")
    assert main(["compare", *[str(tmp_path / "p.json")] * 2, "--noise", "rank=1%"]) == 2
    assert "--noise is for schedules" in capsys.readouterr().err
    schedule, ran = Schedule.load(paths[0]), str(tmp_path / "run.json")
    trace_of(schedule, (schedule.timeline(), schedule.timeline().start)).save(ran)
    assert main(["compare", *paths, "--noise", ran]) == 2
    assert "run.json: one step does not say how times vary: at least 3 are needed" in capsys.readouterr().err
    for nothing in ("nothing", ""):
        assert main(["compare", *paths, "--noise", nothing]) == 2
        assert f"noise '{nothing}': step=1%,rank=1%" in capsys.readouterr().err
