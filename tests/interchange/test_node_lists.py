"""Node lists of other engines: what we wrote for an engine comes back as it was; what is wrong is told by its place."""

from __future__ import annotations

import json
from dataclasses import replace
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


CROSSPIPE = ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 W0 F1 B1 W1 F2 B2 W2"]


def crosspipe(rows: list[str], **more: Any) -> dict[str, Any]:
    """CrossPipe's file of an order, one chunk a rank."""
    tasks = [
        [{"task_type": name[0], "device_id": i, "microbatch_id": int(name[1]), "chunk_id": 0} for name in row.split()]
        for i, row in enumerate(rows)
    ]
    return {"schedule": tasks, **more}


def test_crosspipes_microbatches_have_their_sizes(tmp_path: Path) -> None:
    """Of the mean; a profile that knows them itself keeps its own."""
    order = read_order(written(tmp_path, crosspipe(CROSSPIPE, microbatch_sizes=[1, 2, 6])))
    found = import_schedule(order, equal_layers(LAYERS))
    assert (found.violations, order.format) == ((), "CrossPipe node lists")
    assert found.schedule.order["compute:0"] == ("0F0", "0F1", "0B0", "0W0", "0F2", "0B1", "0W1", "0B2", "0W2")
    known = replace(equal_layers(LAYERS), microbatch_factors=(1 / 3, 2 / 3, 2.0))
    assert found.schedule.problem == Step(2, 3).problem(known)
    other = replace(known, microbatch_factors=(1.0, 1.0, 2.0))
    assert import_schedule(order, other).schedule.problem == Step(2, 3).problem(other)


def test_crosspipes_whole_backward_is_ours(tmp_path: Path) -> None:
    order = read_order(written(tmp_path, crosspipe(["F0 F1 B0 B1", "F0 B0 F1 B1"])))
    assert import_schedule(order, equal_layers(LAYERS)).schedule.problem == Step(2, 2, fused=True).problem(
        equal_layers(LAYERS)
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (crosspipe(CROSSPIPE, microbatch_sizes=[1, 2]), "field 'microbatch_sizes' has 2 numbers for 3 microbatches"),
        (crosspipe(CROSSPIPE, microbatch_sizes=[1, 0, 2]), "microbatch_sizes"),
        (crosspipe(["F0 B0", "F0 Q0"]), "rank 1, node 1: 'Q' is no pass"),
        ({"schedule": crosspipe(CROSSPIPE)["schedule"][::-1]}, "rank 0, node 0: field 'device_id' is 1, another rank"),
        ({"schedule": [[{"task_type": "F", "device_id": 0, "microbatch_id": 0, "chunk_id": 1}]]}, "say --placement"),
        ({"schedule": [[{"task_type": "F"}]]}, "device_id"),
        ({"costs": [1, 2]}, "SlackPipe's and SAPP's tables, go into a CSV for zbsolve numbers"),
    ],
)
def test_what_crosspipe_cannot_mean_is_refused(body: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as error:
        read_order(written(tmp_path, body))
    assert said in str(error.value)
