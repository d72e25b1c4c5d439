"""For each layout of a table: a lower bound on the step over all partitions and schedules, and the rule that gives it; and
which layout dominates it, for every partition and schedule. Bounds over partitions come from binary searches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...problem.tables import Ints
from ...util.kernels import kernel, subkernel
from ..cluster import Cluster
from ..costs.columns import Costs, Exchanges
from ..costs.layer_formulas import WEIGHT_BYTES, after_exchange, exchange_pass, update
from ..costs.rank_costs import fullest, model_costs, roles
from ..layout import BESIDE, Layout
from ..profiled_model import Model
from .bound_row import BoundRow, Rows, bound_rows, chain_bounds
from .chunk_kernels import possible_chunks
from .memory_kernels import fitting, spread, staying
from .split_kernels import MAX_SLACK, possible_split
from .stage_kernels import possible_single

NEVER = -1  # a bound that stands for no possible makespan: one microbatch does not fit
FIRST_STEP = 1 << 10  # the first step of a search is the makespan divided by this


@kernel
def least_makespans(rows: Rows) -> Ints:
    """[layout]: a lower bound, µs, on every schedule of every partition; `NEVER` where none fits.

    The test of how ranks split blocks over their stages takes longest, so it only runs where all other tests pass.

    rows: of `bound_rows`, shape (layouts,).
    """
    bounds = np.zeros(len(rows), np.int64)
    scratch = np.zeros(scratch_size(rows), np.int64)
    for i in range(len(rows)):
        row = rows[i]
        most = row.serial
        if not possible(row, most, scratch):
            bounds[i] = NEVER
            continue
        least = least_between(row, row.chain - 1, most, False, scratch)
        if least < most and not possible(row, least, scratch):
            step = 1 + least // FIRST_STEP
            while least + step < most and not possible(row, least + step, scratch):
                step, least = 2 * step, least + step
            least = least_between(row, least, min(most, least + step), True, scratch)
        bounds[i] = least
    return bounds


@subkernel
def least_between(row: BoundRow, low: int, high: int, all_rules: bool, scratch: Ints) -> int:
    """The least possible makespan above `low`, µs, where `high` is possible. all_rules: whether to test splits too."""
    while high - low > 1:
        middle = (low + high) // 2
        if possible(row, middle, scratch) if all_rules else possible_ranks(row, middle, scratch):
            high = middle
        else:
            low = middle
    return high


@subkernel
def scratch_size(rows: Rows) -> int:
    """The size of the scratch array that `possible` needs for any of the rows."""
    return 1 + int(rows["ranks"].max()) + 2 * (MAX_SLACK + 1) * (int(rows["blocks"].max()) + 1)


@subkernel
def possible(row: BoundRow, x: int, scratch: Ints) -> bool:
    """Whether no condition forbids a makespan of x µs. scratch: `scratch_size` whole numbers that are overwritten."""
    return possible_ranks(row, x, scratch) and (row.single == 1 or possible_split(row, x, scratch))


@subkernel
def possible_ranks(row: BoundRow, x: int, scratch: Ints) -> bool:
    """`possible` without the test of how each rank's blocks are split over its stages."""
    last_B = x - row.exchange.last
    if last_B < row.chain + (spread(row, float(staying(row, last_B)), fitting(row), 0) if row.parts == 1 else 0.0):
        return False
    return possible_single(row, x) if row.single else possible_chunks(row, x, scratch)


@kernel
def refuted(rows: Rows, bounds: Ints) -> NDArray[np.bool_]:
    """[layout]: whether no makespan below its bound is possible; for a negative bound, whether none is possible at all.

    All passes one after the other take `serial` µs, so a larger bound only holds where nothing fits. `serial` is tested in
    its place, since sums of larger numbers may overflow.

    rows: of `bound_rows`, shape (layouts,).
    bounds: µs, shape (layouts,).
    """
    impossible = np.zeros(len(rows), np.bool_)
    scratch = np.zeros(scratch_size(rows), np.int64)
    for i in range(len(rows)):
        most = rows[i].serial
        x = most if bounds[i] < 0 or bounds[i] > most else bounds[i] - 1
        impossible[i] = not possible(rows[i], x, scratch)
    return impossible


MEMORY, WORK, CHAIN, FILL, NO_ROOM, COPIES, EXCHANGE = RULES = (
    "memory over time",
    "work of the fullest rank",
    "one microbatch's chain",
    "fill and drain beside work",
    "no room for one microbatch",
    "copies to host memory",
    "work of a rank and exchange of its gradients",
)


def pipeline_bounds(costs: Costs, layout: Layout, capacity: int | None) -> tuple[Ints, Ints]:
    """[layout], twice: a lower bound, µs, on its pipeline with the exchange of gradients, and the index of the rule that
    gives it. Every rule adds the least exchange."""
    exchange = costs.exchange
    whole: Ints = least_makespans(bound_rows(costs, layout, capacity))
    costs = costs._replace(exchange=Exchanges(*(0 * column for column in exchange)))
    plain: Ints = least_makespans(bound_rows(costs, layout, capacity)) if exchange.most.any() else whole
    free: Ints = least_makespans(bound_rows(costs, layout, None))
    work, chain = work_bounds(costs, layout), chain_bounds(costs, layout)
    binds = {
        NO_ROOM: whole == NEVER,
        MEMORY: plain > free,
        EXCHANGE: whole > plain + exchange.least,
        WORK: plain <= work,
        COPIES: plain > _without_copies(costs, layout, free),
        CHAIN: plain <= chain,
    }
    return whole, np.select([*binds.values()], [RULES.index(bind) for bind in binds], RULES.index(FILL))


