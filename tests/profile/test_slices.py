"""A profile's step in sequence slices: what slices take and keep, hand numbers, refusals, and the race over their number."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, HostLink, Infeasible, Problem, Profile, preset, solve, solve_auto, verify
from zbsolve.cli import main
from zbsolve.features.attention_exchange import clipping_note, exchange_costs, within_passes
from zbsolve.features.cuts import cuts_of, in_slices, kinds_of_slices, most_slices, whole_tokens
from zbsolve.features.keeping import all_kept
from zbsolve.features.slices import OfAnySlices, bound_of_any_slices, split_by
from zbsolve.features.table import usual
from zbsolve.partition.layer import Layer, Link, SliceExtra
from zbsolve.profile import ShardCosts, ShardPasses, VocabularyCosts
from zbsolve.profile.step import Step
from zbsolve.search.auto import closed_steps
from zbsolve.util.text import exact_time

# 160 µs of F of which attention takes 64, 240 of B of which it takes 128; 40 bytes of keys and values among 120 until B.
BLOCK = Layer("block", 160, 240, 96, 320, 120, 80, 50, 64, attention_F=64, attention_B=128, kv_bytes=40, transient=24)
HOST = HostLink(1.0, 8.0, 8.0, 8.0, 8.0)
PROFILE = Profile("given", "long", (BLOCK,) * 4, Link(2.0, 8.0), 4.0, None, {"sequence": 64}, {}, host=HOST)

# The last layer is an output layer with 40 µs beside its vocabulary; S of two shards takes 40 µs, T 20.
REST = Layer("head", 40, 40, 0, 80, 8, 0, 4, 0, attention_F=0)
SHARD = ShardPasses(40, 20, 48, 64)
COSTS = VocabularyCosts("given", 64, 8, 2, 3, REST, (ShardCosts(2, SHARD, SHARD, 400),))
WITH_VOCABULARY = replace(PROFILE, vocabulary=COSTS)


def times(problem: Problem, kind: str, stage: int = 0, microbatch: int = 0) -> list[int]:
    """µs of a stage's passes, slice by slice."""
    p = problem.passes
    rows = np.flatnonzero(p.are(kind) & (p.stage == stage) & (p.microbatch == microbatch))
    return [int(one) for one in p.duration[rows[np.argsort(p.slice[rows])]]]


def test_one_slice_is_the_plain_step() -> None:
    assert PROFILE.problem(4, 3, slices=1) == PROFILE.problem(4, 3, slices="1") == PROFILE.problem(4, 3)
    assert Step(4, 3, slices=1).problem(PROFILE) == PROFILE.problem(4, 3)


