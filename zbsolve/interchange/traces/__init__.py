"""Measured runs of other engines: a reader a format gives a `Recording`; one function makes a `Trace` of any of them."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .reading import others_trace as others_trace
    from .reading import read_trace as read_trace
    from .recording import RanPass as RanPass
    from .recording import RecordedStep as RecordedStep
    from .recording import Recording as Recording
    from .to_trace import trace_of as trace_of

__getattr__, __dir__ = handing_on(__name__)
