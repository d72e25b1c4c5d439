"""All-to-all of expert parallelism beside compute: what each system hides of it, and what it exposes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zbsolve import BadInput, pipeline, solve, updates, verify
from zbsolve.cli import main
from zbsolve.exec.lowering import lower
from zbsolve.greedy.side_stream import without_side_streams
from zbsolve.interchange.torch_csv import torch_order
from zbsolve.problem import Problem
from zbsolve.problem.placement import mirror
from zbsolve.profile.changes import drift
from zbsolve.profile.profile import Layer, Link, Profile
from zbsolve.schedule import Schedule
from zbsolve.show.profile_meaning import meaning, stages
from zbsolve.show.profile_report import profile_as_page, profile_as_text
from zbsolve.show.profile_rows import layer_rows, stage_rows, units_of
from zbsolve.show.run_text import drift_as_text
from zbsolve.systems import PRESETS, preset
from zbsolve.systems.problems import problem_for
from zbsolve.util.text import format_time

from ..support.exec_tools import random_schedule

F, B, W = 30, 40, 20


def edges(problem: Problem) -> set[tuple[str, str, int]]:
    e, names = problem.edges, problem.names
    return {(names[a], names[b], lag) for a, b, lag in zip(e.before, e.after, e.lag.tolist(), strict=True)}


def on(name: str, p: int, m: int, a: int, **options):
    problem = problem_for(name, p, m, F, B, W, AF=a, held_until_W=1, **options)
    schedule = preset(name, problem)
    assert verify(problem, schedule) == ()
    return problem, schedule.timeline()


def test_what_waits_for_an_all_to_all():
    problem = pipeline(3, 4, 2, placement=(0, 1), microbatches=1, comm=5, AF=7, AB=[0, 8])
    assert edges(problem) == {
        ("0F0", "0AF0", 0),
        ("0AF0", "1F0", 5),
        ("1F0", "1AF0", 0),
        ("1AF0", "1B0", 0),  # the loss is that of what came back
        ("1B0", "1AB0", 0),
        ("1AB0", "0B0", 5),
        *((f"{s}F0", f"{s}B0", 0) for s in (0, 1)),
        *((f"{s}{kind}0", f"{s}W0", 0) for s in (0, 1) for kind in "FB"),
    }
    assert [one.streams for one in problem.passes if one.kind in ("AF", "AB")] == [("comm:0",), ("comm:1",), ("comm:1",)]
    assert problem.work == 9  # an all-to-all is no work of the rank
    assert solve(problem, seconds=5).certificate.value == 3 + 7 + 5 + 3 + 7 + 4 + 8 + 5 + 4 + 2


def test_without_them_their_time_is_a_lag():
    problem = pipeline(3, 4, 2, placement=mirror(2), microbatches=2, comm=5, AF=7, AB=8, exchange=9)
    plain = pipeline(3, 4, 2, placement=mirror(2), microbatches=2, comm=5)
    found, links = edges(without_side_streams(problem)), {("F", "F"): 12, ("B", "B"): 13}
    assert found >= {(a, b, lag and links[a[1], b[1]]) for a, b, lag in edges(plain)}
    assert {(a, b, lag) for a, b, lag in found if lag == 7} == {(f"1F{m}", f"1B{m}", 7) for m in range(2)}


@pytest.mark.parametrize("a", [5, 10, 20, 30])
@pytest.mark.parametrize(("p", "groups"), [(2, 1), (2, 4), (4, 1), (4, 2), (4, 8), (8, 2)])
def test_1f1b_exposes_its_all_to_alls(p, groups, a):
    """p microbatches are in flight, and on their way there are p − 1 all-to-alls each way and the turn's between rank 0's
    forward and its backward: of a group of p microbatches 2p − 1 are exposed, and 2(p − 1) while the pipeline fills and
    drains (derived; a at most F)."""
    m = p * groups
    problem, timeline = on("1f1b", p, m, a)
    assert timeline.makespan == problem.work + (p - 1) * (F + B + W) + (groups * (2 * p - 1) + 2 * (p - 1)) * a


@pytest.mark.parametrize("a", [5, 10, 20, 30])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_dualpipe_hides_them_behind_the_other_direction(p, a):
    """arXiv 2412.19437, section 3.2.1: F and B of a pair hide each other's all-to-all. What fills and drains shows some,
    one at p = 2 and five at p = 4 where they are short; with more microbatches not a µs is added."""
    runs = [on("dualpipe", p, m, a) for m in (2 * p, 6 * p, 48)]
    (bubble,) = {timeline.makespan - problem.work for problem, timeline in runs}
    exposed = bubble - (p // 2 - 1) * (F + B - W)
    assert 0 < exposed < 3 * p * a
    if p <= 4 and a <= 10:
        assert exposed == {2: 1, 4: 5}[p] * a
    problem, timeline = on("1f1b", p, 48, a)
    assert timeline.makespan - problem.work - (p - 1) * (F + B + W) > 48 * a


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("zb-1p", "zb-2p")])
@pytest.mark.parametrize("a", [7, 60])
def test_every_preset_gives_them_an_order(name, a):
    problem = problem_for(name, 4, 8, F, B, W, AF=a, AB=2 * a, comm=3)
    schedule = preset(name, problem)
    assert verify(problem, schedule) == ()
    assert schedule.timeline().makespan > preset(name, problem_for(name, 4, 8, F, B, W, comm=3)).timeline().makespan
    for rank in range(4):  # as their passes come, first in, first out
        place = {one: i for i, one in enumerate(schedule.order[f"compute:{rank}"])}
        backward = "B" if "0B0" in problem.index else "BW"
        around = [one for one in schedule.order[f"comm:{rank}"] if "A" in one]
        makers = [one.replace("AF", "F").replace("AB", backward) for one in around]
        places = [place[one] for one in makers]
        assert places == sorted(places)


@pytest.mark.parametrize("name", ["dualpipe", "1f1b", "zb-h1", "dualpipe-v", "pipedream-2bw"])
def test_solve_is_never_worse_in_the_same_memory(name):
    problem, timeline = on(name, 4, 8, 20)
    found = solve(replace(problem, capacity=timeline.peak_bytes), effort=0.3)
    assert found.certificate.bound <= found.certificate.value <= timeline.makespan
    if name == "1f1b":
        assert found.certificate.status == "optimal"  # in its memory nothing hides what 1F1B exposes
    if name == "dualpipe":
        assert found.certificate.value < timeline.makespan


def test_updates_and_all_to_alls():
    step = pipeline(F, BW=B + W, placement=(0, 1), microbatches=6, AF=10)
    problem = updates(step, 5, every=2, delay=2)
    schedule = preset("pipedream", problem)
    assert verify(problem, schedule) == ()
    assert len(lower(schedule)) == 2


def test_wrong_use_is_named():
    with pytest.raises(BadInput, match="recompute: stage 1 has an all-to-all AF, which its X would have to repeat"):
        pipeline(3, 4, 2, placement=(0, 1), microbatches=2, AF=[0, 4], recompute="all")
    with pytest.raises(BadInput, match=r"AB\[0\]: -1 is negative"):
        pipeline(3, 4, 2, placement=(0, 1), microbatches=2, AB=-1)
    problem = pipeline(3, 4, 2, placement=(0, 1), microbatches=1, AF=4)
    with pytest.raises(BadInput, match="torch-csv has no passes of kind AF"):
        torch_order(preset("zb-h1", problem))
    cut = problem.only([i for i, name in enumerate(problem.names) if name != "1AF0"])
    lower(random_schedule(cut))  # one stage with, one without
    loose = Problem(problem.passes, pipeline(3, 4, 2, placement=(0, 1), microbatches=1).edges)
    with pytest.raises(BadInput, match="pass 0AF0: no edge orders 0F0 and 0AF0"):
        lower(random_schedule(loose))


def test_a_profile_brings_them(tmp_path, capsys):
    """A stage's all-to-all is the sum over its layers; from the command line, as solved, verified and saved."""
    layers = [Layer(f"l{i}", F, B, W, B + W, 2, 1, 10, 8, all_to_all=5.0 * (i % 2)) for i in range(8)]
    profile = Profile("estimated: by hand", "experts", tuple(layers), Link(0.0, 1000.0), 4.0, None, {}, {})
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    problem = profile.problem(4, 8, "mirror")
    assert problem.passes.duration[[problem.names.index(n) for n in ("0AF0", "3AB1")]].tolist() == [5, 5]
    command = ["solve", str(tmp_path / "p.json"), "--ranks", "4", "--microbatches", "8", "--placement", "mirror"]
    assert main([*command, "--method", "dualpipe", "-o", str(tmp_path / "s.json")]) == 0
    schedule = Schedule.load(tmp_path / "s.json")
    assert verify(problem, schedule) == ()
    assert any(stream.startswith("comm") for stream in schedule.order)
    assert main([*command[:-2], "--recompute", "all"]) == 2
    assert "has an all-to-all" in capsys.readouterr().err


