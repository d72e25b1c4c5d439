"""Numbers in place of a measurement: typed on the command line or into a file, read with units, and never «measured»."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from zbsolve import BadInput, Infeasible, Profile, Schedule, Step
from zbsolve.cli import main
from zbsolve.profile.given import given_profile, stage_columns, values, words_of
from zbsolve.profile.named_steps import step_for

BY_HAND: dict[str, Any] = {
    "zbsolve": "profile",
    "version": 1,
    "model": "my model",
    "capacity": "60GiB",
    "link": {"latency": "5us", "bytes_per_us": "50GB/s"},
    "layers": [
        {"F": "1.2ms", "B": "1.4ms", "W": "900us", "held_until_B": "1.5GiB", "output_bytes": "64MiB"},
        {"F": "2ms", "B": 1500, "W": 1100.5, "BW": "2.5ms", "message": "0.3ms"},
    ],
}


def by_hand(**changed: Any) -> Profile:
    return Profile.from_json(
        {name: value for name, value in {**BY_HAND, **changed}.items() if name[0] not in "zv"}, "p.json"
    )


def test_what_a_person_types_means_what_it_says() -> None:
    profile = by_hand()
    first, second = profile.layers
    assert (profile.source, profile.title) == ("given", "my model (given, not measured)")
    assert (first.name, first.F, first.B, first.W, first.BW) == ("layer0", 1200, 1400, 900, 2300)
    assert (first.held_until_B, first.held_until_W, first.parameter_bytes) == (3 * 2**29, 0, 0)
    assert (second.B, second.W, second.BW) == (1500, 1100.5, 2500)
    assert profile.capacity == 60 * 2**30
    assert profile.link.message(first) == 5 + 2**26 / 50e3
    assert profile.link.message(second) == 300
    assert profile.problem(2, 4).source == "given: my model"


def test_a_saved_one_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    by_hand().save(path)
    assert Profile.load(path) == by_hand()


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"layers": [{"F": 1, "B": 2}]}, "layers[0]: field 'W' is missing: give B and W, or BW alone"),
        ({"layers": [{"B": 1, "W": 2}]}, "layers[0]: field 'F' is missing"),
        ({"layers": [{"F": "12 parsecs", "BW": 2}]}, "layers[0]: field 'F' '12 parsecs': not a time such as 12.1ms"),
        ({"layers": [{"F": -1, "BW": 2}]}, "layers[0]: field 'F' is -1"),
        ({"layers": [{"F": 1, "BW": 2, "output_bytes": "3ms"}]}, "field 'output_bytes' '3ms': not a number of bytes"),
        ({"layers": [{"F": 0, "BW": 0}]}, "of all layers are 0: nothing takes time"),
        ({"layers": [{"F": 1, "BW": 1, "parameter_bytes": 8}]}, "field 'states' is missing: bytes of parameters"),
        ({"layers": [{"F": 1, "BW": 1, "forward": 8}]}, "layers[0]: field 'forward' is unknown"),
        ({"link": {"bytes_per_us": "400Gb/s"}}, "link: field 'bytes_per_us' '400Gb/s': not a bandwidth"),
        ({"source": "guessed"}, "field 'source' is 'guessed', neither 'measured', 'given' nor 'estimated: …'"),
        (
            {"layers": [{"F": 1, "BW": 1, "held_until_B": 3, "held_until_W": 4, "output_kept": 8}]},
            "layers[0]: field 'output_kept' is 8, more than what F keeps (7)",
        ),
        ({"tied": [[9, [0, 1]]]}, "field 'tied': layer 0 shares 9 bytes, and has 0"),
        ({"capacity": "much"}, "field 'capacity' 'much': not a number of bytes"),
    ],
)
def test_a_wrong_field_is_named(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput) as error:
        by_hand(**changed)
    assert str(error.value).startswith("p.json: ")
    assert line in str(error.value)


def test_one_backward_alone_is_one_pass_everywhere() -> None:
    profile = by_hand(layers=[{"F": 10, "BW": 25}, {"F": 12, "BW": 20}])
    assert profile.fused_only
    assert set(profile.problem(2, 3).passes.kinds) == {"F", "BW"}
    assert Step(2, 3, partition="balanced").problem(profile) == Step(2, 3, fused=True).problem(profile)
    with pytest.raises(BadInput, match="zb-h1: needs B and W apart, and profile 'my model' has one backward BW alone"):
        step_for("zb-h1", profile, Step(2, 3))


def test_values_of_stages(tmp_path: Path) -> None:
    assert values("F", "12.1ms", 2) == [{"F": 12100.0}] * 2
    assert values("F", "1us, 900ns,1s", 3) == [{"F": 1.0}, {"F": 0.9}, {"F": 1e6}]
    assert values("activation", "1KiB/2KB,3B/4B,0", 3)[:2] == [
        {"held_until_B": 1024, "held_until_W": 2000},
        {"held_until_B": 3, "held_until_W": 4},
    ]
    assert values("activation", "7MiB", 1) == [{"held_until_W": 7 * 2**20}]
    assert values("comm", "1ms,2ms", 3) == [{"message": 1000.0}, {"message": 2000.0}, {"message": 2000.0}]
    path = tmp_path / "stages.csv"
    # As Excel saves «CSV UTF-8»: behind a byte order mark.
    path.write_text("\ufeffname,F (ms),held_from_B\nfirst, 1.5,2KiB\nlast,2,0\n")
    assert stage_columns(str(path)) == {"name": ["first", "last"], "F": ["1.5ms", "2ms"], "held-from-B": ["2KiB", "0"]}
    assert values("F", f"@{path}", 2) == [{"F": 1500.0}, {"F": 2000.0}]
    path.write_bytes("\ufeff\r\nF (ms);B;W\r\n3;4ms;2ms\r\n".encode())
    assert stage_columns(str(path)) == {"F": ["3ms"], "B": ["4ms"], "W": ["2ms"]}


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"F": "1,2,3"}, "F: 3 values for 2 stages: give one, or one a stage"),
        ({"F": "1,2ms"}, "F: some values have a unit and others have none: write it at each"),
        ({"F": "fast"}, "F 'fast': not a time"),
        ({"activation": "0.4/1.2"}, "activation '0.4': a fraction of a byte: write a unit, such as 0.4GiB"),
        ({"activation": "1/2/3"}, "activation '1/2/3': 2 of them at most"),
        ({"F": "@no.csv"}, "no.csv: no such file"),
        ({"W": "3"}, "B and W are needed, or BW alone"),
        ({"parameters": "2GiB"}, "states is needed with parameters: bytes of parameters, gradients"),
        ({"F": "0", "BW": "0"}, "nothing takes time"),
    ],
)
def test_what_is_given_wrongly_is_named(said: dict[str, str], line: str) -> None:
    with pytest.raises(BadInput) as error:
        given_profile({"ranks": "2", "F": "1", "BW": "2", **said})
    assert line in str(error.value)


def test_numbers_then_solve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each layer is a stage, the memory comes from the file, and every command says that the times are given."""
    path, out = str(tmp_path / "p.json"), str(tmp_path / "s.json")
    numbers = ["numbers", "--ranks", "4", "--F", "12.1ms", "--B", "14ms", "--W", "9ms", "--comm", "0.4ms", "-o", path]
    assert main([*numbers, "--memory", "6GiB", "--activation", "1GiB/0.5GiB"]) == 0
    assert "given: no number here was measured" in capsys.readouterr().out
    step = ["--ranks", "4", "--microbatches", "8"]
    assert main(["solve", path, *step, "--effort", "0.05", "-o", out]) == 0
    assert "times are given: numbers, not measured" in capsys.readouterr().out
    problem = Schedule.load(out).problem
    assert problem.layers == (1, 1, 1, 1)
    assert problem.capacity == (6 * 2**30,) * 4
    assert {problem.passes[i].duration for i in problem.rows("F")} == {12_100}
    assert set(problem.edges.lag.tolist()) == {0, 400}
    for command in (["show", path, "--ranks", "2"], ["solve", path, *step, "--effort", "0.01", "--frontier", "2"]):
        assert main(command) == 0
        assert "times are given, not measured" in capsys.readouterr().out
    assert main(["show", out]) == 0
    assert "(given: numbers)" in capsys.readouterr().out


