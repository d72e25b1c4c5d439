"""Stand-ins for engines that are on no package registry, written after what their sources say (JaxPP 0.9.2, Primus of August
2026). Generated files run with them; the engines themselves are not run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# --- JaxPP ---


class TaskType(Enum):
    """What a task does."""

    FWD = 1
    BWD = 2
    BWD_I = 3
    BWD_W = 4


@dataclass(frozen=True)
class Task:
    """One task; its latency is no part of its identity."""

    stage_id: int
    mubatch_idx: int
    fwd_or_bwd: TaskType
    latency: int = field(hash=False, compare=False)

    @classmethod
    def make(cls, stage_id: int, mubatch_idx: int, fwd_or_bwd: TaskType, latency: int) -> Task:
        return cls(stage_id, mubatch_idx, fwd_or_bwd, latency)


@dataclass(eq=True, frozen=True)
class BaseSchedule(ABC):
    """A frozen dataclass; subclasses set is_partial_bwd past its freezing."""

    num_stages: int
    is_partial_bwd: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.num_stages <= 0:
            raise ValueError("num_stages")

    @abstractmethod
    def tasks(self, n_mubatches: int) -> list[list[Task]]:
        raise NotImplementedError


JAXPP: Mapping[str, Mapping[str, Any]] = {
    "jaxpp.types": {"MpmdIdx": int, "TaskType": TaskType},
    "jaxpp.schedules": {"BaseSchedule": BaseSchedule, "Task": Task},
}


def run_jaxpp(schedule: Any, microbatches: int) -> int:
    """Run the tasks as JaxPP orders its equations: data, and gradients that add up from one microbatch to the next. The end
    of the last task, by their latencies. Raises AssertionError where JaxPP would."""
    rows = [_joined(row) for row in schedule.tasks(microbatches)]
    stages, backward = schedule.num_stages, TaskType.BWD_I if schedule.is_partial_bwd else TaskType.BWD
    adding = TaskType.BWD_W if schedule.is_partial_bwd else TaskType.BWD
    ended: dict[tuple[int, int, TaskType], int] = {}

    def before(task: Task) -> list[tuple[int, int, TaskType]]:
        s, m, word = task.stage_id, task.mubatch_idx, task.fwd_or_bwd
        found = [(s - 1, m, TaskType.FWD)] if word is TaskType.FWD and s else []
        if word is backward:
            found += [(s, m, TaskType.FWD)] + ([(s + 1, m, backward)] if s + 1 < stages else [])
        if word is TaskType.BWD_W:
            found += [(s, m, TaskType.BWD_I)]
        accumulates = word is adding or (word is backward and s == 0) or (word is TaskType.FWD and s + 1 == stages)
        return found + ([(s, m - 1, word)] if accumulates and m else [])

    clock, at = [0] * len(rows), [0] * len(rows)
    while any(i < len(row) for i, row in zip(at, rows, strict=True)):
        heads = [(rank, row[at[rank]]) for rank, row in enumerate(rows) if at[rank] < len(row)]
        ready = [rank for rank, task in heads if all(one in ended for one in before(task))]
        assert ready, "Schedule does not honor data dependencies"
        for rank in ready:
            task = rows[rank][at[rank]]
            assert schedule.get_mpmd_idx(task.stage_id) == rank
            start = max([clock[rank], *(ended[one] for one in before(task))])
            clock[rank] = ended[task.stage_id, task.mubatch_idx, task.fwd_or_bwd] = start + task.latency
            at[rank] += 1
    assert len(ended) == sum(map(len, rows))
    return max(clock)


def _joined(row: list[Task]) -> list[Task]:
    """BWD_I of stage 0 and the BWD_W right behind it are one task."""
    found: list[Task] = []
    for task in row:
        last = found[-1] if found else None
        if (task.stage_id, task.fwd_or_bwd) != (0, TaskType.BWD_W):
            found.append(task)
            continue
        pair = (0, task.mubatch_idx, TaskType.BWD_I)
        assert last is not None
        assert (last.stage_id, last.mubatch_idx, last.fwd_or_bwd) == pair, "BWD_I is not followed by BWD_W"
        found[-1] = Task(*pair, last.latency + task.latency)
    return found


# --- Primus ---


class FuncType(Enum):
    """What a node does."""

    F = "FORWARD"
    B = "BACKWARD"
    W = "W_GRAD"
    BW = "BACKWARD_W_GRAD"
    SF = "SEND_FORWARD"
    SB = "SEND_BACKWARD"
    RF = "RECV_FORWARD"
    RB = "RECV_BACKWARD"


@dataclass
class SchedulerNode:
    """One node of a rank's list."""

    func_type: FuncType
    mini_batch: int
    chunk: int
    args: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None


