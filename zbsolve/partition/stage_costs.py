"""Times and bytes of stages of layers on the ranks of a pipeline; and a lower bound on the step of every partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from ..problem.tables import Ints
from ..util.errors import BadInput
from .cuts import Floats, cut_dp, none_where_empty, spans
from .layer import Layer, Link, Tied, begun, layer_cuts, side_values, split_known, untrained_layers
from .stage_memory import NONE, Common, StageMemory, most_within


@dataclass(frozen=True)
class StageCosts:
    """The layers to partition, and the pipeline whose stages they go to.

    layers, link, states, tied, rank_factors, microbatch_factors, gradients, roles, site_link: as in a `Profile`.
    routes: stage → rank, as `placement.check_routes` returns them. microbatches: of a step. limit: bytes of each rank, or
    None. fused: one backward BW in place of B and W. group: data-parallel ranks that divide a stage's parameters among
    them. common: what every rank has beside its stages.
    """

    layers: tuple[Layer, ...]
    link: Link
    states: float
    tied: Tied
    rank_factors: tuple[float, ...]
    microbatch_factors: tuple[float, ...]
    routes: tuple[tuple[int, ...], ...]
    microbatches: int
    limit: tuple[int, ...] | None
    fused: bool = False
    group: int = 1
    common: Common = NONE
    gradients: float = 1.0
    roles: tuple[Layer, ...] = ()
    site_link: Link | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        routes: tuple[tuple[int, ...], ...],
        microbatches: int = 1,
        limit: int | tuple[int, ...] | None = None,
        fused: bool = False,
        group: int = 1,
        common: Common = NONE,
    ) -> StageCosts:
        """The costs of a profile's layers (`model`); fused too where it has no times of B and W. limit: bytes of each rank,
        or one number for all. Raises BadInput where the profile has factors of another number of ranks or microbatches."""
        ranks, known = max(routes[0]) + 1, len(model.rank_factors)
        if known not in (0, ranks):
            raise BadInput(f"ranks: the profile knows how fast {known} ranks are (field 'rank_factors'), not {ranks}")
        lengths = model.microbatch_factors
        if len(lengths) not in (0, microbatches):
            raise BadInput(
                f"microbatches: the profile knows how long {len(lengths)} microbatches are (field 'microbatch_factors'), "
                f"not {microbatches}; without that field all are alike"
            )
        parts = (model.layers, model.link, model.states, model.tied, model.rank_factors, lengths)
        limit = (limit,) * ranks if isinstance(limit, int) else limit
        fused = fused or not split_known(model.layers)
        more = (common, model.gradients, model.roles, model.site_link)
        return cls(*parts, routes, microbatches, limit, fused, group, *more)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.routes[0])

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return max(self.routes[0]) + 1

    @property
    def single(self) -> bool:
        """Whether every stage has a rank of its own."""
        return len(self.routes) == 1 and len(set(self.routes[0])) == self.stages

    def beside(self, stage: int) -> tuple[Layer, ...]:
        """The role whose times a stage takes beside its layers: a tuple of one, or of none."""
        role = 0 if stage == 0 else -1 if stage == self.stages - 1 else 1
        return (self.roles[role],) if self.roles else ()

    @cached_property
    def layer_totals(self) -> tuple[Ints, Ints]:
        """Two arrays [row, a], of the layers before a: whole µs, with rows F, B (or BW), W; and bytes, with rows kept after
        F, kept after B, and kept through the whole step, where each tensor counts for one layer only."""
        kinds = ("F", "BW") if self.fused else ("F", "B", "W")
        times, ends = [[getattr(layer, kind) for layer in self.layers] for kind in kinds], np.arange(1, len(self.layers) + 1)
        after_b = np.zeros(len(ends)) if self.fused else self.memory.after_b(0, ends)
        held = np.array([self.memory.after_f(0, ends), after_b, self.memory.fixed((0, ends))])
        time, held = (np.pad(np.rint(array), ((0, 0), (1, 0))) for array in (np.cumsum(times, axis=1), held))
        return time.astype(np.int64), held.astype(np.int64)

    def check(self, counts: Sequence[int]) -> tuple[int, ...]:
        """`counts`, layers of each stage, as a tuple. Raises BadInput where they do not split the layers into the stages."""
        counts = tuple(counts)
        if len(counts) != self.stages or sum(counts) != len(self.layers) or min(counts) < 1:
            raise BadInput(f"layers: {counts} does not split {len(self.layers)} layers into {self.stages} stages")
        return counts

    @cached_property
    def untrained(self) -> int:
        """How many layers in front train nothing; 0 where ranks have passes beside stages: gradients go back to all then."""
        return 0 if self.common.barriers else untrained_layers(self.layers)

    @cached_property
    def times(self) -> list[float]:
        """µs of each layer for one microbatch, all its passes together."""
        return [c.F + (c.BW if self.fused else c.B + c.W) for c in self.layers]

    @cached_property
    def all_to_alls(self) -> list[float]:
        """µs of each layer's all-to-alls for one microbatch: one after F and one after the backward."""
        return [2 * c.all_to_all for c in self.layers]

    @cached_property
    def factors(self) -> Floats:
        """The factor of each stage's ranks on the times of its layers, averaged over routes; shape (stages,)."""
        known = np.array(self.rank_factors or (1.0,) * self.ranks)
        return np.asarray(known[np.array(self.routes)].mean(axis=0), np.float64)

    @cached_property
    def shares(self) -> Floats:
        """[rank, stage]: the share of a stage's microbatches that the rank runs."""
        shares = np.zeros((self.ranks, self.stages))
        for route in self.routes:
            np.add.at(shares, (np.array(route), np.arange(self.stages)), 1 / len(self.routes))
        return shares

    @cached_property
    def memory(self) -> StageMemory:
        """The account of bytes that stages keep and need."""
        largest = max(self.microbatch_factors, default=1.0)
        return StageMemory(self.layers, self.states, self.tied, self.group, self.common, self.gradients, largest)

    def room(self, stage: int) -> float:
        """Bytes of the rank of a stage, in the first route; infinite without a limit."""
        return np.inf if self.limit is None else self.limit[self.routes[0][stage]]

    def fits(self, need: Sequence[int]) -> bool:
        """Whether each rank, or each submesh, has room for what it needs. need: bytes of each."""
        return self.limit is None or all(size <= room for size, room in zip(need, self.limit, strict=False))

    def in_flight(self, stage: int) -> int:
        """How many microbatches' activations a stage is assumed to hold at once. Where each stage has its own rank, as many
        as in 1F1B (arXiv 2104.04473); elsewhere one, the least with which a schedule exists."""
        return min(self.microbatches, self.stages - stage) if self.single else 1

    @cached_property
    def _cuts(self) -> tuple[np.ndarray, np.ndarray]:
        at = np.arange(len(self.layers) + 1)
        return at[:, None], at[None, :]

    @cached_property
    def kept(self) -> Floats:
        """[a, b]: the most bytes that a stage of layers a … b − 1 keeps of one microbatch; infinite where a ≥ b."""
        return np.asarray(self.memory.kept(*self._cuts) + none_where_empty(len(self.layers)))

    @cached_property
    def fixed_bytes(self) -> Floats:
        """[a, b]: bytes beside activations that a stage of layers a … b − 1 needs on a rank of its own."""
        cut, memory = self._cuts, self.memory
        needed = memory.fixed(cut) + memory.gathered(cut) + memory.transient(*cut) + memory.messages(*cut)
        return np.asarray(needed + none_where_empty(len(self.layers)))

    def bytes(self, stage: int, held: int = 0) -> Floats:
        """[a, b]: all bytes that a stage of layers a … b − 1 needs on a rank of its own. held: microbatches whose
        activations count; 0: those in flight."""
        return self.fixed_bytes + (held or self.in_flight(stage)) * self.kept

    def need(self, counts: Sequence[int]) -> Floats:
        """All bytes that each rank needs, shape (ranks,). counts: layers of each stage."""
        stages = list(pairwise(layer_cuts(counts)))
        held = [self.in_flight(s) * self.kept[cut] for s, cut in enumerate(stages)]
        fixed, moving = self.memory.of_ranks(counts, self.routes)
        gathered = [float(self.memory.gathered(cut)) for cut in stages]
        return np.asarray(np.array(fixed) + np.array(moving) + (self.shares > 0) @ (np.array(held) + np.array(gathered)))

    @cached_property
    def between_ranks(self) -> Floats:
        """[stage]: the share of microbatches that change rank after this stage; shape (stages − 1,)."""
        routes = np.array(self.routes)
        return np.asarray((routes[:, :-1] != routes[:, 1:]).mean(axis=0), np.float64)

    @cached_property
    def messages(self) -> Floats:
        """[a]: ns of messages that a cut before layer a adds to a microbatch's path, both ways; 0 where a row begins."""
        rows = {*begun(self.layers)}
        ways = [0 if i in rows else 1 if i <= self.untrained else 2 for i in range(1, len(self.layers) + 1)]
        return np.rint([0.0, *(1e3 * n * self.link.message(layer) for n, layer in zip(ways, self.layers, strict=True))])

    def least_message(self, layers: Sequence[Layer]) -> float:
        """µs that the output of one of these layers takes at least to another rank, whichever link is between them."""
        links = [self.link] if self.site_link is None else [self.link, self.site_link]
        return min(link.message(layer) for link in links for layer in layers)

    @cached_property
    def row(self) -> bool:
        """Whether the layers are one row: no layer but the first begins one."""
        return not begun(self.layers)

    @cached_property
    def ways(self) -> Ways:
        """The longest paths of a microbatch through the graph of layers (see `Ways`)."""
        return Ways.of(self.layers, self.fused)

    def steps(self, factor: float = 1.0) -> tuple[Floats, Floats]:
        """Two arrays [a, b] in whole ns, from a stage's work (times `factor`) and its all-to-alls: the larger of both, which
        each microbatch adds on the slowest stage, and the smaller, which only lengthens the path of one microbatch."""
        work, sent = np.rint(1e3 * (factor * spans(self.times))), np.rint(1e3 * spans(self.all_to_alls))
        return np.maximum(work, sent), np.minimum(work, sent)