def test_slices_take_what_hand_numbers_say() -> None:
    """F of slice j of 4: 96 / 4 + 64 (2j + 1) / 16; B: 112 / 4 + 128 (2j + 1) / 16; messages: 2 + 64 / 4 / 8."""
    problem = PROFILE.problem(4, 2, slices=4)
    assert times(problem, "F") == [28, 36, 44, 52]
    assert times(problem, "B", 2, 1) == [36, 52, 68, 84]
    assert times(problem, "W") == [24, 24, 24, 24]
    assert times(PROFILE.problem(4, 2, slices=4, fused=True), "BW") == [320 // 4 - 32 + 8 * i for i in (1, 3, 5, 7)]
    assert times(PROFILE.problem(4, 2, slices=4, recompute="1"), "X", 1) == [28, 36, 44, 52]
    e = problem.edges
    assert set(e.lag[e.carrying("activation", "gradient")].tolist()) == {4}
    assert problem.messages is not None
    assert problem.messages.sizes == (16, 16, 16)


@pytest.mark.parametrize("slices", [2, 8, "4:even-work", (32, 16, 10, 6)])
@pytest.mark.parametrize("fused", [False, True])
def test_slices_add_up_to_the_microbatch(slices: Any, fused: bool) -> None:
    whole = PROFILE.problem(2, 2, fused=fused)
    problem = PROFILE.problem(2, 2, fused=fused, slices=slices)
    for kind in whole.passes.kinds:
        assert sum(times(problem, kind, 1)) == times(whole, kind, 1)[0]
    first = problem.passes.are("F") & (problem.passes.stage == 0) & (problem.passes.microbatch == 0)
    taken = int(problem.edges.bytes[first[problem.edges.before]].sum())
    assert taken == 2 * (120 + 80)  # two layers a stage, keys among them, gradients apart


def test_even_work_is_even() -> None:
    cuts = cuts_of("4:even-work", PROFILE.layers)
    work = split_by(cuts, 1000 * BLOCK.work, 1000 * 192)
    assert max(work) - min(work) <= 2
    widths = np.diff(cuts)
    assert (np.diff(widths) < 0).all()
    assert cuts_of((32, 16, 16), PROFILE.layers, 64) == cuts_of("0.5,0.25,0.25", PROFILE.layers) == (0, 0.5, 0.75, 1)
    assert all(one * 64 == round(one * 64) for one in cuts_of("5:even-work", PROFILE.layers, 64))


@pytest.mark.parametrize(
    ("lengths", "tokens", "taken"),
    [
        ((3, 2, 1), 128, (64, 43, 21)),  # 64, 42⅔ and 21⅓: the second is nearest to one more
        ((1, 1, 1), 128, (43, 43, 42)),  # of equal remainders the first
        ((1000, 1, 1), 128, (126, 1, 1)),
        ((100, 0.1, 0.1, 1), 4, (1, 1, 1, 1)),
        ((0.1, 0.2, 0.7), 10, (1, 2, 7)),
        ((1, 1, 1e-9, 1e-9, 5), 9, (1, 1, 1, 1, 5)),
    ],
)
def test_slices_are_whole_tokens(lengths: tuple[float, ...], tokens: int, taken: tuple[int, ...]) -> None:
    assert whole_tokens(lengths, tokens) == taken


def test_any_slices_are_rounded_to_tokens() -> None:
    """As near to their part as whole numbers are, one token at least, and times, bytes and the file know it: 64 tokens in 5
    are 13, 13, 13, 13, 12, of which the last waits for 52."""
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.choice([rng.random(), 10 * rng.random(), 1]) for _ in range(rng.randint(1, 12))]
        tokens = rng.randint(len(lengths), 40)
        found, parts = whole_tokens(lengths, tokens), [one * tokens / sum(lengths) for one in lengths]
        assert sum(found) == tokens
        assert min(found) >= 1
        if min(parts) >= 1:
            assert all(abs(a - b) < 1 for a, b in zip(found, parts, strict=True))
        assert whole_tokens(found, tokens) == found
    problem = PROFILE.problem(4, 2, slices=5)
    assert problem.slice_lengths == (13, 13, 13, 13, 12)
    until = [round(96 * at / 64 + 64 * (at / 64) ** 2) for at in (0, 13, 26, 39, 52, 64)]
    assert times(problem, "F") == np.diff(until).tolist()
    assert Problem.from_json(problem.to_json()).slice_lengths == (13, 13, 13, 13, 12)
    assert PROFILE.problem(4, 2, slices=problem.slice_lengths) == problem
    assert PROFILE.problem(4, 2, slices=8).slice_lengths == ()
    assert min(PROFILE.problem(4, 2, slices="60:even-work").slice_lengths) == 1
    assert sum(PROFILE.problem(4, 2, slices="3,4").slice_lengths) == 64


def test_memory_counts_a_slice_at_a_time() -> None:
    """A rank of 4 holds n + p − 1 slices in SlimPipe's order: (4 + 3) / 4 of a microbatch's 200 bytes; and gradients."""
    problem = PROFILE.problem(4, 3, slices=4, fused=True)
    assert verify(problem, schedule := preset("slimpipe", problem)) == ()
    assert preset("1f1b", PROFILE.problem(4, 3, fused=True)).timeline().peak_bytes[0] == 3 * 200
    assert schedule.timeline().peak_bytes[0] == pytest.approx(7 * 50 + 30, abs=10)
    limited = Step(4, 3, slices=4, fused=True, memory=4 * 50 + 2 * 16 * 2 + 24 + 390)
    assert limited.problem(PROFILE).capacity is not None
    found = solve(limited.problem(PROFILE), effort=0.05)
    assert all(need <= 4 * 50 + 2 * 16 * 2 + 24 + 390 for need in limited.needs(PROFILE, found))
    with pytest.raises(Infeasible, match="for the slices of one microbatch"):
        replace(limited, memory=4 * 50 + 64 + 24 + 180).problem(PROFILE)


