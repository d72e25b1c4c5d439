"""Side inputs as edges: by hand, and against exhaustive search."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from zbsolve import BadInput, Infeasible, Profile, Schedule, Step, pipeline, preset, solve, verify
from zbsolve.build import SideInput, Work, with_exchange, with_offload, with_side_inputs, with_work
from zbsolve.build.sides import rows_begun
from zbsolve.ilp.bounds.closed_forms import all_closed_forms
from zbsolve.partition.layer import Given, Layer, Link
from zbsolve.partition.splits import Splits
from zbsolve.partition.stage_costs import least_step
from zbsolve.problem import Problem
from zbsolve.schedule.handover import most_waiting

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


def test_what_stays_in_its_stage_is_held_there() -> None:
    """Stage 0 gives 7 bytes to itself, and to stage 2 on its rank. It holds 3 of them in any case."""
    plain = pipeline([1] * 3, B=[1] * 3, W=[1] * 3, placement=(0, 1, 0), microbatches=1)
    W, sum_of_gradients = ("2B0", "2W0", 0, 7, 0), ("2B0", "0B0", 0, 7, 0)
    later = with_side_inputs(plain, SideInput(0, (2,), 7, kept=3))
    assert rows(later, plain) == {("0F0", "2B0", 0, 4, 0), W, sum_of_gradients}
    both = with_side_inputs(plain, SideInput(0, (0, 2), 7, kept=3))
    assert rows(both, plain) == {("0F0", "0B0", 0, 4, 0), ("0B0", "0W0", 0, 7, 0), W, sum_of_gradients}
    front = pipeline([1] * 3, BW=[0, 1, 1], placement=(0, 1, 0), microbatches=1, untrained=1)
    found = rows(with_side_inputs(front, SideInput(0, (0, 2), 7, kept=3)), front)
    assert found == {("0F0", "2BW0", 0, 4, 0)}  # what has no backward keeps nothing for one


def test_what_a_recompute_makes_again_is_held_from_then_on() -> None:
    """Stage 0 drops what it holds itself, too; of a stage that recomputes in part nobody knows which part takes it."""
    for again, counts, held in (([0], (), ("0X0", "0BW0", 0, 4, 0)), ({0: 1}, (2, 1, 1), ("0F0", "0BW0", 0, 7, 0))):
        how = {"placement": (0, 1, 0), "microbatches": 1, "layers": counts, "recompute": again, "X": [1] * 3}
        plain = pipeline([1] * 3, BW=[1] * 3, **how)  # type: ignore[arg-type]
        later = {("0F0", "2BW0", 0, 7, 0)}
        assert rows(with_side_inputs(plain, SideInput(0, (2,), 7, kept=3)), plain) >= later
        assert rows(with_side_inputs(plain, SideInput(0, (0,), 7, kept=3)), plain) == {held}
        found = rows(with_side_inputs(plain, SideInput(0, (0, 2), 7, kept=3)), plain)
        assert found == {held, ("2BW0", "0BW0", 0, 7, 0), *(later if not counts else ())}


def test_a_step_by_hand() -> None:
    """F = 2 and BW = 4 on three ranks, a message of 10 µs from the first to the last and back: the row alone would be
    3 · 6 + 0, but the last F waits until 2 + 10, and the first BW until 12 + 2 + 4 + 10: it ends at 32."""
    plain = pipeline([2] * 3, BW=[4] * 3, microbatches=1)
    assert solve(plain, effort=0.1).certificate.value == 18  # type: ignore[union-attr]
    schedule = solve(with_side_inputs(plain, SideInput(0, (2,), comm=10)), effort=0.1)
    assert schedule.certificate is not None
    assert schedule.certificate.value == schedule.certificate.bound == 32


def test_towers_by_hand() -> None:
    """F = 2 and BW = 4: two towers, and what joins them, on ranks of their own. One microbatch is 2 + 2 + 4 + 4 long where a
    row of three is 18; of m, the last rank has 6 µs each."""
    for m in (1, 3):
        plain = pipeline([2] * 3, BW=[4] * 3, microbatches=m)
        problem = with_side_inputs(plain, SideInput(0, (2,)), begins=(1,))
        certificate = solve(problem, effort=0.1).certificate
        assert certificate is not None
        assert certificate.value == certificate.bound == 12 + (m - 1) * 6
    e, names = problem.edges, problem.names
    pairs = {(names[a], names[b]) for a, b in zip(e.before, e.after, strict=True)}
    assert {("1F0", "2F0"), ("0F0", "2F0"), ("2BW0", "0BW0"), ("0F0", "0BW0")} <= pairs
    assert not {("0F0", "1F0"), ("1BW0", "0BW0")} & pairs


@pytest.mark.parametrize(
    ("placement", "begins", "gradient", "right"),
    [
        # Takers of one rank in two rows: the first one gets the message.
        ((0, 1, 1), (1, 2), True, {("0F0", "1F0"), ("1F0", "2F0"), ("2BW0", "1BW0"), ("1BW0", "0BW0")}),
        ((0, 1, 1), (1, 2), False, {("0F0", "1F0"), ("1F0", "2F0"), ("2BW0", "1BW0")}),
        ((0, 1, 1), (1,), True, {("0F0", "1F0"), ("1BW0", "0BW0")}),  # the row orders them
        # The giver's own rank has a taker in another row.
        ((0, 1, 0), (1, 2), True, {("0F0", "1F0"), ("0F0", "2F0"), ("1BW0", "0BW0"), ("2BW0", "0BW0")}),
        ((0, 1, 0), (1, 2), False, {("0F0", "1F0"), ("0F0", "2F0")}),
    ],
)
def test_what_no_row_orders(
    placement: tuple[int, ...], begins: tuple[int, ...], gradient: bool, right: set[tuple[str, str]]
) -> None:
    plain = pipeline([2] * 3, BW=[4] * 3, placement=placement, microbatches=1)
    problem = with_side_inputs(plain, SideInput(0, (1, 2), gradient=gradient), begins=begins)
    bare = with_side_inputs(plain, begins=begins)
    assert rows_begun(problem) == rows_begun(bare) == begins
    names, edges, before = problem.names, problem.edges, len(bare.edges)
    more = zip(edges.before[before:].tolist(), edges.after[before:].tolist(), strict=True)
    assert {(names[a], names[b]) for a, b in more} == right
    assert Problem.from_json(problem.to_json()) == problem


def towers(rng: random.Random, stages: int) -> tuple[list[int], list[SideInput]]:
    """Where rows of a graph begin, two or three, and side inputs that join them."""
    begins, sides = sorted(rng.sample(range(1, stages), rng.randint(1, min(2, stages - 1)))), []
    for first, end in pairwise([0, *begins]):
        giver = rng.randrange(first, end)
        takers = {rng.randrange(end, stages), *(s for s in range(giver + 1, stages) if rng.random() < 0.4)}
        sides.append(random_side(rng, giver, takers))
    return begins, sides


def random_side(rng: random.Random, giver: int, takers: Iterable[int]) -> SideInput:
    """Of up to two bytes, that the giver's own stage may take, too, or keep."""
    size, own = rng.randint(0, 2), {giver} if rng.random() < 0.4 else set()
    ends = giver, tuple(sorted({*takers, *own}))
    return SideInput(*ends, size, rng.randint(0, 9), rng.random() < 0.8, rng.randint(0, size))


