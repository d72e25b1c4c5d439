"""Bounds over every split of layers into stages: against exhaustive search over every split and order, and in files."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ortools.sat.python.cp_model import OPTIMAL

from zbsolve import BadInput, Edge, Layer, Link, Problem, Profile, Schedule, Step, preset, verify
from zbsolve.cli import main
from zbsolve.ilp.cp import make_solver, solve_cp
from zbsolve.ilp.every_split import SplitModel, SplitSearch, proven_again
from zbsolve.partition.layer import HostLink
from zbsolve.partition.splits import Lanes, Splits, Wave, least_of_ranks
from zbsolve.partition.stage_costs import least_step
from zbsolve.search.climb import moved_layers
from zbsolve.util.clock import Clock
from zbsolve.util.errors import Infeasible

from ..support.partitions import partitions

MANY = 10**6  # µs: longer than any of these steps
SHAPES = (("single", 2, 2), ("single", 3, 3), ("loop", 2, 4), ("vee", 2, 4))  # placement, ranks, stages


def equal_layers(count: int, forward: float = 1.0, backward: float = 1.0) -> Profile:
    """One byte a layer; messages take no time."""
    layers = tuple(Layer(f"l{i}", forward, 0.0, 0.0, backward, 1, 0, 0, 0) for i in range(count))
    return Profile("given", "equal", layers, Link(0.0, 1e12), 0.0, None, {}, {})


def drawn(rng: random.Random) -> tuple[Profile, Step, int]:
    """A model of few layers, unequal or equal, of whole times or not, with messages and memory or without; and stages."""
    placement, ranks, stages = rng.choice(SHAPES)
    count, m, whole, same = stages + rng.choice([1, 2]), rng.choice([1, 2, 3]), rng.random() < 0.7, rng.random() < 0.3

    def time(most: int) -> float:
        return rng.randint(1, most) + (0.0 if whole else rng.choice([0.3, 0.5, 0.7]))

    def layer(i: int) -> Layer:
        held = rng.randint(0, 4), rng.randint(0, 3)
        return Layer(f"l{i}", time(9), time(9), time(9), time(16), *held, 0, 0, message=float(rng.choice([0, 0, 1, 5])))

    first, link, total = layer(0), Link(float(rng.choice([0, 1, 6])), 1e12), 0
    layers = tuple(first if same else layer(i) for i in range(count))
    total = sum(one.held_until_B + one.held_until_W for one in layers)
    room = [max(1, int(total * rng.uniform(0.4, 1 + m / 2) * 1.2 / ranks)) for _ in range(ranks)]
    memory = ",".join(f"{one}B" for one in room) if rng.random() < 0.5 else None
    step = Step(ranks, m, placement, "equal", memory=memory, fused=rng.random() < 0.6)
    return Profile("given", "random", layers, link, 0.0, None, {}, {}), step, stages


def shortest(profile: Profile, step: Step, stages: int) -> int | None:
    """The least of every split and order, each solved to the end; None where none fits."""
    found = list[int]()
    for counts in partitions(len(profile.layers), stages):
        try:
            result = solve_cp(replace(step, partition=counts).problem(profile), None, 0, 20.0)
        except Infeasible:
            continue
        found += [] if result.infeasible else [result.bound]
    return min(found, default=None)


def least_of(splits: Splits, split: tuple[int, ...]) -> int:
    """µs that a split takes at least, by what each of its ranks does."""
    return int(-(-least_of_ranks(Lanes(splits).numbers, np.array(split)).max() // splits.unit))


@pytest.mark.parametrize("seed", range(8))
def test_no_split_has_a_schedule_below_the_bound(seed: int) -> None:
    """Every split and order. Nor is more proven than there is, whatever a file says; and the bound is more than that which
    looks at one stage at a time."""
    rng, tight, higher, looked = random.Random(seed), 0, 0, 0
    for _ in range(4):
        profile, step, stages = drawn(rng)
        best = shortest(profile, step, stages)
        if best is None:
            continue
        looked += 1
        costs = step.costs(profile)
        splits = Splits.of(costs)
        assert splits is not None
        search = SplitSearch(splits, MANY)
        search.go_on(Clock(300.0), MANY)
        assert least_step(costs, "makespan") <= search.bound <= best
        higher += search.bound > least_step(costs, "makespan")
        tight += search.bound > 0.9 * best
        cut_off = SplitSearch(splits, best)
        cut_off.go_on(Clock(300.0), best)
        assert search.bound <= cut_off.bound <= best
        assert proven_again(splits, cut_off.found, 5.0) == ""
        assert proven_again(splits, replace(cut_off.found, bound=best + 1), 5.0)
    assert tight >= looked / 2
    assert higher >= looked / 4


BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of the link, and of the step
    "links of a rank": ({"latency": 1.0, "bytes_per_us": 1.0, "shared": "rank"}, {}),
    "links of a pair": ({"latency": 1.0, "bytes_per_us": 1.0, "shared": "pair"}, {"replicas": 2}),
    "messages that occupy their sender": ({"latency": 6.0, "blocking": True}, {}),
    "sharded parameters": ({"latency": 1.0}, {"shards": 2}),
    "all-to-alls": ({"bytes_per_us": 1.0, "shared": "rank"}, {}),
    "recompute": ({"latency": 1.0}, {"recompute": "all"}),
    "copies": ({"latency": 1.0}, {"offload": "full"}),
}


@pytest.mark.parametrize("what", BESIDE)
def test_bounds_hold_for_steps_with_further_passes(what: str) -> None:
    """Passes beside those of the plain step, on streams of their own or not: no split and order takes less than the bound,
    which covers every split, and is proven again."""
    link, fields = BESIDE[what]
    rng, looked = random.Random(what), 0
    while looked < 2:
        profile, step, stages = drawn(rng)
        sent = {"all_to_all": 4.0} if what == "all-to-alls" else {}
        layers = tuple(replace(one, message=0.0, output_bytes=rng.choice([2, 5]), X=2.0, **sent) for one in profile.layers)
        profile = replace(profile, layers=layers, link=replace(profile.link, **link), host=HostLink(0.0, 1.0, 1.0, 1.0, 1.0))
        step = replace(step, memory=None if what in ("recompute", "copies") else step.memory, **fields)
        best, splits = shortest(profile, step, stages), Splits.of(step.costs(profile))
        if best is None:
            continue
        looked += 1
        assert splits is not None
        search = SplitSearch(splits, best)
        search.go_on(Clock(300.0), best)
        assert 0 < search.bound <= best
        assert proven_again(splits, search.found, 5.0) == ""
        for counts in partitions(len(layers), stages):
            with suppress(Infeasible):
                problem = replace(step, partition=counts).problem(profile)
                assert len(problem.passes) > len(splits.problem(counts).passes) or what.startswith("messages")
                assert splits.covers(problem)


def test_bounds_know_every_link() -> None:
    """One microbatch of F = BW = 1 on two stages takes 4 µs where the link between the two sites takes no time, however
    slow the link inside a site is. The simple bound said 24."""
    layers = tuple(replace(one, BW=1.0) for one in equal_layers(2).layers)
    profile = replace(equal_layers(2), layers=layers, link=Link(10.0, 1e12), site_link=Link(0.0, 1e12, shared="1+1"))
    step = Step(2, 1, "single", "equal", fused=True)
    splits = Splits.of(step.costs(profile))
    assert splits is not None
    assert splits.covers(step.problem(profile))
    search = SplitSearch(splits, MANY)
    search.go_on(Clock(300.0), MANY)
    assert search.bound == least_step(step.costs(profile), "makespan") == shortest(profile, step, 2) == 4


def test_many_stages_have_a_bound_at_once() -> None:
    """32 stages of unlike layers, for which CP-SAT takes several seconds: the simple bound holds from the start, and is
    proven again from the file's layers, without CP-SAT; a higher one is not."""
    one = equal_layers(1).layers[0]
    layers = tuple(replace(one, F=float(F), BW=2.0 * F) for F in np.random.default_rng(0).integers(800, 1500, 64))
    step = Step(8, 32, "loop4", "equal", fused=True)
    costs = step.costs(replace(equal_layers(1), layers=layers, link=Link(20.0, 1e12)))
    splits = Splits.of(costs)
    assert splits is not None
    search = SplitSearch(splits, 10**9)
    assert search.bound == least_step(costs, "makespan") > 32 * 3 * sum(one.F for one in layers) / 8
    assert proven_again(splits, search.found, 5.0) == ""
    assert proven_again(splits, replace(search.found, bound=search.bound + 10**6), 0.5)


