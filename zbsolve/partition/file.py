"""Partitions as files: `Partition.save` writes them, and `zbsolve solve --partition` reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from ..placement import describe, parse_routes
from ..util.errors import BadInput
from ..util.files import read_document, write_document
from .by_name import SEARCHED


@dataclass(frozen=True, slots=True)
class Partition:
    """Layers and devices of each stage, for which model and placement, and how layers were said to scale over devices
    (devices → efficiency; None: the default of `meshes.on_devices`). where: the file that it comes from, for messages."""

    model: str
    placement: str
    layers: tuple[int, ...]
    devices: tuple[int, ...]
    scaling: Mapping[int, float] | None = None
    where: str = field(default="partition", compare=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a partition file, whole or not at all; `-` is standard output."""
        scaling = None if self.scaling is None else {str(d): e for d, e in self.scaling.items()}
        body = {"model": self.model, "placement": self.placement, "scaling": scaling}
        write_document(path, "partition", {**body, "layers": list(self.layers), "devices": list(self.devices)})

    def check(self, layers: int, routes: Sequence[Sequence[int]], ranks: int) -> None:
        """Raise BadInput where it is not for so many layers on these routes."""
        if sum(self.layers) != layers:
            raise BadInput(f"{self.where}: field 'layers' adds up to {sum(self.layers)}; the profile has {layers}")
        if parse_routes(self.placement, ranks) != tuple(map(tuple, routes)):
            asked = "/".join(map(describe, routes))
            raise BadInput(f"{self.where}: it is for placement '{self.placement}', not '{asked}'")
        if len(self.layers) != len(routes[0]):
            raise BadInput(
                f"{self.where}: it has {len(self.layers)} stages, not {len(routes[0])} (on submeshes, each stage is a rank)"
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Partition:
        """Read a partition file; `-` is standard input. Raises BadInput naming the field."""
        form, where = read_document(path, "partition", PartitionForm), str(path)
        if len(form.devices) != len(form.layers):
            raise BadInput(f"{where}: field 'devices' must list as many numbers as field 'layers', one a stage")
        scaling = None if form.scaling is None else check_scaling(form.scaling, f"{where}: field 'scaling'")
        return cls(form.model, form.placement, tuple(form.layers), tuple(form.devices), scaling, where)


Counts = Annotated[list[Annotated[int, msgspec.Meta(gt=0)]], msgspec.Meta(min_length=1)]


class PartitionForm(msgspec.Struct):
    """A partition in a file."""

    model: str
    placement: str
    layers: Counts
    devices: Counts
    scaling: dict[str, Any] | None = None


def parse_partition(text: str) -> str | tuple[int, ...] | Partition:
    """What `--partition` says: "auto" or a name (see `by_name`), layers a stage (see `counts_in`), or a partition's file.
    Raises BadInput."""
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
    """Layers of each stage: `5,5,6,4`; `5 4×6 5` as tables print it; or Megatron's layout, where each of the letters E t m L
    is a layer and | ends a stage: `Et*3|(t*4|)*6L`. Commas say nothing there; where there is no |, they end stages:
    `E,t*10,m*3,L*4`. None: none of these."""
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
    found = {}
    for devices, efficiency in pairs.items():
        try:
            count, share = int(devices), float(efficiency)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise BadInput(f"{where}: '{devices}: {efficiency}' is not devices and an efficiency, such as 4: 0.9") from None
        if count < 1 or not 0 < share <= 1:
            raise BadInput(f"{where}: {efficiency} for {devices} devices: an efficiency is above 0 and at most 1")
        found[count] = share
    return found
