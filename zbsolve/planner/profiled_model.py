"""`ProfiledModel`: a model given by profiles, each for a number of tensor ranks and of sequences in a microbatch.

At the size of a profile its costs are used unchanged. Between two sizes every time and every number of bytes is
interpolated linearly, since what a microbatch computes, moves and keeps is a constant and a part proportional to its
sequences. Outside the sizes, and for other tensor ranks, costs are unknown."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from ..features.lengths import MICROBATCH, SEQUENCES
from ..partition.layer import Layer, untrained_layers
from ..profile.profile import Profile
from ..util.errors import BadInput
from .layout import FULL, NONE
from .shape import FLOAT, Shape

TOKENS, TENSOR_RANKS, MESH = "tokens", "tensor_ranks", "mesh"
SEQUENCE_PARALLEL = "sequence_parallel"  # a fact: norms are split over tensor ranks too
STATES = "states"  # a fact about parameters: MIXED in 16 bits with a master copy; FLOAT_GRADIENTS of 32 bits
MIXED, FLOAT_GRADIENTS = "mixed", "float-gradients"


class Microbatch(NamedTuple):
    """tensor_ranks: devices that share each layer; sequences: of a microbatch; tokens: of a sequence, 0: not known."""

    tensor_ranks: int
    sequences: int
    tokens: int


def microbatch_of(profile: Profile, where: str) -> Microbatch:
    """The microbatch in a profile's facts. Raises BadInput naming `where` and what is missing."""
    tensor_ranks, batch = profile.facts.get(TENSOR_RANKS), profile.facts.get(MICROBATCH)
    if not _counts(tensor_ranks):
        raise BadInput(f"{where}: facts: '{TENSOR_RANKS}' is missing: how many devices share a layer (profile writes it)")
    if not isinstance(batch, dict) or not _counts(batch.get(SEQUENCES)):
        raise BadInput(f"{where}: facts: '{MICROBATCH}' does not say '{SEQUENCES}', how many make a microbatch")
    mesh = profile.facts.get(MESH)
    others = set(mesh) - {"pp", "dp", "tp"} if isinstance(mesh, dict) else set()
    if others:
        raise BadInput(f"{where}: facts: '{MESH}' has {', '.join(sorted(others))}, which the space of plans does not know")
    tokens = batch.get(TOKENS)
    return Microbatch(int(str(tensor_ranks)), batch[SEQUENCES], tokens if isinstance(tokens, int) and tokens > 0 else 0)


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


TIMES = ("F", "B", "W", "BW", "X", "U")
BYTES = ("held_until_B", "held_until_W", "held_from_B", "transient", "output_kept", "input_unneeded")
UNCOUNTED = 0.01  # buffers up to this share of the parameters' bytes are ignored
SAME = ("parameter_bytes", "output_bytes")  # sizes that must be equal in all blocks
Ends = tuple[Layer, Layer, Layer]  # (first layer, block, last layer)


class Point(NamedTuple):
    """One profile. tp: tensor ranks; size: sequences in a microbatch; shared: bytes that first and last layer share."""

    tp: int
    size: int
    layers: Ends
    shared: int


