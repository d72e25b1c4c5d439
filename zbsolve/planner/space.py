"""Every legal layout of a model on so many devices."""

from __future__ import annotations

from collections.abc import Iterator

from ..util.errors import BadInput
from .cluster import Cluster
from .layout import FULL, LOOP, NONE, SELECTIVE, SINGLE, VEE, ZERO_STAGES, Layout, table_of
from .shape import Shape

MAX_SIZE = 32  # sequences a microbatch
MAX_CHUNKS = 12  # stages a rank


def layouts(shape: Shape, devices: int, batch: int, cluster: Cluster) -> Layout:
    """A table of all layouts whose batch is `batch` sequences a step, in a fixed order.

    Tensor ranks divide the heads and a node's devices: groups stay inside a node. Pipeline ranks divide what is left; stages
    are as many as there are layers (embedding and head are one each) or fewer, on one stage a rank, in loops of up to
    `MAX_CHUNKS` stages a rank, or in a V. Microbatches of up to `MAX_SIZE` sequences divide a replica's batch. Selective
    recompute is there where attention keeps scores: else it is no recompute. Raises BadInput where there is none.
    """
    if devices < 1 or batch < 1:
        raise BadInput(f"devices {devices}, batch {batch}: at least 1 of each is needed")
    found = list(_layouts(shape, devices, batch, cluster))
    if not found:
        least = min(dp for dp, _, _ in _splits(shape, devices, cluster))
        raise BadInput(
            f"batch {batch}: no split of {devices} devices has a number of replicas that divides it: there are {least} at "
            f"least, since layers and heads use {devices // least} devices at most"
        )
    return table_of(found)


def _layouts(shape: Shape, devices: int, batch: int, cluster: Cluster) -> Iterator[Layout]:
    recomputes = (NONE, FULL) if shape.fused else (NONE, SELECTIVE, FULL)
    for dp, tp, pp in _splits(shape, devices, cluster):
        sizes = [one for one in _divisors(batch // dp) if one <= MAX_SIZE] if batch % dp == 0 else []
        for size in sizes:
            count = batch // dp // size
            for chunks, placement in _places(shape, pp):
                for recompute in recomputes:
                    for sequence in (0, 1) if tp > 1 else (0,):
                        for zero in range(ZERO_STAGES if dp > 1 else 1):
                            yield Layout(dp, tp, pp, chunks, placement, size, count, recompute, sequence, zero)


def _splits(shape: Shape, devices: int, cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """Replicas, tensor ranks, pipeline ranks."""
    for tp in _divisors(cluster.node):
        if shape.heads % tp == 0 and devices % tp == 0:
            for pp in _divisors(devices // tp):
                if pp <= shape.stages:
                    yield devices // tp // pp, tp, pp


def _places(shape: Shape, pp: int) -> Iterator[tuple[int, int]]:
    """Chunks and placement."""
    yield 1, SINGLE
    if pp > 1:
        yield from ((chunks, LOOP) for chunks in range(2, min(MAX_CHUNKS, shape.stages // pp) + 1))
        if 2 * pp <= shape.stages:
            yield 2, VEE


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