class Ways(NamedTuple):
    """µs of the longest paths of one microbatch through the graph of layers, without messages. to_f, behind_b: before each
    layer's F, and after its B (or BW), shape (layers + 1,), infinite at the last index; through_f, through_b: whole paths
    through its F, and through its B, shape (layers,). In one row these are sums over the layers before, and over all."""

    to_f: Floats
    behind_b: Floats
    through_f: Floats
    through_b: Floats

    @classmethod
    def of(cls, layers: Sequence[Layer], fused: bool) -> Ways:
        """The paths of these layers. A layer waits for the one before it, unless it begins a row, and for the givers of what
        it takes; gradients go back along all of these links, except to givers whose `gradient` is false."""
        n, values = len(layers), side_values([layer.names for layer in layers])
        F, B = (np.array([getattr(layer, kind) for layer in layers], np.float64) for kind in ("F", "BW" if fused else "B"))
        links = [(i - 1, i, True) for i in range(1, n) if not layers[i].begins]
        links += [(i, j, side.gradient) for i in range(n) for side in layers[i].gives for j in values[side.name][1]]
        links.sort(key=lambda link: link[1])
        to_f, behind_b = (np.append(np.zeros(n), np.inf) for _ in range(2))
        for i, j, back in links:
            to_f[j] = max(to_f[j], to_f[i] + F[i])
            behind_b[j] = max(behind_b[j], behind_b[i] + B[i]) if back else behind_b[j]
        from_f, to_b = B + behind_b[:-1], to_f[:-1] + F
        for i, j, back in sorted(links, reverse=True):
            from_f[i] = max(from_f[i], F[j] + from_f[j])
            to_b[i] = max(to_b[i], to_b[j] + B[j]) if back else to_b[i]
        return cls(to_f, behind_b, to_f[:-1] + F + from_f, to_b + B + behind_b[:-1])