def test_uneven_slices_recompute() -> None:
    """After F each keeps its part of the stage's input (64 bytes) and of two layers' keys and values (80); X takes as long
    as F."""
    problem = PROFILE.problem(2, 2, slices="48,16", recompute="all")
    assert times(problem, "F", 1) == times(problem, "X", 1)
    edges, p = problem.edges, problem.passes
    rows = np.flatnonzero(p.are("F") & (p.stage == 1) & (p.microbatch == 0))
    kept = [int(edges.bytes[(edges.before == row) & ~p.are("X")[edges.after]].sum()) for row in rows]
    assert kept == [48 + 60, 16 + 20]
    assert verify(problem, solve(problem, effort=0.05)) == ()


@pytest.mark.parametrize("how", [{"recompute": "all"}, {"offload": "full"}, {"offload": "1:0.5", "placement": "vee"}])
def test_recompute_and_offload_go_with_slices(how: dict[str, Any]) -> None:
    problem = PROFILE.problem(2, 2, slices=4, **how)
    assert verify(problem, solve(problem, effort=0.05)) == ()


def test_a_sharded_vocabulary_goes_with_slices() -> None:
    problem = Step(2, 2, vocabulary="sharded", slices=2).problem(WITH_VOCABULARY)
    assert verify(problem, solve(problem, effort=0.05)) == ()
    assert times(problem, "S", 2) == [20, 20]
    assert problem.work == Step(2, 2, vocabulary="sharded").problem(WITH_VOCABULARY).work


def test_microbatches_keep_their_lengths() -> None:
    problem = replace(PROFILE, microbatch_factors=(1.0, 2.0)).problem(4, 2, slices=4)
    assert times(problem, "F", 0, 1) == [2 * one for one in times(problem, "F")] == [56, 72, 88, 104]


@pytest.mark.parametrize(
    ("slices", "how", "why"),
    [
        (0, {}, "slices: at least 1 is needed, got 0"),
        ("-1", {}, "slices: at least 1 is needed, got -1"),
        (10**9, {}, "slices: 1000000000 are more than zbsolve handles"),
        ("4:x", {}, "slices '4:x': a number such as 8, 8:even-work, or lengths such as 4,2,1,1"),
        ("4:", {}, "slices '4:': a number such as 8"),
        ("4,,4", {}, "slices '4,,4': a number such as 8"),
        ("auto:even-work", {}, "slices 'auto:even-work': a number such as 8, 8:even-work, or lengths such as 4,2,1,1; auto"),
        (128, {}, "slices: 128 slices of a sequence of 64 tokens: each needs one"),
        ("65:even-work", {}, "slices: 65 slices of a sequence of 64 tokens: each needs one"),
        (5, {"offload": "full"}, "uneven slices: do not go with offload: take a number that divides the sequence"),
        (5, {"attention_exchange": True}, "attention exchange: is for even slices, of a number that divides the sequence"),
        ((2, -1), {}, "slices: lengths are numbers above 0"),
        (2, {"shards": 2}, "slices: sharded parameters do not go with slices"),
        (
            2,
            {"placement": "mirror"},
            "slices: microbatches take several routes, and all slices of one must stay on its ranks",
        ),
        ("2:even-work", {"offload": "full"}, "uneven slices: do not go with offload"),
    ],
)
def test_what_makes_no_sense_is_refused(slices: Any, how: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput) as error:
        PROFILE.problem(4, 2, slices=slices, **how)
    assert str(error.value).startswith(why)
    assert "\n" not in str(error.value)


def test_a_profile_without_attention_is_refused() -> None:
    bare = replace(PROFILE, layers=tuple(replace(one, attention_F=0, attention_B=0) for one in PROFILE.layers))
    with pytest.raises(BadInput, match="knows no causal attention: give its layers' fields 'attention_F'"):
        bare.problem(4, 2, slices=2)
    with pytest.raises(BadInput, match="knows no causal attention"):
        solve_auto(bare, Step(4, 2, slices="auto"), effort=0.01)
    rows = [{"F": 3, "B": 4, "W": 1, "attention_F": 1, "attention_B": 5}]
    with pytest.raises(BadInput, match=r"'attention_B' is 5 µs, more than the backward takes \(4 µs\)"):
        Profile.from_json({"layers": rows})
    with pytest.raises(BadInput, match="attention_F"):
        Profile.from_json({"layers": [rows[0] | {"attention_F": -1}]})


