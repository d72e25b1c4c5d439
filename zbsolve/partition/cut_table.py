"""The exact dynamic programme over where the cuts between stages are: contiguous groups of layers.

It goes from the last layer back, stage by stage: the best of every place where a stage can end. A `Price` gives what a
stage costs that holds layers a … b − 1 when `s` stages (with it) are left: `price(s)[n][a, b]`, on the n-th size of submesh,
shape (sizes, layers + 1, layers + 1), infinite where that stage may not be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..util.columns import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Price = Callable[[int], Floats]


@dataclass(frozen=True)
class CutTable:
    """What the last `s` stages cost at least, `first[s][d, k]`, where they hold layers k and up on d devices (infinite:
    there is no way); and how: the first of them ends before layer `ends[s][d, k]`, on the `kinds[s][d, k]`-th size."""

    sizes: tuple[int, ...]
    first: tuple[Floats, ...]
    ends: tuple[Ints, ...]
    kinds: tuple[Ints, ...]

    def cost(self, stages: int) -> float:
        """The least cost of all layers in so many stages on all devices."""
        return float(self.first[stages][-1, 0])

    def stages(self, stages: int) -> tuple[tuple[int, int], ...]:
        """The best partition into so many stages: (layers, devices) of each, the first stage first."""
        found, d, k = [], self.first[0].shape[0] - 1, 0
        for s in range(stages, 0, -1):
            end, size = int(self.ends[s][d, k]), self.sizes[self.kinds[s][d, k]]
            found.append((end - k, size))
            d, k = d - size, end
        return tuple(found)


def cut_dp(
    layers: int,
    stages: int,
    price: Price,
    *,
    second: Price | None = None,
    maximum: bool = False,
    sizes: Sequence[int] = (0,),
    devices: int = 0,
) -> CutTable:
    """The dynamic programme for 1 … `stages` stages: the least sum of prices, or with `maximum` the least maximum.

    second: a sum that decides among partitions of equal sum (not with `maximum`, where that would not be exact). sizes:
    how many devices each kind of submesh has, `devices` are given out in all; without, devices are not counted.
    O(stages · sizes · devices · layers²), compiled."""

    first = np.full((devices + 1, layers + 1), np.inf)
    first[0, layers] = 0.0
    then = np.where(first == 0, 0.0, np.inf)
    nothing = np.zeros(first.shape, np.int64)
    rows = [(first, nothing, nothing)]
    for s in range(1, stages + 1):
        cube = np.ascontiguousarray(price(s), np.float64)
        more = np.zeros_like(cube) if second is None else np.ascontiguousarray(second(s), np.float64)
        first, then, end, kind = compiled(step)(first, then, cube, more, np.asarray(sizes, np.int64), maximum)
        rows.append((first, end, kind))
    return CutTable(tuple(sizes), *(tuple(column) for column in zip(*rows, strict=True)))


def step(first: Any, then: Any, price: Any, second: Any, sizes: Any, maximum: bool) -> Any:
    """One more stage in front. first, then: [d, k] of the stages behind; price, second: [size, a, b] of the new stage.
    Returns both for one stage more, and where the new stage ends and which size it has."""
    devices, layers = first.shape[0] - 1, first.shape[1] - 1
    best = np.full(first.shape, np.inf)
    rest = np.full(first.shape, np.inf)
    ends = np.zeros(first.shape, np.int64)
    kinds = np.zeros(first.shape, np.int64)
    for n in range(len(sizes)):
        for d in range(sizes[n], devices + 1):
            behind, later = first[d - sizes[n]], then[d - sizes[n]]
            if np.isinf(behind).all():
                continue
            for k in range(layers):
                for b in range(k + 1, layers + 1):
                    value = max(price[n, k, b], behind[b]) if maximum else price[n, k, b] + behind[b]
                    if np.isinf(value) or value > best[d, k]:
                        continue
                    more = second[n, k, b] + later[b]
                    if value < best[d, k] or more < rest[d, k]:
                        best[d, k], rest[d, k], ends[d, k], kinds[d, k] = value, more, b, n
    return best, rest, ends, kinds
