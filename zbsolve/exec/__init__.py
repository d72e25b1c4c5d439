"""The executor: runs schedules on torch.distributed. `Pipeline` is what a training loop uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .pipeline import Pipeline, StepResult

__all__ = ["Pipeline", "StepResult"]


def __getattr__(name: str) -> Any:
    """Torch is imported with the first use: the command line reads parts of this package without it."""
    if name in __all__:
        from . import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