def test_chunks_columns_and_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, path = tmp_path / "stages.csv", str(tmp_path / "p.json")
    table.write_text("F (us),BW (us)\n" + "".join(f"{10 + i},{20 + i}\n" for i in range(4)))
    numbers = ["numbers", "--ranks", "2", "--chunks", "2", str(table), "-o", path]
    assert main(numbers) == 0
    assert main(["solve", path, "--ranks", "2", "--microbatches", "4", "--method", "interleaved"]) == 0
    assert Profile.load(path).layers[3].F == 13
    capsys.readouterr()
    for more, line in (
        (["--F", "3"], f"F: it is given twice, also in {table}"),
        (["bandwith=50GB/s"], "bandwith: unknown; did you mean bandwidth? (one of ranks, chunks,"),
        (["rank-factors=1,2,3"], "rank-factors 1,2,3: 2 numbers above 0 are needed"),
        (["--chunks", "3"], "F: 4 values for 6 stages"),
        (["--comm", "3", "latency=2"], "comm says how long messages take"),
        (["--latency", "2"], "--latency is no option: write it as a word without --, such as bandwidth=50GB/s"),
        (["host-bandwidth=25GB/s", "host-memory=0"], "host: memory is 0 bytes: more than 0 is needed"),
    ):
        assert main([*numbers, *more]) == 2
        assert line in capsys.readouterr().err
    table.write_text("F,speed\n1,2\n")
    assert main(numbers) == 2
    assert "column 'speed' is unknown (one of name, F, B," in capsys.readouterr().err


