"""Builders compose: each takes a Problem and gives a Problem, and `pipeline`'s keywords are sugar over them."""

from __future__ import annotations

import numpy as np
import pytest

from zbsolve import BadInput, Edge, Pass, Problem, pipeline, updates
from zbsolve.build import (
    Vocabulary,
    with_all_to_all,
    with_exchange,
    with_fused_backward,
    with_recompute,
    with_sharding,
    with_updates,
    with_vocabulary,
)
from zbsolve.kinds import KINDS
from zbsolve.problem.tables import CARGO, usual_cargo

from ..support.problems import SMALL, random_problem

TIMES = {"F": [3, 4], "B": [4, 3], "W": [2, 2]}
HELD = {"held_until_B": 3, "held_until_W": 2}
MIRROR = ((0, 1), (1, 0))


def carried(problem: Problem) -> dict[tuple[str, str], str]:
    """(before, after) → what an edge carries, where it carries anything."""
    names, e = problem.names, problem.edges
    columns = zip(e.before.tolist(), e.after.tolist(), e.carries.tolist(), strict=True)
    return {(names[a], names[b]): CARGO[c] for a, b, c in columns if c}


def test_keywords_of_pipeline_are_builders_in_turn() -> None:
    plain = pipeline(**TIMES, **HELD, microbatches=3)
    again = pipeline(**TIMES, **HELD, microbatches=3, recompute=[0], X=5, held_input=1)
    assert with_recompute(plain, [0], X=5, held_input=1) == again
    around = pipeline(**TIMES, **HELD, microbatches=3, recompute=[0], X=5, held_input=1, AF=[0, 2], AB=[1, 3])
    assert with_all_to_all(again, [0, 2], [1, 3]) == around
    two_ways = pipeline(**TIMES, placement=MIRROR, microbatches=2)
    assert with_exchange(two_ways, [6, 7]) == pipeline(**TIMES, placement=MIRROR, microbatches=2, exchange=[6, 7])
    assert with_updates(plain, 1, every=3, delay=1) == updates(plain, 1, every=3, delay=1)


def test_builders_that_have_nothing_to_do_change_nothing() -> None:
    plain = pipeline(**TIMES, microbatches=2)
    assert with_recompute(plain, "") is with_all_to_all(plain, 0) is with_exchange(plain, 5) is plain


def waits(problem: Problem) -> dict[str, set[str]]:
    """Each pass C → the passes that it waits for."""
    names, e = problem.names, problem.edges
    pairs = zip(e.before.tolist(), e.after.tolist(), strict=True)
    found: dict[str, set[str]] = {}
    for a, b in pairs:
        if "C" in names[b]:
            found.setdefault(names[b], set()).add(names[a])
    return found


def test_replicas_sum_gradients_of_every_stage() -> None:
    """A C is behind all passes that add to gradients: of the stage's layers, or of its shard of a vocabulary."""
    plain = pipeline(**TIMES, microbatches=2)
    problem = with_exchange(plain, [6, 7], replicas=True)
    assert waits(problem) == {f"{s}C0": {f"{s}W0", f"{s}W1"} for s in (0, 1)}
    one = problem.passes[problem.index["1C0"]]
    assert (one.duration, one.rank, one.streams) == (7, 1, ("comm:1",))
    mixed = with_fused_backward(plain, np.array([[True, False], [False, False]]), 5)
    assert waits(with_exchange(mixed, 6, replicas=True))["0C0"] == {"0BW0", "0W1"}
    two_ways = pipeline(**TIMES, placement=MIRROR, microbatches=2)
    assert with_exchange(two_ways, 6, replicas=True) == with_exchange(two_ways, 6)  # one C is both sums
    shards = with_vocabulary(plain, Vocabulary(2, 2, lookup=1))
    found = waits(with_exchange(shards, 6, replicas=True))
    assert found["3C0"] == {"3T0", "3T1", "3VS0", "3VS1"}
    assert sorted(found) == ["0C0", "1C0", "2C0", "3C0"]
    frozen = plain.only(plain.rows("F", "B"))
    assert with_exchange(frozen, 6, replicas=True) is frozen
    with pytest.raises(BadInput, match="replicas: the problem has passes C already"):
        with_exchange(problem, 6, replicas=True)
    with pytest.raises(BadInput, match="replicas: the problem has updates, which would use gradients before"):
        with_exchange(with_updates(plain, 1, every=2, delay=1), 6, replicas=True)
    with pytest.raises(BadInput, match="replicas: the problem has sharded parameters"):
        with_exchange(with_sharding(plain, 1, 1), 6, replicas=True)
    with pytest.raises(BadInput, match="updates: the problem has passes C"):
        with_updates(problem, 1, every=2, delay=1)


def test_orders_of_builders_that_are_not_modelled_are_refused() -> None:
    plain = pipeline(**TIMES, microbatches=2)
    with pytest.raises(BadInput, match="stage 1 has an all-to-all AF, which its X would have to repeat"):
        with_recompute(with_all_to_all(plain, [0, 2], 0), "all")
    with pytest.raises(BadInput, match="stage 0 has an all-to-all AF"):
        with_all_to_all(with_recompute(plain, "all"), 2)
    with pytest.raises(BadInput, match="put recompute in before"):
        with_recompute(with_updates(plain, 1, every=2, delay=1), "all")


