"""`solve`: a schedule and a lower bound at once, then better ones until they meet or the time is up.

A finder looks for schedules (`sources`) and a prover raises the bound (searches over a few ranks, then CP-SAT on the whole
problem). They run in parallel, a core each. With `effort` they run one after the other, so that the result depends on the
problem and the seed alone. Every schedule that is returned was verified. Messages that were sent and wait for their pass
take memory too; where they do not fit under the best schedule, `search_again` searches with more memory kept free for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import chain

import numpy as np

from ..build.mixing import one_microbatch_needs
from ..build.plain import pipeline
from ..build.sharded import with_sharding
from ..greedy.blocks.block_search import try_each_annealing
from ..greedy.blocks.period_search import try_paced
from ..greedy.lists.list_scheduler import deepest_first, list_schedule
from ..greedy.lists.policy_annealing import improve_policies, starting_policies
from ..greedy.orders.many_starts import try_moves
from ..greedy.orders.rank_orders import annealed_orders, orders_of, schedule_of
from ..greedy.syncs import with_syncs, with_waits
from ..ilp.bounds.bound import Bound
from ..ilp.ranks.group_search import higher_bounds
from ..kinds import WORK
from ..partition.splits import Lanes, Splits
from ..problem import OBJECTIVES, Ints, Problem
from ..profile.noise import Aim
from ..schedule import LayerRow, Schedule
from ..schedule.handover import lacking, most_waiting
from ..systems.table import PRESETS, is_named, name_on, preset, presets_of
from ..util.clock import LEAST_TIME, Clock
from ..util.errors import BadInput, Infeasible, NotFound, ZbsolveError, interruption
from ..util.kernels import before_compiling
from ..util.text import exact_bytes
from ..verifier import verify
from .certify import certificate_of, certified_as, work_bound
from .finder import cp, find, milp, prove_until_lost, quick, search_of, search_side_by_side
from .least_peak import PREFER_MEMORY, PREFER_TIME, PREFERENCES, LeastPeak, least_peaks, second_clock, value_clock
from .noisy import LeastUnderNoise, best_under_noise, try_noise
from .state import ALONE, LARGE_PASSES, Contest, State

ROUNDS = 4  # further searches at most, each with more memory kept free for messages
PATIENCE = 0.6  # a search whose best schedule does not fit with its messages ends when this share of its time is left
LEAST_SHARE = 0.1  # of all the time: what a further search gets at least, until a schedule fits
WAITS_SHARE = 0.1  # of the seconds: for waits of passes that slow each other


def search_again(state: State, amount: float, search: Callable[[State], None]) -> float:
    """Search again where the messages that wait do not fit under the best schedule of `state`, a search that has ended.

    Each round keeps more memory free. The rounds end when the best schedule of one fits. What fits is offered to `state`.
    amount: seconds or effort for everything. search: searches a state until it is done. Returns the time of the rounds."""
    last, more, spent = state, np.zeros(state.problem.ranks, np.int64), 0.0
    for turn in range(ROUNDS):
        if last.schedule is None or last.lean_value == last.value:
            break
        left = amount - state.clock.used - spent
        if left < LEAST_SHARE * amount and turn and state.lean is not None:
            break
        more = more + lacking(last.schedule)
        problem = _with_less_waiting(state.problem, last.schedule, more, turn)
        clock = state.clock.apart(max(LEAST_SHARE * amount, left))
        last = State(problem, clock, work_bound(problem), progress=state.progress, contest=state.contest)
        last.patience = PATIENCE * clock.left if turn < ROUNDS - 1 else 0.0
        last.leads += [schedule for schedule in (state.schedule,) if schedule is not None]
        search(last)
        spent += clock.used
        if last.lean is not None:
            state.offer(Schedule(state.problem, last.lean.order, last.lean.syncs), last.lean_solver)
    return spent


def lacking_in_words(schedule: Schedule) -> str:
    """In words: the rank that lacks most memory for the messages that wait."""
    less = lacking(schedule)
    rank = int(less.argmax())
    wait, lack = (exact_bytes(int(each[rank])) for each in (most_waiting(schedule), less))
    return f"rank {rank} lacks {lack} for what is held and the messages that wait, {wait} at once"


def _with_less_waiting(problem: Problem, schedule: Schedule, more: Ints, turn: int) -> Problem:
    """The step with more memory kept free for messages. more: bytes to keep free on each rank; from the second turn on at
    least what waits at once in `schedule`. One microbatch always keeps its room. Where that limits `more`, and from the
    second turn on, pools beside the devices, into which ranks copy to run far ahead, shrink to half of what is in them."""
    assert problem.capacity is not None
    assert problem.messages is not None
    least = one_microbatch_needs(problem)
    more = np.where(more > 0, np.maximum(more, most_waiting(schedule)), 0) if turn else more
    kept = np.minimum(more, np.maximum(0, np.array(problem.capacity) - least[: problem.ranks]))
    messages = problem.messages._replace(reserved=tuple((problem.messages.reserved + kept).tolist()))
    pools, (rooms, needs) = problem.pools, (each[problem.ranks :].tolist() for each in (problem.room, least))
    if turn or (kept != more).any():
        sizes = zip(rooms, needs, schedule.timeline().pool_peaks, strict=True)
        halves = [min(room, max(need, peak // 2)) for room, need, peak in sizes]
        pools = tuple(replace(pool, capacity=half) for pool, half in zip(pools, halves, strict=True))
    room = tuple((np.array(problem.capacity) - kept).tolist())
    return replace(problem, capacity=room, messages=messages, pools=pools)


METHODS = ("auto", "greedy", "cp", "milp")
PROVER_SHARE = 0.35  # of the effort that is left after the first schedules


def solve(
    problem: Problem,
    *,
    seconds: float = 10.0,
    effort: float | None = None,
    seed: int = 0,
    method: str = "auto",
    solver: str = "cbc",
    hint: Schedule | None = None,
    progress: Callable[[State], None] | None = None,
    prefer: str | Aim | None = PREFER_TIME,
    peaks: Callable[[LeastPeak | LeastUnderNoise], None] = lambda _: None,
    contest: Contest = ALONE,
) -> Schedule:
    """A schedule for a problem with a certificate: value, proven lower bound, gap.

    problem: the step to schedule.
    seconds: of search and proof.
    effort: work in place of seconds (one is about a second of a core), for the same answer on every machine.
    seed: of the search.
    method: "auto", "greedy" (list scheduling alone), "cp", "milp", or the name of a system.
    solver: of the MILP, see ilp.milp.
    hint: a schedule to start from; one made for other times counts by its order.
    progress: called with the State whenever value or bound got better.
    prefer: what a second search looks for, with method "auto". "time": a lower peak at the least value found; "memory": the
        lowest peak within 1 % of that value; an `Aim`: the order that is best where times vary; None: no second search.
    peaks: called with the progress of that second search.
    contest: the values of other searches that run in parallel.

    Returns early when the value equals the bound, and the incumbent on KeyboardInterrupt.

    Raises Infeasible with the reason, NotFound, BadInput.
    """
    if not isinstance(problem, Problem):
        raise BadInput(f"solve: a Problem is needed, not a {type(problem).__name__}; a Profile's method `problem` makes one")
    if problem.passes.rank[problem.computing].max(initial=-1) < problem.ranks - 1:
        raise BadInput(f"solve: rank {problem.ranks - 1}, the last, has no pass on its compute stream")
    check_options(method, solver, prefer, problem.objective)
    if method == "auto":
        ready(isinstance(prefer, Aim))
    waits = None
    if problem.slowdowns and effort is None and seconds > 0:
        waits, seconds = WAITS_SHARE * seconds, (1 - WAITS_SHARE) * seconds
    clock, further = value_clock(seconds, effort, prefer), 0.0
    state = State(problem, clock, work_bound(problem), progress=progress, contest=contest)
    amount, state.patience = clock.total, PATIENCE * clock.left
    try:
        if hint is not None:
            state.offer(retimed(problem, hint), "an earlier search")  # the user's, or one before in a race
        search(state, method, seed, solver)
        if method in METHODS:
            further = search_again(state, amount, lambda fresh: search(fresh, method, seed, solver))
    except (KeyboardInterrupt, SystemError) as error:
        pressed = interruption(error)
        if pressed is None:
            raise
        clock.stop()
        contest.interrupted()
        prefer, waits = None, LEAST_TIME
        if state.lean is None:
            raise pressed from None
    if state.lean is None:
        raise _nothing(state, method)
    used, best = clock.used + further, with_syncs(state.lean)
    if method in METHODS and best.timeline().value > state.bound.value:
        waiting = with_waits(best, None if waits is None else Clock(waits))
        if waiting is not best and not (verify(waiting.problem, waiting) or lacking(waiting).any()):
            best = waiting
    certificate = certificate_of(best, state.bound, state.lean_solver, 0.0 if clock.counted else used, seed)
    left = None if prefer is None or method != "auto" else second_clock(seconds, effort, prefer, used)
    return preferred(best.certified(certificate), prefer, left, peaks, (*state.leads, *state.starts))


def check_options(method: str, solver: str, prefer: str | Aim | None, objective: str = "makespan") -> None:
    """Raise BadInput for a method, a solver or a preference that there is not."""
    if method not in METHODS and not is_named(method):
        raise BadInput(f"method '{method}': one of {', '.join((*METHODS, *PRESETS))}")
    aimed = isinstance(prefer, Aim)
    if not aimed and prefer not in (None, *PREFERENCES):
        raise BadInput(f"prefer '{prefer}': one of {', '.join(PREFERENCES)}")
    if (aimed or prefer == PREFER_MEMORY) and method != "auto":
        what = prefer.what if isinstance(prefer, Aim) else prefer
        raise BadInput(f"prefer '{what}': it is for method auto, not for {method}")
    if aimed and objective != "makespan":
        raise BadInput(f"prefer: steps whose times vary have a makespan; the objective here is {objective}")
    if method == "milp":
        from ..ilp.milp import check_solver

        check_solver(solver)


def preferred(
    best: Schedule,
    prefer: str | Aim | None,
    clock: Clock | None,
    told: Callable[[LeastPeak | LeastUnderNoise], None],
    others: Iterable[Schedule],
) -> Schedule:
    """The schedule that `prefer` asks for (see `solve`), or `best`, which has a certificate. clock: the time for it; None:
    none. told: called with its progress. others: further schedules that were found (see `best_under_noise`).
    KeyboardInterrupt ends the search early."""
    last, certificate = None, best.certificate
    assert certificate is not None
    if clock is None or prefer is None:
        return best
    if isinstance(prefer, Aim):
        return best_under_noise(best, others, prefer, clock, told)
    try:
        for last in least_peaks(best, prefer, clock, certificate.seed, search):
            told(last)
    except (KeyboardInterrupt, SystemError) as error:
        if interruption(error) is None:
            raise
    if last is None or last.schedule is last.before or verify(best.problem, last.schedule):
        return best
    return certified_as(last.schedule, certificate, last.solver)


def retimed(problem: Problem, hint: Schedule) -> Schedule:
    """The hint's order on this problem, whose times may differ. Raises BadInput where it has other passes."""
    same = hint.problem.passes.named_as(problem.passes)
    if not same and sorted(hint.problem.names) != sorted(problem.names):
        raise BadInput(f"hint: its schedule has other passes than the problem{_difference(hint.problem, problem)}")
    return Schedule(problem, hint.order, hint.syncs)


