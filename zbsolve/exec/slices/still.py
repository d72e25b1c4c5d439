"""A layer in training that draws nothing: what it does beside its random numbers can be compared then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

DROPOUTS = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout),
    *(functional.feature_alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_),
    *(torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
}
EVERYWHERE = 0.5  # in place of numbers between 0 and 1, and of normal ones
LIKE = {torch.rand_like, torch.randn_like}
NEW = {torch.rand, torch.randn}
IN_PLACE = {Tensor.uniform_, Tensor.normal_, Tensor.exponential_}


class Still(TorchFunctionMode):
    """Inside, dropouts drop nothing, whether modules or functions, and other random numbers are the same everywhere."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in LIKE or func in NEW:
            return func(*args, **kwargs).fill_(EVERYWHERE)
        if func in IN_PLACE:
            return args[0].fill_(EVERYWHERE)
        if func is Tensor.bernoulli_:
            return args[0].fill_(1)
        if func is torch.bernoulli:
            return torch.ones_like(args[0])
        return func(*args, **kwargs)
