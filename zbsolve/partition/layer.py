"""The parts of a profile: costs of a layer, the link between two ranks, and the link to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..problem.placement import PAIR, RANK, sites_in
from ..util.errors import BadInput

Tied = tuple[tuple[int, tuple[int, ...]], ...]  # bytes of each parameter that several layers share, and those layers
Line = tuple[float, float]  # a value for the first slice, and its growth with each slice before


@dataclass(frozen=True, slots=True)
class SliceExtra:
    """µs that a slice takes beyond its share of the whole sequence, measured with `number` slices; below 0 it takes less,
    such as where a cache holds a slice but not the whole sequence. Raises BadInput for a number below 2."""

    number: int
    F: Line = (0.0, 0.0)
    B: Line = (0.0, 0.0)
    W: Line = (0.0, 0.0)
    BW: Line = (0.0, 0.0)

    def __post_init__(self) -> None:
        if self.number < 2:
            raise BadInput(f"field 'number' is {self.number}: at least 2 slices are needed")


INPUTS, TARGETS = "inputs", "targets"  # parts of the batch: any layer may take them, and no layer gives them


class Names(NamedTuple):
    """The names of side inputs that a layer gives and takes, and whether it begins a row of layers (takes the batch)."""

    gives: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    begins: bool = False


class Given(NamedTuple):
    """A side input that a layer gives."""

    name: str
    bytes: int  # of one microbatch
    gradient: bool = True  # whether a gradient comes back
    kept: int = 0  # bytes that the giving layer, or the batch, holds until the layer's backward anyway


@dataclass(frozen=True, slots=True)
class Layer:
    """Costs of one layer for one microbatch; 0 where unknown.

    name: as tables print it.
    F, B, W, BW: median µs of the forward, the input gradient, the weight gradient, and both fused.
    held_until_B, held_until_W: bytes that F keeps until the end of B and of W.
    parameter_bytes: bytes of its parameters.
    output_bytes: bytes of its output, the message.
    held_from_B: bytes that B keeps until the end of W, beyond what B frees.
    X: µs of recomputing the forward.
    U: µs of the optimizer's update, once a step.
    transient: bytes that a pass takes for a moment, on top of what is kept before and after it.
    output_kept: bytes of the output that the layer itself keeps.
    input_unneeded: bytes of its input that are kept only if it is the first layer of a stage.
    all_to_all: µs of expert parallelism's messages behind F, and the same behind the backward; not measured: fill it in.
    message: µs of the output's message, if given; 0: what the link takes for its bytes.
    attention_F, attention_B: µs of causal attention itself, without projections, in F and in the backward (B or BW).
        Sequence slices need them, and kv_bytes.
    kv_bytes: bytes of keys and values, among those that F keeps.
    kv_gradient_bytes: bytes of their gradients, as slices sum them up (in float32 if keys have 16 bits); 0: as kv_bytes.
    slice_extra: µs that slices take beyond their share of the whole sequence.
    frozen_bytes: bytes of parameters that are not trained: they have no gradient and no optimizer state.
    buffer_bytes: bytes of its buffers in a state dict, such as 8-bit weights. Sharding does not split them.
    gives, takes: side inputs that it makes beside its output, and names of those that it takes beside its input. Bytes held
        do not contain them, except what it keeps of those it gives: a rank holds each once, however many layers take it.
    begins: whether it takes the batch and not the output of the layer before.
    fixed_F, fixed_B, fixed_W, fixed_BW: µs of these passes that do not depend on how many sequences or tokens there are.
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
    attention_F: float = 0.0
    attention_B: float = 0.0
    kv_bytes: int = 0
    kv_gradient_bytes: int = 0
    slice_extra: SliceExtra | None = None
    frozen_bytes: int = 0
    buffer_bytes: int = 0
    gives: tuple[Given, ...] = ()
    takes: tuple[str, ...] = ()
    begins: bool = False
    fixed_F: float = 0.0
    fixed_B: float = 0.0
    fixed_W: float = 0.0
    fixed_BW: float = 0.0

    @property
    def names(self) -> Names:
        """The names of its side inputs, and `begins`."""
        return Names(tuple(given.name for given in self.gives), self.takes, self.begins)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that are trained."""
        return self.parameter_bytes - self.frozen_bytes

    @property
    def work(self) -> float:
        """µs of one microbatch: F + B + W, or F + BW if B and W are not known."""
        return self.F + (self.B + self.W or self.BW)


MIN_BANDWIDTH = 1e-9  # bytes a µs


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two ranks: µs = latency + bytes / bytes_per_us.

    latency: µs.
    bytes_per_us: bytes a µs.
    blocking: whether a message occupies its sender's compute stream (see `pipeline`).
    shared: which messages share a link, so that their bytes go one after the other in each direction: "rank": those of a
        rank, "pair": those between two ranks, "4+4": those between sites of so many ranks, "": none (`build.with_links`).

    Raises BadInput for other words, and for a bandwidth of nothing.
    """

    latency: float
    bytes_per_us: float
    blocking: bool = False
    shared: str = ""

    def __post_init__(self) -> None:
        if self.bytes_per_us < MIN_BANDWIDTH:
            raise BadInput(f"field 'bytes_per_us' is {self.bytes_per_us:g}")
        if self.shared not in ("", RANK, PAIR):
            sites_in(self.shared)

    def time(self, size: float) -> float:
        """µs for one message of `size` bytes."""
        return self.latency + size / self.bytes_per_us

    def message(self, layer: Layer) -> float:
        """µs for the message of a layer's output."""
        return layer.message or self.time(layer.output_bytes)

    def part_of(self, time: float, share: float) -> float:
        """µs of a part of a message that took `time` as a whole: the latency is not reduced."""
        return min(time, self.latency + max(0.0, time - self.latency) * share)


