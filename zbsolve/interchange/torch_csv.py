"""Schedules for other engines. Pure: nothing here imports torch.

`torch-csv` is the compute-only CSV that torch.distributed.pipelining reads (`_PipelineScheduleRuntime._load_csv`, torch
2.11 and newer): a line a rank, a cell a pass. Its words collide with ours, and this is where they are translated: our `B`
(input gradient) is its `I`, our `BW` is its `B`; `F` and `W` mean the same.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

import numpy as np

from ..placement import describe
from ..problem import Problem, pass_name
from ..schedule import Schedule
from ..util.errors import BadInput, Deadlock
from ..verifier import verify

LETTERS = {"F": "F", "B": "I", "W": "W", "BW": "B"}
# What torch's runtime adds to an order (`_dump_csv`, format compute_comms): it follows from the passes, so readers skip it.
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")
OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")  # a forward and a backward in one cell, one after the other here
# What makes torchtitan lay stages out in our placement; it reads nothing else from the name when there is a CSV.
TORCHTITAN = {"single": "1F1B", "loop": "PipelineScheduleMulti", "vee": "ZBVZeroBubble"}

Cell = tuple[int, str, int]  # stage, kind, microbatch


@dataclass(frozen=True)
class TorchOrder:
    """An order for torch's pipeline runtime.

    `rows`: each rank's cells, in torch's words. `placement`: stage → rank. `microbatches`: torch's microbatch i is ours
    `microbatches[i]` (torch splits a batch in that order). `overtaken`: one line for each pair of ranks whose messages
    are not used in the order in which they are sent.
    """

    rows: tuple[tuple[str, ...], ...]
    placement: tuple[int, ...]
    microbatches: tuple[int, ...]
    overtaken: tuple[str, ...]

    @property
    def csv(self) -> str:
        """The file's text."""
        return "".join(",".join(row) + "\n" for row in self.rows)

    @property
    def relabelled(self) -> bool:
        """Does any microbatch have another number in torch?"""
        return self.microbatches != tuple(range(len(self.microbatches)))

    def torchtitan(self, path: str) -> str | None:
        """torchtitan's flags for this order in the file `path`; None where it cannot lay the stages out so."""
        shape = describe(self.placement)
        name = TORCHTITAN.get(shape.rstrip("0123456789"))
        if name is None or (name == TORCHTITAN["vee"] and shape != "vee"):
            return None
        return (
            f"--parallelism.pipeline_parallel_degree {len(self.rows)} --parallelism.pipeline_parallel_schedule {name} "
            f"--parallelism.pipeline_parallel_schedule_csv {path} --parallelism.num_pp_microbatches {len(self.microbatches)}"
        )

    def notes(self, path: str) -> tuple[str, ...]:
        """What whoever loads the file `path` must know, a line each."""
        stages, count = len(self.placement), len(self.microbatches)
        found = [
            f"{len(self.rows)} ranks, {stages} stages, {count} microbatches; for torch 2.11 or newer, format compute_only"
        ]
        if self.relabelled:
            found.append(
                "microbatches are relabelled, since torch's last stage must run its forwards in order: torch's 0, 1, … are "
                f"the schedule's {', '.join(map(str, self.microbatches))}"
            )
        flags = self.torchtitan(path)
        if flags is None:
            found.append(f"torchtitan: cannot lay stages out as {describe(self.placement)} (only single, loop and vee)")
        else:
            found.append(
                f"torchtitan: {flags} (its model must come out as {stages} stages; before num_pp_microbatches there was: "
                f"training.local_batch_size / parallelism.pipeline_parallel_microbatch_size = {count})"
            )
        if self.overtaken:
            found.append(f"never with torch's defer_pp_recv=True, which would mix messages up: {self.overtaken[0]}")
        return tuple(found)


