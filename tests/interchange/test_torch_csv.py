"""Schedules in other engines: what torch's own runtime makes of them, and what is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zbsolve import BadInput, Deadlock, Edge, Pass, Problem, Schedule, pipeline
from zbsolve.cli import main
from zbsolve.exec.check import difference
from zbsolve.exec.torch_stages import torch_schedule
from zbsolve.interchange.torch_csv import torch_order
from zbsolve.models.model import Model
from zbsolve.models.presets import GptSizes, gpt, mlp
from zbsolve.systems import preset

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, random_schedule


@pytest.fixture
def torchs() -> Any:
    """torch's own module; its import takes a second."""
    from torch.distributed.pipelining import schedules

    return schedules


def model(name: str) -> Model:
    return mlp(0) if name == "mlp" else gpt("small", 0, GptSizes(width=16, blocks=2, heads=2, batch=2, length=8), tied=False)


def double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def run(case: dict[str, Any], rank: int) -> float:
    schedule, spec = Schedule.load(case["schedule"]), model(case["model"])
    order, counts = torch_order(schedule), schedule.problem.layers
    firsts = [sum(counts[:s]) for s in range(len(counts))]
    layers = [layer.double() for layer in spec.build()]
    mine = {
        s: torch.nn.Sequential(*layers[firsts[s] : firsts[s] + counts[s]])
        for s, home in enumerate(order.placement)
        if home == rank
    }
    pairs = [spec.batch(m, 0) for m in order.microbatches]
    inputs, targets = (torch.cat([double(pair[i]) for pair in pairs]) for i in range(2))
    runtime = torch_schedule(schedule, mine, spec.loss, defer_recv=case.get("defer", False))
    losses: list[torch.Tensor] = []
    last = len(counts) - 1
    whole, expected = [layer.double() for layer in spec.build()], []
    for x, y in pairs:
        value = spec.loss(torch.nn.Sequential(*whole)(double(x)), double(y))
        (value / len(pairs)).backward()
        expected.append(value.detach())
    found = []
    for _ in range(2):  # before the first step torch finds out shapes; the second is only itself
        for module in mine.values():
            module.zero_grad()
        runtime.step(*((inputs,) if 0 in mine else ()), target=targets if last in mine else None, losses=losses)
        for s, module in mine.items():
            names = dict(torch.nn.Sequential(*whole[firsts[s] : firsts[s] + counts[s]]).named_parameters())
            found += [difference(p.grad, names[name].grad) for name, p in module.named_parameters()]
        if last in mine:
            found.append(difference(torch.stack(losses).detach(), torch.stack(expected)))
    return max(found)


def results(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, float | str]:
    """Case → the largest relative difference of loss and gradients from the unsplit model (or the line of a BadInput)."""
    found: dict[str, float | str] = {}
    for name, case in cases.items():
        try:
            found[name] = run(case, rank)
        except BadInput as error:
            found[name] = str(error)
    return found


PLACEMENTS = [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 3), (0, 2, 1, 3, 0, 1), (1, 0, 0, 2, 1), (0, 0, 1)]


def mixed(placement: tuple[int, ...], microbatches: int) -> Problem:
    """Odd stages have a fused backward, even ones a split one."""
    split = a_problem(placement, microbatches)
    passes, gone = [], set()
    for one in split.passes:
        if one.stage % 2 == 0 or one.kind == "F":
            passes.append(one)
        elif one.kind == "B":
            passes.append(Pass("BW", one.stage, one.microbatch, one.rank, 20))
            gone.add(one.name)
    names = {one.name for one in passes}
    edges = []
    for a, b in zip(split.edges.before.tolist(), split.edges.after.tolist(), strict=True):
        before, after = (n.replace("B", "BW") if n in gone else n for n in (split.names[a], split.names[b]))
        if before in names and after in names:
            edges.append(Edge(before, after))
    made = Problem.of(passes, edges)
    return Problem(made.passes, made.edges, layers=split.layers)


def test_1f1b_in_torchs_words() -> None:
    order = torch_order(preset("1f1b", pipeline([1, 1], B=[1, 1], W=[1, 1], microbatches=2)))
    assert order.csv == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"
    assert torch_order(preset("1f1b", pipeline([1, 1], BW=[1, 1], microbatches=1))).csv == "0F0,0B0\n1F0,1B0\n"
    assert not order.relabelled
    assert order.overtaken == ()


