"""Microbatches of unlike lengths: hand numbers, orders against all permutations, files, wrong use."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from zbsolve import BadInput, HostLink, Layer, Link, Problem, Profile, Step, pipeline, solve, solve_auto, verify
from zbsolve.build import with_offload
from zbsolve.cli import main
from zbsolve.features.feature import Now
from zbsolve.features.lengths import LENGTHS, Multiples, Sample
from zbsolve.ilp.bounds.any_choice import bound_over_orders
from zbsolve.profile.known_steps import step_again

from ..support.exact_streams import optimum

# 160 µs of F of which attention takes 64, 240 of B of which it takes 128, 96 of W.
BLOCK = Layer("block", 160, 240, 96, 320, 120, 80, 50, 64, attention_F=64, attention_B=128, kv_bytes=40)
PROFILE = Profile("given", "long", (BLOCK,) * 2, Link(2.0, 8.0), 4.0, None, {"sequence": 64}, {})
read = LENGTHS.fields[0].read
assert LENGTHS.choices is not None
choices = LENGTHS.choices.first


def duration(problem: Problem, name: str) -> int:
    return int(problem.passes.duration[problem.index[name]])


def test_attention_goes_with_the_square_of_the_length() -> None:
    """At twice the length F takes 2 · 96 + 4 · 64, B 2 · 112 + 4 · 128, W 2 · 96; at half a quarter of attention."""
    problem = Step(2, 3, lengths=(64, 128, 32)).problem(PROFILE)
    assert [duration(problem, f"0F{i}") for i in range(3)] == [160, 448, 64]
    assert [duration(problem, f"1B{i}") for i in range(3)] == [240, 736, 88]
    assert [duration(problem, f"1W{i}") for i in range(3)] == [96, 192, 48]
    assert {int(problem.taken[problem.index[f"0F{i}"]]) for i in range(3)} == {200, 400, 100}
    lag = problem.edges.lag[[problem.edges.before.tolist().index(problem.index[f"0F{i}"]) for i in range(3)]]
    assert lag.tolist() == [2 + 8, 2 + 16, 2 + 4]


def test_so_does_that_of_the_layers_that_recompute() -> None:
    """One of a stage's two layers: as long as one F."""
    part, whole = (Step(1, 3, lengths=(64, 128, 32), recompute=said).problem(PROFILE) for said in ("0:1", "all"))
    assert [duration(part, f"0X{i}") for i in range(3)] == [160, 448, 64]
    assert [duration(whole, f"0X{i}") for i in range(3)] == [320, 896, 128]
    assert [duration(part, f"0F{i}") for i in range(3)] == [320, 896, 128]


def test_packed_sequences_take_the_square_of_each() -> None:
    """128 tokens of two sequences of 64: as long as two of the profile's; of 32: attention takes half of that."""
    problem = Step(2, 3, lengths=((128, 64), (128, 32), 128)).problem(PROFILE)
    assert [duration(problem, f"0F{i}") for i in range(3)] == [320, 192 + 64, 448]
    assert {int(problem.taken[problem.index[f"0F{i}"]]) for i in range(3)} == {400}
    twice = replace(PROFILE, facts={"sequence": 64, "microbatch": {"sequences": 2}})
    assert duration(Step(2, 1, lengths=((128, 64),)).problem(twice), "0F0") == 160


def test_all_of_the_profiles_length_are_the_plain_step() -> None:
    plain = Step(2, 3).problem(PROFILE)
    assert (
        Step(2, 3, lengths=(64, 64, 64)).problem(PROFILE)
        == plain
        == Step(2, 3, lengths=Multiples((1.0,) * 3)).problem(PROFILE)
    )


def test_slow_ranks_make_attention_slower() -> None:
    slow = replace(PROFILE, rank_factors=(1.0, 2.0))
    problem = Step(2, 2, lengths=(64, 128)).problem(slow)
    assert (duration(problem, "0F1"), duration(problem, "1F1")) == (448, 896)


