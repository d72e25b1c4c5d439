"""Node lists of other engines: what we wrote for an engine comes back as it was; what is wrong is told by its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zbsolve import BadInput, Schedule, Step, preset
from zbsolve.cli import main
from zbsolve.interchange import Options, export, import_schedule, read_order

from ..support.profiles import equal_layers

LAYERS = 8
JSON = Options(path="nodes.json")


def written(tmp_path: Path, body: Any) -> Path:
    path = tmp_path / "nodes.json"
    path.write_text(body if isinstance(body, str) else json.dumps(body), encoding="utf-8")
    return path


def named(name: str, placement: str, fused: bool) -> Schedule:
    return preset(name, Step(4, 8, placement, fused=fused).problem(equal_layers(LAYERS)))


@pytest.mark.parametrize(
    ("to", "name", "placement", "fused"),
    [
        ("primus", "1f1b", "single", True),
        ("primus", "zb-h1", "single", False),
        ("primus", "interleaved", "loop", True),
        ("primus", "zb-v", "vee", False),
        ("primus", "1f1b-v", "vee", True),
        ("colossalai", "zb-v", "vee", False),
        ("colossalai", "v-half", "vee", False),
    ],
)
def test_what_we_write_comes_back_as_it_was(to: str, name: str, placement: str, fused: bool, tmp_path: Path) -> None:
    schedule = named(name, placement, fused)
    order = read_order(written(tmp_path, export(schedule, to, JSON).text))
    found = import_schedule(order, equal_layers(LAYERS))
    assert found.violations == ()
    assert order.format.lower().startswith(to)
    assert found.schedule.problem == schedule.problem
    assert found.schedule.order == schedule.order


def test_colossalai_splits_a_fused_backward(tmp_path: Path) -> None:
    """Its nodes have no BW, so each comes back as B and W."""
    text = export(named("1f1b-v", "vee", True), "colossalai", JSON).text
    found = import_schedule(read_order(written(tmp_path, text)), equal_layers(LAYERS))
    assert found.violations == ()
    assert found.schedule.problem == Step(4, 8, "vee").problem(equal_layers(LAYERS))


def test_chunks_without_messages_need_a_placement(tmp_path: Path) -> None:
    """Of a table without sends one cannot tell a loop from a V."""
    schedule = named("interleaved", "loop", True)
    rows = json.loads(export(schedule, "primus", JSON).text)
    bare = written(tmp_path, [[node for node in row if node["func_type"] in ("F", "BW")] for row in rows])
    with pytest.raises(BadInput, match="may be a loop or a vee: say --placement"):
        read_order(bare)
    found = import_schedule(read_order(bare, "loop"), equal_layers(LAYERS))
    assert found.violations == ()
    assert found.schedule.order == schedule.order
    wrong = import_schedule(read_order(bare, "vee"), equal_layers(LAYERS))
    assert {one.rule for one in wrong.violations} == {"deadlock"}
    assert "rank 0, node" in wrong.told()[0]


def node(word: str, m: int = 0, chunk: int = 0, **args: int) -> dict[str, Any]:
    return {"func_type": word, "mini_batch": m, "chunk": chunk, "args": args or None}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([[node("F"), node("O")]], "rank 0, node 1: 'O' is no pass (passes are F B W BW)"),
        ([[node("SF"), node("F")]], "rank 0, node 0: an SF without 'to_pp_rank'"),
        ([[node("SF", to_pp_rank=0, send_to_chunk=0)]], "do not make one line through all chunks"),
        ([[node("F", m=-1)]], "field 'mini_batch'"),
        ([[{"func_type": "F"}]], "field 'mini_batch' is missing"),
        ([[{"type": "F", "chunk": 0, "stage": 3, "minibatch": 0}]], "rank 0, node 0: field 'stage' is 3"),
        ([[{"type": "F", "chunk": 0, "stage": 0, "minibatch": 10**7}]], "more than zbsolve handles"),
        ([], "JSON, but no list of nodes a rank"),
        ({"a": 1}, "JSON, but no list of nodes a rank"),
        ({"zbsolve": "schedule"}, "there is nothing to import"),
        ("[[{", "damaged JSON at line 1"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_place(body: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as error:
        read_order(written(tmp_path, body))
    assert said in str(error.value)
    assert "nodes.json" in str(error.value)


def test_the_command_takes_node_lists(tmp_path: Path) -> None:
    profile, back = tmp_path / "profile.json", tmp_path / "back.json"
    equal_layers(LAYERS).save(profile)
    nodes = written(tmp_path, export(named("zb-v", "vee", False), "colossalai", JSON).text)
    assert main(["import", str(nodes), "--profile", str(profile), "-o", str(back)]) == 0
    assert Schedule.load(back).certificate.solver == "imported: nodes.json (ColossalAI node lists)"
    grid = tmp_path / "grid.txt"
    grid.write_text("F0 B0", encoding="utf-8")
    assert main(["import", str(grid), "--profile", str(profile), "--placement", "loop"]) == 2