@dataclass(frozen=True)
class ProfiledModel:
    """A model given by profiles; `of` makes and checks one. profiles: of one model, without samples. gradients: the least
    bytes of the gradient of a 16-bit parameter with a master copy; the profiles may say more."""

    profiles: tuple[Profile, ...]
    gradients: int = FLOAT

    recomputes: ClassVar[tuple[int, ...]] = (NONE, FULL)  # profiles have the time of a whole forward only

    @classmethod
    def of(cls, profiles: Iterable[Profile], names: Sequence[str] = ()) -> ProfiledModel:
        """The model of these profiles. names: of the profiles, for errors. Raises BadInput naming profile and field where
        one lacks something, two have the same size, or they are of different models."""
        profiled_model = cls(tuple(replace(profile, samples={}) for profile in profiles))
        if not profiled_model.profiles:
            raise BadInput("profiles: at least one is needed")
        named = names or [f"profile {i}" for i in range(len(profiled_model.profiles))]
        points = [point_of(profile, name) for profile, name in zip(profiled_model.profiles, named, strict=True)]
        _check_together(points, profiled_model.profiles, named)
        return profiled_model

    @cached_property
    def points(self) -> dict[int, dict[int, Point]]:
        """Tensor ranks → sequences in a microbatch → the profile's content, both ascending."""
        rows = sorted((point_of(profile, "profile") for profile in self.profiles), key=lambda point: (point.tp, point.size))
        return {tp: {row.size: row for row in rows if row.tp == tp} for tp in dict.fromkeys(row.tp for row in rows)}

    @property
    def name(self) -> str:
        """The model's name, without the sizes of its microbatch."""
        return self.profiles[0].model.partition("@")[0]

    @property
    def layers(self) -> int:
        """The number of blocks between first and last layer."""
        return len(self.profiles[0].layers) - 2

    @property
    def stages(self) -> int:
        """The most stages that a layout can have: one for each layer."""
        return self.layers + 2

    @property
    def tied(self) -> bool:
        """Whether first and last layer share a parameter."""
        return any(point.shared for row in self.points.values() for point in row.values())

    @property
    def sequence(self) -> int:
        """Tokens of a sequence; 0: not known."""
        return microbatch_of(self.profiles[0], "profile").tokens

    @property
    def state_parts(self) -> tuple[float, float, float]:
        """Bytes of weights, gradients and optimizer states for each 16 bits of parameters."""
        profile, words = self.profiles[0], str(self.profiles[0].facts.get(STATES, ""))
        weights, floats = min(1.0, profile.states), FLOAT_GRADIENTS in words
        known = min(2.0 if floats else 1.0, profile.states - weights)
        gradients = max(known, self.gradients / 2) if MIXED in words else known
        return 2 * weights, 2 * gradients, 2 * (profile.states - weights - known)

    @property
    def update_us(self) -> float | None:
        """µs of the optimizer's update for each 16 bits of parameters, averaged over all profiles; None: not known."""
        times = [sum(layer.U for layer in profile.layers) for profile in self.profiles]
        sizes = [sum(layer.parameter_bytes for layer in profile.layers) for profile in self.profiles]
        return 2 * sum(times) / sum(sizes) if all(times) and all(sizes) else None

    @property
    def error(self) -> float | None:
        """The largest interpolation error seen: how far a block's work at a size is from the line through its neighbouring
        sizes, as a share of it. None: no size lies between two others."""
        errors = []
        for row in self.points.values():
            sizes = list(row)
            for low, size, high in zip(sizes, sizes[1:], sizes[2:], strict=False):
                drawn, true = (ends[1].work for ends in (_between(row[low], row[high], size), row[size].layers))
                errors.append(abs(drawn / true - 1))
        return max(errors, default=None)

    @property
    def source(self) -> str:
        """Where the costs come from, in words: the profiles' sources, tensor ranks, sizes, and the interpolation error."""
        named = (p.source.removeprefix("estimated: ").removesuffix(" tensor ranks").split(", ") for p in self.profiles)
        sources = ", ".join(dict.fromkeys(", ".join(part for part in words if not part.isdecimal()) for words in named))
        sizes = "; ".join(f"tp {tp}: {', '.join(map(str, row))}" for tp, row in self.points.items())
        gaps = any(b - a > 1 for row in self.points.values() for a, b in pairwise(row))
        off = "by an unknown error" if self.error is None else f"off by up to {self.error:.1%} where that is known"
        return f"layers by profiles ({sources}) of sequences a microbatch at {sizes}" + (
            f", on lines between sizes, {off}" if gaps else ""
        )

    def sequence_parallel(self, tp: int) -> tuple[int, ...]:
        """The one possible value of `Layout.sequence`: 1 where the facts of a profile for `tp` say so, else 0."""
        return (int(any(tp == p.facts[TENSOR_RANKS] and SEQUENCE_PARALLEL in p.facts for p in self.profiles)),)

    @property
    def left_out(self) -> str:
        """The part of the space that is left out since its costs are not known, in words."""
        sizes = {tp: dict.fromkeys((min(row), max(row))) for tp, row in self.points.items()}
        rows = "; ".join(f"tp {tp} with {' to '.join(map(str, ends))} sequences" for tp, ends in sizes.items())
        return f"all that no profile tells: other than {rows} a microbatch, selective recompute, a sharded vocabulary"

    def flops(self, sequences: int) -> float | None:
        """None: profiles do not have them."""

    def shared(self, tp: int) -> int:
        """Bytes of the parameter that first and last layer share, on each of `tp` tensor ranks."""
        return next(iter(self.points[tp].values())).shared

    def sizes(self, tp: int) -> range:
        """The possible sequences in a microbatch on `tp` tensor ranks: from the least to the most profiled."""
        row = self.points.get(tp, {})
        return range(min(row), max(row) + 1) if row else range(0)

    def at(self, tp: int, size: int) -> Ends:
        """First layer, block and last layer for `size` sequences, interpolated. Raises BadInput outside `sizes`."""
        if size not in self.sizes(tp):
            raise BadInput(f"model {self.name}: no profile says what {size} sequences on {tp} tensor ranks cost")
        row = self.points[tp]
        if size in row:
            return row[size].layers
        sizes = list(row)
        above = bisect_left(sizes, size)
        return _between(row[sizes[above - 1]], row[sizes[above]], size)


Model = Shape | ProfiledModel


