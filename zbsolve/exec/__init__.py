"""The executor: runs schedules on torch.distributed. `Pipeline` is what a training loop uses, `PostValidated` an optimizer
beside it; `RunFailed` is what a step raises when a rank fails; `torch_schedule` makes torch's own runtime run a schedule."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .failure import RunFailed
    from .optimizer import PostValidated
    from .pipeline import Pipeline, StepResult
    from .torch_runtime import torch_schedule

__all__ = ["Pipeline", "PostValidated", "RunFailed", "StepResult", "torch_schedule"]

_HOMES = {
    "Pipeline": "pipeline",
    "PostValidated": "optimizer",
    "RunFailed": "failure",
    "StepResult": "pipeline",
    "torch_schedule": "torch_runtime",
}


def __getattr__(name: str) -> Any:
    """Torch is imported with the first use: the command line reads parts of this package without it."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
