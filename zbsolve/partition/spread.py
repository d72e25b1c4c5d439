"""A profile of one device as if each stage's submesh of devices were one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..layer import Layer, layer_ranges
from ..util.errors import BadInput
from .meshes import Scaling, on_devices

SPREAD = "spread over submeshes"  # in the source of such a profile, and of its problems


def spread_over(profile: Any, counts: Sequence[int], devices: Sequence[int], scaling: Scaling | None = None) -> Any:
    """The profile for `Profile.problem` with as many ranks as stages: each a submesh of `devices[stage]` devices, with
    `counts[stage]` layers. How layers scale was not measured, so its source then begins with "estimated: ". Raises
    BadInput."""
    if max(devices) == 1:
        return profile
    if profile.rank_factors:
        raise BadInput("submeshes: a profile of unlike ranks (field 'rank_factors') is not spread over submeshes")
    layers: list[Layer] = []
    for here, size in zip(layer_ranges(counts), devices, strict=True):
        layers += on_devices(profile.layers, profile.link, size, scaling)[here.start : here.stop]
    tied = tuple(
        (shared // size, group_here)
        for shared, group in profile.tied
        for size, here in zip(devices, layer_ranges(counts), strict=True)
        if len(group_here := tuple(i for i in group if i in here)) > 1
    )
    base = profile.source if profile.source.startswith("estimated") else f"estimated: {profile.source}"
    return replace(profile, source=f"{base}, {SPREAD}", layers=tuple(layers), tied=tied, vocabulary=None)
