"""What changed between two profiles, and a profile from a run: slow ranks, slow links, other layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from zbsolve import BadInput, Layer, Link, Profile, Schedule, solve
from zbsolve.build import with_slices
from zbsolve.cli import main
from zbsolve.features.vocabulary import vocabulary_of
from zbsolve.partition.layer import Given
from zbsolve.profile import ShardCosts, ShardPasses, VocabularyCosts
from zbsolve.profile.changes import drift, rank_sum
from zbsolve.profile.measured_run import from_trace
from zbsolve.schedule.timeline import Timeline, simulate
from zbsolve.schedule.trace import Trace
from zbsolve.show.run_text import drift_as_text
from zbsolve.systems import preset


def base() -> Profile:
    blocks = [Layer(f"block{i}", 1000, 1100, 900, 1950, 40, 60, 120, 400) for i in range(8)]
    ends = Layer("embedding", 50, 0, 80, 80, 0, 8, 900, 400), Layer("head", 1700, 1800, 1600, 3300, 60, 30, 900, 4)
    return Profile("measured", "toy", (ends[0], *blocks, ends[1]), Link(4.0, 10.0), 4.0, 90_000, {}, {})


def run_of(schedule: Schedule, real: Profile, steps: int = 1, noise: float = 0.0) -> Trace:
    """A run of `schedule` where passes and messages take what `real` says."""
    problem = schedule.problem
    fused = "0BW0" in problem.index
    placement = tuple(problem.passes.rank[problem.index[f"{s}F0"]] for s in range(len(problem.layers)))
    how = {"layers": problem.layers, "fused": fused, "vocabulary": vocabulary_of(problem)}
    truth = real.problem(problem.ranks, 6, placement, **how)
    assert truth.names == problem.names
    rng, lines, ready = np.random.default_rng(1), [], []
    for _ in range(steps):
        factor = np.exp(noise * rng.standard_normal(len(truth.passes)))
        passes = replace(truth.passes, duration=np.rint(truth.passes.duration * factor).astype(np.int64))
        noisy = replace(truth, passes=passes)
        line = simulate(noisy, list(Schedule(noisy, schedule.order).sequences.values()))
        lines.append(Timeline(problem, line.start.astype(float), line.end.astype(float)))
        there = np.zeros(len(truth.passes))
        np.maximum.at(there, truth.edges.after, line.end[truth.edges.before] + truth.edges.lag)
        for names in schedule.order.values():  # a rank that is busy notes a message when it takes it
            rows = [problem.index[name] for name in names]
            there[rows[1:]] = np.maximum(there[rows[1:]], line.end[rows[:-1]] + 0.5)
        ready.append(np.minimum(there, line.start))
    return Trace(
        problem, dict(schedule.order), tuple(lines), tuple(ready), (1.0,) * steps, ((0,) * problem.ranks,) * steps, {}
    )


@pytest.mark.parametrize(("placement", "fused"), [("single", False), ("vee", False), ("single", True)])
def test_a_run_with_a_slow_rank_becomes_a_profile_that_predicts_it(placement, fused):
    old, ranks = replace(base(), gradients=2.0), 4
    schedule = solve(old.problem(ranks, 6, placement, fused=fused), effort=0.3)
    real = replace(old, rank_factors=(1.0, 1.0, 1.5, 1.0), link=Link(12.0, 10.0 / 3))
    trace = run_of(schedule, real)
    new = from_trace(trace, old)
    assert new.rank_factors == pytest.approx((1, 1, 1.5, 1), abs=1e-3)
    assert new.facts["link_scale"] == pytest.approx(3, rel=0.02)
    assert new.facts["messages_heard"] > 3
    assert [layer.F for layer in new.layers] == pytest.approx([layer.F for layer in old.layers], rel=2e-3)
    assert (new.source, new.states, new.capacity, new.gradients) == ("measured", 4.0, 90_000, 2.0)
    again = new.problem(ranks, 6, placement, layers=schedule.problem.layers, fused=fused)
    truth = trace.steps[0].end - trace.steps[0].start
    assert np.abs(again.passes.duration - truth).max() <= 1
    predicted = simulate(again, list(Schedule(again, schedule.order).sequences.values()))
    assert predicted.makespan == pytest.approx(trace.steps[0].makespan, rel=0.005)
    better = solve(new.problem(ranks, 6, placement, fused=fused), effort=0.3)
    assert better.timeline().makespan < 0.95 * predicted.makespan
    if placement == "single":  # with ten layers on eight stages there is little to move
        assert better.problem.layers[2] < schedule.problem.layers[2]


def test_what_part_of_a_stage_recomputed_is_told_of_that_part():
    """A run that takes what the profile says gives the profile back: X of two of a stage's layers is theirs alone."""
    old = replace(base(), layers=tuple(replace(layer, X=layer.F + i) for i, layer in enumerate(base().layers)))
    schedule = preset("1f1b-split", old.problem(2, 3, recompute="0:2,1"))
    line = schedule.timeline()
    times = Timeline(schedule.problem, line.start.astype(float), line.end.astype(float))
    ready = (line.start.astype(float),)
    trace = Trace(schedule.problem, dict(schedule.order), (times,), ready, (1.0,), ((0, 0),), {})
    new = from_trace(trace, old)
    known = [*range(2), *range(schedule.problem.layers[0], len(old.layers))]
    assert [new.layers[i].X for i in known] == pytest.approx([old.layers[i].X for i in known], rel=1e-3)
    assert new.rank_factors == ()


