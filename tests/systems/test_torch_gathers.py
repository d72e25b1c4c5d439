"""Torch's rule for gathers, held against torch's own function."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zbsolve import BadInput, pipeline, solve, verify
from zbsolve.build import with_sharding
from zbsolve.cli import main
from zbsolve.systems.table import preset
from zbsolve.systems.torch_gathers import torch_window


def sharded(chunks: int, fused: bool = True):
    stages = 2 * chunks
    backward = {"BW": 60} if fused else {"B": 35, "W": 25}
    step = pipeline(30, **backward, placement=tuple(s % 2 for s in range(stages)), microbatches=8, comm=3, held_until_W=2)
    return with_sharding(step, 12, 15, parameter_bytes=10, gradient_bytes=10)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_it_gathers_where_torch_does(chunks: int, window: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    found = torch_window(preset("interleaved" if chunks > 1 else "1f1b", sharded(chunks)), window)
    assert verify(found.problem, found) == ()
    problem, timeline = found.problem, found.timeline()
    for rank in range(2):
        order = found.order[f"compute:{rank}"]
        kinds = {"F": "F", "BW": "B"}
        rows = [problem.passes[problem.index[name]] for name in order]
        theirs = schedules._add_unshard_reshard(
            [schedules._Action.from_str(f"{one.stage}{kinds[one.kind]}{one.microbatch}") for one in rows], window
        )
        at, issued = 0, []
        for one in theirs:
            if one.computation_type == schedules.UNSHARD:
                issued.append((one.stage_index, at))
            at += one.microbatch_index is not None
        mine = [problem.passes[problem.index[name]] for name in found.order[f"comm:{rank}"]]
        assert [one.stage for one in mine if one.kind == "AG"] == [stage for stage, _ in issued]
        for one, (_, before) in zip([one for one in mine if one.kind == "AG"], issued, strict=True):
            assert before == 0 or timeline[one.name][0] >= timeline[order[before - 1]][1]


def test_few_stages_are_gathered_once_and_many_again_and_again() -> None:
    """Up to three stages a rank nothing is freed before its last use; of four, each round gathers anew."""
    counts = {n: len(torch_window(preset("interleaved", sharded(n))).problem.rows("AG")) for n in (2, 4)}
    assert counts[2] == 4
    assert counts[4] > 8


def test_the_search_begins_from_it_within_its_memory(tmp_path, capsys) -> None:
    """With the same gathers, as passes that may move; and set side by side."""
    theirs = torch_window(preset("interleaved", sharded(4)))
    limit = theirs.timeline().peak_bytes
    ours = solve(replace(theirs.problem, capacity=limit), hint=theirs, effort=0.3)
    assert ours.timeline().value <= theirs.timeline().value
    assert all(a <= b for a, b in zip(ours.timeline().peak_bytes, limit, strict=True))
    ours.save(tmp_path / "ours.json")
    theirs.save(tmp_path / "torch.json")
    assert main(["compare", str(tmp_path / "ours.json"), str(tmp_path / "torch.json")]) == 0
    assert "torch.json" in capsys.readouterr().out


def test_wrong_use_is_named() -> None:
    plain = pipeline(30, 40, 20, placement=(0, 1), microbatches=2)
    with pytest.raises(BadInput, match="torch's window: the problem is not sharded"):
        torch_window(preset("1f1b", plain))
    around = with_sharding(pipeline(30, 40, 20, placement=(0, 1), microbatches=2, AF=4), 5, 5)
    with pytest.raises(BadInput, match="all-to-alls"):
        torch_window(preset("1f1b", around))
