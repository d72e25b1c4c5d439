"""What `solve` reports of a step beside its schedule: 1F1B on the same ranks, bounds over all choices that were tried, and
the effect of a fused backward, of copies to host memory and of the attention exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..build.attention_costs import attending
from ..features.attention_exchange import clipping_note
from ..features.feature import AUTO, is_auto, left_open
from ..features.keeping import BOTH, all_kept, least_kept
from ..features.offload import copy_ratio, is_none
from ..features.sizes import Batch, batch_of, numbers_of
from ..features.slices import bound_of_any_slices
from ..features.table import COMPARED, FEATURES, compared, usual
from ..ilp.bounds.any_choice import MOST_STATES, bound_over_orders, bound_over_sizes, check_numbers
from ..kinds import WORK
from ..partition.file import Partition
from ..partition.stage_costs import least_step
from ..problem import Problem
from ..profile.doubtful import rounding_note
from ..profile.named_steps import usual_schedule
from ..profile.profile import Profile
from ..profile.step import Step
from ..schedule import Schedule
from ..search.auto import Tried
from ..search.certify import certified
from ..search.keeping import bound_of_every_choice
from ..search.least_peak import LeastPeak
from ..search.noisy import LeastUnderNoise
from ..systems.table import preset
from ..util.errors import BadInput, Infeasible
from .solved_text import CHOICE, LONGER, ORDER, PARTITION, SIZES, SLICES, AttentionGain, Solved, WorkBeside

Given = tuple[Profile, Step] | Problem
MOST_SIZES = 500  # of a microbatch in the bound over all sizes: each is built as a step, which takes some 10 ms
SLIMPIPE = "slimpipe"  # the named schedule that is compared with and without the attention exchange


def solved(
    given: Given,
    schedule: Schedule,
    tried: Sequence[Tried] = (),
    second: LeastPeak | LeastUnderNoise | None = None,
    timed: bool = True,
    work: WorkBeside | None = None,
) -> Solved:
    """All that `solve` reports of a schedule. given: the problem, or the profile and the step. tried: the choices that were
    tried for options left open. second: the result of the search for less memory, or for times that vary. timed: report
    seconds. work: the result of the search for work beside the step (see `features.work`), where something was open."""
    gain, work = _attention_gain(given, schedule.problem), work or _work_beside(schedule)
    noise = second if isinstance(second, LeastUnderNoise) else None
    peak = second if isinstance(second, LeastPeak) else None
    if isinstance(given, Problem):
        return Solved(schedule, None, peak, timed, attention=gain, work=work, noise=noise)
    usual = None if work else usual_schedule(*given, schedule.problem.layers)
    profile, step = given
    copies = None if is_none(step.offload) else copy_ratio(_on_stages(step, step, schedule.problem), profile)
    saves = _fused_saves(profile, schedule)
    bounds, notes = _bounds_of_all(*given, tried), _notes(*given, schedule.problem, gain)
    if schedule.every_split is not None:
        best = next(attempt.placement for attempt in tried if not attempt.why)
        bounds[PARTITION][best] = max(bounds[PARTITION].get(best, 0), schedule.every_split.bound)
    return Solved(schedule, usual, peak, timed, copies, saves, gain, tuple(tried), bounds, notes, work, noise)


def _work_beside(schedule: Schedule) -> WorkBeside | None:
    """The schedule's step without its passes of the feature `work`, certified; None where there are no such passes."""
    problem, works = schedule.problem, schedule.problem.passes.that(feature=WORK)
    if not works.any():
        return None
    alone = schedule.within(problem.only(np.flatnonzero(~works)))
    return WorkBeside(certified(alone, "the order with work"))


def _notes(profile: Profile, step: Step, problem: Problem, gain: AttentionGain | None) -> tuple[str, ...]:
    """Notes on how reliable the profile's numbers are in this step, a line each."""
    unsure = (feature.unsure(profile, problem) for feature in FEATURES)
    notes = (rounding_note(profile, problem.layers), *step.notes(profile), *unsure, gain.note if gain else "")
    return tuple(filter(None, notes))


def _fused_saves(profile: Profile, schedule: Schedule) -> float:
    """The share by which BW is shorter than B and W together; 0 if the profile lacks one or the schedule has no W."""
    if "W" not in schedule.problem.passes.kinds:
        return 0.0
    apart, fused = (sum(us) for us in zip(*((c.B + c.W, c.BW) for c in profile.layers), strict=True))
    return max(0.0, 1 - fused / apart) if apart and fused else 0.0


def _bounds_of_all(profile: Profile, step: Step, tried: Sequence[Tried]) -> dict[str, dict[str, int]]:
    """Bounds over all choices of an option left open (certificates are for one choice): option → placement → µs."""
    placed = dict.fromkeys(attempt.placement.split()[0] for attempt in tried if attempt.layers)
    steps = {name: replace(step, placement=name) for name in placed}
    free = replace(profile, capacity=None)
    if step.slices == AUTO:
        return {} if step.partition == AUTO else _bounds_of_slices(profile, steps, tried)
    if step.partition == AUTO and (step.lengths or step.sizes):
        return {}  # a bound over splits counts all work with the length; one over orders or sizes is for the splits tried
    if is_auto(step.order):
        return _least_on_layers(ORDER, steps, tried, lambda plain_step: bound_over_orders(plain_step.problem(free)))
    if is_auto(step.sizes):
        sizes = batch_of(step, profile), numbers_of(step, profile)
        return _least_on_layers(SIZES, steps, tried, lambda plain_step: _bound_of_sizes(free, plain_step, *sizes))
    if step.slices != 1:
        return {}  # slices of unlike times have no bound of their own here
    if step.partition == AUTO:
        places = {place: [where.costs(profile) for _, where in compared(one)] for place, one in steps.items()}
        return {PARTITION: {place: min(least_step(row, step.objective) for row in all_) for place, all_ in places.items()}}
    if step.gathers != AUTO and (left_open(step, BOTH) or len(compared(step)) > 1):
        return {CHOICE: {place: _least_of_choices(profile, place, plain_step, tried) for place, plain_step in steps.items()}}
    return {}


