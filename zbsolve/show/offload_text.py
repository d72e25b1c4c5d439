"""Copies to host memory, in words: how fast they are, and what of the activations they take beside computing."""

from __future__ import annotations

from dataclasses import replace

from ..layer import HostLink
from ..profile.profile import Profile
from ..step import Step
from ..util.text import format_bytes


def host_lines(profile: Profile, ranks: int | None) -> list[str]:
    """Copies to host memory in a line, and what of the activations they can offload on so many ranks; none where the
    profile knows no host link."""
    host = profile.host
    if host is None:
        return []
    alone, both = (f"{down / 1e3:.1f} GB/s and back at {up / 1e3:.1f}" for down, up in _host_rates(host))
    room = "" if host.memory is None else f", into {format_bytes(host.memory)} a node"
    line = f"a copy to host memory takes {host.latency:.0f} µs and its bytes at {alone}, at {both} both ways at once{room}"
    if ranks is None:
        profile = replace(profile, rank_factors=())  # which are of another number of ranks
    step = Step(ranks or min(max(1, host.shared_bus), len(profile.layers)), 1, partition="balanced")
    ratio = step.copy_ratio(profile)
    where = "of all layers together" if ranks is None else f"of {ranks} balanced stages"
    return [line, *([] if ratio is None else [copies_in_words(ratio, where)])]


def _host_rates(host: HostLink) -> tuple[tuple[float, float], tuple[float, float]]:
    return (host.d2h, host.h2d), (host.d2h_both, host.h2d_both)


def copies_in_words(ratio: float, where: str) -> str:
    """What k = T_offload / T_compute lets one offload beside computing (PipeOffload, arXiv 2503.01328): all up to 1, half
    below 2. where: of which layers or stages; on stages that differ the busiest rank and copy stream count, so that k is
    another than that of all layers together."""
    k = f"offload: {where}, copies of all activations take k = {ratio:.2f} times as long as computing"
    if ratio <= 1:
        return f"{k}: all fits beside it"
    return f"{k}: {1 / ratio:.0%} of them fits beside it{', more than half' if ratio < 2 else ''}"
