"""Stages as modules, for a person's function that spreads them over the other dimensions of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...util.errors import BadInput
from ...util.own_code import raised
from ..base.torch_private import children_of
from .place import PipelineMesh

Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module | None]


class StageModule(nn.Module):
    """A stage: its layers under their names in the whole model. Calling it runs them in turn."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Any) -> Any:
        for layer in children_of(self).values():
            assert layer is not None
            x = layer(x)
        return x


def parallelized(
    stages: Mapping[int, Sequence[int]],
    layers: Mapping[int, nn.Module],
    names: Mapping[int, str],
    mesh: PipelineMesh,
    parallelize: Parallelize,
) -> tuple[dict[int, nn.Module], dict[int, nn.Module]]:
    """This rank's layers by number after `parallelize(stage, mesh)` has had each stage, and the stages themselves.

    stages: stage → its layers' numbers. names: of the layers in the whole model. Raises BadInput naming the stage where the
    function raises, or gives a module without the stage's layers.
    """
    found, modules = dict(layers), dict[int, nn.Module]()
    for stage, numbers in stages.items():
        module: nn.Module = StageModule({names[i]: found[i] for i in numbers})
        where = f"stage {stage}{mesh.coordinate and f' ({mesh.coordinate})'}"
        try:
            answer = parallelize(module, mesh.whole)
        except Exception as error:
            raise BadInput(f"{where}: parallelize raised {raised(error)}") from error
        if answer is not None and not isinstance(answer, nn.Module):
            raise BadInput(f"{where}: parallelize returned a {type(answer).__name__}: it must be a module, or None")
        modules[stage] = module if answer is None else answer
        children = children_of(modules[stage])
        for i in numbers:
            layer = children.get(names[i])
            if layer is None:
                kind = type(modules[stage]).__name__
                raise BadInput(f"{where}: parallelize gave a {kind} without layer '{names[i]}': wrap layers, not the stage")
            found[i] = layer
    return found, modules