def test_all_numbers_in_a_table_or_as_words(tmp_path: Path) -> None:
    """What a JSON object, words between the options and options say is the same; a list is one value a stage."""
    paths = [tmp_path / name for name in ("table.json", "a.json", "b.json")]
    table = {"ranks": 2, "F": ["1ms", "2ms"], "BW": "3ms", "message_bytes": "1MB", "bandwidth": "50GB/s", "blocking": True}
    more = {"rank-factors": [1, 1.5], "host-bandwidth": "25GB/s", "host-bandwidth-both": "20GB/s", "host_ranks": 1}
    paths[0].write_text(json.dumps(table | more | {"model": "mine", "parameters": "1GB", "states": 4}))
    assert main(["numbers", str(paths[0]), "-o", str(paths[1])]) == 0
    words = ["model=mine", "--F", "1ms,2ms", "message-bytes=1MB", "bandwidth=50GB/s", "--parameters", "1GB", "blocking=yes"]
    words += ["--states", "4", "rank-factors=1,1.5", "host-bandwidth=25GB/s", "host-bandwidth-both=20GB/s", "host-ranks=1"]
    assert main(["numbers", "--ranks", "2", "--BW", "3ms", *words, "-o", str(paths[2])]) == 0
    found, other = (Profile.load(path) for path in paths[1:])
    assert found == other
    assert found.host is not None
    assert (found.model, found.rank_factors, found.states, found.host.ranks) == ("mine", (1, 1.5), 4, 1)
    assert (found.host.d2h, found.host.d2h_both, found.link.bytes_per_us) == (25_000, 20_000, 50_000)
    assert (found.link.blocking, [one.F for one in found.layers]) == (True, [1000, 2000])


def test_a_number_may_be_longer_than_a_file_name_can_be() -> None:
    many = ",".join(["1ms"] * 100)
    assert words_of([f"F={many}"], {}) == {"F": many}