@pytest.mark.parametrize("seed", range(4))
def test_cuts_of_one_split_hold_in_every_other(seed: int) -> None:
    """What the cuts of a split say of itself, and of every other one, is no more than its optimum."""
    rng = random.Random(seed)
    profile, step, stages = drawn(rng)
    splits = Splits.of(replace(step, memory=None).costs(profile))
    assert splits is not None
    every = [*partitions(len(profile.layers), stages)]
    optima = {split: solve_cp(splits.problem(split), None, 0, 20.0).bound for split in every}
    for split in every:
        cuts = SplitModel(splits, MANY).lanes.cuts(split)
        own = max(value for value, _ in cuts) / splits.unit
        assert least_of(splits, split) <= -(-own // 1) <= optima[split]
        for other in every[:: max(1, len(every) // 6)]:
            model = SplitModel(splits, MANY)
            for _, cut in cuts:
                model.add(cut)
            for end, before in zip(model.ends, accumulate(other, initial=0), strict=True):
                model.model.add(end == before)
            solver = make_solver(5.0, 1)
            assert solver.solve(model.model) == OPTIMAL
            assert solver.value(model.time) <= optima[other]


def test_the_fixture_of_slackpipe_is_proven_over_every_split(tmp_path: Path, capsys: Any) -> None:
    """Four microbatches, two ranks of two stages, eight layers of F = BW = 1: 34 µs (SlackPipe's fixture). No split takes
    less. The file says so, and `check` proves it; a higher bound and other layers are refused."""
    equal_layers(8).save(tmp_path / "p.json")
    given = [str(tmp_path / "p.json"), "--ranks", "2", "--microbatches", "4", "--placement", "loop", "--fused"]
    assert main(["solve", *given, "--partition", "auto", "--effort", "2", "-o", str(tmp_path / "s.json")]) == 0
    assert "for every partition: at least 34 µs on loop; the schedule's file proves that" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "s.json"), "--bound"]) == 0
    assert "every split of its layers takes 34 µs or more" in capsys.readouterr().out
    schedule = Schedule.load(tmp_path / "s.json")
    every = schedule.every_split
    assert every is not None
    assert (schedule.certificate.value, every.bound) == (34, 34)
    body = json.loads((tmp_path / "s.json").read_text())
    body["every_split"]["bound"] = 35
    (tmp_path / "high.json").write_text(json.dumps(body))
    assert main(["check", str(tmp_path / "high.json"), "--bound"]) == 1
    assert "bound: of every split: some split may take less than 35 µs" in capsys.readouterr().out
    body["every_split"]["bound"] = 0
    (tmp_path / "none.json").write_text(json.dumps(body))
    assert main(["check", str(tmp_path / "none.json"), "--bound"]) == 0
    body["every_split"] |= {"bound": 34, "layers": [[8, [2.0, 1.0], 1]]}
    (tmp_path / "other.json").write_text(json.dumps(body))
    assert main(["check", str(tmp_path / "other.json"), "--bound"]) == 2
    assert "its layers do not make this problem's stages" in capsys.readouterr().err
    for field, wrong in (("layers", ()), ("message", -1), ("room", (1,)), ("looked", ((1, 7),)), ("full", (0,))):
        with pytest.raises(BadInput, match=f"field '{field}' is not about the layers"):
            Splits.told(replace(every, **{field: wrong}), schedule.problem)
    with pytest.raises(BadInput, match="its layers do not make this problem's stages"):  # and not: no schedule exists
        Splits.told(replace(every, room=(0, 0)), schedule.problem)


