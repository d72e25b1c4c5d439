"""Exports to other engines: what is written runs with stand-ins of their classes; what they cannot express is refused by
name, with what their best order costs. What the packages themselves make of it is in test_packages."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zbsolve import BadInput, Schedule, pipeline, preset, verify
from zbsolve.build import restaged, with_exchange
from zbsolve.cli import main
from zbsolve.interchange import TARGETS, Options, export
from zbsolve.interchange.alternatives import best_order, first_fused
from zbsolve.interchange.foreign_order import python_file
from zbsolve.interchange.megatron import best_group
from zbsolve.interchange.order import Refused, order_for
from zbsolve.planner.engines import target
from zbsolve.systems import problem_for
from zbsolve.util.text import format_bytes

from ..support.engines import JAXPP, check_primus, primus, run_jaxpp
from ..support.exec_tools import random_schedule
from ..support.exports import a_step, in_order_schedule, run_python

SPLIT_PLACES = [("single", 4), ("loop", 2), ("vee", 2), ("vee", 3)]


def passes(schedule: Schedule) -> list[list[str]]:
    return [list(schedule.order[f"compute:{rank}"]) for rank in range(schedule.problem.ranks)]


# --- JaxPP ---


@pytest.mark.parametrize(("place", "ranks"), SPLIT_PLACES)
@pytest.mark.parametrize("fused", [True, False])
def test_jaxpp_runs_our_order_in_our_times(place: str, ranks: int, fused: bool) -> None:
    """Without messages the last task ends when our step does."""
    for seed in range(4):
        problem = a_step(place, ranks, 5, fused, seed)
        schedule = first_fused(in_order_schedule(restaged(problem, problem.placement), seed))
        made = run_python(export(schedule, "jaxpp").text, JAXPP)["schedule"]
        words = {"FWD": "F", "BWD": "BW", "BWD_I": "B", "BWD_W": "W"}
        tasks = [[f"{t.stage_id}{words[t.fwd_or_bwd.name]}{t.mubatch_idx}" for t in row] for row in made.tasks(5)]
        assert tasks == passes(schedule)
        quiet = pipeline_without_lags(schedule)
        assert run_jaxpp(made, 5) == quiet.timeline().makespan
        with pytest.raises(ValueError, match="this schedule has 5 microbatches, not 6"):
            made.tasks(6)


def pipeline_without_lags(schedule: Schedule) -> Schedule:
    from dataclasses import replace

    edges = schedule.problem.edges
    problem = replace(schedule.problem, edges=replace(edges, lag=0 * edges.lag))
    return Schedule(problem, schedule.order)


def test_jaxpp_wants_stage_0_in_one_piece() -> None:
    schedule = preset("zb-v", a_step("vee", 2, 4))
    late = schedule if _apart(schedule) else in_order_schedule(schedule.problem, 3)
    assert _apart(late)
    with pytest.raises(BadInput, match=r"^pass 0B\d: .* comes after it; JaxPP runs each W of stage 0 right after"):
        export(late, "jaxpp")
    made = export(late, "jaxpp", Options(or_best=True))
    assert made.facts["instead"]
    assert made.notes[0].startswith("another order is written than the schedule's. pass 0B")
    assert run_jaxpp(run_python(made.text, JAXPP)["schedule"], 4)


def _apart(schedule: Schedule) -> bool:
    return schedule.order["compute:0"] != first_fused(schedule).order["compute:0"]


# --- Primus ---


@pytest.mark.parametrize(
    ("place", "ranks", "fused", "algorithm"),
    [
        ("single", 4, False, "zero-bubble"),
        ("single", 3, True, "1f1b"),
        ("loop", 3, True, "1f1b-interleaved"),
        ("vee", 3, False, "zbv-formatted"),
        ("vee", 2, True, "zbv-formatted"),
    ],
)
def test_primus_takes_the_table(place: str, ranks: int, fused: bool, algorithm: str) -> None:
    for seed in range(4):
        schedule = in_order_schedule(a_step(place, ranks, 4, fused, seed), seed)
        made, stand_ins = export(schedule, "primus"), primus()
        assert made.facts["pp_algorithm"] == algorithm
        run_python(made.text, stand_ins)
        algorithms = next(iter(stand_ins.values()))["pp_algorithm_map"]
        chunks = schedule.problem.stages // ranks
        table = algorithms[algorithm](ranks, chunks, 4).generate_schedule_table()
        placement = schedule.problem.placement
        check_primus(table, placement)
        stage = {(r, placement[:s].count(r)): s for s, r in enumerate(placement)}
        ran = [
            [f"{stage[r, n.chunk]}{n.func_type.name}{n.mini_batch}" for n in row if n.args is None]
            for r, row in enumerate(table)
        ]
        assert ran == passes(schedule)
        as_json = json.loads(export(schedule, "primus", Options("x.json")).text)
        assert [[(n["func_type"], n["mini_batch"], n["chunk"], n["args"]) for n in row] for row in as_json] == [
            [(n.func_type.name, n.mini_batch, n.chunk, n.args) for n in row] for row in table
        ]
        with pytest.raises(ValueError, match="this schedule is for"):
            algorithms[algorithm](ranks, chunks, 5).generate_schedule_table()


# --- ColossalAI ---


def test_colossalai_nodes() -> None:
    schedule = in_order_schedule(a_step("vee", 2, 4), 1)
    rows = json.loads(export(schedule, "colossalai", Options("x.json")).text)
    stage = lambda rank, chunk: rank if not chunk else 3 - rank  # noqa: E731
    ran = [
        [f"{stage(n['stage'], n['chunk'])}{n['type']}{n['minibatch']}" for n in row if len(n["type"]) == 1] for row in rows
    ]
    assert ran == passes(schedule)
    times = schedule.timeline()
    for row in rows:
        for n in row:
            if len(n["type"]) == 1:
                name = f"{stage(n['stage'], n['chunk'])}{n['type']}{n['minibatch']}"
                assert (n["start_time"], n["completion_time"]) == times[name]
    fused = in_order_schedule(a_step("vee", 2, 2, fused=True), 1)
    rows = json.loads(export(fused, "colossalai", Options("x.json")).text)
    kinds = ["".join(n["type"] for n in row if len(n["type"]) == 1) for row in rows]
    assert all(set(re.findall("B.", row)) == {"BW"} for row in kinds)


# --- Megatron ---


def test_megatron_layout_and_group() -> None:
    problem = a_step("loop", 2, 8, fused=True)
    schedule = preset("interleaved", problem)
    made = json.loads(export(schedule, "megatron").text)
    assert made == {
        "pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": "Et*2|t*3|t*3|t*2L",
        "num_layers": 10,
        "microbatch_group_size_per_virtual_pipeline_stage": made["microbatch_group_size_per_virtual_pipeline_stage"],
    }
    single = export(preset("gpipe", a_step("single", 2, 4, fused=True)), "megatron", Options(layers="E,t*3,-,L"))
    assert json.loads(single.text)["pipeline_model_parallel_layout"] == "Et*2|tL"
    assert "1F1B" in single.notes[-1]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("E,t*9,L", "11 layers, but the schedule's stages have 12"),
        ("E,t*10", "11 layers, but"),
        ("t*11,L", "Megatron wants one E first"),
        ("E,x,L", "write E, t, m, L or - for each layer"),
        ("E,t*4,m,t*5,L", "Megatron wants one E first"),
        ("Et*5,m*5,L", "all of them on one stage"),
    ],
)
def test_megatron_layers_that_do_not_fit(layers: str, said: str) -> None:
    schedule = preset("interleaved", a_step("loop", 2, 4, fused=True))
    with pytest.raises(BadInput, match=re.escape(said)):
        export(schedule, "megatron", Options(layers=layers))


def test_megatron_wants_sequence_parallel_with_experts() -> None:
    """`arguments.py` raises for experts on tensor ranks without it; a schedule knows neither, so a line says it."""
    made = export(preset("1f1b", a_step("single", 2, 4, fused=True)), "megatron")
    assert "experts on several tensor ranks want --sequence-parallel, too" in made.notes[1]
    assert "sequence_parallel" not in json.loads(made.text)


def test_megatron_says_what_another_order_gains_and_holds() -> None:
    problem = a_step("loop", 2, 8, fused=True, held_until_B=1 << 20)
    worse = preset("interleaved", problem)
    assert "Megatron takes no order: it runs interleaved 1F1B" in export(worse, "megatron").notes[-1]
    best, little = best_group(problem)[1], preset("gis", problem)
    more, less = (format_bytes(max(one.timeline().peak_bytes)) for one in (best, little))
    assert export(little, "megatron").notes[-1].endswith(f"; its fullest rank holds {more}, the schedule's {less}")
    assert "holds" not in export(best, "megatron").notes[-1]
    with pytest.raises(BadInput, match=r"kind B, W \(only F BW\); the best order found .* 1F1B"):
        export(preset("zb-v", a_step("vee", 2, 8)), "megatron")
    with pytest.raises(BadInput, match="1 microbatches; Megatron needs at least 2"):
        export(random_schedule(a_step("loop", 2, 1, fused=True)), "megatron")


# --- what engines cannot express ---


@pytest.mark.parametrize(
    ("to", "place", "fused", "said"),
    [
        (
            "deepspeed",
            "single",
            False,
            r"^pass 0B0: DeepSpeed has no passes of kind B, W \(only F BW\); the best order",
        ),
        ("deepspeed", "loop", True, "^placement loop: DeepSpeed lays stages out as single only; the best order found"),
        ("colossalai", "loop", False, "^placement loop: ColossalAI lays stages out as vee only; the best order found"),
        ("colossalai", "single", False, "^placement single: .* vee only; no order was found that ColossalAI can run"),
        ("primus", "loop", False, r"^pass 0B0: Primus has no passes of kind B on placement loop \(only F BW\)"),
        ("megatron", "vee", True, "^placement vee: Megatron lays stages out as single or loop only; the best order"),
    ],
)
def test_refused_by_name_with_what_its_best_order_costs(to: str, place: str, fused: bool, said: str) -> None:
    schedule = in_order_schedule(a_step(place, 2, 4, fused))
    with pytest.raises(BadInput, match=said) as error:
        export(schedule, to)
    if "the best" in said:
        assert re.search(
            r"takes [\d,.]+ ..( with .* without\))?, ([\d.]+ % (more|less)|as long as the schedule): --or-best writes it$",
            str(error.value),
        )
        made = export(schedule, to, Options(or_best=True))
        assert made.text
        assert "instead" in made.facts


OF_SCHEDULES = [one for one in TARGETS if not one.needs_plan]


def test_kinds_and_streams_that_no_engine_has() -> None:
    recomputing = a_step("single", 2, 2, recompute="all", held_until_B=4, held_input=1)
    for one in OF_SCHEDULES:
        with pytest.raises(BadInput, match=rf"^pass 0[XB]0: {one.engine} has no passes of kind"):
            export(random_schedule(recomputing), one.name)
    sharded, sliced = (preset(name, problem_for(name, 2, 4, 2, 2, 2)) for name in ("1f1b-vocab", "slimpipe"))
    for one in OF_SCHEDULES:
        with pytest.raises(BadInput, match=rf"^pass 2VB0: {one.engine} has no passes .*, so no vocabulary; .* S, T, VB, VR"):
            export(sharded, one.name)
        with pytest.raises(BadInput, match=rf"^pass 0F0.1: {one.engine} has no slices of a microbatch; no order was found"):
            export(sliced, one.name)
    with pytest.raises(BadInput, match=r"BW\) passes: it has slices$"):
        export(sliced, "torch-csv")


def test_microbatches_out_of_order() -> None:
    """Relabelled where all stages agree on an order, refused where they do not."""
    problem = pipeline([1, 1], BW=[1, 1], microbatches=3)
    alike = {
        "compute:0": ("0F2", "0F0", "0F1", "0BW2", "0BW0", "0BW1"),
        "compute:1": ("1F2", "1F0", "1F1", "1BW2", "1BW0", "1BW1"),
    }
    for to in ("jaxpp", "deepspeed", "primus"):
        made = export(Schedule(problem, alike), to)
        assert made.facts["microbatches"] == [2, 0, 1]
        assert any("its 0, 1, … are the schedule's 2, 0, 1" in note for note in made.notes)
    crossed = alike | {"compute:1": ("1F2", "1F1", "1F0", "1BW2", "1BW0", "1BW1")}
    for to in ("jaxpp", "deepspeed", "primus"):
        with pytest.raises(BadInput, match=r"^pass 1F0: it comes after 1F1; \w+ runs the microbatches of all"):
            export(Schedule(problem, crossed), to)
    export(Schedule(problem, crossed), "torch-csv")


def test_groups_of_microbatches() -> None:
    with pytest.raises(BadInput, match="5 microbatches on 2 ranks; ColossalAI needs a multiple of 2"):
        export(in_order_schedule(a_step("vee", 2, 5)), "colossalai")


@pytest.mark.parametrize("one", TARGETS, ids=lambda one: one.name)
def test_the_best_order_is_one_that_the_engine_takes(one: Any) -> None:
    for place in ("single", "loop", "vee"):
        schedule = in_order_schedule(a_step(place, 2, 4, held_until_B=3, held_until_W=5, capacity=64))
        found = best_order(schedule, one)
        if found is not None:
            order_for(found.schedule, one)
            assert verify(found.schedule.problem, found.schedule) == ()


def test_sums_over_replicas_are_the_engines_own() -> None:
    """Passes C of stages on one rank are left out, with a note. A step that has others is refused as it is."""
    plain = a_step("vee", 2, 4, False, 1)
    found = preset("zb-v", with_exchange(plain, 5, replicas=True))
    made = export(found, "torch-csv")
    assert made.text == export(preset("zb-v", plain), "torch-csv").text
    assert made.notes[-1] == "passes C, which sum gradients over replicas, are left out: torch-csv sums them by itself"
    two_ways = random_schedule(pipeline(3, BW=4, placement=((0, 1), (1, 0)), microbatches=2, exchange=5))
    with pytest.raises(BadInput, match="stage 0 is on rank 0 and on rank 1; torch-csv has one a stage"):
        export(two_ways, "torch-csv")
    said = []
    for one in (found, preset("zb-v", plain)):
        with pytest.raises(BadInput, match=r"the best order found that it can run, .*1f1b") as error:
            export(one, "deepspeed")
        said.append(str(error.value))
    assert said[0] == said[1]


def test_the_best_order_keeps_to_the_memory() -> None:
    """GPipe would hold all four microbatches, 1F1B two."""
    problem = a_step("single", 2, 4, held_until_B=10, held_until_W=10, capacity=40)
    found = best_order(preset("zb-h1", problem), target("deepspeed"))
    assert found is not None
    assert found.title.startswith("1f1b")
    tight = a_step("single", 2, 4, held_until_B=10, held_until_W=10, capacity=[20, 20])
    assert best_order(in_order_schedule(a_step("single", 2, 4)), target("deepspeed")) is not None
    schedule = preset("gpipe", tight)
    assert best_order(schedule, target("deepspeed")) is None


# --- stages on other ranks ---


def test_restaged_steps() -> None:
    options: dict[str, Any] = {"held_until_B": [1, 2, 3, 4], "held_until_W": 5, "held_from_B": 1, "layers": [1, 2, 1, 1]}
    step = pipeline([1, 2, 3, 4], B=[2, 2, 2, 2], W=[1, 1, 1, 2], placement="vee", microbatches=3, comm=7, **options)
    assert restaged(step, step.placement) == step
    looped = pipeline([1, 2, 3, 4], B=[2, 2, 2, 2], W=[1, 1, 1, 2], placement="loop", microbatches=3, comm=7, **options)
    assert restaged(step, (0, 1, 0, 1)) == looped
    joined = pipeline(
        [3, 7],
        B=[4, 4],
        W=[2, 3],
        microbatches=3,
        comm=7,
        held_until_B=[3, 7],
        held_until_W=10,
        held_from_B=2,
        layers=[3, 2],
    )
    assert restaged(step, (0, 1)) == joined
    with pytest.raises(BadInput, match="4 stages do not make 3"):
        restaged(step, (0, 1, 2))
    with pytest.raises(BadInput, match="no plain pipeline"):
        restaged(pipeline([1, 1], BW=[1, 1], microbatches=2, AF=3), (0, 1))


# --- files ---


def test_generated_python_holds_numbers_and_our_words() -> None:
    data = {"A": (1, "F"), "B": ((1, 2), (3,)), "C": (((1, "x"),), ()), "D": None}
    values, *code = python_file("A title.", data, "colossalai").partition("from colossalai")
    names: dict[str, Any] = {}
    exec(compile(values, "x.py", "exec"), names)
    assert {name: names[name] for name in data} == data
    assert "scheduler_nodes" in code[-1]


def test_texts_of_the_schedule_do_not_get_into_the_file() -> None:
    problem = pipeline([1, 1], BW=[1, 1], microbatches=2, layers=[1, 1], source='measured: """\nimport os')
    for to in ("jaxpp", "deepspeed", "primus", "megatron"):
        assert "import os" not in export(preset("1f1b", problem), to).text


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out = tmp_path / "s.json", tmp_path / "s.py"
    preset("zb-h1", a_step("single", 2, 4)).save(plan)
    assert main(["export", str(plan), "--to", "deepspeed", "-o", str(out)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("zbsolve export: pass 0B0: DeepSpeed has no passes of kind B")
    assert not out.exists()
    assert main(["export", str(plan), "--to", "deepspeed", "--or-best", "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert "another order is written" in said.err
    assert "class ZbsolveSchedule" in out.read_text()
    assert main(["export", str(plan), "--to", "primus", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["pp_algorithm"] == "zero-bubble"
    assert len(body["rows"]) == 2
    assert main(["export", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["target", *(one.name for one in TARGETS)]
    assert main(["export", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["target"] == "torch-csv"
    assert main(["export", str(plan), "--to", "primus", "--layers", "E,t,L"]) == 2
    assert "--layers: for --to megatron or torchtitan only" in capsys.readouterr().err
    assert main(["export", "--to", "primus"]) == 2
    assert "name the schedule's file" in capsys.readouterr().err


def test_a_schedule_that_does_not_hold_gets_no_other_order() -> None:
    schedule = preset("1f1b", a_step("single", 2, 2, fused=True))
    broken = Schedule(schedule.problem, {**schedule.order, "compute:1": schedule.order["compute:1"][:-1]})
    with pytest.raises(BadInput, match="missing: compute:1") as error:
        export(broken, "deepspeed", Options(or_best=True))
    assert not isinstance(error.value, Refused)


@pytest.mark.parametrize(
    ("to", "name"), [("deepspeed", "x.json"), ("megatron", "x.py"), ("torch-csv", "x.json.gz"), ("deepspeed", "x.txt")]
)
def test_a_name_that_promises_another_format_is_refused(to: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "no-such-schedule.json", "--to", to, "-o", name]) == 2
    assert re.search(rf"{name}: for .* the file is (Python|JSON|CSV): name it ….(py|json|csv)$", capsys.readouterr().err)


def test_other_names_and_compressed_json() -> None:
    for name in ("x", "-", "x.py", "x.json.gz"):
        target("primus").check_ending(name)
    vee = in_order_schedule(a_step("vee", 2, 4))
    assert json.loads(export(vee, "primus", Options("x.json.gz")).text)


def test_a_refusal_blames_what_is_in_the_way() -> None:
    """Memory only where an order is there without its limit."""
    single = in_order_schedule(a_step("single", 2, 4))
    with pytest.raises(BadInput, match=r"can run on this problem: vee is not possible with 1 stage a rank$"):
        export(single, "colossalai")
    recomputing = random_schedule(a_step("single", 2, 2, recompute="all", held_until_B=4, held_input=1, capacity=1000))
    with pytest.raises(BadInput, match=r"can run on this problem: it is no plain pipeline .* passes of kind X$"):
        export(recomputing, "deepspeed")
    mirror = preset("chimera", pipeline([3, 3], B=[3, 3], W=[3, 3], placement=((0, 1), (1, 0)), microbatches=4))
    with pytest.raises(BadInput, match="can run on this problem: its stages are on several ranks"):
        export(mirror, "deepspeed")


def test_a_refusal_says_which_times_it_compares() -> None:
    with pytest.raises(
        BadInput, match=r"takes [\d,]+ µs with DeepSpeed's blocking messages \([\d,]+ µs without\), [\d.]+ %"
    ):
        export(in_order_schedule(a_step("single", 4, 8)), "deepspeed")


def test_layers_of_given_numbers_are_told_apart() -> None:
    problem = replace(a_step("single", 2, 4, fused=True), source="given: numbers")
    for to, told in (("megatron", True), ("deepspeed", True), ("primus", False)):
        made = export(preset("1f1b", problem), to)
        assert any("set the layers of" in note for note in made.notes) is told
    assert not any(
        "set the layers of" in note for note in export(preset("1f1b", replace(problem, source="")), "megatron").notes
    )