def test_too_few_numbers_say_how_to_give_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "numbers.json")
    assert main(["numbers", "--ranks", "4", "--F", "1ms", "--B", "1ms", "--W", "1ms", "-o", path]) == 0
    for ranks, placement, enough in (("4", "vee", "--ranks 4 --chunks 2"), ("5", "single", "--ranks 5")):
        assert main(["solve", path, "--ranks", ranks, "--microbatches", "8", "--placement", placement]) == 2
        assert capsys.readouterr().err.endswith(f" stages: give as many with zbsolve numbers {enough}\n")
    assert main(["solve", path, "--ranks", "4", "--microbatches", "8", "--method", "1f1b,zb-v"]) == 0
    assert "zb-v: cannot be: partition: 4 layers do not make 8 stages: give as many with" in capsys.readouterr().out
    assert main(["solve", path, "--ranks", "4", "--microbatches", "4", "--placement", "auto", "--effort", "0.1"]) == 0
    assert "give as many with zbsolve numbers --ranks 4 --chunks 2" in capsys.readouterr().out


def test_what_rounding_changes_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "p.json")
    numbers = ["numbers", "--ranks", "2", "-o", path]
    assert main([*numbers, "--F", "1.4", "--B", "1.6", "--W", "1.5"]) == 0
    line = "times are rounded to whole µs: W of stage 1, 1.5 µs, counts as 2 µs."
    assert line in capsys.readouterr().err
    assert main(["solve", path, "--ranks", "2", "--microbatches", "2", "--effort", "0.01", "--json"]) == 0
    assert line in capsys.readouterr().err
    assert main([*numbers, "--F", "14.1ms", "--B", "16.0004ms", "--W", "0.4us", "--comm", "0.4us"]) == 0
    assert capsys.readouterr().err == ""


def test_times_with_and_without_a_unit_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["numbers", "--ranks", "2", "-o", str(tmp_path / "p.json"), "--B", "14ms", "--W", "9ms,9ms"]
    assert main([*numbers, "--F", "12", "--comm", "0"]) == 0
    assert capsys.readouterr() == (ANY, "zbsolve numbers: a time without a unit counts in µs: F 12 µs\n")
    assert main([*numbers, "--F", "12ms"]) == 0
    assert "messages take no time" in capsys.readouterr().out


