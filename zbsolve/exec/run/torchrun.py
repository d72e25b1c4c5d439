"""One rank of a run, started by torchrun or by `launch.run_local`: it joins the process group, runs its job, and ends in
time in any case."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...long_steps.check import CheckedRounds, RankPart, near_lanes, peaks
from ...long_steps.files import check_unrolled, load, mark, read, with_orders
from ...long_steps.repeated import RepeatedSchedule
from ...models.by_name import load as load_model
from ...problem import Problem
from ...schedule import Schedule
from ...schedule.trace import Trace
from ...util.errors import BadInput, LostRank, ZbsolveError, one_line
from ..choices import BACKENDS, device_of, local_place
from ..emulate import OWN_TIMES, Times
from ..layers import forwards_alone, layer_counts
from ..lowering import check_by_rank, check_runs, lower
from ..mesh import DATA, PIPELINE, coordinate_of, located
from ..reports import RunNumbers
from ..transport.format import receive_value, send_value
from ..transport.mailbox import Looker
from ..transport.peers import Peers, agreed
from ..transport.wires import Wires
from .host import check_host_memory, set_environment
from .job import Options, run_rank


@dataclass(frozen=True, eq=False)
class Rounds:
    """A file of rounds (see `long_steps`) in one process of a run. long: without orders. mark: a digest of the whole file.
    checked: everything, on rank 0."""

    path: str
    long: RepeatedSchedule
    mark: str
    checked: CheckedRounds | None

    def whole(self) -> Schedule:
        """The schedule with all its passes."""
        return load(self.path).unrolled()


Given = Schedule | CheckedRounds | Rounds


def read_schedule(path: str, rank: int = 0) -> Schedule | Rounds:
    """Read a schedule's file. Raises BadInput; on rank 0 also for rounds that are not valid."""
    content = read(path)
    if isinstance(content, Schedule):
        return content
    long, orders = content
    return Rounds(path, long, mark(long, orders), None if rank else CheckedRounds.of(with_orders(long, orders, path)))


def step_of(given: Given) -> Problem:
    """A problem with everything that holds for the whole step, except the number of microbatches."""
    return given.problem if isinstance(given, Schedule) else given.long.one


class Prediction(NamedTuple):
    """The prediction for a run. step: see `step_of`. makespan: µs. peaks: the most bytes that each rank's passes hold."""

    step: Problem
    makespan: float
    peaks: tuple[int, ...]

    @classmethod
    def of(cls, given: Given) -> Prediction:
        """The prediction of a schedule, as rank 0 knows it."""
        if isinstance(given, Schedule):
            timeline = given.timeline()
            return cls(given.problem, timeline.makespan, timeline.peak_bytes)
        rounds = given.checked if isinstance(given, Rounds) else given
        assert rounds is not None
        problem, order = rounds.long.one, rounds.long.order
        return cls(problem, rounds.makespan, tuple(peaks(problem, order).tolist()))


def own_part(rounds: Rounds, wires: Wires, sizes: Mapping[str, int]) -> RankPart:
    """This process's part. sizes: of the mesh. All processes call this. Raises BadInput where their files differ."""
    with agreed(wires, "file of rounds", rounds.mark):
        pass
    rank, long = coordinate_of(sizes, wires.rank)[PIPELINE], rounds.long
    if rounds.checked is None:
        digest, start = receive_value(wires, 0)
        return RankPart(long.one, long.microbatches, long.round, rank, near_lanes(long.one, rank), start.numpy(), digest)
    for other in range(1, wires.size):
        part = rounds.checked.part(coordinate_of(sizes, other)[PIPELINE])
        send_value(wires, (part.digest, torch.from_numpy(np.ascontiguousarray(part.start, np.int64))), other)
    return rounds.checked.part(rank)


Announce = Callable[[str], None]
WATCH_SECONDS = 0.2
LATE_SECONDS = 3.0  # that a rank gets beyond its timeout, to report what it waited for


def torchrun_environment() -> tuple[int, int] | None:
    """(rank, number of ranks) if torchrun started this process; else None."""
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(ranks)) if rank.isdigit() and ranks.isdigit() else None


def run_torchrun(path: str, spec: str, options: Options) -> tuple[Prediction, Trace | RunNumbers] | None:
    """Run the schedule in file `path` as one of torchrun's ranks. Rank 0 returns what was predicted and what was measured
    (see `job.run_rank`), the others None.

    Raises BadInput, on all ranks where one cannot begin, and RunFailed in one line naming rank, pass and cause.
    """
    place = torchrun_environment()
    if place is None:
        raise BadInput("not started by torchrun: add --local to start the ranks here, or use torchrun --nproc-per-node N")
    rank, ranks = place
    local, local_ranks = local_place()
    set_environment(options.device, options.share_gpus)
    options = options.on(local_ranks)
    predicted: list[Prediction] = []

    def prepare() -> Schedule | Rounds:
        given = read_schedule(path, rank)
        needed = step_of(given).ranks
        wanted = math.prod(options.sizes(needed).values())
        if ranks != wanted:
            started = f"torchrun started {ranks} (--nproc-per-node {wanted} on one machine)"
            asked = f"--mesh {options.mesh} has {wanted}" if options.mesh else f"the schedule is for {needed}"
            raise BadInput(f"run: {asked} ranks, but {started}")
        fit(given, spec, options)
        if rank == 0:
            predicted.append(Prediction.of(given))
        return given

    measured = run_group((rank, ranks, local), "env://", prepare, spec, options, lambda name: None)
    return None if measured is None else (predicted[0], measured)


