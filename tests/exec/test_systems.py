"""Every system of the table on gloo ranks: gradients equal to the unsplit model's, memory as simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zbsolve import Trace, pipeline, updates
from zbsolve.cli import main
from zbsolve.exec import check
from zbsolve.exec.handlers import Data
from zbsolve.exec.run.checking import compare
from zbsolve.exec.transport.wires import ALONE
from zbsolve.problem.placement import mirror
from zbsolve.profile.profile import Layer, Link, Profile
from zbsolve.systems import preset
from zbsolve.systems.table import SYSTEMS

from ..support.exec_ranks import on_ranks
from ..support.systems_jobs import INNER, batch, layers, simulated
from ..support.trials import too_far

pytestmark = pytest.mark.slow

RANKS, MICROBATCHES = 4, 8
# Where the vocabulary is sharded, stages beyond the model's are no layers: nothing here runs such steps yet, nor slices.
PLAIN = [one.name for one in SYSTEMS if one.feature in ("", "offload")]
OFFLOADED = [one.name for one in SYSTEMS if one.copies is not None]
MIRRORED = [one.name for one in SYSTEMS if one.placement == "mirror"]
CASES = {
    **{name: {"name": name} for name in PLAIN},
    **{f"{name} C": {"name": name, "options": {"exchange": 1}} for name in MIRRORED},
    **{f"{name} AF": {"name": name, "options": {"AF": 3}} for name in ("1f1b", "zb-h1", "zb-v", "interleaved")},
    "dualpipe C AF AB": {"name": "dualpipe", "options": {"exchange": 1, "AF": 2, "AB": 3}},
    "chimera two pairs": {"name": "chimera", "options": {"exchange": 1, "routes": mirror(RANKS, 2)}},
}
ASYNCHRONOUS = [one.name for one in SYSTEMS if one.group == "asynchronous"]
OTHER = ("crossing", "unlike", "refused")
UPDATES = {
    "2bw": {"name": "pipedream-2bw", "every": 4, "microbatches": 16},
    "2bw momentum": {"name": "pipedream-2bw", "every": 4, "microbatches": 12, "options": {"momentum": 0.9}},
    "2bw adam, split, any order": {
        "name": "pipedream-2bw",
        "every": 4,
        "microbatches": 12,
        "split": True,
        "optimizer": "Adam",
        "options": {"lr": 0.002},
        "random": 5,
    },
    "pipedream": {"name": "pipedream", "every": 1, "microbatches": 12},
    "pipedream AF": {"name": "pipedream", "every": 1, "microbatches": 8, "around": {"AF": 1}},
    "pipedream split, any order": {"name": "pipedream", "every": 1, "microbatches": 8, "split": True, "random": 2},
}


@pytest.fixture(scope="module")
def ran() -> dict[str, list[dict[str, Any]]]:
    """What every case gave on each rank; one process group for all."""
    size = {"ranks": RANKS, "microbatches": MICROBATCHES}
    jobs = [*(("run_system", {**size, **case}) for case in CASES.values()), *((name, None) for name in OTHER)]
    jobs += [("trains", name) for name in ASYNCHRONOUS]
    jobs += [("run_updates", {**size, **case}) for case in UPDATES.values()]
    found = on_ranks(RANKS, "tests.support.systems_jobs", jobs)
    return {
        name: [one[i] for one in found]
        for i, name in enumerate([*CASES, *OTHER, *(f"train {name}" for name in ASYNCHRONOUS), *UPDATES])
    }


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_the_unsplit_model(ran: dict[str, list[dict[str, Any]]], case: str) -> None:
    for rank in ran[case]:
        assert rank["worst"] <= 1e-12
        assert rank["loss"] <= 1e-12
        assert rank["live"] == 0
        assert rank["early"] == 0
    copies = 4 if "pairs" in case else 2 if case.split()[0] in MIRRORED else 1
    assert sum(rank["tensors"] for rank in ran[case]) == 4 * ran[case][0]["layers"] * copies


@pytest.mark.parametrize("case", CASES)
def test_memory_is_as_simulated(ran: dict[str, list[dict[str, Any]]], case: str) -> None:
    for rank in ran[case]:
        live, simulated = rank["microbatches"]
        assert live == simulated or (case in OFFLOADED and live > simulated)  # what lies in host memory lives as well
        measured, predicted = rank["bytes"]
        assert measured == pytest.approx(predicted, abs=INNER / 2)  # messages come and go at any time


@pytest.mark.parametrize("case", UPDATES)
def test_updates_follow_their_rule(ran: dict[str, list[dict[str, Any]]], case: str) -> None:
    """Weights after three steps of many groups, against one process that follows the papers' rules."""
    for rank in ran[case]:
        assert rank["worst"] <= 1e-12
        assert rank["loss"] <= 1e-12
        assert rank["moved"] > 1e-3
        assert rank["left"] == 0


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_training_with_old_weights_goes_down(ran: dict[str, list[list[float]]], name: str) -> None:
    losses = ran[f"train {name}"][0]
    assert losses == ran[f"train {name}"][3]
    assert losses[-1] < losses[0] - 1  # nats a byte of a text


