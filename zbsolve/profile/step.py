"""`Step`: the options that turn a profile into a problem. Commands, races, the frontier and plans take one.

Its first fields are rows of `PLAIN_FIELDS`; the others are the features' (see `features.table`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, field, make_dataclass, replace
from functools import cached_property
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from ..build.recompute import recomputed_layers
from ..features.feature import AUTO, NOT_OPEN, Field, is_auto
from ..features.staged import Staged, costs_of, plain_step
from ..features.table import FEATURES, FIELDS, Seen, check_together
from ..partition.by_name import SEARCHED, partition_by_name
from ..partition.file import Partition, parse_partition, spread_over
from ..partition.stage_costs import StageCosts
from ..problem import OBJECTIVES, Problem
from ..problem.placement import Spot, describe, routes_of
from ..schedule import Schedule
from ..util.errors import BadInput, Infeasible
from ..util.text import bytes_of_ranks

NAMED = "single, loop (loop4: 4 stages a rank), vee, mirror"
PLACEMENTS = f"{NAMED}, or ranks such as 0,2,1,3 (default: single)"
PARTITIONS = (
    "equal, balanced, F+B, alpa, memory, layers a stage such as 5,5,6,4 or 5 4×6 5, Megatron's layout such as "
    "Et*3|(t*4|)*6L, a partition.json, or auto: the best of all named ones and of single layers moved from there (default: "
    "balanced)"
)
MEMORY = (
    "all that a rank has, such as 40GiB, or one number a rank, such as 16GB,16GB,8GB (default: the device's, as profiled; a "
    "CPU: no limit)"
)
OBJECTIVE = "a step when ranks wait for each other at its end, or when they do not (default: makespan)"
FUSED = (
    "one backward pass in place of B and W, or both (default: both, but for a named schedule as it is known: one pass for "
    "1f1b)"
)
BLOCKING = "a rank computes nothing while it sends a message (default: as the profile's link says)"


def _blocking(problem: Problem) -> bool | None:
    """Whether the problem's messages block their sender; None if no message takes time, so that the profile decides."""
    known = problem.sending.any() or problem.edges.lag.any()
    return bool(problem.sending.any()) if known else None


def _placed(placement: str | Spot, problem: Problem) -> str:
    return AUTO if placement == AUTO else "/".join(map(describe, routes_of(placement, problem.ranks)))


def _of_fields() -> str:
    """The part of the docstring of `Step` that lists its fields."""
    rows = "\n    ".join(f"{step_field.name}: {step_field.words}" for step_field in STEP_FIELDS)
    return f"\n    {rows}\n\n    Raises BadInput for what makes no sense with any profile.\n    "


PLAIN_FIELDS = (
    Field("ranks", MISSING, "of the pipeline", kind=int, told=lambda problem: problem.ranks),
    Field("microbatches", MISSING, "of a step", kind=int, told=lambda problem: problem.microbatches),
    Field("placement", "single", PLACEMENTS, closed="single", told=lambda problem: problem.model_routes, meant=_placed),
    Field("partition", None, PARTITIONS, read=parse_partition, closed=None, told=attrgetter("layers")),
    Field("memory", None, MEMORY, fixed="ranks have for activations"),
    Field("objective", "makespan", OBJECTIVE, choices=OBJECTIVES, told=lambda problem: problem.objective),
    Field("fused", False, FUSED, kind=bool, told=lambda problem: "BW" in problem.passes.kinds),
    Field("blocking", None, BLOCKING, kind=bool, told=_blocking),
)
STEP_FIELDS: tuple[Field, ...] = (*PLAIN_FIELDS, *FIELDS)
OPEN = tuple(step_field.name for step_field in STEP_FIELDS if step_field.closed is not NOT_OPEN)  # may be left to the search