def test_edges_say_what_they_carry() -> None:
    problem = pipeline(**TIMES, microbatches=1, AF=[2, 2], AB=[3, 3])
    assert carried(problem) == {
        ("0F0", "0AF0"): "activation",
        ("0AF0", "1F0"): "activation",  # behind the last stage is the loss: 1AF0 hands nothing on
        ("1B0", "1AB0"): "gradient",
        ("1AB0", "0B0"): "gradient",  # and before the first the batch
    }
    assert not any(name.endswith("U0") for pair in carried(updates(problem, 1, every=1, delay=1)) for name in pair)


@pytest.mark.parametrize("name", SMALL)
def test_files_that_do_not_say_it_are_read_as_builders_write(name: str) -> None:
    problem = SMALL[name]
    assert (usual_cargo(problem.passes, problem.edges.before, problem.edges.after) == problem.edges.carries).all()
    body = problem.to_json()
    del body["edges"]["carries"], body["edges"]["cargo"]
    assert (Problem.from_json(body).edges.carries == problem.edges.carries).all()


def test_an_edge_of_ones_own_may_carry_what_the_rule_would_not() -> None:
    passes = [Pass("F", 0, 0, 0, 1), Pass("O", 0, 0, 0, 1, streams=("d2h:0",))]
    silent = Problem.of(passes, [Edge("0F0", "0O0")])
    told = Problem.of(passes, [Edge("0F0", "0O0", carries="activation")])
    assert (carried(silent), carried(told)) == ({}, {("0F0", "0O0"): "activation"})
    assert told == silent  # no part of the digest
    assert carried(Problem.from_json(told.to_json())) == carried(told)
    with pytest.raises(BadInput, match=r"edge 0F0 → 0O0: carries 'water'"):
        Problem.of(passes, [Edge("0F0", "0O0", carries="water")])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"cargo": ["", "water"]}, "field 'cargo' names 'water'"),
        ({"carries": [9]}, "field 'carries' points outside 'cargo'"),
        ({"carries": [0, 0]}, "the columns of 'edges' differ in length"),
        ({"carries": "all"}, "field 'carries': 'all' is no run"),
        ({"cargo": None}, "field 'cargo' has a wrong type"),
    ],
)
def test_damaged_cargo_is_named(change: dict[str, object], line: str) -> None:
    body = Problem.of([Pass("F", 0, 0, 0, 1), Pass("F", 1, 0, 0, 1)], [Edge("0F0", "1F0")]).to_json()
    body["edges"].update(change)
    with pytest.raises(BadInput, match=line):
        Problem.from_json(body, "x.json")


def test_what_a_problem_knows_of_itself() -> None:
    problem = pipeline(2, BW=3, placement=((0, 1, 2), (2, 1, 0)), microbatches=5, exchange=4)
    assert (problem.ranks, problem.stages, problem.microbatches, problem.round) == (3, 3, 5, 0)
    assert problem.routes == ((0, 1, 2), (2, 1, 0))
    assert problem.stage_ranks == ((0, 2), (1,), (0, 2))
    with pytest.raises(BadInput, match="microbatches follow 2 routes"):
        _ = problem.placement
    assert [problem.names[i] for i in problem.rows("C", stage=0)] == ["0C0", "0C1"]
    assert [problem.names[i] for i in problem.rows("F", "BW", stage=1, rank=1)][:2] == ["1F0", "1F1"]
    updating = updates(pipeline([1, 1], BW=[2, 2], microbatches=6), 1, every=3, delay=1)
    assert (updating.microbatches, updating.round, updating.placement) == (6, 3, (0, 1))
    assert updating.only(updating.rows("F", "BW")).round == 0
    lost = problem.only(problem.rows("F", "C"))
    assert lost.microbatches == 5
    half = Problem.of([Pass("F", 0, 0, 0, 1), Pass("F", 1, 0, 0, 1), Pass("F", 0, 1, 0, 1)], [])
    with pytest.raises(BadInput, match="microbatch 1 has no pass of stage 1"):
        _ = half.routes
    torn = Problem.of([Pass("F", 0, 0, 0, 1), Pass("B", 0, 0, 1, 1), Pass("F", 0, 1, 1, 1)], [])
    with pytest.raises(BadInput, match="pass 0B0: its microbatch is on rank 0 and on rank 1 for one stage"):
        _ = torn.routes


def test_tables_count_kinds_as_passes_do() -> None:
    for seed in range(20):
        problem = random_problem(seed, 4, 5)
        for kind in KINDS:
            rows = [i for i, one in enumerate(problem.passes) if one.kind == kind]
            assert problem.rows(kind).tolist() == rows
            assert (kind in problem.passes.kinds) == bool(rows)
        assert problem.passes.kind_names == [one.kind for one in problem.passes]
        assert problem.microbatches == 1 + max(one.microbatch for one in problem.passes)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"F": None}, "F: None: µs are needed"),
        ({"F": None, "placement": (0, 1)}, "F: None: µs are needed"),
        ({"untrained": None}, r"untrained\[0\]: not a number: None"),
        ({"untrained": 1.5}, r"untrained\[0\]: 1.5 is not whole"),
        ({"recompute": 1}, r"recompute: 1: stages such as \(0, 2\)"),
        ({"recompute": {"a": 1}}, "recompute: 'a' is neither 'all' nor a stage"),
        ({"layers": (1, 2, 3)}, "layers: 3 values, 2 are needed"),
        ({"layers": (-1, 2)}, r"layers\[0\]: -1 is negative"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(given, line):
    with pytest.raises(BadInput, match=f"^{line}"):
        pipeline(**{**TIMES, "microbatches": 3, **given})