def test_attention_without_keys_and_values_is_refused() -> None:
    """Of a file when it is read, of layers made in Python where they are sliced."""
    row = {"F": 3, "B": 4, "W": 1, "held_until_B": 9}
    for name in ("attention_F", "attention_B"):
        said = rf"p\.json: layers\[1\]: field 'kv_bytes' is 0, but attention \(field '{name}'\) keeps keys and values"
        with pytest.raises(BadInput, match=said):
            Profile.from_json({"layers": [row, row | {name: 1}]}, "p.json")
    Profile.from_json({"layers": [row, row | {"attention_F": 1, "kv_bytes": 2}]}, "p.json")
    bare = replace(PROFILE, layers=(BLOCK, replace(BLOCK, name="bare", kv_bytes=0), BLOCK, BLOCK))
    with pytest.raises(BadInput, match="slices: layer 'bare': field 'kv_bytes' is 0"):
        bare.problem(4, 2, slices=2)


def test_files_keep_what_is_known(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "one.json")
    assert Profile.load(tmp_path / "one.json") == PROFILE
    WITH_VOCABULARY.save(tmp_path / "one.json")
    assert Profile.load(tmp_path / "one.json") == WITH_VOCABULARY
    layers = tuple(replace(one, attention_F=0, attention_B=0, kv_bytes=0) for one in PROFILE.layers)
    replace(WITH_VOCABULARY, layers=layers).save(tmp_path / "two.json")
    assert "attention_F" not in (tmp_path / "two.json").read_text()


@pytest.mark.slow
def test_auto_races_numbers_of_slices() -> None:
    """Up to twice the ranks of each kind at once, then twice as many for as long as that gains: each is a row, in order, and
    what was not tried is one for each kind. There is nothing here that a slice takes whatever its length but a
    message's latency."""
    best, tried = solve_auto(PROFILE, Step(4, 2, slices="auto", fused=True), effort=0.4)
    rows = [one.placement.removeprefix("single slices") for one in tried]
    sliced = [(int(row[1:].removesuffix(":even-work")), row.endswith(":even-work")) for row in rows[:-2]]
    assert set(sliced) >= {(n, kind) for n in (2, 4, 8, 16) for kind in (False, True)} | {(1, False)}
    assert sliced == sorted(sliced)
    assert all(one.value is not None or "proven, not searched" in one.why for one in tried[:-2])
    assert rows[-2:] == [" even", " of equal work"]
    for kind, one in enumerate(tried[-2:]):
        said = one.why.removeprefix("not tried: ").removesuffix(" or more").split(", ")
        left = {n for row in said for n in range(int(row.split("-")[0]), int(row.split("-")[-1]) + 1)}
        there = {n for n, work in sliced if work == bool(kind)}
        assert not left & there
        assert left | there >= set(range(2, max(there) + 1))
    assert best.problem.slices >= 16
    assert best.certificate is not None
    assert best.certificate.value == min(one.value for one in tried if one.value is not None)
    assert best.certificate.value < next(one.value or 0 for one in tried)
    assert verify(best.problem, best) == ()


def test_auto_leaves_out_what_the_sequence_does_not_allow() -> None:
    odd = replace(PROFILE, facts={"sequence": 6})
    best, tried = solve_auto(odd, Step(4, 2, slices="auto", fused=True), effort=0.3)
    why = {one.placement: one.why for one in tried if one.value is None}
    assert why["single slices=8"] == "slices: 8 slices of a sequence of 6 tokens: each needs one"
    assert verify(best.problem, best) == ()
    numbers = [one.placement.removeprefix("single slices=") for one in tried if "=" in one.placement]
    assert {int(one.partition(":")[0]) for one in numbers} <= {1, 2, 3, 4, 5, 6, 8}


@pytest.mark.slow
def test_auto_tries_an_exchange_of_attention_beside_slices_without() -> None:
    """Where it is asked for; numbers that do not divide the sequence have none, and say so."""
    step = Step(4, 2, slices="auto", fused=True, attention_exchange=True)
    _, tried = solve_auto(PROFILE, step, effort=0.4)
    rows = {one.placement.removeprefix("single slices"): one for one in tried}
    assert rows.keys() >= {"=1", "=2", "=4", "=8", "=4 exchange", "=8 exchange", "=8:even-work", " exchange"}
    values = [rows[name].value for name in ("=4 exchange", "=4")]
    assert values[0] is not None
    assert values[1] is None or values[0] <= values[1]


