"""One GPU's multiprocessors in disjoint parts, a stream each: green contexts of the CUDA driver (12.4 and later).

The device's SMs are split once, into as many groups as there are ranks; splitting again for each part would give parts
that overlap. What the parts still share: memory bandwidth, L2, copy engines, power. CUDA driver API, "Green Contexts".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import BadInput
from .failure import RunFailed
from .streams import Work

# Compute capability → least SMs of a part, and what it is a multiple of, where the driver does not say (before CUDA 13).
STEPS = {6: (1, 1), 7: (2, 2), 8: (4, 2)}
NEWER = (8, 8)


class Launch:
    """Events around one launch."""

    __slots__ = ("end", "start")

    def __init__(self) -> None:
        self.start, self.end = timed_event(), timed_event()


def timed_event() -> Any:
    """A CUDA event that knows when it happened."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Partitions:
    """`Streams` on a CUDA device: a part of its SMs and a stream for each rank. One host thread launches.

    driver: `cuda.bindings.driver`, or what stands in for it. Raises BadInput where there is no such device, or too few
    SMs; RunFailed where the driver refuses.
    """

    def __init__(self, ranks: int, device: int = 0, driver: Any = None) -> None:
        self._driver = cuda_driver() if driver is None else driver
        self._device = torch.device("cuda", device)
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize()  # the device's primary context exists from here on
        name = torch.cuda.get_device_name(self._device)
        major = torch.cuda.get_device_capability(self._device)[0]
        self._contexts, handles, self.sms = split(self._driver, ranks, device, major)
        self._streams = [torch.cuda.ExternalStream(handle, self._device) for handle in handles]  # type: ignore[no-untyped-call]
        self._zero: Any = None
        self.facts: dict[str, Any] = {"streams": "cuda green contexts", "device": name, "sms": list(self.sms)}

    def begin(self) -> None:
        """Time 0: when everything before has ended; no stream starts before."""
        self._zero = timed_event()
        torch.cuda.synchronize(self._device)
        self._zero.record()
        for stream in self._streams:
            stream.wait_event(self._zero)

    def launch(self, rank: int, work: Work, after: Sequence[Launch] = ()) -> Launch:
        """`work` runs now, on the host; what it puts on the current stream runs on the rank's."""
        launch, stream = Launch(), self._streams[rank]
        for one in after:
            stream.wait_event(one.end)
        with torch.cuda.stream(stream):
            launch.start.record(stream)
            work()
            launch.end.record(stream)
        return launch

    def hold(self, rank: int, tensor: Tensor) -> None:
        """The allocator waits for this stream too."""
        tensor.record_stream(self._streams[rank])

    def finish(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def span(self, launch: Launch) -> tuple[float, float]:
        """By the device's clock."""
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


def split(driver: Any, ranks: int, device: int, major: int) -> tuple[list[Any], list[int], tuple[int, ...]]:
    """Green contexts, streams' handles and SMs of `ranks` disjoint parts of equal size.

    `major`: of the device's compute capability. Raises BadInput, RunFailed.
    """

    def call(name: str, *arguments: Any) -> Any:
        status, *result = getattr(driver, name)(*arguments)
        if int(status) != 0:
            raise RunFailed(f"one device: {name}: {getattr(status, 'name', status)}")
        return result[0] if len(result) == 1 else result

    call("cuInit", 0)
    handle = call("cuDeviceGet", device)
    whole = call("cuDeviceGetDevResource", handle, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    size = share(whole.sm.smCount, ranks, *_steps(whole.sm, major))
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


def share(sms: int, ranks: int, least: int, multiple: int) -> int:
    """SMs of each of `ranks` equal parts: as many as there are, in whole multiples. Raises BadInput."""
    size = sms // ranks // multiple * multiple
    if size < least:
        raise BadInput(f"one device: {sms} SMs do not make {ranks} parts of at least {least}")
    return size


def _steps(sm: Any, major: int) -> tuple[int, int]:
    """The least size of a part, and what it is a multiple of."""
    least, multiple = (getattr(sm, field, 0) for field in ("minSmPartitionSize", "smCoscheduledAlignment"))
    return (int(least), int(multiple)) if least and multiple else STEPS.get(major, NEWER)