def test_torchs_last_stage_runs_its_forwards_in_order() -> None:
    problem = pipeline([1, 1], BW=[1, 1], microbatches=3)
    order = {
        "compute:0": ("0F1", "0F2", "0F0", "0BW1", "0BW0", "0BW2"),
        "compute:1": ("1F1", "1F0", "1F2", "1BW1", "1BW0", "1BW2"),
    }
    found = torch_order(Schedule(problem, order))
    assert found.microbatches == (1, 0, 2)
    assert found.csv == "0F0,0F2,0F1,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"
    assert any("torch's 0, 1, … are the schedule's 1, 0, 2" in note for note in found.notes())
    assert found.overtaken == ("rank 0 sends rank 1 0F2 before 0F0, but 0F0 is used first",)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_pass_once_and_the_last_stage_in_order(placement: tuple[int, ...]) -> None:
    for seed in range(5):
        order = torch_order(random_schedule(a_problem(placement, 5), seed))
        cells = [cell for row in order.rows for cell in row]
        assert sorted(cells) == sorted(f"{s}{k}{m}" for s in range(len(placement)) for k in "FIW" for m in range(5))
        last = len(placement) - 1
        assert [c for c in cells if c.startswith(f"{last}F")] == [f"{last}F{m}" for m in range(5)]
        for rank, row in enumerate(order.rows):
            assert {int(cell[0]) for cell in row} == {s for s, home in enumerate(placement) if home == rank}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_torch_defers_receives_in_order_wherever_we_say_so(torchs: Any, placement: tuple[int, ...]) -> None:
    """Against torch's own lowering: per pair, are receives posted in the order of sends?"""
    if not hasattr(torchs, "_defer_recv_ops"):
        pytest.skip("this torch has no defer_pp_recv")
    problem, seen = a_problem(placement, 4), set()
    for schedule in [random_schedule(problem, seed) for seed in range(20)] + [in_order(problem)]:
        order = torch_order(schedule)
        actions = {r: [torchs._Action.from_str(cell) for cell in row] for r, row in enumerate(order.rows)}
        full = torchs._add_send_recv(actions, lambda s: placement[s], len(placement))
        assert pairs_agree(full, placement)  # without defer_pp_recv: always
        agree = pairs_agree(torchs._defer_recv_ops(full, lambda s: placement[s]), placement)
        assert agree or order.overtaken
        seen.add(bool(order.overtaken))
        if order.overtaken:
            with pytest.raises(
                BadInput, match=r"^schedule: torch's defer_pp_recv=True would mix messages up: rank \d sends"
            ):
                torch_order(schedule, defer_recv=True)
    assert seen == {True, False}


def in_order(problem: Problem) -> Schedule:
    """One microbatch after the other: whatever is sent first is used first."""
    p = problem.passes
    rows: dict[str, list[tuple[int, int, int]]] = {}
    for i in range(len(p)):
        stage, kind = int(p.stage[i]), int(p.kind[i])
        depth = stage if kind == 0 else 2 * len(problem.names) - 2 * stage + kind
        rows.setdefault(f"compute:{p.rank[i]}", []).append((int(p.microbatch[i]), depth, i))
    return Schedule.of(problem, {stream: [row for _, _, row in sorted(three)] for stream, three in rows.items()})


def pairs_agree(actions: dict[int, list[Any]], placement: tuple[int, ...]) -> bool:
    sent: dict[tuple[int, int], list[tuple[int, str, int]]] = {}
    posted: dict[tuple[int, int], list[tuple[int, str, int]]] = {}
    for rank, row in actions.items():
        for action in row:
            word, _, way = action.computation_type.value.partition("_")
            step = 1 if way == "F" else -1
            s, m = action.stage_index, action.microbatch_index
            if word == "SEND":
                sent.setdefault((rank, placement[s + step]), []).append((s + step, way, m))
            elif word == "RECV":
                posted.setdefault((placement[s - step], rank), []).append((s, way, m))
    return sent == posted


def hand_made(passes: list[Pass], edges: list[Edge], order: dict[str, tuple[str, ...]] | None = None) -> Schedule:
    problem = Problem.of(passes, edges)
    return Schedule(problem, order) if order else random_schedule(problem)


F, B, W = (Pass(kind, 0, 0, 0, 1) for kind in ("F", "B", "W"))


@pytest.mark.parametrize("kind", ["X", "O", "R", "S", "T", "U"])
def test_kinds_that_torch_has_no_word_for(kind: str) -> None:
    with pytest.raises(BadInput, match=f"^pass 0{kind}0: torch-csv has no passes of kind {kind} "):
        torch_order(hand_made([F, B, W, Pass(kind, 0, 0, 0, 1)], []))