NO_LINK = Link(0.0, 1e12)  # messages take no time, except where a layer's field `message` says so


@dataclass(frozen=True, slots=True)
class HostLink:
    """Copies between a rank's device and its node's host memory: µs = latency + bytes / bandwidth.

    latency: µs.
    d2h, h2d: bytes a µs to the host and back, with nothing in the other direction.
    d2h_both, h2d_both: the same while both directions run at once.
    memory: bytes of a node's host memory for activations; None: no limit.
    ranks: ranks of the pipeline on one node; None: all.
    shared_bus: how many neighbouring ranks share a bus that runs one copy at a time; 0: each rank copies both ways at once.

    Raises BadInput for numbers that make no sense.
    """

    latency: float
    d2h: float
    h2d: float
    d2h_both: float
    h2d_both: float
    memory: int | None = None
    ranks: int | None = None
    shared_bus: int = 0

    def __post_init__(self) -> None:
        for name in ("d2h", "h2d", "d2h_both", "h2d_both"):
            if not getattr(self, name) >= MIN_BANDWIDTH:
                raise BadInput(f"host: bandwidth '{name}' is {getattr(self, name):g} bytes a µs: more than 0 is needed")
        if not self.latency >= 0:
            raise BadInput(f"host: latency is {self.latency:g} µs: it cannot be negative")
        if self.memory is not None and self.memory < 1:
            raise BadInput(f"host: memory is {self.memory} bytes: more than 0 is needed (leave it out for no limit)")
        if self.ranks is not None and self.ranks < 1:
            raise BadInput(f"host: {self.ranks} ranks a node: at least 1 is needed")
        share = f"host: {self.shared_bus} ranks share a bus"
        if self.shared_bus < 0:
            raise BadInput(f"{share}: it cannot be negative")
        if self.shared_bus and self.ranks is not None and self.ranks % self.shared_bus:
            raise BadInput(f"{share}, but a node has {self.ranks}: a bus lies within one node")

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes a µs, to the host and back, by which copies are timed: those of both directions at once, since a schedule
        may run both at any time; on a shared bus those of one direction, since it runs one copy at a time."""
        return (self.d2h, self.h2d) if self.shared_bus else (self.d2h_both, self.h2d_both)


def untrained_layers(layers: Sequence[Layer]) -> int:
    """How many layers in front train nothing, and so need no backward: their backwards take no time, and none of their
    parameters is trained. 0 if none of these has an F, parameters or buffers: then the profile just does not know them."""
    for i, layer in enumerate(layers):
        if layer.B or layer.W or layer.BW or layer.all_to_all or layer.trained_bytes:
            return i if any(front.F or front.frozen_bytes or front.buffer_bytes for front in layers[:i]) else 0
    return len(layers)


def without_backwards(layers: Sequence[Layer], count: int) -> tuple[Layer, ...]:
    """The layers, with no backward and nothing kept for one in the first `count`."""
    nothing = {"B": 0.0, "W": 0.0, "BW": 0.0, "U": 0.0, "held_until_B": 0, "held_until_W": 0, "held_from_B": 0}
    nothing |= {"output_kept": 0, "input_unneeded": 0}  # of what they hold: else the layer behind counted less than it holds
    return (*(replace(layer, **nothing) for layer in layers[:count]), *layers[count:])  # type: ignore[arg-type]


def side_values(layers: Sequence[Names]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name of a side input → the layer that gives it, and the layers that take it. Raises BadInput for one that two layers,
    no layer or a later layer gives, for one that no layer takes, and for a row that gives nothing to later rows."""
    givers: dict[str, int] = {}
    for i, (gives, _, _) in enumerate(layers):
        for name in gives:
            if name in (INPUTS, TARGETS):
                raise BadInput(f"layer {i}: gives '{name}', which is the batch's: take another name")
            if name in givers:
                raise BadInput(f"layer {i}: gives '{name}', which layer {givers[name]} gives already")
            givers[name] = i
    takers: dict[str, list[int]] = {name: [] for name in givers}
    for i, (_, takes, _) in enumerate(layers):
        for name in (name for name in takes if name not in (INPUTS, TARGETS)):
            if name not in givers:
                raise BadInput(f"layer {i}: takes '{name}', and no layer gives it")
            if givers[name] >= i:
                raise BadInput(f"layer {i}: takes '{name}', and layer {givers[name]}, which gives it, does not come before")
            takers[name].append(i)
    for name, numbers in takers.items():
        if not numbers:
            raise BadInput(f"layer {givers[name]}: gives '{name}', and no layer takes it")
    for first, end in pairwise([0, *begun(layers)]):
        if not any(first <= giver < end <= takers[name][-1] for name, giver in givers.items()):
            raise BadInput(f"layer {end}: begins a row, and nothing that layers {first} to {end - 1} give is taken after it")
    return {name: (givers[name], tuple(takers[name])) for name in givers}


def begun(layers: Sequence[Layer | Names]) -> list[int]:
    """The layers but the first that begin a row of their own."""
    return [i for i, layer in enumerate(layers) if i and layer.begins]


def begun_stages(layers: Sequence[Layer | Names], counts: Sequence[int]) -> tuple[int, ...]:
    """The stages but the first whose first layer begins a row of its own. counts: layers of each stage."""
    return tuple(s for s, first in enumerate(layer_cuts(counts)[:-1]) if s and layers[first].begins)


def split_known(layers: Sequence[Layer]) -> bool:
    """Whether B and W are known separately, and not only BW."""
    return any(layer.B or layer.W for layer in layers)


def layer_cuts(counts: Sequence[int]) -> list[int]:
    """The first layer of each stage, and behind them the number of layers. counts: layers of each stage."""
    return list(accumulate(counts, initial=0))


def layer_ranges(counts: Sequence[int]) -> list[range]:
    """The layers of each stage. counts: how many layers each stage has."""
    return [range(a, b) for a, b in pairwise(layer_cuts(counts))]
