"""Models by name, for the profiler and the executor: `load` makes the model that a name stands for."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .by_name import load as load

__getattr__, __dir__ = handing_on(__name__)
