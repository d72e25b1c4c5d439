"""What was measured (or estimated) of a model on a machine, and the problem it makes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from . import placement as placements
from .errors import BadInput, Infeasible
from .files import field, known_only, read_document, write_document
from .graphs import pipeline
from .graphs_recompute import Recompute, chosen
from .layer import Layer, Tied, beside, held
from .partition import balanced_ranks
from .problem import Problem
from .text import exact_bytes

LARGEST = 2.0**62  # µs or bytes: beyond, sums do not fit
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


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
    rank_factors: how much longer each rank takes than the layers say, rank by rank; () where all are alike. tied: bytes of
    each parameter that several layers hold, and their numbers: a rank with several of them has it once.
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
    tied: Tied = ()

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
        parameters, gradients and optimizer state, messages and what passes take while they run are taken off first (see
        `layer.beside`); None: the device's capacity, unlimited where unknown.
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
        left = None if limit is None else self._left(counts, routes, chosen(recompute, number).tolist(), limit, memory)
        try:
            problem = pipeline(
                total("F"),
                placement=routes,
                microbatches=microbatches,
                comm=[round(self.link.time(stage[-1].output_bytes)) for stage in stages[:-1]],
                **held(stages),
                AF=total("all_to_all"),
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
            rest = "a rank has what parameters, optimizer states, messages and what a pass takes while it runs leave"
            raise Infeasible(f"{error}; {rest}{_of(limit, memory)}") from None
        problem = problem.slowed(self.rank_factors) if self.rank_factors else problem
        if not problem.work:
            raise BadInput(
                f"layers: the passes of all {number} stages round to 0 µs: times below half a µs cannot be scheduled"
            )
        return problem

    def stage_factors(self, routes: Sequence[Sequence[int]]) -> list[float]:
        """How much longer each stage takes on its ranks than its layers say, in the mean over routes. Raises BadInput."""
        ranks, known = max(routes[0]) + 1, self.rank_factors or (1.0,) * (max(routes[0]) + 1)
        if len(known) != ranks:
            raise BadInput(f"ranks: the profile knows how fast {len(known)} ranks are (field 'rank_factors'), not {ranks}")
        return [sum(known[route[stage]] for route in routes) / len(routes) for stage in range(len(routes[0]))]

    def _left(
        self,
        counts: Sequence[int],
        routes: Sequence[Sequence[int]],
        dropping: Sequence[int],
        limit: int,
        said: str | int | None,
    ) -> list[int]:
        """Bytes a rank left for activations beside all else."""
        left = []
        for rank, (fixed, moving) in enumerate(
            zip(*beside(self.layers, self.states, self.tied, counts, routes, dropping), strict=True)
        ):
            if fixed + moving > limit:
                raise Infeasible(
                    f"memory: rank {rank} needs {exact_bytes(fixed)} for parameters and optimizer states and "
                    f"{exact_bytes(moving)} for messages and inside passes, more than its memory{_of(limit, said)}"
                )
            left.append(int(limit - fixed - moving))
        return left

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a profile file, whole or not at all; `-` is standard output."""
        write_document(path, "profile", asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile file; `-` is standard input. Raises BadInput naming the field."""
        body, where = read_document(path, "profile"), str(path)
        known_only(body, ("zbsolve", "version", *(f.name for f in fields(cls))), where)
        rows = field(body, "layers", list, where)
        if not rows:
            raise BadInput(f"{where}: field 'layers' is empty")
        source = field(body, "source", str, where)
        if source != "measured" and not source.startswith("estimated: "):
            raise BadInput(f"{where}: field 'source' is '{source}', neither 'measured' nor 'estimated: …'")
        link = _row(Link, field(body, "link", dict, where), f"{where}: link")
        if link.bytes_per_us < 1e-9:
            raise BadInput(f"{where}: link: field 'bytes_per_us' is {link.bytes_per_us:g}")
        states = float(field(body, "states", (int, float), where))
        if not 0 <= states < LARGEST:
            raise BadInput(f"{where}: field 'states' is {states:g}; a finite number from 0 up is needed")
        capacity = body.get("capacity")
        if capacity is not None and (type(capacity) is not int or capacity < 0):
            raise BadInput(f"{where}: field 'capacity' must be null or whole bytes")
        layers = tuple(_row(Layer, row, f"{where}: layer {i}") for i, row in enumerate(rows))
        for kinds in (("F", "B", "W"), ("F", "BW")):
            if not any(getattr(layer, kind) for layer in layers for kind in kinds):
                raise BadInput(f"{where}: fields {', '.join(map(repr, kinds))} of all layers are 0: nothing takes time")
        return cls(
            source,
            field(body, "model", str, where),
            layers,
            link,
            states,
            capacity,
            field(body, "facts", dict, where),
            _samples(field(body, "samples", dict, where), where),
            _factors(body.get("rank_factors", []), where),
            _tied(body.get("tied", []), len(rows), where),
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


def _samples(rows: dict[str, Any], where: str) -> dict[str, list[float]]:
    for key, row in rows.items():
        if not isinstance(row, list) or not all(type(us) in (int, float) and abs(us) < LARGEST for us in row):
            raise BadInput(f"{where}: field 'samples': '{key}' must list numbers")
    return rows


def _tied(rows: Any, layers: int, where: str) -> Tied:
    def fits(row: Any) -> bool:
        if not (isinstance(row, list) and len(row) == 2 and isinstance(row[1], list) and len(set(map(str, row[1]))) > 1):
            return False
        return type(row[0]) is int and row[0] >= 0 and all(type(i) is int and 0 <= i < layers for i in row[1])

    if not isinstance(rows, list) or not all(map(fits, rows)):
        raise BadInput(f"{where}: field 'tied' must list [bytes, [layers that hold them]]")
    return tuple((size, tuple(group)) for size, group in rows)


def _row(cls: type[Any], row: Any, where: str) -> Any:
    """A Layer or Link from a JSON object: every field without a default there, of its type, no number negative or not
    finite."""
    if not isinstance(row, dict):
        raise BadInput(f"{where}: not an object")
    known_only(row, [f.name for f in fields(cls)], where)
    types: dict[str, Any] = {"str": str, "int": int, "float": (int, float)}
    wanted = [f for f in fields(cls) if f.default is MISSING or f.name in row]
    values = {f.name: field(row, f.name, types[str(f.type)], where) for f in wanted}
    for name, value in values.items():
        if not isinstance(value, str) and not 0 <= value < LARGEST:
            raise BadInput(f"{where}: field '{name}' is {str(value)[:20]}; a finite number from 0 up is needed")
    return cls(**values)


def parse_bytes(text: str | int) -> int:
    """Bytes from `40GiB`, `512MB` or a plain number. Raises BadInput."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in UNITS or match[1].count(".") > 1 or match[1] == "." or len(match[1]) > 30:
        raise BadInput(f"memory '{str(text)[:40]}': not a number of bytes such as 40GiB, 512MB or 1000000")
    return int(float(match[1]) * UNITS[match[2].upper()])
