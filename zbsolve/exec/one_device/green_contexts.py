"""One GPU's multiprocessors in disjoint parts, a stream each: green contexts of the CUDA driver (12.4 and later).

The device's SMs are split once, into as many groups as there are ranks; splitting again for each part would give parts that
overlap. The parts still share memory bandwidth, L2, copy engines and power. See "Green Contexts" in the CUDA driver API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...util.errors import BadInput
from ..transport.failure import RunFailed
from .streams import Work

# Compute capability → least SMs of a part, and what it is a multiple of, where the driver does not say (before CUDA 13).
PART_RULES = {6: (1, 1), 7: (2, 2), 8: (4, 2)}
NEWER_RULE = (8, 8)


class Launch:
    """The events around one launch."""

    __slots__ = ("end", "start")

    def __init__(self) -> None:
        self.start, self.end = timed_event(), timed_event()


def timed_event() -> Any:
    """A CUDA event that knows when it happened."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class GreenContexts:
    """`Streams` on a CUDA device: a part of its SMs and a stream for each rank. One host thread launches. sms: of each part.

    number: the device's. driver: `cuda.bindings.driver`, or what stands in for it. Raises BadInput where there is no such
    device, or it has too few SMs; RunFailed where the driver refuses.
    """

    def __init__(self, ranks: int, number: int = 0, driver: Any = None) -> None:
        self._driver = cuda_driver() if driver is None else driver
        self.device = torch.device("cuda", number)
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize()  # the device's primary context exists from here on
        name = torch.cuda.get_device_name(self.device)
        major = torch.cuda.get_device_capability(self.device)[0]
        self._contexts, handles, self.sms = split_device(self._driver, ranks, number, major)
        self._streams = [torch.cuda.ExternalStream(handle, self.device) for handle in handles]  # type: ignore[no-untyped-call]
        self._zero: Any = None
        self.facts: dict[str, Any] = {"streams": "cuda green contexts", "device": name, "sms": list(self.sms)}

    def begin(self) -> None:
        """Time 0 is when everything before has ended; no stream starts before."""
        self._zero = timed_event()
        torch.cuda.synchronize(self.device)
        self._zero.record()
        for stream in self._streams:
            stream.wait_event(self._zero)

    def launch(self, rank: int, work: Work, after: Sequence[Launch] = ()) -> Launch:
        """Run `work` now, on the host. What it puts on the current stream runs on the rank's."""
        launch, stream = Launch(), self._streams[rank]
        for one in after:
            stream.wait_event(one.end)
        with torch.cuda.stream(stream):
            launch.start.record(stream)
            work()
            launch.end.record(stream)
        return launch

    def hold(self, rank: int, tensor: Tensor) -> None:
        """Let the allocator wait for this stream too."""
        tensor.record_stream(self._streams[rank])

    def finish(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def span(self, launch: Launch) -> tuple[float, float]:
        """When a launch began and ended by the device's clock, µs since the step began."""
        return self._zero.elapsed_time(launch.start) * 1000, self._zero.elapsed_time(launch.end) * 1000


def cuda_driver() -> Any:
    """`cuda.bindings.driver`. Raises BadInput where it or a device is missing."""
    if not torch.cuda.is_available():
        raise BadInput("one device: torch sees no CUDA device here (cpu works anywhere, but overlaps nothing)")
    try:
        from cuda.bindings import driver
    except ImportError:
        raise BadInput("one device: cuda.bindings is missing: install zbsolve[cuda]") from None
    return driver


def split_device(driver: Any, ranks: int, device: int, major: int) -> tuple[list[Any], list[int], tuple[int, ...]]:
    """Green contexts, streams' handles and SMs of `ranks` disjoint parts of equal size. major: of the device's compute
    capability. Raises BadInput, RunFailed."""

    def call(name: str, *arguments: Any) -> Any:
        status, *result = getattr(driver, name)(*arguments)
        if int(status) != 0:
            raise RunFailed(f"one device: {name}: {getattr(status, 'name', status)}")
        return result[0] if len(result) == 1 else result

    call("cuInit", 0)
    handle = call("cuDeviceGet", device)
    whole = call("cuDeviceGetDevResource", handle, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    size = sms_a_part(whole.sm.smCount, ranks, *_part_rule(whole.sm, major))
    groups, made, _ = call("cuDevSmResourceSplitByCount", ranks, whole, 0, size)
    if int(made) != ranks:
        raise RunFailed(f"one device: cuDevSmResourceSplitByCount made {made} parts of {size} SMs, not {ranks}")
    contexts, handles = [], []
    for group in groups[:ranks]:
        description = call("cuDevResourceGenerateDesc", [group], 1)
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        contexts.append(call("cuGreenCtxCreate", description, handle, flags))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        handles.append(int(call("cuGreenCtxStreamCreate", contexts[-1], flags, 0)))
    return contexts, handles, tuple(int(group.sm.smCount) for group in groups[:ranks])


def sms_a_part(sms: int, ranks: int, least: int, multiple: int) -> int:
    """SMs of each of `ranks` equal parts: as many as `sms` allow, a multiple of `multiple`, at least `least`. Raises
    BadInput."""
    size = sms // ranks // multiple * multiple
    if size < least:
        raise BadInput(f"one device: {sms} SMs do not make {ranks} parts of at least {least}")
    return size


def _part_rule(sm: Any, major: int) -> tuple[int, int]:
    """The least SMs of a part, and what they are a multiple of."""
    least, multiple = (getattr(sm, field, 0) for field in ("minSmPartitionSize", "smCoscheduledAlignment"))
    return (int(least), int(multiple)) if least and multiple else PART_RULES.get(major, NEWER_RULE)
