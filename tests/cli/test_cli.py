"""The command line as scripts use it: files in, files out, exit codes, one line for what a user did wrong."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest

from zbsolve import Schedule, __version__, solve
from zbsolve.cli import app
from zbsolve.cli.app import COMMANDS, main, parser
from zbsolve.cli.tools import compiling
from zbsolve.util.errors import interruption

from ..support.problems import uniform
from ..support.profiles import toy_profile


@pytest.fixture
def measured(tmp_path):
    path = tmp_path / "profile.json"
    toy_profile().save(path)
    return str(path)


def zbsolve(*arguments, stdin=None):
    return subprocess.run(
        [sys.executable, "-m", "zbsolve", *arguments], input=stdin, capture_output=True, text=True, timeout=300
    )


def test_solve_then_check(measured, tmp_path, capsys):
    out = str(tmp_path / "schedule.json")
    assert main(["solve", measured, "--ranks", "2", "--microbatches", "4", "--json", "-o", out]) == 0
    certificate = json.loads(capsys.readouterr().out)
    assert certificate["status"] == "optimal"
    assert certificate["value"] == Schedule.load(out).timeline().value
    assert main(["check", out]) == 0
    assert "holds (24 passes)" in capsys.readouterr().out


@pytest.mark.slow
def test_pipes(measured):
    solved = zbsolve("solve", measured, "--ranks", "2", "--microbatches", "2", "-o", "-")
    assert solved.returncode == 0, solved.stderr
    checked = zbsolve("check", "-", stdin=solved.stdout)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_hint_at_bound_is_given_once_and_not_once_it_is_proven(measured, tmp_path, capsys):
    out, hint = str(tmp_path / "schedule.json"), "(check --bound proves it again, if it holds)"
    assert main(["solve", measured, "--ranks", "2", "--microbatches", "4", "-o", out]) == 0
    found = Schedule.load(out)
    for certificate in (found.certificate, found.certificate.unchecked()):
        found.certified(certificate).save(out)
        capsys.readouterr()
        assert main(["check", out]) == 0
        said = capsys.readouterr().out
        assert said.endswith(f"; not proven here {hint}\n")
        assert said.count("--bound") == said.count("file says") == 1
        for more in ([], ["-o", out]):
            assert main(["check", out, "--bound", "--seconds", "5", *more]) == 0
            said = capsys.readouterr().out
            assert "proven optimal" in said
            assert "file says" not in said
            assert said.count("\nproven ") == 1


def test_check_fails_and_names_the_pass(measured, tmp_path, capsys):
    out = tmp_path / "schedule.json"
    assert main(["solve", measured, "--ranks", "2", "--microbatches", "8", "--method", "1f1b", "-o", str(out)]) == 0
    body = json.loads(out.read_text())
    order = body["order"]["compute:1"].split()
    body["order"]["compute:1"] = " ".join(order[::-1])
    out.write_text(json.dumps(body))
    capsys.readouterr()
    assert main(["check", str(out)]) == 1
    assert "deadlock" in capsys.readouterr().out
    body["order"]["compute:1"] = " ".join(order[1:])
    out.write_text(json.dumps(body))
    assert main(["check", "--json", str(out)]) == 1
    assert json.loads(capsys.readouterr().out)[0]["rule"] == "missing"
    body["order"] = {"compute:0": [], "compute:1": []}
    out.write_text(json.dumps(body))
    assert main(["check", str(out)]) == 1
    *missing, more = capsys.readouterr().out.splitlines()
    assert all("missing: compute:0 does not list 0" in line or "compute:1 does not list 1" in line for line in missing)
    assert len(missing) == 20
    assert more == f"and {2 * len(order) - 20} more (--json has all)"


@pytest.mark.parametrize(
    ("arguments", "line", "code"),
    [
        (["--ranks", "2", "--microbatches", "0"], "microbatches: at least 1 is needed", 2),
        (["--ranks", "2", "--microbatches", "2", "--placement", "0,2"], "a hole", 2),
        (["--ranks", "3", "--microbatches", "2", "--placement", "0,1"], "names 2 ranks, but there are 3", 2),
        (["--ranks", "9", "--microbatches", "2"], "4 layers do not make 9 stages", 2),
        (["--ranks", "0", "--microbatches", "2"], "ranks: at least 1 is needed, got 0", 2),
        (["--ranks", "2", "--microbatches", "2", "--memory", "8100"], "rank 0 needs 300 bytes for one microbatch", 1),
        (["--ranks", "2", "--microbatches", "2", "--memory", "7.9KB"], "more than its memory of 7.9KB\n", 1),
        (["--ranks", "2", "--microbatches", "2", "--memory", "60"], "60 bytes (a number without a unit is bytes", 1),
        (["--ranks", "2", "--microbatches", "2", "--memory", "lots"], "memory 'lots'", 2),
        (["--ranks", "2", "--microbatches", "2", "--method", "magic"], "method 'magic'", 2),
        (["--ranks", "2", "--microbatches", "2", "--seconds", "-1"], "seconds", 2),
        (["--ranks", "2", "--microbatches", "2", "--effort", "0"], "effort: 0 is not a positive number", 2),
        (["--ranks", "2", "--microbatches", "2", "--hint", "none.json"], "none.json: no such file", 2),
        (["--ranks", "5", "--microbatches", "2", "--placement", "auto"], "4 layers do not make 5 stages", 2),
        (["--ranks", "2", "--microbatches", "2", "-o", "/no/such/place/s.json"], "/no/such/place/s.json: cannot write", 2),
    ],
)
def test_bad_input_is_one_line(measured, capsys, arguments, line, code):
    assert main(["solve", measured, *arguments]) == code
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_effort_gives_the_same_file_byte_for_byte(measured, tmp_path):
    step = ["solve", measured, "--ranks", "2", "--microbatches", "5", "--effort", "0.3", "--seed", "3"]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        assert main([*step, "-o", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_took_no_time_says_none(measured, capsys):
    step = ["solve", measured, "--ranks", "2", "--microbatches", "3", "--method", "greedy"]
    assert main([*step, "--seconds", "5"]) == 0
    assert re.search(r", found by [\w -]+ in \d+\.\d s\n", capsys.readouterr().out)
    assert main([*step, "--effort", "0.1"]) == 0
    assert re.search(r", found by [\w -]+\n", capsys.readouterr().out)
    assert main([*step, "--effort", "0.1", "--placement", "mirrored"]) == 2
    assert "mirror, ranks such as 0,2,1,3, or (for solve) auto" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_defaults(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in shown.split("\n  --"):
        known = option.startswith(("seconds ", "seed ", "placement ", "steps ", "lr "))
        assert not known or "(default: " in option, option
    assert "(default: None)" not in shown
    assert "(default: False)" not in shown


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"zbsolve {__version__}\n"


def test_a_hint_is_where_the_search_starts(measured, tmp_path, capsys):
    first, again = str(tmp_path / "first.json"), str(tmp_path / "again.json")
    step = ["solve", measured, "--ranks", "2", "--microbatches", "4"]
    assert main([*step, "-o", first]) == 0
    assert main([*step, "--hint", first, "--effort", "0.1", "-o", again]) == 0
    values = [Schedule.load(path).timeline().value for path in (first, again)]
    assert values[1] <= values[0]
    assert "hint" not in Schedule.load(again).certificate.solver
    assert main(["solve", measured, "--ranks", "2", "--microbatches", "3", "--hint", first, "--effort", "0.1"]) == 2
    assert "other passes than the problem: the hint has 4 microbatches, the problem 3\n" in capsys.readouterr().err


def test_placement_auto_shows_what_lost(measured, tmp_path, capsys):
    out = str(tmp_path / "schedule.json")
    step = ["solve", measured, "--ranks", "2", "--microbatches", "3", "--placement", "auto", "--effort", "0.3"]
    assert main([*step, "-o", out]) == 0
    shown = capsys.readouterr().out
    assert "best" in shown
    assert "partition: 4 layers do not make 8 stages" in shown
    assert main([*step, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [one["placement"] for one in body["tried"]] == ["single", "loop", "loop4", "vee"]
    assert body["value"] == Schedule.load(out).timeline().value


def test_progress_on_a_terminal_only(measured, monkeypatch, capsys):
    step = ["solve", measured, "--ranks", "2", "--microbatches", "3", "--effort", "0.1"]
    assert main(step) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(step) == 0
    line = capsys.readouterr().err
    assert "bound " in line
    assert "\n" not in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_writes_the_incumbent(number, measured, tmp_path, monkeypatch, capsys):
    pressed = []

    def press(search, where, state):
        if state.schedule is not None and not pressed:
            pressed.append(True)
            signal.raise_signal(number)

    monkeypatch.setattr("zbsolve.cli.tools.Search.show", press)
    out, before = str(tmp_path / "schedule.json"), signal.getsignal(number)
    for placement in ("vee", "auto"):
        pressed.clear()
        step = ["solve", measured, "--ranks", "2", "--microbatches", "6", "--placement", placement, "--seconds", "50"]
        assert main([*step, "-o", out]) == 0
        said = capsys.readouterr().err.splitlines()  # the other line: the profile's times are not whole
        assert [line for line in said if "rounded" not in line] == [
            "zbsolve solve: interrupted: this is the best found until then"
        ]
        assert main(["check", out]) == 0
        assert signal.getsignal(number) is before


def test_check_proves_the_bound_again(measured, tmp_path, capsys):
    out = tmp_path / "schedule.json"
    step = ["solve", measured, "--ranks", "2", "--microbatches", "2", "--method", "greedy", "-o", str(out)]
    assert main(step) == 0
    assert main(["check", "--bound", str(out)]) == 0
    assert "proven again" in capsys.readouterr().out
    body = json.loads(out.read_text())
    body["certificate"]["bound"] = body["certificate"]["value"] = body["certificate"]["value"] * 2
    out.write_text(json.dumps(body))
    assert main(["check", "--bound", str(out)]) == 1
    body = json.loads(out.read_text())
    body["certificate"] = None
    out.write_text(json.dumps(body))
    capsys.readouterr()
    assert main(["check", "--bound", "--seconds", "2", str(out)]) == 0
    assert "\nproven now: " in capsys.readouterr().out
    assert main(["check", str(out)]) == 0


def test_check_with_a_bound_as_json(measured, tmp_path, capsys):
    out = tmp_path / "schedule.json"
    assert main(["solve", measured, "--ranks", "2", "--microbatches", "2", "--method", "greedy", "-o", str(out)]) == 0
    body = json.loads(out.read_text())
    stated = {name: body["certificate"][name] for name in ("value", "bound", "gap", "status")}

    def checked(code, *words):
        capsys.readouterr()
        assert main(["check", str(out), "--json", *words]) == code
        return json.loads(capsys.readouterr().out)

    assert checked(0) == []
    assert checked(0, "--bound") == {"violations": [], **stated}
    body["certificate"]["bound"] = body["certificate"]["value"] = body["certificate"]["value"] * 2
    out.write_text(json.dumps(body))
    found = checked(1, "--bound")
    assert found.pop("violations")
    assert found == dict.fromkeys(stated)


def test_missing_and_truncated_files(tmp_path, capsys):
    assert main(["check", str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err
    broken = tmp_path / "broken.json"
    broken.write_text('{"zbsolve": "schedule", "ver')
    assert main(["check", str(broken)]) == 2
    assert "damaged JSON" in capsys.readouterr().err
    broken.write_text("0F0 0B0 0W0")
    for command in ("check", "show"):
        assert main([command, str(broken)]) == 2
        assert "zbsolve import reads orders by hand" in capsys.readouterr().err


def test_pictures_of_what_solve_found(tmp_path, capsys):
    """Of a step whose passes are too many to be drawn: its round. Who draws nothing refuses the ending, before any work."""
    given, out, page = (str(tmp_path / name) for name in ("given.json", "out.json", "out.html"))
    assert main(["numbers", "--ranks", "2", "--F", "2ms", "--B", "2ms", "--W", "1ms", "-o", given]) == 0
    step = ["solve", given, "--ranks", "2", "--effort", "0.1", "-o", page, "-o", out]
    for microbatches, passes in (("4", "24 passes"), ("600000", "part of a step of 600,000 microbatches")):
        assert main([*step, "--microbatches", microbatches]) == 0
        assert passes in (tmp_path / "out.html").read_text()
        capsys.readouterr()
        assert main(["show", out]) == 0
        said = capsys.readouterr().out
        assert passes in said
        assert ("a file says" in said) == (microbatches != "4")  # a short step's bound is proven again
    for command in (["check", out, "-o", page], ["plan", "-o", str(tmp_path / "x.svg")], [*step, "-o", "x.txt"]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"{command[-1]}: unknown ending; '{command[0]}' writes .json" in said
        assert ("'show' draws" in said) == (command[-1] != "x.txt")
    assert main([*step, "-o", str(tmp_path / "x.svg.gz")]) == 2
    assert main([*step, "--microbatches", "4", "-o", str(tmp_path / "gpt-1.5b")]) == 0  # a number's dot begins no ending


def test_files_beside_one_that_cannot_be_drawn_are_written(tmp_path, capsys, monkeypatch):
    given, out = str(tmp_path / "given.json"), tmp_path / "out.json"
    assert main(["numbers", "--ranks", "2", "--F", "2ms", "--B", "2ms", "--W", "1ms", "-o", given]) == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    step = ["solve", given, "--ranks", "2", "--microbatches", "2", "--effort", "0.1"]
    assert main([*step, "-o", str(tmp_path / "x.pdf"), "-o", str(out)]) == 2
    assert "PDF and PNG need matplotlib" in capsys.readouterr().err
    assert out.exists()


def test_what_went_says_what_to_write_now(capsys):
    (known,) = (one for one in parser()._actions if isinstance(one, argparse._SubParsersAction))
    assert len(app.moved()) > 20
    for commands, options, instead in app.moved():
        for command in commands.split():
            gone = app.removed(options)
            assert command in known.choices if options else command not in known.choices
            if not options:
                assert main([command, "p.json"]) == 2
                assert capsys.readouterr().err == f"zbsolve {command}: is no command: {instead}\n"
            for option in gone:
                assert main([command, f"{option}=1"]) == 2
                assert capsys.readouterr().err == f"zbsolve {command}: {option} is no option: {instead}\n"
                assert option not in known.choices[command]._option_string_actions


def test_debug_stands_anywhere(capsys):
    for words in (["--debug", "check", "none.json"], ["check", "--debug", "none.json"], ["check", "none.json", "--debug"]):
        assert main(words) == 2
        assert "CannotRead: none.json: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("solve", "zbsolve solve: the following arguments are required: profile (see zbsolve solve --help)"),
        ("solve x.json --dance 3", "zbsolve solve: unrecognized: --dance 3 (see zbsolve solve --help)"),
        ("numbers --ranks 2 --F 1 --BW -3ms -o x", "zbsolve numbers: BW '-3ms': a time may not be negative"),
        ("dance", "zbsolve: argument COMMAND: invalid choice: 'dance'"),
    ],
)
def test_bad_use_is_one_line_and_exits_with_2(words, line):
    done = zbsolve(*words.split())
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


def test_outputs_are_refused_before_the_work(measured, tmp_path, capsys):
    work = ["solve", measured, "--ranks", "2", "--microbatches", "2"]
    for path, line in (
        (str(tmp_path), "a file name is needed"),
        ("", "a file name is needed"),
        ("/no/x.json", "no such folder"),
    ):
        assert main([*work, "-o", path]) == 2
        assert line in capsys.readouterr().err
    assert main([*work, "--json", "-o", "-"]) == 2
    assert "both want standard output" in capsys.readouterr().err


def test_links_are_followed_and_pipes_written_into(measured, tmp_path):
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.write_text("before")
    link.symlink_to(real)
    assert main(["solve", measured, "--ranks", "2", "--microbatches", "2", "-o", str(link)]) == 0
    assert link.is_symlink()
    assert Schedule.load(real).certificate.status == "optimal"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    assert main(["solve", measured, "--ranks", "2", "--microbatches", "2", "-o", str(pipe)]) == 0
    text, _ = reader.communicate(timeout=300)
    assert json.loads(text)["zbsolve"] == "schedule"
    assert pipe.is_fifo()


def test_a_forged_status_is_found(measured, tmp_path, capsys):
    path = tmp_path / "s.json"
    assert main(["solve", measured, "--ranks", "2", "--microbatches", "4", "--method", "gpipe", "-o", str(path)]) == 0
    body = json.loads(path.read_text())
    body["certificate"].update(bound=10, status="optimal", gap=0.0)
    path.write_text(json.dumps(body))
    capsys.readouterr()
    assert main(["check", str(path)]) == 2
    assert "field 'status' is optimal, but value and bound say otherwise" in capsys.readouterr().err


def test_the_proof_that_check_prints_is_its_own(tmp_path, capsys):
    schedule = solve(uniform("single", 3, 5, (3, 4, 2), 3), seconds=5)
    forged = schedule.certified(replace(schedule.certificate, proof="trust me"))
    path = tmp_path / "forged.json"
    forged.save(path)
    assert main(["check", "--bound", str(path)]) == 0
    said = capsys.readouterr().out
    assert "proven again" in said
    assert "trust me" not in said


def test_a_signal_in_compiled_code_is_an_interruption():
    """numba raises SystemError from the KeyboardInterrupt of a signal that came while a kernel ran."""
    try:
        try:
            raise KeyboardInterrupt(15)
        except KeyboardInterrupt as pressed:
            raise SystemError("a function returned a result with an exception set") from pressed
    except SystemError as error:
        found = interruption(error)
    assert found is not None
    assert found.args == (15,)
    assert interruption(SystemError("another")) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_that_a_compiler_ignores_is_an_interruption(number, fails):
    """LLVM's callbacks print exceptions and go on; numba may then miss what the callback should have kept."""

    def compile_all():
        with compiling("solve"):
            with suppress(KeyboardInterrupt):
                signal.raise_signal(number)
            if fails:
                raise RuntimeError("no compiled object yet")

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as pressed:
        compile_all()
    assert pressed.value.args == (number,)
    assert signal.getsignal(number) is before
