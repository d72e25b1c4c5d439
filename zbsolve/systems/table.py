"""The systems (named schedules) of the literature: names, where they are defined, formulas, orders, also of long steps.

In formulas: p ranks, v chunks a rank, m microbatches; F, B, W: times of a rank's passes (B: input gradient only); M: what
1F1B's first rank holds, p microbatches of a rank's activations. Bubble: time beyond a rank's work; of the makespan by
default.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

from ..build.numbers import Numbers
from ..build.recompute import without_recompute
from ..build.untrained import with_backward
from ..greedy.side_stream import with_side_streams, without_side_streams
from ..kinds import OFFLOAD, SLICES, UPDATES, VOCABULARY
from ..problem import Ints, Problem
from ..problem import placement as placements
from ..schedule import Schedule
from ..util.errors import BadInput, Deadlock, NotFound, prefixed
from . import one_direction, one_gap, pipeoffload, slices, two_directions, vee, vee_times
from .plain_step import ORDERS, RowsOrder, WrongPlacement, step_in_lanes

# Group → the feature that the steps of its systems have (see `Problem.features`); "": passes are plain.
GROUPS = {
    "one direction": "",
    "sequence slices": SLICES,
    "sharded vocabulary": VOCABULARY,
    "offload to host memory": OFFLOAD,
    "two directions": "",
    "asynchronous": UPDATES,
}

# Importing these modules fills `plain_step.ORDERS`.
FAMILIES = one_direction, one_gap, pipeoffload, slices, two_directions, vee, vee_times


@dataclass(frozen=True, slots=True)
class System:
    """One schedule of the literature: a row of `systems.csv`, and its functions.

    name: for `--method`.
    title, paper, group: for tables and the gallery.
    placement: as `placement.parse_routes` reads it.
    bubble, memory, weights: formulas, as text.
    needs: conditions on the problem, as text.
    split: the name of the same order on problems with a split backward; "": the same name.
    fused: its backward is one pass BW.
    searched: searches try its order already, as a policy of the list scheduler or under another system's name.
    even_work: its slices have equal times.
    order: problem → schedule (see `order_of`).
    rounds: (ranks, microbatches) → (microbatches of an update, delay of weights in updates); None: it has no updates.
    copies: (plain step, µs of copies out, µs of copies back) → the stages that it offloads, times being one number or one
        for each stage. Its order is then for the whole problem with copies. None: it does not offload.
    in_groups: number of microbatches → its order in groups of that size, which is named "name:number"; None: no such orders.
    """

    name: str
    title: str
    paper: str
    placement: str
    group: str
    bubble: str
    memory: str
    weights: str
    needs: str
    split: str
    order: Callable[[Problem], Schedule]
    fused: bool = False
    searched: bool = False
    even_work: bool = False
    rounds: Callable[[int, int], tuple[int, Any]] | None = None
    copies: Callable[[Problem, Numbers, Numbers], Any] | None = None
    in_groups: Callable[[int], Callable[[Problem], Schedule]] | None = None

    @property
    def feature(self) -> str:
        """The feature that its step has, or ""."""
        return GROUPS[self.group]

    @property
    def words(self) -> dict[str, Any]:
        """All fields but functions, for files."""
        names = ("name", "title", "group", "paper", "placement", "fused", "bubble", "memory", "weights", "needs")
        return {name: getattr(self, name) for name in names}


def _group(microbatches: int, ranks: int) -> int:
    """Microbatches of an update: the least number that 2BW allows (one for each rank) and that divides `microbatches`."""
    for every in range(ranks, microbatches + 1):
        if microbatches % every == 0:
            return every
    raise BadInput(f"pipedream-2bw: {microbatches} microbatches do not make groups of at least {ranks}, one a rank")


FURTHER: dict[str, dict[str, Any]] = {
    "interleaved": {"in_groups": lambda size: partial(one_direction.interleaved_in_groups, size=size)},
    "po-f": {"copies": pipeoffload.full_copies},
    "po-h": {"copies": pipeoffload.half_copies},
    "pipedream": {"rounds": lambda ranks, m: (1, [ranks - stage for stage in range(ranks)])},
    "pipedream-2bw": {"rounds": lambda ranks, m: (_group(m, ranks), 2)},
}


def _rows() -> Iterator[System]:
    """The systems in `systems.csv`. The last column names fields that are True."""
    text = resources.files(__package__).joinpath("systems.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        if None in row or None in row.values() or row["name"] not in ORDERS:
            raise BadInput(f"systems.csv, row '{row['name']}': a field a column and an order are needed (@rows_of)")
        true = dict.fromkeys(row.pop("is").split(), True)
        fields: dict[str, Any] = {**row, **true, **FURTHER.get(row["name"], {})}
        yield System(order=ORDERS[row["name"]], **fields)


SYSTEMS = tuple(_rows())
PRESETS = {entry.name: entry.order for entry in SYSTEMS}


def system(name: str) -> System:
    """The system called `name`, which may be "name:number" for groups of that many microbatches. Raises BadInput."""
    known, _, size = name.partition(":")
    for entry in SYSTEMS:
        if entry.name == name:
            return entry
        if entry.name == known and entry.in_groups is not None and re.fullmatch(r"[1-9]\d{0,8}", size, re.ASCII):
            return replace(entry, name=name, order=entry.in_groups(int(size)))
    raise BadInput(f"unknown system '{name}' (known: {', '.join(entry.name for entry in SYSTEMS)})")


def is_named(name: str) -> bool:
    """Whether there is a system called `name`: see `system`."""
    with suppress(BadInput):
        return bool(system(name))
    return False


def name_on(name: str, problem: Problem) -> str:
    """The name of schedule `name` there: with a split backward `1f1b` is `1f1b-split`. Raises BadInput if unknown."""
    if not is_named(name):
        raise BadInput(f"unknown schedule '{name}' (known: {', '.join(PRESETS)})")
    other = system(name).split
    return other if other and "W" in problem.passes.kinds else name


def preset(name: str, problem: Problem, plain: Problem | None = None) -> Schedule:
    """A named schedule of the literature on a problem.

    name: as `zbsolve show systems` lists it (see `name_on`).
    problem: a step for which the system is defined.
    plain: the problem `without_side_streams`, if it is known already.

    A pass X is directly before its backward. Raises BadInput for an unknown name, and for a problem for which the system is
    not defined.
    """
    entry = system(name_on(name, problem))
    if problem.has(VOCABULARY) and entry.feature != VOCABULARY:
        raise BadInput(f"{entry.name}: is defined where the vocabulary is not sharded; {_known_on(problem)}")
    try:
        if entry.copies is not None:
            return entry.order(problem)
        plain = without_side_streams(problem) if plain is None else plain
        kept, waits = without_recompute(plain)
        order = entry.order(with_backward(kept))
        order = order if order.problem is kept else order.within(kept)  # untrained first stages lack backwards
        with prefixed(entry.name):
            _ = order.sequences  # raises for passes that the problem does not have
        schedule = with_side_streams(problem, _with_recompute(order, plain, waits) if waits else order)
        schedule.timeline()  # raises Deadlock; the schedule keeps it
        return schedule
    except Deadlock as error:
        raise BadInput(f"{entry.name}: {error}") from None
    except WrongPlacement as error:
        raise WrongPlacement(f"{error}; {_known_on(problem)}") from None


def _with_recompute(schedule: Schedule, problem: Problem, waits: Mapping[str, str]) -> Schedule:
    """The same order for a problem with passes X, each directly before the first pass that waits for it. waits: pass → X."""
    rows = {}
    for stream, names in schedule.order.items():
        both = (each for name in names for each in (waits.get(name, name), name))
        rows[stream] = tuple(dict.fromkeys(both))
    return Schedule(problem, rows, schedule.syncs)


def _known_on(problem: Problem) -> str:
    """The end of a message: the systems for the placement of a problem."""
    routes = problem.model_routes
    placed = "/".join(map(placements.describe, routes))
    shape = "mirror" if len(routes) > 1 else placed.rstrip("0123456789")
    own = [feature for feature in (SLICES, VOCABULARY) if problem.has(feature)]
    able = own or ["", *(feature for feature in (OFFLOAD,) if problem.has(feature))]
    names = [entry.name for entry in SYSTEMS if entry.placement == shape and entry.feature in able]
    return f"for {'mirror' if names and shape == 'mirror' else placed} there are {', '.join(names) or 'no named ones'}"


def presets_of(problem: Problem, searched: bool = True) -> Iterator[tuple[str, Schedule]]:
    """(name, schedule) of every system that is defined for a problem, in the table's order.

    problem: the step. Each order has one name; orders are left out if their passes on side streams do not fit.
    searched: include systems whose orders searches try already (see `System.searched`).
    """
    plain = without_side_streams(problem)
    for entry in SYSTEMS:
        if (searched or not entry.searched) and name_on(entry.name, problem) == entry.name:
            with suppress(BadInput, NotFound):
                yield entry.name, preset(entry.name, problem, plain)


# --- Of very many microbatches, by lanes alone: no table of the step's passes is made ---


class LongSystem(NamedTuple):
    """A system with a periodic order. split: for steps with B and W. grouped: a round has a microbatch a rank; else one."""

    order: RowsOrder
    split: bool
    grouped: bool = False

    @property
    def name(self) -> str:
        """The name of the system."""
        return self.order.name


LONG_SYSTEMS = (
    LongSystem(one_direction.one_f_one_b, split=False),
    LongSystem(one_direction.gis, split=False, grouped=True),
    LongSystem(one_direction.zb_h1, split=True),
    LongSystem(one_direction.interleaved_zb, split=True, grouped=True),
    LongSystem(vee.zb_v, split=True),
)


def long_systems_of(problem: Problem) -> Iterator[LongSystem]:
    """The systems that are defined for long steps. problem: the step with one microbatch."""
    for system in LONG_SYSTEMS:
        with suppress(BadInput):
            step = step_in_lanes(problem, 1, system.name)
            system.order.rows(step)
            if step.split == system.split:
                yield system


def lane_order(problem: Problem, microbatches: int, system: LongSystem) -> tuple[Ints, ...]:
    """The lanes of each rank, rows of `problem`, in the order in which it runs them: see `RepeatedSchedule`."""
    return tuple(system.order.rows(step_in_lanes(problem, microbatches, system.name)).values())
