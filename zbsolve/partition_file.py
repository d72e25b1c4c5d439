"""Partitions as files: what `zbsolve partition -o` writes and `zbsolve solve --partition` reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import BadInput
from .files import field, read_document, write_document


@dataclass(frozen=True, slots=True)
class Partition:
    """Layers and devices of each stage, for which model and placement, and how layers were said to scale over devices
    (devices → efficiency; None: the default of `assign_mesh`)."""

    model: str
    placement: str
    layers: tuple[int, ...]
    devices: tuple[int, ...]
    scaling: Mapping[int, float] | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a partition file, whole or not at all; `-` is standard output."""
        scaling = None if self.scaling is None else {str(d): e for d, e in self.scaling.items()}
        body = {"model": self.model, "placement": self.placement, "scaling": scaling}
        write_document(path, "partition", {**body, "layers": list(self.layers), "devices": list(self.devices)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Partition:
        """Read a partition file; `-` is standard input. Raises BadInput naming the field."""
        body, where = read_document(path, "partition"), str(path)
        rows = {name: field(body, name, list, where) for name in ("layers", "devices")}
        for name, row in rows.items():
            if not row or not all(type(n) is int and n > 0 for n in row) or len(row) != len(rows["layers"]):
                raise BadInput(f"{where}: field '{name}' must list positive whole numbers, one a stage")
        scaling = body.get("scaling")
        if scaling is not None and not isinstance(scaling, dict):
            raise BadInput(f"{where}: field 'scaling' must be null or an object")
        return cls(
            field(body, "model", str, where),
            field(body, "placement", str, where),
            tuple(rows["layers"]),
            tuple(rows["devices"]),
            None if scaling is None else check_scaling(scaling, f"{where}: field 'scaling'"),
        )


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
