"""A whole job: ranks are started, train a model by name, and leave a trace."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .job import Options as Options
    from .job import run_on_one_device as run_on_one_device
    from .launch import run_local as run_local
    from .torchrun import run_torchrun as run_torchrun

__getattr__, __dir__ = handing_on(__name__)