def test_the_fixture_with_costs_by_role_is_proven_over_every_split(tmp_path: Path, capsys: Any) -> None:
    """SlackPipe's other one: layers of unlike costs, and more for the first stage, those in the middle, and the last. Of
    its 35 splits 1, 2, 4, 1 takes 306 µs, and no other less. The file says so, and other costs by role are refused."""
    totals, roles = (0, 1, 10, 12, 15, 19, 24, 30, 37), ((2, 5), (3, 6), (4, 7))
    layers = [{"F": f"{b - a}us", "BW": f"{2 * (b - a)}us"} for a, b in pairwise(totals)]
    body = {"zbsolve": "profile", "version": 1, "layers": layers, "roles": [{"F": F, "BW": BW} for F, BW in roles]}
    (tmp_path / "p.json").write_text(json.dumps(body))
    given = [str(tmp_path / "p.json"), "--ranks", "2", "--microbatches", "4", "--placement", "loop"]
    assert Step(2, 4, "loop", (1, 2, 4, 1)).problem(Profile.load(tmp_path / "p.json")).passes.duration[:8].tolist() == [
        *[3] * 4,
        *[14] * 4,
    ]
    assert main(["solve", *given, "--partition", "auto", "--effort", "4", "-o", str(tmp_path / "s.json")]) == 0
    assert "at least 306 µs on loop; the schedule's file proves that" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "s.json"), "--bound"]) == 0
    assert "every split of its layers takes 306 µs or more" in capsys.readouterr().out
    schedule = Schedule.load(tmp_path / "s.json")
    assert schedule.every_split is not None
    assert (schedule.certificate.value, schedule.problem.layers) == (306, (1, 2, 4, 1))
    for wrong in (((2.0, 5.0),) * 2, ((2.0,),) * 3, ((-1.0, 5.0),) * 3):
        with pytest.raises(BadInput, match="field 'roles' is not about the layers"):
            Splits.told(replace(schedule.every_split, roles=wrong), schedule.problem)
    with pytest.raises(BadInput, match="its layers do not make this problem's stages"):
        Splits.told(replace(schedule.every_split, roles=((2.0, 5.0), (4.0, 6.0), (4.0, 7.0))), schedule.problem)
    again = Profile.load(tmp_path / "p.json")
    again.save(tmp_path / "q.json")
    assert Profile.load(tmp_path / "q.json") == again
    (tmp_path / "p.json").write_text(json.dumps(body | {"roles": body["roles"][:2]}))
    assert main(["solve", *given]) == 2
    assert "field 'roles' has 2 rows" in capsys.readouterr().err