def test_a_link_is_as_slow_as_messages_whose_time_is_known():
    """A pass that takes a side input is ready with the last of its two messages, long after the other was sent."""
    layers = list(base().layers)
    layers[1], layers[-1] = replace(layers[1], gives=(Given("memory", 400),)), replace(layers[-1], takes=("memory",))
    old = replace(base(), layers=tuple(layers))
    schedule = preset("1f1b-split", old.problem(4, 6))
    new = from_trace(run_of(schedule, replace(old, link=Link(12.0, 10.0 / 3))), old)
    assert new.facts["link_scale"] == pytest.approx(3, rel=0.02)
    assert new.facts["messages_heard"] > 3


def test_a_step_in_which_the_machine_was_busy_does_not_make_links_slow():
    old = base()
    schedule = preset("1f1b-split", old.problem(4, 6))
    usual = run_of(schedule, replace(old, link=Link(12.0, 10.0 / 3)), steps=2)
    late = run_of(schedule, replace(old, link=Link(1200.0, 0.1)))
    both = {name: getattr(usual, name) + getattr(late, name) for name in ("steps", "ready", "losses", "peaks")}
    assert from_trace(replace(usual, **both), old).facts["link_scale"] == pytest.approx(3, rel=0.02)


def test_links_that_messages_share_stay_as_the_base_has_them():
    """A run that takes what it is predicted to gives the base back: cards, sites, slow ranks, larger microbatches."""
    for more in ({"link": Link(40.0, 1.0, shared="rank")}, {"site_link": Link(100.0, 1.0, shared="2+2")}):
        old = replace(base(), rank_factors=(1.0, 1.0, 1.5, 1.0), microbatch_factors=(1.0, 2.0, 0.7, 1.5, 0.5, 1.3), **more)
        schedule = preset("1f1b-split", old.problem(4, 6))
        line = schedule.timeline()
        steps = (Timeline(schedule.problem, line.start.astype(float), line.end.astype(float)),)
        trace = Trace(schedule.problem, dict(schedule.order), steps, (line.start.astype(float),), (1.0,), ((0,) * 4,), {})
        new = from_trace(trace, old)
        assert (new.link, new.site_link) == (old.link, old.site_link)
        again = new.problem(4, 6, layers=schedule.problem.layers)
        assert again.names == schedule.problem.names
        off = np.abs(again.passes.duration - schedule.problem.passes.duration)
        assert off[again.computing].max() <= 1
        with pytest.raises(BadInput, match="its messages share links: a base profile is needed"):
            from_trace(trace)


