"""The playground: a local page with controls for a step, which shows its schedule, bubble, peaks and bound."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .server import serve as serve

__getattr__, __dir__ = handing_on(__name__)
