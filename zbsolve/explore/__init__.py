"""The playground: a page on this machine whose controls say a step, with its schedule, bubble, peaks and bound."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .server import serve as serve

__getattr__, __dir__ = handing_on(__name__)
