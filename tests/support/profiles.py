"""Small profiles by hand."""

from __future__ import annotations

from dataclasses import replace

from zbsolve import HostLink, Layer, Link, Profile
from zbsolve.profile import ShardCosts, ShardPasses, VocabularyCosts

# What every feature needs is known: causal attention, a vocabulary, links to host memory and of a data-parallel group.
BLOCK = Layer("block", 160, 240, 96, 320, 120, 80, 50, 64, attention_F=64, attention_B=128, kv_bytes=40)
SHARD = ShardPasses(40, 20, 48)
COSTS = VocabularyCosts("given", 64, 8, 2, 7, replace(BLOCK, parameter_bytes=4), (ShardCosts(2, SHARD, SHARD, 400),))
PROFILE = Profile(
    "given", "long", (BLOCK,) * 8, Link(2.0, 8.0), 4.0, None, {"sequence": 64}, {}, host=HostLink(1.0, 8.0, 8.0, 8.0, 8.0),
    vocabulary=COSTS, shard_link=Link(1.0, 16.0),
)  # fmt: skip


def toy_profile() -> Profile:
    """Four layers that take longer and longer, with half µs, on a device of 10,000 bytes."""
    layers = tuple(Layer(f"layer{i}", 10.5 + i, 9.0, 8.0, 16.0, 100, 50, 1000, 40) for i in range(4))
    return Profile("measured", "toy", layers, Link(3.0, 20.0), 4.0, 10_000, {"host": "here"}, {"layer0/F": [10.0, 11.0]})


def equal_layers(count: int = 8, parameter_bytes: int = 0) -> Profile:
    """So many equal layers, messages without length, no limit of memory."""
    layers = tuple(Layer(f"layer{i}", 10, 12, 8, 20, 100, 50, parameter_bytes, 0) for i in range(count))
    return Profile("estimated: by hand", "toy", layers, Link(0.0, 1000.0), 4.0, None, {}, {})
