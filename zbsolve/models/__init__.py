"""Models by name, for the profiler and the executor alike. `load` finds one."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .by_name import load as load
    from .model import Model as Model
    from .model import Setting as Setting
    from .presets import PRESETS as PRESETS
    from .published_models import PUBLISHED as PUBLISHED

__getattr__, __dir__ = handing_on(__name__)