def random_towers(seed: int) -> Problem:
    """Towers of two to five stages on ranks of their own or on shared ones, some with work beside the step."""
    rng = random.Random(seed)
    placement = rng.choice([(0, 1), (0, 1, 2), (0, 1, 0), (0, 1, 1), (0, 1, 1, 0), (0, 1, 2, 0), (1, 0, 1, 0, 1)])
    stages, fused = len(placement), rng.random() < 0.6
    times = [[rng.randint(1, 6) for _ in range(stages)] for _ in range(3)]
    backward = {"BW": times[1]} if fused else {"B": times[1], "W": times[2]}
    plain = pipeline(
        times[0],
        placement=placement,
        microbatches=3 if stages < 3 else rng.randint(1, 2),
        comm=rng.randint(0, 3),
        held_until_B=1,
        recompute=[rng.randrange(stages)] if rng.random() < 0.3 else [],
        untrained=rng.choice([0, 0, 0, 1]),
        objective=rng.choice(["makespan", "makespan", "span"]),
        **backward,  # type: ignore[arg-type]
    )
    begins, sides = towers(rng, stages)
    problem = with_side_inputs(plain, *sides, begins=begins)
    room = (rng.randint(3, 12),) * (max(placement) + 1)
    problem = replace(problem, capacity=room if rng.random() < 0.7 else None)
    works = [Work(rng.choice(placement), rng.randint(1, 6), rng.randint(1, 2)) for _ in range(rng.choice([0, 0, 1]))]
    return with_work(problem, *works)


