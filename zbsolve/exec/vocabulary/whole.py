"""A rank's shard of the vocabulary under the names of the whole model: as DTensors, which checkpoints and checks know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...models.model import Place
from ..base.torch_private import default_group
from ..base.values import LaidOut, full, local
from ..check import Value
from .parts import NAME, Shard


class WholeVocabulary:
    """The parameters of a rank's shard as parts of the whole model's. names: of all layers. group: the pipeline's process
    group, None for the default one."""

    def __init__(self, shard: Shard, names: Sequence[str], group: Any, device: torch.device) -> None:
        self.shard, self.group, self.device = shard, group, device
        self.keys = {f"{NAME}.{own}": [f"{names[i]}.{path}" for i, path in at] for own, at in shard.places.items()}
        self._own = {key: own.removeprefix(f"{NAME}.") for own, keys in self.keys.items() for key in keys}

    @cached_property
    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(default_group() if self.group is None else self.group, self.device.type)

    def has(self, name: str) -> bool:
        """Is this name of the whole model a shard's parameter?"""
        return name in self._own

    def rows(self, name: str) -> torch.Size:
        """The shape of this rank's part of it."""
        return self.shard.module.get_parameter(self._own[name]).shape

    def whole_names(self, names: Sequence[str]) -> list[str]:
        """A parameter's names among this rank's modules → those that it has in the whole model."""
        return [key for name in names for key in self.keys.get(name, [name])]

    def spread(self, name: str, part: Tensor) -> Any:
        """This rank's `part`, laid out as its part of the parameter `name`, as a DTensor of the whole one's shape."""
        from torch.distributed.tensor import Shard as Rows

        shape = self.shard.shapes[self._own[name]]
        stride = torch.empty(shape, device="meta").stride()
        return LaidOut(self._mesh, (Rows(0),), shape, stride).whole(part.detach())

    def state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of this rank's modules, with the whole model's names and DTensors for the shard's."""
        found: dict[str, Any] = {name: value for name, value in state.items() if name not in self.keys}
        for own, keys in self.keys.items():
            found |= dict.fromkeys(keys, self.spread(keys[0], state[own]))
        return found

    def own_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The other way round."""
        found = {name: value for name, value in state.items() if not self.has(name)}
        return found | {own: local(state[keys[0]]) for own, keys in self.keys.items()}

    def values(self, what: Callable[[nn.Parameter], Tensor | None]) -> dict[Place, Value]:
        """Place in the whole model → what `what` gives of the whole parameter. All ranks call this together."""
        found: dict[Place, Value] = {}
        for own, places in self.shard.places.items():
            p, (name, *_) = self.shard.module.get_parameter(own), self.keys[f"{NAME}.{own}"]
            if p.requires_grad:
                part = what(p)
                whole = None if part is None else full(self.spread(name, part))
                found |= dict.fromkeys(places, Value(whole, self.shard.shapes[own], p.dtype, p.device))
        return found
