"""Estimates of layouts' steps: formulas, corrected by the results of searches of similar layouts. They only decide which
layouts are searched first; no bound depends on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..problem.tables import Ints
from .bounds.space_bounds import SpaceBounds
from .costs.columns import Costs
from .layout import VEE, Layout

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
STAGE_PASSES, COMMON_PASSES, COPIES = 3, 6, 2  # for each microbatch, of a stage, of every rank, and of a stage's copies
# Microbatches of a stage in device memory where all is copied: in use, on their way out or back; with one stage, or several.
MOVING = np.array([3, 5])
SLOWED = 0.4  # exponent: how a step in parts grows with the shortage of memory
NEEDLESS = 1.1  # factor on the estimate with copies where searches do without them


def estimated_steps(bounds: SpaceBounds, memory: int) -> Floats:
    """[layout]: µs of the step with layers spread evenly; infinite where its bound is infinite.

    Filling the pipeline takes a forward of one stage on each rank. Activations of a stage live at least until their
    microbatch has passed the later stages and come back: where F, B and W take equally long, a rank keeps p / 3 microbatches
    in a V, and p (1 + 1 / v) / 3 in a loop, as 2405.15362 counts. Searches lose little with twice that, or with 1F1B's p.
    With less memory a step takes longer in proportion. More parts fill faster and keep less (2406.03488): with at least half
    of that memory, a step grows by the shortage to the power `SLOWED` only, as nine layouts of GPT 175B showed. Activations
    in host memory are not kept, but their copies take time. Copies that searches do not need give the factor `NEEDLESS`.
    """
    layout, costs = bounds.layout, bounds.costs
    blocks, pp = costs.blocks / layout.pp, layout.pp
    away, room = costs.share_away, room_on_a_rank(bounds, memory)
    needed = (1 - away) * _needed(layout) + away * MOVING[np.asarray(layout.chunks > 1).astype(int)] / layout.chunks
    short = np.maximum(1.0, needed / np.maximum(room / layout.chunks, 0.1))
    slower = np.where(costs.parts > 1, np.maximum(short**SLOWED, short / 2), short)
    fill = (pp - 1) / costs.parts * (blocks / layout.chunks * costs.block.F + costs.sent)
    copying = layout.count * blocks * np.where(costs.copies.some, away, 1.0) * costs.copies.out
    needless = np.where(needless_copies(bounds, memory), NEEDLESS, 1.0)
    busy = np.maximum(bounds.pipeline * slower, copying) * needless
    follows = _exposed(layout, costs) + bounds.behind
    return np.where(np.isfinite(bounds.step), busy + fill + follows, np.inf)


def pass_counts(bounds: SpaceBounds) -> Ints:
    """[layout]: the passes of its step, about."""
    layout, costs = bounds.layout, bounds.costs
    common = np.where(costs.common.states > 0, COMMON_PASSES * layout.pp, 0)
    passes = np.where(costs.stays, STAGE_PASSES, STAGE_PASSES + COPIES)
    return np.asarray(layout.count * costs.parts * (passes * layout.stages + common))


def needless_copies(bounds: SpaceBounds, memory: int) -> Bools:
    """[layout]: whether it copies activations to host memory although searches do without."""
    layout = bounds.layout
    return np.asarray(~bounds.costs.stays & (_needed(layout) * layout.chunks <= room_on_a_rank(bounds, memory)))


def _needed(layout: Layout) -> Floats:
    """[layout]: microbatches whose activations a rank keeps where searches lose little."""
    alive = np.where(layout.placement == VEE, layout.pp, layout.pp * (1 + 1 / np.asarray(layout.chunks))) / 3
    whole = np.minimum(2 * alive, layout.pp)
    parts = np.where(layout.parts == 1, whole, 1 + (whole - 1) / layout.parts)
    return np.asarray(np.minimum(parts, layout.count))


def room_on_a_rank(bounds: SpaceBounds, memory: int) -> Floats:
    """[layout]: microbatches of one stage whose activations fit on a rank."""
    layout, costs = bounds.layout, bounds.costs
    blocks = costs.blocks / layout.pp
    kept = costs.kept.moment * np.where(costs.stays, 1, layout.chunks)
    # After its first B a stage has bytes beside states and activations, for tables as for blocks.
    further = 1 + (costs.from_F + costs.from_B) / np.maximum(costs.states, 1)
    fixed = (blocks * costs.states + costs.table_states) * further + costs.common.states
    inside = np.maximum(costs.transient, costs.common.transient) + 2 * layout.chunks * costs.waiting
    return np.asarray(np.floor((memory - fixed - inside) / (blocks / layout.chunks * kept)))


def _exposed(layout: Layout, costs: Costs) -> Floats:
    """[layout]: µs of exchanges before the first compute pass and after the last one, less what bounds already count. Stages
    of a rank end in turn, each after the last microbatches of a round have passed the next stage."""
    blocks = costs.blocks / layout.stages
    each = blocks * costs.exchange.block + costs.exchange.table / layout.chunks
    between = np.minimum(layout.pp, layout.count) * blocks * (costs.block.B + costs.block.W)
    waiting = (layout.chunks - 1) * np.maximum(0.0, each - between)
    return np.asarray(np.maximum(0.0, each - costs.exchange.least) + waiting + blocks * costs.exchange.before)


# --- Corrections from what searches found ---


ALIKE = 0.5  # factor on the weight of a found step for another layout, for each field in which both differ
ESTIMATE = 0.05  # weight of the estimate itself
PENDING = 0.02  # assumed log of a running search's step over its estimate, since others begin before it ends
FIELDS = tuple(name for name in Layout._fields if name not in ("count", "scattered"))  # these two follow from the others


@dataclass(frozen=True, eq=False)
class Promise:
    """Corrected estimates, a column each over the layouts of a space. estimate: µs of a step, infinite where the layout is
    excluded; weight, total: summed weights, and weighted sum, of the logarithms of found steps over their estimates."""

    layout: Layout
    estimate: Floats
    weight: Floats
    total: Floats

    @classmethod
    def of(cls, layout: Layout, estimate: Floats) -> Promise:
        """The estimates before any search."""
        return cls(layout, estimate, np.zeros(len(estimate)), np.zeros(len(estimate)))

    @property
    def step(self) -> Floats:
        """[layout]: the corrected estimate of its step, µs."""
        return np.asarray(self.estimate * np.exp(self.total / (ESTIMATE + self.weight)))

    def begun(self, row: int) -> None:
        """Note that a search of this layout has begun."""
        alike = self._alike(row)
        np.add(self.weight, alike, out=self.weight)
        np.add(self.total, PENDING * alike, out=self.total)

    def ended(self, row: int, step: float) -> None:
        """Note that the search found a step of `step` µs. It is ignored where a bound has excluded the layout meanwhile."""
        if np.isinf(self.estimate[row]):
            return
        more = np.log(step / self.estimate[row]) - PENDING
        np.add(self.total, more * self._alike(row), out=self.total)

    def _alike(self, row: int) -> Floats:
        """[layout]: the weight that a step found for this layout has for it."""
        differ = sum(column != column[row] for column in (getattr(self.layout, name) for name in FIELDS))
        return np.asarray(ALIKE**differ)
