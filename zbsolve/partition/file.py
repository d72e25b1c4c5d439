"""Partition files, which `Partition.save` writes and `zbsolve solve --partition` reads; and partitions whose stages each
have several devices, Alpa's submeshes (arXiv 2201.12023, §5.2), from the layers' costs on one device.

The time of a layer on d devices comes from an efficiency for each d. Where none is given, its work is divided by d and
messages are added, as in a transformer block under tensor parallelism (arXiv 1909.08053, §3): F, B (and recompute) each
wait for two ring all-reduces of the layer's output, or of its input where that is smaller. Memory is divided by d.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import ceil
from typing import Annotated, Any

import msgspec
import numpy as np

from ..problem.placement import describe, parse_routes
from ..util.errors import BadInput
from ..util.files import read_document, write_document
from .by_name import SEARCHED, Partitioned
from .cuts import Floats, alpa, equal, spans, submeshes
from .layer import Layer, Link, layer_cuts, layer_ranges
from .stage_costs import StageCosts


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition in a file. model, placement: what it is for; layers, devices: of each stage; scaling: devices → efficiency
    of the layers on them, None: the default of `on_devices`; where: its file, for messages."""

    model: str
    placement: str
    layers: tuple[int, ...]
    devices: tuple[int, ...]
    scaling: Mapping[int, float] | None = None
    where: str = field(default="partition", compare=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a partition file: either all of it is written or nothing. `-` is standard output."""
        scaling = None if self.scaling is None else {str(d): e for d, e in self.scaling.items()}
        body = {"model": self.model, "placement": self.placement, "scaling": scaling}
        write_document(path, "partition", {**body, "layers": list(self.layers), "devices": list(self.devices)})

    def check(self, layers: int, routes: Sequence[Sequence[int]], ranks: int) -> None:
        """Raise BadInput where the partition is not for this number of layers, or not for these routes."""
        if sum(self.layers) != layers:
            raise BadInput(f"{self.where}: field 'layers' adds up to {sum(self.layers)}; the profile has {layers}")
        if parse_routes(self.placement, ranks) != tuple(map(tuple, routes)):
            asked = "/".join(map(describe, routes))
            raise BadInput(f"{self.where}: it is for placement '{self.placement}', not '{asked}'")
        if len(self.layers) != len(routes[0]):
            raise BadInput(f"{self.where}: it has {len(self.layers)} stages, not {len(routes[0])} (a submesh is one rank)")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Partition:
        """Read a partition file; `-` is standard input. Raises BadInput naming the field."""
        form, where = read_document(path, "partition", PartitionForm), str(path)
        if len(form.devices) != len(form.layers):
            raise BadInput(f"{where}: field 'devices' must list as many numbers as field 'layers', one a stage")
        scaling = None if form.scaling is None else check_scaling(form.scaling, f"{where}: field 'scaling'")
        return cls(form.model, form.placement, tuple(form.layers), tuple(form.devices), scaling, where)


Counts = Annotated[list[Annotated[int, msgspec.Meta(gt=0)]], msgspec.Meta(min_length=1)]


class PartitionForm(msgspec.Struct, forbid_unknown_fields=True):
    """A partition in a file."""

    model: str
    placement: str
    layers: Counts
    devices: Counts
    scaling: dict[str, Any] | None = None


def parse_partition(text: str) -> str | tuple[int, ...] | Partition:
    """The value of `--partition`: "auto", a name (`by_name`), layers of stages (`counts_in`), or a file. Raises BadInput."""
    if text in ("auto", *SEARCHED):
        return text
    if text.endswith(".json") or text == "-":
        return Partition.load(text)
    counts = counts_in(text)
    if counts is None:
        raise BadInput(
            f"partition '{text[:80]}': not auto, equal, balanced, F+B, alpa, memory, layers such as 5,5,6,4 or 5 4×6 5, "
            "Megatron's layout such as Et*3|(t*4|)*6L, or a .json file"
        )
    return counts


def counts_in(text: str) -> tuple[int, ...] | None:
    """Layers of each stage, from `5,5,6,4`; from `5 4×6 5`, as tables print it; or from Megatron's layout, where each letter
    of E t m L is a layer and | ends a stage: `Et*3|(t*4|)*6L`. Commas are ignored there; where there is no |, commas end
    stages: `E,t*10,m*3,L*4`. None: the text is none of these."""
    runs = [re.fullmatch(r"(\d{1,6})(?:[×x](\d{1,4}))?", part) for part in re.split(r"\s*,\s*|\s+", text.strip())]
    if all(runs):
        return tuple(int(run[1]) for run in runs if run for _ in range(int(run[2] or 1)))
    layout = "".join(text.split()).replace(",", "" if "|" in text else "|")
    layout = re.sub(r"\(([^()]+)\)\*(\d{1,4})", lambda group: group[1] * int(group[2]), layout)
    if not re.fullmatch(r"([EtmL](\*\d{1,4})?\|?)+", layout):
        return None
    stages = (re.findall(r"[EtmL](?:\*(\d+))?", stage) for stage in layout.split("|"))
    return tuple(sum(int(times or 1) for times in stage) for stage in stages)


def check_scaling(pairs: Mapping[str, object], where: str) -> dict[int, float]:
    """Devices → efficiency from text and numbers. Raises BadInput for an efficiency outside 0 … 1, or no devices."""
    shares = {}
    for devices, efficiency in pairs.items():
        try:
            count, share = int(devices), float(efficiency)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise BadInput(f"{where}: '{devices}: {efficiency}' is not devices and an efficiency, such as 4: 0.9") from None
        if count < 1 or not 0 < share <= 1:
            raise BadInput(f"{where}: {efficiency} for {devices} devices: an efficiency is above 0 and at most 1")
        shares[count] = share
    return shares


# --- Stages on several devices each ---

Scaling = Mapping[int, float]  # devices → parallel efficiency, 1: ideal
WAITING = ("F", "B", "BW", "X")  # passes with all-reduces inside under tensor parallelism


def on_devices(layers: Sequence[Layer], link: Link, devices: int, scaling: Scaling | None = None) -> tuple[Layer, ...]:
    """The layers' costs on a submesh: times of the submesh, bytes of one of its devices. layers, link: as of one device.
    scaling: devices → efficiency, or None. Raises BadInput where `scaling` lacks this number of devices."""
    if devices == 1:
        return tuple(layers)
    if scaling is not None and devices not in scaling:
        raise BadInput(f"scaling: no efficiency is given for {devices} devices")
    efficiency = 1.0 if scaling is None else scaling[devices]
    scaled = []
    for i, layer in enumerate(layers):
        size = min(layer.output_bytes, layers[max(0, i - 1)].output_bytes)
        ring = 2 * (devices - 1) * (link.latency + size / devices / link.bytes_per_us)
        changed: dict[str, Any] = {}
        for cost in fields(layer):
            value = getattr(layer, cost.name)
            if isinstance(value, float | int) and cost.name not in ("output_bytes", "message", "begins"):
                wait = 2 * ring if scaling is None and value and cost.name in WAITING else 0.0
                sized = cost.name.startswith(("held", "parameter", "frozen", "buffer", "transient", "output", "input", "kv"))
                changed[cost.name] = ceil(value / devices) if sized else value / devices / efficiency + wait
        scaled.append(replace(layer, **changed))
    return tuple(scaled)


def mesh_partitions(costs: StageCosts, per_node: int, scaling: Scaling | None = None) -> tuple[Partitioned, Partitioned]:
    """The best equal partition and Alpa's, on all ranks of `costs`, which are devices of nodes of `per_node`. The equal one
    has as many devices and layers on each stage; of those that fit, the least estimate. Raises BadInput, Infeasible."""
    devices = costs.stages
    if per_node < 1 or devices % per_node:
        raise BadInput(f"submeshes: {devices} devices are not whole nodes of {per_node}")
    if not costs.single or costs.rank_factors:
        raise BadInput("submeshes: every stage has devices of its own, alike: placement single, no 'rank_factors'")
    if len(set(costs.limit or ())) > 1:
        raise BadInput("memory: submeshes have devices alike: give one number")
    sizes = [n for n in submeshes(devices // per_node, per_node) if scaling is None or n == 1 or n in scaling]
    tied = {size: tuple((shared // size, group) for shared, group in costs.tied) for size in sizes}
    layers = {size: on_devices(costs.layers, costs.link, size, scaling) for size in sizes}
    each = {size: replace(costs, layers=layers[size], tied=tied[size]) for size in sizes}
    most = min(len(costs.layers), devices)

    def cost(s: int) -> Floats:
        """ns of each group of layers where parameters and min(m, s) microbatches fit, s stages being left."""
        flight, room = min(costs.microbatches, s), costs.room(0)
        return np.stack([np.where(c.fixed_bytes + flight * c.kept <= room, c.steps()[0], np.inf) for c in each.values()])

    def beyond(s: int) -> Floats:
        return np.stack([costs.messages[:, None] + c.steps()[1] for c in each.values()])

    numbers = range(1, most + 1)
    optimum = alpa(cost, len(costs.layers), numbers, costs.microbatches, beyond=beyond, sizes=sizes, devices=devices)
    best = _partitioned(costs, each, "alpa", *zip(*optimum.stages, strict=True))
    kinds = [(c.parameter_bytes, c.output_bytes) for c in costs.layers]
    alike = [(equal(kinds, devices // n), (n,) * (devices // n)) for n in sizes if devices % n == 0 and devices // n <= most]
    if not alike:
        raise BadInput("submeshes: no equal split exists to compare with")
    plain = [_partitioned(costs, each, "equal", *split) for split in alike]
    fits = [partitioned for partitioned in plain if max(partitioned.need) <= costs.room(0)]
    return min(fits or plain, key=lambda partitioned: partitioned.estimate), best


def _partitioned(
    costs: StageCosts, each: Mapping[int, StageCosts], name: str, counts: Sequence[int], devices: Sequence[int]
) -> Partitioned:
    cuts = layer_cuts(counts)
    stages = list(zip(devices, pairwise(cuts), strict=True))
    times = [float(spans(each[d].times)[ends]) for d, ends in stages]
    sent = [float(spans(each[d].all_to_alls)[ends]) for d, ends in stages]
    need = [
        ceil(each[d].fixed_bytes[ends] + min(costs.microbatches, len(counts) - s) * each[d].kept[ends])
        for s, (d, ends) in enumerate(stages)
    ]
    messages = float(sum(costs.messages[a] for a in cuts[1:-1])) / 1e3
    estimate = sum(times) + sum(sent) + messages + (costs.microbatches - 1) * max(*times, *sent)
    return Partitioned(name, tuple(counts), tuple(times), tuple(sent), tuple(need), estimate, tuple(devices))


SPREAD = "spread over submeshes"  # in the source of such a profile, and of its problems


def spread_over(profile: Any, counts: Sequence[int], devices: Sequence[int], scaling: Scaling | None = None) -> Any:
    """The profile for `Profile.problem` where each rank is the submesh of one stage, with `devices[stage]` devices and
    `counts[stage]` layers. Where it has more than one device its times are estimates, so the source begins with "estimated".
    Raises BadInput."""
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
