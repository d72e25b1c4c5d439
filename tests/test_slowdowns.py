"""Passes that slow each other: worked by hand, two simulators, exhaustive search over orders, and files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil, inf
from pathlib import Path

import numpy as np
import pytest

from zbsolve import (
    Aim,
    BadInput,
    Edge,
    Pass,
    Problem,
    Profile,
    Schedule,
    Slowdown,
    pipeline,
    solve,
    under_noise,
    verify,
)
from zbsolve.greedy.arrays.problem_arrays import arrays_of
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.greedy.syncs import with_waits
from zbsolve.ilp.bounds.bound import ALONE, SLOWED, Bound
from zbsolve.ilp.cp import solve_cp
from zbsolve.ilp.proof_check import recheck
from zbsolve.partition.layer import Link
from zbsolve.problem.tables import WHOLE
from zbsolve.profile import from_trace
from zbsolve.profile.noise import Noise
from zbsolve.profile.slow import problem_now

from .support.profiles import equal_layers
from .support.runs import trace_of


def beside(forward: int, sent: int, lag: int = 0, **factors: float) -> Problem:
    """A forward and an all-to-all of another microbatch on a stream of its own, which begins `lag` µs later."""
    passes = (Pass("F", 0, 0, 0, forward), Pass("F", 0, 2, 0, 0), Pass("AF", 0, 1, 0, sent, streams=("comm:0",)))
    pairs = {"F": ("F", "AF"), "AF": ("AF", "F")}
    slower = tuple(Slowdown(*pairs[kind], factor) for kind, factor in factors.items())
    return replace(Problem.of(passes, [Edge("0F2", "0AF1", lag)]), slowdowns=slower)


def ends(problem: Problem) -> dict[str, float]:
    order = {"compute:0": ("0F2", "0F0"), "comm:0": ("0AF1",)}
    return {name: end for name, (_, end) in Schedule(problem, order).timeline().items()}


def test_by_hand() -> None:
    """F of 100 µs, an all-to-all of 40 from 30 on. Alone they end at 100 and 70. Where F takes 1.25 times as long beside it,
    it does 32 µs of work in these 40: it ends at 108. Where the all-to-all takes twice as long, too, it ends at 110: F has
    done 30 + 64 of its work, and ends at 116. With 1.6 the all-to-all runs 64 µs, F does 51.2 in them, and 18.8 alone, which
    end in the 19th µs. An all-to-all that outlasts F has the rest of its time for itself."""
    assert ends(beside(100, 40, 30)) == {"0F2": 0, "0F0": 100, "0AF1": 70}
    assert ends(beside(100, 40, 30, F=1.25)) == {"0F2": 0, "0F0": 108, "0AF1": 70}
    assert ends(beside(100, 40, 30, F=1.25, AF=2)) == {"0F2": 0, "0F0": 116, "0AF1": 110}
    assert ends(beside(100, 40, 30, F=1.25, AF=1.6)) == {"0F2": 0, "0F0": 113, "0AF1": 94}
    assert ends(beside(50, 100, 0, F=1.0, AF=2)) == {"0F2": 0, "0F0": 50, "0AF1": 125}


def test_the_largest_of_several_counts() -> None:
    """A forward of 60 µs beside copies of 20 and 40 µs that make it 1.5 and 2 times as long: 10 µs of work in the first 20
    by the larger, 10 in the next 20, and 40 alone."""
    passes = (Pass("F", 0, 0, 0, 60), Pass("O", 0, 1, 0, 20, streams=("d2h:0",)), Pass("R", 0, 2, 0, 40, streams=("h2d:0",)))
    problem = replace(Problem.of(passes, []), slowdowns=(Slowdown("F", "O", 1.5), Slowdown("F", "R", 2.0)))
    schedule = preset_of(problem)
    assert schedule.timeline()["0F0"] == (0, 80)
    assert verify(problem, schedule) == ()


def preset_of(problem: Problem) -> Schedule:
    """Each stream's passes as the table has them."""
    return Schedule.of(problem, problem.members)