def test_stages_that_are_joined_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = str(tmp_path / "p.json")
    assert main(["numbers", "--ranks", "2", "--chunks", "2", "--F", "10", "--B", "10", "--W", "10", "-o", profile]) == 0
    step = ["solve", profile, "--ranks", "2", "--microbatches", "2", "--effort", "0.1", "-o", str(tmp_path / "s.json")]
    told = {}
    for more in ((), ("--placement", "single"), ("--placement", "vee"), ("--method", "zb-v"), ("--partition", "equal")):
        capsys.readouterr()
        assert main([*step, *more]) == 0
        told[more] = capsys.readouterr().err
    assert "4 layers on 2 stages: neighbours are joined, 2 a stage; --placement vee or loop gives" in told.pop(())
    assert not any("joined" in text for text in told.values())
    assert main([*step[:3], "3", *step[4:]]) == 0
    assert "4 layers on 3 stages: neighbours are joined, 1×2 2 a stage\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "layers", "said"),
    [
        ("1f1b", 4, "4 layers on 2 stages: neighbours are joined, 2 a stage\n"),
        ("zb-v", 8, "8 layers on 4 stages: neighbours are joined, 2 a stage\n"),
        (
            "interleaved:2",
            8,
            "8 layers on 4 stages: neighbours are joined, 2 a stage; --placement loop4 gives each layer its own stage\n",
        ),
        ("interleaved", 4, ""),
        ("1f1b", 6, "6 layers on 2 stages: neighbours are joined, 3 a stage\n"),
    ],
)
def test_named_methods_tell_what_is_joined(
    method: str, layers: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = str(tmp_path / "p.json")
    numbers = ["numbers", "--ranks", "2", "--chunks", str(layers // 2), "--F", "9", "--B", "9", "--W", "9"]
    assert main([*numbers, "-o", profile]) == 0
    capsys.readouterr()
    assert main(["solve", profile, "--ranks", "2", "--microbatches", "4", "--method", method]) == 0
    assert capsys.readouterr().err == f"{'zbsolve solve: ' if said else ''}{said}"


# Ranks that are not alike


def test_each_rank_may_have_a_memory_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two fast ranks with 16 GB and two with half the speed and 8 GB: 408 ms, where 8 GB on all make it 648."""
    path, out = tmp_path / "mixed.json", tmp_path / "schedule.json"
    layer = {"F": "1ms", "B": "1ms", "W": "1ms", "held_until_W": "500MB"}
    by_hand(rank_factors=[1, 1, 2, 2], layers=[layer] * 24, capacity=None, link={}).save(path)
    said = ["solve", str(path), "--ranks", "4", "--microbatches", "16", "--effort", "0.2", "-o", str(out)]
    assert main([*said, "--memory", "16GB,16GB,8GB,8GB"]) == 0
    found = Schedule.load(out)
    assert found.problem.capacity == (16 * 10**9, 16 * 10**9, 8 * 10**9, 8 * 10**9)
    assert found.certificate is not None
    assert (found.certificate.value, found.certificate.gap) == (408_000, 0)
    capsys.readouterr()
    for memory, line, code in (
        ("16GB,16GB,8GB", "memory '16GB,16GB,8GB': 3 numbers for 4 ranks: give one, or one a rank", 2),
        ("16GB,16GB,8GB,", "memory '16GB,16GB,8GB,': none for rank 3: give one number, or one a rank", 2),
        ("16GB,,8GB,8GB", "memory '16GB,,8GB,8GB': none for rank 1: give one number, or one a rank", 2),
        ("16GB,16GB,8GB,1GB", "rank 3 needs 2000000000 bytes (1.86 GiB) for one microbatch, but has 1000000000", 1),
        ("16GB,16GB,8,8", "of 16000000000 bytes (14.9 GiB) or 8 bytes (a number without a unit is bytes", 1),
    ):
        assert main([*said, "--memory", memory]) == code
        assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["numbers", "--ranks", "2", "--F", "1ms", "--BW", "2ms", "-o", "-"],
        ["plan", "gpt-3.6b", "--devices", "8", "--batch", "8", "--cluster", "a100"],
    ],
)
def test_commands_with_one_memory_say_so(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--memory", "16GB,8GB"]) == 2
    assert "memory '16GB,8GB': one number for all is needed here, no list" in capsys.readouterr().err


def test_a_rank_whose_memory_is_too_small_is_named_with_it() -> None:
    profile = by_hand(states=4, layers=[{"F": 1, "BW": 2, "parameter_bytes": "1GB"}] * 2)
    with pytest.raises(Infeasible, match=r"rank 1 needs 4000000000 bytes .* more than its memory of 3GB$"):
        profile.problem(2, 4, memory="5GB,3GB")
    assert profile.problem(2, 4, memory="5GB,4GB").capacity == (10**9, 0)


def test_the_work_of_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F + B + W of stages 0 to 3: 3, 4, 5, 6 ms; rank 1 takes 1.5 times as long. As a loop the ranks have 3 + 5 and 4 + 6,
    in a V 3 + 6 and 4 + 5."""
    times = ["--F", "1ms,2ms,3ms,4ms", "--B", "1ms", "--W", "1ms", "rank-factors=1,1.5"]
    given = ["--ranks", "2", "--chunks", "2", *times]
    assert main(["numbers", *given, "-o", str(tmp_path / "profile.json")]) == 0
    loop, vee = capsys.readouterr().out.splitlines()[-2:]
    assert loop == "work of the ranks in a microbatch (loop), ms: 8.00 15.00; rank 1 works 1.304 times the mean"
    assert vee == "work of the ranks in a microbatch (vee), ms: 9.00 13.50; rank 1 works 1.200 times the mean"