def _difference(hint: Problem, problem: Problem) -> str:
    """In words: the first count in which two problems differ (microbatches, stages, slices), or else their kinds."""
    for column, what in (("microbatch", "microbatches"), ("stage", "stages"), ("slice", "slices a microbatch")):
        count, wanted = (len(np.unique(getattr(step.passes, column))) for step in (hint, problem))
        if count != wanted:
            return f": the hint has {count} {what}, the problem {wanted}"
    kinds = [" ".join(step.passes.kinds) for step in (hint, problem)]
    return f": the hint has passes {kinds[0]}, the problem {kinds[1]}" if kinds[0] != kinds[1] else ""


def search(state: State, method: str, seed: int, solver: str = "cbc") -> None:
    """Search by a method until the state is done: the middle part of `solve`."""
    problem, clock = state.problem, state.clock
    large = len(problem.passes) > LARGE_PASSES
    if not large:
        state.raise_closed_forms()
    if method not in METHODS:
        state.offer(preset(method, problem), name_on(method, problem))
        state.raise_closed_forms()
        return
    ours = search_of(state, seed, early=not large or method != "auto")
    first = quick(ours)
    timed = method == "auto" and not clock.counted
    for _ in first:
        if state.settled or state.lost:
            return
        if large and timed:  # there is a schedule: the prover need not wait for the other quick sources
            break
    if timed:
        search_side_by_side(state, seed, chain(first, find(ours)))
        return
    if large:
        state.raise_closed_forms()
    if method == "milp":
        milp(state, solver, seed)
    elif method == "cp":
        cp(state, seed, clock.left)
    elif method == "auto":
        # First the finder, then the prover with the last part of the effort, then the finder with what remains.
        ours.kept, steps = PROVER_SHARE * clock.left, find(ours)
        for _ in steps:
            if state.done or ours.left <= 0:
                break
        if not state.done:
            prove_until_lost(state, seed)
        ours.kept = 0.0
        for _ in steps:
            if state.done:
                break


