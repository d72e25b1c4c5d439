"""Optimizers of torch's that `zbsolve run` and `zbsolve profile` know by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