@pytest.mark.parametrize("embedding", [None, 0])
@pytest.mark.parametrize(("vocabulary", "fused"), [("sharded", False), ("two-barriers", True)])
def test_a_run_of_a_sharded_vocabulary_becomes_a_profile_that_predicts_it(vocabulary, fused, embedding):
    """S and T of its ranks and what is left of the ends are the run's; the whole ends and other numbers of ranks stay."""
    row = ShardCosts(2, ShardPasses(800, 400, 9, 3), ShardPasses(500, 700, 9, 3), 80, 20.0, 11.0, 12.0, 13.0)
    rest = Layer("head", 40, 60, 0, 60, 4, 0, 12, 400)
    table = None if embedding is None else Layer("embedding", 10, 0, 6, 6, 0, 2, 8, 400)
    costs = VocabularyCosts("measured", 90, 400, 8, 9, rest, (row,), embedding, table)
    old = replace(base(), capacity=None, vocabulary=costs)
    schedule = solve(old.problem(4, 6, fused=fused, vocabulary=vocabulary), effort=0.1)
    slow = costs.shard(4)
    one, two = replace(slow.one, S=901.0, T=333.0), replace(slow.two, S=444.0, T=555.0)
    real = replace(
        old,
        layers=tuple(replace(layer, F=layer.F * 1.2) for layer in old.layers),
        rank_factors=(1.0, 1.0, 1.5, 1.0),
        vocabulary=replace(
            costs, output_rest=replace(rest, F=44.0), shards=(row, replace(slow, one=one, two=two, scaled=""))
        ),
    )
    trace = run_of(schedule, real)
    new = from_trace(trace, old)
    again = new.problem(4, 6, layers=schedule.problem.layers, fused=fused, vocabulary=vocabulary)
    computing = again.computing
    truth = trace.steps[0].end - trace.steps[0].start
    assert np.abs(again.passes.duration - truth)[computing].max() <= 2
    assert new.rank_factors == pytest.approx((1, 1, 1.5, 1), abs=2e-3)
    found = new.vocabulary.shard(4).one if vocabulary == "sharded" else new.vocabulary.shard(4).two
    right = one if vocabulary == "sharded" else two
    assert pytest.approx((right.S, right.T), rel=3e-3) == (found.S, found.T)
    assert new.vocabulary.shard(2) == row
    assert new.layers[-1] == old.layers[-1]
    assert abs(new.layers[4].F / 1200 - 1) < 3e-3
    with pytest.raises(BadInput, match=r"^trace: its vocabulary is sharded: a base profile is needed"):
        from_trace(trace)
    with pytest.raises(BadInput, match=r"^vocabulary: the profile has no field 'vocabulary'"):
        from_trace(trace, base())


def test_a_layer_that_became_slow_is_no_slow_rank():
    """On a vee each rank has two stages; a slow layer shows on one of them, and with a base on nothing else."""
    old = base()
    schedule = solve(old.problem(4, 6, "vee"), effort=0.1)
    slow = replace(old.layers[4], F=1040.0, B=1144.0, W=936.0)
    real = replace(old, layers=(*old.layers[:4], slow, *old.layers[5:]))
    new = from_trace(run_of(schedule, real, steps=3, noise=0.002), old)
    assert new.rank_factors == ()
    stage = next(s for s in range(8) if sum(schedule.problem.layers[: s + 1]) > 4)
    a, b = sum(schedule.problem.layers[:stage]), sum(schedule.problem.layers[: stage + 1])
    assert sum(c.F for c in new.layers[a:b]) == pytest.approx(sum(c.F for c in real.layers[a:b]), rel=0.01)
    found = drift(replace(old, samples=run_samples(old, 0.002)), new)
    assert {one.layer for one in found.layers if one.beyond and one.change > 0.02} == {c.name for c in old.layers[a:b]}


def run_samples(profile: Profile, noise: float) -> dict[str, list[float]]:
    rng = np.random.default_rng(2)
    return {
        f"{c.name}/{kind}": (getattr(c, kind) * np.exp(noise * rng.standard_normal(20))).tolist()
        for c in profile.layers
        for kind in ("F", "B", "W", "BW")
    }


