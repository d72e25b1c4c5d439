"""What a person should know of a measurement before relying on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from zbsolve.layer import Layer
from zbsolve.profile.doubtful import split_doubts

HOST_SHARE = {"cpu": 0.5, "cuda": 0.9}  # of a pass, from which on the host is late
MAX_DRIFT = 0.05
MAX_IDLE = 0.05
DISTURBED = "disturbed:"  # so begins what says that times are not to be trusted


def warnings(
    layers: Sequence[Layer],
    samples: Mapping[str, Sequence[float]],
    hosts: Mapping[str, float],
    whole: Sequence[float],
    idle: float,
    device: str,
    clocks: Sequence[int] = (),
) -> list[str]:
    """A line for each warning. samples: "<layer>/<kind>" → µs; hosts: the same of the host. whole: µs of whole rounds, in
    order. idle: part of the time in which this process waited for a core. clocks: the device's meanwhile, MHz."""
    found = split_doubts(layers)
    if sum(layer.W for layer in layers) < 0.05 * sum(layer.BW for layer in layers):
        found.append(
            "W does next to nothing: the weight gradients are made in B, by layers that are no linear layers, embeddings or "
            "convolutions, or that were compiled; a zero-bubble schedule cannot pay"
        )
    return [*found, *_host(samples, hosts, device), *_disturbed(whole, idle, device, clocks)]


def _host(samples: Mapping[str, Sequence[float]], hosts: Mapping[str, float], device: str) -> list[str]:
    """On a GPU the host may take as long as the device; on a CPU much of a pass may compute nothing."""
    limit = HOST_SHARE[device]
    shares = [(host / max(median(samples[key]), 1e-9), key) for key, host in hosts.items() if key in samples and host]
    late = [row for row in shares if hosts[row[1]] >= limit * median(samples[row[1]])]
    if not late:
        return []
    worst, key = max(late)
    what = "launching takes as long as computing" if device == "cuda" else "half of the time or more computes nothing"
    return [
        f"host-bound: {what} in {len(late)} of {len(samples)} kinds of pass, most in {key} ({worst:.0%}): larger passes win"
    ]


def _disturbed(whole: Sequence[float], idle: float, device: str, clocks: Sequence[int]) -> list[str]:
    found = []
    half = len(whole) // 2
    if half >= 3:
        before, after = median(whole[:half]), median(whole[half:])
        if abs(after - before) > MAX_DRIFT * before:
            found.append(
                f"{DISTURBED} the second half of the rounds took {after / before - 1:+.0%}: "
                "the clock or another process changed"
            )
    if idle > MAX_IDLE and device == "cpu":
        found.append(f"{DISTURBED} this process waited for a core {idle:.0%} of the time: another one was busy")
    if clocks and max(clocks) - min(clocks) > MAX_DRIFT * max(clocks):
        found.append(
            f"{DISTURBED} the device's clock moved between {min(clocks):,} and {max(clocks):,} MHz: power or heat; longer "
            "runs see the clock that training will have"
        )
    return found
