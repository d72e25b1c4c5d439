"""One rank of a run: it joins the process group, runs its job, and ends in time whatever happens. Ranks are torchrun's, or
`launch.run_local`'s."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from ..errors import BadInput
from ..schedule import Schedule
from ..trace import Trace
from .failure import LostRank, one_line

if TYPE_CHECKING:
    from .job import Options

Announce = Callable[[str], None]
SLOW = ("", "start", "joining", "building", "checking", "collecting", "leaving")  # these may take the start-up timeout
LATE = 3.0  # seconds that a rank gets beyond its timeout, to say what it waited for


def torchrun_environment() -> tuple[int, int] | None:
    """(rank, number of ranks) where torchrun started this process."""
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(ranks)) if rank.isdigit() and ranks.isdigit() else None


def run_torchrun(path: str, spec: str, options: Options) -> tuple[Schedule, Trace] | None:
    """Run the schedule in `path` as one of torchrun's ranks. Rank 0 returns schedule and trace, the others None.

    Raises BadInput, on all ranks where one cannot begin, and RunFailed in one line naming rank, pass and cause.
    """
    place = torchrun_environment()
    if place is None:
        raise BadInput("run: not started by torchrun")
    rank, ranks = place
    schedules: list[Schedule] = []

    def prepare() -> Schedule:
        schedules.append(Schedule.load(path))
        wanted = schedules[0].problem.ranks * options.replicas
        if ranks != wanted:
            each = f", {options.replicas} times" if options.replicas > 1 else ""
            one = schedules[0].problem.ranks
            started = f"torchrun started {ranks} (--nproc-per-node {wanted} on one machine)"
            text = f"run: the schedule is for {one} ranks{each}, but {started}"
            raise BadInput(text)
        fit(schedules[0], spec, options)
        return schedules[0]

    trace = run_group(rank, ranks, "env://", prepare, spec, options, lambda name: None)
    return None if trace is None else (schedules[0], trace)


def fit(schedule: Schedule, spec: str, options: Options) -> None:
    """What can be said before anything runs. Raises BadInput."""
    from profiler.models import load

    from .emulate import Times
    from .layers import layer_counts
    from .lower import lower

    model = load(spec, options.seed)
    lower(schedule)
    layer_counts(schedule.problem, len(model.layers))
    if options.emulate is not None:
        Times.of(schedule, options.emulate)


def run_group(
    rank: int, ranks: int, rendezvous: str, prepare: Callable[[], Schedule], spec: str, options: Options, announce: Announce
) -> Trace | None:
    """Join the process group, run this rank, leave. `prepare`: what each rank does before; all hear where it fails.

    Raises BadInput, RunFailed. A rank that does not get on in time, and cannot say so, ends itself.
    """
    import torch
    import torch.distributed as dist

    from .job import run_rank
    from .peers import Peers, agreed
    from .wires import Wires

    torch.set_num_threads(1)
    clock = Watchdog(rank, options, announce)
    clock.announce("joining")
    limit = timedelta(seconds=options.start_timeout)
    try:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=limit)
    except Exception as error:
        raise LostRank(f"rank {rank}: cannot join the process group: {one_line(error)}") from None
    wires = Wires.of()
    with Peers(wires, options.start_timeout).telling(lambda: clock.name):
        with agreed(wires, "job", json.dumps([spec, asdict(options)])):
            schedule = prepare()
        trace = run_rank(schedule, spec, options, clock.announce)
        clock.announce("leaving")
        wires.wait(wires.control.barrier())
    dist.destroy_process_group()
    clock.stop()
    return trace


class Watchdog:
    """Ends this process, with a line on standard error, when it announces nothing for longer than what it is doing may
    take: a rank that hangs can say nothing itself, and torchrun knows of no pass. `name`: what was announced last."""

    def __init__(self, rank: int, options: Options, announce: Announce) -> None:
        self.name = ""
        self._rank, self._options, self._announce = rank, options, announce
        self._since = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def announce(self, name: str) -> None:
        """This rank now does `name`: a pass, or one of SLOW."""
        self.name, self._since = name, time.monotonic()
        self._announce(name)

    def stop(self) -> None:
        """All is done."""
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            name, since = self.name, self._since
            limit = allowed(name, self._options)
            if time.monotonic() - since > limit + LATE and name == self.name:
                os.write(2, f"zbsolve run: rank {self._rank}, pass {name}: not done after {limit:g} s\n".encode())
                os._exit(1)


def allowed(name: str, options: Options) -> float:
    """Seconds that `name` may take."""
    return options.start_timeout if name in SLOW else options.timeout
