"""One step of the dynamic programme over cuts, compiled: the loops of `cut_table.cut_dp`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..util.kernels import kernel


@kernel
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