@pytest.mark.parametrize("seed", range(24))
def test_bounds_and_values_on_random_towers(seed: int) -> None:
    problem = random_towers(seed)
    bounds_hold(problem, optimum)
    if seed % 4 == 0:
        solve_is_exact(problem, optimum)


def test_what_one_stage_takes_and_another_frees_makes_no_bound_too_high() -> None:
    """2B holds the sum of gradients until 1B on its rank: behind the last B stage 1 has freed 2 bytes more than it took."""
    how = {"placement": (0, 1, 1), "microbatches": 2, "held_until_B": 1, "objective": "span"}
    plain = pipeline([3, 6, 5], B=[1, 1, 1], W=[6, 2, 4], **how)  # type: ignore[arg-type]
    sides = SideInput(0, (1,), 0, 7), SideInput(1, (2,), 2, kept=2)
    for room, value in ((7, 54), (8, 50)):
        problem = replace(with_side_inputs(plain, *sides, begins=(1, 2)), capacity=(room, room))
        assert optimum(problem) == value == max(bound.value for bound in all_closed_forms(problem))


def test_orders_of_a_row_are_orders_of_towers() -> None:
    """So schedules by name hold, and a graph takes no longer than its row."""
    plain = pipeline([2] * 4, BW=[4] * 4, microbatches=6, held_until_B=1)
    problem = with_side_inputs(plain, SideInput(1, (2, 3)), begins=(2,))
    for name in ("gpipe", "1f1b", "zb-h1"):
        schedule = preset(name, problem)
        assert verify(problem, schedule) == ()
        assert schedule.timeline().makespan <= preset(name, plain).timeline().makespan


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
        takers = rng.sample(range(giver + 1, stages), rng.randint(1, stages - giver - 1))
        sides.append(random_side(rng, giver, takers))
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


def tower_profile(rng: random.Random) -> Profile:
    """Four to six layers of random times, in two or three rows that join."""
    count, fused = rng.randint(4, 6), rng.random() < 0.6
    half = rng.choice([0.0, 0.0, 0.5])
    times = [[rng.randint(1, 6) + half for _ in "FBW"] for _ in range(count)]
    layers = [Layer(str(i), F, 0 if fused else B, 0 if fused else W, B + W, 1, 0, 0, i) for i, (F, B, W) in enumerate(times)]
    begins, sides = towers(rng, count)
    for number, side in enumerate(sides):
        given = Given(str(number), side.comm, side.gradient)
        layers[side.giver] = replace(layers[side.giver], gives=(*layers[side.giver].gives, given))
        for i in {*side.takers} - {side.giver}:
            layers[i] = replace(layers[i], takes=(*layers[i].takes, str(number)))
    layers = [replace(one, begins=i in begins) for i, one in enumerate(layers)]
    return replace(equal_layers(count), layers=tuple(layers), link=Link(rng.choice([0.0, 2.0]), rng.choice([1.0, 1e6])))


@pytest.mark.parametrize("seed", range(12))
def test_no_partition_of_towers_is_below_the_bound(seed: int) -> None:
    """Against the optimum of every split. On 0,1,1,0 a rank's first stage need not be the first that begins."""
    rng = random.Random(seed)
    profile, placement = tower_profile(rng), rng.choice(["0,1", "0,1,0", "0,1,2", "0,1,1,0", "0,1,1,0"])
    stages, objective = placement.count(",") + 1, rng.choice(["makespan", "makespan", "span"])
    ranks = int(max(placement)) + 1
    step = Step(ranks, 2, placement=placement, objective=objective, fused=rng.random() < 0.5)
    if rng.random() < 0.3:
        profile = replace(profile, rank_factors=tuple(rng.choice([1.0, 1.3]) for _ in range(ranks)))
    count, found = len(profile.layers), list[int]()
    for cuts in combinations(range(1, count), stages - 1):
        counts = tuple(b - a for a, b in pairwise((0, *cuts, count)))
        value = optimum(replace(step, partition=counts).problem(profile))
        assert value is not None
        found.append(value)
    assert least_step(step.costs(profile), objective) <= min(found)
    assert Splits.of(step.costs(profile)) is None


