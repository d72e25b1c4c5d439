"""`import_schedule`: another engine's order as a verified zbsolve schedule, with a profile's times. Also reads text grids,
written by hand, with a row for each rank."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..greedy.side_stream import with_side_streams, without_side_streams
from ..problem import Problem
from ..problem.tables import Bools
from ..profile.known_steps import with_backwards_of
from ..profile.profile import Profile
from ..profile.step import Step
from ..schedule import IMPORTED, Schedule
from ..util.errors import BadInput
from ..util.files import parse_json, read_text
from ..util.text import bytes_of_ranks, exact_bytes, printable
from ..verifier import Violation, verify
from . import colossalai, primus
from . import foreign_order as crosspipe
from .foreign_order import ForeignOrder, ReadCell
from .torch_csv import COMMUNICATION, LETTERS, OVERLAPPED

WORD = re.compile(r"(\d{0,9})([A-Z_]+)(\d{0,9})")
GAP = re.compile(r"[-._·–—|]*")
SEPARATOR = re.compile(r" *[,\t] *| +")
LABEL = re.compile(r"[\w \t]*?(\d*)[ \t]*:")
OURS = ("F", "B", "W", "BW", "X")
TORCHS = {theirs: ours for ours, theirs in LETTERS.items()}

Word = tuple[str, str, int, int, int]  # stage or "", kind as written, microbatch, line, cell


def read_text_grid(text: str, where: str) -> ForeignOrder:
    """The order in a text grid. where: its name in messages. Raises BadInput naming line and cell."""
    rows: list[list[Word]] = []
    overlapped: list[str] = []
    communication = False
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        content = _content(line, f"{where}: line {number}", len(rows))
        if content is None:
            continue
        row = list(_words(content, f"{where}: line {number}", number))
        computing = [word for word in row if word[1] not in COMMUNICATION]
        communication |= len(computing) < len(row)
        parts = enumerate(SEPARATOR.split(content), 1)
        overlapped += [f"line {number}, cell {i}" for i, cell in parts if OVERLAPPED.fullmatch(_bare(cell))]
        rows.append(computing)
    _check_stages(rows, where)
    words = {kind for row in rows for _, kind, *_ in row}
    meaning = {kind: kind for kind in OURS} | (TORCHS if "I" in words else {} if "W" in words else {"B": "BW"})
    cells = tuple(
        tuple(ReadCell(int(stage or rank), meaning[kind], m, line, cell) for stage, kind, m, line, cell in row)
        for rank, row in enumerate(rows)
    )
    torchs = "I" in words or communication
    form = "torch CSV with communication" if communication else "torch CSV" if torchs else "text grid"
    order = ForeignOrder(cells, form, where, "line {}, cell {}", _of_overlaps(overlapped, where))
    order.check_size()
    return order


def _content(line: str, where: str, rank: int) -> str | None:
    """A line without comment and label; None if nothing is left. Raises BadInput for the label of another rank."""
    content = line.partition("#")[0].strip()
    if not content:
        return None
    label = LABEL.match(content)
    if label is None:
        return content
    if label[1] and int(label[1]) != rank:
        raise BadInput(f"{where}: it is labelled {label[1]}, but rows are ranks 0, 1, … and this is row {rank}")
    return content[label.end() :].strip()


def _words(content: str, where: str, line: int) -> Iterator[Word]:
    """The words of a row, including communication. Raises BadInput for a word that is no pass."""
    for number, cell in enumerate(SEPARATOR.split(content), 1):
        bare = _bare(cell)
        if GAP.fullmatch(bare):
            continue
        together = OVERLAPPED.fullmatch(bare)
        for word in together[1].split(";") if together else (bare,):
            match = WORD.fullmatch(word)
            known = match is not None and (match[2] in COMMUNICATION or (match[2] in (*OURS, *TORCHS) and match[3]))
            if match is None or not known:
                raise BadInput(
                    f"{where}, cell {number}: '{printable(cell)[:30]}' is no pass: write 0F3 (stage 0, forward, microbatch "
                    f"3) or F3; kinds are {' '.join(OURS)} and torch's I"
                )
            yield match[1], match[2], int(match[3] or 0), line, number


def _bare(cell: str) -> str:
    """A cell without quotes, in capitals."""
    return cell.strip("\"'").upper()


def _of_overlaps(places: list[str], where: str) -> tuple[str, ...]:
    """A line if a file has cells with a forward and a backward at once."""
    if not places:
        return ()
    what = "1 cell has" if len(places) == 1 else f"{len(places)} cells have"
    return (
        f"{where}: {what} a forward and a backward at once (OVERLAP_F_B), first at {places[0]}: they are read as two "
        "passes, one after the other, with the profile's time for each",
    )


def _check_stages(rows: list[list[Word]], where: str) -> None:
    """Raise BadInput if only some passes name their stage."""
    named = {bool(stage): (f"{stage}{kind}{m}", line, cell) for row in rows for stage, kind, m, line, cell in row}
    if len(named) > 1:
        (bare, line, cell), (full, *_) = named[False], named[True]
        raise BadInput(f"{where}: line {line}, cell {cell}: {bare} names no stage, but {full} does: name it everywhere")


NODES = {"func_type": primus.read, "minibatch": colossalai.read}  # a field that only this engine's nodes have → its reader


@dataclass(frozen=True)
class Imported:
    """A file's order with a profile's times. violations: of rules; (): valid. memory: bytes of each rank; None: no limit."""

    order: ForeignOrder
    schedule: Schedule
    violations: tuple[Violation, ...]
    memory: tuple[int, ...] | None

    @property
    def solver(self) -> str:
        """The `solver` in the schedule's certificate."""
        return f"{IMPORTED}{printable(Path(self.order.where).name)} ({self.order.format})"

    def told(self) -> tuple[str, ...]:
        """The violations, a line each, with the passes' positions in the file; for memory, what each rank lacks."""
        lines = [self._line_of(violation) for violation in self.violations if violation.rule != "memory"]
        return (*lines, *(self._lacking() if len(lines) < len(self.violations) else ()))

    def _line_of(self, violation: Violation) -> str:
        order = self.order
        stand = [f"{name}: {' and '.join(order.places[name])}" for name in violation.passes if name in order.places]
        text = re.sub(r"\bcompute:(\d+)", r"rank \1", str(violation))  # files know ranks, not streams
        return f"{order.where}: {text}" + (f" ({'; '.join(stand)})" if stand else "")

    def _lacking(self) -> list[str]:
        """A line for each rank with too little memory."""
        capacity = self.schedule.problem.capacity
        assert capacity is not None
        peaks = self.schedule.timeline().peak_bytes
        over = [max(0, peak - room) for peak, room in zip(peaks, capacity, strict=True)]
        return [
            f"{self.order.where}: memory: rank {rank} holds {exact_bytes(peaks[rank])} of activations at its peak, "
            f"{exact_bytes(more)} more than the {exact_bytes(capacity[rank])} that it has for them"
            for rank, more in enumerate(over)
            if more
        ]

    @property
    def needs(self) -> str | None:
        """The memory of a rank that the schedule needs, as a value of `--memory`; None if the memory is sufficient."""
        if not any(violation.rule == "memory" for violation in self.violations):
            return None
        capacity, peaks = self.schedule.problem.capacity, self.schedule.timeline().peak_bytes
        assert capacity is not None
        assert self.memory is not None
        lacking = [peak - room for peak, room in zip(peaks, capacity, strict=True)]
        if len(set(self.memory)) == 1:
            return _rounded_up(self.memory[0] + max(lacking))
        return ",".join(_rounded_up(has + max(0, more)) for has, more in zip(self.memory, lacking, strict=True))


