"""Small profiles by hand."""

from __future__ import annotations

from zbsolve import Layer, Link, Profile


def toy_profile() -> Profile:
    """Four layers that take longer and longer, with half µs, on a device of 10,000 bytes."""
    layers = tuple(Layer(f"layer{i}", 10.5 + i, 9.0, 8.0, 16.0, 100, 50, 1000, 40) for i in range(4))
    return Profile("measured", "toy", layers, Link(3.0, 20.0), 4.0, 10_000, {"host": "here"}, {"layer0/F": [10.0, 11.0]})


def equal_layers(count: int = 8, parameter_bytes: int = 0) -> Profile:
    """So many equal layers, messages without length, no limit of memory."""
    layers = tuple(Layer(f"layer{i}", 10, 12, 8, 20, 100, 50, parameter_bytes, 0) for i in range(count))
    return Profile("estimated: by hand", "toy", layers, Link(0.0, 1000.0), 4.0, None, {}, {})
