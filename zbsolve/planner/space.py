"""All legal layouts of a model on a number of devices; `Only`, which of them a plan considers; and `AXES`, the features that
it chooses from: each is a field of `Layout`, with its values and what they make of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from ..features.cuts import SEQUENCE
from ..problem.tables import Bools
from ..profile.profile import Profile
from ..util.errors import BadInput
from ..util.text import did_you_mean
from .cluster import Cluster
from .costs.layer_formulas import WEIGHT_BYTES
from .costs.offload import host_link
from .costs.sharding import group_link, replicas_of, shards_of
from .costs.vocabulary_shards import vocabulary_costs
from .engines import Target, engine
from .layout import BESIDE, LOOP, NAMES, OFFLOADS, SHARDED, SINGLE, VEE, WHOLE, ZERO_STAGES, Layout, named, table_of
from .profiled_model import Model
from .shape import Shape

NUMBERS = ("dp", "tp", "pp", "chunks", "size", "zero", *(name for name in BESIDE if name not in NAMES))
FIXABLE = (*NUMBERS, *NAMES)


class Only(NamedTuple):
    """A limit on the space. engine: a name in `engines.PLANNED`; "": any. fixed: (field of layouts, its value) pairs."""

    engine: str = ""
    fixed: tuple[tuple[str, int], ...] = ()

    @property
    def target(self) -> Target | None:
        """The engine; None: any. Raises BadInput."""
        return engine(self.engine) if self.engine else None

    @property
    def title(self) -> str:
        """`for megatron, tp 8, pp 8`; "" for all layouts."""
        return ", ".join([*([f"for {self.engine}"] if self.engine else []), *self._said])

    @property
    def _said(self) -> list[str]:
        return [f"{name} {named(name, value)}" for name, value in self.fixed]

    @property
    def plain(self) -> Only:
        """The plain layouts among these, with one stage on each rank: the defaults of all fields that are not fixed."""
        plain = {name: getattr(Layout(), name) for name in ("placement", *BESIDE)}
        return self._replace(fixed=tuple({**plain, **dict(self.fixed)}.items()))

    @property
    def takes_no_order(self) -> bool:
        """Whether the engine runs its own orders only."""
        return self.target is not None and bool(self.target.orders)

    def of(self, table: Layout) -> Layout:
        """The layouts of a table that fit this limit. Raises BadInput where there is none."""
        keep = np.ones(len(table.dp), bool) if self.target is None else self.target.runs(table)
        for name, value in self.fixed:
            column = getattr(table, name)[keep]
            keep = keep & (getattr(table, name) == value)
            if not keep.any():
                others = ", ".join(named(name, there) for there in np.unique(column).tolist()) or "none"
                all_of = f" (dp × tp × pp is {int(table.devices[0])} devices)" if name in NUMBERS[:3] else ""
                own = f"no layout{' for ' * bool(self.engine)}{self.engine} has {', '.join(self._said)}"
                raise BadInput(f"{own}: with all before {name} there are {others}{all_of}")
        if not keep.any():
            raise BadInput(f"{self.engine} can run no layout of this space")
        return table.rows(keep)


ALL = Only()


def parse_only(engine_name: str | None, fixed: str | None) -> Only:
    """The limit from an engine's name and text like `tp=8,pp=8,placement=vee`. Raises BadInput naming the wrong part."""
    if engine_name:
        engine(engine_name)
    only = Only(engine_name or "", tuple(map(_field, fixed.split(","))) if fixed is not None else ())
    names = [name for name, _ in only.fixed]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"--fix '{name}': it is there twice")
    return only