def test_how_many_slices_are_tried_at_most() -> None:
    step = Step(4, 2, slices="auto")
    assert most_slices(step) == 2500
    assert most_slices(Step(4, 2000)) == 2
    assert [in_slices(step, 8, kind)[0] for kind in kinds_of_slices(step, step)] == [" slices=8", " slices=8:even-work"]
    assert kinds_of_slices(replace(step, offload="full"), step) == {"even": "even"}
    assert [name for _, name, _ in closed_steps(Step(4, 2, slices="auto", shards=2))] == [""]


def noisy_profile(rng: random.Random) -> Profile:
    """Layers with slices that were measured, some with more for each slice or less."""
    layers = []
    for i in range(rng.randint(2, 4)):
        lines = {kind: (rng.uniform(-8, 20), rng.uniform(-2, 3)) for kind in ("F", "B", "W", "BW")}
        extra = SliceExtra(rng.choice([2, 4]), **lines) if rng.random() < 0.8 else None
        layers.append(replace(BLOCK, name=f"{i}", F=rng.randint(100, 200), slice_extra=extra))
    return replace(PROFILE, layers=tuple(layers))


def least_of_slices(profile: Profile, step: Step, layers: tuple[int, ...], value: int) -> OfAnySlices | None:
    return bound_of_any_slices(profile, step, replace(usual(all_kept(step)), partition=layers), value)


@pytest.mark.parametrize("seed", range(6))
def test_no_slicing_takes_less_than_the_bound_of_all(seed: int) -> None:
    """Any number, one too, and any lengths: the busiest rank's work, and every schedule that was found."""
    rng = random.Random(seed)
    profile, fused = noisy_profile(rng), rng.random() < 0.5
    again = rng.choice(["", "all"])
    step = Step(2, rng.randint(1, 3), slices="auto", fused=fused, recompute=again)
    layers = (1, len(profile.layers) - 1)
    value = solve(replace(step, slices=4, partition=layers).problem(profile), effort=0.01).certificate.value  # type: ignore[union-attr]
    found = least_of_slices(profile, step, layers, value)
    assert found is not None
    assert found.bound <= value
    for _ in range(25):
        lengths = [rng.choice([1, rng.uniform(0.1, 5)]) for _ in range(rng.choice([1, 2, 3, 4, 8, 20, 60]))]
        problem = replace(step, slices=tuple(lengths), partition=layers).problem(profile)
        assert problem.work >= found.bound
        assert found.longer_from is None or len(lengths) < found.longer_from or problem.work > value
    if found.longer_from is not None and found.longer_from > 2:
        assert least_of_slices(profile, step, layers, value - 1).longer_from <= found.longer_from  # type: ignore[union-attr, operator]


