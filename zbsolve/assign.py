"""A profile's layers on the stages of a pipeline: partitions by name, what each costs and needs.

The estimate of a step is Alpa's, Σ tᵢ + (m − 1) · max tⱼ with messages in the sum (arXiv 2201.12023, §5.2); where several
stages share a rank, the busiest rank's work is the maximum. All-to-alls run beside compute: they are in the sum, and in the
maximum where a rank's take longer than its work. It ranks partitions; how long a step is only a schedule says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from .errors import BadInput
from .layer import beside, ends
from .partition import Floats, balanced_ranks, equal, even, spans, walk
from .partition_alpa import alpa
from .profile import Profile

NAMES = ("equal", "balanced", "alpa", "memory")


@dataclass(frozen=True)
class Job:
    """What is partitioned and for what: routes as `placement.check_routes` gives them, limit in bytes a rank or None."""

    profile: Profile
    routes: tuple[tuple[int, ...], ...]
    microbatches: int
    limit: int | None
    fused: bool = False

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.routes[0])

    @property
    def single(self) -> bool:
        """Whether every stage has a rank of its own."""
        return len(self.routes) == 1 and len(set(self.routes[0])) == self.stages

    @property
    def times(self) -> list[float]:
        """µs of each layer for one microbatch, all its passes."""
        return [c.F + (c.BW if self.fused else c.B + c.W) for c in self.profile.layers]

    @property
    def all_to_alls(self) -> list[float]:
        """µs of each layer's all-to-alls for one microbatch, behind F and behind the backward."""
        return [2 * c.all_to_all for c in self.profile.layers]

    @property
    def factors(self) -> Floats:
        """How much longer each stage takes on its ranks, shape (stages,)."""
        return np.array(self.profile.stage_factors(self.routes))

    @property
    def shares(self) -> Floats:
        """[rank, stage]: which part of a stage's microbatches the rank runs."""
        found = np.zeros((max(self.routes[0]) + 1, self.stages))
        for route in self.routes:
            np.add.at(found, (np.array(route), np.arange(self.stages)), 1 / len(self.routes))
        return found

    def alive(self, stage: int) -> int:
        """Microbatches whose activations a stage is taken to hold at once: as 1F1B does where each stage has its own rank
        (arXiv 2104.04473); one elsewhere, the least with which any schedule exists."""
        return min(self.microbatches, self.stages - stage) if self.single else 1

    def bytes(self, stage: int) -> Floats:
        """[a, b]: bytes that a stage of layers a … b − 1 needs: activations, and all beside them."""
        return self.beside() + self.alive(stage) * self.kept()

    def need(self, counts: Sequence[int], kept: Floats) -> Floats:
        """Bytes that each rank needs, shape (ranks,), with so many layers a stage: activations of `kept`, and all beside."""
        profile, cuts = self.profile, np.cumsum([0, *counts])
        held = np.array([self.alive(s) * kept[a, b] for s, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))])
        fixed, moving = beside(profile.layers, profile.states, profile.tied, counts, self.routes)
        found: Floats = np.array(fixed) + np.array(moving) + (self.shares > 0) @ held
        return found

    def beside(self) -> Floats:
        """[a, b]: bytes that a stage of layers a … b − 1 on a rank of its own needs beside activations, as `layer.beside`
        counts them."""
        layers = self.profile.layers
        over = np.array(ends(layers), np.float64)
        inside = np.zeros((len(layers) + 1, len(layers) + 1))
        for a in range(len(layers)):
            inside[a, a + 1 :] = np.maximum.accumulate([c.transient for c in layers[a:]])
        fixed = spans([c.parameter_bytes for c in layers])
        for size, group in self.profile.tied:  # layers of one stage have once what they share
            before = np.concatenate([[0], np.cumsum(np.isin(np.arange(len(layers)), group))])
            fixed -= size * np.maximum(0, before[None, :] - before[:, None] - 1)
        return self.profile.states * fixed + inside + over[:, None] + over[None, :]

    def kept(self) -> Floats:
        """[a, b]: the most bytes that a stage of layers a … b − 1 keeps of one microbatch, as `profile.held` counts them."""
        layers = self.profile.layers
        twice = [max(a.output_kept, b.input_unneeded) for a, b in zip(layers, layers[1:], strict=False)]
        until = np.concatenate([[0.0], np.cumsum(twice), [0.0]])  # [b − 1] − [a]: what lies between the layers of a stage
        inside = np.concatenate([until[:1], until[:-1]])[None, :] - until[:, None]
        after_f = spans([c.held_until_B + c.held_until_W for c in layers]) - inside
        least: Floats = np.maximum(after_f, spans([c.held_until_W + c.held_from_B for c in layers]))
        return least

    @property
    def away(self) -> Floats:
        """[stage]: for which part of the microbatches the cut behind a stage lies between two ranks; (stages − 1,)."""
        routes = np.array(self.routes)
        return np.asarray((routes[:, :-1] != routes[:, 1:]).mean(axis=0), np.float64)

    def messages(self) -> Floats:
        """[a]: ns that a cut before layer a adds to the first microbatch's way there and back."""
        link, layers = self.profile.link, self.profile.layers
        return np.rint([0.0, *(2e3 * link.time(one.output_bytes) for one in layers)])