HALF = 0.5  # µs: durations are rounded to whole numbers, so each may be this much less than its layers' sum


def least_step(costs: StageCosts, objective: str) -> int:
    """A lower bound, µs, on the step of every schedule of every partition, on these ranks and this placement.

    Stage j starts after F of the layers before it, then runs its passes of m microbatches; after its last B come the B of
    the layers before it. All-to-alls count on both paths. Also, one microbatch's whole path through the stage, F and B of
    all layers in one row, comes after m − 1 of its passes F, or before as many passes B. A dynamic programme finds the least
    maximum over j of both. A second bound spreads all work over all ranks, with each rank's wait before its first F and
    after its last backward; S and T are work of every rank. Where microbatches take several routes only the work counts.
    """
    kinds = ("F", "BW") if costs.fused else ("F", "B", "W")
    sums = [spans([getattr(c, kind) for c in costs.layers]) for kind in kinds]
    common = (costs.common.S, costs.common.T) if costs.common.barriers else ()
    factors = np.array(costs.rank_factors or (1.0,) * costs.ranks)
    again = HALF / factors.min() if costs.rank_factors else 0.0  # a factor's product is rounded once more
    once = sum(span[0, -1] - costs.stages * (_rounding(costs, kind) + again) for span, kind in zip(sums, kinds, strict=True))
    once += sum(costs.ranks * max(0.0, cost - HALF - again) for cost in common)
    roundings = (len(sums) * costs.stages + len(common) * costs.ranks) / factors.min()
    total = _of_all(costs, np.asarray(once), roundings)
    alone = len(costs.routes) > 1 or objective == "span"
    idle = 0.0 if alone else float((_ends(costs) / factors).sum())
    shared = ceil((float(total) + idle) / float((1 / factors).sum()) - 1e-6)
    if len(costs.routes) > 1:
        return shared
    ways = [most_within(array) for array in _whole_ways(costs)]

    def price(s: int) -> Floats:
        stage = costs.stages - s
        least = _stage_at_least(costs, sums, common, stage, objective)
        # One microbatch's whole path comes after the others' F on the stage, or before their B.
        if costs.microbatches > 1 and objective != "span":
            passes = [_at_least(costs, array, kind, costs.factors[stage]) for array, kind in zip(sums, "FB", strict=False)]
            least = np.max(
                [least, *(way + (costs.microbatches - 1) * work for way, work in zip(ways, passes, strict=True))], 0
            )
        return np.asarray(least)[None]

    table = cut_dp(len(costs.layers), costs.stages, price, maximum=True)
    return max(shared, ceil(table.cost(costs.stages) - 1e-6))


