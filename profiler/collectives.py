"""How long the collectives of a sharded vocabulary take between all ranks, as the executor calls them.

Hidden states go from the last rank to all, input gradients are summed there, and every shard tells the others what it found.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

REPEATS, WARMUPS = 10, 3
KINDS = ("broadcast", "reduce", "statistics")
Sizes = tuple[int, int]  # bytes of hidden states, and of what one shard tells the others


def measured_collectives(group: Any, lead: int, sizes: Sizes | None) -> dict[str, list[float]]:
    """Kind → samples, µs from when the last rank has begun to when the last one is done. Every rank of the group calls this
    (None: the default one) and gets them. lead: ns of this rank's clock before the first one's. sizes: the first rank's
    count; None: there is nothing to measure, and nothing comes back."""
    agreed = torch.tensor(sizes or (0, 0))
    dist.broadcast(agreed, 0 if group is None else dist.get_global_rank(group, 0), group=group)
    hidden, statistics = agreed.tolist()
    if not hidden:
        return {}
    calls = _calls(group, hidden, statistics)
    stamps = torch.tensor([_stamps(calls[kind], group, lead) for kind in KINDS])
    everywhere = [torch.empty_like(stamps) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everywhere, stamps, group=group)
    begin, end = np.moveaxis(torch.stack(everywhere).numpy().max(axis=0), -1, 0)
    return dict(zip(KINDS, ((end - begin) / 1000).tolist(), strict=True))


def _calls(group: Any, hidden: int, statistics: int) -> dict[str, Callable[[], Any]]:
    """The collectives, in place on tensors of so many bytes."""
    size = dist.get_world_size(group)
    root = size - 1 if group is None else dist.get_global_rank(group, size - 1)
    states, mine = torch.zeros(-(-hidden // 4)), torch.zeros(-(-statistics // 4))
    whole = torch.empty(size, len(mine))
    return {
        "broadcast": lambda: dist.broadcast(states, root, group=group),
        "reduce": lambda: dist.reduce(states, root, group=group),
        "statistics": lambda: dist.all_gather(list(whole.unbind()), mine, group=group),
    }


def _stamps(call: Callable[[], Any], group: Any, lead: int) -> list[tuple[int, int]]:
    """When each call began and was done here, ns of the first rank's clock."""
    found = []
    for _ in range(WARMUPS + REPEATS):
        dist.barrier(group)
        begin = time.monotonic_ns() - lead
        call()
        found.append((begin, time.monotonic_ns() - lead))
    return found[WARMUPS:]
