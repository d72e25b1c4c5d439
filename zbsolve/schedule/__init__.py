"""An order of a step's passes and its certificate; its times, memory and messages; and what a run measured."""

from .schedule import GIVEN as GIVEN
from .schedule import IMPORTED as IMPORTED
from .schedule import Certificate as Certificate
from .schedule import EverySplit as EverySplit
from .schedule import LayerRow as LayerRow
from .schedule import Schedule as Schedule
from .schedule import Split as Split
from .schedule import relative_gap as relative_gap
