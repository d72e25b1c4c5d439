"""An estimate for pipeline ranks of several devices each, which share every layer: tensor parallelism with sequences split
between its regions too (Korthikanti et al., 2205.05198, section 4.2.2). Nothing of it was measured."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from zbsolve.features.slices import SIZES
from zbsolve.layer import HostLink, Layer, Link
from zbsolve.planner.profiled_model import TENSOR_RANKS
from zbsolve.profile.profile import Profile
from zbsolve.util.errors import BadInput

from .devices import LATENCY_US, LINK_SHARE, Device

# All-gathers and reduce-scatters of hidden states: a block has two regions that are split, attention and MLP, each with one
# of both in F and in B; W gathers its inputs again. Other layers with parameters have one region.
BLOCK = {"F": 4, "B": 4, "W": 2, "BW": 6, "X": 4}
OTHER = {"F": 1, "B": 1, "W": 1, "BW": 2, "X": 1}


def over_tensor_ranks(profile: Profile, ranks: int, on: Device) -> Profile:
    """The profile of one device, where each rank of the pipeline is `ranks` of them in one node.

    Times, parameters, what layers keep and messages (each device sends its part) are divided; each pass gathers and scatters
    hidden states beside, at the links' share of the peak, with nothing else running. A gathered input takes memory while a
    pass runs. Where ranks fill a node, messages take its network. Raises BadInput for more than a node has, and where no
    layer has causal attention, by which blocks are known.
    """
    if ranks == 1:
        return profile
    node = on.node[0]
    if node % ranks:
        raise BadInput(f"--mesh: tp is {ranks}, and a node of {on.name} has {node} devices, which it must divide")
    if not any(layer.attention_F for layer in profile.layers):
        raise BadInput("--mesh: the estimate knows no causal attention, so not what tensor ranks send each other")
    link = Link(LATENCY_US, on.link * 1e3 * LINK_SHARE)
    inputs = [profile.layers[0], *profile.layers[:-1]]
    layers = [_part(layer, before.output_bytes, ranks, link) for layer, before in zip(profile.layers, inputs, strict=True)]
    return replace(
        profile,
        source=f"{profile.source}, {ranks} tensor ranks",
        layers=tuple(layers),
        link=profile.link if ranks < node else Link(LATENCY_US, on.network * 1e3 * LINK_SHARE),
        facts={**profile.facts, TENSOR_RANKS: ranks},
        tied=tuple((ceil(size / ranks), group) for size, group in profile.tied),
        host=None if profile.host is None else _host(profile.host, ranks, node),
    )


def _part(layer: Layer, given: int, ranks: int, link: Link) -> Layer:
    """A device's part of a layer whose input has `given` bytes."""
    hidden = max(given, layer.output_bytes)
    turn = link.time(hidden * (ranks - 1) / ranks)
    turns = BLOCK if layer.attention_F else OTHER if layer.parameter_bytes else {}
    times = {kind: getattr(layer, kind) / ranks + turn * turns.get(kind, 0) * bool(getattr(layer, kind)) for kind in OTHER}
    sizes = {
        name: ceil(getattr(layer, name) / ranks)
        for name in (*SIZES, "parameter_bytes", "frozen_bytes", "kv_bytes", "kv_gradient_bytes")
    }
    sizes["transient"] += hidden if turns else 0
    rest = {name: getattr(layer, name) / ranks for name in ("U", "attention_F", "attention_B")}
    return replace(layer, **{name: round(time, 3) for name, time in (times | rest).items()}, **sizes)


def _host(host: HostLink, ranks: int, node: int) -> HostLink:
    """A rank's devices copy at once, each its part, into its part of the node's memory."""
    return replace(host, ranks=node // ranks, memory=None if host.memory is None else host.memory // ranks)
