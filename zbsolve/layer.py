"""What a layer costs, the link between two ranks, and the one to host memory: what a profile is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from .placement import PAIR, RANK, sites_in
from .util.errors import BadInput

Tied = tuple[tuple[int, tuple[int, ...]], ...]  # bytes of a parameter that several layers hold, and their numbers
Line = tuple[float, float]  # of the first slice, and more for each slice before


@dataclass(frozen=True, slots=True)
class SliceExtra:
    """µs that slices take beyond their part of the whole sequence, as measured in `number` slices: of each one, and more for
    each slice before it. Below 0: less, as where a cache holds a slice and not the whole. Raises BadInput for a number below
    2."""

    number: int
    F: Line = (0.0, 0.0)
    B: Line = (0.0, 0.0)
    W: Line = (0.0, 0.0)
    BW: Line = (0.0, 0.0)

    def __post_init__(self) -> None:
        if self.number < 2:
            raise BadInput(f"field 'number' is {self.number}: at least 2 slices are needed")


INPUTS, TARGETS = "inputs", "targets"  # of the batch: nobody gives them, and any layer may take them


class Names(NamedTuple):
    """The names of the side inputs that a layer gives and takes, and whether it begins a row of its own."""

    gives: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    begins: bool = False


class Given(NamedTuple):
    """A side input that a layer gives: its name, bytes for one microbatch, whether a gradient comes back, and how many of
    the bytes are there until its backward whoever takes them: the layer keeps them, or they are the batch's."""

    name: str
    bytes: int
    gradient: bool = True
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """Costs of one layer for one microbatch. 0 where unknown.

    name: as tables print it.
    F, B, W, BW: median µs of the forward, the input gradient, the weight gradient, and both fused.
    held_until_B, held_until_W: bytes that F keeps until the end of B and of W.
    parameter_bytes: bytes of its parameters.
    output_bytes: bytes of its output, the message.
    held_from_B: bytes that B keeps until the end of W, beyond what it frees.
    X: µs of recomputing the forward.
    U: µs of the optimizer's update, once a step.
    transient: bytes that a pass takes on top of what is kept before or after it.
    output_kept: bytes of the output that the layer itself keeps.
    input_unneeded: bytes of its input that are kept only where it is the first layer of a stage.
    all_to_all: µs that expert parallelism sends behind F, and as many behind the backward, beside computation. No profiler
        measures it: it is a matter of the cluster, for you to fill in.
    message: µs of the output's message where somebody gave it; 0: what the link takes for its bytes.
    attention_F, attention_B: µs of F and of the backward (B or BW) that causal attention itself takes, between projections.
        Sequence slices need them, and kv_bytes.
    kv_bytes: bytes of its keys and values, among what F keeps.
    kv_gradient_bytes: bytes of their gradients, as slices gather them (in float32 where keys have 16 bits); 0: as kv_bytes.
    slice_extra: µs that slices take beyond their part of the whole sequence.
    frozen_bytes: of the parameters, those that are never trained: no gradient, no optimizer state.
    buffer_bytes: bytes of its buffers that a state dict has, such as weights of 8 bits. No rank shards them.
    gives, takes: side inputs that it makes beside its output, and names of those that it takes beside its input. They are no
        part of what it holds, but for what it keeps of those it gives: a rank holds each once, whoever takes it there.
    begins: whether it takes the batch, and not the output of the layer before.
    fixed_F, fixed_B, fixed_W, fixed_BW: µs of these passes that a microbatch takes however many sequences or tokens it has.
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
        """Of what it gives and takes."""
        return Names(tuple(given.name for given in self.gives), self.takes, self.begins)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that are trained."""
        return self.parameter_bytes - self.frozen_bytes

    @property
    def work(self) -> float:
        """µs of one microbatch with a split backward; with a fused one where nothing else is known."""
        return self.F + (self.B + self.W or self.BW)


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two ranks: µs = latency + bytes / bytes_per_us.

    latency: µs.
    bytes_per_us: bytes a µs.
    blocking: whether a message occupies its sender's compute stream meanwhile (see `pipeline`).
    shared: what messages share, so that their bytes go one after the other, each way: "rank", a rank's card; "pair", the
        link between two ranks; such as "4+4", that between sites of so many ranks; "": nothing (see `build.with_links`).

    Raises BadInput for another word.
    """

    latency: float
    bytes_per_us: float
    blocking: bool = False
    shared: str = ""

    def __post_init__(self) -> None:
        if self.shared not in ("", RANK, PAIR):
            sites_in(self.shared)

    def time(self, size: float) -> float:
        """µs for one message of `size` bytes."""
        return self.latency + size / self.bytes_per_us

    def message(self, layer: Layer) -> float:
        """µs for the message of a layer's output."""
        return layer.message or self.time(layer.output_bytes)


