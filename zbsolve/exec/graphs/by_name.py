"""How the layers of a rank's stages are split, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ...util.errors import BadInput
from ..backward.layer_split import LayerSplit, Loss
from ..backward.stage import Split
from ..splits import SPLITS

# (layers, number of the first, loss or None) → how they are split.
Parts = Callable[[Sequence[nn.Module], int, Loss | None], Sequence[Split]]


def parts_by_name(name: str, *, tight: bool = False, alone: bool = True) -> Parts:
    """What splits the stages of one rank: equal layers share what was traced, compiled and measured. tight: memory is
    bounded, so `auto` takes no split that holds more than that of the layers. alone: no other rank takes part in a layer's
    forward; where one does, `auto` tries nothing out, and takes the layers.

    layers: linear layers, embeddings and convolutions queue their weight gradients, and the rest of a backward is B. graph:
    each layer's joint graph is cut, so any operation is split; inductor compiles it. `:least` keeps as little between F and
    B as recomputing cheap operations allows. auto: a layer at a time, what is measured faster; `auto:inductor` also
    compiles. Raises BadInput for a name that is none of `SPLITS`.
    """
    if name not in SPLITS:
        raise BadInput(f"split: '{name}' is none of {', '.join(SPLITS)}")
    if name == "layers":
        return lambda layers, first, loss: [LayerSplit(layers, first, loss)]
    from .auto import MAKES, Auto, always, parts_by
    from .sharing import SharedGraphs

    if name.startswith("auto"):
        return parts_by(Auto(tight, inductor=name == "auto:inductor", alone=alone).choose)
    return parts_by(always(name, SharedGraphs(MAKES[name])))
