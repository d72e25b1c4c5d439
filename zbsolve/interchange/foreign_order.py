"""`ForeignOrder`: the order of passes on each rank, read from another engine's file, with zbsolve's kinds of passes. Also
what several engines' files share: values in Python files (no text from users gets into code), and node lists in JSON, one
for each rank, with CrossPipe's, which have the size of each microbatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pprint import pformat
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from ..build.plain import MAX_PASSES
from ..problem import Ints, pass_name
from ..problem.placement import check_routes, parse
from ..util.errors import BadInput, prefixed
from ..util.files import COUNT, checked
from ..util.machine import library_versions
from ..util.text import printable

Routes = tuple[tuple[int, ...], ...]


class ReadCell(NamedTuple):
    """One pass in a file: stage, kind (zbsolve's) and microbatch. row, column: its position in the file."""

    stage: int
    kind: str
    microbatch: int
    row: int
    column: int

    @property
    def name(self) -> str:
        """The pass's name."""
        return pass_name(self.kind, self.stage, self.microbatch)


@dataclass(frozen=True, eq=False)
class ForeignOrder:
    """The order of passes in another engine's file.

    rows: the passes of each rank in order. format: the file's format, in words. where: its path. place: text for a position
    in the file, with row and column: "line {}, cell {}". notes: what is in the file and not in this order, a line each.
    factors: the size of each microbatch relative to the mean; (): the file has no sizes.
    """

    rows: tuple[tuple[ReadCell, ...], ...]
    format: str
    where: str
    place: str
    notes: tuple[str, ...] = ()
    factors: tuple[float, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @cached_property
    def stages(self) -> int:
        """The number of stages: up to the highest that is named."""
        return 1 + max(cell.stage for cell in self.cells())

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches: up to the highest that is named."""
        return 1 + max(cell.microbatch for cell in self.cells())

    def cells(self) -> Iterator[ReadCell]:
        """All cells, rank by rank."""
        return (cell for row in self.rows for cell in row)

    @cached_property
    def places(self) -> dict[str, list[str]]:
        """Pass name → its positions in the file, in words; a duplicated pass has several."""
        spots: dict[str, list[str]] = {}
        for cell in self.cells():
            spots.setdefault(cell.name, []).append(self.place.format(cell.row, cell.column))
        return spots

    def check_size(self) -> None:
        """Raise BadInput for no passes at all, or more than zbsolve handles."""
        if not any(self.rows):
            raise BadInput(f"{self.where}: there are no passes in it")
        if self.stages * self.microbatches > MAX_PASSES:
            largest = max(self.cells(), key=lambda cell: max(cell.stage, cell.microbatch))
            raise BadInput(
                f"{self.where}: {self.place.format(largest.row, largest.column)}: {largest.name} makes {self.stages} stages "
                f"of {self.microbatches} microbatches, more than zbsolve handles ({MAX_PASSES} in all)"
            )

    @cached_property
    def routes(self) -> Routes:
        """The routes of microbatches (stage → rank): microbatch i follows route i modulo their number.

        If passes of the same stage and microbatch are on several ranks, the rank with most of them counts; the other passes
        are misplaced. Raises BadInput for a stage or rank without passes, and if microbatches do not count from 0.
        """
        self.check_size()
        votes: dict[tuple[int, int], Counter[int]] = {}
        of_stage: list[Counter[int]] = [Counter() for _ in range(self.stages)]
        for rank, row in enumerate(self.rows):
            for cell in row:
                votes.setdefault((cell.microbatch, cell.stage), Counter())[rank] += 1
                of_stage[cell.stage][rank] += 1
        empty = next((stage for stage, ranks in enumerate(of_stage) if not ranks), None)
        if empty is not None:
            raise BadInput(f"{self.where}: no rank has a pass of stage {empty} (stages are 0 to {self.stages - 1})")
        if lowest := min(cell.microbatch for cell in self.cells()):
            raise BadInput(f"{self.where}: microbatches count from 0, and the lowest in the file is {lowest}")
        usual = [ranks.most_common(1)[0][0] for ranks in of_stage]
        table: Ints = np.tile(np.array(usual, np.int64), (self.microbatches, 1))
        for (microbatch, stage), ranks in votes.items():
            table[microbatch, stage] = ranks.most_common(1)[0][0]
        return self._shortest_period([tuple(row) for row in table.tolist()])

    def _shortest_period(self, every: list[tuple[int, ...]]) -> Routes:
        """The shortest list of routes that, repeated, gives the route of every microbatch."""
        period = next(n for n in range(1, len(every) + 1) if all(way == every[i % n] for i, way in enumerate(every)))
        idle = sorted(set(range(self.ranks)) - {rank for route in every[:period] for rank in route})
        if idle:
            raise BadInput(f"{self.where}: rank {idle[0]} has no stage of its own (rows are ranks 0 to {self.ranks - 1})")
        with prefixed(self.where):
            return check_routes(every[:period], self.ranks)


# --- Python files, and node lists ---

WIDTH = 120  # of a line in a Python file


def python_file(title: str, data: Mapping[str, Sequence[Any] | int | str], template: str) -> str:
    """A module: `title` as its docstring, each name of `data` with its value, then what `templates/<template>.txt` says."""
    values = "".join(f"{name} = {pformat(value, width=WIDTH)}\n" for name, value in data.items())
    version = library_versions()["zbsolve"]
    code = (resources.files(__package__) / "templates" / f"{template}.txt").read_text(encoding="utf-8")
    return f'"""{title}\n\nWritten by zbsolve {version}."""\n\n{values}\n{code}'


StageOf = Mapping[tuple[int, int], int]  # (rank, chunk) → stage


class Node(NamedTuple):
    """One node of a file: the engine's word for the kind, the chunk (index of the stage on its rank), the microbatch."""

    word: str
    chunk: int
    microbatch: int


class Words(NamedTuple):
    """An engine's words. kinds: for passes, named as in zbsolve. skipped: for nodes that follow from the passes."""

    kinds: Collection[str]
    skipped: Collection[str]


def order_of_nodes(rows: Sequence[Sequence[Node]], words: Words, stage_of: StageOf, format: str, where: str) -> ForeignOrder:
    """The order that the nodes list. Raises BadInput for an unknown word, and for a chunk without a stage."""
    nodes = []
    for rank, row in enumerate(rows):
        cells = []
        for i, node in enumerate(row):
            place = f"{where}: rank {rank}, node {i}"
            if node.word in words.skipped:
                continue
            if node.word not in words.kinds:
                raise BadInput(f"{place}: '{printable(node.word)[:30]}' is no pass (passes are {' '.join(words.kinds)})")
            if (rank, node.chunk) not in stage_of:
                raise BadInput(f"{place}: chunk {node.chunk} is no stage of rank {rank}")
            cells.append(ReadCell(stage_of[rank, node.chunk], node.word, node.microbatch, rank, i))
        nodes.append(tuple(cells))
    order = ForeignOrder(tuple(nodes), format, where, "rank {}, node {}")
    order.check_size()
    return order


def stages_of(placement: str, ranks: int, where: str) -> StageOf:
    """(rank, chunk) → stage of a placement by name. Raises BadInput."""
    if not ranks:
        raise BadInput(f"{where}: there are no ranks in it")
    spot = parse(placement, ranks)
    return {(rank, spot[:stage].count(rank)): stage for stage, rank in enumerate(spot)}


READ = Words(("F", "B", "W", "BW"), ())


class TaskForm(msgspec.Struct):
    """The fields of a task that an order needs; `device_id` is the rank."""

    task_type: str
    device_id: COUNT
    microbatch_id: COUNT
    chunk_id: COUNT = 0


class ScheduleForm(msgspec.Struct):
    """A file."""

    schedule: list[list[TaskForm]]
    microbatch_sizes: list[Annotated[float, msgspec.Meta(gt=0)]] = []


def read(body: Any, where: str, placement: str | None = None) -> ForeignOrder:
    """The order in a task list. Without any W in the file, a B is the whole backward. placement: by name; needed if there
    are several chunks. Raises BadInput."""
    form = checked(body, ScheduleForm, where)
    rows, sizes = form.schedule, form.microbatch_sizes
    for rank, row in enumerate(rows):
        wrong = next((i for i, task in enumerate(row) if task.device_id != rank), None)
        if wrong is not None:
            raise BadInput(f"{where}: rank {rank}, node {wrong}: field 'device_id' is {row[wrong].device_id}, another rank")
    if placement is None and any(task.chunk_id for row in rows for task in row):
        raise BadInput(f"{where}: field 'chunk_id': chunks may be a loop or a vee: say --placement")
    words = {} if any(task.task_type == "W" for row in rows for task in row) else {"B": "BW"}
    nodes = [[Node(words.get(t.task_type, t.task_type), t.chunk_id, t.microbatch_id) for t in row] for row in rows]
    stage_of = stages_of(placement or "single", len(rows), where)
    order = order_of_nodes(nodes, READ, stage_of, "CrossPipe node lists", where)
    if sizes and len(sizes) != order.microbatches:
        raise BadInput(f"{where}: field 'microbatch_sizes' has {len(sizes)} numbers for {order.microbatches} microbatches")
    return replace(order, factors=tuple(len(sizes) * size / sum(sizes) for size in sizes))
