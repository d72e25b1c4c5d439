"""Processes that keep a core or a link busy: `python -m profiler.busy_process MODEL SEED LAYERS` runs these layers until its
standard input ends. Two processes with further arguments `FOLDER RANK SECONDS` exchange messages over gloo: rank 1 answers,
rank 0 runs the layers with and without concurrent messages, and prints both times."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from subprocess import DEVNULL, PIPE
from threading import Event, Thread

import torch
import torch.distributed as dist

from zbsolve.exec.run.host import end_with_parent, keep_freed_memory, local_network
from zbsolve.models.by_name import load
from zbsolve.util.errors import BadInput, RunFailed, is_out_of_memory, one_line
from zbsolve.util.files import temporary_folder
from zbsolve.util.machine import child_environment

from .dataflow import place
from .stage_rounds import TURNS, PassTimer, Sample, batches, rounds, stages_of

FAILURE_PREFIX = "failed: "  # begins the output of such a process if its model fails
START_SECONDS = 120.0  # for each process to answer
MESSAGE_BYTES = 1 << 22
WARM_ROUNDS, LEAST_TURNS, ALONE_SECONDS = 6, 9, 0.5  # before measuring; of each kind; for messages alone


def exchange(rank: int, stop: Event, took: list[float]) -> None:
    """Send messages to and fro, one after the other, until `stop`; appends the µs of each round trip to `took`."""
    out, back = (torch.zeros(MESSAGE_BYTES // 4) for _ in range(2))
    while not stop.is_set():
        begin = time.monotonic()
        for work in (dist.isend(out, 1 - rank), dist.irecv(back, 1 - rank)):
            assert work is not None
            work.wait()
        took.append((time.monotonic() - begin) * 1e6)


@contextmanager
def messages(took: list[float]) -> Iterator[None]:
    """Messages go to and fro inside the block."""
    stop = Event()
    thread = Thread(target=exchange, args=(0, stop, took))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def beside_messages(turns: Iterator[list[Sample]], seconds: float) -> dict[str, dict[str, list[float]]]:
    """Rounds of passes with and without concurrent messages, alternating: "alone" and "beside" → "<layer>/<kind>" → µs; and
    the µs of "messages" without passes and with them."""
    samples: dict[str, dict[str, list[float]]] = {"alone": {"messages": []}, "beside": {"messages": []}}
    for _ in range(WARM_ROUNDS):
        next(turns)
    with messages(samples["alone"]["messages"]):
        time.sleep(ALONE_SECONDS)
    begin, done = time.monotonic(), 0
    while time.monotonic() - begin < seconds or done < LEAST_TURNS:
        for where, rows in samples.items():
            with messages(rows["messages"]) if where == "beside" else nullcontext():
                for layer, kind, us, _ in (row for _ in TURNS for row in next(turns)):
                    rows.setdefault(f"{layer}/{kind}", []).append(us)
        done += 1
    return samples


def main(spec: str, seed: str, layers: str, *pair: str) -> None:
    """The main function of one such process."""
    end_with_parent()
    keep_freed_memory()
    torch.set_num_threads(1)
    if pair:
        local_network()
        dist.init_process_group("gloo", init_method=f"file://{pair[0]}/store", rank=int(pair[1]), world_size=2)
        if pair[1] == "1":
            exchange(1, Event(), [])
    model = load(spec, int(seed))
    cpu = torch.device("cpu")
    timer = PassTimer(cpu)
    turns = rounds([stages_of(model, [int(i) for i in layers.split(",")])], batches(model, cpu), timer, recompute=bool(pair))
    try:
        next(turns)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        sys.stdout.write(f"{FAILURE_PREFIX}{timer.at[1]} of {place(model, timer.at[0])}: {one_line(error)}\n")
        sys.stdout.flush()
        sys.exit(1)
    sys.stdout.write(f"{json.dumps(beside_messages(turns, float(pair[2]))) if pair else 'ready'}\n")
    sys.stdout.flush()
    if pair:
        os._exit(0)  # not through gloo's destructors, which wait for the other end
    for _ in turns:
        pass


# --- The process that starts them ---

Row = tuple[Sequence[str], dict[str, str]]


def times_beside_messages(spec: str, seed: int, layers: Sequence[int], seconds: float) -> dict[str, dict[str, list[float]]]:
    """Times of layers and messages, alone and both at once (see `beside_messages`), in two processes. Raises RunFailed."""
    with temporary_folder("beside") as folder:
        rows: list[Row] = [((*_words(spec, seed, layers), str(folder), str(rank), str(seconds)), {}) for rank in (0, 1)]
        with processes(__name__, rows, PIPE, DEVNULL) as (first, _):
            return dict(json.loads(_wait_ready(first, time.monotonic() + seconds + START_SECONDS, spec)))


@contextmanager
def busy(spec: str, seed: int, layers: Sequence[int], count: int) -> Iterator[None]:
    """Inside the block `count` processes run rounds. Raises BadInput, RunFailed if one does not start."""
    with processes(__name__, [(_words(spec, seed, layers), {})] * count, PIPE, DEVNULL) as children:
        until = time.monotonic() + START_SECONDS
        for child in children:
            _wait_ready(child, until, spec)
        yield


def _words(spec: str, seed: int, layers: Sequence[int]) -> tuple[str, ...]:
    return spec, str(seed), ",".join(map(str, layers))


@contextmanager
def processes(module: str, rows: Sequence[Row], stdout: int, stderr: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process `python -m module` for each row: its arguments, and what is added to its environment. They end with the
    block."""
    children = list[subprocess.Popen[bytes]]()
    try:
        for arguments, added in rows:
            command, around = [sys.executable, "-m", module, *arguments], child_environment() | added
            children.append(subprocess.Popen(command, stdin=PIPE, stdout=stdout, stderr=stderr, env=around))
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _wait_ready(child: subprocess.Popen[bytes], until: float, spec: str) -> str:
    assert child.stdout is not None
    there, _, _ = select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))
    line = child.stdout.readline().decode(errors="replace").strip() if there else ""
    if line.startswith(FAILURE_PREFIX):
        raise BadInput(f"model '{spec}': {line.removeprefix(FAILURE_PREFIX)}")
    if not line:
        raise RunFailed("a process beside did not answer")
    return line


if __name__ == "__main__":
    main(*sys.argv[1:])