def random_problem(seed: int) -> Problem:
    """Two stages on one or two ranks, F and BW, all-to-alls behind both on streams of their own, and what slows what."""
    random = np.random.default_rng(seed)
    F, BW, A = (random.integers(3, 30, 2).tolist() for _ in range(3))
    placement, microbatches = ((0, 1), 2) if seed % 2 else ((0, 0), 1 + seed // 2 % 2)
    plain = pipeline(F, BW=BW, placement=placement, microbatches=microbatches, comm=int(random.integers(0, 4)))
    problem = with_all_to_alls(plain, A)
    kinds = [(a, b) for a in ("F", "BW") for b in ("AF", "AB")]
    pairs = [pair for a, b in kinds for pair in ((a, b), (b, a)) if random.random() < 0.7]
    return replace(problem, slowdowns=tuple(Slowdown(*pair, float(random.uniform(1, 3))) for pair in pairs))


def with_all_to_alls(problem: Problem, A: list[int]) -> Problem:
    """Each F of stage 0 sends its tokens on `comm`, and so does each BW of stage 1; the next stage's pass waits for it."""
    found = [*problem.passes]
    edges = [Edge(problem.names[e.before], problem.names[e.after], e.lag) for e in rows(problem)]
    for one in problem.passes:
        for kind, label, stage in (("F", "AF", 0), ("BW", "AB", 1)):
            if one.kind == kind and one.stage == stage:
                sent = Pass(label, stage, one.microbatch, one.rank, A[stage], streams=(f"comm:{one.rank}",))
                found.append(sent)
                edges += [Edge(one.name, sent.name), Edge(sent.name, f"{1 - stage}{kind}{one.microbatch}")]
    return Problem.of(found, edges)


class Row(tuple[int, int, int]):
    before, after, lag = (property(lambda self, i=i: self[i]) for i in range(3))


def rows(problem: Problem) -> Iterator[Row]:
    e = problem.edges
    return map(Row, zip(e.before.tolist(), e.after.tolist(), e.lag.tolist(), strict=True))


class Least:
    """The least makespan of any order with any waits, by exhaustive search with a simulation of its own: at each event,
    each pass that can start does, or waits for a later event. Lanes run in table order."""

    def __init__(self, problem: Problem) -> None:
        p, self.inputs = problem.passes, defaultdict[int, list[tuple[int, int]]](list)
        self.rank, self.stream, self.duration, self.best = p.rank, p.streams, p.duration.tolist(), inf
        factors = {(slow.kind, slow.beside): round(WHOLE / slow.factor) for slow in problem.slowdowns}
        self.paces = {(i, j): factors.get((p[i].kind, p[j].kind), WHOLE) for i in range(len(p)) for j in range(len(p))}
        for before, after, lag in rows(problem):
            self.inputs[after].append((before, lag))
        for lane in problem.lanes:
            for before, after in pairwise(lane.tolist()):
                self.inputs[after].append((before, 0))
        self.tail = arrays_of(problem).tail.tolist()  # µs from its start to the end of the step, at least
        self.extend(0, {}, {}, -1)

    def ready(self, i: int, ended: dict[int, int]) -> float:
        return max((ended.get(a, inf) + lag for a, lag in self.inputs[i]), default=0)

    def extend(self, now: int, running: dict[int, int], ended: dict[int, int], last: int) -> None:
        """running: pass → its work left, in millionths of a µs. last: the last pass that was started now."""
        if len(ended) == len(self.duration):
            self.best = min(self.best, now)
        waiting = {i: self.ready(i, ended) for i in range(len(self.duration)) if i not in running and i not in ended}
        if now + max((self.tail[i] for i in waiting), default=0) >= self.best:
            return
        busy = {int(self.stream[i]) for i in running}
        for i, time in waiting.items():
            if time <= now and i > last and int(self.stream[i]) not in busy:
                self.extend(now, {**running, i: self.duration[i] * WHOLE}, ended, i)
        pace = {
            i: min([self.paces[i, j] for j in running if j != i and self.rank[i] == self.rank[j]] or [WHOLE])
            for i in running
        }
        ends = [now - (-left // pace[i]) for i, left in running.items()]
        then = min([*ends, *(time for time in waiting.values() if time > now)], default=inf)
        if then < inf:
            left = {i: work - pace[i] * (int(then) - now) for i, work in running.items()}
            over = {i: int(then) for i, work in left.items() if work <= 0}
            self.extend(int(then), {i: work for i, work in left.items() if work > 0}, ended | over, -1)


def least(problem: Problem) -> float:
    return Least(problem).best


@pytest.mark.parametrize("method", ["auto", "cp"])
@pytest.mark.parametrize("seed", range(12))
def test_no_bound_is_wrong(seed: int, method: str) -> None:
    """Against every order with any waits: what is solved is one of them, the verifier finds the same value by another
    simulation, and no bound is above the least. The proof says what it leaves out."""
    problem = random_problem(seed)
    best = least(problem)
    schedule = solve(problem, effort=0.1, seed=seed, method=method)
    certificate = schedule.certificate
    assert certificate is not None
    assert any(note in certificate.proof for note in (ALONE, SLOWED)) == bool(problem.slowdowns)
    again = recheck(problem, Bound(certificate.bound, certificate.proof, certificate.relaxation, certificate.ranks), 5.0)
    assert (again.value, again.proof.count(ALONE) + again.proof.count(SLOWED)) == (
        certificate.bound,
        bool(problem.slowdowns),
    )
    assert verify(problem, schedule) == ()
    assert certificate.bound <= best <= certificate.value
    assert certificate.value <= 1.02 * best
    assert best >= least(replace(problem, slowdowns=()))
    wrong = schedule.certified(replace(certificate, value=certificate.value + 1))
    assert [one.rule for one in verify(problem, wrong)] == ["certificate"]


def test_cp_sat_counts_slowdowns() -> None:
    """Where slowdowns cost time, its bound is the least value in most problems, and close in the others. Where no order
    does it alone, syncs keep passes apart: in problem 3 orders without waits take at least 130 µs."""
    slowed = [
        problem for problem in map(random_problem, range(30)) if least(problem) > least(replace(problem, slowdowns=()))
    ]
    found, best = [solve_cp(problem, None, 0, 60.0, effort=5.0) for problem in slowed], list(map(least, slowed))
    assert len(slowed) == 18
    assert all(one.bound <= value for one, value in zip(found, best, strict=True))
    assert sum(one.bound == value for one, value in zip(found, best, strict=True)) >= 15
    assert all(one.bound >= 0.95 * value for one, value in zip(found, best, strict=True))
    waiting = solve_cp(random_problem(3), None, 0, 60.0, effort=5.0).schedule
    assert waiting is not None
    assert verify(waiting.problem, waiting) == ()
    assert waiting.timeline().value == 114 < replace(waiting, syncs=()).timeline().value


def test_waits_make_a_step_shorter() -> None:
    """Of twelve microbatches on two ranks; steps whose passes do not slow each other stay as they are."""
    plain = with_all_to_alls(pipeline([20, 30], BW=[40, 50], microbatches=12), [15, 25])
    pairs = (("F", "AF"), ("AF", "F"), ("BW", "AB"), ("AB", "BW"), ("BW", "AF"), ("F", "AB"))
    schedule = list_schedule(replace(plain, slowdowns=tuple(Slowdown(*pair, 2.0) for pair in pairs)), deepest_first(plain))
    waiting = with_waits(schedule)
    assert waiting.order == schedule.order
    assert set(waiting.syncs) > set(schedule.syncs)
    assert waiting.timeline().value < schedule.timeline().value
    assert verify(schedule.problem, waiting) == ()
    assert with_waits(other := list_schedule(plain, deepest_first(plain))) is other


@pytest.mark.parametrize("seed", range(3))
def test_another_simulation(seed: int) -> None:
    """Of a larger step with three streams a rank: the verifier, which moves from moment to moment, says what the timeline
    does. Ends are never before those of passes alone, and never later than the largest factor makes them all."""
    random = np.random.default_rng(seed)
    problem = with_all_to_alls(pipeline([20, 30], BW=[40, 50], microbatches=12), [15, 25])
    slower = tuple(Slowdown(*pair, float(random.uniform(1, 2))) for pair in (("F", "AF"), ("BW", "AB"), ("AB", "F")))
    schedule = preset_of(replace(problem, slowdowns=slower))
    alone, value = preset_of(problem).timeline(), schedule.timeline().makespan
    assert (schedule.timeline().start >= alone.start).all()
    assert alone.makespan < value <= ceil(2 * alone.makespan) + len(problem.passes)
    solved = solve(schedule.problem, method="greedy")
    assert verify(schedule.problem, solved) == ()
    assert solved.certificate is not None
    assert solved.certificate.value == solved.timeline().value


def test_files_and_bad_input(tmp_path: Path) -> None:
    """A file says them, the digest knows them, and problems without have the digest that they had."""
    problem = beside(100, 40, 30, F=1.25)
    problem.save(tmp_path / "p.json")
    again = Problem.load(tmp_path / "p.json")
    assert again == problem != replace(problem, slowdowns=())
    assert "slowdowns" not in replace(problem, slowdowns=()).to_json()
    for wrong, why in (
        (Slowdown("F", "Q", 1.5), "slowdown of F beside Q: there is no kind 'Q'"),
        (Slowdown("F", "AF", 0.9), "slowdown of F beside AF: 0.9 is not from 1 to 1000"),
        (Slowdown("F", "AF", float("nan")), "slowdown of F beside AF: nan is not from 1 to 1000"),
    ):
        with pytest.raises(BadInput, match=why):
            replace(problem, slowdowns=(wrong,))
    with pytest.raises(BadInput, match="slowdown of F beside AF: is there twice"):
        replace(problem, slowdowns=2 * problem.slowdowns)


@pytest.mark.parametrize("seed", range(6))
def test_under_noise(seed: int) -> None:
    """Each drawn step, in whole µs, is the timeline of a problem with these times, and no bound of it is above. Without
    noise the critical passes are those of the timeline."""
    problem, noise = random_problem(seed), Noise(rank=0.1, microbatch=0.2, single=0.2)
    schedule = solve(problem, effort=0.1, prefer=Aim("p95", noise))
    assert verify(problem, schedule) == ()
    spread = under_noise({"": schedule}, noise, draws=40, seed=seed).spreads[""]
    (took,) = noise.steps(problem, 40, seed)
    drawn = [replace(problem, passes=replace(problem.passes, duration=np.rint(one).astype(np.int64))) for one in took]
    timelines = [replace(schedule, problem=one, certificate=None).timeline() for one in drawn]
    assert spread.values.tolist() == [one.value for one in timelines]
    assert (spread.bounds <= spread.values).all()
    often = np.flatnonzero(under_noise({"": schedule}, Noise(), draws=2).spreads[""].often)
    arcs, timeline = schedule.precedence(), schedule.timeline()
    tight = (timeline.end[arcs.before] + arcs.lag == timeline.start[arcs.after]) & np.isin(arcs.before, often)
    assert timeline.start[np.setdiff1d(often, arcs.after[tight])].tolist() == [0]  # each other one waits for one of them
    assert timeline.end[often].max() == timeline.value


def test_a_profile_says_them(tmp_path: Path) -> None:
    """A step has those whose kinds it has. Worked by hand: one layer a stage, F and BW of 100 µs, an all-to-all of 100
    beside the next microbatch's F, of which F does 80 in that time. A run has them inside its times."""
    slower = (Slowdown("F", "O", 2.0), Slowdown("F", "AF", 1.25))
    layer = replace(equal_layers(1).layers[0], F=100.0, B=50.0, W=50.0, BW=100.0, all_to_all=100.0)
    profile = replace(equal_layers(1), layers=(layer,) * 2, link=Link(0.0, 1e9), slowdowns=slower)
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json").slowdowns == slower
    assert replace(equal_layers(4), slowdowns=slower).problem(2, 4).slowdowns == ()
    problem = profile.problem(2, 2, fused=True)
    assert problem.slowdowns == slower[1:]
    timeline = solve(problem, method="gpipe").timeline()
    assert (timeline["0F0"], timeline["0AF0"], timeline["0F1"]) == ((0, 100), (100, 200), (100, 220))
    body = profile.to_json()
    body["slowdowns"][0]["factor"] = 0
    with pytest.raises(BadInput, match="p: slowdown of F beside O: 0 is not from 1 to 1000"):
        Profile.from_json(body, "p")
    ran = trace_of(Schedule.of(problem, problem.members), (timeline, timeline.start))
    assert ran.replayed(0).makespan == timeline.makespan
    plain = replace(ran, problem=replace(problem, slowdowns=()))  # the base alone says what slowed what
    for again in (from_trace(ran, profile), from_trace(plain, profile)):
        assert again.slowdowns == slower
        assert [(one.F, one.BW) for one in again.layers] == [(100, 100)] * 2
    emulated = replace(ran, facts={"emulated": {}})
    assert (emulated.alone(0) == emulated.steps[0].end - emulated.steps[0].start).all()


@pytest.mark.parametrize("seed", range(12))
def test_solved_again_from_a_run(seed: int) -> None:
    """What passes did alone follows from when they ran, to the rounding of their ends, whatever ran beside them. So the
    problem that is solved again for a run has the run's slow-downs, and its order takes what it took."""
    problem = random_problem(seed)
    schedule = solve(problem, method="greedy")
    timeline = schedule.timeline()
    ran = trace_of(schedule, (timeline, np.zeros(len(problem.passes))))
    assert ran.alone(0) == pytest.approx(problem.passes.duration, abs=1)
    again = problem_now(ran)
    assert again.slowdowns == problem.slowdowns
    for found in (ran.replayed(0), replace(schedule, problem=again).timeline()):
        assert found.makespan == pytest.approx(timeline.makespan, abs=len(problem.passes))
