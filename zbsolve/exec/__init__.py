"""The executor runs schedules on torch.distributed. `Pipeline` is for a training loop, `PostValidated` is an optimizer for
it. A step raises `RunFailed` when a rank fails. `torch_schedule` lets torch's own runtime run a schedule."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .optimizer.post_validation import PostValidated as PostValidated
    from .pipeline import Pipeline as Pipeline
    from .rank import StepResult as StepResult
    from .torch_runtime import torch_schedule as torch_schedule
    from .transport.failure import RunFailed as RunFailed

# Torch is imported with the first use: the command line reads parts of this package without it.
__getattr__, __dir__ = handing_on(
    __name__,
    {
        "pipeline": "Pipeline",
        "rank": "StepResult",
        "optimizer.post_validation": "PostValidated",
        "transport.failure": "RunFailed",
        "torch_runtime": "torch_schedule",
    },
)
