"""How the layers of a rank's stages are split, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from ...util.errors import BadInput
from .layer_split import LayerSplit, Loss
from .stage import Split

# (layers, number of the first, loss or None) → how they are split.
Parts = Callable[[Sequence[nn.Module], int, Loss | None], Sequence[Split]]


def _layers() -> Parts:
    return lambda layers, first, loss: [LayerSplit(layers, first, loss)]


def _graph(inductor: bool) -> Parts:
    from ..graphs.graph_split import graphs_of
    from ..graphs.sharing import SharedGraphs

    return SharedGraphs(partial(graphs_of, inductor=inductor)).parts


SPLITS: dict[str, Callable[[], Parts]] = {
    "layers": _layers,
    "graph": partial(_graph, inductor=False),
    "inductor": partial(_graph, inductor=True),
}


def parts_by_name(name: str) -> Parts:
    """What splits the stages of one rank. Raises BadInput for a name that is none of `SPLITS`."""
    if name not in SPLITS:
        raise BadInput(f"split: '{name}' is none of {', '.join(SPLITS)}")
    return SPLITS[name]()