class Algorithm:
    """What all of Primus's schedules have."""

    def __init__(self, pp_size: int, vpp_size: int, micro_batches: int, **options: Any) -> None:
        self.pp_size, self.vpp_size, self.micro_batches = pp_size, vpp_size, micro_batches
        vars(self).update(options)

    def generate_schedule_table(self) -> list[list[SchedulerNode]]:
        raise NotImplementedError


def primus() -> Mapping[str, Mapping[str, Any]]:
    """The modules that an exported file imports, each time anew, since the file changes one."""
    names = ("1f1b", "1f1b-interleaved", "zero-bubble", "zbv-formatted")
    below = "primus.core.pipeline_parallel.scheduler"
    return {
        f"{below}.schedule_table_factory": {"pp_algorithm_map": dict.fromkeys(names, Algorithm)},
        f"{below}.scheduler_node": {"FuncType": FuncType, "SchedulerNode": SchedulerNode},
    }


SENDS, RECEIVES = {FuncType.SF: FuncType.F, FuncType.SB: None}, {FuncType.RF: FuncType.SF, FuncType.RB: FuncType.SB}


def check_primus(table: list[list[SchedulerNode]], placement: tuple[int, ...]) -> None:
    """What Primus's handlers need: each message behind what it sends, each pass behind what it takes, each message at one
    time step on both ranks and alone there, and between two ranks the same messages in the same order."""
    ranks, stages = len(table), len(placement)
    stage_of = {(rank, placement[:s].count(rank)): s for s, rank in enumerate(placement)}
    lines: dict[frozenset[int], dict[int, list[tuple[Any, ...]]]] = defaultdict(lambda: defaultdict(list))
    for rank, row in enumerate(table):
        seen: set[tuple[FuncType, int, int]] = set()
        steps: dict[int, list[FuncType]] = defaultdict(list)
        for node in row:
            s, m, word = stage_of[rank, node.chunk], node.mini_batch, node.func_type
            if word in SENDS or word in RECEIVES:
                args = node.args or {}
                a, b = args["from_pp_rank"], args["to_pp_rank"]
                step = 1 if word in (FuncType.SF, FuncType.RF) else -1
                here, other = (a, b) if word in SENDS else (b, a)
                far = s + step if word in SENDS else s - step
                assert (here, other) == (rank, placement[far])
                assert stage_of[other, args["send_to_chunk" if word in SENDS else "recv_from_chunk"]] == far
                steps[args["time_step"]].append(word)
                key = (min(s, far), m, step)
                if a != b:
                    lines[frozenset((a, b))][rank].append(key)
                elif word in RECEIVES:
                    assert (RECEIVES[word], m, stage_of_chunk(args, rank)) in seen
            if word is FuncType.SF:
                assert (FuncType.F, m, node.chunk) in seen
            elif word is FuncType.SB:
                assert {(FuncType.B, m, node.chunk), (FuncType.BW, m, node.chunk)} & seen
            elif word is FuncType.F:
                assert s == 0 or (FuncType.RF, m, node.chunk) in seen
            elif word in (FuncType.B, FuncType.BW):
                assert (FuncType.F, m, node.chunk) in seen
                assert s == stages - 1 or (FuncType.RB, m, node.chunk) in seen
            elif word is FuncType.W:
                assert (FuncType.B, m, node.chunk) in seen
            seen.add((word, m, node.chunk))
        assert all(len(words) == 1 or len(set(words)) == len(words) == 2 for words in steps.values())
    for pair, sides in lines.items():
        first, second = (sides[rank] for rank in sorted(pair))
        assert first == second
    assert ranks == max(placement) + 1


def stage_of_chunk(args: dict[str, Any], rank: int) -> int:
    """The chunk that a message on one rank comes from."""
    return int(args["recv_from_chunk"])
