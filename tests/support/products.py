"""Matrix products that torch's own stages do, by action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from zbsolve.exec.memory import LiveBytes

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default}
ACTIONS = {"F": "forward_one_chunk", "I": "backward_one_chunk", "W": "backward_weight_one_chunk"}


class Watching(LiveBytes):
    """Counts matrix products by action, and the bytes that live after each."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[str] = Counter()
        self.after: list[tuple[str, int]] = []
        self.doing = "else"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products[self.doing] += func in PRODUCTS
        return super().__torch_dispatch__(func, types, args, kwargs)

    def watch(self, stage: Any) -> None:
        """Count what this stage does."""
        for kind, name in ACTIONS.items():
            setattr(stage, name, partial(self._run, kind, getattr(stage, name)))

    def _run(self, kind: str, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.doing = "B" if kwargs.get("full_backward") else kind
        result = action(*args, **kwargs)
        self.after.append((self.doing, self.now))
        self.doing = "else"
        return result
