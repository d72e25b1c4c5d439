"""`AXES`: the features that plans choose from. Each is a field of `Layout`, with its values and what they make of a step.

What it costs is in its file in `costs`. Bounds read general columns (`costs.columns`) and know no axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..features.cuts import SEQUENCE
from ..profile.profile import Profile
from ..tables import Bools
from .cluster import Cluster
from .costs.layer_formulas import WEIGHT_BYTES
from .costs.offload import host_link
from .costs.sharding import group_link, replicas_of, shards_of
from .costs.vocabulary_shards import vocabulary_costs
from .layout import OFFLOADS, SHARDED, WHOLE, ZERO_STAGES, Layout
from .profiled_model import Model
from .shape import Shape

SLICES = (2, 4, 8, 16)  # numbers of even parts of a sequence, beside 1


class Axis(NamedTuple):
    """One field of layouts.

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


def _with_shards(profile: Profile, model: Model, layout: Layout, cluster: Cluster) -> Profile:
    return replace(profile, vocabulary=vocabulary_costs(model, layout, cluster)) if layout.vocabulary else profile


def _in_slices(profile: Profile, model: Model, layout: Layout, cluster: Cluster) -> Profile:
    return replace(profile, facts={**profile.facts, SEQUENCE: model.sequence}) if layout.slices > 1 else profile


def _with_host(profile: Profile, model: Model, layout: Layout, cluster: Cluster) -> Profile:
    return replace(profile, host=host_link(cluster)) if layout.offload else profile


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
        _with_shards,
    ),
    Axis(
        "slices",
        lambda model, cluster: (1, *(n for n in SLICES if model.sequence % n == 0)) if isinstance(model, Shape) else (1,),
        lambda table: (table.pp > 1) & (table.size == 1) & ~table.gathers_by_stage,
        lambda layout: {"slices": int(layout.slices)},
        _in_slices,
    ),
    Axis(
        "offload",
        lambda model, cluster: range(len(OFFLOADS)) if cluster.copies else (0,),
        lambda table: (table.pp > 1) & (table.slices == 1),
        lambda layout: {"offload": OFFLOADS[int(layout.offload)]},
        _with_host,
    ),
)