def _message(costs: StageCosts) -> float:
    """µs of the shortest message between two ranks, at least."""
    smaller = min(1.0, *costs.microbatch_factors) if costs.microbatch_factors else 1.0
    time = smaller * round(costs.least_message(costs.layers))
    return max(0.0, time - HALF * bool(costs.microbatch_factors))


def _at_least(costs: StageCosts, times: Floats, kinds: str, factor: float, stages: int = 1) -> Floats:
    """A lower bound, µs, on passes of these kinds of the shortest microbatch, over this number of stages whose layers take
    `times`: everything that rounding can take off is subtracted."""
    off = sum(_rounding(costs, "BW" if kind == "B" and costs.fused else kind) for kind in kinds)
    shortest, again = min(costs.microbatch_factors, default=1.0), HALF * len(kinds)
    once = np.asarray(times) * factor - stages * (off * factor + again * bool(costs.rank_factors))
    return np.asarray(np.maximum(0.0, shortest * once - again * stages * bool(costs.microbatch_factors)))


def _hops(costs: StageCosts, stages: int) -> int:
    """The least number of messages on a path through the first `stages` stages; 0 where paths can begin at other layers."""
    return int(np.count_nonzero(np.diff(costs.routes[0][:stages]))) if costs.row else 0


def _whole_ways(costs: StageCosts) -> list[Floats]:
    """Lower bounds, µs, on a microbatch's whole path through each layer's F, and through its B, with messages."""
    sent = _hops(costs, costs.stages) * _message(costs) * (1 if costs.untrained else 2)
    factor, (*_, through_f, through_b) = min(costs.rank_factors, default=1.0), costs.ways
    return [sent + _at_least(costs, array, "FB", factor, costs.stages) for array in (through_f, through_b)]