def fit(given: Given, spec: str, options: Options) -> None:
    """Raise BadInput where schedule, model and options do not fit together, before anything runs."""
    model, step = load_model(spec, options.seed), step_of(given)
    sizes = options.sizes(step.ranks)
    spread = [name for name, size in sizes.items() if name not in (PIPELINE, *DATA) and size > 1]
    if spread and model.parallelize is None:
        raise BadInput(f"--mesh {options.mesh}: model '{spec}' has no parallelize(stage, mesh), which {spread[0]} needs")
    if isinstance(given, Schedule):
        lower(given, training=not forwards_alone(step))
    else:
        _check_rounds(given.long, options)
    layer_counts(step, len(model.layers))
    if not isinstance(given, Schedule):
        return
    if options.emulate is not None:
        Times.of(given, options.emulate)
    elif step.source == "" or step.source.endswith(f": {spec}"):  # else another model takes its place
        check_host_memory(given)


def _check_rounds(long: RepeatedSchedule, options: Options) -> None:
    """Raise BadInput where a file of rounds cannot run rank by rank, or where the options need all passes in one place."""
    check_runs(long.one, training=not forwards_alone(long.one))
    check_by_rank(long.one)
    if options.look:
        raise BadInput("run --watch N: of a file of rounds no process sees what is slow: each rank knows its own passes")
    if options.whole_trace:
        check_unrolled(long, "run -o: a trace has a row for each pass")
    if options.emulate is not None:
        check_unrolled(long, "run --emulate: devices tell each other of each pass")
        if options.emulate != OWN_TIMES:
            raise BadInput(f"run --emulate {options.emulate}: of a file of rounds devices have its own times: {OWN_TIMES}")


def run_group(
    place: tuple[int, int, int],
    rendezvous: str,
    prepare: Callable[[], Schedule | Rounds],
    spec: str,
    options: Options,
    announce: Announce,
) -> Trace | RunNumbers | None:
    """Join the process group, run a rank, leave. place: the rank, how many there are, and its number on its machine.
    rendezvous: torch's `init_method`. prepare: reads and checks the schedule first; if it fails on one rank, it fails on
    all. announce: called with what the rank does. Raises BadInput, RunFailed. A rank that hangs, and cannot report that,
    ends its own process."""
    rank, ranks, local = place
    torch.set_num_threads(1)
    clock = Watchdog(rank, options, announce)
    clock.announce("joining")
    limit = timedelta(seconds=options.start_timeout)
    device = device_of(options.device, local, options.share_gpus)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(BACKENDS[device.type], init_method=rendezvous, rank=rank, world_size=ranks, timeout=limit)
    except Exception as error:
        raise LostRank(f"rank {rank}: cannot join the process group: {one_line(error)}") from None
    wires, sizes = Wires.of(), dict[str, int]()
    try:
        with Peers(wires, options.start_timeout).telling(lambda: clock.name):
            with agreed(wires, "job", json.dumps([spec, asdict(options)])):
                given = prepare()
                sizes |= options.sizes(step_of(given).ranks)
            if isinstance(given, Rounds):
                own: Schedule | RankPart = own_part(given, wires, sizes)
                whole = None if given.checked is None else given.whole
            else:
                own, whole = given, None
            del given  # frees the orders of all ranks before the model is built
            trace = run_rank(own, spec, options, clock.announce, whole, device)
            clock.announce("leaving")
            wires.wait(wires.control.barrier())
    except ZbsolveError as error:
        error.args = (located(sizes, rank, str(error)),)
        raise
    if device.type == "cpu":  # with a GPU, the end of the process does that without waiting for peers
        dist.destroy_process_group()
    clock.stop()
    return trace


class Watchdog:
    """Ends this process, with a line on standard error, when its current task takes longer than allowed. A rank that hangs
    cannot report that itself, and torchrun knows no passes. name: the last announced task."""

    def __init__(self, rank: int, options: Options, announce: Announce) -> None:
        self.name = ""
        self._rank, self._options, self._announce = rank, options, announce
        self._since = time.monotonic()
        self._busy = Looker(self.look, WATCH_SECONDS).busy
        self._busy.set()

    def announce(self, name: str) -> None:
        """This rank now does `name`: a pass, or one of `SLOW_TASKS`."""
        self.name, self._since = name, time.monotonic()
        self._announce(name)

    def stop(self) -> None:
        """The rank is done."""
        self._busy.clear()

    def look(self) -> None:
        """End the process if its task is late."""
        name, since = self.name, self._since
        limit = self._options.allowed(name)
        if time.monotonic() - since > limit + LATE_SECONDS and name == self.name:
            os.write(2, f"zbsolve run: rank {self._rank}, pass {name}: not done after {limit:g} s\n".encode())
            os._exit(1)
