"""What a training step keeps besides activations: parameters, gradients and the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zbsolve.util.errors import BadInput

from .operation_costs import parameter_type


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """How parameters are kept and updated. factor: bytes of parameters, gradients and optimizer state for each byte of
    trained parameters. traffic: bytes that one update reads and writes for each byte of parameters. optimizer: the one that
    is timed."""

    name: str
    factor: float
    traffic: float
    optimizer: str = "adamw"


# Bytes a parameter, K of ZeRO (1910.02054, section 3.1): parameters and gradients of 16 bits, and 12 bytes of float32 master
# parameter and two moments. An update reads gradient, master and moments, and writes all but the gradient.
OPTIMIZER_STATES = {
    "adam": OptimizerState("adam", 4.0, 7.0),  # all in the parameters' own type
    "adam-mixed": OptimizerState("adam-mixed", (2 + 2 + 12) / 2, (2 + 12 + 12 + 2) / 2),
    "adam-mixed-float-gradients": OptimizerState("adam-mixed-float-gradients", (2 + 4 + 12) / 2, (4 + 12 + 12 + 2) / 2),
    "sgd": OptimizerState("sgd", 2.0, 3.0, "sgd"),
}


def state_of(name: str | None, parameters: Sequence[Tensor]) -> OptimizerState:
    """The optimizer's state called `name`; None: Adam's, mixed where most trained parameters have 16 bits. Raises
    BadInput."""
    trained = [one for one in parameters if one.requires_grad]
    half = parameter_type(trained or list(parameters)).itemsize == 2
    if name is None:
        return OPTIMIZER_STATES["adam-mixed" if half else "adam"]
    if name not in OPTIMIZER_STATES:
        raise BadInput(f"optimizer states '{name}': one of {', '.join(OPTIMIZER_STATES)}")
    if "mixed" in name and not half:
        raise BadInput(f"optimizer states '{name}': is for parameters of 16 bits")
    return OPTIMIZER_STATES[name]
