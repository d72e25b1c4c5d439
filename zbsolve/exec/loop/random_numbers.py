"""The random numbers of a person's loop: torch's, Python's and numpy's. (Layers draw from numbers that the step fixes.)"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from ..backward.replay import torch_generators


def random_state() -> dict[str, Any]:
    """The states of all generators, as numbers, lists and tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": [generator.get_state() for generator in torch_generators()],
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set all generators that are there to what `random_state` gave."""
    for generator, one in zip(torch_generators(), state["torch"], strict=False):
        generator.set_state(one)
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
