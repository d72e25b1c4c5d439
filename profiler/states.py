"""What a training step keeps beside activations: parameters, gradients and the optimizer's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zbsolve.errors import BadInput

from .work import parameter_type


@dataclass(frozen=True, slots=True)
class State:
    """factor: bytes of parameters, gradients and optimizer state for each byte of parameters; traffic: bytes that one
    update reads and writes for each byte of parameters; optimizer: the one that is timed."""

    name: str
    factor: float
    traffic: float
    optimizer: str = "adamw"


OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}

# Bytes a parameter, K of ZeRO (1910.02054, section 3.1): 16-bit parameters and gradients beside 12 bytes of float32 master
# parameter and two moments; an update reads gradient, master and moments and writes all but the gradient.
STATES = {
    "adam": State("adam", 4.0, 7.0),  # all in the parameters' own type
    "adam-mixed": State("adam-mixed", (2 + 2 + 12) / 2, (2 + 12 + 12 + 2) / 2),
    "adam-mixed-float-gradients": State("adam-mixed-float-gradients", (2 + 4 + 12) / 2, (4 + 12 + 12 + 2) / 2),
    "sgd": State("sgd", 2.0, 3.0, "sgd"),
}


def state_of(name: str | None, parameters: Sequence[Tensor]) -> State:
    """The state called `name`; None: Adam, mixed where most parameters have 16 bits. Raises BadInput."""
    half = parameter_type(list(parameters)).itemsize == 2
    if name is None:
        return STATES["adam-mixed" if half else "adam"]
    if name not in STATES:
        raise BadInput(f"states '{name}': one of {', '.join(STATES)}")
    if "mixed" in name and not half:
        raise BadInput(f"states '{name}': is for parameters of 16 bits")
    return STATES[name]
