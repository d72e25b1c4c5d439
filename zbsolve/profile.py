"""What was measured (or estimated) of a model on a machine, and the problem it makes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from . import placement as placements
from .errors import BadInput, Infeasible
from .files import field, read_document, write_document
from .graphs import pipeline
from .graphs_recompute import Recompute
from .partition import balanced_ranks
from .problem import Problem
from .text import exact_bytes

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class Layer:
    """Costs of one layer for one microbatch: median µs of F, B (input gradient), W (weight gradient), BW (both fused);
    bytes that F keeps until the end of B and of W; bytes of parameters and of the output (the message).

    held_from_B: bytes that B keeps until the end of W, beyond what it frees. X: µs of recomputing the forward; U: of the
    optimizer's update, once a step; 0 where unknown. transient: bytes that a pass takes on top of what is kept before or
    after it. output_kept: bytes of the output that the layer itself keeps; input_unneeded: bytes of its input that are
    kept only where it is the first layer of a stage.
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


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two ranks: µs = latency + bytes / bytes_per_us."""

    latency: float
    bytes_per_us: float

    def time(self, size: float) -> float:
        """µs for one message of `size` bytes."""
        return self.latency + size / self.bytes_per_us


@dataclass(frozen=True)
class Profile:
    """A model's layers and the links between ranks.

    source: "measured", or "estimated: " and by what, never to be confused. states: bytes of parameters, gradients and
    optimizer state for each byte of parameters (4 for Adam in one precision). capacity: bytes a device has, or None.
    facts: JSON values about the machine and the run. samples: every raw measurement, µs, keyed "<layer>/<kind>" or
    "link/<bytes>".
    rank_factors: how much longer each rank takes than the layers say, rank by rank; () where all are alike.
    """

    source: str
    model: str
    layers: tuple[Layer, ...]
    link: Link
    states: float
    capacity: int | None
    facts: dict[str, Any]
    samples: dict[str, list[float]]
    rank_factors: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        """The model, and that the profile is an estimate where it is one."""
        return self.model if self.source == "measured" else f"{self.model} ({self.source}, not measured)"

    def problem(
        self,
        ranks: int,
        microbatches: int,
        placement: str | placements.Spot = "single",
        memory: str | int | None = None,
        objective: str = "makespan",
        layers: Sequence[int] | None = None,
        fused: bool = False,
        recompute: Recompute = (),
    ) -> Problem:
        """The training step of this model on `ranks` ranks.

        placement: a name, a list such as "0,2,1,3", a tuple, or several tuples: routes that microbatches take in turn
        ("mirror"); a stage's parameters count on every rank that it lives on. memory: bytes a rank ("40GiB"), of which
        parameters, gradients and optimizer state are taken off first; None: the device's capacity, unlimited where unknown.
        layers: how many layers each stage gets; None: `partition.balanced_ranks` over F + B + W, for the ranks as fast as
        they are. fused: one backward BW, as people run it without a split. recompute: stages ("all", "0,2", or numbers) that
        drop their activations after F and make them again before B, in X's time (F's where unknown); stage 0's input is
        the batch, which is there anyway. Raises BadInput, Infeasible.
        """
        if ranks < 1:
            raise BadInput(f"ranks: at least 1 is needed, got {ranks}")
        if isinstance(placement, str):
            routes = placements.parse_routes(placement, ranks)
        else:
            routes = placements.check_routes(placement, ranks)
        number = len(routes[0])
        factors, turns = self.stage_factors(routes), 2 if recompute == "all" else 1
        costs = [turns * c.F + c.B + c.W for c in self.layers]
        counts = balanced_ranks(costs, routes, factors) if layers is None else tuple(layers)
        if len(counts) != number or sum(counts) != len(self.layers) or min(counts) < 1:
            raise BadInput(f"layers: {counts} does not split {len(self.layers)} layers into {number} stages")
        cuts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        stages = [self.layers[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]

        def total(what: str) -> list[int]:
            return [round(sum(getattr(one, what) for one in stage)) for stage in stages]

        limit = self.capacity if memory is None else parse_bytes(memory)
        left = None if limit is None else self._left(routes, total("parameter_bytes"), limit, memory)
        try:
            problem = pipeline(
                total("F"),
                placement=routes,
                microbatches=microbatches,
                comm=[round(self.link.time(stage[-1].output_bytes)) for stage in stages[:-1]],
                **held(stages),
                recompute=recompute,
                X=[round(sum(c.X or c.F for c in stage)) for stage in stages],
                held_input=[0, *(stage[-1].output_bytes for stage in stages[:-1])],
                capacity=left,
                objective=objective,
                layers=counts,
                source=f"{self.source}: {self.model}",
                **({"BW": total("BW")} if fused else {"B": total("B"), "W": total("W")}),
            )
        except Infeasible as error:
            raise Infeasible(f"{error}; a rank has what parameters and optimizer states leave{_of(limit, memory)}") from None
        return problem.slowed(self.rank_factors) if self.rank_factors else problem

    def stage_factors(self, routes: Sequence[Sequence[int]]) -> list[float]:
        """How much longer each stage takes on its ranks than its layers say, in the mean over routes. Raises BadInput."""
        ranks, known = max(routes[0]) + 1, self.rank_factors or (1.0,) * (max(routes[0]) + 1)
        if len(known) != ranks:
            raise BadInput(f"ranks: the profile knows how fast {len(known)} ranks are (field 'rank_factors'), not {ranks}")
        return [sum(known[route[stage]] for route in routes) / len(routes) for stage in range(len(routes[0]))]

    def _left(
        self, routes: Sequence[Sequence[int]], parameters: Sequence[int], limit: int, said: str | int | None
    ) -> list[int]:
        """Bytes a rank left for activations beside its stages' parameters and states."""
        left = [float(limit)] * (max(routes[0]) + 1)
        for stage, size in enumerate(parameters):
            for rank in {route[stage] for route in routes}:
                left[rank] -= self.states * size
        for rank, room in enumerate(left):
            if room < 0:
                raise Infeasible(
                    f"memory: rank {rank} needs {exact_bytes(limit - room)} for parameters and optimizer states alone, "
                    f"more than its memory{_of(limit, said)}"
                )
        return [int(room) for room in left]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a profile file, whole or not at all; `-` is standard output."""
        write_document(path, "profile", asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile file; `-` is standard input. Raises BadInput naming the field."""
        body, where = read_document(path, "profile"), str(path)
        rows = field(body, "layers", list, where)
        if not rows:
            raise BadInput(f"{where}: field 'layers' is empty")
        source = field(body, "source", str, where)
        if source != "measured" and not source.startswith("estimated: "):
            raise BadInput(f"{where}: field 'source' is '{source}', neither 'measured' nor 'estimated: …'")
        if not field(body, "link", dict, where).get("bytes_per_us", 1):
            raise BadInput(f"{where}: link: field 'bytes_per_us' is 0")
        capacity = body.get("capacity")
        if capacity is not None and (type(capacity) is not int or capacity < 0):
            raise BadInput(f"{where}: field 'capacity' must be null or whole bytes")
        return cls(
            source,
            field(body, "model", str, where),
            tuple(_row(Layer, row, f"{where}: layer {i}") for i, row in enumerate(rows)),
            _row(Link, field(body, "link", dict, where), f"{where}: link"),
            float(field(body, "states", (int, float), where)),
            capacity,
            field(body, "facts", dict, where),
            field(body, "samples", dict, where),
            _factors(body.get("rank_factors", []), where),
        )