def test_what_torch_cannot_express_is_refused_by_name() -> None:
    def refused(match: str, passes: list[Pass], edges: list[Edge] | None = None) -> None:
        with pytest.raises(BadInput, match=match):
            torch_order(hand_made(passes, edges or []))

    next_stage = [Pass(kind, 1, 0, 1, 1) for kind in ("F", "B", "W")]
    refused("^pass 0F0.1: torch-csv has no slices", [F, B, W, Pass("F", 0, 0, 0, 1, 1)])
    refused("^pass 0F1: stage 0 is on rank 0 and on rank 1", [F, B, W, Pass("F", 0, 1, 1, 1)])
    with pytest.raises(BadInput, match=r"^pass 0F1: stage 0 is on rank 0 and on rank 1; torch-csv has one"):
        torch_order(random_schedule(pipeline([1, 1], BW=[1, 1], microbatches=2, placement=[(0, 1), (1, 0)])))
    refused("stages \\[0, 2\\] are not 0 to 1", [F, B, W, *(Pass(k, 2, 0, 1, 1) for k in ("F", "B", "W"))])
    refused("rank 0 has no stage", [Pass(k, 0, 0, 1, 1) for k in ("F", "B", "W")])
    refused("stage 0, microbatch 0: torch-csv needs F B W or F BW, but there is B F", [F, B], [Edge("0F0", "0B0")])
    refused("edge 0W0 → 1W0: torch-csv links ranks", [F, B, W, *next_stage], [Edge("0W0", "1W0")])
    refused("edge 0F0 → 1B0: torch-csv links ranks", [F, B, W, *next_stage], [Edge("0F0", "1B0")])


def test_streams_and_syncs_that_torch_does_not_have() -> None:
    copy = Pass("W", 0, 0, 0, 1, streams=("compute:0", "d2h:0"))
    order = {"compute:0": ("0F0", "0B0", "0W0"), "d2h:0": ("0W0",)}
    with pytest.raises(BadInput, match=r"^pass 0W0: it occupies compute:0, d2h:0; torch-csv has one line"):
        torch_order(hand_made([F, B, copy], [Edge("0F0", "0B0"), Edge("0B0", "0W0")], order))
    schedule = in_order(a_problem((0, 1), 1))
    with pytest.raises(BadInput, match=r"^sync 0F0 → 1W0: torch-csv links ranks"):
        torch_order(Schedule(schedule.problem, schedule.order, (("0F0", "1W0"),)))


def test_a_schedule_that_does_not_hold_is_refused() -> None:
    schedule = in_order(a_problem((0, 1), 1))
    with pytest.raises(BadInput, match="missing: compute:1 does not list 1B0"):
        torch_order(Schedule(schedule.problem, {**schedule.order, "compute:1": ("1F0", "1W0")}))


def test_where_torch_would_wait_for_ever() -> None:
    """A graph without torch's own edges allows orders that torch's runtime cannot run."""
    passes = [Pass(kind, stage, 0, stage, 1) for stage in range(2) for kind in ("F", "BW")]
    order = {"compute:0": ("0BW0", "0F0"), "compute:1": ("1F0", "1BW0")}
    with pytest.raises(Deadlock, match=r"^deadlock: 0BW0 → 0F0 → 0BW0$"):
        torch_order(hand_made(passes, [], order))
    passes = [Pass(kind, stage, m, stage, 1) for stage in range(2) for kind in ("F", "BW") for m in range(2)]
    order = {"compute:0": ("0F0", "0BW0", "0F1", "0BW1"), "compute:1": ("1F1", "1F0", "1BW0", "1BW1")}
    with pytest.raises(Deadlock, match=r"^deadlock: 1F1 → 1F0 → 1BW0 → 0BW0 → 0F1 → 1F1$"):
        torch_order(hand_made(passes, [], order))


# --- in torch's own runtime ---


def in_torch(folder: Path, cases: dict[str, tuple[Schedule, str, bool]], ranks: int) -> dict[str, list[float | str]]:
    """Run (schedule, model, defer_recv) on gloo ranks; case → each rank's largest difference from the unsplit model."""
    body = {}
    for i, (name, (schedule, model, defer)) in enumerate(cases.items()):
        schedule.save(folder / f"{i}.json")
        body[name] = {"schedule": str(folder / f"{i}.json"), "model": model, "defer": defer}
    found = on_ranks(ranks, f"{__name__}:results", body)
    return {name: [one[name] for one in found] for name in cases}


def check(results: dict[str, list[float | str]]) -> None:
    for name, found in results.items():
        assert all(isinstance(one, float) and one <= 1e-12 for one in found), (name, found)


