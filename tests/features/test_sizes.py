"""Sizes of microbatches: hand numbers, all sizes against exhaustive search, published instances, wrong use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from zbsolve import (
    BadInput,
    Batch,
    Layer,
    Link,
    Problem,
    Profile,
    Schedule,
    Step,
    bound_over_sizes,
    preset,
    solve,
    solve_auto,
    verify,
)
from zbsolve.cli import main
from zbsolve.features.feature import Now
from zbsolve.features.lengths import LENGTHS
from zbsolve.features.sizes import SIZES, of_sizes
from zbsolve.profile import from_trace
from zbsolve.profile.known_steps import step_again
from zbsolve.util.text import counted

from ..support.exact_streams import optimum
from ..support.runs import trace_of

# F 1 + 9, B 2 + 8, W 0 + 6, BW 2 + 14 µs for one sequence; 3 bytes until B, 5 until W; a message of 1 + 4.
LAYER = Layer("l", 10, 10, 6, 16, 3, 5, 0, 8, fixed_F=1, fixed_B=2, fixed_BW=2)
PROFILE = Profile("given", "two", (LAYER,) * 2, Link(1.0, 2.0), 0.0, None, {}, {})
# github.com/simon-0006/heteropipe, tmp_sganter/lp_solver_test.py: two GPUs, µs of one sequence; any message takes 95 µs.
MEASURED = (Layer("0", 3661, 4057, 12, 4069, 0, 0, 0, 0, message=95), Layer("1", 3569, 2206, 94, 2300, 0, 0, 0, 0))
TWO_GPUS = Profile("given", "heteropipe", MEASURED, Link(95.0, 1e12), 0.0, None, {}, {})
read = SIZES.fields[0].read


def duration(problem: Problem, name: str) -> int:
    return int(problem.passes.duration[problem.index[name]])


def every(batch: int, microbatches: int) -> Iterator[tuple[int, ...]]:
    """All sizes of so many microbatches."""
    for cuts in combinations(range(1, batch), microbatches - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, batch)))


def of_one(profile: Profile, step: Step, batch: int) -> list[Problem]:
    """The step of one microbatch of 1, 2, … sequences."""
    return [replace(step, microbatches=1, sizes=(size,)).problem(profile) for size in range(1, batch + 1)]


def drawn(rng: random.Random) -> tuple[Profile, Step, int]:
    """A small problem: profile, step and batch."""
    ranks = rng.choice((1, 2, 2, 3))
    microbatches = 2 if ranks == 3 else rng.randint(1, 3)

    def layer() -> Layer:
        fixed = [rng.randint(0, 4) for _ in range(4)]
        times = [one + rng.randint(1, 5) for one in fixed]
        kept = dict(zip(("fixed_F", "fixed_B", "fixed_W", "fixed_BW"), fixed, strict=True))
        return Layer("l", *times, 2, 1, 0, rng.randint(0, 3), **kept)  # type: ignore[arg-type]

    layers = tuple(layer() for _ in range(ranks))
    profile = Profile("given", "any", layers, Link(float(rng.randint(0, 2)), 1.0), 0.0, None, {}, {})
    return profile, Step(ranks, microbatches, fused=ranks == 3 or rng.random() < 0.6), rng.randint(microbatches, 6)


def test_times_bytes_and_messages_by_hand() -> None:
    problem = Step(2, 3, sizes=(1, 3, 2)).problem(PROFILE)
    assert [duration(problem, f"0F{i}") for i in range(3)] == [10, 1 + 3 * 9, 1 + 2 * 9]
    assert [duration(problem, f"1B{i}") for i in range(3)] == [10, 2 + 3 * 8, 2 + 2 * 8]
    assert [duration(problem, f"1W{i}") for i in range(3)] == [6, 18, 12]
    assert [int(problem.taken[problem.index[f"0F{i}"]]) for i in range(3)] == [8, 24, 16]
    lags = {problem.names[a]: int(lag) for a, lag in zip(problem.edges.before, problem.edges.lag, strict=True) if lag}
    assert [lags[f"0F{i}"] for i in range(3)] == [1 + 4, 1 + 12, 1 + 8]


def test_a_profiles_microbatch_may_have_several_sequences() -> None:
    """Of two: F 1 + 9 µs is of both."""
    twice = replace(PROFILE, facts={"microbatch": {"sequences": 2}})
    assert duration(Step(2, 1, sizes=(4,)).problem(twice), "0F0") == 1 + 2 * 9
    assert Step(2, 3, sizes=(2, 2, 2)).problem(twice) == Step(2, 3).problem(PROFILE)


def test_a_file_says_the_sizes_and_another_profile_times_them() -> None:
    problem = Step(2, 3, sizes=(1, 3, 2)).problem(PROFILE)
    again = Problem.from_json(problem.to_json())
    assert again.sizes == (1, 3, 2)
    assert again == problem != replace(problem, sizes=())
    slow = replace(PROFILE, rank_factors=(1.0, 2.0))
    assert step_again(again, slow) == Step(2, 3, sizes=(1, 3, 2)).problem(slow)


def test_what_is_fixed_stays_with_lengths_too() -> None:
    problem = Step(2, 2, lengths=LENGTHS.fields[0].read("1x,3x")).problem(PROFILE)
    assert [duration(problem, f"0F{i}") for i in range(2)] == [10, 1 + 3 * 9]


def test_what_is_fixed_of_a_role_stays_too() -> None:
    """The last stage takes 2 µs beside its layer's 1 + 9 a sequence, whatever the size."""
    none = Layer("r", 0, 0, 0, 0, 0, 0, 0, 0)
    with_roles = replace(PROFILE, roles=(none, none, replace(none, F=2, fixed_F=2)))
    problem = Step(2, 2, sizes=(1, 3)).problem(with_roles)
    assert [duration(problem, f"1F{i}") for i in range(2)] == [10 + 2, 1 + 3 * 9 + 2]