def test_without_a_base_layers_share_their_stage():
    schedule = solve(base().problem(4, 6), effort=0.1)
    real = replace(base(), rank_factors=(1.0, 2.0, 1.0, 1.0))
    new = from_trace(run_of(schedule, real))
    assert new.rank_factors == pytest.approx((1, 2, 1, 1), abs=2e-3)
    again = new.problem(4, 6, layers=schedule.problem.layers)
    truth = real.problem(4, 6, layers=schedule.problem.layers)
    assert np.abs(again.passes.duration - truth.passes.duration).max() <= 2
    assert new.facts["bytes_from"].startswith("nowhere")


def test_without_a_base_all_to_alls_stay():
    sending = replace(base(), layers=tuple(replace(one, all_to_all=30.0 + i) for i, one in enumerate(base().layers)))
    schedule = solve(sending.problem(4, 6), effort=0.1)
    again = from_trace(run_of(schedule, sending)).problem(4, 6, layers=schedule.problem.layers)
    assert again.names == schedule.problem.names
    beside = again.side_stream
    assert len(beside) == 2 * 4 * 6
    assert (again.passes.duration[beside] == schedule.problem.passes.duration[beside]).all()


def test_emulated_times_are_not_called_measured():
    schedule = solve(base().problem(2, 6), effort=0.1)
    trace = run_of(schedule, base())
    for base_profile, facts, source in (
        (base(), {}, "measured"),
        (base(), {"emulated": {}}, "estimated: an emulated run"),
        (replace(base(), source="estimated: h200 roofline"), {}, "estimated: h200 roofline, retimed by a run"),
        (None, {}, "measured"),
    ):
        assert from_trace(replace(trace, facts=facts), base_profile).source == source


def test_a_trace_of_another_model_is_refused():
    schedule = solve(base().problem(2, 6), effort=0.1)
    trace = run_of(schedule, base())
    with pytest.raises(BadInput, match="of 10 layers, but the base profile has 9"):
        from_trace(trace, replace(base(), layers=base().layers[1:]))
    bare = replace(schedule.problem, layers=())
    with pytest.raises(BadInput, match="how many layers each stage holds"):
        from_trace(replace(trace, problem=bare), base())


def test_a_trace_of_sequences_in_slices_is_refused():
    schedule = solve(base().problem(2, 6), effort=0.1)
    trace, sliced = run_of(schedule, base()), with_slices(base().problem(2, 6), 3)
    with pytest.raises(BadInput, match=r"^trace: its sequences ran in 3 slices, .* zbsolve profile --slices 3$"):
        from_trace(replace(trace, problem=sliced), base())


# Differences


def sampled(factor: float = 1.0, noise: float = 0.03, seed: int = 0, count: int = 30) -> Profile:
    """Every layer with samples around its time; block3's are `factor` times as long."""
    rng, samples, layers = np.random.default_rng(seed), {}, []
    for layer in base().layers:
        times = {}
        for kind in ("F", "B", "W", "BW"):
            centre = getattr(layer, kind) * (factor if layer.name == "block3" else 1.0)
            row = centre * np.exp(noise * rng.standard_normal(count))
            samples[f"{layer.name}/{kind}"] = row.tolist()
            times[kind] = float(np.median(row))
        layers.append(replace(layer, **times))
    return replace(base(), layers=tuple(layers), samples=samples)


def test_only_what_changed_is_marked():
    found = drift(sampled(seed=1), sampled(1.1, seed=2))
    assert {(one.layer, one.what) for one in found.layers if one.beyond} == {("block3", k) for k in ("F", "B", "W", "BW")}
    assert next(one for one in found.layers if one.layer == "block3").change == pytest.approx(0.1, abs=0.03)
    text = drift_as_text(found)
    assert "4 of 39 times changed beyond their spread" in text
    assert text.count("*") == 5


@pytest.mark.slow
def test_no_change_is_rarely_called_one():
    false = [sum(bool(c.beyond) for c in drift(sampled(seed=s), sampled(seed=s + 100)).layers) for s in range(30)]
    assert sum(false) <= 0.01 * 30 * 39


def test_small_changes_need_a_small_spread():
    assert not any(one.beyond for one in drift(sampled(noise=0.1), sampled(1.02, noise=0.1, seed=1)).layers)
    found = drift(sampled(noise=0.002), sampled(1.02, noise=0.002, seed=1))
    assert {one.layer for one in found.layers if one.beyond} == {"block3"}