@pytest.mark.slow
def test_two_ranks_in_torchs_runtime(tmp_path: Path, torchs: Any) -> None:
    cases: dict[str, tuple[Schedule, str, bool]] = {}
    for placement in [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0), (0, 0, 1)]:
        for seed in range(2):
            cases[f"{placement} {seed}"] = random_schedule(a_problem(placement, 4), seed), "mlp", False
            cases[f"{placement} {seed} fused"] = random_schedule(a_problem(placement, 3, fused=True), seed), "mlp", False
    cases["mixed"] = random_schedule(mixed((0, 1, 1, 0), 4), 3), "mlp", False
    for placement in [(0, 1), (0, 1, 1, 0)]:  # its last stage ends in a Linear on three dimensions
        cases[f"gpt {placement}"] = random_schedule(a_problem(placement, 3, layers=4), 1), "gpt", False
    cases["1f1b"] = preset("1f1b", a_problem((0, 1), 4)), "mlp", False
    cases["zb-v"] = preset("zb-v", a_problem((0, 1, 1, 0), 4)), "mlp", False
    cases["deferred"] = in_order(a_problem((0, 1, 0, 1), 3)), "mlp", True
    assert torch_order(cases["mixed"][0]).relabelled
    results = in_torch(tmp_path, cases, 2)
    if not hasattr(torchs, "_defer_recv_ops"):
        refused = f"torch {torch.__version__}: defer_pp_recv needs torch 2.13 or newer"
        assert results.pop("deferred") == [refused] * 2
    check(results)


@pytest.mark.slow
def test_four_ranks_in_torchs_runtime(tmp_path: Path) -> None:
    cases: dict[str, tuple[Schedule, str, bool]] = {
        "zb-h2": (preset("zb-h2", a_problem((0, 1, 2, 3), 6)), "mlp", False),
        "interleaved": (preset("interleaved", a_problem((0, 1, 2, 3) * 2, 8)), "mlp", False),
        "any": (random_schedule(a_problem((0, 2, 1, 3, 0, 1), 5), 4), "mlp", False),
        "another": (random_schedule(a_problem((3, 1, 0, 0, 2, 1, 3), 3), 5), "mlp", False),
        "vee": (random_schedule(a_problem((0, 1, 2, 3, 3, 2, 1, 0), 4), 6), "mlp", False),
    }
    check(in_torch(tmp_path, cases, 4))


@pytest.mark.usefixtures("alone")
def test_stages_that_torch_would_get_wrong_are_refused() -> None:
    schedule = random_schedule(a_problem((0, 0), 2))
    tied = nn.Linear(3, 3)
    loss = nn.functional.mse_loss
    with pytest.raises(BadInput, match=r"stages: \[0\] were given on rank 0, but the schedule puts \[0, 1\] there"):
        torch_schedule(schedule, {0: tied}, loss)
    with pytest.raises(BadInput, match="stage 1: weight is also stage 0's weight; torch would scale"):
        torch_schedule(schedule, {0: tied, 1: tied}, loss)
    with pytest.raises(BadInput, match="stage 1: wrapped in DistributedDataParallel"):
        torch_schedule(schedule, {0: tied, 1: nn.parallel.DistributedDataParallel(nn.Linear(3, 3))}, loss)
    with pytest.raises(BadInput, match="it is for 2 ranks, but the process group has 1"):
        torch_schedule(random_schedule(a_problem((0, 1), 2)), {0: tied}, loss)


# --- the command ---


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out = tmp_path / "s.json", tmp_path / "s.csv"
    schedule = preset("1f1b", a_problem((0, 1), 3))
    schedule.save(plan)
    assert main(["export", str(plan), "--to", "torch-csv", "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert out.read_text() == torch_order(schedule).csv
    assert said.out == ""
    assert "torch 2.11 or newer, format compute_only" in said.err
    assert main(["export", str(plan), "--to", "torch-csv"]) == 0
    assert capsys.readouterr().out == out.read_text()
    assert main(["export", str(plan), "--to", "torch-csv", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["rows"] == [line.split(",") for line in out.read_text().splitlines()]
    assert body["microbatches"] == [0, 1, 2]
    random_schedule(a_problem((0, 1), 5), 1).save(plan)
    assert main(["export", str(plan), "--to", "torch-csv", "--defer-recv", "-o", str(out)]) == 2
    assert capsys.readouterr().err.startswith("zbsolve export: schedule: torch's defer_pp_recv=True would mix")
    assert out.read_text() == torch_order(schedule).csv


def test_export_loads_no_torch() -> None:
    code = "import sys, zbsolve.interchange.torch_csv; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "False"