def test_a_run_scales_what_is_fixed() -> None:
    """A run takes half of what its profile says: so does what is fixed, and files take it."""
    twice = {one: 2 * getattr(LAYER, one) for one in ("F", "B", "W", "BW", "fixed_F", "fixed_B", "fixed_BW")}
    schedule = preset("1f1b", Step(2, 2).problem(PROFILE))
    timeline = schedule.timeline()
    run = from_trace(trace_of(schedule, (timeline, timeline.start)), replace(PROFILE, layers=(replace(LAYER, **twice),) * 2))
    assert [(one.F, one.fixed_F, one.fixed_B) for one in run.layers] == [(10, 1, 2)] * 2


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_and_the_best_sizes_against_all_of_them(seed: int) -> None:
    """No sizes take less than the bound. What is found is among the best."""
    profile, step, batch = drawn(random.Random(seed))
    values = {one: optimum(replace(step, sizes=one).problem(profile)) for one in every(batch, step.microbatches)}
    best = min(value for value in values.values() if value is not None)
    assert bound_over_sizes(of_one(profile, step, batch), batch, [step.microbatches]) <= best
    schedule, _ = solve_auto(profile, replace(step, sizes=Batch(batch)), effort=0.2)
    assert schedule.certificate is not None
    assert verify(schedule.problem, schedule) == ()
    assert best <= schedule.certificate.value <= 1.05 * best


def test_the_bound_is_tight_by_hand() -> None:
    """One rank: F and BW of 4 sequences take 2 + 4 · 23 in one microbatch, 3 more in two: of any number one is best."""
    one = replace(PROFILE, layers=(LAYER,))
    steps = of_one(one, Step(1, 1, fused=True), 4)
    assert [bound_over_sizes(steps, 4, [number]) for number in (1, 2, 3)] == [95, 98, 101]
    assert bound_over_sizes(steps, 4, range(1, 5)) == 95
    spans = of_one(one, Step(1, 1, fused=True, objective="span"), 4)
    assert bound_over_sizes(spans, 4, [2]) == 98


def test_any_number_is_at_most_each() -> None:
    profile, step, batch = drawn(random.Random(3))
    steps = of_one(profile, step, batch)
    assert bound_over_sizes(steps, batch, [1, 2, 3]) == min(bound_over_sizes(steps, batch, [one]) for one in (1, 2, 3))


def test_heteropipes_instance_gains_nothing_from_sizes() -> None:
    """32 sequences in 16 microbatches: rank 0 works 32 · (3661 + 4057 + 12) µs whatever the sizes are, and equal ones take
    no more. So do those that its benchmark ran, as `solve` finds."""
    step = Step(2, 16)
    assert bound_over_sizes(of_one(TWO_GPUS, step, 17), 32, [16]) == 32 * 7730
    schedule, tried = solve_auto(TWO_GPUS, replace(step, sizes=Batch(32)), effort=0.3)
    assert schedule.certificate is not None
    assert schedule.certificate.value == 32 * 7730
    assert next(one.placement for one in tried if not one.why) == "single sizes=even"