def _field(part: str) -> tuple[str, int]:
    name, _, text = (word.strip() for word in part.partition("="))
    if name not in FIXABLE:
        raise BadInput(f"--fix '{part[:40]}': '{name[:20]}' is no field{did_you_mean(name, FIXABLE)} ({', '.join(FIXABLE)})")
    if name in NAMES and text in NAMES[name]:
        return name, NAMES[name].index(text)
    if name in NAMES or not text.isdecimal() or len(text) > 9:
        able = f"one of {', '.join(NAMES[name])}" if name in NAMES else "a number"
        raise BadInput(f"--fix '{part[:40]}': {name} is {able}")
    return name, int(text)


# --- Axes: the features that plans choose from ---


SLICES = (2, 4, 8, 16)  # numbers of even parts of a sequence, beside 1


class Axis(NamedTuple):
    """One field of layouts. What it costs is in its file in `costs`; bounds read general columns and know no axis.

    field: its name. values: (model, cluster) → the values that a space has, the default first. able: a table → which layouts
    may have other values than the default. step: a layout → fields of its `Step`. profile: (the profile of a layout's
    layers, model, layout, cluster) → that profile with what the layout's value needs. Raises BadInput.
    """

    field: str
    values: Callable[[Model, Cluster], Sequence[int]]
    able: Callable[[Layout], Bools]
    step: Callable[[Layout], Mapping[str, Any]]
    profile: Callable[[Profile, Model, Layout, Cluster], Profile]


def _of_replicas(profile: Profile, model: Model, layout: Layout, cluster: Cluster) -> Profile:
    """`shard_link` gives the times of C, or of AG and RS; then stages hold whole states, which the step shards."""
    profile = replace(profile, shard_link=group_link(layout, cluster))
    if shards_of(layout) == 1:
        return profile
    return replace(profile, states=sum(model.state_parts) / WEIGHT_BYTES, gradients=model.state_parts[1] / WEIGHT_BYTES)


# In the order in which the table of a space repeats its rows. On one pipeline rank microbatches run one after the other, so
# the last three would change nothing there. ZeRO 2 with a pipeline, whose stages gather parameters, excludes two of them.
AXES = (
    Axis(
        "zero",
        lambda model, cluster: range(ZERO_STAGES),
        lambda table: np.asarray(table.dp) > 1,
        lambda layout: {"replicas": replicas_of(layout), "shards": shards_of(layout)},
        _of_replicas,
    ),
    Axis(
        "vocabulary",
        lambda model, cluster: (WHOLE, SHARDED) if isinstance(model, Shape) else (WHOLE,),  # else no plan knows its costs
        lambda table: (table.pp > 1) & ~table.gathers_by_stage,
        lambda layout: {"vocabulary": "sharded" if layout.vocabulary else None},
        lambda profile, *of: replace(profile, vocabulary=vocabulary_costs(*of)) if of[1].vocabulary else profile,
    ),
    Axis(
        "slices",
        lambda model, cluster: (1, *(n for n in SLICES if model.sequence % n == 0)) if isinstance(model, Shape) else (1,),
        lambda table: (table.pp > 1) & (table.size == 1) & ~table.gathers_by_stage,
        lambda layout: {"slices": int(layout.slices)},
        lambda profile, model, layout, _: (
            replace(profile, facts={**profile.facts, SEQUENCE: model.sequence}) if layout.slices > 1 else profile
        ),
    ),
    Axis(
        "offload",
        lambda model, cluster: range(len(OFFLOADS)) if cluster.copies else (0,),
        lambda table: (table.pp > 1) & (table.slices == 1),
        lambda layout: {"offload": OFFLOADS[int(layout.offload)]},
        lambda profile, _, layout, cluster: replace(profile, host=host_link(cluster)) if layout.offload else profile,
    ),
)


# --- All layouts ---


MAX_CHUNKS = 12  # most stages on a rank
MOST = 1 << 20  # most devices, and most sequences in a step
MAX_LAYERS = 1000


