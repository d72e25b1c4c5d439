"""The backward split by the graph: a block's joint forward and backward, traced by torch, cut into F, B and W."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .auto import decisions_of as decisions_of
    from .auto import graph_saved as graph_saved
    from .graph_split import GraphSplit as GraphSplit
    from .joint import Untraceable as Untraceable

__getattr__, __dir__ = handing_on(__name__)