class PlainStep:
    """The options of one training step: how the layers of a profile lie on ranks, within which memory, for which objective.

    placement: a name, a list such as "0,2,1,3", a tuple, or several tuples: routes that microbatches take in turn. A stage's
        parameters count on every rank that it lives on.
    partition: a name, layers of each stage, a `Partition`, or None: `balanced_or_equal` over F + B + W and ranks' speeds.
    memory: of a rank. Activations have what parameters, gradients, optimizer states, messages and temporary tensors of
        passes leave (see `StageMemory.of_ranks`).
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]
        ranks: int
        microbatches: int
        placement: str | Spot
        partition: str | Sequence[int] | Partition | None
        memory: str | int | None

        def __init__(self, ranks: int, microbatches: int, *plain: Any, **fields: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        for row in (step_field for step_field in STEP_FIELDS if step_field.kind is int):
            if (number := getattr(self, row.name)) < 1 and number != row.default:
                raise BadInput(f"{row.name}: at least 1 is needed, got {number}")
        if self.objective not in OBJECTIVES:
            raise BadInput(f"objective '{self.objective}': one of {' '.join(OBJECTIVES)}")
        if isinstance(self.partition, str) and self.partition not in (AUTO, *SEARCHED):
            raise BadInput(f"partition '{self.partition}': one of {', '.join((AUTO, *SEARCHED))}, or layers a stage")
        if self.memory is not None:
            bytes_of_ranks(self.memory, self.ranks)
        for feature in FEATURES:
            feature.check(self)
        check_together(Seen(self))

    @property
    def stages(self) -> int:
        """The number of stages; 0 while the placement is open."""
        return 0 if is_auto(self.placement) else len(self.routes[0])

    @property
    def auto(self) -> bool:
        """Whether some field is "auto", so that `solve_auto` has to choose it."""
        return any(is_auto(getattr(self, name)) for name in OPEN)

    @property
    def closed(self) -> Step:
        """The step with the simplest value for each field of a feature that is "auto"."""
        return replace(self, **{name: value for feature in FEATURES for name, value in feature.closed(self).items()})

    @property
    def own_partition(self) -> str:
        """The partition that one of its features brings, for a step that names none; or ""."""
        return next(filter(None, (feature.partition(self) for feature in FEATURES)), "")

    @cached_property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """The routes that microbatches take in turn: stage → rank for each. Raises BadInput for placement "auto"."""
        return routes_of(self.placement, self.ranks)

    @property
    def title(self) -> str:
        """The placement as text, as users write it."""
        return self.placement if isinstance(self.placement, str) else "/".join(map(describe, self.routes))

    def notes(self, profile: Any) -> tuple[str, ...]:
        """Lines for users on what the profile does not know of the step's features."""
        return tuple(filter(None, (feature.note(self, profile) for feature in FEATURES)))

    def costs(self, profile: Any) -> StageCosts:
        """Costs and memory of stages made of the profile's layers. With offload or slices there is no memory limit, since
        what is held then depends on the schedule. Raises BadInput."""
        return costs_of(self, self.model(profile), for_schedule=False)

    def needs(self, profile: Any, schedule: Schedule) -> tuple[int, ...]:
        """Bytes that each rank needs for a schedule of this step: its peak of activations, and parameters, gradients,
        optimizer states, messages and temporary tensors of passes. Raises BadInput."""
        if isinstance(self.partition, Partition):
            profile = spread_over(profile, self.partition.layers, self.partition.devices, self.partition.scaling)
        costs, layers = self.costs(profile), schedule.problem.layers
        beside = costs.memory.of_ranks(layers, costs.routes, recomputed_layers(self.recompute, layers))
        return tuple(ceil(sum(parts)) for parts in zip(*beside, schedule.timeline().peak_bytes, strict=True))

    def too_few_layers(self, profile: Any) -> str:
        """Why the profile has too few layers for the stages (and how `zbsolve numbers` makes enough), or ""."""
        stages = len(self.routes[0])
        if len(profile.layers) >= stages:
            return ""
        why = f"partition: {len(profile.layers)} layers do not make {stages} stages"
        if profile.source != "given" or "chunks" not in profile.facts or stages % self.ranks:
            return why
        chunks = f" --chunks {stages // self.ranks}" if stages > self.ranks else ""
        return f"{why}: give as many with zbsolve numbers --ranks {self.ranks}{chunks}"

    def counts(self, profile: Any) -> tuple[int, ...] | None:
        """The layers of each stage; None if partition is None. Raises BadInput, Infeasible."""
        if self.partition is None and self.own_partition:
            return replace(self, partition=self.own_partition).counts(profile)
        if isinstance(self.partition, str):
            if why := self.too_few_layers(profile):
                raise BadInput(why)
            return partition_by_name(self.costs(profile), self.partition)
        if isinstance(self.partition, Partition):
            self.partition.check(len(profile.layers), self.routes, self.ranks)
            return self.partition.layers
        return None if self.partition is None else tuple(self.partition)

    def with_backward(self, profile: Any, fused: bool) -> Step:
        """The step with one backward pass BW, or with B and W. The partition is that of B and W in both cases, so that the
        two can be compared. Raises BadInput, Infeasible."""
        if self.auto or isinstance(self.partition, Partition):
            return replace(self, fused=fused)
        return replace(self, fused=fused, partition=replace(self, fused=False).counts(profile))

    def problem(self, profile: Any) -> Problem:
        """The problem of this step with a profile. Raises BadInput, also if a field is "auto"; Infeasible."""
        for name in OPEN:
            if is_auto(getattr(self, name)):
                raise BadInput(f"{name} 'auto': one problem needs it named; solve_auto and zbsolve solve try several")
        staged = self.staged(profile)
        try:
            problem = plain_step(staged)
            for feature in FEATURES:
                problem = feature.build(problem, staged)
        except Infeasible as error:
            raise staged.of_memory(error) from None
        if not problem.work:
            raise BadInput(
                f"layers: the passes of all {staged.costs.stages} stages round to 0 µs: times of half a µs or less cannot "
                "be scheduled"
            )
        messages = staged.costs.memory.message_room(staged.counts, self.routes)
        kinds = problem.passes.kinds
        slower = tuple(slowdown for slowdown in profile.slowdowns if {slowdown.kind, slowdown.beside} <= {*kinds})
        return replace(problem, messages=messages if any((*messages.sizes, *messages.sides)) else None, slowdowns=slower)

    def staged(self, profile: Any) -> Staged:
        """The model's layers on this step's stages. Raises BadInput, Infeasible."""
        counts = self.counts(profile)
        if isinstance(self.partition, Partition):
            profile = spread_over(profile, self.partition.layers, self.partition.devices, self.partition.scaling)
        if self.blocking is not None:
            profile = replace(profile, link=replace(profile.link, blocking=self.blocking))
        return Staged.of(self, self.model(profile), counts)

    def model(self, profile: Any) -> Any:
        """The profile as the features change it, such as by the lengths of microbatches. Raises BadInput."""
        for feature in FEATURES:
            profile = feature.model(profile, self)
        return profile


if TYPE_CHECKING:
    Step = PlainStep
else:
    Step = make_dataclass(
        "Step",
        [(row.name, Any, field(default=row.default, kw_only=i > 6)) for i, row in enumerate(STEP_FIELDS)],
        bases=(PlainStep,),
        frozen=True,
        namespace={"__module__": __name__, "__doc__": PlainStep.__doc__ + _of_fields()},
    )
