"""What commands refuse, each in one line that names what is wrong: absurd sizes, times and fields that mean nothing."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from zbsolve import BadInput, Infeasible, Profile, pipeline, solve
from zbsolve.cli import main
from zbsolve.cli.tools import search_limits
from zbsolve.exec.run.launch import run_local
from zbsolve.problem.placement import check, parse_routes

from ..support.problems import uniform
from ..support.profiles import toy_profile

HUGE = str(10**8)
STEP = ["--ranks", "2", "--microbatches", "4"]


def refused(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


@pytest.fixture
def edited(tmp_path):
    """Writes the toy profile with its document changed by a function."""

    def write(change) -> str:
        path = tmp_path / "profile.json"
        toy_profile().save(path)
        body = json.loads(path.read_text())
        change(body)
        path.write_text(json.dumps(body))
        return str(path)

    return write


def without_times(kinds):
    def change(body):
        for layer in body["layers"]:
            layer.update(dict.fromkeys(kinds, 0))

    return change


@pytest.mark.parametrize(
    "command",
    [
        ["solve", *STEP, "--frontier"],
        ["solve", *STEP],
        ["solve", *STEP, "--placement", "auto", "--partition", "auto"],
        ["show", "--ranks", "2"],
        ["compare"],
    ],
    ids=" ".join,
)
def test_a_profile_without_times(command, edited, capsys):
    path = edited(without_times(("F", "B", "W", "BW")))
    files = [path, path] if command[0] == "compare" else [path]
    said = refused(capsys, command[0], *files, *command[1:])
    assert said == f"zbsolve {command[0]}: {path}: fields 'F', 'B', 'W' of all layers are 0: nothing takes time\n"


def test_a_profile_without_fused_times_or_with_too_short_ones(edited, capsys):
    path = edited(without_times(("F", "BW")))
    assert "fields 'F', 'BW' of all layers are 0" in refused(capsys, "solve", path, *STEP, "--fused")

    def short(body):
        for layer in body["layers"]:
            layer.update(F=0.1, B=0.1, W=0.1, BW=0.2)

    line = "the passes of all 2 stages round to 0 µs"
    path = edited(short)
    assert line in refused(capsys, "solve", path, *STEP)
    assert line in refused(capsys, "solve", path, *STEP, "--frontier")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["solve", "--ranks", HUGE, "--microbatches", "4"], "100000000 stages, more than zbsolve handles (100000)"),
        (["solve", "--ranks", HUGE, "--microbatches", "4", "--placement", "auto"], "more than zbsolve handles (100000)"),
        (
            ["solve", "--ranks", "4", "--microbatches", "4", "--placement", f"loop{HUGE}"],
            "400000000 stages (100000000 a rank), more",
        ),
        (["solve", "--ranks", HUGE, "--microbatches", "4", "--placement", "mirror"], "200000000 stages (2 a rank), more"),
        (["solve", *STEP, "--placement", f"0,{HUGE}"], "placement: no stage on rank 1 (a hole"),
        (["solve", "--ranks", "2", "--microbatches", HUGE, "--method", "zb-h1"], "than zbsolve handles (1000000 in all)"),
        (["solve", "--ranks", "2", "--microbatches", HUGE, "--partition", "auto"], "than zbsolve handles (1000000 in all)"),
        (["solve", "--ranks", HUGE, "--microbatches", "4", "--frontier"], "more than zbsolve handles (100000)"),
        (["solve", "--ranks", "2", "--microbatches", HUGE, "--frontier"], "more than zbsolve handles (1000000 in all)"),
        (["solve", *STEP, "--frontier", HUGE], "points: 100000000 are more than a frontier has (1000)"),
        (["show", "--ranks", HUGE], "more than zbsolve handles (100000)"),
        (["show", "systems", "--ranks", HUGE], "more than a gallery shows (20000)"),
        (["show", "systems", "--microbatches", HUGE], "more than a gallery shows (20000)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_sizes_beyond_all_use(command, line, edited, capsys):
    """Before anything of that size is made: with 100,000,000 of each, lists alone would take gigabytes."""
    files = [] if "systems" in command else [edited(lambda body: None)]
    assert line in refused(capsys, command[0], *files, *command[1:])


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            ["numbers", "--ranks", "2", "--F", "3ms", "--B", "-3ms", "--W", "1ms", "-o", "-"],
            "numbers: B '-3ms': a time may not be negative",
        ),
        (
            ["numbers", "--ranks", "2", "--F", "-.5", "--BW", "3ms", "-o", "-"],
            "numbers: F '-.5': a time may not be negative",
        ),
        (["solve", "FILE", *STEP, "--memory", "-1GiB"], "solve: memory '-1GiB': a number of bytes may not be negative"),
        (
            ["solve", "FILE", *STEP, "--frontier"],
            "solve: frontier: no pass holds any bytes, so all limits of memory are alike",
        ),
    ],
)
def test_numbers_that_are_negative_or_missing(command, line, edited, capsys):
    """The option that is wrong says so, and no command is named twice."""
    path = edited(lambda body: [layer.update(held_until_B=0, held_until_W=0) for layer in body["layers"]])
    said = refused(capsys, *(path if word == "FILE" else word for word in command))
    assert said.startswith(f"zbsolve {line}")


def test_loading_counts_as_part_of_the_seconds():
    """Up to half of them; a search whose limit is effort does not depend on it."""
    for loading, left in ((0.0, 10.0), (3.0, 7.0), (9.0, 5.0)):
        asked = Namespace(seconds=10.0, effort=None, seed=1, loading=loading)
        assert search_limits(asked) == {"seconds": left, "seed": 1}
        assert search_limits(Namespace(**vars(asked) | {"effort": 2.0})) == {"effort": 2.0, "seed": 1}


def test_more_processes_than_a_machine_starts():
    pytest.importorskip("torch")
    from profiler import measure

    schedule = solve(uniform("single", 4, 4), method="greedy")
    with pytest.raises(BadInput, match="--mesh dp=999999 are 3999996 processes here, more than 1000"):
        run_local(schedule, "mlp-tiny", mesh="dp=999999")
    with pytest.raises(BadInput, match="busy processes 100000000 from 0 to 1000"):
        measure("mlp-tiny", busy_processes=10**8)


def test_placements_are_measured_before_they_are_made():
    assert len(parse_routes("mirror", 4)) == 2
    assert check([0, 1, 0]) == (0, 1, 0)
    for text in (f"loop{'9' * 5000}", f"mirror{'9' * 5000}"):
        with pytest.raises(BadInput):
            parse_routes(text, 4)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda body: body["layers"][1].update(forwrad=3.0), "layers[1]: field 'forwrad' is unknown (one of name, F, B, W,"),
        (lambda body: body["layers"][3].update(all_too_all=3.0), "layers[3]: field 'all_too_all' is unknown"),
        (
            lambda body: body["link"].update(latenzy=3.0),
            "link: field 'latenzy' is unknown (one of latency, bytes_per_us, blocking, shared)",
        ),
        (lambda body: body.update(rank_factor=[1, 2]), "field 'rank_factor' is unknown (one of source, model, layers,"),
    ],
)
def test_a_misspelt_field(change, line, edited, capsys):
    path = edited(change)
    assert f"{path}: {line}" in refused(capsys, "solve", path, *STEP)
    Profile.load(edited(lambda body: body["facts"].update(anything=3.0)))


def test_a_named_schedule_says_where_it_lacks_memory():
    """GPipe holds all microbatches on every rank; here rank 1 has room for one less."""
    problem = pipeline([1, 1], BW=[2, 2], microbatches=5, held_until_W=[2, 300], capacity=[10, 1200])
    with pytest.raises(Infeasible) as refusal:
        solve(problem, method="gpipe")
    line = "gpipe: rank 1 needs 1500 bytes (1.46 KiB) of activations at its peak, but has 1200 bytes (1.17 KiB) for them"
    assert str(refusal.value) == line
    assert solve(problem, method="1f1b").timeline().peak_bytes == (4, 300)


def test_a_profile_where_a_model_is_to_be_measured(capsys, edited) -> None:
    path = edited(lambda body: None)
    said = refused(capsys, "profile", path, "-o", "p.json")
    line = f"zbsolve profile: {path}: a file, and MODEL is a model to measure; solve, show and compare read a profile\n"
    assert said == line
