"""The old place of `zbsolve.preset`, for scripts written before it moved to `zbsolve.systems`."""

from ..util.lazy import handing_on

__getattr__, __dir__ = handing_on("zbsolve", {"systems": "PRESETS preset"})