def point_of(profile: Profile, where: str) -> Point:
    """The content of a profile. Raises BadInput naming `where` and a field that plans cannot use."""
    tensor_ranks, sequences, _ = microbatch_of(profile, where)
    if len(profile.layers) < 3:
        raise BadInput(f"{where}: layers: {len(profile.layers)}: a first layer, blocks and a last layer are needed")
    for name in ("rank_factors", "microbatch_factors", "roles"):
        if getattr(profile, name):
            raise BadInput(f"{where}: field '{name}' is of one step: in a plan ranks, microbatches and stages are alike")
    for layer in profile.layers:
        buffers = layer.buffer_bytes > UNCOUNTED * layer.parameter_bytes
        for name, there, why in (
            ("frozen_bytes", layer.frozen_bytes, "a plan takes parameters that are all trained"),
            ("buffer_bytes", buffers, "a plan does not count weights that are no parameters"),
            ("all_to_all", layer.all_to_all, "expert parallelism is not in the space of plans"),
            ("gives", layer.gives, "a plan takes layers without side inputs"),
            ("begins", layer.begins, "a plan takes one row of layers"),
        ):
            if there:
                raise BadInput(f"{where}: field '{name}': {why}")
    if untrained_layers(profile.layers):
        raise BadInput(f"{where}: layers: layer 0 has no backward, no parameters: a plan takes layers that all train")
    ends = {0, len(profile.layers) - 1}
    if any(set(group) != ends for _, group in profile.tied):
        raise BadInput(f"{where}: field 'tied': a plan knows parameters that first and last layer share, and no others")
    known = (*TIMES, *BYTES, *SAME)  # fields that the planner uses
    first, *blocks, last = (Layer(layer.name, **{name: getattr(layer, name) for name in known}) for layer in profile.layers)
    block = _mean(blocks, where)
    first = replace(first, output_kept=min(first.output_kept, _kept(first)))  # only kept bytes can be counted twice
    last = replace(last, input_unneeded=min(last.input_unneeded, _kept(last)))
    kept = _kept(block) - max(block.output_kept, block.input_unneeded)
    needed = {"F": block.F, "B": block.B or block.BW, "bytes kept from F to B": kept, "output bytes": block.output_bytes}
    for name, value in needed.items():
        if round(value) < 1:
            raise BadInput(f"{where}: layers: {name} of a block is {value:g}: at least 1 is needed")
    return Point(tensor_ranks, sequences, (first, block, last), sum(size for size, _ in profile.tied))


def _kept(layer: Layer) -> int:
    return layer.held_until_B + layer.held_until_W


def _mean(blocks: Sequence[Layer], where: str) -> Layer:
    """The block that stands for all, with mean times and the most bytes. Raises BadInput where a field of SAME differs."""
    for name in SAME:
        values = [getattr(block, name) for block in blocks]
        if len(set(values)) > 1:
            i = next(i for i, value in enumerate(values) if value != values[0])
            both = f"{blocks[0].name} has {values[0]} and {blocks[i].name} {values[i]}"
            raise BadInput(f"{where}: layers: field '{name}': {both}: a plan takes blocks that are alike")
    merged: dict[str, Any] = {name: sum(getattr(block, name) for block in blocks) / len(blocks) for name in TIMES}
    merged |= {name: max(getattr(block, name) for block in blocks) for name in BYTES}
    return replace(blocks[0], **merged)


def _between(low: Point, high: Point, size: int) -> Ends:
    """The layers at a size between two, interpolated linearly."""
    share = (size - low.size) / (high.size - low.size)

    def line(a: Layer, b: Layer) -> Layer:
        def at(name: str) -> float:
            return float(getattr(a, name) + share * (getattr(b, name) - getattr(a, name)))

        mixed: dict[str, Any] = {name: at(name) for name in TIMES}
        mixed |= {name: round(at(name)) for name in (*BYTES, "output_bytes")}
        return replace(a, **mixed)

    first, block, last = (line(a, b) for a, b in zip(low.layers, high.layers, strict=True))
    return first, block, last


def _check_together(points: Sequence[Point], profiles: Sequence[Profile], names: Sequence[str]) -> None:
    """Raise BadInput where two profiles have the same tensor ranks and size, or are of different models."""
    seen: dict[tuple[int, int], str] = {}
    parameters: dict[int, tuple[list[int], str]] = {}
    for point, profile, name in zip(points, profiles, names, strict=True):
        key, sizes = (point.tp, point.size), [layer.parameter_bytes for layer in point.layers]
        if key in seen:
            raise BadInput(f"{name}: tp {point.tp} with {point.size} sequences a microbatch, as {seen[key]}: give one")
        seen[key] = name
        if len(profile.layers) != len(profiles[0].layers):
            raise BadInput(f"{name}: {len(profile.layers)} layers, but {names[0]} has {len(profiles[0].layers)}")
        same, other = parameters.setdefault(point.tp, (sizes, name))
        if same != sizes or profile.states != profiles[0].states:
            raise BadInput(f"{name}: its parameters or states have other bytes than {other}'s: it is of another model")
