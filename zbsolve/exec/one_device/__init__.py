"""All ranks of a schedule in one process, in turns."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .pipeline import OneDevice as OneDevice
    from .pipeline import Turns as Turns

__getattr__, __dir__ = handing_on(__name__, {"pipeline": "OneDevice Turns"})