def _tiny() -> Problem:
    return pipeline([3, 4, 3], [4, 4, 5], [2, 2, 1], placement=(0, 1, 0), microbatches=4, held_until_W=1, capacity=[6, 2])


def _tiny_ones() -> list[Problem]:  # of each objective, and with gathers, whose memory kernels of their own count
    return [*(replace(_tiny(), objective=name) for name in OBJECTIVES), with_sharding(_tiny(), 1, 1, parameter_bytes=1)]


@cache
def ready(noise: bool = False) -> None:
    """Compile the kernels unless this machine has them cached. That takes most of a minute, which no search's time limit
    should pay for. noise: also those for steps whose times vary."""
    missing: list[None] = []
    with before_compiling(lambda: missing.append(None)):
        list_schedule(_tiny(), deepest_first(_tiny()))
    if missing:
        compiled()
    if noise:
        try_noise(list_schedule(_tiny(), deepest_first(_tiny())))


@cache
def compiled() -> None:
    """Search tiny problems, so that the kernels of searches are compiled (once a machine, then cached on disk) or loaded."""
    tiny = _tiny()
    for problem in _tiny_ones():
        state = State(problem, Clock(1.0, 0.02), Bound(0, ""))
        ours = search_of(state, 0)
        ours.policies += starting_policies(problem)
        state.offer_policy(ours.policies[0], "greedy")
        list(find(ours))
    try_each_annealing(tiny)
    try_moves(greedy := list_schedule(tiny, deepest_first(tiny)))
    next(annealed_orders(lambda: greedy, Clock(1.0, 1.0), 1.0, 0, lambda: 0))
    schedule_of(tiny, orders_of(greedy))
    next(improve_policies(tiny, starting_policies(tiny), Clock(1.0, 0.02), 0, 0.02))
    try_paced(tiny)
    Lanes(Splits((0, 1), 1, (LayerRow(3, (1.0, 1.0), 0),), 0, None)).descents([(1, 2)], Clock(1.0, 0.1), 0)
    for placement in ("single", "vee"):
        list(presets_of(pipeline([3] * 4, [4] * 4, [2] * 4, placement=placement, microbatches=4)))  # some have kernels
    compiled_bounds()  # last: a second process may compile them meanwhile


