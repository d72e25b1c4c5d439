"""Exact searches over the orders of one rank or a few: windows that no order fits, and so higher lower bounds."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .end_losses import Answer as Answer
    from .end_losses import refute as refute
    from .group_search import higher_bounds as higher_bounds
    from .induction import WindowSearch as WindowSearch
    from .induction import refute_by_induction as refute_by_induction
    from .lanes import Lanes as Lanes
    from .lanes import lanes_of as lanes_of

__getattr__, __dir__ = handing_on(
    __name__,
    {
        "group_search": "higher_bounds",
        "induction": "WindowSearch refute_by_induction",
        "lanes": "Lanes lanes_of",
        "end_losses": "Answer refute",
    },
)
