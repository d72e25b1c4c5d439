"""Files of rounds run a rank at a time: programs, times and gradients are those of the whole schedule."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zbsolve import BadInput, Problem, pipeline
from zbsolve.cli.app import main
from zbsolve.exec import PostValidated
from zbsolve.exec.base.program import Message, Program
from zbsolve.exec.lowering import lower
from zbsolve.exec.memory import predicted
from zbsolve.exec.reports import RunNumbers
from zbsolve.exec.run.launch import run_local
from zbsolve.exec.step_view import StepView
from zbsolve.long_steps import files
from zbsolve.long_steps.check import CheckedRounds, earliest_starts
from zbsolve.long_steps.repeated import RepeatedSchedule, find_round, times_apart
from zbsolve.schedule.trace import Trace
from zbsolve.systems.table import lane_order, long_systems_of

from ..support.exec_ranks import on_ranks, torchrun
from ..support.exec_tools import refusal, toy
from ..support.trials import Trial, too_far

CHUNKS = {"single": 1, "loop": 2, "vee": 2}


def one_microbatch(placement: str, ranks: int, fused: bool = False) -> Problem:
    stages = ranks * CHUNKS[placement]
    backward = {"BW": [400] * stages} if fused else {"B": [200] * stages, "W": [180] * stages}
    held = {"held_until_B": 4096, "held_until_W": 2048}
    return pipeline([200] * stages, **backward, placement=placement, microbatches=1, comm=10, layers=[1] * stages, **held)


@cache
def repeated(placement: str, ranks: int, rounds: int = 3, fused: bool = False) -> RepeatedSchedule:
    """The step with `rounds` more rounds than the fewest microbatches of a named schedule that show its rounds."""
    one = one_microbatch(placement, ranks, fused)
    for system in long_systems_of(one):
        for every in (one.ranks,) if system.grouped else (1, ranks - 1, ranks):
            for few in (every * n for n in range(4, 16 * ranks)):
                order = lane_order(one, few, system)
                start = earliest_starts(one, few, order)
                round = find_round(one, order, start, every)
                if round is not None and (times_apart(round, start) == round.period).all():
                    return RepeatedSchedule(one, few + rounds * every, few, order, round)
    raise AssertionError(f"{placement} on {ranks} ranks: no named schedule shows rounds")


STEPS = [("single", 2, False), ("single", 4, False), ("single", 3, True), ("loop", 4, False), ("vee", 3, False)]


def plain(program: Program) -> Any:
    """A program with its messages as values, so that two lowerings can be compared."""

    def value(one: Any) -> Any:
        if isinstance(one, Message):
            return tuple(getattr(one, field.name) for field in fields(one))
        return tuple(map(value, one)) if isinstance(one, tuple) else one

    actions = [[value(getattr(one, field.name)) for field in fields(one)] for one in program.actions]
    incoming = {source: value(sent) for source, sent in program.incoming.items()}
    return program.rank, actions, incoming, program.stages, program.inputs, program.targets


@pytest.mark.parametrize(("placement", "ranks", "fused"), STEPS)
@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_a_ranks_part_is_lowered_as_the_whole_is(placement: str, ranks: int, fused: bool, rounds: int) -> None:
    long = repeated(placement, ranks, rounds, fused)
    checked, whole = CheckedRounds.of(long), StepView.of(long.unrolled())
    timeline = whole.schedule.timeline()
    assert checked.makespan == timeline.makespan
    for program in lower(whole):
        part = checked.part(program.rank)
        view = StepView.of(part)
        (mine,) = lower(view)
        assert plain(mine) == plain(program)
        assert part.window == tuple(int(one[program.rank]) for one in timeline.windows)
        assert predicted(view.schedule, mine, lambda message: 7) == predicted(whole.schedule, program, lambda message: 7)
        assert (view.messages, view.passes, view.microbatches) == (whole.messages, whole.passes, whole.microbatches)
        for name, row in view.rows.items():
            assert whole.rows[name] == row
            assert view.schedule.timeline()[name] == timeline[name]


@pytest.mark.parametrize("placement", ["single", "loop", "vee"])
def test_forwards_alone_have_the_wholes_order_and_messages(placement: str) -> None:
    long = repeated(placement, 4)
    checked = CheckedRounds.of(long)
    for program in lower(StepView.of(long.unrolled()).forwards(5), training=False):
        (mine,) = lower(StepView.of(checked.part(program.rank)).forwards(5), training=False)
        assert [one.name for one in mine.actions] == [one.name for one in program.actions]
        assert plain(mine)[2:] == plain(program)[2:]


def test_a_part_goes_with_its_rank_and_not_with_the_step() -> None:
    passes = {}
    for ranks in (4, 16):
        part = CheckedRounds.of(repeated("single", ranks)).part(2)
        problem = part.schedule.problem
        passes[ranks] = len(problem.passes) / part.microbatches
        assert set(np.unique(problem.passes.rank).tolist()) == {1, 2, 3}
    assert passes[4] == passes[16]


def test_rounds_that_do_not_hold_have_no_parts() -> None:
    long = repeated("single", 2)
    wrong = replace(long, round=replace(long.round, period=long.round.period - 1))
    with pytest.raises(BadInput, match="does not start"):
        CheckedRounds.of(wrong)


def test_kinds_that_concern_other_ranks_are_refused() -> None:
    one = one_microbatch("single", 2)
    more = one.passes.more(
        "O", "d2h", stage=np.zeros(1, int), microbatch=np.zeros(1, int), rank=np.zeros(1, int), duration=np.ones(1, int)
    )
    copied = replace(one, passes=more)
    part = replace(CheckedRounds.of(repeated("single", 2)).part(0), one=copied)
    with pytest.raises(BadInput, match="pass 0O0: run knows no passes of its kind in a file of rounds"):
        lower(StepView(part.schedule, copied, part))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("placement", "ranks"), [("single", 2), ("single", 4), ("loop", 2), ("vee", 2)])
@pytest.mark.slow
def test_gradients_are_the_unsplit_models(placement: str, ranks: int, tmp_path: Path, capsys: Any) -> None:
    long, path = repeated(placement, ranks, 12), tmp_path / "rounds.json"
    files.save(long, path)
    model = f"mlp-{long.one.stages}"
    assert main(["run", str(path), "--model", model, "--local", "--check", "--steps", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["check"]["passed"]
    assert said["microbatches"] == long.microbatches
    checked = CheckedRounds.of(long)
    assert said["predicted_windows"] == [list(checked.part(rank).window) for rank in range(ranks)]
    first, last = np.array(said["windows"]).T
    assert said["makespan"] == pytest.approx(last.max() - first.min())
    assert said["span"] == pytest.approx((last - first).max())
    assert len(said["peaks"]) == ranks


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_losses_and_traces_are_those_of_the_schedule_pass_by_pass() -> None:
    long = repeated("vee", 2)
    options: dict[str, Any] = {"steps": 2, "warmup": 1, "emulate": "schedule"}
    numbers = run_local(CheckedRounds.of(long), "mlp-4", **options)
    trace = run_local(CheckedRounds.of(long), "mlp-4", **options, whole_trace=True)
    right = run_local(long.unrolled(), "mlp-4", **options)
    assert isinstance(numbers, RunNumbers)
    assert isinstance(trace, Trace)
    assert numbers.losses == trace.losses == right.losses
    assert numbers.peaks == trace.peaks[0] == right.peaks[0]
    assert numbers.facts["emulated"]["passes"] == right.facts["emulated"]["passes"] == 2 * long.passes
    assert numbers.facts["predicted_peaks"] == trace.facts["predicted_peaks"] == right.facts["predicted_peaks"]
    assert trace.facts["predicted_held"] == right.facts["predicted_held"]
    assert (trace.problem, dict(trace.schedule)) == (right.problem, dict(right.schedule))
    predicted_span = right.planned().timeline().makespan
    for measured in (numbers.makespan, trace.median().makespan, right.median().makespan):
        assert measured >= predicted_span
    for step in trace.steps:
        assert (step.end > step.start).all()


def test_what_needs_all_passes_is_refused(tmp_path: Path, capsys: Any) -> None:
    long, path = replace(repeated("single", 2), microbatches=1_000_000), tmp_path / "rounds.json"
    files.save(long, path)
    for more, why in (
        (["-o", str(tmp_path / "t.json")], "run -o: a trace has a row for each pass: 6,000,000 passes are more than"),
        (["--emulate", "schedule"], "zbsolve run: --emulate: devices tell each other of each pass: 6,000,000 passes"),
        (["--one-device", "cpu"], "6,000,000 passes are more than can be taken one by one"),
    ):
        assert main(["run", str(path), "--model", "mlp-2", "--local", *more]) == 2
        assert why in capsys.readouterr().err
    files.save(repeated("single", 2), path)
    assert main(["run", str(path), "--model", "mlp-2", "--local", "--emulate", "profile.json"]) == 2
    assert "of a file of rounds devices have its own times: schedule" in capsys.readouterr().err


def own_loop(rank: int, placement: str) -> dict[str, Any]:
    """A step and an evaluation of a rank's part, and what is refused."""
    part = CheckedRounds.of(repeated(placement, 2)).part(rank)
    x = torch.linspace(-1, 1, 8 * part.microbatches).reshape(2 * part.microbatches, 4)
    batch = x.chunk(part.microbatches), x.flip(0).chunk(part.microbatches)
    trial = Trial(problem=part, layers=toy, batch=lambda place, step: batch)
    pipe = trial.pipeline()
    ran, sgd = trial.ran(pipe), torch.optim.SGD(pipe.parameters(), lr=0.1)
    result = pipe.step(x, x.flip(0))
    refused = [refusal(lambda: result.timeline), refusal(lambda: PostValidated(pipe, sgd, max_norm=1.0))]
    seen = [pipe.rank, *result.windows.shape[:1]]
    return ran | {"evaluated": trial.evaluated(pipe, [batch]), "refused": refused, "seen": seen}