def _on_tried(place: str, step: Step, tried: Sequence[Tried]) -> dict[tuple[str, tuple[int, ...]], Step]:
    """(placement with compared choices, layers) → the step with these, for all splits that were tried on a placement."""
    return {
        (place + name, row.layers): one if isinstance(one.partition, Partition) else replace(one, partition=row.layers)
        for name, one in compared(step)
        for row in tried
        if row.layers and f"{row.placement} ".startswith(f"{place}{name} ")
    }


def _least_of_choices(profile: Profile, place: str, step: Step, tried: Sequence[Tried]) -> int:
    """A lower bound, µs, over all choices on a placement. Where what is kept is not open, proven bounds count too."""
    bounds = {key: bound_of_every_choice(profile, plain_step) for key, plain_step in _on_tried(place, step, tried).items()}
    proven = {} if left_open(step, BOTH) else {(row.placement, row.layers): row.bound or 0 for row in tried}
    return min(max(bound, proven.get(key, 0)) for key, bound in bounds.items())


def _least_on_layers(
    what: str, steps: dict[str, Step], tried: Sequence[Tried], bound: Callable[[Step], int]
) -> dict[str, dict[str, int]]:
    """{what: placement → the least `bound`, µs, of the step without memory limit, over the splits that were tried}. Other
    open options get passes that all their choices have, so that the bound holds for each. {} where `bound` raises BadInput,
    because microbatches cannot exchange their numbers (see `check_numbers`)."""
    every = {place: _on_tried(place, replace(step, memory=None), tried).values() for place, step in steps.items()}
    try:
        return {what: {place: min(bound(least_kept(one).closed) for one in those) for place, those in every.items()}}
    except BadInput:
        return {}


def _bound_of_sizes(profile: Profile, step: Step, batch: Batch, numbers: Sequence[int]) -> int:
    """µs that no sizes of the step's microbatches take less than. Raises BadInput, also for batches that take too long."""
    check_numbers(step.problem(profile))
    sizes = range(1, batch.sequences - numbers[0] + 2)
    if len(sizes) > MOST_SIZES or len(sizes) * batch.sequences * numbers[-1] > MOST_STATES:
        raise BadInput(f"sizes: {batch.sequences} sequences are too many for a bound")
    each = [replace(step, microbatches=1, sizes=(size,)).problem(profile) for size in sizes]
    return bound_over_sizes(each, batch.sequences, numbers)


def _bounds_of_slices(profile: Profile, steps: dict[str, Step], tried: Sequence[Tried]) -> dict[str, dict[str, int]]:
    """`_bounds_of_all` over all numbers of slices, and the number from which on steps are longer than the best."""
    value = min(attempt.value for attempt in tried if attempt.value is not None)
    least: dict[str, dict[str, int]] = {SLICES: {}, LONGER: {}}
    for place, on_it in steps.items():
        whole = replace(usual(all_kept(on_it)), memory=None)
        layers = {attempt.layers for attempt in tried if attempt.layers and attempt.placement.split()[0] == place}
        each_whole = [replace(whole, partition=layer) for layer in layers]
        known = list(filter(None, (bound_of_any_slices(profile, on_it, each, value) for each in each_whole)))
        if len(known) < len(layers):
            return {}
        least[SLICES][place] = min(row.bound for row in known)
        if longer := [row.longer_from for row in known if row.longer_from]:
            least[LONGER] |= {place: max(longer)} if len(longer) == len(known) else {}
    return {what: every for what, every in least.items() if every}


def _attention_gain(given: Given, problem: Problem) -> AttentionGain | None:
    """The gain of the attention exchange: for a profile's step compared with the step without it; None: not asked for."""
    p, helping = problem.passes, problem.rows("FH", "BH")
    possible = int((p.slice[attending(problem)] > 0).sum())
    even = len(set(problem.slice_lengths)) < 2
    gain = AttentionGain(len(helping), possible, int(p.duration[helping].sum()), problem.slices, even)
    if isinstance(given, Problem):
        return gain if gain.handed else None
    profile, step = given
    if not step.attention_exchange or gain.slices == 1 or not even:
        return gain if step.attention_exchange else None
    try:
        bare = replace(usual(step.closed), slices=problem.slices, memory=None)
        plain = _on_stages(bare, step, problem).problem(replace(profile, capacity=None))
        note = clipping_note(profile, plain)
        if left_open(step, BOTH):
            return gain._replace(note=note)
        value, without = (int(preset(SLIMPIPE, each_problem).timeline().value) for each_problem in (problem, plain))
    except (BadInput, Infeasible):
        return gain
    return gain._replace(value=value, without=without, note=note)


def _on_stages(step: Step, asked: Step, problem: Problem) -> Step:
    """`step` with the placement, layers and compared choices of the problem that was solved. asked: the step of the user."""
    layers = asked.partition if isinstance(asked.partition, Partition) else problem.layers or None
    told = {row.name: row.told(problem) for feature in COMPARED for row in feature.fields}
    return replace(step, placement=problem.model_routes, partition=layers, **told)