@pytest.mark.parametrize("case", UPDATES)
def test_versions_live_as_simulated(ran: dict[str, list[dict[str, Any]]], case: str) -> None:
    for number, rank in enumerate(ran[case]):
        kept, simulated = rank["versions"]
        if "any order" not in case:  # the graph's lifespans are those of microbatches in turn
            assert kept == simulated == (2 if "2bw" in case else RANKS - number)
        measured, predicted = rank["bytes"]
        assert measured == pytest.approx(predicted, abs=INNER / 2)


def test_updates_that_pipeline_cannot_make_are_refused(ran: dict[str, list[list[str]]]) -> None:
    for said in ran["refused"]:
        assert len(said) == 3
        for one, text in zip(said, ("needs update", "makes no sense", "layer 0's up.weight is tied"), strict=True):
            assert text in one


def test_routes_may_share_a_link_and_tie_layers(ran: dict[str, list[Any]]) -> None:
    assert too_far([{"": one} for one in ran["crossing"]], 1e-12) == {}


def test_copies_begin_alike(ran: dict[str, list[Any]]) -> None:
    for sums in zip(*ran["unlike"], strict=True):
        assert len({one for one in sums if one}) == 1


@pytest.mark.usefixtures("forked")
def test_solved_in_two_directions_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, schedule, trace = (str(tmp_path / f"{name}.json") for name in ("profile", "schedule", "trace"))
    row = {"F": 10, "B": 10, "W": 10, "BW": 20, "parameter_bytes": 8, "output_bytes": 64}
    layers = tuple(Layer(f"layer{i}", held_until_B=64, held_until_W=64, **row) for i in range(8))
    Profile("measured", "mlp-tiny", layers, Link(1.0, 1000.0), 4.0, None, {}, {}).save(profile)
    step = ["--ranks", "2", "--microbatches", "4", "--placement", "mirror", "--effort", "0.1"]
    assert main(["solve", profile, *step, "-o", schedule]) == 0
    capsys.readouterr()
    arguments = ["--model", "mlp-tiny", "--local", "--steps", "2", "--check", "--json", "-o", trace]
    assert main(["run", schedule, *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["check"]["passed"] is True
    assert found["check"]["tensors"] == 2 * 32  # on both ranks
    assert min(Trace.load(trace).peaks[0]) > 0
    assert main(["run", schedule, "--one-device", "cpu", *[one for one in arguments if one != "--local"]]) == 0
    assert json.loads(capsys.readouterr().out)["check"]["passed"] is True


def test_the_checks_own_rule_is_the_papers_and_no_other() -> None:
    """`run --check` reads versions off the graph; against the rules written down by formula, and a wrong one."""
    inputs, targets = batch(12)
    data = Data(dict(enumerate(inputs)), dict(enumerate(targets)))

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    def worst(every: int, delay: Any, name: str) -> float:
        problem = updates(pipeline(1, BW=2, placement=(0, 1, 2), microbatches=12), 1, every=every, delay=delay)
        whole = layers([0, 1, 2])
        loss = check.updated(problem, [[one] for one in whole], data, nn.functional.mse_loss, sgd)
        right, losses = simulated(name, 3, every, inputs, targets, sgd, 1)
        mine = check.values(dict(enumerate(whole)), check.weight)
        found = compare(ALONE, [(0,)] * 3, mine, right, (loss, losses[0]), check.weight)
        assert found is not None
        assert found["passed"] == (found["worst"] <= 1e-6)
        return float(found["worst"])

    assert worst(3, 2, "pipedream-2bw") <= 1e-12
    assert worst(1, [3, 2, 1], "pipedream") <= 1e-12
    assert worst(3, 1, "pipedream-2bw") > 1e-4
    assert worst(1, 1, "pipedream") > 1e-4


@pytest.mark.usefixtures("forked")
def test_updates_inside_a_step_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = pipeline(1, BW=2, placement=(0, 1), microbatches=4, layers=(4, 4))
    path, trace = str(tmp_path / "schedule.json"), str(tmp_path / "trace.json")
    preset("pipedream", updates(step, 1, every=2, delay=2)).save(path)
    for optimizer in ("sgd", "adamw"):
        options = ["--optimizer", optimizer, "--lr", "0.1", "--steps", "3", "--check", "--json"]
        assert main(["run", path, "--model", "mlp-tiny", "--local", *options, "-o", trace]) == 0
        found = json.loads(capsys.readouterr().out)["check"]
        assert found["passed"] is True
        assert (found["compared"], found["tensors"]) == ("weight", 32)
    losses = Trace.load(trace).losses
    assert losses[-1] != losses[0]
