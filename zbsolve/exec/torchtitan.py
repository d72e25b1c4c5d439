"""torchtitan's pipeline stages with our split of the backward. Add `import zbsolve.exec.torchtitan` to the module with your
configuration. From then on, every stage that torchtitan makes goes through `split_stage`, before torchtitan divides,
checkpoints or compiles its module: tensor parallelism gives layers a forward of its own, which must have ours inside. Tested
with torchtitan 0.3.0."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from ..util.errors import BadInput
from .torch_stages import split_stage

STAGES = "torchtitan.distributed.pipeline_parallel"
W = re.compile(r"\d+W\d+$")  # an action's name
MAKES_STAGE = "PipelineStage"
MAKE_SCHEDULES = ("_build_pipeline_schedule", "build_pipeline_schedule")  # now, and before 0.3.0


def install() -> None:
    """Called by the import; a second call does nothing. Existing stages and schedules of torchtitan stay as they are.
    Raises BadInput for a torchtitan that makes its stages elsewhere, ModuleNotFoundError without torchtitan."""
    module = import_module(STAGES)
    stage = getattr(module, MAKES_STAGE, None)
    if stage is None:
        raise BadInput(f"{STAGES}: no {MAKES_STAGE} in this torchtitan (0.3.0 has it): give its stages to split_stage")
    if isinstance(stage, type):
        hooks = {name: _looking_for_w(getattr(module, name)) for name in MAKE_SCHEDULES if hasattr(module, name)}
        vars(module).update({MAKES_STAGE: _splitting(stage), **hooks})


def _splitting(kind: type) -> Callable[..., Any]:
    """A function that makes a stage with our split."""

    @wraps(kind, updated=())
    def made(*args: Any, **kwargs: Any) -> Any:
        return split_stage(kind(*args, **kwargs))

    return made


def _looking_for_w(build: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a schedule, and warns if that has no W to split."""

    @wraps(build)
    def built(*args: Any, **kwargs: Any) -> Any:
        schedule = build(*args, **kwargs)
        rows = getattr(schedule, "pipeline_order", {}).values()
        if not any(W.match(str(action)) for row in rows for action in row):
            warnings.warn("schedule: no W in it, so zbsolve.exec.torchtitan has no backward to split", stacklevel=2)
        return schedule

    return built


install()