STAGES_A_RANK = {
    "1f1b": 1,
    "zb-h1": 1,
    "zb-h2": 1,
    "chimera": 1,
    "dualpipe": 1,
    "interleaved": 2,
    "zb-v": 2,
    "dualpipe-v": 2,
}


def test_dualpipe_hides_them_best():
    """Beside others on 4 ranks and 8 microbatches: 600 µs of F, B and W a rank, 200 of an all-to-all."""
    steps = {
        name: problem_for(name, 4, 8, *(600 // chunks,) * 3, AF=200 // chunks) for name, chunks in STAGES_A_RANK.items()
    }
    bubbles = {name: 1 - step.work / preset(name, step).timeline().makespan for name, step in steps.items()}
    assert bubbles["dualpipe"] == min(bubbles.values()) < bubbles["1f1b"] / 3


@pytest.mark.parametrize("p", [2, 4])
def test_the_report_of_a_profile_counts_them(p):
    """What it says of 1F1B is what 1F1B takes, stages being equal; layers and stages show them."""
    layers = tuple(Layer(f"l{i}", F, B, W, B + W, 2, 1, 10, 0, all_to_all=10.0) for i in range(p))
    profile = Profile("estimated: by hand", "experts", layers, Link(0.0, 1000.0), 4.0, None, {}, {})
    timeline = preset("1f1b", profile.problem(p, 8, fused=True)).timeline()
    said = meaning(profile, p, 8)
    assert f"1F1B on {p} ranks with 8 microbatches takes {format_time(timeline.makespan)}" in said[0]
    hidden = timeline.makespan - (8 + p - 1) * (F + B + W)
    waits = f"take up to 20 µs a microbatch (stage 0); 1F1B waits {format_time(hidden)} for them"
    assert waits in said[-1]
    assert "meanwhile do not" in said[-1]
    head, first, *_ = layer_rows(profile, units_of(profile))
    assert (head[-1], first[-1]) == ("all-to-all µs", "10.0")
    table = stage_rows(profile, stages(profile, p), units_of(profile))
    assert [row[table[0].index("all-to-all µs")] for row in table[1:]] == ["10.0"] * p
    long = replace(profile, layers=tuple(replace(layer, all_to_all=500.0) for layer in layers))
    assert "no schedule hides them all" in meaning(long, p, 8)[-1]
    assert f"({format_time(8 * 1000.0)}, the busiest rank's work or all-to-alls)" in meaning(long, p, 8)[0]
    plain = replace(profile, layers=tuple(replace(layer, all_to_all=0.0) for layer in layers))
    for text in (profile_as_text(plain, p, 8), profile_as_page(plain, p)):
        assert "all-to-all" not in text.lower()


def test_profiles_side_by_side_count_them():
    layers = tuple(Layer(f"l{i}", F, B, W, B + W, 2, 1, 10, 8, all_to_all=10.0) for i in range(2))
    old = Profile("estimated: by hand", "experts", layers, Link(0.0, 1000.0), 4.0, None, {}, {})
    new = replace(old, layers=(layers[0], replace(layers[1], all_to_all=15.0, transient=7)))
    found = drift(old, new)
    assert [(one.layer, one.change) for one in found.layers if one.what == "all_to_all"] == [("l0", 0.0), ("l1", 0.5)]
    assert [one.change for one in found.total if one.what == "all_to_all"] == [0.25]
    head, first, second, *_ = drift_as_text(found).splitlines()
    assert head.endswith(" all_to_all ")
    assert (first[-8:], second[-8:]) == ("  +0.0%?", " +50.0%?")
    assert len(head) == len(first) == len(second)
    assert "l1: transient 0 → 7 bytes" in drift_as_text(found)
