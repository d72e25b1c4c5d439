"""The executor runs schedules on torch.distributed. `Pipeline` is for a training loop, `PostValidated` is an optimizer for
it, and `Watch` finds out what is slow in it. `auxiliary_loss` lets a layer add to the loss; `CrossEntropy` is a loss for
sharded vocabularies. A step raises `RunFailed` when a rank fails. `torch_schedule` lets torch's own runtime run a
schedule; `split_stage` gives one of torch's stages our split of the backward."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from ..models.huggingface import transformers_attention as transformers_attention
    from ..models.huggingface_whole import layers_of as layers_of
    from ..models.losses import CrossEntropy as CrossEntropy
    from ..models.losses import auxiliary_loss as auxiliary_loss
    from ..models.losses import auxiliary_losses as auxiliary_losses
    from ..models.slicing import slice_offset as slice_offset
    from ..models.slicing import sliced_attention as sliced_attention
    from ..util.errors import RunFailed as RunFailed
    from .loop.watching import Watch as Watch
    from .pipeline import Pipeline as Pipeline
    from .post_validation import PostValidated as PostValidated
    from .reports import StepResult as StepResult
    from .run.launch import run_local as run_local
    from .torch_stages import split_stage as split_stage
    from .torch_stages import torch_schedule as torch_schedule

# Torch is imported with the first use: the command line reads parts of this package without it.
__getattr__, __dir__ = handing_on(__name__)
