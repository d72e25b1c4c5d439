"""What was measured (or estimated, or given) of a model on a machine, and the problem it makes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from .. import placement as placements
from ..build.one_microbatch import checked_room
from ..build.recompute import Recompute, recomputed_stages
from ..layer import HostLink, Layer, Link, Tied, split_known
from ..partition.by_name import partition_by_name
from ..partition.shared_ranks import balanced_or_equal
from ..partition.stage_costs import StageCosts
from ..partition.stage_memory import NO_SHARD, Shard
from ..problem import Problem
from ..util.errors import BadInput, Infeasible
from ..util.files import checked, read_part_of, write_document
from ..util.text import bytes_of_ranks, exact_bytes, has_unit
from .attention_exchange import check_exchange, exchanged_step
from .cuts import SEQUENCE, Slices, cuts_of, tokens_of
from .form import (
    ProfileForm,
    check_some_time,
    host_from,
    layer_from,
    link_from,
    size_from,
    states_from,
    tied_from,
    vocabulary_from,
)
from .offload import NO_OFFLOAD, Offload, check_host, is_none, offloaded_step
from .on_stages import plain_step
from .replicas import check_replicas, replicated_step
from .sharded_vocabulary import BARRIERS, LAST, check_vocabulary, shard_of, source_with_shards, vocabulary_step
from .sharding import Gathers, check_sharding, sharded_step
from .slices import check_combination, sliced_step, widest_slice
from .vocabulary import VocabularyCosts

MESSAGES_ALIKE = "messages_alike"  # the fact that messages take as long for microbatches that differ
# Fields of layers that files leave out where there is nothing, as before there were such fields.
NEWER = ("message", "attention_F", "attention_B", "kv_bytes", "kv_gradient_bytes", "slice_extra", "frozen_bytes")


@dataclass(frozen=True)
class Profile:
    """A model's layers and the links between ranks.

    source: "measured", "given" (typed in), or "estimated: " and by what, never to be confused.
    model: its name.
    layers: their costs, in order.
    link: between two ranks.
    states: bytes of parameters, gradients and optimizer state for each byte of trained parameters (4 for Adam in one
        precision); frozen ones count once.
    capacity: bytes of a device; None: not known.
    facts: JSON values about the machine and the run.
    samples: every raw measurement, µs, keyed "<layer>/<kind>" or "link/<bytes>".
    rank_factors: how much longer each rank takes than the layers say; () where all are alike.
    tied: bytes of each parameter that several layers hold, and their numbers: a rank with several of them has it once.
    shard_link: between the ranks of a data-parallel group, for sharded parameters and replicas; None: not known, and the
        pipeline's counts.
    host: between a device and its node's host memory; None: not known, and nothing is offloaded.
    microbatch_factors: how much larger each microbatch is than the layers say, in times, bytes and messages: steps then have
        so many microbatches; () where all are alike. A run's factors are those of its times: its messages were measured by
        themselves, and stay (fact `messages_alike`).
    vocabulary: costs of output layer, loss and embedding that are sharded over all ranks; None: not known.
    gradients: bytes of a gradient for each byte of its parameter, where parameters are sharded and it is not reduced yet: 2
        where 16 bits are summed in 32.
    """

    source: str
    model: str
    layers: tuple[Layer, ...]
    link: Link
    states: float
    capacity: int | None
    facts: dict[str, Any]
    samples: dict[str, list[float]]
    rank_factors: tuple[float, ...] = ()
    tied: Tied = ()
    shard_link: Link | None = None
    host: HostLink | None = None
    microbatch_factors: tuple[float, ...] = ()
    vocabulary: VocabularyCosts | None = None
    gradients: float = 1.0

    @property
    def fused_only(self) -> bool:
        """Whether nothing but one backward BW is known: every step is fused then."""
        return not split_known(self.layers)

    @property
    def title(self) -> str:
        """The model, and that nothing was measured where that is so."""
        return self.model if self.source == "measured" else f"{self.model} ({self.source}, not measured)"

    def problem(
        self,
        ranks: int,
        microbatches: int,
        placement: str | placements.Spot = "single",
        memory: str | int | None = None,
        objective: str = "makespan",
        layers: Sequence[int] | None = None,
        fused: bool = False,
        recompute: Recompute = (),
        blocking: bool | None = None,
        shards: int = 1,
        gathers: Gathers = 1,
        offload: Offload = NO_OFFLOAD,
        vocabulary: str | None = None,
        slices: Slices = 1,
        attention_exchange: bool = False,
        replicas: int = 1,
    ) -> Problem:
        """The training step of this model on `ranks` ranks.

        placement: a name, a list such as "0,2,1,3", a tuple, or several tuples: routes that microbatches take in turn
            ("mirror"). A stage's parameters count on every rank that it lives on.
        memory: bytes a rank ("40GiB"), or of each ("16GB,16GB,8GB,8GB"). Parameters, gradients and optimizer state,
            messages, and what passes take while they run come off first (see `StageMemory.of_ranks`). None: the device's
            capacity, unlimited where unknown.
        objective: "makespan" or "span".
        layers: how many each stage gets; None: `balanced_or_equal` over F + B + W, for the ranks as fast as they are.
        fused: one backward BW, as people run it without a split.
        recompute: stages ("all", "0,2", or numbers) that drop their activations after F and make them again before B, in X's
            time (F's where unknown). Stage 0's input is the batch, which is there anyway.
        blocking: whether messages occupy their sender; None: as the link says.
        shards: ranks of the data-parallel group over which parameters, gradients and optimizer states are sharded (FSDP). A
            rank's fixed memory is then its part of them; what is gathered is the schedule's matter.
        gathers: how often a step's forwards gather shards, one number or one a stage (see `with_sharding`).
        offload: what goes to host memory between F and the backward (see `offloaded_step`); a step that only fits with it is
            built, too.
        vocabulary: "sharded" or "two-barriers" (see `with_vocabulary`), "redistribute" (None is the same), or "last": as
            many of the model's repeated layers on each stage, where `layers` does not say.
        slices: parts of each sequence, "8" (even), "8:even-work", or lengths (see `zbsolve.profile.cuts`).
        attention_exchange: ranks that would wait make attention for those with late slices (see `with_attention_exchange`).
        replicas: pipelines of a data-parallel group, which sum each stage's gradients in a pass C (see `replicated_step`).

        Raises BadInput, Infeasible.
        """
        check_sharding(shards, gathers)
        check_replicas(replicas, shards)
        check_vocabulary(vocabulary, ranks, shards)
        profile = self if blocking is None else replace(self, link=replace(self.link, blocking=blocking))
        link, group = profile.link, self.shard_link or profile.link
        routes = placements.routes_of(placement, ranks)
        limit = self.capacity if memory is None else bytes_of_ranks(memory, ranks)
        cuts = cuts_of(slices, self.layers, self.facts.get(SEQUENCE))
        changed = not is_none(offload) or vocabulary in BARRIERS
        check_exchange(attention_exchange, cuts, link, (self.rank_factors, self.microbatch_factors))
        check_combination(cuts, len(routes), shards, changed, self.layers)
        part, ranks = widest_slice(profile, cuts), max(routes[0]) + 1
        (whole, _), (model, shard) = profile.staged(vocabulary, ranks), part.staged(vocabulary, ranks)
        costs = StageCosts.of(model, routes, microbatches * (len(cuts) - 1), limit, fused, shards, shard)
        counts = costs.check(_layers(costs, vocabulary, recompute) if layers is None else layers)
        left = self._left(costs, counts, recompute, memory)
        stays, unlike = is_none(offload), bool(self.microbatch_factors)
        room = None if unlike else left  # of the largest microbatch only `_uneven` knows
        with _said_of_memory(costs.limit, memory, stays and not recompute):
            problem = plain_step(whole, costs, cuts, counts, room if stays else None, objective, recompute)
            problem = replace(problem, source=model._problem_source)
            problem = vocabulary_step(problem, part.vocabulary, link, vocabulary)
            problem = problem if stays else offloaded_step(problem, self.host, offload, room)
            problem = sliced_step(problem, cuts, whole.layers, counts, tokens_of(self.facts.get(SEQUENCE)))
            problem = self._uneven(problem, link, left if unlike else problem.capacity)
        check_host(problem)
        if attention_exchange:
            problem = exchanged_step(problem, cuts, whole.layers, counts, link)
        problem = sharded_step(problem, costs, counts, group, gathers)
        problem = replicated_step(problem, costs, counts, replicas, link, group)
        if not problem.work:
            raise BadInput(
                f"layers: the passes of all {costs.stages} stages round to 0 µs: times of half a µs or less cannot be "
                "scheduled"
            )
        messages = costs.memory.message_room(counts, routes)
        return replace(problem, messages=messages if any(messages.sizes) else None)

    def _uneven(self, problem: Problem, link: Link, room: Sequence[int] | None) -> Problem:
        """With ranks as slow and microbatches as large as the profile says. room: bytes of each rank. Raises Infeasible."""
        problem = problem.slowed(self.rank_factors) if self.rank_factors else problem
        problem = replace(problem, capacity=None if room is None else tuple(room))
        if not self.microbatch_factors:
            return problem
        latency = inf if self.facts.get(MESSAGES_ALIKE) else link.latency
        return checked_room(problem.scaled(self.microbatch_factors, latency))

    @property
    def _problem_source(self) -> str:
        """Where a problem's times come from, and how the backward was split."""
        split = self.facts.get("split", "layers")
        return f"{self.source}{'' if split == 'layers' else f' with split {split}'}: {self.model}"

    def _left(
        self, costs: StageCosts, counts: tuple[int, ...], recompute: Recompute, said: str | int | None
    ) -> list[int] | None:
        """Bytes a rank left for activations beside all else; None: unlimited."""
        if costs.limit is None:
            return None
        left = []
        recomputing = recomputed_stages(recompute, costs.stages).tolist()
        parts = zip(costs.limit, *costs.memory.of_ranks(counts, costs.routes, recomputing), strict=True)
        for rank, (limit, fixed, moving) in enumerate(parts):
            if fixed + moving > limit:
                own = said.split(",")[rank] if isinstance(said, str) and "," in said else said
                raise Infeasible(
                    f"memory: rank {rank} needs {exact_bytes(fixed)} for parameters and optimizer states and "
                    f"{exact_bytes(moving)} for messages and inside passes, more than its memory{_of((limit,), own)}"
                )
            left.append(int(limit - fixed - moving))
        return left

    def without_vocabulary(self) -> Profile:
        """The same profile without the parts of output layer, loss and embedding that are sharded: layers keep their
        numbers. The shards' parameters, with their optimizer states, are on all ranks beside it (see
        `VocabularyCosts.parameter_bytes`). Raises BadInput where nobody knows what a sharded vocabulary costs."""
        costs = self.vocabulary
        if costs is None:
            why = self.facts.get("no_vocabulary", "the profile has no field 'vocabulary'")
            raise BadInput(f"vocabulary: {why}: what a sharded one costs is not known")
        gone = {costs.output, costs.embedding}
        groups = ((size, tuple(i for i in group if i not in gone)) for size, group in self.tied)
        tied = tuple((size, group) for size, group in groups if len(group) > 1)
        return replace(self, layers=costs.rest(self.layers), tied=tied, vocabulary=None)

    def staged(self, vocabulary: str | None, ranks: int) -> tuple[Profile, Shard]:
        """The profile of what lies on stages, and what each of so many ranks has beside them. Raises BadInput."""
        if vocabulary not in BARRIERS:
            return self, NO_SHARD
        rest, costs = self.without_vocabulary(), self.vocabulary
        assert costs is not None
        source = source_with_shards(self.source, costs, ranks)
        return replace(rest, source=source), shard_of(costs, vocabulary, ranks)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a profile file, whole or not at all; `-` is standard output."""
        write_document(path, "profile", self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The fields of a profile file."""
        body = asdict(self)
        costs = body["vocabulary"] or {}
        rests = (costs.get("output_rest"), costs.get("embedding_rest"))
        for layer in (*body["layers"], *(one for one in rests if one is not None)):
            for name in NEWER:
                if not layer[name]:
                    del layer[name]
        if not self.link.blocking:
            del body["link"]["blocking"]
        for shard in costs.get("shards", ()):
            if not shard["frozen_bytes"]:
                del shard["frozen_bytes"]
        for name in ("shard_link", "host", "microbatch_factors", "vocabulary"):
            if not body[name]:
                del body[name]
        if self.gradients == 1:
            del body["gradients"]
        return body

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile file, or the profile in a plan; `-` is standard input. Raises BadInput naming the field."""
        return cls.from_json(read_part_of(path, "profile", ("plan",)), str(path))

    @classmethod
    def from_json(cls, body: Any, where: str = "profile") -> Profile:
        """The profile that `save` wrote, or that a person typed. Raises BadInput naming `where` and the field."""
        form = checked(body, ProfileForm, where)
        layers = tuple(layer_from(row, f"{where}: layers[{i}]", i) for i, row in enumerate(form.layers))
        check_some_time(layers, where)
        return cls(
            _checked_source(form.source, where),
            form.model,
            layers,
            link_from(form.link, where),
            states_from(form.states, layers, where),
            size_from(form.capacity, f"{where}: field 'capacity'"),
            form.facts,
            form.samples,
            tuple(form.rank_factors),
            tied_from(form.tied, len(layers), where),
            None if form.shard_link is None else link_from(form.shard_link, where),
            host_from(form.host, where),
            tuple(form.microbatch_factors),
            vocabulary_from(form.vocabulary, len(layers), where),
            form.gradients,
        )


def _layers(costs: StageCosts, vocabulary: str | None, recompute: Recompute) -> tuple[int, ...]:
    """How many layers each stage gets where nobody says it."""
    if vocabulary == LAST:
        return partition_by_name(costs, "equal")
    turns = 2 if recompute == "all" else 1
    work = [c.work + (turns - 1) * c.F for c in costs.layers]
    return balanced_or_equal(costs, work)


def _checked_source(source: str, where: str) -> str:
    """Raise BadInput for a source that says nothing of where times come from."""
    if source in ("measured", "given") or source.startswith(("estimated: ", "given, ")):
        return source
    raise BadInput(f"{where}: field 'source' is '{source}', neither 'measured', 'given' nor 'estimated: …'")


@contextmanager
def _said_of_memory(limits: Sequence[int] | None, said: str | int | None, keeps_all: bool) -> Iterator[None]:
    """What does not fit inside says of how much memory, and what keeps less."""
    try:
        yield
    except Infeasible as error:
        rest = "a rank has what parameters, optimizer states, messages and what a pass takes while it runs leave"
        less = "; recompute and offload keep less" if keeps_all else ""
        raise Infeasible(f"{error}; {rest}{_of(limits, said)}{less}") from None


def _of(limits: Sequence[int] | None, said: str | int | None) -> str:
    """How much memory ranks were given, for messages: as it was `said`; where that is a bare number, too small to be meant,
    with its unit."""
    if limits is None:
        return ""
    if isinstance(said, str) and all(map(has_unit, said.split(","))):
        return f" of {said.strip()}"
    small = min(limits) < 2**20 and said is not None
    sizes = " or ".join(map(exact_bytes, dict.fromkeys(limits)))
    return f" of {sizes}{' (a number without a unit is bytes: write 40GiB, 512MB)' if small else ''}"
