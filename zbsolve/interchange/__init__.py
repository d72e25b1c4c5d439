"""Schedules in the formats of other engines. Each engine has one file, which writes and reads its format."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from ..planner.engines import TARGETS as TARGETS
    from .exports import Options as Options
    from .exports import export as export
    from .importing import import_schedule as import_schedule
    from .importing import read_order as read_order

__getattr__, __dir__ = handing_on(__name__)
