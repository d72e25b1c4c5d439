"""A schedule: an order for every stream, the certificate of how good it is, and their file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..problem import Ints, Problem
from ..problem.form import ProblemForm
from ..util.errors import BadInput, prefixed
from ..util.files import checked, read_part_of, write_document
from .order import Order, order_as_json, order_from, rows_of
from .timeline import Precedence, Timeline, critical_path, simulate


def relative_gap(value: float, bound: float) -> float:
    """(value − bound) / value: the largest share of a step of `value` µs that another schedule could save."""
    return (value - bound) / value if value else 0.0


GIVEN = "given, not solved here"  # the solver of a schedule that came without a certificate
UNCHECKED = "as a file says: "  # begins the proof of a bound that was read from a file and not proven here
IMPORTED = "imported: "  # begins the solver of a schedule from another program's file


@dataclass(frozen=True, slots=True)
class Certificate:
    """How good a schedule is and how that is known.

    objective: "makespan" or "span".
    value: of the schedule, µs.
    bound: a proven lower bound on the value of every schedule, µs.
    relaxation, ranks: which relaxation, of which ranks, gives the bound, so that `ilp.proof_check` can prove it again.
    proof: the same in words.
    solver, seconds, seed: what found the schedule, how long the search took, and its seed.
    digest: of the problem.
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
        """(value − bound) / value: the largest share of the step that another schedule could save."""
        return relative_gap(self.value, self.bound)

    @property
    def solved_here(self) -> bool:
        """Whether zbsolve found the schedule; otherwise it was given or imported."""
        return not self.solver.startswith((GIVEN, IMPORTED))

    @property
    def checked(self) -> bool:
        """Whether the bound was proven here, and not only read from a file."""
        return not self.proof.startswith(UNCHECKED)

    def unchecked(self) -> Certificate:
        """The same, marked as read from a file and not proven here."""
        return replace(self, proof=f"{UNCHECKED}{self.proof}") if self.checked else self

    @property
    def status(self) -> str:
        """ "optimal" where the bound meets the value, else "feasible"."""
        return "optimal" if self.bound >= self.value else "feasible"

    def to_json(self) -> dict[str, Any]:
        """The fields, and `gap` and `status` for readers."""
        return {**asdict(self), "ranks": list(self.ranks), "gap": self.gap, "status": self.status}

    def check(self, gap: float | None, status: str | None, where: str) -> None:
        """Raise BadInput where a file's `gap` or `status` does not follow from its value and bound."""
        for name, stated in (("status", status), ("gap", gap)):
            if stated not in (None, getattr(self, name)):
                raise BadInput(f"{where}: certificate: field '{name}' is {stated}, but value and bound say otherwise")


Split = tuple[int, ...]  # layers of each stage


class LayerRow(NamedTuple):
    """Equal layers in a row. times: µs of one's F, B and W, or F and BW. held: least bytes it keeps until B or BW."""

    number: int
    times: tuple[float, ...]
    held: int