def test_bounds_count_what_layers_hold() -> None:
    """Two ranks of one stage, four microbatches of F = BW = 1 in two layers of a byte. A byte lies on rank 0 for the whole
    way there and back, 4 µs: where it has room for one, the four microbatches take 16 µs; with room for two 10: the way, 4,
    and 3 times the work of a stage, 2."""
    profile = equal_layers(2)
    for room, bound in (("1B,4B", 16), ("2B,4B", 10)):
        step = Step(2, 4, "single", "equal", memory=room, fused=True)
        splits = Splits.of(step.costs(profile))
        assert splits is not None
        search = SplitSearch(splits, MANY)
        search.go_on(Clock(300.0), MANY)
        assert search.bound == bound == shortest(profile, step, 2)


def test_where_memory_is_full_microbatches_wait_for_each_other() -> None:
    """Three microbatches of F = BW = 1 on two ranks, messages of 2: a way of 8 µs there and back. Rank 0 has room for two:
    the third begins when the first is back, and takes 8 µs more. Bytes times µs say 12: three for 8 µs each in room for two.
    With room for three it is 12: the way, and twice the work of a stage."""
    profile = replace(equal_layers(2), link=Link(2.0, 1e12))
    for room, fit, bound in ((2, [Wave(0, 2)], 16), (3, [], 12)):
        step = Step(2, 3, "single", memory=f"{room}B,4B", fused=True)
        splits = Splits.of(step.costs(profile))
        assert splits is not None
        search = SplitSearch(splits, MANY)
        search.go_on(Clock(300.0), MANY)
        assert Lanes(splits).full((1, 1)) == fit
        assert max(value for value, _ in Lanes(splits).cuts((1, 1))) == search.bound == bound == shortest(profile, step, 2)


def test_memory_counts_in_the_splits_where_it_is_full() -> None:
    """A row of SlackPipe's grid: four ranks of two stages, four microbatches, messages of 8, room for 16 layers of all of
    them. Splits with 17 layers on a rank hold three microbatches there, and take no less than 364 µs, an order of 10, 10,
    10, 10, 6, 6, 6, 6. Where memory has no limit one of these takes less."""
    layers = (replace(equal_layers(1).layers[0], BW=2.0),) * 64
    profile = replace(equal_layers(1), layers=layers, link=Link(8.0, 1e12))
    step = Step(4, 4, "loop", (8,) * 8, memory=",".join(["64B"] * 4), fused=True)
    bounds = []
    for one in (step, replace(step, memory=None)):
        splits = Splits.of(one.costs(profile))
        assert splits is not None
        search = SplitSearch(splits, 364)
        search.go_on(Clock(8.0, 8.0), 364)
        bounds.append(search.bound)
    assert bounds[0] == 364 > bounds[1]
    found = moved_layers(preset("breadth-first", step.problem(profile)), step.costs(profile), 364, Clock(8.0, 8.0), 0)
    assert found is not None
    schedule = Schedule(replace(step, partition=found[0]).problem(profile), found[1].order)
    assert verify(schedule.problem, schedule) == ()
    assert schedule.timeline().value == 364


