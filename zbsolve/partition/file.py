"""Partitions as files: what `zbsolve partition -o` writes and `zbsolve solve --partition` reads."""

from __future__ import annotations

import os
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
    """What `--partition` says: "auto" or a name (see `by_name`), layers a stage such as `5,5,6,4`, or a partition's file.
    Raises BadInput."""
    if text in ("auto", *SEARCHED):
        return text
    if text.endswith(".json") or text == "-":
        return Partition.load(text)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise BadInput(
            f"partition '{text}': not auto, equal, balanced, F+B, alpa, memory, layers such as 5,5,6,4, or a .json file"
        )
    return tuple(map(int, parts))


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