def test_few_samples_say_nothing():
    found = drift(sampled(count=4), sampled(2.0, count=4, seed=1))
    assert {one.beyond for one in found.layers} == {None}
    assert "(?)" in drift_as_text(found)


def test_equal_layers_share_their_samples():
    one = replace(base(), samples={"block0/F": [1000.0] * 3 + [1001.0] * 3})
    new = replace(one, layers=tuple(replace(c, F=1.2 * c.F) for c in one.layers), samples={"block5/F": [1200.0, 1201.0] * 3})
    marked = {c.layer: c.beyond for c in drift(one, new).layers if c.what == "F"}
    assert marked["block7"] is True
    assert marked["head"] is None


def test_rank_sum_is_the_textbook_test():
    """Mann and Whitney's statistic for 10 + 10 samples without overlap: z = 50/√175."""
    assert rank_sum(list(range(10)), list(range(10, 20))) == pytest.approx(1.57e-4, rel=0.01)
    assert rank_sum([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(1)
    assert rank_sum([1.0] * 5, [1.0] * 5) == 1


def test_other_layers_bytes_and_links_are_told():
    old = sampled()
    changed = replace(old.layers[3], parameter_bytes=200)
    new = replace(old, layers=(*old.layers[:3], changed, *old.layers[4:-1], replace(old.layers[-1], name="output")))
    found = drift(old, replace(new, link=Link(8.0, 10.0)))
    assert (found.only_old, found.only_new) == (("head",), ("output",))
    assert [(one.layer, one.what, one.new) for one in found.bytes] == [("block2", "parameter_bytes", 200)]
    assert next(one for one in found.total if one.what == "link").change == pytest.approx(48 / 44 - 1)
    with pytest.raises(BadInput, match="no layer of the same name"):
        drift(old, replace(old, layers=tuple(replace(c, name=c.name + "x") for c in old.layers)))


def test_on_the_command_line(tmp_path, capsys):
    old, new, run, out = (str(tmp_path / name) for name in ("old.json", "new.json", "trace.json", "out.json"))
    sampled(seed=1).save(old)
    sampled(1.2, seed=2).save(new)
    assert main(["compare", old, new]) == 0
    assert "+2" in capsys.readouterr().out
    assert main(["compare", old, new, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 39
    schedule = solve(base().problem(2, 6), effort=0.1)
    run_of(schedule, replace(base(), rank_factors=(1.0, 1.3))).save(run)
    assert main(["profile", old, "--from-trace", run, "--seconds", "0.3", "-o", out]) == 0
    assert "rank 1 takes 1.3" in capsys.readouterr().out
    assert main(["solve", out, "--ranks", "2", "--microbatches", "4", "--effort", "0.1"]) == 0
    capsys.readouterr()
    for arguments, line in (
        (["profile"], "name MODEL, or --from-trace TRACE"),
        (["profile", "gpt-tiny", "--from-trace", run], "gpt-tiny: no such file"),
        (["profile", "--from-trace", run, "--seconds", "-1"], "--seconds -1: from 0 up"),
        (["profile", "--diff", old, new], "--diff is no option: write zbsolve compare old.json new.json"),
        (["compare", old, new, "-o", out], "-o: nothing is drawn of two profiles"),
        (["compare", old, run], "two profiles are compared, and nothing else with them"),
        (["compare", old, new, old], "two profiles are compared"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert line in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(("factor", "share", "code"), [(1.04, "5%", 0), (1.06, "5%", 1), (0.94, "0.05", 1), (1.06, "7%", 0)])
def test_within_fails_above_the_share_without_samples_too(tmp_path: Path, factor: float, share: str, code: int) -> None:
    profile = Profile("given", "m", (Layer("a", 100.0, 100.0, 50.0, 150.0, 8, 8, 8, 8),), Link(0.0, 1e3), 1.0, 0, {}, {})
    paths = [str(tmp_path / name) for name in ("old.json", "new.json")]
    profile.save(paths[0])
    replace(profile, layers=(replace(profile.layers[0], B=100.0 * factor),)).save(paths[1])
    assert main(["compare", *paths, "--within", share]) == code
    assert main(["compare", *paths]) == 0