def test_a_stage_keeps_what_its_layers_are_said_to() -> None:
    """Layers keep 0, 4, 6 bytes, of which behind another layer the second does not need 4, nor the third 3. So stages keep 0
    and 7 bytes, or 0 and 6, and all three layers 3: the third can be said to keep 3, and the others nothing."""
    bytes_of = ((0, 0), (4, 4), (6, 3))
    layers = [
        replace(one, held_until_B=n, input_unneeded=m) for one, (n, m) in zip(equal_layers(3).layers, bytes_of, strict=True)
    ]
    profile, step = replace(equal_layers(3), layers=tuple(layers)), Step(2, 2, "single", memory="9B", fused=True)
    splits = Splits.of(step.costs(profile))
    assert splits is not None
    assert splits.held == [0, 0, 3]
    assert all(splits.covers(replace(step, partition=split).problem(profile)) for split in ((1, 2), (2, 1)))


def test_a_layer_of_no_time_rules_no_split_out() -> None:
    """A stage of 0.1 µs takes none as whole µs, and less than none with its rounding taken off. The other rank's F of 4 and
    BW of 8 µs, two of each, take 24 µs."""
    first, second = (
        replace(one, F=F, BW=BW) for one, F, BW in zip(equal_layers(2).layers, (0.1, 4.5), (0.1, 8.5), strict=True)
    )
    splits = Splits.of(Step(2, 2, "single", "equal", fused=True).costs(replace(equal_layers(2), layers=(first, second))))
    assert splits is not None
    assert solve_cp(splits.problem((1, 1)), None, 0, 20.0).bound == 24
    model, solver = SplitModel(splits, MANY), make_solver(5.0, 1)
    for _, cut in model.lanes.cuts((1, 1)):
        model.add(cut)
    assert (solver.solve(model.model), solver.value(model.time)) == (OPTIMAL, 24)


def test_a_step_of_several_hours_has_no_bound_above_it() -> None:
    """Layers of 300 s to 1,500 s, not whole µs, in little memory: 46,000 s. Heads of more than 2⁴⁰ units had no place in the
    model, so CP-SAT ruled out splits that are shorter than what was left, or all of them."""
    layers = tuple(
        replace(one, F=one.F * (i + 1) + 0.5, BW=one.BW * (i + 1)) for i, one in enumerate(equal_layers(5, 3e8, 6e8).layers)
    )
    profile, step = replace(equal_layers(5), layers=layers), Step(2, 4, "single", "equal", memory="4B,4B", fused=True)
    splits, best = Splits.of(step.costs(profile)), shortest(profile, step, 2)
    assert splits is not None
    assert best == 45_900_000_009
    for below in (best + 1, 10 * best):
        search = SplitSearch(splits, below)
        search.go_on(Clock(300.0), below)
        assert 0.9 * best < search.bound <= best
        assert proven_again(splits, replace(search.found, bound=best + 1), 5.0)


def test_each_split_is_looked_at_once_and_real_time_plays_no_part() -> None:
    """F of 0 µs on the first stage: less than none with its rounding taken off, which the model says is none, as cuts do."""
    layers = tuple(replace(one, F=F, BW=4.25) for one, F in zip(equal_layers(5).layers, (0, 0, 8, 0, 1.25), strict=True))
    splits = Splits.of(Step(4, 2, "single", "equal", fused=True).costs(replace(equal_layers(5), layers=layers)))
    assert splits is not None
    found = []
    for _ in range(2):
        search = SplitSearch(splits, MANY)
        search.go_on(Clock(1.0, 0.05), MANY)
        found.append(search.found)
    assert found[0] == found[1]
    assert found[0].bound > 0
    assert len({*found[0].looked}) == len(found[0].looked)
    assert proven_again(splits, found[0], 10.0) == ""