def torch_order(schedule: Schedule, *, defer_recv: bool = False) -> TorchOrder:
    """`schedule` in the words of torch's runtime, for any placement.

    `defer_recv`: for a runtime made with `defer_pp_recv=True`. Raises BadInput, naming the pass or edge, for a schedule
    that does not hold, for what the runtime cannot express, and for messages that it would mix up; Deadlock where it
    would wait for ever.
    """
    problem = schedule.problem
    placement = _placement(problem)
    violations = verify(problem, schedule)
    if violations:
        raise BadInput(f"schedule: {violations[0]}")
    _check_edges(schedule)
    rows = _rows(schedule)
    order = _complete(rows, placement)
    number = {ours: i for i, ours in enumerate(order)}
    _check_progress(rows, placement)
    overtaken = _overtaken(rows, placement)
    if defer_recv and overtaken:
        raise BadInput(f"schedule: torch's defer_pp_recv=True would mix messages up: {overtaken[0]}")
    cells = tuple(tuple(f"{s}{LETTERS[kind]}{number[m]}" for s, kind, m in row) for row in rows)
    return TorchOrder(cells, placement, order, overtaken)


def _placement(problem: Problem) -> tuple[int, ...]:
    """Stage → rank. Raises BadInput for passes that torch's runtime has no word for."""
    for one, name in zip(problem.passes, problem.names, strict=True):
        if one.kind not in LETTERS:
            raise BadInput(f"pass {name}: torch-csv has no passes of kind {one.kind} (only {' '.join(LETTERS)})")
        if one.slice:
            raise BadInput(f"pass {name}: torch-csv has no slices of a microbatch")
        first = problem.stage_ranks[one.stage][0]
        if one.rank != first:
            raise BadInput(
                f"pass {name}: stage {one.stage} is on rank {first} and on rank {one.rank}; torch-csv has one a stage"
            )
        if one.streams != (f"compute:{one.rank}",):
            raise BadInput(
                f"pass {name}: it occupies {', '.join(one.streams)}; torch-csv has one line of passes a rank, "
                f"compute:{one.rank}"
            )
    there = [stage for stage, ranks in enumerate(problem.stage_ranks) if ranks]
    if len(there) < problem.stages:
        raise BadInput(f"problem: stages {there} are not 0 to {len(there) - 1}, which torch-csv needs")
    idle = sorted(set(range(problem.ranks)) - set(problem.passes.rank.tolist()))
    if idle:
        raise BadInput(f"problem: rank {idle[0]} has no stage; torch-csv needs a line of passes for every rank")
    return tuple(ranks[0] for ranks in problem.stage_ranks)


def _check_edges(schedule: Schedule) -> None:
    """What waits on another rank must wait for a message that torch sends. (On one rank the line says it all.)"""
    problem = schedule.problem
    edges, names, rank = problem.edges, problem.names, problem.passes.rank
    silent = (rank[edges.before] != rank[edges.after]) & ~edges.carrying("activation", "gradient")
    for i in np.flatnonzero(silent).tolist():
        ends = f"{names[edges.before[i]]} → {names[edges.after[i]]}"
        raise BadInput(f"edge {ends}: torch-csv links ranks by activations and gradients only")
    for before, after in schedule.syncs:
        if rank[problem.index[before]] != rank[problem.index[after]]:
            raise BadInput(f"sync {before} → {after}: torch-csv links ranks by activations and gradients only")


def _rows(schedule: Schedule) -> list[list[Cell]]:
    p = schedule.problem.passes
    cells = [(s, k, m) for s, k, m in zip(p.stage.tolist(), p.kind_names, p.microbatch.tolist(), strict=True)]
    return [[cells[i] for i in schedule.sequences[f"compute:{rank}"].tolist()] for rank in range(schedule.problem.ranks)]


def _complete(rows: list[list[Cell]], placement: tuple[int, ...]) -> tuple[int, ...]:
    """The microbatches in the order of the last stage's forwards: torch keeps losses in that order, but reads them by
    microbatch. Raises BadInput where a microbatch lacks a pass on some stage."""
    last = len(placement) - 1
    order = tuple(m for stage, kind, m in rows[placement[last]] if (stage, kind) == (last, "F"))
    there: dict[tuple[int, int], set[str]] = {(s, m): set() for s in range(last + 1) for m in order}
    for row in rows:
        for stage, kind, m in row:
            there.setdefault((stage, m), set()).add(kind)
    for (stage, m), kinds in there.items():
        if kinds not in ({"F", "B", "W"}, {"F", "BW"}):
            has = " ".join(sorted(kinds)) or "nothing"
            raise BadInput(f"stage {stage}, microbatch {m}: torch-csv needs F B W or F BW, but there is {has}")
    return order


