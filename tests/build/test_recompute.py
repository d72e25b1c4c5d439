"""Recompute: the problem's passes X, every solver on them, and runs whose gradients and memory are the right ones."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from profiler.memory import held as held_by
from profiler.stage_rounds import stages_of
from zbsolve import BadInput, Infeasible, Problem, Profile, Schedule, pipeline, solve, verify
from zbsolve.build import with_recompute
from zbsolve.build.recompute import recompute_in_words, recomputed_layers
from zbsolve.cli import main
from zbsolve.exec.run.launch import run_local
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.ilp.cp import solve_cp
from zbsolve.models.by_name import load
from zbsolve.models.model import Model, seeded
from zbsolve.models.presets import mlp
from zbsolve.profile.known_steps import step_again
from zbsolve.profile.profile import Layer, Link
from zbsolve.profile.step import Step
from zbsolve.systems.problems import problem_for
from zbsolve.systems.table import SYSTEMS, System, preset

from ..support.exec_tools import a_problem, random_schedule, worst_difference
from ..support.exhaustive import optimum


def curve(problem, names: list[str]) -> list[int]:
    rows = [problem.index[name] for name in names]
    return np.cumsum(problem.taken[rows] - problem.freed[rows]).tolist()


@pytest.mark.parametrize(
    ("held_b", "held_w", "held_input", "right"),
    [
        (5, 3, 2, [2, 8, 3, 0]),  # the input is part of what B frees
        (1, 3, 2, [2, 4, 3, 0]),  # of what W frees, too
        (0, 0, 2, [2, 0, 0, 0]),  # of neither: it goes when X ends
        (5, 3, 0, [0, 8, 3, 0]),
    ],
)
def test_bytes_after_each_pass(held_b: int, held_w: int, held_input: int, right: list[int]) -> None:
    problem = pipeline(
        [4], [3], [2], microbatches=1, recompute="all", held_input=held_input, held_until_B=held_b, held_until_W=held_w
    )
    assert curve(problem, ["0F0", "0X0", "0B0", "0W0"]) == right
    fused = pipeline([4], BW=[5], microbatches=1, recompute=[0], X=[3], held_input=held_input, held_until_B=held_b + held_w)
    assert curve(fused, ["0F0", "0X0", "0BW0"]) == [*right[:2], 0]
    assert fused.passes[fused.index["0X0"]].duration == 3


def three(**changed: Any) -> Profile:
    """Three layers of 100 bytes until B and 50 until W; the second keeps its output, the third counts that as its input."""
    layer = Layer("one", 10, 20, 30, 50, 100, 50, 0, 10, X=7)
    layers = (layer, replace(layer, name="two", output_kept=8, X=9), replace(layer, name="three", input_unneeded=4))
    return Profile("given", "by hand", layers, Link(1.0, 10.0), 1.0, None, {}, {}, **changed)


def test_part_of_a_stage_recomputes() -> None:
    """By hand. Of all three layers 450 bytes less the 8 that two of them count. The first two again: F keeps the third's
    150, X takes 7 + 9 µs, and the tensor between is there twice. Of the second stage with its input."""
    problem = Step(1, 1, recompute="0:2").problem(three())
    assert problem.recomputed == (2,)
    assert problem.passes.duration[problem.rows("X")].tolist() == [16]
    assert curve(problem, ["0F0", "0X0", "0B0", "0W0"]) == [150, 450, 150, 0]
    assert curve(Step(1, 1, recompute="all").problem(three()), ["0F0", "0X0", "0B0", "0W0"]) == [0, 442, 150, 0]
    second = Step(2, 1, partition=(1, 2), recompute={1: 1}).problem(three())
    assert second.recomputed == (0, 1)
    assert curve(second, ["0F0", "1F0"]) == [150, 150 + 10 + 150]
    assert curve(second, ["1F0", "1X0", "1B0", "1W0"]) == [160, 300, 100, 0]


def test_parts_are_in_the_file_and_in_words(tmp_path: Path) -> None:
    problem, whole = (Step(2, 1, partition=(1, 2), recompute=said).problem(three()) for said in ("0,1:1", "all"))
    problem.save(tmp_path / "p.json")
    loaded = Problem.load(tmp_path / "p.json")
    assert (loaded, loaded.recomputed) == (problem, (1, 1))
    assert loaded != replace(loaded, recomputed=())
    assert whole.recomputed == ()
    assert "recomputed" not in whole.to_json()
    assert step_again(loaded, three()).recomputed == (1, 1)
    layers = (3, 3, 3, 2, 4)
    for said, counts in {
        "all": layers,
        "": (0,) * 5,
        "0-2:2,3,4:3": (2, 2, 2, 2, 3),
        "1": (0, 3, 0, 0, 0),
    }.items():
        assert recomputed_layers(said, layers) == counts
        assert recompute_in_words(counts, layers) == said
    assert recomputed_layers("all:3", layers) == (3, 3, 3, 2, 3)
    with pytest.raises(BadInput, match=r"recomputed \[9\]"):
        Problem.from_json({**problem.to_json(), "recomputed": [9]})


def test_X_lies_between_F_and_B_and_nothing_else_waits_for_it() -> None:
    problem = pipeline([1, 1], [1, 1], [1, 1], microbatches=2, recompute="1", comm=3)
    names, e = problem.names, problem.edges
    pairs = {(names[a], names[b]) for a, b in zip(e.before.tolist(), e.after.tolist(), strict=True)}
    of_x = {pair for pair in pairs if "X" in pair[0] + pair[1]}
    assert of_x == {(f"1F{m}", f"1X{m}") for m in range(2)} | {(f"1X{m}", f"1{k}{m}") for m in range(2) for k in "BW"}
    plain = pipeline([1, 1], [1, 1], [1, 1], microbatches=2, comm=3)
    assert pairs - of_x == {
        (plain.names[a], plain.names[b]) for a, b in zip(plain.edges.before, plain.edges.after, strict=True)
    }


def test_without_stages_it_is_the_plain_problem() -> None:
    given = {"F": [1, 2], "B": [1, 1], "W": [1, 1], "microbatches": 2, "held_until_B": 3, "capacity": 7}
    assert pipeline(**given, recompute=(), held_input=2, X=9) == pipeline(**given)


@pytest.mark.parametrize(
    ("recompute", "text"),
    [
        ("2", "no stage 2"),
        ([-1], "no stage -1"),
        ("some", "'some' is neither"),
        ("0,,1", "'' is neither"),
        ("0:2,1,0:3", "stage 0 is named twice, with other numbers of layers"),
        ("0:1.5", "'1.5' is no number of layers"),
        ({1: 0}, "'0' is no number of layers"),
        ("1:1", "part of stage 1 needs its time X"),
    ],
)
def test_what_is_no_stage_is_refused(recompute: str | list[int], text: str) -> None:
    with pytest.raises(BadInput, match=f"recompute: .*{text}"):
        pipeline([1, 1], [1, 1], [1, 1], microbatches=1, recompute=recompute)


def test_mirrored_routes_and_exchanges() -> None:
    given = {"placement": ((0, 1), (1, 0)), "microbatches": 2, "exchange": 1, "recompute": "all"}
    problem = pipeline([1, 1], [1, 1], [1, 1], **given, held_input=1, held_until_B=2)
    exchanges = [name for name in problem.names if "C" in name]
    waits = {
        problem.names[a]
        for a, b in zip(problem.edges.before, problem.edges.after, strict=True)
        if problem.names[b] in exchanges
    }
    assert waits == {f"{s}W{m}" for s in range(2) for m in range(2)}
    assert problem.passes[problem.index["0X1"]].rank == problem.passes[problem.index["0F1"]].rank == 1
    schedule = solve(problem, seconds=5)
    assert verify(problem, schedule) == ()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_named_schedules_recompute_directly_before_each_backward(ranks: int, microbatches: int) -> None:
    """X needs no gradient, so it is not on the way back: (m)(F+X+BW) + (p−1)(F+BW) of 1F1B, X as long as F."""
    given = {"BW": [7] * ranks, "microbatches": microbatches, "recompute": "all", "held_until_B": 5, "held_input": 1}
    problem = pipeline([3] * ranks, **given, X=2)
    schedule = preset("1f1b", problem)
    assert verify(problem, schedule) == ()
    assert schedule.timeline().makespan == microbatches * (3 + 2 + 7) + (ranks - 1) * (3 + 7)
    assert max(schedule.timeline().peak_bytes) == min(ranks, microbatches) - 1 + 5
    for names in schedule.order.values():
        before = dict(zip(names[1:], names, strict=False))
        assert all(before[name] == name.replace("BW", "X") for name in names if "BW" in name)


@pytest.mark.parametrize(
    "one", [one for one in SYSTEMS if one.feature not in ("updates", "slices")], ids=lambda one: one.name
)
def test_every_named_schedule_recomputes_or_is_refused_by_name(one: System) -> None:
    """Some stages recompute; the rest of the order is that of the step that keeps everything, with its backwards longer."""
    plain = problem_for(one.name, 4, 8, 300, 320, 210, held_until_B=5, held_until_W=3)
    if one.copies is not None:
        with pytest.raises(BadInput, match=f"{one.name}: .*'X'"):
            preset(one.name, with_recompute(plain, "1,2", held_input=1))
        return
    problem = with_recompute(plain, "1,2", X=110, held_input=1)
    found = preset(one.name, problem)
    assert verify(problem, found) == ()
    rows = {stream: tuple(n for n in names if "X" not in n) for stream, names in found.order.items()}
    assert sum(map(len, found.order.values())) > sum(map(len, rows.values()))
    longer = plain.passes.are("B", "BW") & np.isin(plain.passes.stage, (1, 2))
    slower = replace(plain, passes=replace(plain.passes, duration=plain.passes.duration + 110 * longer))
    assert Schedule(slower, rows).timeline().makespan >= found.timeline().makespan
    assert Schedule(plain, rows).timeline().makespan <= found.timeline().makespan


def tight(capacity: list[int], recompute: list[int]):
    return pipeline(
        [1, 2, 1],
        [2, 1, 2],
        [1, 1, 1],
        placement=(0, 1, 0),
        microbatches=2,
        held_until_B=3,
        held_until_W=1,
        held_input=[0, 1, 1],
        recompute=recompute,
        capacity=capacity,
    )


def test_less_memory_than_one_microbatch_keeps_on_a_rank() -> None:
    """Rank 0 holds stages 0 and 2, 4 bytes each: recompute makes room for one of them at a time enough."""
    with pytest.raises(Infeasible, match="rank 0 needs 8 bytes"):
        tight([5, 4], [])
    with pytest.raises(Infeasible, match="rank 0 needs 8 bytes"):
        tight([5, 4], [2])  # the later stage has its backward first, beside all of the earlier one's
    with pytest.raises(Infeasible, match="rank 0 needs 4 bytes"):
        tight([3, 4], [0])
    problem = tight([4, 4], [0])
    result = solve_cp(problem, None, 0, 30.0)
    assert result.schedule is not None
    assert verify(problem, result.schedule) == ()
    assert result.schedule.timeline().value == result.bound == optimum(problem)


@pytest.mark.parametrize("seed", range(30))
def test_list_scheduler_and_bounds_on_random_problems(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 5)
    placement = rng.choice([tuple(range(ranks)), (*range(ranks), *reversed(range(ranks))), tuple(range(ranks)) * 2])
    stages = len(placement)

    def draw(low: int, high: int) -> list[int]:
        return [rng.randint(low, high) for _ in range(stages)]

    held_b, held_w, from_b, inputs = draw(0, 6), draw(0, 6), draw(0, 2), draw(0, 4)
    need = [0] * ranks
    for s, rank in enumerate(placement):
        need[rank] += max(held_b[s] + held_w[s], inputs[s]) + from_b[s]
    problem = pipeline(
        draw(1, 20),
        **({"BW": draw(1, 40)} if rng.random() < 0.3 else {"B": draw(1, 20), "W": draw(0, 20)}),
        placement=placement,
        microbatches=rng.randint(1, 12),
        comm=rng.randint(0, 5),
        recompute=[s for s in range(stages) if rng.random() < 0.6],
        held_input=inputs,
        held_until_B=held_b,
        held_until_W=held_w,
        held_from_B=from_b,
        capacity=[int(n * rng.choice([1, 1.5, 3])) for n in need],
    )
    schedule = list_schedule(problem, deepest_first(problem))
    assert verify(problem, schedule) == ()
    assert schedule.timeline().value >= closed_form(problem).value


def test_recompute_pays_where_memory_is_short() -> None:
    given = {
        "F": [30] * 4,
        "B": [30] * 4,
        "W": [20] * 4,
        "microbatches": 8,
        "held_until_B": 3,
        "held_until_W": 1,
        "capacity": 8,
    }
    keeping = solve(pipeline(**given), seconds=10)
    again = solve(pipeline(**given, recompute="all", held_input=[0, 1, 1, 1]), seconds=10)
    assert again.certificate.value < keeping.certificate.bound
    assert max(again.timeline().peak_bytes) <= 8


# --- Running it ---


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("placement", "recompute"),
    [((0, 1), "all"), ((0, 1, 1, 0), "all:1"), ((0, 2, 1, 1, 0), [1, 4]), ((0,), "all"), ((0, 1), "0:3,1:1")],
)
def test_gradients_equal_the_unsplit_model(placement: tuple[int, ...], recompute: str | list[int], fused: bool) -> None:
    problem = a_problem(placement, microbatches=3, fused=fused, recompute=recompute)
    for seed in range(2):
        assert worst_difference(random_schedule(problem, seed), doubled(mlp(0))) < 1e-12


def doubled(model: Model) -> Model:
    """In float64."""

    def batch(microbatch: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = model.batch(microbatch, step)
        return x.double(), y.double()

    layers = tuple(lambda build=build: build().double() for build in model.layers)
    return replace(model, layers=layers, batch=batch)


def test_dropout_is_that_of_the_unsplit_model() -> None:
    layers = tuple(
        seeded(0, i, lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32))) for i in range(8)
    )
    model = doubled(replace(mlp(0), layers=layers))
    assert worst_difference(random_schedule(a_problem((0, 1, 0, 1), 3, recompute="all")), model) < 1e-12


def profile_of(name: str) -> Profile:
    """Real bytes, invented times."""
    model = load(name)
    sizes = held_by(model, stages_of(model, range(len(model.layers))))
    rows = [
        Layer(name=str(i), F=100.0, B=100.0, W=80.0, BW=170.0, parameter_bytes=0, **one.costs())
        for i, one in enumerate(sizes)
    ]
    return Profile("estimated: times invented", name, tuple(rows), Link(5.0, 1000.0), 4.0, None, {}, {})


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("recompute", "memory"), [("all", 19e6), ("0:2,1:3", 27e6)])
def test_a_run_whose_memory_is_as_predicted(tmp_path: Path, recompute: str, memory: float) -> None:
    """From a profile by the command line: solved, run on two ranks, right, with the bytes that were predicted."""
    profile_of("gpt-tiny").save(tmp_path / "p.json")
    given = ["solve", str(tmp_path / "p.json"), "--ranks", "2", "--microbatches", "4", "--seconds", "3"]
    assert main([*given, "--recompute", recompute, "--memory", f"{memory:.0f}", "-o", str(tmp_path / "s.json")]) == 0
    schedule = Schedule.load(tmp_path / "s.json")
    assert {name.strip("0123456789") for name in schedule.problem.names} == {"F", "B", "W", "X"}
    trace = run_local(schedule, "gpt-tiny", steps=1, warmup=0, check=True)
    assert trace.facts["check"]["passed"], trace.facts["check"]
    assert max(trace.facts["transient_peaks"]) <= memory
    for measured, peak in zip(trace.peaks[0], trace.facts["predicted_peaks"], strict=True):
        assert measured == pytest.approx(peak, rel=0.03)
    need = schedule.problem.taken[schedule.problem.passes.microbatch == 0].sum()
    assert sum(trace.peaks[0]) < 1.5 * need  # bytes of all ranks beside those of one whole microbatch


def test_the_command_line_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile_of("mlp-tiny").save(tmp_path / "p.json")
    given = ["solve", str(tmp_path / "p.json"), "--ranks", "2", "--microbatches", "2", "--seconds", "1"]
    assert main([*given, "--recompute", "0,7"]) == 2
    assert capsys.readouterr().err == "zbsolve solve: recompute: there is no stage 7 (they are 0 to 1)\n"
    assert main([*given, "--recompute", "1", "--fused", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "optimal"