def test_small_microbatches_first_pay_where_starting_waits() -> None:
    """HeteroPipe's default: four ranks, 1 + 3, 1 + 3 and 1 + 2 µs a sequence, messages of 1 µs; 32 in at most 32. Equal
    sizes take 322 µs in the best number, 8. The search finds 300, and none takes less than 292."""
    layer = Layer("l", 4, 4, 3, 7, 0, 0, 0, 0, message=1, fixed_F=1, fixed_B=1, fixed_W=1, fixed_BW=2)
    profile = Profile("given", "four", (layer,) * 4, Link(1.0, 1e12), 0.0, None, {}, {})
    assert bound_over_sizes(of_one(profile, Step(4, 1), 32), 32, range(1, 33)) == 292
    schedule, tried = solve_auto(profile, Step(4, 32, sizes=Batch(32, any_number=True)), effort=1)
    assert schedule.certificate is not None
    assert schedule.certificate.value <= 303
    assert min(one.value or 999 for one in tried if "sizes=even of 8" in one.placement) == 322


def test_sizes_keep_within_memory() -> None:
    """8 bytes a sequence: a rank of 24 holds three at once, so no microbatch has four."""
    layer = replace(LAYER, output_bytes=0)
    tight = replace(PROFILE, layers=(layer, layer), capacity=24)
    schedule, tried = solve_auto(tight, Step(2, 3, sizes=Batch(7)), effort=0.2)
    assert max(schedule.timeline().peak_bytes) <= 24
    assert any("capacity" in one.why or "memory" in one.why for one in tried)


def test_numbers_stop_where_memory_does() -> None:
    """8 bytes a sequence: a rank of 64 holds two microbatches of four, and 34 sequences come in 9 of those. That is no power
    of two nor a multiple of the ranks. More microbatches than sequences there cannot be."""
    layer = Layer("l", 19, 18, 10, 28, 3, 5, 0, 0, fixed_F=10, fixed_B=10, fixed_W=5, fixed_BW=15)
    tight = replace(PROFILE, layers=(layer, layer), capacity=64)
    step = Step(2, 9, sizes=(2, *[4] * 8), fused=True)
    known = solve(step.problem(tight), method="greedy", effort=0.1).certificate
    schedule, _ = solve_auto(tight, replace(step, microbatches=20, sizes=Batch(34, any_number=True)), effort=0.6)
    assert known is not None
    assert schedule.certificate is not None
    assert schedule.certificate.value <= known.value
    schedule, _ = solve_auto(PROFILE, Step(2, 12, sizes=Batch(5, any_number=True)), effort=0.1)
    assert schedule.problem.microbatches <= 5


def test_moves_keep_the_batch() -> None:
    said = Step(2, 3, sizes=Batch(7, any_number=True))
    step = replace(said, sizes=(3, 2, 2))
    schedule, _ = solve_auto(PROFILE, replace(said, sizes=Batch(7)), effort=0.1)
    for now in (Now(step, said, PROFILE, "", ()), Now(step, said, PROFILE, "", (1, 1), schedule)):
        found = [one.sizes for _, one in SIZES.moves[0].near(now)]
        assert len(found) == len(set(found)) > 3
        assert all(sum(one) == 7 and min(one) >= 1 and len(one) in (2, 3) for one in found)
        assert {len(one) for one in found} == {2, 3}


