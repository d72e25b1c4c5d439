"""A layer's costs, and what layers take on a rank: activations of a microbatch, and all that is there beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MESSAGES = 2  # at each end of a stage: one that comes or came, one that goes
Tied = tuple[tuple[int, tuple[int, ...]], ...]  # bytes of a parameter that several layers hold, and their numbers


@dataclass(frozen=True, slots=True)
class Layer:
    """Costs of one layer for one microbatch: median µs of F, B (input gradient), W (weight gradient), BW (both fused);
    bytes that F keeps until the end of B and of W; bytes of parameters and of the output (the message).

    held_from_B: bytes that B keeps until the end of W, beyond what it frees. X: µs of recomputing the forward; U: of the
    optimizer's update, once a step; 0 where unknown. transient: bytes that a pass takes on top of what is kept before or
    after it. output_kept: bytes of the output that the layer itself keeps; input_unneeded: bytes of its input that are
    kept only where it is the first layer of a stage. all_to_all: µs that expert parallelism sends behind F, and as many
    behind the backward, beside computation (no profiler measures it: it is a matter of the cluster, for you to fill in).
    """

    name: str
    F: float
    B: float
    W: float
    BW: float
    held_until_B: int
    held_until_W: int
    parameter_bytes: int
    output_bytes: int
    held_from_B: int = 0
    X: float = 0.0
    U: float = 0.0
    transient: int = 0
    output_kept: int = 0
    input_unneeded: int = 0
    all_to_all: float = 0.0


def held(stages: Sequence[Sequence[Layer]]) -> dict[str, list[int]]:
    """`held_until_B`, `held_until_W`, `held_from_B` of stages of layers, for `graphs.pipeline`: the sums, where a tensor
    between two layers that both count counts once, and what one layer's B frees makes room for what another's makes."""
    found: dict[str, list[int]] = {"held_until_B": [], "held_until_W": [], "held_from_B": []}
    for stage in stages:
        twice = sum(max(a.output_kept, b.input_unneeded) for a, b in zip(stage, stage[1:], strict=False))
        after_f = max(0, sum(c.held_until_B + c.held_until_W for c in stage) - twice)
        after_b = sum(c.held_until_W + c.held_from_B for c in stage)
        found["held_until_B"].append(max(0, after_f - after_b))
        found["held_until_W"].append(min(after_f, after_b))
        found["held_from_B"].append(max(0, after_b - after_f))
    return found


def ends(layers: Sequence[Layer]) -> list[int]:
    """[i]: bytes of messages over a cut before layer i, on each side of it: none before the first layer and after the last
    (layers + 1 values)."""
    return [0, *(MESSAGES * one.output_bytes for one in layers[:-1]), 0]


def inside(layers: Sequence[Layer], dropping: bool = False) -> int:
    """The most bytes that a pass over these layers takes while it runs, beyond what is kept before or after it. dropping:
    F keeps its input alone, so while a layer runs, what it would keep is there on top."""
    return max(c.transient + (c.held_until_B + c.held_until_W if dropping else 0) for c in layers)


def parameters(layers: Sequence[Layer], tied: Tied, here: Sequence[int]) -> int:
    """Bytes of the parameters of the layers numbered `here` on one rank; what several of them share counts once."""
    shared = sum(size * max(0, len(set(here) & set(group)) - 1) for size, group in tied)
    return sum(layers[i].parameter_bytes for i in here) - shared


def beside(
    layers: Sequence[Layer],
    states: float,
    tied: Tied,
    counts: Sequence[int],
    routes: Sequence[Sequence[int]],
    dropping: Sequence[int] = (),
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Bytes that each rank needs beside activations, in two parts: parameters with gradients and optimizer state; messages
    at the ends of its stages and the most that one pass takes while it runs.

    states, tied: as in a `Profile`; counts: layers of each stage; routes: stage → rank, each; dropping: stages that
    recompute. More messages can be on their way where a rank runs far ahead of the next: those are not known before the
    schedule is.
    """
    cuts = np.cumsum([0, *counts]).tolist()
    over = ends(layers)
    fixed, moving = [], []
    for rank in range(max(routes[0]) + 1):
        mine = sorted({stage for route in routes for stage, home in enumerate(route) if home == rank})
        fixed.append(states * parameters(layers, tied, [i for s in mine for i in range(cuts[s], cuts[s + 1])]))
        most = max(inside(layers[cuts[s] : cuts[s + 1]], s in dropping) for s in mine)
        moving.append(most + sum(over[cuts[s]] + over[cuts[s + 1]] for s in mine))
    return tuple(fixed), tuple(moving)
