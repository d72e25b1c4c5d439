"""How a DTensor lies on a mesh, so that the same coordinate of another rank's slice can rebuild it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...util.errors import BadInput


@dataclass(frozen=True)
class Layout:
    """A DTensor without its numbers. mesh: of its dimensions, this rank's slice. placements: torch's, one a dimension.
    shape: of the whole."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size

    @classmethod
    def of(cls, tensor: Any) -> Layout:
        """The layout of a DTensor."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape)

    @property
    def gradient(self) -> Layout:
        """That of its gradient (see `laid_out_as`)."""
        from torch.distributed.tensor import Replicate

        return replace(self, placements=tuple(Replicate() if one.is_partial() else one for one in self.placements))

    def of_part(self, part: Tensor) -> Tensor:
        """The DTensor of which this rank has `part`, which is contiguous."""
        from torch.distributed.tensor import DTensor

        shape, stride = self.shape, torch.empty(self.shape, device="meta").stride()
        found: Tensor = DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)
        return found

    def dumped(self, whole: DeviceMesh | None) -> list[Any]:
        """As plain values. whole: the pipeline's mesh. Raises BadInput where another rank could not rebuild it there."""
        names = tuple(self.mesh.mesh_dim_names or ())
        if whole is None:
            raise BadInput("makes a DTensor, which only a Pipeline with a mesh can send")
        if not names or _slice(whole, names) != self.mesh:
            raise BadInput(f"makes a DTensor on a mesh {names or 'without names'}, which is no slice of the pipeline's")
        return [list(names), [_words(one) for one in self.placements], list(self.shape)]

    @classmethod
    def loaded(cls, values: Sequence[Any], whole: DeviceMesh | None) -> Layout:
        """What `dumped` gave, on this rank's slice."""
        names, placements, shape = values
        assert whole is not None
        mesh = _slice(whole, names)
        assert mesh is not None
        return cls(mesh, tuple(map(_placement, placements)), torch.Size(shape))

    def __str__(self) -> str:
        return f" as {', '.join(map(str, self.placements))} of {tuple(self.shape)}"


def _slice(whole: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    try:
        return whole[tuple(names)]
    except (KeyError, RuntimeError):
        return None


def _words(placement: Any) -> list[Any]:
    """A placement as plain values. Raises BadInput for one that is none of torch's three."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Shard:
        return ["shard", placement.dim]
    if type(placement) is Replicate:
        return ["replicate"]
    if type(placement) is Partial:
        return ["partial", placement.reduce_op]
    raise BadInput(f"makes a DTensor placed as {placement}, which cannot be sent")


def _placement(words: Sequence[Any]) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    kinds: dict[str, Any] = {"shard": Shard, "replicate": Replicate, "partial": Partial}
    return kinds[words[0]](*words[1:])
