"""Every legal layout of a model on so many devices."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

import numpy as np

from ..util.errors import BadInput
from .cluster import Cluster
from .layout import FULL, LOOP, NONE, SELECTIVE, SHARDED, SINGLE, VEE, WHOLE, ZERO_STAGES, Layout, table_of
from .shape import Shape

MAX_SIZE = 32  # sequences a microbatch
MAX_CHUNKS = 12  # stages a rank
MOST = 1 << 20  # devices, and sequences a step
MAX_LAYERS = 1000


def layouts(shape: Shape, devices: int, batch: int, cluster: Cluster) -> Layout:
    """A table of all layouts whose batch is `batch` sequences a step, in a fixed order.

    Tensor ranks divide the heads and a node's devices: groups stay inside a node. Pipeline ranks divide what is left; stages
    are as many as there are layers (embedding and head are one each) or fewer, on one stage a rank, in loops of up to
    `MAX_CHUNKS` stages a rank, or in a V. Microbatches of up to `MAX_SIZE` sequences divide a replica's batch. Selective
    recompute is there where attention keeps scores: else it is no recompute. The vocabulary is whole, or sharded over
    several pipeline ranks. Raises BadInput where there is none.
    """
    if not (1 <= devices <= MOST and 1 <= batch <= MOST):
        raise BadInput(f"devices {devices}, batch {batch}: at least 1 of each is needed, and {MOST} at most")
    if shape.layers > MAX_LAYERS:
        raise BadInput(f"model {shape.name}: {shape.layers} layers are more than a plan has ({MAX_LAYERS})")
    found = list(_layouts(shape, devices, batch, cluster))
    if not found:
        raise BadInput(_no_split(shape, devices, batch, cluster))
    return _with_vocabularies(table_of(found))


def _with_vocabularies(table: Layout) -> Layout:
    """Each layout, and those of several pipeline ranks with a sharded vocabulary behind it."""
    several = table.pp > 1
    found = table.rows(np.repeat(np.arange(len(several)), 1 + several))
    first = np.cumsum(1 + several) - 1 - several
    vocabulary = np.full(len(found.pp), SHARDED)
    vocabulary[first] = WHOLE
    return found._replace(vocabulary=vocabulary)


def _no_split(shape: Shape, devices: int, batch: int, cluster: Cluster) -> str:
    """Why there is no layout: each number of replicas divides the batch, or there is none."""
    replicas = sorted({dp for dp, _, _ in _splits(shape, devices, cluster)})
    least = f"there are {replicas[0]} at least, since layers and heads use {devices // replicas[0]} devices at most"
    if batch < replicas[0]:
        return f"batch {batch}: fewer sequences than {devices} devices make replicas: {least}"
    return f"batch {batch}: no split of {devices} devices has a number of replicas that divides it: {least}"


def _layouts(shape: Shape, devices: int, batch: int, cluster: Cluster) -> Iterator[Layout]:
    recomputes = (NONE, FULL) if shape.fused else (NONE, SELECTIVE, FULL)
    for dp, tp, pp in _splits(shape, devices, cluster):
        sizes = [one for one in range(1, MAX_SIZE + 1) if batch % (dp * one) == 0]
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
    low = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return [*low, *(number // one for one in reversed(low) if one * one < number)]