@cache
def compiled_bounds() -> None:
    """Prove tiny problems' bounds, which compiles the kernels of searches for bounds, or loads them."""
    for problem in _tiny_ones():
        list(higher_bounds(problem, Bound(0, ""), Clock(1.0, 1.0), 0.1))


def _nothing(state: State, method: str) -> ZbsolveError:
    """The error that says why there is no schedule: proven impossible, or only not found."""
    if state.schedule is not None:
        lacks = lacking_in_words(state.schedule)
        if is_named(method):
            return Infeasible(f"{method}: {lacks}")
        return NotFound(f"messages: in the best schedule {lacks}; in none that was found they fit; others may exist")
    if is_named(method):
        return Infeasible(f"{method}: {_lacks(preset(method, state.problem))}")
    problem = state.problem
    for pool, room in enumerate(problem.room.tolist()):
        if (need := int(problem.moved(pool)[0].max())) > room:
            what = f"{problem.pool_name(pool)} needs {exact_bytes(need)} for one pass, but has {exact_bytes(room)}"
            return Infeasible(f"capacity: {what}: no schedule exists")
    if state.infeasible:
        orders, so = ("no order by microbatch", "") if problem.ordered else ("no order", ": no schedule exists")
        what, why = ("capacity", "fits the memory of all ranks") if problem.capacity else ("edges", "keeps to all edges")
        return Infeasible(f"{what}: cp-sat proved that {orders} {why}{_held_by_work(problem)}{so}")
    return NotFound(f"no schedule was found in this time{_held_by_work(problem)}, and it is not proven that there is none")


def _held_by_work(problem: Problem) -> str:
    """In brackets: the bytes that work beside the step holds on the rank where it holds most; or ""."""
    held = np.where(problem.passes.that(feature=WORK), problem.taken, 0)
    row = int(held.argmax())
    if problem.capacity is None or not held[row]:
        return ""
    rank = int(problem.passes.rank[row])
    sizes = exact_bytes(held[row]), exact_bytes(problem.capacity[rank])
    return f" (work beside the step, pass {problem.names[row]}, holds {sizes[0]} of rank {rank}'s {sizes[1]})"


def _lacks(named: Schedule) -> str:
    """In words: why a named schedule does not hold. That is the rank that lacks most memory, else the first violation."""
    peaks, problem = np.array(named.timeline().peak_bytes), named.problem
    over = peaks - (peaks if problem.capacity is None else np.array(problem.capacity))
    rank = int(over.argmax())
    if over[rank] <= 0:
        return str(verify(problem, named)[0])
    need, room = (exact_bytes(value) for value in (peaks[rank], peaks[rank] - over[rank]))
    return f"rank {rank} needs {need} of activations at its peak, but has {room} for them"
