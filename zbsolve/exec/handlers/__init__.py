"""One handler a kind of pass: everything that the executor knows of it. `HANDLERS` is the table."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .handler import Data as Data
    from .handler import Handler as Handler
    from .handler import RankState as RankState
    from .table import HANDLERS as HANDLERS

__getattr__, __dir__ = handing_on(__name__, {"handler": "Data Handler RankState", "table": "HANDLERS"})
