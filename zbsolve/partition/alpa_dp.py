"""Alpa's inter-operator dynamic programme (arXiv 2201.12023, §5.2): layers → stages, stages → submeshes.

A synchronous pipeline of m microbatches takes about Σ tᵢ + (m − 1) · max tⱼ: the first microbatch through all stages, the
others behind the slowest. For a limit on max tⱼ a dynamic programme finds the least sum; the limit is one of the stages'
own times. Alpa tries these in turn; here they are bisected, since a lower limit never makes the sum smaller: between two
limits nothing beats the sum at the higher with the maximum at the lower. The result is the same, exact optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..util.errors import BadInput, Infeasible
from .cut_table import CutTable, Floats, Price, cut_dp


@dataclass(frozen=True, slots=True)
class Found:
    """The optimum: (layers, devices) of each stage, and its Σ tᵢ + (m − 1) · max tⱼ in the unit of the times."""

    stages: tuple[tuple[int, int], ...]
    cost: float


def submeshes(nodes: int, per_node: int) -> tuple[int, ...]:
    """Sizes of Alpa's submeshes: 1, 2, 4 … devices of one node, or several whole nodes. With these any choice that adds
    up to all devices can be laid out (arXiv 2201.12023, appendix A). Raises BadInput."""
    if nodes < 1 or per_node < 1 or per_node & (per_node - 1):
        raise BadInput(f"submeshes: {nodes} nodes of {per_node} devices; a power of two devices a node is needed")
    return tuple(sorted({2**k for k in range(per_node.bit_length())} | {n * per_node for n in range(1, nodes + 1)}))


def alpa(
    cost: Price,
    layers: int,
    stages: Sequence[int],
    microbatches: int,
    *,
    beyond: Price | None = None,
    sizes: Sequence[int] = (0,),
    devices: int = 0,
) -> Found:
    """The partition with the least Σ tᵢ + (m − 1) · max tⱼ; of equals, one whose sum of squares is least.

    cost: times of stages, whole numbers (ns), so that sums are exact; infinite where a stage does not fit its memory.
    stages: the numbers of stages that may be. beyond: what a stage adds to the sum alone (a message), whole.
    sizes, devices: submeshes and how many devices they use in all. Raises Infeasible where nothing fits.
    """
    most = max(stages)
    limits = np.unique(np.concatenate([np.unique(cost(s)) for s in range(1, most + 1)]))
    limits = limits[np.isfinite(limits)]

    def least(limit: float, second: bool = False) -> tuple[float, int, CutTable]:
        def price(s: int) -> Floats:
            times = cost(s)
            return np.where(times <= limit, times, np.inf) + (0.0 if beyond is None else beyond(s))

        squares = (lambda s: cost(s) ** 2) if second else None
        done = cut_dp(layers, most, price, second=squares, sizes=sizes, devices=devices)
        total, count = min((done.cost(s), s) for s in stages)
        return total, count, done

    def value(i: int) -> tuple[float, float]:
        total = least(limits[i])[0]
        return total, total + (microbatches - 1) * limits[i]

    if len(limits) == 0 or not np.isfinite(value(len(limits) - 1)[0]):
        raise Infeasible("partition: no partition fits the memory")
    total, best = value(len(limits) - 1)
    at, open_parts = len(limits) - 1, [(0, len(limits) - 1, total)]
    while open_parts:
        low, high, above = open_parts.pop()
        if low >= high or above + (microbatches - 1) * limits[low] > best:
            continue
        middle = (low + high) // 2
        total, worth = value(middle)
        if (worth, limits[middle]) < (best, limits[at]):
            at, best = middle, worth
        open_parts.append((middle + 1, high, above))
        if np.isfinite(total):
            open_parts.append((low, middle, total))
    _, count, done = least(limits[at], second=True)
    return Found(done.stages(count), best)