def layouts(model: Model, devices: int, batch: int, cluster: Cluster, only: Only = ALL) -> Layout:
    """A table of all layouts with a batch of `batch` sequences in a step, in a fixed order, limited by `only`.

    Tensor ranks divide the heads and the devices of a node, so their groups stay inside a node. Pipeline ranks divide the
    rest. Stages are no more than layers (embedding and head count as one each), with one on each rank, in loops of up to
    `MAX_CHUNKS` on each rank, or in a V. Sizes of microbatches divide a replica's batch. A profiled model has the tensor
    ranks and microbatch sizes of its profiles. All have each value of the fields in `AXES`. Raises BadInput without layouts.
    """
    if not (1 <= devices <= MOST and 1 <= batch <= MOST):
        raise BadInput(f"devices {devices}, batch {batch}: at least 1 of each is needed, and {MOST} at most")
    if model.layers > MAX_LAYERS:
        raise BadInput(f"model {model.name}: {model.layers} layers are more than a plan has ({MAX_LAYERS})")
    rows = list(_layouts(model, devices, batch, cluster))
    if not rows:
        raise BadInput(_no_split(model, devices, batch, cluster))
    table = table_of(rows)
    for axis in AXES:
        table = _with(table, axis.field, axis.values(model, cluster), axis.able(table))
    return only.of(table)


def _with(table: Layout, field: str, numbers: Sequence[int], able: Bools) -> Layout:
    """The table with each able layout repeated for every value of the field."""
    times = np.where(able, len(numbers), 1)
    rows = np.repeat(np.arange(len(times)), times)
    turn = np.arange(len(rows)) - (np.cumsum(times) - times)[rows]
    return table.rows(rows)._replace(**{field: np.array(numbers)[turn]})


def _no_split(model: Model, devices: int, batch: int, cluster: Cluster) -> str:
    """The reason why there is no layout, as an error says it."""
    replicas = sorted({dp for dp, _, _ in _splits(model, devices, cluster)})
    if not replicas or any(batch % dp == 0 for dp in replicas):
        return f"{devices} devices, batch {batch}: the model has {_known(model, cluster)}, which makes no layout"
    least = f"there are {replicas[0]} at least, since layers and heads use {devices // replicas[0]} devices at most"
    if batch < replicas[0]:
        return f"batch {batch}: fewer sequences than {devices} devices make replicas: {least}"
    return f"batch {batch}: no split of {devices} devices has a number of replicas that divides it: {least}"


def _layouts(model: Model, devices: int, batch: int, cluster: Cluster) -> Iterator[Layout]:
    for dp, tp, pp in _splits(model, devices, cluster):
        sizes = [per_rank for per_rank in model.sizes(tp) if batch % (dp * per_rank) == 0]
        for size in sizes:
            count = batch // dp // size
            for chunks, placement in _places(model, pp):
                for recompute in model.recomputes:
                    for sequence in model.sequence_parallel(tp):
                        yield Layout(dp, tp, pp, chunks, placement, size, count, recompute, sequence)


def _splits(model: Model, devices: int, cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    for tp in _divisors(cluster.node):
        if model.sizes(tp) and devices % tp == 0:
            for pp in _divisors(devices // tp):
                if pp <= model.stages:
                    yield devices // tp // pp, tp, pp


def _places(model: Model, pp: int) -> Iterator[tuple[int, int]]:
    yield 1, SINGLE
    if pp > 1:
        yield from ((chunks, LOOP) for chunks in range(2, min(MAX_CHUNKS, model.stages // pp) + 1))
        if 2 * pp <= model.stages:
            yield 2, VEE


def _known(model: Model, cluster: Cluster) -> str:
    """Tensor ranks inside a node, and sequences of a microbatch, that a model has costs for, as text."""
    rows = {tp: model.sizes(tp) for tp in _divisors(cluster.node)}
    return (
        "; ".join(f"tp {tp} with {row[0]} to {row[-1]} sequences a microbatch" for tp, row in rows.items() if row) or "none"
    )


def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return [*low, *(number // divisor for divisor in reversed(low) if divisor * divisor < number)]