@pytest.mark.parametrize("seed", range(6))
def test_orders_against_all_permutations(seed: int) -> None:
    """The bound is at most the best of all orders; what the search finds is one of them."""
    rng = random.Random(seed)
    lengths = tuple(rng.choice((16, 32, 64, 128)) for _ in range(3))
    step = Step(2, 3, lengths=lengths, fused=True)
    values = {order: optimum(replace(step, lengths=order).problem(PROFILE)) for order in set(permutations(lengths))}
    best = min(value for value in values.values() if value is not None)
    bounds = {bound_over_orders(replace(step, lengths=order).problem(PROFILE)) for order in values}
    assert len(bounds) == 1
    assert bounds.pop() <= best
    schedule, tried = solve_auto(PROFILE, replace(step, order="auto"), effort=0.2)
    assert schedule.certificate is not None
    assert verify(schedule.problem, schedule) == ()
    assert best <= schedule.certificate.value <= min(value for value in values.values() if value) * 1.02
    assert min(one.value for one in tried if one.value) == schedule.certificate.value


def test_an_order_of_lanes_of_its_own_is_not_below_the_bound() -> None:
    """Where each stage may take microbatches in another order, by a solver that does not know of lanes' order."""
    problem = Step(1, 2, lengths=(64, 128), fused=True).problem(replace(PROFILE, layers=(BLOCK,)))
    assert bound_over_orders(problem) == optimum(problem) == problem.work


def test_several_routes_have_no_bound_of_every_order() -> None:
    """On them another number is another route, so ranks have other work."""
    step, uneven = Step(2, 4, "mirror", lengths=(16, 64, 16, 64)), replace(PROFILE, layers=(BLOCK, replace(BLOCK, W=500)))
    work = [replace(step, lengths=order).problem(uneven).work for order in ((16, 64, 16, 64), (16, 16, 64, 64))]
    assert work[0] != work[1]
    with pytest.raises(BadInput, match="order: microbatches take several routes"):
        bound_over_orders(step.problem(PROFILE))


def test_gathers_of_some_microbatches_have_no_bound_of_every_order() -> None:
    """With other numbers a gather is for other microbatches. Of 8, 16, 32, 8 tokens the graph's paths take 5125 µs; in the
    order 16, 32, 8, 8 the same microbatches take 5100."""
    far = replace(PROFILE, shard_link=Link(1000.0, 5.0))
    step = Step(2, 4, lengths=(16, 32, 8, 8), shards=2, gathers=2)
    schedule = solve(step.problem(far), effort=0.1)
    assert schedule.certificate is not None
    assert schedule.certificate.value == 5100
    with pytest.raises(BadInput, match="order: pass 0AG0 is for some microbatches alone"):
        bound_over_orders(replace(step, lengths=(8, 16, 32, 8)).problem(far))
    assert bound_over_orders(replace(step, gathers=1).problem(far)) <= 5100


def test_copies_of_some_microbatches_have_no_bound_of_every_order() -> None:
    """Here those of the first two of four."""
    problem = pipeline([10] * 2, [10] * 2, [10] * 2, microbatches=4, held_until_B=1)
    some = with_offload(problem, [5] * 2, [5] * 2, which=[[True, True, False, False]] * 2)
    with pytest.raises(BadInput, match="order: pass 0O0 is for some microbatches alone"):
        bound_over_orders(some)