def _rounded_up(need: int) -> str:
    return f"{-(-need // 2**20)}MiB" if need >= 2**30 else str(need)


def import_schedule(order: ForeignOrder, profile: Profile, **step: Any) -> Imported:
    """A file's order as a schedule with a profile's times.

    order: from `read_order`. It sets ranks, microbatches, placement, and which stages recompute or split their backward.
    profile: the times and bytes.
    step: further fields of `Step` (memory, partition, objective; recompute if the file has no passes X).

    Raises BadInput, and Infeasible if one microbatch does not fit the memory.
    """
    problem = problem_of(order, profile, **step)
    names = {f"compute:{rank}": tuple(cell.name for cell in row) for rank, row in enumerate(order.rows)}
    if "X" in problem.passes.kinds and not any(cell.kind == "X" for cell in order.cells()):
        names = {stream: _recomputing(problem, row) for stream, row in names.items()}
    plain = without_side_streams(problem)  # files have no all-to-alls: their order follows from that of the passes
    listed = Schedule(plain, names)
    violations = verify(plain, listed)
    room = profile.capacity if step.get("memory") is None else step["memory"]
    memory = None if room is None else bytes_of_ranks(room, order.ranks)
    return Imported(order, listed if violations else with_side_streams(problem, listed), violations, memory)


