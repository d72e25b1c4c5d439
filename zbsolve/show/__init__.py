"""Pictures, pages and tables of schedules, runs, frontiers, profiles, partitions and systems; nothing here is needed to
solve, verify or run."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .comparison import Comparison as Comparison
    from .comparison import compare as compare
    from .comparison import comparison_as_text as comparison_as_text
    from .frontier_report import frontier_as_page as frontier_as_page
    from .frontier_report import frontier_as_text as frontier_as_text
    from .frontier_report import save_frontier as save_frontier
    from .gallery import exhibits as exhibits
    from .gallery import gallery_as_page as gallery_as_page
    from .gallery import gallery_as_text as gallery_as_text
    from .pictures.drawing import to_svg as to_svg
    from .pictures.files import save_drawing as save_drawing
    from .pictures.files import save_schedule_picture as save_schedule_picture
    from .pictures.schedule import comparison_drawing as comparison_drawing
    from .pictures.schedule import schedule_as_svg as schedule_as_svg
    from .pictures.schedule import schedule_drawing as schedule_drawing
    from .pictures.style import Style as Style
    from .profile_report import partitions_as_text as partitions_as_text
    from .profile_report import profile_as_page as profile_as_page
    from .profile_report import profile_as_text as profile_as_text
    from .profile_report import stages_as_text as stages_as_text
    from .run_text import drift_as_text as drift_as_text
    from .schedule_comparison import ScheduleComparison as ScheduleComparison
    from .schedule_comparison import compare_schedules as compare_schedules
    from .schedule_comparison_text import schedules_as_text as schedules_as_text
    from .schedule_report import schedule_as_page as schedule_as_page
    from .schedule_report import schedule_as_text as schedule_as_text
    from .solved_step import solved as solved
    from .solved_text import Solved as Solved
    from .solved_text import solved_as_text as solved_as_text
    from .solved_text import state_as_text as state_as_text
    from .solved_text import tried_as_text as tried_as_text
    from .tracks import schedule_as_trace as schedule_as_trace

__getattr__, __dir__ = handing_on(__name__)
