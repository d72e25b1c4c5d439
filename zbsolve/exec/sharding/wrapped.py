"""What FSDP2 made of a module, told by names: importing FSDP takes seconds, and who has wrapped a layer has imported it."""

from __future__ import annotations

from torch import nn

WRAPPER = "FSDPModule"


def is_wrapped(module: nn.Module) -> bool:
    """Did `fully_shard` wrap it?"""
    return any(kind.__name__ == WRAPPER for kind in type(module).__mro__)


def own_type(module: nn.Module) -> type[nn.Module]:
    """The class that a person gave it: `fully_shard` puts a class of its own in front."""
    kinds = type(module).__mro__
    at = next((i for i, kind in enumerate(kinds) if kind.__name__ == WRAPPER), -1)
    return kinds[at + 1]


def wrapped_modules(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that `fully_shard` wrapped, the outermost first."""
    return [module for module in layer.modules() if is_wrapped(module)]
