"""A certificate's text says what its relaxation leaves out; certificates of older text are proven again all the same."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest

from zbsolve import Problem, pipeline, solve
from zbsolve.cli import main
from zbsolve.ilp.bounds.bound import LEAN_RANKS, RANKS, Bound
from zbsolve.ilp.proof_check import recheck
from zbsolve.ilp.ranks.lanes import Group, group_bound, lanes_of

HELD = {"held_until_B": 1, "held_until_W": 2}
PROBLEMS = {
    "split": pipeline([3, 4], [5, 6], [2, 1], placement=(0, 1), microbatches=4, capacity=[6, 6], **HELD),
    "fused": pipeline([3] * 4, BW=[5] * 4, placement=(0, 1, 0, 1), microbatches=3, capacity=[9, 9], **HELD),
    "mixed vee": pipeline([3] * 6, [4] * 6, [2] * 6, placement="vee", microbatches=3, capacity=[12] * 3, **HELD),
    "all-to-all": pipeline([3] * 3, [4] * 3, [2] * 3, microbatches=4, AF=[0, 4, 2], AB=[1, 2, 0], capacity=[9] * 3, **HELD),
    "recompute": pipeline(
        [3] * 3, [4] * 3, [2] * 3, microbatches=4, recompute="all", held_input=1, capacity=[12] * 3, **HELD
    ),
}
GROUPS = [
    (name, ranks)
    for name, problem in PROBLEMS.items()
    for size in range(1, problem.ranks + 1)
    for ranks in itertools.permutations(range(problem.ranks), size)
]
LEFT_OUT = re.compile(
    r"ranks? (?P<kept>[\d, ]+): no order of (?:its|their) passes fits (?P<window>\d+) µs, whatever other ranks do"
    r"(?:; left out: (?P<count>\d+) passes of ranks? (?P<of>[\d, ]+) in lanes that no compute waits for and that take no "
    r"memory, and the bytes that these passes free)?"
    r"(?:; (?P<beside>\d+) passes on side streams there are delays alone, and what they hold counts where it is "
    r"always held)?"
)


def dropped(problem: Problem, ranks: tuple[int, ...]) -> set[int]:
    """What the text says is left out, found from the edges alone: lanes of ranks[1:] that take nothing and lead nowhere."""
    e, p = problem.edges, problem.passes
    lanes: dict[tuple[int, int, str], list[int]] = {}
    for row, one in enumerate(p):
        lanes.setdefault((one.rank, one.stage, one.kind), []).append(row)
    takes = {int(row) for row in e.before[e.bytes > 0]}
    waited = {int(row) for row in e.before}
    found = [rows for (rank, _, _), rows in lanes.items() if rank in ranks[1:] and not ({*rows} & (takes | waited))]
    return {row for rows in found for row in rows if row not in problem.side_stream}


@pytest.mark.parametrize(("name", "ranks"), GROUPS)
def test_the_text_says_what_the_relaxation_drops(name: str, ranks: tuple[int, ...]) -> None:
    problem = PROBLEMS[name]
    e, p, away = problem.edges, problem.passes, dropped(problem, ranks)
    whole, lean = (lanes_of(problem, ranks, one) for one in (False, True))
    said = LEFT_OUT.fullmatch(group_bound(problem, Group(ranks, True), 100).proof)
    assert said is not None
    assert said["kept"] == ", ".join(map(str, ranks))
    assert said["window"] == "99"
    assert int(said["count"] or 0) == len(away)
    sides = [row for row in problem.side_stream.tolist() if problem.passes.rank[row] in ranks]
    assert int(said["beside"] or 0) == len(sides)
    if away:
        assert said["of"] == ", ".join(map(str, ranks[1:]))
    assert whole is not None
    assert lean is not None
    # Passes: all those of the ranks but the ones left out. Bytes: of every edge but those that these passes free.
    assert whole.head.size - lean.head.size == len(away)
    kept = np.isin(p.rank[e.after], ranks) & ~np.isin(e.after, sorted(away))
    assert int(lean.taken.sum()) * lean.head.shape[1] == int(e.bytes[kept].sum())
    assert int(whole.taken.sum()) * whole.head.shape[1] == int(e.bytes[np.isin(p.rank[e.after], ranks)].sum())


def test_a_fused_backward_of_the_first_stage_is_left_out_too() -> None:
    problem = PROBLEMS["fused"]
    assert {problem.names[row] for row in dropped(problem, (1, 0))} == {"0BW0", "0BW1", "0BW2"}
    assert "left out: 3 passes of rank 0 in lanes" in group_bound(problem, Group((1, 0), True), 50).proof
    assert (
        "left out" not in group_bound(problem, Group((0, 1), True), 50).proof
    )  # stage 0 is kept, and stage 1's BW is waited for
    assert "left out" not in group_bound(problem, Group((1, 0), False), 50).proof


def tight() -> Problem:
    """A problem whose bound comes from a lean relaxation."""
    return pipeline([18] * 6, [18] * 6, [9] * 6, placement="loop", comm=1, microbatches=6, held_until_W=1, capacity=[3] * 3)


def test_a_certificate_of_older_text_is_proven_again(tmp_path, capsys) -> None:
    schedule = solve(tight(), effort=0.3)
    stated = schedule.certificate
    assert stated is not None
    assert (stated.relaxation, stated.status) == (LEAN_RANKS, "optimal")
    whose = ", ".join(map(str, stated.ranks))
    of = "their passes (leaving out weight gradients of all but the first)"
    old = f"ranks {whose}: no order of {of} fits {stated.bound - 1} µs"
    path = tmp_path / "schedule.json"
    schedule.save(path)
    body = json.loads(path.read_text(encoding="utf-8"))
    body["certificate"]["proof"] = old
    path.write_text(json.dumps(body), encoding="utf-8")
    assert main(["check", str(path), "--bound", "--seconds", "20"]) == 0
    assert f"proven again: ranks {whose}: no order" in capsys.readouterr().out
    found = recheck(tight(), Bound(stated.bound, old, stated.relaxation, stated.ranks), 20.0)
    assert (found.value, found.proof) == (stated.bound, stated.proof)
    assert recheck(tight(), Bound(stated.bound + 1, old, RANKS, stated.ranks[:1]), 5.0).value <= stated.bound
