"""Lower bounds in closed form that hold for every schedule, and the necessary arcs that all bounds rest on."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .any_choice import bound_over_choices as bound_over_choices
    from .any_choice import bound_over_exchanges as bound_over_exchanges

__getattr__, __dir__ = handing_on(__name__)
