"""Side inputs as edges: by hand, and against exhaustive search."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from zbsolve import BadInput, Infeasible, Profile, Schedule, Step, pipeline, solve, verify
from zbsolve.build import SideInput, with_exchange, with_offload, with_side_inputs
from zbsolve.handover import most_waiting
from zbsolve.layer import Given, Layer, Link
from zbsolve.problem import Problem

from ..support.exact import optimum
from ..support.profiles import equal_layers
from ..support.stream_checks import bounds_hold, solve_is_exact


def rows(problem: Problem, plain: Problem) -> set[tuple[str, str, int, int, int]]:
    """What edges are more than those of `plain`: ends, µs, further bytes, what they carry."""
    e, names, count, found = problem.edges, problem.names, len(plain.edges), set()
    for i in range(len(e)):
        more = int(e.bytes[i]) - (int(plain.edges.bytes[i]) if i < count else 0)
        if more or i >= count:
            found.add((names[e.before[i]], names[e.after[i]], int(e.lag[i]), more, int(e.carries[i])))
    return found


def test_a_rank_gets_it_once_and_keeps_it_until_its_last_user() -> None:
    """Stages 0 1 2 on ranks 0 1 2, and 3 4 5 on 2 1 0. Stage 0 gives 7 bytes to 2, 3 (rank 2), 4 (rank 1), 5 (its own)."""
    ours, theirs = 3, 4
    for split in (True, False):
        backward = {"B": [1] * 6, "W": [1] * 6} if split else {"BW": [2] * 6}
        plain = pipeline([1] * 6, placement=(0, 1, 2, 2, 1, 0), microbatches=1, held_until_B=10, **backward)  # type: ignore[arg-type]
        B = "B" if split else "BW"
        right = {
            ("0F0", "2F0", 4, 0, ours),
            ("0F0", "4F0", 4, 0, ours),
            (f"2{B}0", f"0{B}0", 4, 0, theirs),
            (f"4{B}0", f"0{B}0", 4, 0, theirs),
            ("2F0", f"2{B}0", 0, 7, 0),  # rank 2, for both stages there
            (f"3{B}0", f"2{B}0", 0, 7, 0),  # and the sum of their gradients
            ("4F0", f"4{B}0", 0, 7, 0),
            ("0F0", f"5{B}0", 0, 7, 0),  # rank 0 has it already
            (f"5{B}0", f"0{B}0", 0, 7, 0),
        }
        right |= {(f"{s}B0", f"{s}W0", 0, 7, 0) for s in (2, 3, 4, 5)} if split else set()
        problem = with_side_inputs(plain, SideInput(0, (2, 3, 4, 5), 7, 4))
        carried = {row for row in rows(problem, plain) if row[4]}
        assert carried == {row for row in right if row[4]}
        assert rows(problem, plain) == right


def test_messages_with_the_same_ends_are_one() -> None:
    plain = pipeline([1] * 3, BW=[2] * 3, microbatches=2, comm=5)
    problem = with_side_inputs(plain, SideInput(0, (1, 2), 7, 4), SideInput(0, (2,), 3, 2, gradient=False))
    found = {row for row in rows(problem, plain) if row[0].endswith("0") and row[4]}
    assert found == {("0F0", "1F0", 4, 0, 3), ("0F0", "2F0", 6, 0, 3), ("1BW0", "0BW0", 4, 0, 4), ("2BW0", "0BW0", 4, 0, 4)}


def test_where_nothing_is_trained_no_gradient_goes() -> None:
    """Stage 0 has no backward, so nothing goes back to it; stage 1 has none either, so its rank drops the value behind F."""
    plain = pipeline([1] * 4, BW=[0, 0, 2, 2], microbatches=1, untrained=2, placement=(0, 1, 2, 1))
    problem = with_side_inputs(plain, SideInput(0, (1, 2), 7, 4))
    assert rows(problem, plain) == {("0F0", "1F0", 4, 0, 3), ("0F0", "2F0", 4, 0, 3), ("2F0", "2BW0", 0, 7, 0)}
    forwards = with_side_inputs(pipeline([1] * 3, placement=(0, 1, 1), microbatches=1), SideInput(0, (1, 2), 7, 4))
    assert sorted(forwards.edges.bytes.tolist()) == [0, 0, 0, 7]


def test_a_step_by_hand() -> None:
    """F = 2 and BW = 4 on three ranks, a message of 10 µs from the first to the last and back: the row alone would be
    3 · 6 + 0, but the last F waits until 2 + 10, and the first BW until 12 + 2 + 4 + 10: it ends at 32."""
    plain = pipeline([2] * 3, BW=[4] * 3, microbatches=1)
    assert solve(plain, effort=0.1).certificate.value == 18  # type: ignore[union-attr]
    schedule = solve(with_side_inputs(plain, SideInput(0, (2,), comm=10)), effort=0.1)
    assert schedule.certificate is not None
    assert schedule.certificate.value == schedule.certificate.bound == 32


def random_step(seed: int) -> Problem:
    """Three or four stages on two or three ranks, two microbatches; room for what one needs, or some more."""
    rng = random.Random(seed)
    placement = rng.choice([(0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 0), (0, 0, 1)])
    stages, fused = len(placement), rng.random() < 0.5
    times = [[rng.randint(1, 6) for _ in range(stages)] for _ in range(3)]
    backward = {"BW": times[1]} if fused else {"B": times[1], "W": times[2]}
    recompute = [rng.randrange(stages)] if rng.random() < 0.3 else []
    plain = pipeline(
        times[0],
        placement=placement,
        microbatches=2,
        comm=rng.randint(0, 3),
        held_until_B=1,
        held_until_W=0 if fused else 1,
        recompute=recompute,
        untrained=rng.choice([0, 0, 0, 1]),
        objective=rng.choice(["makespan", "span"]),
        **backward,  # type: ignore[arg-type]
    )
    sides = []
    for _ in range(rng.randint(1, 2)):
        giver = rng.randrange(stages - 1)
        takers = sorted(rng.sample(range(giver + 1, stages), rng.randint(1, stages - giver - 1)))
        sides.append(SideInput(giver, tuple(takers), rng.randint(0, 2), rng.randint(0, 9), rng.random() < 0.8))
    room = [rng.randint(4, 14)] * (max(placement) + 1)
    return replace(with_side_inputs(plain, *sides), capacity=tuple(room) if rng.random() < 0.8 else None)


@pytest.mark.parametrize("seed", range(40))
def test_bounds_and_values_on_random_steps(seed: int) -> None:
    problem = random_step(seed)
    bounds_hold(problem, optimum)
    if seed % 4 == 0:
        solve_is_exact(problem, optimum)


def side_profile(**link: float) -> Profile:
    """Eight equal layers; layer 1 gives 1,000 bytes that layers 4 to 7 take, and 50 whole numbers that layer 6 takes."""
    attention = {"attention_F": 1.0, "attention_B": 1.0, "kv_bytes": 1, "output_bytes": 10}
    layers = [replace(one, **attention) for one in equal_layers(8).layers]  # type: ignore[arg-type]
    layers[1] = replace(layers[1], gives=(Given("memory", 1000), Given("ids", 50, gradient=False)))
    for i in range(4, 8):
        layers[i] = replace(layers[i], takes=("memory", "ids") if i == 6 else ("memory",))
    return replace(equal_layers(8), layers=tuple(layers), link=Link(latency=2.0, bytes_per_us=10.0, **link))


def test_a_profile_says_them() -> None:
    profile = side_profile()
    assert Profile.from_json(profile.to_json()) == profile
    step = Step(4, 4, fused=True)
    plain = replace(profile, layers=tuple(replace(one, gives=(), takes=()) for one in profile.layers))
    problem = step.problem(profile)
    found = {row for row in rows(problem, step.problem(plain)) if row[0].endswith("0")}
    assert found == {
        ("0F0", "2F0", 102, 0, 3),
        ("0F0", "3F0", 102 + 7, 0, 3),
        ("2BW0", "0BW0", 102, 0, 4),
        ("3BW0", "0BW0", 102, 0, 4),
        ("2F0", "2BW0", 0, 1000, 0),
        ("3F0", "3BW0", 0, 1050, 0),
    }
    assert problem.messages is not None
    assert set(problem.messages.sides) == {(0, 2, 1000), (0, 3, 1050)}
    before = step.problem(plain).messages
    assert before is not None
    more = [a - b for a, b in zip(problem.messages.reserved, before.reserved, strict=True)]
    assert more == [2 * 2050, 0, 2 * 1000, 2 * 1050]
    schedule = solve(problem, effort=0.1)
    again = Schedule.from_json(schedule.to_json())
    assert verify(again.problem, again) == ()
    assert again.problem.messages == problem.messages
    assert (most_waiting(schedule) >= [0, 0, 1000, 1050]).all()


def test_on_one_rank_nothing_is_sent() -> None:
    problem = Step(1, 2, fused=True).problem(side_profile())
    assert not problem.edges.beside.any()
    whole = Step(2, 2, placement="0,1,0", partition=(4, 2, 2), fused=True).problem(side_profile())
    e = whole.edges
    assert {(whole.names[a], whole.names[b]) for a, b in zip(e.before[e.beside], e.after[e.beside], strict=True)} == {
        (f"{a}F{m}", f"{b}F{m}") for m in range(2) for a, b in [(0, 1)]
    } | {(f"1BW{m}", f"0BW{m}") for m in range(2)}


def test_one_microbatch_that_does_not_fit_is_named() -> None:
    profile = side_profile()
    fits = Step(2, 2, partition=(4, 4), memory="20KiB")
    assert fits.problem(replace(profile, layers=tuple(replace(one, gives=(), takes=()) for one in profile.layers)))
    large = tuple(replace(one, gives=tuple(g._replace(bytes=30_000) for g in one.gives)) for one in profile.layers)
    with pytest.raises(Infeasible, match="rank"):
        fits.problem(replace(profile, layers=large))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({1: ((), ())}, "layer 4: takes 'memory', and no layer gives it"),
        ({2: (("memory",), ())}, "layer 2: gives 'memory', which layer 1 gives already"),
        ({0: ((), ("ids",))}, "layer 0: takes 'ids', and layer 1, which gives it, does not come before"),
        ({3: (("skip",), ())}, "layer 3: gives 'skip', and no layer takes it"),
        ({3: (("skip",), ("skip",))}, "layer 3: takes 'skip', and layer 3, which gives it, does not come before"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[int, tuple[tuple[str, ...], tuple[str, ...]]], why: str) -> None:
    profile = side_profile()
    layers: list[Layer] = list(profile.layers)
    for i, (gives, takes) in changes.items():
        layers[i] = replace(layers[i], gives=tuple(Given(name, 5) for name in gives), takes=takes)
    wrong = replace(profile, layers=tuple(layers))
    with pytest.raises(BadInput, match=why):
        Profile.from_json(wrong.to_json())
    with pytest.raises(BadInput, match=why):
        Step(2, 2).problem(wrong)


def test_wrong_numbers_are_named() -> None:
    plain = pipeline([1] * 3, BW=[2] * 3, microbatches=1)
    for side, why in (
        (SideInput(1, (1, 2)), "number 0: stage 1 gives it to"),
        (SideInput(0, (2, 3)), "of 3"),
        (SideInput(0, (2, 1)), "takers are stages, ascending"),
        (SideInput(0, ()), "takers are stages, ascending"),
        (SideInput(0, (1,), -1), "bytes and µs are from 0 up"),
    ):
        with pytest.raises(BadInput, match=why):
            with_side_inputs(plain, side)
    held = pipeline([1] * 3, BW=[2] * 3, microbatches=1, held_until_B=4)
    with pytest.raises(BadInput, match="side inputs: the problem has offload already"):
        with_side_inputs(with_offload(held, 1, 1), SideInput(0, (1,)))
    sliced = pipeline([1] * 3, BW=[2] * 3, microbatches=1, slices=2)
    with pytest.raises(BadInput, match="side inputs: sequences are cut into slices"):
        with_side_inputs(sliced, SideInput(0, (1,)))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"slices": 2}, "side inputs: do not go with slices yet"),
        ({"vocabulary": "sharded"}, "do not go with sharded vocabulary yet"),
        ({"offload": "full"}, "do not go with offload yet"),
        ({"blocking": True}, "messages of this link occupy their sender"),
    ],
)
def test_what_they_do_not_go_with_is_named(words: dict[str, object], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        Step(2, 2, partition=(4, 4), **words).problem(side_profile())


def test_sums_of_gradients_come_behind() -> None:
    problem = Step(2, 2, partition=(4, 4), replicas=2).problem(side_profile())
    assert len(problem.rows("C")) == 2
    plain = with_exchange(pipeline([1] * 2, BW=[2] * 2, microbatches=1), 3)
    assert with_side_inputs(plain, SideInput(0, (1,), comm=1)).edges.beside.sum() == 2
