"""What every other package uses: errors, files, text, statistics, clocks, threads, kernels, the machine."""

from typing import TYPE_CHECKING

from .lazy import handing_on

if TYPE_CHECKING:
    from .clock import Clock as Clock
    from .errors import BadInput as BadInput
    from .errors import Deadlock as Deadlock
    from .errors import Infeasible as Infeasible
    from .errors import NotFound as NotFound
    from .errors import WrongBound as WrongBound
    from .errors import ZbsolveError as ZbsolveError
    from .kernels import kernel as kernel
    from .machine import run_threads as run_threads

__getattr__, __dir__ = handing_on(__name__)