@pytest.mark.slow
def test_slices_that_each_take_more_end_what_can_be_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """10 µs a slice and stage in F and as many in the backward: 2 microbatches of 480 µs take 20 µs more with each slice, so
    that from some number on all are longer than the best. Nothing is said where a rounded part may be below the whole."""
    layers = tuple(replace(one, slice_extra=SliceExtra(4, F=(10.0, 0.0), BW=(10.0, 0.0))) for one in PROFILE.layers)
    dear = replace(PROFILE, layers=layers)
    step = Step(4, 2, slices="auto", fused=True)
    dear.save(tmp_path / "p.json")
    arguments = ["solve", str(tmp_path / "p.json"), "--ranks", "4", "--microbatches", "2", "--slices", "auto", "--fused"]
    assert main([*arguments, "--effort", "0.3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = least_of_slices(dear, step, (1, 1, 1, 1), said["value"])
    assert found is not None
    assert said["bound_of_every_slicing"] == {"single": found.bound}
    assert found.bound == 2 * 480  # of the whole sequence
    more = 2 * 2 * (10 - 0.5)  # a slice's least, with rounding
    assert found.longer_from == int((said["value"] - 960) // more) + 1
    assert said["longer_from"] == {"single": found.longer_from}
    looked = {one["placement"].removeprefix("single slices=") for one in said["tried"] if "=" in one["placement"]}
    assert looked & {"3", "5", "6", "7"}  # between numbers that double
    assert main([*arguments, "--effort", "0.3"]) == 0
    out = capsys.readouterr().out
    assert (
        f"for every slicing: at least {exact_time(found.bound)} on single with the splits tried; no certificate says that"
        in out
    )
    assert f"more slices take longer than the best, however long they are: proven from {found.longer_from} on single" in out
    assert least_of_slices(replace(dear, rank_factors=(1, 1, 1, 2)), step, (1, 1, 1, 1), 1) is None
    assert least_of_slices(dear, replace(step, vocabulary="auto"), (1, 1, 1, 1), 1) is None


def test_attention_that_by_noise_takes_longer_than_its_slice_is_cut() -> None:
    """F of slice j of 4: 24 and 8 (2j + 1)/2 µs; measured slices take 12 less for each slice before, 28 … 16: all of the
    last one's is attention then, 16 / 3.5 µs for each earlier slice, rounded down."""
    layers = tuple(replace(one, slice_extra=SliceExtra(4, F=(0.0, -12.0))) for one in PROFILE.layers)
    noisy = replace(PROFILE, layers=layers)
    plain = noisy.problem(4, 2, slices=4, fused=True)
    assert times(plain, "F") == [28, 24, 20, 16]
    problem = noisy.problem(4, 2, slices=4, fused=True, attention_exchange=True)
    assert problem.passes.duration.sum() == plain.passes.duration.sum()
    assert problem.passes.are("FH", "BH").any()
    schedule = preset("slimpipe", problem)
    assert verify(problem, schedule) == ()
    costs = exchange_costs(layers, plain.layers, 4, PROFILE.link, 4)
    assert within_passes(costs, plain).forward.tolist() == [4] * 4  # type: ignore[union-attr]
    assert within_passes(costs, plain).backward.tolist() == [16] * 4  # type: ignore[union-attr]
    said = clipping_note(noisy, plain)
    assert "all of F in a slice of stage" in said
    assert said.endswith("it is taken as 50.0% less")
    assert clipping_note(PROFILE, PROFILE.problem(4, 2, slices=4, fused=True)) == ""


def test_an_exchange_makes_attention_elsewhere() -> None:
    """A stage's F of 4 slices: 24 µs and 4 (2j + 1) of attention, 8 of them for each earlier slice; queries are as wide as
    the layer's output: 16 bytes of 64. All ranks compute what they did together."""
    plain = Step(4, 2, slices=4, fused=True)
    step = replace(plain, attention_exchange=True)
    costs = exchange_costs(PROFILE.layers, (1, 1, 1, 1), 4, PROFILE.link, 5)
    found = {name: getattr(costs, name).tolist() for name in costs._fields[:6]}
    each = {"forward": 8, "backward": 16, "query_bytes": 16, "key_bytes": 10, "statistic_bytes": 0, "latency": 2}
    assert found == {name: [one] * 4 + [0] for name, one in each.items()}
    problem = step.problem(PROFILE)
    assert problem.passes.are("FH", "BH").any()
    assert problem.passes.duration.sum() == plain.problem(PROFILE).passes.duration.sum()
    schedule = preset("slimpipe", problem)
    assert verify(problem, schedule) == ()
    assert schedule.timeline().makespan < preset("slimpipe", plain.problem(PROFILE)).timeline().makespan
    assert all(a >= b for a, b in zip(step.needs(PROFILE, schedule), schedule.timeline().peak_bytes, strict=True))
    more = Step(2, 2, slices=2, vocabulary="sharded", recompute="all", attention_exchange=True).problem(WITH_VOCABULARY)
    assert more.passes.are("FH", "BH").any()
    assert verify(more, solve(more, effort=0.02)) == ()


@pytest.mark.parametrize(
    ("profile", "how", "why"),
    [
        (PROFILE, {}, "attention exchange: is between slices of sequences, and none is sliced"),
        (PROFILE, {"slices": "4:even-work"}, "attention exchange: is for even slices"),
        (PROFILE, {"slices": 4, "blocking": True}, "attention exchange: messages of this link occupy their sender"),
        (replace(PROFILE, rank_factors=(1, 1, 1, 2)), {"slices": 4}, "attention exchange: ranks or microbatches of unlike"),
    ],
)
def test_an_exchange_that_makes_no_sense_is_refused(profile: Profile, how: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=f"^{why}"):
        profile.problem(4, 2, attention_exchange=True, **how)
