"""Pictures, pages and tables of schedules, runs, frontiers, profiles, partitions and systems; no solver needs them."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .pictures.drawing import Style as Style
    from .pictures.drawing import to_svg as to_svg
    from .pictures.files import save_schedule_picture as save_schedule_picture
    from .pictures.schedule import comparison_drawing as comparison_drawing
    from .schedule_comparison import compare_schedules as compare_schedules
    from .schedule_comparison_text import schedules_as_text as schedules_as_text
    from .schedule_report import schedule_as_page as schedule_as_page
    from .schedule_report import schedule_as_text as schedule_as_text
    from .solved_step import solved as solved

__getattr__, __dir__ = handing_on(__name__)
