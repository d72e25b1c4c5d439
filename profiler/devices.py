"""Devices for estimates: peaks as published by their makers, dense (without sparsity), each with its source; and what the
local GPU reports about itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zbsolve.partition.layer import HostLink
from zbsolve.planner.cluster import HOST_BOTH_SHARE, HOST_MEMORY_SHARE, NODE, Sheet, sheets
from zbsolve.util.errors import BadInput
from zbsolve.util.text import did_you_mean

from .timing import Clock


@dataclass(frozen=True, slots=True)
class Device:
    """A device's peaks. half, single: TFLOP/s of matrix products in 16 bits (bfloat16, float16) and in float32 (without
    TF32, torch's default). bandwidth: of memory, GB/s. memory: GB, taken as 10⁹ bytes; the devices report some 6 % more (an
    H200 139 GiB), which the driver, fragmentation and NCCL use. link: GB/s to a neighbour in one direction; network: to
    another node; host: to host memory. node: devices per node, and GB of its host memory (None: unknown). source: where the
    numbers are published."""

    name: str
    half: float
    single: float
    bandwidth: float
    memory: float
    link: float
    network: float
    host: float
    node: tuple[int, float | None]
    source: str


def _device(row: Sheet) -> Device:
    each = {what: number or 0.0 for what, number in row.numbers.items()}
    half, single, bandwidth, memory = (each[what] for what in ("tflops", "single", "hbm", "memory"))
    link, network, host = (each[what] for what in ("link", "card", "pcie"))
    node, source = (NODE, row.numbers["host_memory"]), f"{row.sheet}; {row.device}"
    return Device(row.name, half, single, bandwidth, memory, link, network, host, node, source)


DEVICES = {row.name: _device(row) for row in sheets()}

# Fitted to passes of a GPT's block, a Llama's, a head and an embedding in bfloat16 on one H200 at its power limit: its clock
# stood at 1.25 to 1.71 of 1.98 GHz (benchmarks/results/gpu_roofline.json). An H100 is the same chip with the same limit; its
# passes there were no part of the fit. For other cards the shares are guesses, but for an A100's products: W passes in
# Table 9 of 2401.10241, which are products alone, reach 251 of 312 TFLOP/s. (2307.08691, abstract: fused attention reaches
# 50 to 73 % of an A100.)
MATRIX_SHARE = 0.73
MATRIX_SHARES = {"a100": 0.8}
ATTENTION_SHARE = 0.5  # behind the time that its memory traffic takes
MEMORY_SHARE = 0.75
SCATTERED_SHARE = 0.3  # of kernels that go through memory element by element
KERNEL_US = 3.0
# Assumptions, not measurements: round numbers.
LINK_SHARE = 0.8
HOST_SHARE = 0.8  # copies one way
LATENCY_US = 10.0


def matrix_share(on: Device) -> float:
    """What large products reach of the device's peak."""
    return MATRIX_SHARES.get(on.name, MATRIX_SHARE)


def assumed(on: Device) -> str:
    """For a message: the shares of the peaks that estimates assume, and where these come from."""
    products = "as published for it" if on.name in MATRIX_SHARES else "fitted"
    return (
        f"shares fitted to passes measured on an H200 at its power limit, assumed for devices other than it and an H100: "
        f"matrix products at {matrix_share(on):.0%} of peak ({products}), fused attention at {ATTENTION_SHARE:.0%} behind "
        f"its memory traffic, memory at {MEMORY_SHARE:.0%} and at {SCATTERED_SHARE:.0%} element by element, no kernel under "
        f"{KERNEL_US:g} µs; assumed: links at {LINK_SHARE:.0%} and {LATENCY_US:g} µs; copies to host memory at "
        f"{HOST_SHARE:.0%} of PCIe one way, at {HOST_BOTH_SHARE:.0%} each way at once, into {HOST_MEMORY_SHARE:.0%} of that "
        f"memory; nothing fused but norms and attention; kernels run one after the other, and the host is never late"
    )


def device(name: str) -> Device:
    """A device by name. Raises BadInput, which suggests similar names."""
    if name in DEVICES:
        return DEVICES[name]
    raise BadInput(f"device '{name}': unknown{did_you_mean(name, DEVICES)} (devices: {', '.join(DEVICES)})")


def host_link(on: Device) -> HostLink:
    """Copies between the device and its node's host memory, where every device is a rank with its own bus."""
    ranks, memory = on.node
    alone, both = (on.host * 1e3 * share for share in (HOST_SHARE, HOST_BOTH_SHARE))
    room = None if memory is None else int(memory * 1e9 * HOST_MEMORY_SHARE)
    return HostLink(LATENCY_US, alone, alone, both, both, room, ranks)


def cache_bytes(device: torch.device) -> int:
    """Bytes of a GPU's L2 cache; 0 on a CPU, where passes are timed with whatever is in its caches."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def clock_of(device: torch.device) -> Clock:
    """A function that reads a GPU's SM clock, MHz, without changing it. It returns None on a CPU, and if NVIDIA's management
    library is missing (nvidia-ml-py, in zbsolve[cuda])."""

    def read() -> int | None:
        try:
            return torch.cuda.clock_rate(device)
        except Exception:  # the library has a separate error for each reason
            return None

    return read if device.type == "cuda" else lambda: None
