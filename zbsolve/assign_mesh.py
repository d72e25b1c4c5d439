"""Stages on several devices each: Alpa's submeshes (arXiv 2201.12023, §5.2) for a profile of one device.

How long a layer takes on d devices is data: an efficiency for each d. Without it the split is ideal but for its messages,
as a transformer block's under tensor parallelism (arXiv 1909.08053, §3): F, B (and recompute) each wait for two ring
all-reduces of the layer's output, or of its input where that is smaller. Memory is divided by d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any

import numpy as np

from .assign import Job, Split, streams
from .errors import BadInput
from .layer import Layer
from .partition import Floats, equal, spans
from .partition_alpa import alpa, submeshes
from .profile import Profile

Scaling = Mapping[int, float]  # devices → parallel efficiency, 1: ideal


def on_devices(profile: Profile, devices: int, scaling: Scaling | None = None) -> tuple[Layer, ...]:
    """The layers' costs on a submesh of so many devices; bytes are those of one device. Raises BadInput where `scaling`
    does not tell how efficient that is."""
    if devices == 1:
        return profile.layers
    efficiency, link = 1.0, profile.link
    if scaling is not None:
        if devices not in scaling:
            raise BadInput(f"scaling: no efficiency is given for {devices} devices")
        efficiency = scaling[devices]
    found = []
    for i, layer in enumerate(profile.layers):
        size = min(layer.output_bytes, profile.layers[max(0, i - 1)].output_bytes)
        ring = 2 * (devices - 1) * (link.latency + size / devices / link.bytes_per_us)
        changed: dict[str, Any] = {}
        for one in fields(layer):
            value = getattr(layer, one.name)
            if isinstance(value, float | int) and one.name != "output_bytes":
                wait = 2 * ring if scaling is None and value and one.name in ("F", "B", "BW", "X") else 0.0
                whole = one.name.startswith(("held", "parameter", "transient", "output", "input"))
                changed[one.name] = ceil(value / devices) if whole else value / devices / efficiency + wait
        found.append(replace(layer, **changed))
    return tuple(found)


def spread(profile: Profile, counts: Sequence[int], devices: Sequence[int], scaling: Scaling | None = None) -> Profile:
    """The profile as if each stage's submesh were one rank, for `Profile.problem` with as many ranks as stages. How
    layers scale was not measured, so its source then begins with "estimated: ". Raises BadInput."""
    if max(devices) == 1:
        return profile
    if profile.rank_factors:
        raise BadInput("submeshes: a profile of unlike ranks (field 'rank_factors') is not spread over submeshes")
    layers: list[Layer] = []
    for count, size in zip(counts, devices, strict=True):
        layers += on_devices(profile, size, scaling)[len(layers) : len(layers) + count]
    base = "estimated: measured" if profile.source == "measured" else profile.source
    cuts = np.cumsum([0, *counts]).tolist()
    tied = tuple(
        (shared // size, here)
        for shared, group in profile.tied
        for size, a, b in zip(devices, cuts, cuts[1:], strict=False)
        if len(here := tuple(i for i in group if a <= i < b)) > 1
    )
    return replace(profile, source=f"{base}, spread over submeshes", layers=tuple(layers), tied=tied)


def mesh_splits(job: Job, per_node: int, scaling: Scaling | None = None) -> tuple[Split, Split]:
    """The best equal split (as many devices for every stage, as many layers; the number of stages with the least estimate)
    and Alpa's, on all ranks of `job` as devices of nodes of `per_node`. Raises BadInput, Infeasible."""
    profile, devices = job.profile, len(job.routes[0])
    if per_node < 1 or devices % per_node:
        raise BadInput(f"submeshes: {devices} devices are not whole nodes of {per_node}")
    if not job.single or profile.rank_factors:
        raise BadInput("submeshes: every stage has devices of its own, alike: placement single, no 'rank_factors'")
    sizes = [n for n in submeshes(devices // per_node, per_node) if scaling is None or n == 1 or n in scaling]
    costs = {size: _costs(job, size, scaling) for size in sizes}
    layers, most = len(profile.layers), min(len(profile.layers), devices)

    def cost(s: int) -> Floats:
        return np.stack([_within(one, job, s) for one in costs.values()])

    def beyond(s: int) -> Floats:
        return np.stack([job.messages()[:, None] + streams(one.times, one.sent)[1] for one in costs.values()])

    numbers = range(1, most + 1)
    found = alpa(cost, layers, numbers, job.microbatches, beyond=beyond, sizes=sizes, devices=devices)
    best = _split(job, costs, "alpa", *zip(*found.stages, strict=True))
    kinds = [(c.parameter_bytes, c.output_bytes) for c in profile.layers]
    alike = [(equal(kinds, devices // n), (n,) * (devices // n)) for n in sizes if devices % n == 0 and devices // n <= most]
    if not alike:
        raise BadInput("submeshes: no equal split exists to compare with")
    plain = [_split(job, costs, "equal", *one) for one in alike]
    fits = [one for one in plain if job.limit is None or max(one.need) <= job.limit]
    return min(fits or plain, key=lambda one: one.estimate), best


@dataclass(frozen=True)
class _Costs:
    """Times and all-to-alls (µs) and bytes (beside activations; a microbatch) of every group of layers on one size of
    submesh."""

    times: Floats
    sent: Floats
    fixed: Floats
    kept: Floats


def _costs(job: Job, size: int, scaling: Scaling | None) -> _Costs:
    tied = tuple((shared // size, group) for shared, group in job.profile.tied)
    there = replace(job, profile=replace(job.profile, layers=on_devices(job.profile, size, scaling), tied=tied))
    return _Costs(spans(there.times), spans(there.all_to_alls), there.beside(), there.kept())


def _within(one: _Costs, job: Job, s: int) -> Floats:
    """Times where parameters and min(m, s) microbatches fit, s stages being left."""
    busier = streams(one.times, one.sent)[0]
    if job.limit is None:
        return busier
    return np.where(one.fixed + min(job.microbatches, s) * one.kept <= job.limit, busier, np.inf)


def _split(job: Job, costs: Mapping[int, _Costs], name: str, counts: Sequence[int], devices: Sequence[int]) -> Split:
    cuts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    stages = list(zip(devices, cuts, cuts[1:], strict=False))
    times, beside = ([float(getattr(costs[d], what)[a, b]) for d, a, b in stages] for what in ("times", "sent"))
    need = [
        ceil(costs[d].fixed[a, b] + min(job.microbatches, len(counts) - s) * costs[d].kept[a, b])
        for s, (d, a, b) in enumerate(stages)
    ]
    sent = float(sum(job.messages()[a] for a in cuts[1:-1])) / 1e3
    estimate = sum(times) + sum(beside) + sent + (job.microbatches - 1) * max(*times, *beside)
    return Split(name, tuple(counts), tuple(times), tuple(beside), tuple(need), estimate, tuple(devices))


def places(devices: Sequence[int], per_node: int) -> tuple[str, ...]:
    """Where each stage's submesh lies, such as `node 0, devices 4-7`: whole nodes first, then the larger ones first, which
    leaves no holes (arXiv 2201.12023, appendix A)."""
    found, at = [""] * len(devices), 0
    for stage in sorted(range(len(devices)), key=lambda i: -devices[i]):
        node, first = divmod(at, per_node)
        size = devices[stage]
        if size > per_node:
            found[stage] = f"nodes {node}-{node + size // per_node - 1}"
        elif size == 1:
            found[stage] = f"node {node}, device {first}"
        else:
            found[stage] = f"node {node}, devices {first}-{first + size - 1}"
        at += size
    return tuple(found)
