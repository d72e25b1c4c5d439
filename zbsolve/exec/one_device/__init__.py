"""All ranks of a schedule on one device, in one process."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .green_contexts import GreenContexts as GreenContexts
    from .pipeline import OneDevice as OneDevice
    from .streams import Turns as Turns

__getattr__, __dir__ = handing_on(__name__, {"green_contexts": "GreenContexts", "pipeline": "OneDevice", "streams": "Turns"})