def test_splits_of_several_hundred_passes_are_looked_at_alone() -> None:
    """Eight ranks, two stages each, eight microbatches: 256 passes a split. Cuts say 510 of a few splits, and no more of any
    of them. Alone each takes longer, so 511 is proven, also from what a file keeps."""
    splits = Splits.of(Step(8, 8, "loop", "equal", fused=True).costs(equal_layers(128, 1.0, 2.0)))
    assert splits is not None
    search = SplitSearch(splits, 511)
    search.go_on(Clock(1.0, 6.0), 511)
    assert search.bound == 511
    assert {kind for _, _, kind in search.apart} == {"whole problem"}
    assert proven_again(splits, search.found, 60.0) == ""
    assert proven_again(splits, replace(search.found, apart=search.found.apart[1:]), 60.0)


@pytest.mark.parametrize("seed", range(8))
def test_descents_end_at_the_split_of_the_least_bound(seed: int) -> None:
    """Of all splits of few layers the first one found has the least of what cuts say, or of what ranks take. Where no time
    is left there are none."""
    profile, step, stages = drawn(random.Random(seed))
    splits = Splits.of(step.costs(profile))
    assert splits is not None
    lanes, every = Lanes(splits), [*partitions(len(profile.layers), stages)]
    found, clock = lanes.descents(every[-1:], Clock(1.0, 1.0), seed), Clock(1.0, 1.0)
    least = {split: least_of(splits, split) for split in every}
    assert set(found) <= set(every)
    assert min(least[split] for split in found) == min(least.values())
    clock.spend(1.0)
    assert lanes.descents(every, clock, seed) == []


def test_descents_know_what_fits() -> None:
    """Two ranks, two microbatches, three layers of 3 and 6 µs, of which each rank has room for two. On a rank with two of
    them the second microbatch waits for the first."""
    splits = Splits.of(replace(Step(2, 2, "single", "equal", fused=True), memory="2B,2B").costs(equal_layers(3, 3.0, 6.0)))
    assert splits is not None
    assert [least_of(splits, split) for split in ((1, 2), (2, 1))] == [45, 54]
    assert Lanes(splits).descents([(2, 1)], Clock(1.0, 1.0), 0)[0] == (1, 2)


def test_bytes_that_go_before_the_backward_make_another_step() -> None:
    """Of a split whose rank holds two microbatches at once. Where each F gives its bytes back behind the next one, more of
    them come before the first backward: waves say nothing of that."""
    layers = tuple(Layer(f"l{i}", 1, 0, 0, 9, 10, 0, 0, 0, message=60) for i in range(3))
    step = Step(2, 4, "single", (1, 2), fused=True, memory="45B,45B")
    splits = Splits.of(step.costs(Profile("given", "tight", layers, Link(60, 1e12), 0.0, None, {}, {})))
    assert splits is not None
    own = splits.problem((1, 2))
    assert splits.covers(own)
    e, names = own.edges, own.names
    held = [Edge(f"{s}F{i}", f"{s}F{i + 1}", 0, 10 * (1 + s)) for s in range(2) for i in range(3)]
    held += [Edge(f"{s}F3", f"{s}BW3", 0, 10 * (1 + s)) for s in range(2)]
    plain = [Edge(names[a], names[b], int(lag)) for a, b, lag in zip(e.before, e.after, e.lag, strict=True)]
    early = replace(own, edges=Problem.of(tuple(own.passes), [*plain, *held]).edges)
    assert (early.taken == own.taken).all()
    assert not splits.covers(early)


def test_a_step_that_may_keep_less_on_another_split_counts_no_memory() -> None:
    """The first stage recomputes. It keeps nothing on this split, and so as much as without recompute; on others less."""
    layers = tuple(replace(one, held_until_W=0 if i == 0 else 5) for i, one in enumerate(equal_layers(3).layers))
    profile, step = replace(equal_layers(3), layers=layers), Step(2, 2, "single", (1, 2), fused=True, memory="40B,40B")
    splits = Splits.of(step.costs(profile))
    assert splits is not None
    assert splits.covers(step.problem(profile))
    again = replace(step, recompute="0").problem(profile)
    assert not splits.covers(again)
    assert replace(splits, room=None).covers(again)


def test_passes_on_streams_of_their_own_make_another_step() -> None:
    """Where forwards run beside backwards a rank is not one machine."""
    splits = Splits.of(Step(2, 3, "single", (2, 2), fused=True).costs(equal_layers(4)))
    assert splits is not None
    own = splits.problem((2, 2))
    assert splits.covers(own)
    rows = [replace(one, streams=(f"comm:{one.rank}",)) if one.kind == "F" else one for one in own.passes]
    assert not splits.covers(replace(own, passes=Problem.of(rows, []).passes))
