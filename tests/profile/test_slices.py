"""A profile's step in sequence slices: what slices take and keep, hand numbers, refusals, and the race over their number."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, HostLink, Infeasible, Problem, Profile, preset, solve, solve_auto, verify
from zbsolve.layer import Layer, Link, SliceExtra
from zbsolve.profile import ShardCosts, ShardPasses, VocabularyCosts
from zbsolve.profile.attention_exchange import clipping_note, exchange_costs, within_passes
from zbsolve.profile.cuts import cuts_of, whole_tokens
from zbsolve.profile.slices import split_by
from zbsolve.search.choices import more_slices
from zbsolve.step import Step

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
        (5, {"offload": "full"}, "slices: uneven ones do not go with offload, a sharded vocabulary or all-to-alls: take a"),
        (5, {"attention_exchange": True}, "attention exchange: is for even slices, of a number that divides the sequence"),
        ((2, -1), {}, "slices: lengths are numbers above 0"),
        (2, {"shards": 2}, "slices: sharded parameters (shards: 2) do not go with slices"),
        (
            2,
            {"placement": "mirror"},
            "slices: microbatches take several routes, and the slices of one must stay on the same",
        ),
        ("2:even-work", {"offload": "full"}, "slices: uneven ones do not go with offload, a sharded vocabulary"),
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


def test_auto_races_numbers_of_slices() -> None:
    """Up to twice the ranks at once, and more for as long as twice as many save 1 %: there is nothing here that each slice
    takes whatever its length but a message's latency. What does not divide the sequence is not tried."""
    best, tried = solve_auto(PROFILE, Step(4, 2, slices="auto", fused=True), effort=0.2)
    first = [f"single slices={n}" for n in (1, 2, 4, 8, "2:even-work", "4:even-work", "8:even-work")]
    assert [one.placement for one in tried][:7] == first
    more = [one for one in tried[7:] if one.value is not None]
    assert more
    assert best.problem.slices >= 16
    assert best.certificate is not None
    assert best.certificate.value == min(one.value for one in tried if one.value is not None)
    assert best.certificate.value < next(one.value or 0 for one in tried)
    assert verify(best.problem, best) == ()


def test_auto_leaves_out_what_the_sequence_does_not_allow() -> None:
    odd = replace(PROFILE, facts={"sequence": 6})
    best, tried = solve_auto(odd, Step(4, 2, slices="auto", fused=True), effort=0.05)
    why = {one.placement: one.why for one in tried if one.value is None}
    assert why["single slices=8"] == "slices: 8 slices of a sequence of 6 tokens: each needs one"
    assert verify(best.problem, best) == ()


def test_twice_as_many_slices() -> None:
    step = Step(4, 2, slices="auto")
    assert [more_slices(step.in_slices(n)) for n in (4, 8, "8:even-work", 1024)] == [None, 16, "16:even-work", 2048]
    assert more_slices(Step(4, 2000, slices=8)) is None
    assert more_slices(Step(4, 2, shards=2)) is None


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