@pytest.mark.slow
def test_a_rank_of_a_persons_own_loop() -> None:
    """It has a step's loss and windows, evaluates, and refuses what asks for all passes."""
    ranks = on_ranks(2, f"{__name__}:own_loop", "vee")
    assert too_far([{"": one} for one in ranks], 1e-6) == {}
    for rank, one in enumerate(ranks):
        assert one["evaluated"] < 1e-6
        assert one["refused"] == [
            "step: of a file of rounds each rank knows its own passes' times alone",
            "PostValidated: it looks at all ranks' programs, and of a file of rounds each rank has its own",
        ]
        assert one["seen"] == [rank, 2]


@pytest.mark.slow
def test_torchrun_and_files_that_differ(tmp_path: Path) -> None:
    long = repeated("single", 2)
    files.save(long, tmp_path / "0.json")
    files.save(long, tmp_path / "1.json")
    run = "run", str(tmp_path / "RANK.json"), "--model", "mlp-2", "--steps", "1"
    same = torchrun(2, *run, "--check")
    assert same.returncode == 0, same.stderr
    assert "check: right" in same.stdout
    files.save(replace(long, microbatches=long.microbatches + long.round.every), tmp_path / "1.json")
    other = torchrun(2, *run)
    assert other.returncode != 0
    assert "rank 1 has another file of rounds than rank 0" in other.stderr