@dataclass(frozen=True, slots=True)
class Split:
    """One partition: layers of each stage; µs of each stage for one microbatch, and of its all-to-alls; bytes that each
    rank needs (see `Job.alive`); Alpa's estimate of the step, µs; devices of each stage."""

    name: str
    layers: tuple[int, ...]
    times: tuple[float, ...]
    all_to_alls: tuple[float, ...]
    need: tuple[int, ...]
    estimate: float
    devices: tuple[int, ...]


def partition_of(job: Job, name: str) -> tuple[int, ...]:
    """How many layers each stage gets, by name: equal (as people split today), balanced (the dearest stage as cheap as
    possible), F+B (the same without W, which can fill gaps), alpa (its estimate least, within the memory), memory (the
    fullest stage as empty as possible).

    Where several stages share a rank, alpa goes by the ranks' work and is a local search. Raises BadInput, Infeasible.
    """
    layers = len(job.profile.layers)
    if layers < job.stages:
        raise BadInput(f"partition: {layers} layers do not make {job.stages} stages")
    if name == "equal":
        return equal([(c.parameter_bytes, c.output_bytes) for c in job.profile.layers], job.stages)
    if name == "balanced":
        return balanced_ranks(job.times, job.routes, job.factors.tolist())
    if name == "F+B":
        costs = [c.F + (c.BW if job.fused else c.B) for c in job.profile.layers]
        return balanced_ranks(costs, job.routes, job.factors.tolist())
    if name == "memory":
        return even(lambda s: job.bytes(job.stages - s)[None], layers, job.stages)
    if name != "alpa":
        raise BadInput(f"partition '{name}': none of {', '.join(NAMES)}, F+B, and no layers a stage such as 5,5,6,4")
    if not job.single:
        return min((_descend(job, partition_of(job, start)) for start in ("balanced", "equal", "memory")), key=_order(job))
    work, sent, factors, messages = spans(job.times), spans(job.all_to_alls), job.factors, job.messages()[:, None]

    def cost(s: int) -> Floats:
        fits = True if job.limit is None else job.bytes(job.stages - s) <= job.limit
        return np.where(fits, streams(work * factors[job.stages - s], sent)[0], np.inf)[None]

    def beyond(s: int) -> Floats:
        return (messages + streams(work * factors[job.stages - s], sent)[1])[None]

    found = alpa(cost, layers, (job.stages,), job.microbatches, beyond=beyond)
    return tuple(count for count, _ in found.stages)


def streams(work: Floats, sent: Floats) -> tuple[Floats, Floats]:
    """From µs of stages' work and of their all-to-alls, whole ns: the longer of both, which is what each microbatch adds
    behind the slowest stage, and the other, which the first one's way takes too."""
    one, other = np.rint(1e3 * work), np.rint(1e3 * sent)
    return np.maximum(one, other), np.minimum(one, other)


def split(job: Job, name: str, counts: Sequence[int]) -> Split:
    """What a partition costs and needs. Raises BadInput where it does not fit the profile and the stages."""
    counts = tuple(counts)
    if len(counts) != job.stages or sum(counts) != len(job.profile.layers) or min(counts) < 1:
        raise BadInput(f"layers: {counts} does not split {len(job.profile.layers)} layers into {job.stages} stages")
    cuts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    pairs = list(zip(cuts, cuts[1:], strict=False))
    times = np.array([spans(job.times)[a, b] for a, b in pairs]) * job.factors
    beside = np.array([spans(job.all_to_alls)[a, b] for a, b in pairs])
    way = float(times.sum() + beside.sum()) + float(job.messages()[cuts[1:-1]] @ job.away) / 1e3
    busiest = float(np.maximum(job.shares @ times, job.shares @ beside).max())
    return Split(
        name,
        counts,
        tuple(times.tolist()),
        tuple(beside.tolist()),
        tuple(ceil(need) for need in job.need(counts, job.kept())),
        way + (job.microbatches - 1) * busiest,
        (1,) * job.stages,
    )


