"""What layouts' steps probably take: formulas, corrected by what searches of layouts like them found. Promising layouts are
searched first; nothing is proven with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .bounds.space_bounds import SpaceBounds
from .costs.rank_costs import Costs
from .layout import VEE, Layout

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
LARGE = 150_000  # passes and edges
STAGE_PASSES, SHARD_PASSES, COPIES = 3, 7, 2  # of a microbatch
# Stages of a rank whose activations are made or used, on their way out, or on their way back; of one stage and of several.
MOVING = np.array([3, 5])
NEEDLESS = 1.1  # of offload where known schedules fit without
_AWAY = np.array([0, 0.5, 1])  # of what a rank keeps, by offload


def estimated_steps(bounds: SpaceBounds, memory: int) -> Floats:
    """µs of each layout's step with layers spread evenly; infinite where its bound is.

    Filling takes a forward of one stage a rank. Known schedules keep so many microbatches of a rank: 1F1B p, interleaved
    1F1B (p − 1) / v more (2104.04473, section 2.2), those of the V p at most and p / 3 at least (2405.15362; between them is
    taken). Slices fill and keep the less the more there are (2406.03488), of a V too. With less memory a step takes longer
    in proportion; what goes to host memory is not kept, and takes its time. Where known schedules fit without, offload comes
    behind.
    """
    layout, costs = bounds.layout, bounds.costs
    blocks, pp = costs.blocks / layout.pp, layout.pp
    away, room = _AWAY[layout.offload], room_on_a_rank(bounds, memory)
    needed = (1 - away) * _needed(layout) + away * MOVING[np.asarray(layout.chunks > 1).astype(int)] / layout.chunks
    slower = np.maximum(1.0, needed / np.maximum(room / layout.chunks, 0.1))
    fill = (pp - 1) / layout.slices * (blocks / layout.chunks * costs.block.F + costs.sent)
    copying = layout.count * blocks * np.where(costs.copies.some, away, 1.0) * costs.copies.out
    needless = np.where(needless_offload(bounds, memory), NEEDLESS, 1.0)
    busy = np.maximum(bounds.pipeline * slower, copying) * needless
    follows = _exposed(layout, costs) + bounds.behind
    return np.where(np.isfinite(bounds.step), busy + fill + follows, np.inf)


def large_steps(layout: Layout) -> Bools:
    """Layouts whose step has so many passes and edges that a search takes most of a minute."""
    shards = np.where(layout.vocabulary, SHARD_PASSES * layout.pp + layout.pp**2, 0)  # all S come before each one's barrier
    passes = np.where(layout.offload, STAGE_PASSES + COPIES, STAGE_PASSES)
    return np.asarray(layout.count * layout.slices * (passes * layout.stages + shards) > LARGE)


def needless_offload(bounds: SpaceBounds, memory: int) -> Bools:
    """Layouts that move activations to host memory though known schedules without fit."""
    layout = bounds.layout
    return np.asarray((layout.offload > 0) & (_needed(layout) * layout.chunks <= room_on_a_rank(bounds, memory)))


def _needed(layout: Layout) -> Floats:
    """Microbatches whose activations known schedules keep on a rank."""
    loop = layout.pp + np.where(layout.chunks > 1, (layout.pp - 1) / layout.chunks, 0.0)
    whole = np.where(layout.placement == VEE, 2 * layout.pp / 3, loop)
    parts = np.where(np.asarray(layout.slices) == 1, whole, 1 + (whole - 1) / layout.slices)
    return np.asarray(np.minimum(parts, layout.count))


def room_on_a_rank(bounds: SpaceBounds, memory: int) -> Floats:
    """Microbatches of a stage whose activations fit on a rank."""
    layout, costs = bounds.layout, bounds.costs
    blocks = costs.blocks / layout.pp
    kept = costs.kept.moment * np.where(layout.offload > 0, layout.chunks, 1)
    # From its first B on a stage has gathered parameters and gradients beside what it keeps, a table as a block does.
    gathered = 1 + (costs.gathered + costs.unreduced) / np.maximum(costs.states, 1)
    fixed = (blocks * costs.states + costs.table_states) * gathered + costs.shard.states
    inside = np.maximum(costs.transient, costs.shard.transient) + 2 * layout.chunks * costs.waiting
    return np.asarray(np.floor((memory - fixed - inside) / (blocks / layout.chunks * kept)))


def _exposed(layout: Layout, costs: Costs) -> Floats:
    """µs of gathers before the first compute pass and of the exchange of gradients behind the last one, beyond the least
    that bounds have. Stages of a rank end one after the other, when the last microbatches of a round have come through the
    next one."""
    blocks = costs.blocks / layout.stages
    each = blocks * costs.exchange.block + costs.exchange.table / layout.chunks
    between = np.minimum(layout.pp, layout.count) * blocks * (costs.block.B + costs.block.W)
    waiting = (layout.chunks - 1) * np.maximum(0.0, each - between)
    return np.asarray(np.maximum(0.0, each - costs.exchange.least) + waiting + blocks * costs.exchange.gather)


# --- Corrected by what was found ---


ALIKE = 0.5  # times as much counts what was found of a layout, for each field in which another differs from it
ESTIMATE = 0.05  # counts the estimate itself
PENDING = 0.02  # log of what a search is taken to find until it ends, over its estimate: others are begun beside it
FIELDS = tuple(name for name in Layout._fields if name not in ("count", "scattered"))  # others follow from these


@dataclass(frozen=True, eq=False)
class Promise:
    """Columns over the layouts of a space. estimate: µs of a step, infinite where it is out of the race; weight and total:
    of the logarithms of steps found over their estimates."""

    layout: Layout
    estimate: Floats
    weight: Floats
    total: Floats

    @classmethod
    def of(cls, layout: Layout, estimate: Floats) -> Promise:
        """Where nothing was searched yet."""
        return cls(layout, estimate, np.zeros(len(estimate)), np.zeros(len(estimate)))

    @property
    def step(self) -> Floats:
        """µs that each layout's step probably takes."""
        return np.asarray(self.estimate * np.exp(self.total / (ESTIMATE + self.weight)))

    def begun(self, row: int) -> None:
        """A search of this layout has begun."""
        alike = self._alike(row)
        np.add(self.weight, alike, out=self.weight)
        np.add(self.total, PENDING * alike, out=self.total)

    def ended(self, row: int, step: float) -> None:
        """It found a step of so many µs. That says nothing where its bound has put it out of the race meanwhile."""
        if np.isinf(self.estimate[row]):
            return
        more = np.log(step / self.estimate[row]) - PENDING
        np.add(self.total, more * self._alike(row), out=self.total)

    def _alike(self, row: int) -> Floats:
        """How much a step of this layout says of each other's."""
        differ = sum(column != column[row] for column in (getattr(self.layout, name) for name in FIELDS))
        return np.asarray(ALIKE**differ)
