"""Plans for one engine, and of given layouts: the space has what the engine's export takes, in its own orders."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

import zbsolve
from zbsolve import BadInput, preset
from zbsolve.cli import main
from zbsolve.interchange import Options, export
from zbsolve.planner import CLUSTERS, Only, Plan, Shape, check_plan
from zbsolve.planner.candidate import Choice
from zbsolve.planner.engines import PLANNED
from zbsolve.planner.layout import LOOP, NONE, SINGLE, VEE
from zbsolve.planner.plan_file import read_choice
from zbsolve.planner.space import layouts, parse_only

A100 = CLUSTERS["a100"]
SMALL = Shape.gpt(1024, 8, 6, vocabulary=8192)
OWN = (("dp", 1), ("tp", 1), ("pp", 4), ("placement", SINGLE), ("size", 1), ("recompute", NONE))


@cache
def own(engine: str = "megatron") -> Plan:
    return zbsolve.plan(SMALL, 4, 8, A100, memory="12GiB", effort=0.2, only=Only(engine, OWN))


@pytest.mark.parametrize("engine", PLANNED)
def test_the_space_has_just_what_the_engine_does_not_refuse(engine: str) -> None:
    table, target = layouts(SMALL, 8, 16, A100), PLANNED[engine]
    kept = set(zip(*map(np.ndarray.tolist, layouts(SMALL, 8, 16, A100, Only(engine))), strict=True))
    places = {"megatron": (SINGLE, LOOP), "galvatron": (SINGLE,)}.get(engine, (SINGLE, LOOP, VEE))
    for layout in map(table.row, range(len(table.dp))):
        assert (layout in kept) == (layout.placement in places and not target.lacks(layout))
    assert kept


@pytest.mark.parametrize(
    ("engine", "pipelined", "alone"),
    [
        ("megatron", [0, 1, 3], [0, 1, 3]),
        ("torchtitan", [0, 2], [0, 2, 3]),
        ("zbsolve", [0, 2], [0]),
        ("galvatron", [0, 1, 2, 3], [0, 1, 2, 3]),
    ],
)
def test_engines_shard_states_as_they_do(engine: str, pipelined: list[int], alone: list[int]) -> None:
    """Megatron's distributed optimizer is ZeRO 1, its FSDP ZeRO 3. `run` shards with stages that fully_shard has wrapped,
    and gathers each once a step: ZeRO 2 of a pipeline. So does torchtitan's FSDP, which without a pipeline
    reduces in each microbatch."""
    table = layouts(SMALL, 8, 16, A100, Only(engine))
    assert np.unique(table.zero[(table.dp > 1) & (table.pp > 1)]).tolist() == pipelined
    assert np.unique(table.zero[(table.dp > 1) & (table.pp == 1)]).tolist() == alone


def test_megatrons_step_is_that_of_its_own_order() -> None:
    """One stage a rank: 1F1B, whatever could be better; the bound is for any order."""
    best = own().best
    problem = best.schedule.problem
    assert best.value == preset("1f1b", problem).timeline().makespan + best.behind
    assert own().bound <= best.value
    assert own("torchtitan").best.value < best.value  # a split backward fills the end
    made = export(best.schedule, "megatron", Options(plan=Choice(SMALL, A100, 8, own().memory, best)))
    assert made.facts["step"] == made.facts["plan_step"] == best.value


def test_interleaved_steps_take_the_best_group() -> None:
    fixed = (("pp", 2), ("placement", LOOP), ("chunks", 2), ("size", 1), ("recompute", NONE))
    found = zbsolve.plan(SMALL, 2, 8, A100, memory="12GiB", effort=0.2, only=Only("megatron", fixed)).best
    made = export(found.schedule, "megatron", Options(plan=Choice(SMALL, A100, 8, 12 << 30, found)))
    assert made.facts["step"] == found.value


def test_a_file_knows_what_was_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    fix = "dp=1,tp=1,pp=4,placement=single,size=1,recompute=none"
    command = ["plan", "gpt-3.6b@layers=4", "--devices", "4", "--batch", "8", "--cluster", "a100", "--effort", "0.1"]
    assert main([*command, "--for", "megatron", "--fix", fix, "-o", str(path)]) == 0
    said = capsys.readouterr().out
    assert "only layouts for megatron, dp 1, tp 1, pp 4, placement single, size 1, recompute none" in said
    assert "1 layouts" in said
    assert check_plan(path).wrong == ()
    assert read_choice(path).best.layout.pp == 4
    path.write_text(path.read_text().replace("megatron", "zbsolve"))
    with pytest.raises(BadInput, match="there are 14 layouts"):
        check_plan(path)


@pytest.mark.parametrize(
    ("engine", "fixed", "said"),
    [
        ("megatrn", None, "--for 'megatrn': unknown; did you mean megatron?"),
        (None, "tpp=2", "'tpp' is no field; did you mean"),
        (None, "tp=two", "tp is a number"),
        (None, "placement=v", "placement is one of single, loop, vee"),
        (None, "tp=2,tp=4", "'tp': it is there twice"),
    ],
)
def test_bad_words_are_named(engine: str | None, fixed: str | None, said: str) -> None:
    with pytest.raises(BadInput, match=said.replace("?", r"\?")):
        parse_only(engine, fixed)


def test_a_layout_that_is_not_there_says_which_are() -> None:
    with pytest.raises(BadInput, match="no layout has tp 8: with all before tp there are 1, 2, 4"):
        layouts(SMALL, 4, 8, A100, Only("", (("tp", 8),)))
    with pytest.raises(BadInput, match=r"no layout has pp 2, tp 2, dp 2: .* dp there are 1 \(dp × tp × pp is 4 devices\)"):
        layouts(SMALL, 4, 8, A100, Only("", (("pp", 2), ("tp", 2), ("dp", 2))))
    with pytest.raises(BadInput, match="no layout for megatron has placement vee: with all before placement"):
        layouts(SMALL, 4, 8, A100, Only("megatron", (("placement", VEE),)))
