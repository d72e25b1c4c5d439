"""`layers_of`: layers of a profiled model under one layout: with what is made again, and what replicas send in passes."""

from __future__ import annotations

from dataclasses import replace

from ...layer import Layer
from ...util.errors import BadInput
from ..clusters.cluster import Cluster
from ..layout import FULL, SELECTIVE, Layout
from ..model.profiled_model import Ends, ProfiledModel
from .layer_bytes import WEIGHT_BYTES, gathered_bytes
from .layer_times import sharded


def layers_of(model: ProfiledModel, layout: Layout, cluster: Cluster) -> Ends:
    """First layer, block and last layer, in whole µs. Raises BadInput for selective recompute, which no profile knows."""
    if layout.recompute == SELECTIVE:
        raise BadInput(f"model {model.name}: profiles do not say what selective recompute saves")
    first, block, last = model.at(layout.tp, layout.size)
    block = _made_again(block) if layout.recompute == FULL else block
    return _whole(first), _whole(_shared_out(block, layout, cluster)), _whole(last)


def _made_again(block: Layer) -> Layer:
    """A block that keeps its input alone, as large as its output, and runs its forward again before B."""
    again, kept = block.X or block.F, block.held_until_B + block.held_until_W
    return replace(
        block,
        B=block.B + again if block.B or block.W else 0.0,
        BW=block.BW + again,
        held_until_B=block.output_bytes,
        held_until_W=0,
        held_from_B=block.held_from_B + block.held_until_W,
        transient=block.transient + kept,
        output_kept=0,
        input_unneeded=0,
    )


def _shared_out(block: Layer, layout: Layout, cluster: Cluster) -> Layer:
    """A block whose parameters or gradients ZeRO shards: passes gather and reduce them."""
    parameters = block.parameter_bytes / WEIGHT_BYTES
    gather, reduce = (float(one) for one in sharded(parameters, layout, cluster))
    return replace(
        block,
        F=block.F + gather,
        B=block.B + gather + reduce if block.B or block.W else 0.0,
        BW=block.BW + gather + reduce,
        transient=block.transient + round(float(gathered_bytes(parameters, layout))),
    )


def _whole(layer: Layer) -> Layer:
    return replace(
        layer, F=float(round(layer.F)), B=float(round(layer.B)), W=float(round(layer.W)), BW=float(round(layer.BW))
    )
