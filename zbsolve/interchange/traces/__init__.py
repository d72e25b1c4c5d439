"""Measured runs of other engines: a reader a format gives a `Recording`; one function makes a `Trace` of any of them."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .reading import read_trace as read_trace

__getattr__, __dir__ = handing_on(__name__)
