"""`Step`: what turns a profile into a problem. Commands, races, the frontier and plans take one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from .build.offload import NothingKept
from .build.recompute import Recompute, recomputed_stages
from .layer import NO_LINK
from .partition.by_name import SEARCHED, partition_by_name
from .partition.file import Partition
from .partition.stage_costs import StageCosts
from .placement import Spot, describe, routes_of
from .problem import OBJECTIVES, Problem
from .profile.cuts import SEQUENCE, WHOLE, Slices, cuts_of, said_of
from .profile.offload import FULL, NO_OFFLOAD, Offload, check_offload, copying_work, is_none
from .profile.profile import Profile
from .profile.replicas import check_replicas
from .profile.sharded_vocabulary import BARRIERS, LAST, check_vocabulary
from .profile.sharding import Gathers, check_sharding
from .profile.slices import widest_slice
from .profile.spread import spread_over
from .schedule import Schedule
from .util.errors import BadInput
from .util.text import bytes_of_ranks

AUTO = "auto"
OPEN = ("placement", "partition", "recompute", "gathers", "offload", "vocabulary", "slices")  # may be left to the search
LAST_PARTITION = "equal"  # of the vocabulary "last"


@dataclass(frozen=True)
class Step:
    """One training step, but for the model: how a profile's layers lie on ranks, and what counts.

    ranks, microbatches: how many.
    placement: a name, a list such as "0,2,1,3", stage → rank as a tuple, several tuples, or "auto".
    partition: a name (see `partition_by_name`), layers of each stage, a `Partition` from a file, or "auto". None: balanced.
    memory: bytes a rank ("40GiB"), or of each ("16GB,16GB,8GB,8GB"); None: the device's, as profiled.
    objective, fused, blocking, shards, attention_exchange, replicas: as `Profile.problem` takes them.
    recompute, gathers, offload, slices: likewise, or "auto".
    vocabulary: likewise, or "auto"; with "last" a partition of None is "equal".

    What is "auto" is for `solve_auto`, which tries several. Raises BadInput for what makes no sense whatever the profile.
    """

    ranks: int
    microbatches: int
    placement: str | Spot = "single"
    partition: str | Sequence[int] | Partition | None = None
    memory: str | int | None = None
    objective: str = "makespan"
    fused: bool = False
    recompute: Recompute = ()
    shards: int = 1
    gathers: str | Gathers = 1
    blocking: bool | None = None
    offload: Offload = NO_OFFLOAD
    vocabulary: str | None = None
    slices: Slices = 1
    attention_exchange: bool = False
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "microbatches"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}: at least 1 is needed, got {getattr(self, name)}")
        if self.objective not in OBJECTIVES:
            raise BadInput(f"objective '{self.objective}': one of {' '.join(OBJECTIVES)}")
        if isinstance(self.partition, str) and self.partition not in (AUTO, *SEARCHED):
            raise BadInput(f"partition '{self.partition}': one of {', '.join((AUTO, *SEARCHED))}, or layers a stage")
        if self.memory is not None:
            bytes_of_ranks(self.memory, self.ranks)
        if isinstance(self.gathers, str) and self.gathers != AUTO:
            raise BadInput(f"gathers '{self.gathers}': auto, a number, or one a stage")
        check_sharding(self.shards, 1 if isinstance(self.gathers, str) else self.gathers)
        check_replicas(self.replicas, self.shards)
        self._check_vocabulary()
        self._check_slices()
        if self.placement != AUTO:
            if not _is_auto(self.recompute):
                recomputed_stages(self.recompute, len(self.routes[0]))
            if not _is_auto(self.offload):
                check_offload(self.offload, len(self.routes[0]))

    def _check_vocabulary(self) -> None:
        check_vocabulary(self.vocabulary, self.ranks, self.shards, (AUTO,))
        several = isinstance(self.partition, Partition) and max(self.partition.devices) > 1
        if several and self.vocabulary in (AUTO, *BARRIERS):
            raise BadInput(f"vocabulary '{self.vocabulary}': stages on submeshes have their vocabulary on the last one")
        if self.vocabulary == LAST and self.partition not in (None, LAST_PARTITION) and isinstance(self.partition, str):
            raise BadInput(f"partition '{self.partition}': vocabulary 'last' has the partition '{LAST_PARTITION}'")

    def _check_slices(self) -> None:
        if _is_auto(self.slices):
            return
        number = said_of(self.slices).number
        if number == 1 and self.attention_exchange:
            raise BadInput("attention exchange: is between slices of sequences, and none is sliced (slices)")
        if number > 1 and self.shards > 1:
            raise BadInput(f"slices: sharded parameters (shards: {self.shards}) do not go with slices")

    @property
    def auto(self) -> bool:
        """Whether placement, partition, gathers, where the vocabulary is or what stages keep is left to `solve_auto`."""
        return any(_is_auto(getattr(self, name)) for name in OPEN)

    @property
    def keeping_open(self) -> bool:
        """Whether it is left open what becomes of stages' activations."""
        return _is_auto(self.recompute) or _is_auto(self.offload)

    @property
    def closed(self) -> Step:
        """The step where stages recompute and offload nothing, gather once, no vocabulary is sharded and no sequence sliced,
        if that is left open."""
        simplest: dict[str, Any] = {"recompute": (), "gathers": 1, "offload": NO_OFFLOAD, "vocabulary": None}
        found = self.in_slices(1) if _is_auto(self.slices) else self
        return replace(found, **{name: one for name, one in simplest.items() if _is_auto(getattr(self, name))})

    def in_slices(self, slices: Slices) -> Step:
        """The step in these slices; an exchange of attention is there only between several even ones."""
        said = said_of(slices)
        even = said.number > 1 and not said.even_work and len(set(said.lengths)) < 2
        return replace(self, slices=slices, attention_exchange=self.attention_exchange and even)

    @cached_property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """Stage → rank, of each route that microbatches take in turn. Raises BadInput for placement "auto"."""
        return routes_of(self.placement, self.ranks)

    @property
    def title(self) -> str:
        """The placement as one writes it."""
        return self.placement if isinstance(self.placement, str) else "/".join(map(describe, self.routes))

    def group_note(self, profile: Profile) -> str:
        """A line where a data-parallel group shards parameters or sums gradients, and the profile does not know its link;
        or ""."""
        if max(self.shards, self.replicas) == 1 or profile.shard_link is not None:
            return ""
        what = "gathers and reductions" if self.shards > 1 else "sums over replicas"
        if profile.link == NO_LINK:
            return f"{what} take no time: the profile knows no link (give its field 'shard_link')"
        return f"{what} go over the pipeline's link: the profile has none of the group (field 'shard_link')"

    def copy_ratio(self, profile: Profile) -> float | None:
        """k = T_offload / T_compute (PipeOffload, arXiv 2503.01328, Figure 1): µs that a microbatch takes of the busiest
        copy stream when all that stages keep is offloaded, over those that it takes of the busiest rank. None where the
        profile knows no host link, or nothing is kept. Raises BadInput, Infeasible."""
        if profile.host is None:
            return None
        whole = self.closed.in_slices(1)
        free = replace(whole, memory=None, microbatches=len(self.routes), offload=FULL, gathers=1, shards=1, replicas=1)
        try:
            host = replace(profile.host, memory=None)
            problem = free.problem(replace(profile, capacity=None, host=host, microbatch_factors=()))
        except NothingKept:
            return None
        return copying_work(problem) / problem.work

    def costs(self, profile: Profile) -> StageCosts:
        """What stages of the profile's layers cost and need on these ranks; with offload or slices without a limit, since
        what is held then is the schedule's matter. Raises BadInput."""
        limit = profile.capacity if self.memory is None else bytes_of_ranks(self.memory, self.ranks)
        cuts = cuts_of(self.slices, profile.layers, profile.facts.get(SEQUENCE))
        limit = limit if is_none(self.offload) and cuts == WHOLE else None
        model, shard = widest_slice(profile, cuts).staged(self.vocabulary, self.ranks)
        microbatches = self.microbatches * (len(cuts) - 1)
        return StageCosts.of(model, self.routes, microbatches, limit, self.fused, self.shards, shard)

    def needs(self, profile: Profile, schedule: Schedule) -> tuple[int, ...]:
        """Bytes that each rank needs for the schedule, one of this step: activations at their peak, and parameters,
        gradients, optimizer states, messages and what passes take while they run. Raises BadInput."""
        if isinstance(self.partition, Partition):
            profile = spread_over(profile, self.partition.layers, self.partition.devices, self.partition.scaling)
        costs, layers = self.costs(profile), schedule.problem.layers
        again = recomputed_stages(self.recompute, costs.stages).tolist()
        parts = zip(*costs.memory.of_ranks(layers, costs.routes, again), schedule.timeline().peak_bytes, strict=True)
        return tuple(ceil(sum(one)) for one in parts)

    def too_few_layers(self, profile: Profile) -> str:
        """Why the profile's layers do not make a stage each, or ""; with how `zbsolve numbers` gives enough, where it made
        the profile."""
        stages = len(self.routes[0])
        if len(profile.layers) >= stages:
            return ""
        why = f"partition: {len(profile.layers)} layers do not make {stages} stages"
        if profile.source != "given" or "chunks" not in profile.facts or stages % self.ranks:
            return why
        chunks = f" --chunks {stages // self.ranks}" if stages > self.ranks else ""
        return f"{why}: give so many with zbsolve numbers --ranks {self.ranks}{chunks}"

    def counts(self, profile: Profile) -> tuple[int, ...] | None:
        """How many layers each stage gets, where the step says it. Raises BadInput, Infeasible."""
        if self.vocabulary == LAST and self.partition is None:
            return replace(self, partition=LAST_PARTITION).counts(profile)
        if isinstance(self.partition, str):
            if why := self.too_few_layers(profile):
                raise BadInput(why)
            return partition_by_name(self.costs(profile), self.partition)
        if isinstance(self.partition, Partition):
            self.partition.check(len(profile.layers), self.routes, self.ranks)
            return self.partition.layers
        return None if self.partition is None else tuple(self.partition)

    def with_backward(self, profile: Profile, fused: bool) -> Step:
        """The step with one backward pass BW, or with B and W. Layers lie on stages as with B and W in both cases, so that
        they compare. Raises BadInput, Infeasible."""
        if self.auto or isinstance(self.partition, Partition):
            return replace(self, fused=fused)
        return replace(self, fused=fused, partition=replace(self, fused=False).counts(profile))

    def problem(self, profile: Profile) -> Problem:
        """The step of this model. Raises BadInput, also where something is left open; Infeasible."""
        for name in OPEN:
            if _is_auto(getattr(self, name)):
                raise BadInput(f"{name} 'auto': one problem needs it named; solve_auto and zbsolve solve try several")
        counts = self.counts(profile)
        if isinstance(self.partition, Partition):
            profile = spread_over(profile, self.partition.layers, self.partition.devices, self.partition.scaling)
        placed = (self.ranks, self.microbatches, self.routes, self.memory, self.objective)
        assert not isinstance(self.gathers, str)
        further = (self.blocking, self.shards, self.gathers, self.offload, self.vocabulary)
        sliced: dict[str, Any] = {"slices": self.slices, "attention_exchange": self.attention_exchange}
        return profile.problem(*placed, counts, self.fused, self.recompute, *further, **sliced, replicas=self.replicas)


def _is_auto(said: object) -> bool:
    return isinstance(said, str) and said == AUTO
