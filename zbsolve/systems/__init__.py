"""The named schedules of the literature: `table` lists them, and a file for each family has their orders."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .problems import problem_for as problem_for
    from .table import PRESETS as PRESETS
    from .table import SYSTEMS as SYSTEMS
    from .table import System as System
    from .table import name_on as name_on
    from .table import preset as preset
    from .table import presets_of as presets_of
    from .table import system as system
    from .two_directions import overlapped as overlapped

__getattr__, __dir__ = handing_on(__name__)
