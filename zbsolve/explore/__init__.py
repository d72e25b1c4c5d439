"""The playground: a page on this machine whose controls say a step, with its schedule, bubble, peaks and bound."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .playground import Answer as Answer
    from .playground import Row as Row
    from .playground import answer as answer
    from .playground import compared as compared
    from .server import serve as serve
    from .state import State as State

__getattr__, __dir__ = handing_on(__name__)