@dataclass(frozen=True, slots=True)
class EverySplit:
    """A bound over every split of the layers into the stages of a schedule's problem, and what proves it again.

    bound: µs. layers: the model's, in rows of equal ones. message: the least µs of a message between two ranks. room: the
    most bytes of each rank, or None. looked: splits whose cuts prove the bound (see `partition.splits`). apart: splits that
    the cuts do not exclude, each with a bound of its own, µs, and its relaxation. full: ranks whose memory counts. roles:
    µs of each pass that the first, a middle and the last stage take beside their layers, a row each; (): nothing.
    """

    bound: int
    layers: tuple[LayerRow, ...]
    message: int
    room: tuple[int, ...] | None
    looked: tuple[Split, ...] = ()
    apart: tuple[tuple[Split, int, str], ...] = ()
    full: tuple[int, ...] = ()
    roles: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Schedule:
    """The order of passes on every stream of a problem, and how good it is known to be.

    problem: the step.
    order: stream → pass names, `{"compute:0": ("0F0", "0F1", "0B0", …)}`.
    syncs: further (before, after) pairs of pass names, so that any timing keeps within the memory.
    certificate: value, bound and gap, if known.
    every_split: a bound over all splits of the layers, if one was proven.

    Nothing is checked here; `verify` does that.
    """

    problem: Problem
    order: Mapping[str, tuple[str, ...]]
    syncs: tuple[tuple[str, str], ...] = ()
    certificate: Certificate | None = None
    every_split: EverySplit | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.order, Order):
            frozen = MappingProxyType({stream: tuple(names) for stream, names in self.order.items()})
            object.__setattr__(self, "order", frozen)
        object.__setattr__(self, "syncs", tuple((before, after) for before, after in self.syncs))

    def __repr__(self) -> str:
        known = self.certificate
        return f"<Schedule of {self.problem}: {f'{known.value:g} µs, {known.status}' if known else 'no certificate'}>"

    @classmethod
    def of(
        cls,
        problem: Problem,
        sequences: Mapping[str, Iterable[int] | Ints],
        syncs: Iterable[tuple[str, str]] = (),
        certificate: Certificate | None = None,
    ) -> Schedule:
        """A schedule from rows of the problem's table, per stream."""
        rows = {s: np.asarray(row if isinstance(row, np.ndarray) else list(row), np.int64) for s, row in sequences.items()}
        return cls(problem, Order(problem, rows), tuple(syncs), certificate)

    @cached_property
    def sequences(self) -> dict[str, Ints]:
        """Stream → rows of the problem's table. Raises BadInput for a pass that the problem does not have."""
        return rows_of(self.problem, self.order)

    @cached_property
    def _sync_rows(self) -> Ints:
        index = self.problem.index if self.syncs else {}
        return np.array([[index[a], index[b]] for a, b in self.syncs], np.int64).reshape(-1, 2)

    @cached_property
    def _timeline(self) -> Timeline:
        return simulate(self.problem, list(self.sequences.values()), self._sync_rows)

    def timeline(self) -> Timeline:
        """When each pass runs, as early as order and edges allow, µs. Raises Deadlock."""
        return self._timeline

    def timed(self, timeline: Timeline) -> Schedule:
        """The same schedule with a timeline that is already known, so that it is not simulated."""
        again = replace(self)
        vars(again)["_timeline"] = timeline
        return again

    def precedence(self) -> Precedence:
        """All arcs: the problem's edges, neighbours in each stream's order, and syncs."""
        return Precedence.of(self.problem, list(self.sequences.values()), self._sync_rows)

    def critical_path(self) -> tuple[str, ...]:
        """The chain of passes that sets the makespan."""
        return critical_path(self.timeline(), self.precedence())

    def certified(self, certificate: Certificate) -> Schedule:
        """The same schedule with this certificate; a known timeline is kept."""
        again = replace(self, certificate=certificate)
        known = {name: value for name, value in vars(self).items() if name in ("_timeline", "sequences")}
        vars(again).update(known)
        return again

    def within(self, rest: Problem) -> Schedule:
        """The same order on a problem that has only some of its passes."""
        kept = {stream: names for stream, names in self.order.items() if stream in rest.streams}
        order = {stream: tuple(name for name in names if name in rest.index) for stream, names in kept.items()}
        return Schedule(rest, order, tuple(pair for pair in self.syncs if all(name in rest.index for name in pair)))

    def to_json(self) -> dict[str, Any]:
        """Problem, order, syncs and certificate."""
        return {
            "digest": self.problem.digest,
            "certificate": None if self.certificate is None else self.certificate.to_json(),
            **({} if self.every_split is None else {"every_split": asdict(self.every_split)}),
            "order": order_as_json(self.order),
            "syncs": [list(pair) for pair in self.syncs],
            "problem": self.problem.to_json(),
        }

    @classmethod
    def from_json(cls, body: Any, where: str = "schedule") -> Schedule:
        """The schedule that `to_json` wrote. Raises BadInput, also if the digest is not its problem's."""
        form = checked(body, ScheduleForm, where)
        problem = Problem.from_form(form.problem, where)
        if form.digest != problem.digest:
            raise BadInput(f"{where}: field 'digest' is {form.digest}, but its problem's is {problem.digest}")
        if form.certificate is not None:
            stated = body["certificate"]
            form.certificate.check(stated.get("gap"), stated.get("status"), where)
        with prefixed(where):
            return cls(problem, order_from(problem, form.order), tuple(form.syncs), form.certificate, form.every_split)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a schedule file, whole or not at all; `-` is standard output."""
        write_document(path, "schedule", self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a schedule file, or the schedule in a plan file; `-` is standard input. Raises BadInput."""
        return cls.from_json(read_part_of(path, "schedule", ("plan",)), str(path))


class ScheduleForm(msgspec.Struct, forbid_unknown_fields=True):
    """A schedule in a file."""

    digest: str
    order: dict[str, str | list[str]]
    syncs: list[tuple[str, str]]
    problem: ProblemForm
    certificate: Certificate | None = None
    every_split: EverySplit | None = None