def _needs(cell: Cell, backward: dict[tuple[int, int], str], last: int) -> list[Cell]:
    """The passes that torch's runtime waits for before `cell`, by its own rules."""
    stage, kind, m = cell
    if kind == "F":
        return [(stage - 1, "F", m)] if stage else []
    if kind == "W":
        return [(stage, "B", m)]
    after = [(stage + 1, backward[stage + 1, m], m)] if stage < last else []
    return [(stage, "F", m), *after]


def _check_progress(rows: list[list[Cell]], placement: tuple[int, ...]) -> None:
    """Walk the rows as torch's ranks would. Raises Deadlock naming passes that wait for each other."""
    last = len(placement) - 1
    backward = {(s, m): kind for row in rows for s, kind, m in row if kind[0] == "B"}
    done: set[Cell] = set()
    at = [0] * len(rows)
    waiting: dict[Cell, int] = {}
    awake = deque(range(len(rows)))
    while awake:
        rank = awake.popleft()
        while at[rank] < len(rows[rank]):
            cell = rows[rank][at[rank]]
            missing = next((need for need in _needs(cell, backward, last) if need not in done), None)
            if missing is not None:
                waiting[missing] = rank  # one rank at most: every pass has one consumer on another rank
                break
            done.add(cell)
            at[rank] += 1
            if cell in waiting:
                awake.append(waiting.pop(cell))
    stuck = [rank for rank in range(len(rows)) if at[rank] < len(rows[rank])]
    if stuck:
        raise Deadlock(tuple(_cycle(rows, at, placement, backward, stuck[0])))


def _cycle(
    rows: list[list[Cell]], at: list[int], placement: tuple[int, ...], backward: dict[tuple[int, int], str], rank: int
) -> list[str]:
    """From the pass that `rank` waits at: what it waits for stands behind the pass that its own rank waits at, and so on
    until a rank comes again. Names, each before the one that waits for it."""
    done = {cell for row, end in zip(rows, at, strict=True) for cell in row[:end]}
    seen: dict[int, list[Cell]] = {}
    while rank not in seen:
        cell = rows[rank][at[rank]]
        need = next(n for n in _needs(cell, backward, len(placement) - 1) if n not in done)
        rank_of_need = placement[need[0]]
        behind = need != rows[rank_of_need][at[rank_of_need]]
        seen[rank] = [cell, need] if behind else [cell]
        rank = rank_of_need
    loop = list(seen.values())[list(seen).index(rank) :]
    return [_name(cell) for pair in loop for cell in pair][::-1]


def _name(cell: Cell) -> str:
    stage, kind, microbatch = cell
    return pass_name(kind, stage, microbatch)


def _overtaken(rows: list[list[Cell]], placement: tuple[int, ...]) -> tuple[str, ...]:
    """Per (source, destination): is what is sent first also used first? One line for each pair where it is not."""
    sent: dict[tuple[int, int], list[Cell]] = {}
    used: dict[tuple[int, int], list[Cell]] = {}
    backward = {(s, m): kind for row in rows for s, kind, m in row if kind[0] == "B"}
    for rank, row in enumerate(rows):
        for cell in row:
            stage, kind, _ = cell
            target = stage + {"F": 1, "B": -1}.get(kind[0], 0)
            if kind != "W" and 0 <= target < len(placement) and placement[target] != rank:
                sent.setdefault((rank, placement[target]), []).append(cell)
            for need in _needs(cell, backward, len(placement) - 1):
                if placement[need[0]] != rank:
                    used.setdefault((placement[need[0]], rank), []).append(need)
    found = []
    for (a, b), messages in sorted(sent.items()):
        pair = next(((x, y) for x, y in zip(messages, used[a, b], strict=True) if x != y), None)
        if pair is not None:
            first, early = _name(pair[0]), _name(pair[1])
            found.append(f"rank {a} sends rank {b} {first} before {early}, but {early} is used first")
    return tuple(found)