NO_LINK = Link(0.0, 1e12)  # messages take no time but what layers say
MIN_BANDWIDTH = 1e-9  # bytes a µs


@dataclass(frozen=True, slots=True)
class HostLink:
    """Copies between a rank's device and its node's host memory: µs = latency + bytes / bandwidth.

    latency: µs.
    d2h, h2d: bytes a µs to the host and back while nothing goes the other way.
    d2h_both, h2d_both: each of them while both directions run at once.
    memory: bytes of host memory that a node has for activations; None: no limit.
    ranks: of the pipeline on a node; None: all of them.
    shared_bus: how many neighbouring ranks share one bus, on which one copy runs at a time; 0: each rank copies both ways at
        once.

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
        """Bytes a µs that copies to the host and back take their time from: those of both directions at once, since a
        schedule lets both run at any time; on a shared bus those alone, since it runs one copy at a time."""
        return (self.d2h, self.h2d) if self.shared_bus else (self.d2h_both, self.h2d_both)


def untrained_layers(layers: Sequence[Layer]) -> int:
    """How many layers in front train nothing: no gradient is needed there, so they have no backward. Their backwards take
    no time, and no byte of their parameters is trained. One that has neither F nor parameters says nothing of what it is."""
    for i, layer in enumerate(layers):
        if layer.B or layer.W or layer.BW or layer.all_to_all or layer.trained_bytes:
            return i if any(front.F or front.frozen_bytes or front.buffer_bytes for front in layers[:i]) else 0
    return len(layers)


def without_backwards(layers: Sequence[Layer], count: int) -> tuple[Layer, ...]:
    """The layers, where the first `count` train nothing: no backward runs there, and nothing is kept for one."""
    nothing = {"B": 0.0, "W": 0.0, "BW": 0.0, "U": 0.0, "held_until_B": 0, "held_until_W": 0, "held_from_B": 0}
    nothing |= {"output_kept": 0, "input_unneeded": 0}  # of what they hold: else the layer behind counted less than it holds
    return (*(replace(layer, **nothing) for layer in layers[:count]), *layers[count:])  # type: ignore[arg-type]


def side_values(layers: Sequence[Names]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name of a side input → the number of the layer that gives it, and those of the layers that take it. Raises BadInput
    for one that is given twice, by nobody, too late or for nobody, and for a row that gives nothing to later ones."""
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
            raise BadInput(
                f"layer {end}: begins a row, and nothing that layers {first} to {end - 1} give is taken behind it"
            )
    return {name: (givers[name], tuple(takers[name])) for name in givers}


def begun(layers: Sequence[Layer | Names]) -> list[int]:
    """The layers but the first that begin a row of their own."""
    return [i for i, layer in enumerate(layers) if i and layer.begins]


def begun_stages(layers: Sequence[Layer | Names], counts: Sequence[int]) -> tuple[int, ...]:
    """The stages but the first whose first layer begins a row of its own. counts: layers of each stage."""
    return tuple(s for s, first in enumerate(layer_cuts(counts)[:-1]) if s and layers[first].begins)


def split_known(layers: Sequence[Layer]) -> bool:
    """Whether B and W are known apart; else there is one backward BW alone."""
    return any(layer.B or layer.W for layer in layers)


def layer_cuts(counts: Sequence[int]) -> list[int]:
    """Before which layer each stage begins, from how many layers each stage has; and how many there are."""
    return list(accumulate(counts, initial=0))


def layer_ranges(counts: Sequence[int]) -> list[range]:
    """The numbers of each stage's layers, from how many layers each stage has."""
    return [range(a, b) for a, b in pairwise(layer_cuts(counts))]