def test_a_rank_begins_with_any_of_its_stages() -> None:
    """Found by such a search: rank 1 has stages 1 and 2, and stage 2 begins a row, so the rank waits for nothing. The one
    split takes 50 µs; the bound was 54."""
    rows = [(2, 9), (5, 6), (4, 10), (4, 8)]
    layers = [Layer(str(i), F, 0, 0, BW, 0, 0, 0, 0) for i, (F, BW) in enumerate(rows)]
    layers[0] = replace(layers[0], gives=(Given("v", 9),))
    layers[1], layers[3] = replace(layers[1], takes=("v",)), replace(layers[3], takes=("v",))
    layers[2] = replace(layers[2], begins=True)
    profile, step = replace(equal_layers(4), layers=tuple(layers)), Step(2, 2, placement="0,1,1,0")
    assert optimum(step.problem(profile)) == 50
    assert least_step(step.costs(profile), "makespan") == 48


@pytest.mark.parametrize(("microbatches", "layers"), [(2, (3, 2, 1)), (12, (2, 3, 1))])
def test_the_default_keeps_towers_apart_where_that_is_shorter(microbatches: int, layers: tuple[int, ...]) -> None:
    """F is 4 4 2 in one tower, 4 3 in the other, 8 behind both, and BW twice that. As one row stages of 8, 9 and 8 are
    balanced, with a layer of each tower in the middle: every microbatch takes 25 · 3 µs. Apart, 10 and 7 run side by side:
    18 · 3 µs, but 30 µs a microbatch on rank 0 in place of 27, which 12 of them feel."""
    rows = [Layer(str(i), F, 0, 0, 2 * F, 0, 0, 0, 0) for i, F in enumerate((4, 4, 2, 4, 3, 8))]
    rows[2], rows[5] = replace(rows[2], gives=(Given("v", 0),)), replace(rows[5], takes=("v",))
    rows[3] = replace(rows[3], begins=True)
    profile = replace(equal_layers(6), layers=tuple(rows))
    assert Step(3, microbatches).problem(profile).layers == layers
    least = {one: optimum(Step(3, 2, partition=one).problem(profile)) for one in ((3, 2, 1), (2, 3, 1))}
    assert least == {(3, 2, 1): 10 + 2 * 24 + 20, (2, 3, 1): (8 + 9) + 2 * 24 + (18 + 16)}  # what is around rank 2


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
    for begins in ((0,), (3,), (2, 1), (1, 1)):
        with pytest.raises(BadInput, match=r"begins .*: stages from 1 to 2 are needed, ascending"):
            with_side_inputs(plain, begins=begins)
    with pytest.raises(BadInput, match="messages occupy their sender, and a stage that begins a row is sent none"):
        with_side_inputs(pipeline([3] * 2, BW=[3] * 2, microbatches=1, comm=1, blocking=True), begins=(1,))
    for side, why in (
        (SideInput(1, (0, 2)), "number 0: stage 1 gives it to"),
        (SideInput(0, (2, 3)), "of 3"),
        (SideInput(0, (2, 1)), "takers are stages, ascending"),
        (SideInput(0, ()), "takers are stages, ascending"),
        (SideInput(0, (1,), -1), "bytes and µs are from 0 up"),
        (SideInput(0, (1,), 3, kept=4), "and those kept are of them"),
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


def test_towers_that_nothing_joins_but_what_they_hold() -> None:
    """The plain step of two forwards that begin a row each has no edges."""
    forwards = pipeline([1, 1], microbatches=1, placement=(0, 0))
    problem = with_side_inputs(forwards, SideInput(0, (1,), bytes=2), begins=(1,))
    assert (problem.edges.before.tolist(), problem.edges.after.tolist()) == ([0], [1])
    assert problem.taken.tolist() == [2, 0]