def test_an_order_of_sizes_may_be_free() -> None:
    schedule, tried = solve_auto(PROFILE, Step(2, 3, sizes=(1, 3, 2), order="auto"), effort=0.1)
    assert {one.placement for one in tried} >= {"single order=given", "single order=shortest first"}
    assert schedule.certificate is not None
    assert schedule.certificate.value <= min(one.value or 9999 for one in tried)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("2, 4,4", (2, 4, 4)),
        ("2,4,4:10", (2, 4, 4)),
        ("auto", "auto"),
        ("auto:12", Batch(12)),
        ("auto:12:any", Batch(12, any_number=True)),
    ],
)
def test_words(said: str, found: object) -> None:
    assert read(said) == found


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("2,4,4:12", "sizes: they add up to 10, and the batch has '12'"),
        ("2,1.5", "size 1 is '1.5': a whole number"),
        ("auto:many", "sizes 'auto:many': auto, auto:32"),
        ("auto:12:some", "sizes 'auto:12:some': auto, auto:32"),
    ],
)
def test_wrong_words_are_named(said: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        read(said)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ({"sizes": (2, 4)}, "sizes: 2 sizes for 3 microbatches"),
        ({"sizes": (2, 4, 0)}, "sizes: size 2 is 0: one sequence at least"),
        ({"sizes": Batch(2)}, "sizes: 2 sequences for 3 microbatches: each gets one"),
        ({"sizes": (1, 1, 1), "lengths": (1.0, 1.0, 1.0)}, "sizes: lengths say what each microbatch has"),
        ({"sizes": (1, 1, 1), "slices": 2}, "sizes: microbatches of unlike sizes are not cut into slices yet"),
    ],
)
def test_wrong_use_is_named(step: dict[str, object], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        Step(2, 3, **step)


def at_size(size: int, *times: float) -> Profile:
    """A profile whose one layer takes so long with so many sequences."""
    layer = Layer("l", *times, 3 * size, 5 * size, 0, 8 * size)
    return Profile("given", "one", (layer,), Link(1.0, 2.0), 0.0, None, {"microbatch": {"sequences": size}}, {})


def test_profiles_of_several_sizes_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F 1 + 9 s, B 8 s, W 5 whatever s is, BW 2 + 14 s: by hand, from the sizes 4 and 2."""
    profiles = [at_size(size, 1 + 9 * size, 8 * size, 5, 2 + 14 * size) for size in (4, 2)]
    paths = [str(tmp_path / f"{i}.json") for i in range(2)]
    for profile, path in zip(profiles, paths, strict=True):
        profile.save(path)
    assert main(["profile", *paths, "-o", str(tmp_path / "both.json")]) == 0
    assert "sizes: 2, 4 sequences a microbatch; passes lie within 0.0% of their lines" in capsys.readouterr().out
    both = Profile.load(tmp_path / "both.json")
    (layer,) = both.layers
    assert pytest.approx((19, 16, 5, 30)) == (layer.F, layer.B, layer.W, layer.BW)
    assert (layer.fixed_F, layer.fixed_B, layer.fixed_W, layer.fixed_BW) == pytest.approx((1, 0, 5, 2))
    problem = Step(1, 2, sizes=(4, 1)).problem(both)
    assert [duration(problem, f"0F{i}") for i in range(2)] == [37, 10]
    assert [duration(problem, f"0W{i}") for i in range(2)] == [5, 5]
    assert [int(problem.taken[problem.index[f"0F{i}"]]) for i in range(2)] == [32, 8]


def test_a_line_of_three_sizes_has_no_part_below_0() -> None:
    """Times that grow faster than the size: through 0."""
    found = of_sizes([at_size(s, t, 1, 1, 2) for s, t in ((1, 9), (2, 20), (4, 44))], ["a", "b", "c"])
    assert found.layers[0].fixed_F == 0
    assert pytest.approx((9 + 40 + 176) / 21) == found.layers[0].F
    assert found.facts["sizes"] == [1, 2, 4]


def test_profiles_that_make_no_line_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = at_size(2, 3, 3, 3, 6)
    with pytest.raises(BadInput, match="b: facts: a microbatch of 2 sequences, as in another profile"):
        of_sizes([one, one], ["a", "b"])
    with pytest.raises(BadInput, match="b: layers: their names are not those of a"):
        of_sizes([one, replace(at_size(3, 3, 3, 3, 6), layers=(replace(LAYER, name="m"),))], ["a", "b"])
    assert main(["profile", "gpt-tiny", "b.json", "-o", str(tmp_path / "c.json")]) == 2
    assert "gpt-tiny: one MODEL is measured at a time" in capsys.readouterr().err


def test_more_is_fixed_than_a_pass_takes_is_named() -> None:
    layer = {"F": 3, "B": 3, "W": 3, "fixed_F": 4}
    with pytest.raises(BadInput, match=r"p: layers\[0\]: field 'fixed_F' is 4 µs, more than F takes"):
        Profile.from_json({"layers": [layer]}, "p")


def test_the_command_says_sizes_and_a_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "given.json"
    numbers = [
        "--ranks",
        "2",
        "--F",
        "10",
        "--B",
        "10",
        "--W",
        "6",
        "fixed-F=1",
        "fixed-B=2",
        "sequences=2",
        "-o",
        str(path),
    ]
    assert main(["numbers", *numbers]) == 0
    capsys.readouterr()
    step = ["--ranks", "2", "--microbatches", "3", "--sizes", "auto:12", "--effort", "0.1"]
    assert main(["solve", str(path), *step, "-o", str(tmp_path / "sizes.json")]) == 0
    sizes = Schedule.load(tmp_path / "sizes.json").problem.sizes
    assert f"sequences of the microbatches: {counted(sizes)}\n" in capsys.readouterr().out
    assert sum(sizes) == 12
    assert main(["solve", str(path), *step, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (bound,) = said["bound_of_every_size of microbatches"].values()
    assert bound <= said["value"]
    assert {one["placement"] for one in said["tried"]} >= {"single sizes=even", "single sizes=growing"}
