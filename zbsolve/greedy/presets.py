"""The old place of `zbsolve.preset`, for scripts written before it moved to `zbsolve.systems`."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("PRESETS", "preset"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__.partition('.')[0]}.systems"), name)
