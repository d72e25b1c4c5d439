"""What a layer costs, and the link between two ranks: what a profile is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Tied = tuple[tuple[int, tuple[int, ...]], ...]  # bytes of a parameter that several layers hold, and their numbers


@dataclass(frozen=True, slots=True)
class Layer:
    """Costs of one layer for one microbatch: median µs of F, B (input gradient), W (weight gradient), BW (both fused);
    bytes that F keeps until the end of B and of W; bytes of parameters and of the output (the message).

    held_from_B: bytes that B keeps until the end of W, beyond what it frees. X: µs of recomputing the forward; U: of the
    optimizer's update, once a step; 0 where unknown. transient: bytes that a pass takes on top of what is kept before or
    after it. output_kept: bytes of the output that the layer itself keeps; input_unneeded: bytes of its input that are
    kept only where it is the first layer of a stage. all_to_all: µs that expert parallelism sends behind F, and as many
    behind the backward, beside computation (no profiler measures it: it is a matter of the cluster, for you to fill in).
    message: µs of the output's message where somebody gave it; 0: what the link takes for its bytes.
    """

    name: str
    F: float
    B: float
    W: float
    BW: float
    held_until_B: int
    held_until_W: int
    parameter_bytes: int
    output_bytes: int
    held_from_B: int = 0
    X: float = 0.0
    U: float = 0.0
    transient: int = 0
    output_kept: int = 0
    input_unneeded: int = 0
    all_to_all: float = 0.0
    message: float = 0.0

    @property
    def work(self) -> float:
        """µs of one microbatch with a split backward; with a fused one where nothing else is known."""
        return self.F + (self.B + self.W or self.BW)


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two ranks: µs = latency + bytes / bytes_per_us. blocking: a message occupies its sender's compute
    stream meanwhile (see `pipeline`)."""

    latency: float
    bytes_per_us: float
    blocking: bool = False

    def time(self, size: float) -> float:
        """µs for one message of `size` bytes."""
        return self.latency + size / self.bytes_per_us

    def message(self, layer: Layer) -> float:
        """µs for the message of a layer's output."""
        return layer.message or self.time(layer.output_bytes)


NO_LINK = Link(0.0, 1e12)  # messages take no time but what layers say


def split_known(layers: Sequence[Layer]) -> bool:
    """Whether B and W are known apart; else there is one backward BW alone."""
    return any(layer.B or layer.W for layer in layers)


def layer_cuts(counts: Sequence[int]) -> list[int]:
    """Before which layer each stage begins, from how many layers each stage has; and how many there are."""
    return list(accumulate(counts, initial=0))


def layer_ranges(counts: Sequence[int]) -> list[range]:
    """The numbers of each stage's layers, from how many layers each stage has."""
    return [range(a, b) for a, b in pairwise(layer_cuts(counts))]