def _of(limit: int | None, said: str | int | None) -> str:
    """How much memory a rank was given, for messages; where a bare number was `said`, too small to be meant, its unit."""
    if limit is None:
        return ""
    small = limit < 2**20 and re.fullmatch(r"[\d.\s]+", str(said))
    return f" of {exact_bytes(limit)}{' (a number without a unit is bytes: write 40GiB, 512MB)' if small else ''}"


def _factors(values: Any, where: str) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(type(v) in (int, float) and 0 < v < float("inf") for v in values):
        raise BadInput(f"{where}: field 'rank_factors' must list positive numbers, one a rank")
    return tuple(float(v) for v in values)


def _row(cls: type[Any], row: Any, where: str) -> Any:
    """A Layer or Link from a JSON object: every field without a default there, of its type, no number negative or not
    finite."""
    if not isinstance(row, dict):
        raise BadInput(f"{where}: not an object")
    types: dict[str, Any] = {"str": str, "int": int, "float": (int, float)}
    wanted = [f for f in fields(cls) if f.default is MISSING or f.name in row]
    values = {f.name: field(row, f.name, types[str(f.type)], where) for f in wanted}
    for name, value in values.items():
        if not isinstance(value, str) and not 0 <= value < float("inf"):
            raise BadInput(f"{where}: field '{name}' is {value}; a finite number from 0 up is needed")
    return cls(**values)


def held(stages: Sequence[Sequence[Layer]]) -> dict[str, list[int]]:
    """`held_until_B`, `held_until_W`, `held_from_B` of stages of layers, for `graphs.pipeline`: the sums, where a tensor
    between two layers that both count counts once, and what one layer's B frees makes room for what another's makes."""
    found: dict[str, list[int]] = {"held_until_B": [], "held_until_W": [], "held_from_B": []}
    for stage in stages:
        twice = sum(max(a.output_kept, b.input_unneeded) for a, b in zip(stage, stage[1:], strict=False))
        after_f = max(0, sum(c.held_until_B + c.held_until_W for c in stage) - twice)
        after_b = sum(c.held_until_W + c.held_from_B for c in stage)
        found["held_until_B"].append(max(0, after_f - after_b))
        found["held_until_W"].append(min(after_f, after_b))
        found["held_from_B"].append(max(0, after_b - after_f))
    return found


def parse_bytes(text: str | int) -> int:
    """Bytes from `40GiB`, `512MB` or a plain number. Raises BadInput."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise BadInput(f"memory '{text}': not a number of bytes such as 40GiB, 512MB or 1000000")
    return int(float(match[1]) * UNITS[match[2].upper()])
