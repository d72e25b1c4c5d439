"""What layers of a profile keep for their backward, as people who train long contexts have it: all, all that is dear to
make again (selective), or their inputs (full). What is made again is part of the backward, layer by layer, as Megatron
runs it (Korthikanti et al., 2205.05198); a stage's pass X in zbsolve's own steps makes a whole stage again. The head keeps
its input but for "all": logits of a long sequence are larger than all else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zbsolve.layer import Layer
from zbsolve.profile import Profile


def _all(layer: Layer, given: int) -> Layer:
    return layer


def _selective(layer: Layer, given: int) -> Layer:
    """Of a block its input, attention's output, as large, and keys and values; attention is not made again."""
    return _again(layer, 2 * given, layer.X - layer.attention_F) if layer.attention_F else _full(layer, given)


def _full(layer: Layer, given: int) -> Layer:
    """Of a block its input, and, for later slices, keys and values."""
    again = replace(layer, attention_B=layer.attention_B + layer.attention_F)
    return _again(again, given, layer.X) if layer.held_until_B else layer


def _again(layer: Layer, kept: int, time: float) -> Layer:
    """A layer that keeps `kept` bytes, and keys and values, and takes `time` µs to make the rest again."""
    held = layer.held_until_B + layer.held_until_W
    return replace(
        layer,
        B=layer.B + time,
        BW=layer.BW + time,
        held_until_B=kept + layer.kv_bytes,
        held_until_W=0,
        held_from_B=layer.held_from_B + layer.held_until_W,
        transient=layer.transient + held,
        output_kept=0,
        input_unneeded=0,
    )


WAYS: dict[str, Callable[[Layer, int], Layer]] = {"all": _all, "selective": _selective, "full": _full}


def keeping(profile: Profile, way: str) -> Profile:
    """The profile whose layers keep what this way says."""
    inputs = [0, *(layer.output_bytes for layer in profile.layers[:-1])]
    layers = tuple(WAYS[way](layer, given) for layer, given in zip(profile.layers, inputs, strict=True))
    return replace(profile, layers=layers)