@pytest.mark.parametrize("more", [["--recompute", "auto"], ["--shards", "2", "--gathers", "auto"]])
def test_what_else_is_open_does_not_raise_the_bound(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is that of stages that recompute nothing and gather once."""
    path = tmp_path / "profile.json"
    profile = replace(PROFILE, shard_link=Link(1.0, 50.0))
    profile.save(path)
    command = ["solve", str(path), "--ranks", "2", "--microbatches", "3", "--lengths", "16,64,32", "--order", "free"]
    assert main([*command, *more, "--effort", "0.1", "--json", "-o", str(tmp_path / "schedule.json")]) == 0
    plain = Step(2, 3, lengths=(16, 64, 32), shards=2 if "--shards" in more else 1)
    assert str(bound_over_orders(plain.problem(profile))) in capsys.readouterr().out


def test_named_orders_and_moves() -> None:
    step = Step(2, 5, lengths=(30, 10, 50, 20, 40), order="auto")
    assert {name: one.lengths for name, one in choices(step)} == {
        " order=given": (30, 10, 50, 20, 40),
        " order=shortest first": (10, 20, 30, 40, 50),
        " order=longest first": (50, 40, 30, 20, 10),
        " order=longest in the middle: 10,30,50,40,20": (10, 30, 50, 40, 20),
        " order=shortest in the middle: 50,30,10,20,40": (50, 30, 10, 20, 40),
    }
    given = replace(step, order="given")
    found = [one.lengths for _, one in LENGTHS.moves[0].near(Now(given, step, PROFILE, "", ()))]
    assert len(found) == len(set(found)) == 4 * 4
    assert all(sorted(one) == [10, 20, 30, 40, 50] for one in found)
    assert [name for name, _ in choices(replace(step, lengths=(10,) * 5))] == [" order=given"]


def test_words_and_files(tmp_path: Path) -> None:
    assert read("512, 1024") == (512.0, 1024.0)
    assert read("0.5x,1x") == Multiples((0.5, 1.0))
    assert isinstance(read("0.5x,1x"), Multiples)
    path = tmp_path / "lengths.csv"
    path.write_text("tokens,text\n100,a\n200,b\n")
    assert read(str(path)) == (100.0, 200.0)
    assert read("512@128,2048:2560") == ((512.0, 128.0), 2048.0)
    assert read("2x@1x,1x:3x") == Multiples(((2.0, 1.0), 1.0))


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ("\ufeffid;num_tokens;split\r\n1;100;a\r\n\r\n2;200;b\r\n", (100.0, 200.0)),
        ("100 a\n200 b\n", (100.0, 200.0)),
        ("100,\n,,\n200,\n", (100.0, 200.0)),
        (".5x\n1x\n", Multiples((0.5, 1.0))),
        ("-5\n100\n", (-5.0, 100.0)),
        ("id,n\n1,100\n", "columns id, n: none named length or tokens, and one is needed"),
        ("len,tokens\n1,100\n", "columns len, tokens: several named length or tokens, and one is needed"),
        ("id,length\n1,100\n2\n", "row 2 has no length"),
        ("[100, 200]\n", r"length 0 is '\[100', and no number"),
    ],
)
def test_tables_of_other_tools(table: str, found: tuple[float, ...] | str, tmp_path: Path) -> None:
    """Byte-order marks, line ends, empty lines and columns; a first line without numbers has names."""
    (path := tmp_path / "lengths.csv").write_bytes(table.encode())
    if isinstance(found, tuple):
        assert read(str(path)) == found
    else:
        with pytest.raises(BadInput, match=rf"lengths\.csv: {found}"):
            read(str(path))


def test_a_file_of_batches(tmp_path: Path) -> None:
    """Of 4 3 2 1 in two microbatches 4 1 and 3 2; of 8 2 2 2 the 8 and the rest; tokens 5 5 and 8 6: of the fuller ones
    6.5, of the others 5.5; squares 17 13 and 64 12: 40.5 and 12.5."""
    path = tmp_path / "batches.txt"
    path.write_text("4, 3, 2, 1\n8 2 2 2\n")
    sample = read(str(path))
    assert sample == Sample(((4, 3, 2, 1), (8, 2, 2, 2)))
    assert isinstance(sample, Sample)
    (fuller, other) = sample.typical(2)
    assert (fuller[0], other[0]) == (6.5, 5.5)  # type: ignore[index]
    assert sorted((fuller[0] * fuller[1], other[0] * other[1])) == pytest.approx([12.5, 40.5])  # type: ignore[index]
    step = Step(2, 2, lengths=sample)
    assert step.problem(PROFILE) == Step(2, 2, lengths=sample.typical(2)).problem(PROFILE)
    schedule, tried = solve_auto(PROFILE, replace(step, order="auto"), effort=0.1)
    assert schedule.problem.microbatches == 2
    assert {one.placement for one in tried} >= {"single order=given", "single order=shortest first"}
    with pytest.raises(BadInput, match="lengths: batch 1 has 4 sequences for 5 microbatches"):
        Step(2, 5, lengths=sample)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("nothing.csv", "nothing.csv: no such file"),
        ("12,,3", "length 1 is '', and no number"),
        ("12,2x", "length 1 is '2x': all are tokens, or all multiples"),
        ("1x,2x,long", "length 2 is 'long', and no number"),
        ("12@2x", "length 0 is '12@2x': all are tokens, or all multiples"),
        ("12@2@1", "length 0 is '12@2@1': tokens, or tokens@of each sequence"),
        ("512,1024:2048", "lengths: they add up to 1536, and the batch has '2048'"),
    ],
)
def test_wrong_words_are_named(said: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        read(said)


def test_a_file_without_lengths_is_named(tmp_path: Path) -> None:
    (tmp_path / "none.csv").write_text("\n")
    with pytest.raises(BadInput, match=r"none\.csv: no lengths"):
        read(str(tmp_path / "none.csv"))


def test_wrong_use_is_named() -> None:
    with pytest.raises(BadInput, match="lengths: 2 lengths for 3 microbatches"):
        Step(2, 3, lengths=(1, 2))
    with pytest.raises(BadInput, match="lengths: length 1 is 0: above 0 is needed"):
        Step(2, 2, lengths=(1, 0))
    with pytest.raises(BadInput, match="lengths: length 0 is 4@8: a sequence of more tokens than all have"):
        Step(2, 1, lengths=((4, 8),))
    with pytest.raises(BadInput, match="order 'free': microbatches are alike"):
        Step(2, 3, order="auto")
    with pytest.raises(BadInput, match="order 'free': sizes that the search decides come in turn"):
        Step(2, 3, sizes="auto", order="auto")
    with pytest.raises(BadInput, match="lengths: the profile does not say how many tokens"):
        Step(2, 2, lengths=(10, 20)).problem(replace(PROFILE, facts={}))
    with pytest.raises(BadInput, match="lengths: the profile's microbatches differ already"):
        Step(2, 2, lengths=(32, 64)).problem(replace(PROFILE, microbatch_factors=(1.0, 2.0)))


@pytest.mark.parametrize("also", ["", "--offload full --recompute auto", "--partition auto"])
def test_the_command_says_the_order_and_a_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str], also: str) -> None:
    """For each choice of what is kept: copies of what is recomputed are shorter. For each split none is known."""
    path = tmp_path / "profile.json"
    replace(PROFILE, host=HostLink(1.0, 0.01, 0.01, 0.01, 0.01)).save(path)
    step = ["--ranks", "2", "--microbatches", "4", "--lengths", "16,128,32,64", "--order", "free", "--effort", "0.1"]
    assert main(["solve", str(path), *step, *also.split(), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {one["placement"] for one in said["tried"]} >= {"single order=given", "single order=shortest first"}
    bounds = said.get("bound_of_every_order of microbatches", {}).values()
    assert [bound <= said["bound"] <= said["value"] for bound in bounds] == [True] * ("partition" not in also)


def test_a_profile_alone_does_not_time_them_again() -> None:
    problem = Step(2, 2, lengths=(16, 128), fused=True).problem(PROFILE)
    with pytest.raises(BadInput, match="its microbatches differ in length, and it does not say how"):
        step_again(problem, PROFILE)
    same = Step(2, 2, fused=True).problem(PROFILE)
    assert step_again(same, PROFILE) == same


def test_no_bound_over_partitions_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would count attention with the length: too much for short ones."""
    path = tmp_path / "profile.json"
    replace(PROFILE, layers=(BLOCK,) * 4, host=HostLink(1.0, 8.0, 8.0, 8.0, 8.0)).save(path)
    step = ["--ranks", "2", "--microbatches", "2", "--lengths", "0.5x,0.5x", "--effort", "0.05", "--json"]
    assert main(["solve", str(path), *step, "--partition", "auto"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "bound_of_every_partition" not in said
    assert said["value"] == said["bound"]
    assert main(["solve", str(path), *step, "--offload", "half"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] >= said["value"]


def test_a_schedule_of_unlike_lengths_is_exact() -> None:
    problem = Step(2, 2, lengths=(16, 128), fused=True).problem(PROFILE)
    schedule = solve(problem, effort=0.1)
    assert schedule.certificate is not None
    assert schedule.certificate.value == schedule.certificate.bound == optimum(problem)