def problem_of(order: ForeignOrder, profile: Profile, **step: Any) -> Problem:
    """The problem of an order, with BW where the order has it, and B and W elsewhere. Raises BadInput, Infeasible."""
    if order.factors and not profile.microbatch_factors:
        profile = replace(profile, microbatch_factors=order.factors)
    again = {cell.stage for cell in order.cells() if cell.kind == "X"}
    options = {**step, "recompute": tuple(sorted(again))} if again else step
    return with_backwards_of(Step(order.ranks, order.microbatches, order.routes, **options), profile, *_backwards(order))


def _backwards(order: ForeignOrder) -> tuple[Bools, Bools]:
    """Two masks of shape (stages, microbatches): where the order has a BW, and where it has a B or W."""
    whole, split = np.zeros((2, order.stages, order.microbatches), bool)
    for cell in order.cells():
        if cell.kind == "BW":
            whole[cell.stage, cell.microbatch] = True
        elif cell.kind in ("B", "W"):
            split[cell.stage, cell.microbatch] = True
    return whole, split


def _recomputing(problem: Problem, row: Sequence[str]) -> tuple[str, ...]:
    """A rank's passes with each X right before the backward that waits for it, as engines run a recompute."""
    table, edges, names = problem.passes, problem.edges, problem.names
    again = np.flatnonzero(table.are("X")[edges.before] & table.are("B", "BW")[edges.after])
    x = {names[b]: names[a] for a, b in zip(edges.before[again].tolist(), edges.after[again].tolist(), strict=True)}
    return tuple(name for each in row for name in ((x[each], each) if each in x else (each,)))


def read_order(path: str | os.PathLike[str], placement: str | None = None) -> ForeignOrder:
    """Read the order in a file.

    path: of the file; `-` is standard input.
    placement: by name, for a file that has chunks and not stages.

    Raises BadInput naming file and place.
    """
    text, where = read_text(path), str(path)
    if text.lstrip()[:1] in ("[", "{"):
        return _read_nodes(parse_json(text, path), where, placement)
    if placement is not None:
        raise BadInput(f"{where}: a grid says itself which rank runs which stage: leave --placement out")
    return read_text_grid(text, where)


def _read_nodes(body: Any, where: str, placement: str | None) -> ForeignOrder:
    """Node lists in JSON. Raises BadInput."""
    if isinstance(body, dict) and "zbsolve" in body:
        raise BadInput(f"{where}: holds a {body['zbsolve']} of zbsolve itself: there is nothing to import")
    if isinstance(body, dict) and "schedule" in body:
        return crosspipe.read(body, where, placement)
    rows = body if isinstance(body, list) else []
    first = next((row[0] for row in rows if isinstance(row, list) and row and isinstance(row[0], dict)), {})
    for field, read in NODES.items():
        if field in first:
            return read(body, where, placement)
    known = " or ".join(f"'{field}'" for field in NODES)
    raise BadInput(
        f"{where}: JSON, but no list of nodes a rank (with a field {known}: Primus, ColossalAI; or in a field 'schedule': "
        "CrossPipe); costs, such as SlackPipe's and SAPP's tables, go into a CSV for zbsolve numbers"
    )