def _without_copies(costs: Costs, layout: Layout, free: Ints) -> Ints:
    """[layout]: bounds without memory limits where copies take no time. free: the same where they do."""
    some = np.flatnonzero(~costs.stays)
    if not len(some):
        return free
    none = costs._replace(copies=costs.copies._replace(out=0 * free, back=0 * free, chain=0 * free))
    bounds = free.copy()
    bounds[some] = least_makespans(bound_rows(none, layout, None)[some])
    return bounds


def work_bounds(costs: Costs, layout: Layout) -> Ints:
    """[layout]: a lower bound, µs, on the work of the busiest rank, over all partitions into whole blocks."""
    on = roles(layout)
    fixed = on.embedding * costs.embedding.work + on.head * costs.head.work + on.sends * costs.sent
    fixed = fixed + costs.common.S + costs.common.T
    return np.asarray(layout.count * fullest(costs.blocks, costs.block.work, fixed, on.number))


def least_behind(model: Model, layout: Layout, cluster: Cluster) -> NDArray[np.float64]:
    """[layout]: a lower bound, µs, on the time after the pipeline, from the least parameters of the fullest rank."""
    costs, on = model_costs(model, layout, cluster), roles(layout)
    table, block = np.minimum(costs.first.parameter_bytes, costs.last.parameter_bytes), costs.block.parameter_bytes
    again = (on.embedding & on.head) * (np.asarray(costs.shared) > 0)
    fixed = (on.embedding + on.head - again) * np.asarray(table, np.int64)
    fixed = np.where(costs.on_stages, fixed, np.asarray(costs.common_bytes, np.int64))
    least = fullest(model.layers, np.maximum(1, np.asarray(block, np.int64)), fixed, on.number) / WEIGHT_BYTES
    return np.asarray(after_exchange(least, layout, cluster, model.update_us))


# --- Dominance: no time and no size of another layout is larger ---


# Layouts that agree in these fields have the same passes.
GROUP = ("dp", "tp", "pp", "chunks", "placement", "size", *BESIDE)


def dominators(model: Model, layout: Layout, cluster: Cluster, costs: Costs) -> Ints:
    """[layout]: the index of an undominated layout that dominates it; −1 where there is none.

    Both have the same passes and edges, except that the dominating one may have no exchange. None of its passes, messages,
    exchanges and updates takes longer, and no bytes kept, taken or waiting are more. So each partition and schedule of the
    other is also one of it, as short and in as little memory. Of equal layouts the first stays. Parts have rounded shares,
    which may be larger for a smaller whole, so layouts in parts are only compared where their layers are equal.
    """
    sizes = np.broadcast_arrays(*_sizes(model, layout, cluster, costs))
    columns = np.stack([np.asarray(size, np.float64) for size in sizes], axis=1)
    dominator = np.full(len(columns), -1)
    for rows in _groups(layout):
        sizes_here = columns[rows]
        below = np.all(sizes_here[:, None] <= sizes_here[None, :], axis=2)  # [i, j]: i is nowhere larger than j
        equal_before = below & below.T & (np.arange(len(rows))[:, None] < np.arange(len(rows))[None, :])
        beats = (below & ~below.T) | equal_before
        free = ~beats.any(axis=0)
        winner = (beats & free[:, None]).argmax(axis=0)
        dominator[rows] = np.where(free, -1, rows[winner])
    return dominator


def _sizes(model: Model, layout: Layout, cluster: Cluster, costs: Costs) -> tuple[NDArray[np.generic], ...]:
    """All numbers that a step's time and memory grow with. Exchanges and updates are proportional to a rank's parameters."""
    behind = exchange_pass(1.0, layout, cluster), update(1.0, layout, cluster, model.update_us)
    layers_of = model_costs(model, layout, cluster)
    rows = (layer._asdict().items() for layer in (layers_of.first, layers_of.block, layers_of.last))
    layers = [*(size for row in rows for name, size in row if name != "parts"), layers_of.rest_kept]  # `GROUP` has these
    several = layout.parts > 1
    sizes = (*layers, costs.sent, *behind, layers_of.states, costs.waiting, *costs.common)
    return (*sizes, *(-1 * several * layer for layer in layers))


def _groups(layout: Layout) -> list[Ints]:
    """Groups of a table's rows that agree in `GROUP` and `gathers_by_stage`."""
    columns = [*(getattr(layout, name) for name in GROUP), layout.gathers_by_stage]  # the latter adds passes AG and RS
    keys = np.stack([np.asarray(column) for column in columns], axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group.ravel()[order])) + 1)
