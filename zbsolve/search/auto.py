"""`solve_auto`: choose what a step leaves open (`--placement auto` …) by solving several choices.

No estimate tells which partition is best: a stage's F delays the first microbatch, its B the last one, its W may fill gaps,
and its memory limits how far ahead it may run. The same is true of what stages keep. So choices are solved: first
those with names; then single layers move and single stages change, from the best, as long as the schedule gets shorter.

If the partition is open, the equal split (the usual one) and the balanced one are searched first, for a tenth of the time,
so that the race never ends with a longer step than these. If the step is plain too, a bound over every split
(`ilp.every_split`) is raised next and again at the end, for a tenth of the time each. Splits whose own
bounds are low are tried. Then layers move together with the order for half of the time, on all cores,
from the best split and from the equal one if that is close. The race ends when the bound shows that nothing is shorter.

A fifth of the time (a tenth if layers move with the order) is divided equally among all choices. Up to three tenths go to
moved layers and changed stages. The rest goes to runs whose bound does not rule them out: half of it to the best, half of
what is left to the next, and so on. What is not used goes to moves again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import comb
from typing import Any

from ..features.feature import AUTO, Choices, Named, Now, is_auto, left_open
from ..features.keeping import KEEPING
from ..features.table import FEATURES
from ..greedy.decoding import SECONDS_PER_DECODED_PASS
from ..ilp.bounds.bound import WHOLE, serial_length
from ..partition.by_name import FEW, SEARCHED, ordered_neighbours
from ..partition.file import Partition
from ..partition.splits import Lanes, Splits
from ..problem.placement import parse
from ..profile.noise import Aim
from ..profile.profile import Profile
from ..profile.step import OPEN, Step
from ..schedule import Schedule
from ..util.clock import Clock
from ..util.errors import BadInput, Infeasible, Unfit
from ..util.files import Fields
from ..util.machine import cores, run_threads
from .climb import Moved, Way, built, by_number, move, moved_layers, try_more
from .least_peak import PREFER_TIME, second_clock, value_clock
from .race import Job, Race, Run
from .solver import check_options, preferred, ready
from .state import State
from .task_runner import TaskRunner

LEAST_SECONDS = 0.01  # the least time of the search, however long building took
SPEND_ROUND = 4  # searches that are drawn at once if effort is the limit: each gets half of what is left
PLACEMENTS = ("single", "loop", "loop4", "vee")
FIRST_PARTITION, USUAL = "balanced", "equal"  # names of partitions: the first to try; the one that people use
INTERRUPTED, NOT_SHORTER = "not tried: interrupted", "not tried: proven, no split takes less than the best"
BOUNDED = "bound"  # the name of splits whose own bounds are low
# Behind the name of the partition from which layers were moved: one by one; together with the order.
MOVED, ANNEALED = ", single layers moved", ", layers moved with the order"
PROMISING = 3  # splits of low bounds that are tried
POLISHED = 2  # best orders of moved layers from which a search starts
NEAR = 0.1  # layers move with the order from steps that are at most so much longer than the best
# Shares of all the time:
USUAL_SHARE = 0.1  # the equal split and the balanced one, before anything else
BOUND_SHARE = 0.1  # the bound over every split, at the begin and again at the end
DESCENT_SHARE = 0.5  # of that at the begin: splits of low bounds
LOOK_SHARE, BRIEF_SHARE = 0.2, 0.1  # a look at every choice; the same if layers move with the order afterwards
ANNEAL_SHARE, POLISH_SHARE = 0.5, 0.15  # layers moved with the order; the part of this that searches from their orders have
MOVE_SHARE = 0.3  # single layers moved, or single stages changed


@dataclass(frozen=True, slots=True)
class Tried(Fields):
    """The result of one choice. placement: its name, with all else that was chosen. value, bound: µs, of this choice alone;
    None: there is none. seconds: spent on it; 0 if effort was the limit. why: why it lost; "" for the winner. memory: bytes
    that its fullest rank needs (see `Step.needs`), before a search for a lower peak."""

    placement: str
    partition: str
    layers: tuple[int, ...]
    value: int | None
    bound: int | None
    seconds: float
    why: str
    memory: int | None = None


def solve_auto(
    profile: Profile,
    step: Step,
    *,
    seconds: float = 30.0,
    effort: float | None = None,
    hint: Schedule | None = None,
    progress: Callable[[str, State], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> tuple[Schedule, tuple[Tried, ...]]:
    """The best schedule over all that a step leaves open ("auto"), and the result of each choice.

    profile, step: the model's costs; the step's fields that are "auto" are chosen. These values are tried:
        placement: single, loop with 2 and 4 chunks, vee; if layers are given, those with as many stages.
        partition: all names, then single layers moved from the best.
        fields of features: their `choices`, then their `moves` from the best (see `features.table`).
    seconds, effort, hint: as in `solve`; the time is for all choices together.
    progress, stop: called with a choice's name and its search's state; asked between two searches whether to end.
    options: of `solve`; `prefer` and `peaks` are for the winner alone. `workers` (`zbsolve.solvers_on`): who solves.

    Of equal schedules the one with the lowest peak wins. Raises Infeasible if nothing fits, BadInput.
    """
    if effort is None and not seconds > 0:
        raise BadInput(f"seconds: {seconds:g} is not a positive time")
    step = replace(step, partition=step.partition or step.own_partition or "balanced")
    prefer, peaks = options.pop("prefer", PREFER_TIME), options.pop("peaks", lambda _: None)
    check_options(options.get("method", "auto"), options.get("solver", "cbc"), prefer, step.objective)
    ready(isinstance(prefer, Aim))
    began, every, choices = time.monotonic(), step.partition == AUTO, _open(step)
    runs = list(_first_runs(profile, step))
    bounds = _Bounds(profile, runs if every else (), choices)
    seconds = max(LEAST_SECONDS, seconds - (time.monotonic() - began))  # building took its part
    amount = value_clock(seconds, effort, prefer).total
    runner = TaskRunner(options.pop("workers", None), effort is not None, progress=progress)
    told_apart = any(choice.apart for choice in choices), any(choice.compared for choice in choices)
    race = Race(runs, amount, runner, options, hint, stop, every, *told_apart)
    ladders = [choice.ladder for choice in choices if choice.ladder is not None]
    with race.until_interrupted():
        _look(race, _of_splits(runs, USUAL, FIRST_PARTITION) if every and not race.order else [], USUAL_SHARE * amount)
        bounds.begin(race, BOUND_SHARE * amount)
        _look(race, [run for run in runs if run.schedule is None], (BRIEF_SHARE if bounds.searches else LOOK_SHARE) * amount)
        if every and KEEPING.choices in choices:
            _other_partitions(race, profile, LOOK_SHARE * amount)
        bounds.move_layers(race, ANNEAL_SHARE * amount)
        for ladder in ladders:
            try_more(race, profile, step, ladder, MOVE_SHARE * amount)
        _improve(race, profile, _ways(profile, step, () if race.order else bounds.searches), bounds, amount)
        bounds.go_on(race, race.left)
    if (best := race.leanest()) is None:
        raise _nothing(race, step)
    assert best.schedule is not None
    plain = options.get("method", "auto") == "auto" and prefer is not None and not (race.interrupted or stop())
    left = None if not plain else second_clock(seconds, effort, prefer, amount - race.left)
    for ladder in ladders:
        race.runs = by_number(race.runs, ladder)
    tried = tuple(_tried(race, run, best, profile) for run in race.runs)
    others = (run.schedule for run in race.runs if run.schedule)
    return bounds.told(preferred(best.schedule, prefer, left, peaks, others), best), tried


def _improve(race: Race, profile: Profile, ways: list[Way], bounds: _Bounds, amount: float) -> None:
    """Moves one by one, longer searches of what can still win, and moves again. Bounds over every split keep their time."""
    for moves in ways if race.order or not bounds.searches else ():
        move(race, profile, moves, MOVE_SHARE * amount / len(ways))
    kept = min(race.left, BOUND_SHARE * amount) if bounds.searches else 0.0
    for i, moves in enumerate(ways):
        if i == 0:
            _spend(race, kept)
        move(race, profile, moves, (race.left - kept) / (len(ways) - i))
    _spend(race, kept)


class _Bounds:
    """The bound over every split, for each placement whose runs differ in nothing but the split. choices: further ones that
    are open, so that another split may be shorter with other ones."""

    def __init__(self, profile: Profile, runs: Sequence[Run], choices: Sequence[Choices]) -> None:
        self.profile, self.choices, self.searches = profile, choices, dict[str, Any]()
        for run in runs:
            from ..ilp.every_split import SplitSearch  # CP-SAT takes a second to load

            if run.problem is None or run.name != run.place or run.name in self.searches:
                continue
            splits = Splits.of(run.step.costs(profile))
            ways = () if splits is None else (splits, replace(splits, room=None))  # with recompute, F keeps less
            if (way := next((way for way in ways if way.covers(run.problem)), None)) is not None:
                self.searches[run.name] = SplitSearch(way, serial_length(run.problem))

    def begin(self, race: Race, amount: float) -> None:
        """Raise the bounds before the race, and add the splits that look good by them to the race."""
        if self.searches:
            race.halted = partial(self.met, race, race.halted)
            self.go_on(race, (1 - DESCENT_SHARE) * amount)
            race.runs += self.runs(race, DESCENT_SHARE * amount)

    def move_layers(self, race: Race, amount: float) -> None:
        """Move layers together with the order, from the best split of each placement and from the equal one, in parallel if
        time is the limit. Idle cores repeat starts with other seeds."""
        race.settle()
        ranked, until = race.ranked() if not race.order else [], race.left - amount
        near = [run for run in ranked if run.value < (1 + NEAR) * ranked[0].value]
        able = [name for name, search in self.searches.items() if near and search.bound < near[0].value]
        ways = [[run for run in near if run.name == name] for name in able]
        starts = [run for way in ways for run in (*way[:1], *_of_splits(way[1:], USUAL))]
        at_once = 1 if race.runner.counted else cores()
        part = amount * at_once / max(1, len(starts))  # of each, which must do for a trial a pass
        starts = [run for run in starts if run.problem and len(run.problem.passes) ** 2 * SECONDS_PER_DECODED_PASS <= part]
        chosen = [*enumerate(starts * -(-at_once // max(1, len(starts))))]
        rounds = [chosen[i : i + at_once] for i in range(0, len(starts), at_once)]
        for i, together in enumerate(rounds):
            race.settle()
            part = (race.left - until) / (len(rounds) - i)
            if race.stop() or part <= 0:
                return
            self._move_at_once(race, together, part)

    def _move_at_once(self, race: Race, starts: Sequence[tuple[int, Run]], amount: float) -> None:
        """`move_layers` from these starts (seed, run) in parallel; then searches from the best orders that were found."""
        share = (1 - POLISH_SHARE) * amount
        clock = Clock(max(LEAST_SECONDS, share), share if race.runner.counted else None)
        moves: list[tuple[int, Run, Moved]] = []

        def anneal(seed: int, start: Run) -> None:
            assert start.schedule is not None
            bound = self.searches[start.name].bound
            moved = moved_layers(start.schedule, start.step.costs(self.profile), bound, clock, seed)
            moves.extend([] if moved is None else [(seed, start, moved)])

        run_threads([partial(anneal, *start) for start in starts], race.stop, clock.stop)
        race.left -= min(race.left, clock.used)
        best = sorted(moves, key=lambda entry: (entry[2].value, entry[0]))[:POLISHED]
        runs = [(self._moved(race, start, moved.layers), moved.schedule) for _, start, moved in best]
        for _ in race.solve_each(Job(run, POLISH_SHARE * amount / len(runs), of) for run, of in runs if run.problem):
            pass

    def _moved(self, race: Race, start: Run, layers: tuple[int, ...]) -> Run:
        """The run with these layers, which joins the race if it is new."""
        for run in race.runs:
            if (run.name, run.layers) == (start.name, layers):
                return run
        step, name = replace(start.step, partition=layers), start.partition.removesuffix(ANNEALED) + ANNEALED
        race.runs.append(run := built(self.profile, Run(step, start.name, name, place=start.place)))
        return run

    def met(self, race: Race, stop: Callable[[], bool]) -> bool:
        """Whether the race ends: it is proven that no split of any placement has a shorter schedule than the best, or `stop`
        says so. Runs that were not tried then tell why."""
        best, places = race.best(), {run.name for run in race.runs if run.problem is not None}
        known = {name: search.bound for name, search in self.searches.items()}
        proven = not self.choices and best is not None and places == set(known) and min(known.values()) >= best.value
        for run in race.runs if proven else ():
            run.failed = NOT_SHORTER if run.failed == INTERRUPTED else run.failed
        return proven or stop()

    def go_on(self, race: Race, amount: float) -> None:
        """Raise the bounds for so much time, the lowest first."""
        race.settle()
        if not self.searches or race.left <= 0:
            return
        clock, best = Clock(max(LEAST_SECONDS, min(amount, race.left)), amount if race.runner.counted else None), race.best()
        for run in [run for run in race.runs if run.schedule is not None and run.name in self.searches]:
            search = self.searches[run.name]
            if run.certificate.relaxation == WHOLE and run.problem == search.splits.problem(run.layers):
                search.known[run.layers] = run.bound
        for i, search in enumerate(order := sorted(self.searches.values(), key=lambda entry: entry.bound)):
            if not race.stop():
                part = clock.apart(clock.left / (len(order) - i))
                search.go_on(part, search.below if best is None else best.value)
                clock.spend(part.used)
        race.left = max(0.0, race.left - clock.used)

    def runs(self, race: Race, amount: float) -> list[Run]:
        """Splits of low bounds, found in so much time."""
        runs, clock = list[Run](), Clock(max(LEAST_SECONDS, amount), amount if race.runner.counted else None)
        firsts = {run.name: run for run in reversed(race.runs) if run.name in self.searches and not run.step.own_partition}
        for i, (name, first) in enumerate(firsts.items()):
            known = [run.layers for run in race.runs if run.name == name and run.problem]
            part = clock.apart(clock.left / (len(firsts) - i))
            splits = Lanes(self.searches[name].splits).descents(known, part, race.options.get("seed", 0))
            clock.spend(part.used)
            steps = (replace(first.step, partition=split) for split in splits if split not in known)
            named = (Run(step, name, BOUNDED, place=first.place) for step in islice(steps, PROMISING))
            runs += [built(self.profile, run) for run in named]
        race.left -= min(race.left, clock.used)
        return runs

    def told(self, schedule: Schedule, best: Run) -> Schedule:
        """The schedule, with the bound over every split of its placement if it is one of them and nothing else was open."""
        search = self.searches.get(best.name)
        if self.choices or search is None or search.bound <= 0 or not search.splits.covers(schedule.problem):
            return schedule
        return replace(schedule, every_split=search.found)


def _of_splits(runs: Sequence[Run], *names: str) -> list[Run]:
    """The runs whose partition has one of these names."""
    return [run for run in runs if not {*names}.isdisjoint(run.partition.split("="))]


def _open(step: Step) -> list[Choices]:
    """The choices of features that a step leaves open."""
    return [each for feature in FEATURES if (each := feature.choices) is not None and left_open(step, each.fields)]


def closed_steps(step: Step) -> list[tuple[str, str, Step]]:
    """Every step that is tried first: its place (the placement, and choices that no move changes), the other choices, and
    the step, whose partition may be open still. Raises BadInput if no placement has as many stages as the partition."""
    steps = [(place, "", plain_step) for place, plain_step in _placements(step)]
    for feature in sorted(FEATURES, key=lambda entry: bool(entry.moves)):
        if (choices := feature.choices) in _open(step) and choices is not None:
            steps = [
                (place, kept + name, chosen) if feature.moves else (place + name, kept, chosen)
                for place, kept, before in steps
                for name, chosen in choices.first(before)
            ]
    return steps


def _placements(step: Step) -> list[tuple[str, Step]]:
    if step.placement != AUTO:
        return [(step.title, step)]
    wanted = list(PLACEMENTS if step.ranks > 1 else PLACEMENTS[:1])
    if not isinstance(step.partition, str):
        stages = len(step.partition.layers if isinstance(step.partition, Partition) else step.partition or ())
        wanted = [name for name in wanted if len(parse(name, step.ranks)) == stages]
        if not wanted:
            raise BadInput(f"layers: no placement of {step.ranks} ranks that is tried has {stages} stages")
    return [(name, replace(step, placement=name)) for name in wanted]


def _first_runs(profile: Profile, step: Step) -> Iterator[Run]:
    """The first runs, built. If partition and other choices are both open, other choices are tried with the first partition,
    and other partitions later with the best choice."""
    closed = closed_steps(step)
    for place, kept, choice in closed:
        first = choice is closed[0][2]
        if kept and choice.partition == AUTO:
            choice = replace(choice, partition=FIRST_PARTITION)
        runs = _runs(profile, choice, place, kept, first)
        yield from runs
        for further in (choices.further for choices in _open(step)):
            for run in runs:
                yield from (built(profile, near) for near in _near(run, profile, step, further))


def _near(
    run: Run, profile: Profile, open_step: Step, further: Callable[[Now], Iterable[Named]], moved: str = ""
) -> Iterator[Run]:
    """Runs that differ from `run` by one change of `further`, at the same place, not built yet."""
    now = Now(run.step, open_step, profile, run.name.removeprefix(run.place), run.layers, run.schedule)
    for name, step in further(now):
        yield Run(step, f"{run.place}{name}", run.partition, run.layers, place=run.place, moved=moved)


def _runs(profile: Profile, step: Step, place: str, kept: str, first: bool = False) -> list[Run]:
    """A run for each different partition. If there are too few layers: one run that says so, or an error if it is first."""
    why, name = step.too_few_layers(profile), f"{place}{kept}"
    if why and not first:
        return [Run(step, name, failed=why, place=place)]
    named: dict[tuple[int, ...], list[str]] = {}
    failed = []
    for cut in SEARCHED if step.partition == AUTO else (step.partition, "equal") if _either(step) else (step.partition,):
        split = cut if isinstance(cut, str) else "given"
        try:
            named.setdefault(replace(step, partition=cut).counts(profile) or (), []).append(split)
        except (Infeasible, Unfit) as error:
            failed.append(Run(step, name, split, failed=str(error), place=place))
    given = step.partition if isinstance(step.partition, Partition) else None  # it says more than layers
    steps = [(replace(step, partition=given or counts), "=".join(names)) for counts, names in named.items()]
    runs = [built(profile, Run(plain_step, name, names, place=place)) for plain_step, names in steps]
    if named and step.partition == AUTO and all(run.problem is None for run in runs):  # others may fit
        near = ordered_neighbours(step.costs(profile), next(iter(named)))[:FEW]
        tries = (Run(replace(step, partition=counts), name, f"{USUAL}{MOVED}", place=place) for counts in near)
        runs += islice((run for run in tries if built(profile, run).problem is not None), PROMISING)
    return runs + failed


def _either(step: Step) -> bool:
    """Whether the equal and the balanced split are both tried: with several stages a rank no estimate tells the better."""
    return step.partition == FIRST_PARTITION and len(set(step.routes[0])) < step.stages


def splits_differ(profile: Profile, step: Step) -> bool:
    """Whether the equal and the balanced split of a step are both tried and differ."""
    if step.auto or not _either(step) or step.too_few_layers(profile):
        return False
    return step.counts(profile) != replace(step, partition="equal").counts(profile)


def _other_partitions(race: Race, profile: Profile, amount: float) -> None:
    """Try the partitions with names together with the choices of the best run, if these are not the first ones."""
    best = race.best()
    if best is not None and best.name != best.place and not best.step.own_partition:
        known = {(run.name, run.layers) for run in race.runs}
        runs = _runs(profile, replace(best.step, partition=AUTO), best.place, best.name.removeprefix(best.place))
        runs = [run for run in runs if (run.name, run.layers) not in known]
        race.runs += runs
        _look(race, runs, amount)


def _ways(profile: Profile, step: Step, bounded: Collection[str]) -> list[Way]:
    """The ways in which steps are changed one by one. bounded: names of runs whose layers move by their bounds and with the
    order. Unless there are few splits, no single layers of these are moved here."""

    def layers(run: Run) -> Iterator[Run]:
        many = comb(sum(run.layers) - 1, len(run.layers) - 1) > FEW
        still = run.step.own_partition or (many and run.name in bounded)
        name = run.partition.removesuffix(MOVED) + MOVED
        for counts in [] if still else ordered_neighbours(run.step.costs(profile), run.layers):
            yield Run(replace(run.step, partition=counts), run.name, name, counts, place=run.place, moved="layers")

    near = partial(_near, profile=profile, open_step=step)
    moves = [kind for feature in FEATURES for kind in feature.moves if left_open(step, kind.fields)]
    ways = [Way(kind.name, partial(near, further=kind.near, moved=kind.name), kind.breadth) for kind in moves]
    return ways + ([Way("layers", layers)] if step.partition == AUTO else [])


def _look(race: Race, runs: list[Run], amount: float) -> None:
    """A short search of every run that could be built."""
    open_runs = [run for run in runs if run.problem is not None]
    jobs = (Job(run, amount / len(open_runs)) for run in open_runs)
    for _ in race.solve_each(jobs, len(open_runs)):
        pass
    for run in open_runs:
        if run.schedule is None and not run.failed and not run.least:
            run.failed = INTERRUPTED


def _spend(race: Race, keep: float) -> None:
    """Spend the time beyond `keep` on runs that can still win, the best first."""
    order = race.ranked()
    able = sum((best := race.best()) is not None and run.bound < best.value for run in order)

    def jobs() -> Iterator[Job]:
        for i, run in enumerate(order):
            best, left = race.best(), race.left - keep
            if best is None or race.stop() or left <= 0:
                return
            if run.bound < best.value:
                yield Job(run, left if i == len(order) - 1 else left / 2)

    for _ in race.solve_each(jobs(), able, SPEND_ROUND):
        pass


def _nothing(race: Race, step: Step) -> Infeasible:
    """The error that says why no run has a schedule."""
    who: dict[str, list[str]] = {}
    for run in race.runs:
        who.setdefault(run.failed, []).append(race.label(run))
    what = ", ".join(name for name in OPEN if is_auto(getattr(step, name)))
    return Infeasible(f"no tried choice of {what} fits: " + "; ".join(f"{why} ({', '.join(of)})" for why, of in who.items()))


def _tried(race: Race, run: Run, best: Run, profile: Profile) -> Tried:
    where, name = (run.name, run.partition, run.layers), race.label(best)
    if run.schedule is None:
        longer = f"at least {run.least / best.value - 1:.2%} longer than {name}: proven, not searched"
        return Tried(*where, None, run.least or None, round(run.seconds, 3), longer if run.least else run.failed)
    why = ""
    if run is not best:
        why = f"{run.value / best.value - 1:.2%} longer than {name}" if run.value > best.value else f"equals {name}"
        if run.bound >= best.value:
            why += "; proven: no schedule there beats it"
    return Tried(*where, run.value, run.bound, round(run.seconds, 3), why, max(run.step.needs(profile, run.schedule)))
