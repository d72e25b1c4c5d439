"""A schedule: an order for every stream, and the certificate of how good it is. Files go out and come in here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from .errors import BadInput
from .files import field, read_document, write_document
from .problem import Ints, Problem
from .timeline import Precedence, Timeline, critical_path, simulate


@dataclass(frozen=True, slots=True)
class Certificate:
    """How good a schedule is and how that is known: `value` and proven lower `bound` in µs.

    `relaxation` and `ranks` say where the bound comes from, so that it can be proven again alone (`ilp.bounds.recheck`);
    `proof` says it in words; `solver` is what found the schedule.
    """

    objective: str
    value: int
    bound: int
    relaxation: str
    ranks: tuple[int, ...]
    proof: str
    solver: str
    seconds: float
    seed: int
    digest: str

    @property
    def gap(self) -> float:
        """(value − bound) / value: at most this share of the step could still be saved."""
        return (self.value - self.bound) / self.value if self.value else 0.0

    @property
    def status(self) -> str:
        """ "optimal" where the bound meets the value, else "feasible"."""
        return "optimal" if self.bound >= self.value else "feasible"

    def to_json(self) -> dict[str, Any]:
        """Fields, and the derived `gap` and `status` for readers."""
        return {**asdict(self), "ranks": list(self.ranks), "gap": self.gap, "status": self.status}

    @classmethod
    def from_json(cls, body: Mapping[str, Any], where: str) -> Certificate:
        """The certificate that `to_json` wrote. Raises BadInput, also where `gap` or `status` is not what follows."""
        types: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "tuple[int, ...]": list}
        values = {f.name: field(dict(body), f.name, types[str(f.type)], where) for f in fields(cls)}
        if not all(type(rank) is int for rank in values["ranks"]):
            raise BadInput(f"{where}: field 'ranks' must list ranks")
        stated = cls(**{**values, "ranks": tuple(values["ranks"])})
        for name in ("status", "gap"):
            if body.get(name, getattr(stated, name)) != getattr(stated, name):
                raise BadInput(f"{where}: certificate: field '{name}' is {body[name]}, but value and bound say otherwise")
        return stated


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which pass runs after which on every stream of a problem, and how good that is known to be.

    order: stream → pass names, `{"compute:0": ("0F0", "0F1", "0B0", …)}`. syncs: further (before, after) pairs of names,
    where memory needs them. certificate: value, bound and gap where `solve` made it. Not checked here: `verify` does.
    """

    problem: Problem
    order: Mapping[str, tuple[str, ...]]
    syncs: tuple[tuple[str, str], ...] = ()
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        frozen = MappingProxyType({stream: tuple(names) for stream, names in self.order.items()})
        object.__setattr__(self, "order", frozen)
        object.__setattr__(self, "syncs", tuple((before, after) for before, after in self.syncs))

    @classmethod
    def of(
        cls,
        problem: Problem,
        sequences: Mapping[str, Iterable[int] | Ints],
        syncs: Iterable[tuple[str, str]] = (),
        certificate: Certificate | None = None,
    ) -> Schedule:
        """A schedule from rows of the problem's table, per stream."""
        names = problem.names
        order = {
            stream: tuple(names[i] for i in (rows.tolist() if isinstance(rows, np.ndarray) else rows))
            for stream, rows in sequences.items()
        }
        return cls(problem, order, tuple(syncs), certificate)

    @cached_property
    def sequences(self) -> dict[str, Ints]:
        """Stream → rows of the problem's table. Raises BadInput for a pass that the problem does not have."""
        index = self.problem.index
        try:
            return {s: np.array([index[name] for name in names], np.int64) for s, names in self.order.items()}
        except KeyError as error:
            raise BadInput(f"schedule: pass {error.args[0]} is not in the problem") from None

    @cached_property
    def _sync_rows(self) -> Ints:
        index = self.problem.index
        return np.array([[index[a], index[b]] for a, b in self.syncs], np.int64).reshape(-1, 2)

    @cached_property
    def _timeline(self) -> Timeline:
        return simulate(self.problem, list(self.sequences.values()), self._sync_rows)

    def timeline(self) -> Timeline:
        """When each pass runs, every pass as early as order and edges allow, µs. Raises Deadlock."""
        return self._timeline

    def precedence(self) -> Precedence:
        """The graph's edges, each stream's order and the syncs as one list of arcs."""
        return Precedence.of(self.problem, list(self.sequences.values()), self._sync_rows)

    def critical_path(self) -> tuple[str, ...]:
        """The chain of passes that sets the makespan."""
        return critical_path(self.timeline(), self.precedence())

    def certified(self, certificate: Certificate) -> Schedule:
        """The same schedule with this certificate."""
        return replace(self, certificate=certificate)

    def to_json(self) -> dict[str, Any]:
        """Problem, order, syncs and certificate."""
        return {
            "digest": self.problem.digest,
            "certificate": None if self.certificate is None else self.certificate.to_json(),
            "order": {stream: list(names) for stream, names in self.order.items()},
            "syncs": [list(pair) for pair in self.syncs],
            "problem": self.problem.to_json(),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any], where: str = "schedule") -> Schedule:
        """The schedule that `to_json` wrote. Raises BadInput, also where the digest is another problem's."""
        content = dict(body)
        problem = Problem.from_json(field(content, "problem", dict, where), where)
        digest = field(content, "digest", str, where)
        if digest != problem.digest:
            raise BadInput(f"{where}: field 'digest' is {digest}, but its problem's is {problem.digest}")
        order = field(content, "order", dict, where)
        if not all(isinstance(n, list) and all(isinstance(name, str) for name in n) for n in order.values()):
            raise BadInput(f"{where}: field 'order' must map streams to lists of pass names")
        syncs = field(content, "syncs", list, where)
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in syncs):
            raise BadInput(f"{where}: field 'syncs' must hold pairs of pass names")
        certificate = None if content.get("certificate") is None else field(content, "certificate", dict, where)
        return cls(
            problem,
            order,
            tuple((str(a), str(b)) for a, b in syncs),
            None if certificate is None else Certificate.from_json(certificate, where),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a schedule file, whole or not at all; `-` is standard output."""
        write_document(path, "schedule", self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a schedule file; `-` is standard input. Raises BadInput."""
        return cls.from_json(read_document(path, "schedule"), str(path))