def shifts(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Every partition where one stage gives a layer to another, and those between move along."""
    found = []
    for giver, count in enumerate(counts):
        for taker in range(len(counts)):
            if taker != giver and count > 1:
                moved = list(counts)
                moved[giver], moved[taker] = moved[giver] - 1, moved[taker] + 1
                found.append(tuple(moved))
    return found


def ordered_shifts(job: Job, counts: Sequence[int]) -> list[tuple[int, ...]]:
    """`shifts`, the most promising first: bytes above the limit, the estimate, how uneven the ranks are."""
    return sorted(shifts(counts), key=_order(job))


def _order(job: Job) -> Callable[[Sequence[int]], tuple[float, float, float]]:
    """Partitions in order: bytes above the limit first, then the estimate, then how uneven the ranks are."""
    times, sent = (np.concatenate([[0.0], np.cumsum(one)]) for one in (job.times, job.all_to_alls))
    messages, away, factors, shares, kept = job.messages() / 1e3, job.away, job.factors, job.shares, job.kept()

    def order(counts: Sequence[int]) -> tuple[float, float, float]:
        cuts = np.concatenate([[0], np.cumsum(counts)])
        spent = (times[cuts[1:]] - times[cuts[:-1]]) * factors
        load, over = shares @ spent, 0.0
        if job.limit is not None:
            over = float(np.maximum(job.need(counts, kept) - job.limit, 0).sum())
        beside = shares @ (sent[cuts[1:]] - sent[cuts[:-1]])
        way = spent.sum() + sent[-1] + messages[cuts[1:-1]] @ away
        step = way + (job.microbatches - 1) * max(load.max(), beside.max())
        return over, round(float(step), 6), round(float((load**2).sum()), 6)

    return order


def _descend(job: Job, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The best partition that single shifts reach, each step the best shift."""
    order = _order(job)
    while True:
        best = min(shifts(counts), key=order, default=counts)
        if not order(best) < order(counts):
            return counts
        counts = best


def least_step(job: Job, objective: str) -> int:
    """µs: no schedule of any partition takes less, on these ranks and this placement.

    Where each stage has a rank of its own: stage j starts when F went through the layers before, then works m times, and
    behind its last B the B of the layers before are still to come, all-to-alls on both ways; the least maximum over j is a
    dynamic programme. On shared ranks: all work over all ranks. Durations are whole µs, so each may be half a µs less than
    its layers say.
    """
    profile, m, kinds = job.profile, job.microbatches, ("F", "BW") if job.fused else ("F", "B", "W")
    factors = np.array(profile.rank_factors or (1.0,) * (max(job.routes[0]) + 1))

    def lower(value: Floats, factor: float) -> Floats:
        least: Floats = np.maximum(0.0, (value - 0.5) * factor - (0.5 if profile.rank_factors else 0.0))
        return least

    sums = [spans([getattr(c, kind) for c in profile.layers]) for kind in kinds]
    if not job.single:
        total = sum(one[0, -1] - 0.5 * job.stages * (1 + 1 / factors.min()) for one in sums)
        return max(0, ceil(m * float(total) / float((1 / factors).sum()) - 1e-6))
    apart = spans([c.all_to_all for c in profile.layers])  # no factor: they are not the rank's work
    least_message = round(profile.link.time(min(c.output_bytes for c in profile.layers)))

    def price(s: int) -> Floats:
        stage = job.stages - s
        own = [lower(one, float(job.factors[stage])) for one in sums]
        sent = np.maximum(0.0, apart - 0.5)
        work = m * np.maximum(np.sum(own, axis=0), 2 * sent)
        if objective == "span" or stage == 0:
            return np.asarray(work)[None]
        rounding = stage * (0.5 * factors.max() + (0.5 if profile.rank_factors else 0.0))
        before = [np.maximum(0.0, factors.min() * np.nan_to_num(one[0], posinf=0.0) - rounding) for one in sums[:2]]
        others = np.maximum(0.0, np.nan_to_num(apart[0], posinf=0.0) - 0.5 * stage)
        head, tail = (np.asarray(one) + others + stage * least_message for one in before)
        both: Floats = np.maximum(head[:, None] + work, head[:, None] + m * (own[0] + own[1]) + tail[:, None] + sent)
        return both[None]

    done = walk(len(profile.layers), job.stages, price, maximum=True)
    return ceil(done.cost(job.stages) - 1e-6)