def _ends(costs: StageCosts) -> Floats:
    """A lower bound, µs, on what each rank idles: before the first F of its stages, and after the last backward of them. In
    a row both are those of its first stage. The second counts only where backwards are fused and ranks have no T: else
    a W or T can still run then.

    Each stage has a layer, so at least as many layers as stages come before a stage, and after it."""
    route, more = np.array(costs.routes[0]), len(costs.layers) - costs.stages
    both = [("F", costs.ways.to_f, True)]
    if costs.fused and not costs.common.barriers:
        both.append(("B", costs.ways.behind_b, not costs.untrained))
    waits = np.zeros(costs.ranks)
    for kind, way, sent in both:
        least = np.array([_end(costs, s, float(way[s : s + more + 1].min()), kind, sent) for s in range(costs.stages)])
        waits += [least[route == rank].min() for rank in range(costs.ranks)]
    return waits


def _end(costs: StageCosts, stage: int, way: float, kind: str, sent: bool) -> float:
    """A lower bound, µs, on a path of this kind of pass to a stage, or from it, with its messages where `sent`."""
    factor = min(costs.rank_factors, default=1.0)
    return float(_at_least(costs, np.array(way), kind, factor, stage)) + sent * _hops(costs, stage + 1) * _message(costs)


def _rounding(costs: StageCosts, kind: str) -> float:
    """µs that rounding may take off a pass of this kind: 0 where the times of its layers are whole."""
    return 0.0 if all(float(getattr(layer, kind)).is_integer() for layer in costs.layers) else HALF


def _of_all(costs: StageCosts, one_microbatch: Floats, roundings: float = 1.0) -> Floats:
    """A lower bound, µs, on all microbatches. one_microbatch: µs of one with factor 1; roundings: how many durations it
    sums, since a microbatch's factor rounds each once more."""
    if not costs.microbatch_factors:
        return np.asarray(np.maximum(0.0, costs.microbatches * one_microbatch))
    rounded = HALF * roundings * costs.microbatches
    return np.asarray(np.maximum(0.0, sum(costs.microbatch_factors) * one_microbatch - rounded))


def _stage_at_least(costs: StageCosts, sums: list[Floats], common: tuple[float, ...], stage: int, objective: str) -> Floats:
    """[a, b]: a lower bound, µs, on a step where this stage holds layers a … b − 1. sums: [a, b] of each kind of pass;
    common: µs of S and T on its rank. Both come after the stage's first F. Those that backwards wait for come before its
    last B: S, and T where there are two barriers."""
    factors, shortest = np.array(costs.rank_factors or (1.0,) * costs.ranks), min(costs.microbatch_factors, default=1.0)
    slower = HALF if costs.rank_factors else 0.0  # a factor's product is rounded once more

    def lower(value: Floats, factor: float, off: float = HALF) -> Floats:
        return np.asarray(np.maximum(0.0, (value - off) * factor - slower))

    apart = spans([c.all_to_all for c in costs.layers])  # no factor: they are not the rank's work
    rounded = [_rounding(costs, kind) for kind in (("F", "BW") if costs.fused else ("F", "B", "W"))]
    own = [lower(array, float(costs.factors[stage]), off) for array, off in zip(sums, rounded, strict=True)]
    sent = np.maximum(0.0, apart - HALF)
    all_own = [_of_all(costs, array) for array in own]
    beside = [_of_all(costs, lower(np.asarray(cost), float(costs.factors[stage]))) for cost in common]
    smaller = min(1.0, shortest)  # messages and collectives of a small microbatch are shorter
    sent = np.maximum(0.0, smaller * sent - HALF * bool(costs.microbatch_factors))
    work = np.maximum(sum([*all_own, *beside]), costs.microbatches * 2 * sent)
    if objective == "span" or stage == 0:
        return np.asarray(work)
    ways = zip(costs.ways[:2], "FB", strict=True)
    before = [_at_least(costs, np.nan_to_num(array, posinf=0.0), kind, factors.min(), stage) for array, kind in ways]
    again = HALF * bool(costs.microbatch_factors)
    others = np.maximum(0.0, smaller * (np.nan_to_num(apart[0], posinf=0.0) - HALF * stage) - again * stage)
    message = _message(costs)
    sent_back = 0.0 if costs.untrained else message  # no gradient goes back to layers that train nothing
    head, tail = (
        np.asarray(array) + others + _hops(costs, stage + 1) * each
        for array, each in zip(before, (message, sent_back), strict=True)
    )
    between = all_own[0] + all_own[1] + sum(beside[: costs.common.barriers])
    return np.asarray(np.maximum(head[:, None] + work, head[:, None] + between + tail[:, None] + sent))
