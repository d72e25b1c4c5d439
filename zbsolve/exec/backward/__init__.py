"""One stage of a model and its passes: the forward, the backward split into B and W, recompute."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .split import defer as defer
    from .split import restore as restore
    from .stage import Stage as Stage

__getattr__, __dir__ = handing_on(__name__, {"split": "defer restore", "stage": "Stage"})
