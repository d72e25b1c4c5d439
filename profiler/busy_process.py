"""Processes that keep a core or a link busy: `python -m profiler.busy_process MODEL SEED LAYERS` runs these layers until its
standard input ends. Two processes with further arguments `FOLDER RANK SECONDS` exchange messages over gloo: rank 1 answers,
rank 0 runs the layers with and without concurrent messages, and prints both times."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Event, Thread

import torch
import torch.distributed as dist

from zbsolve.exec.run.host import end_with_parent, keep_freed_memory, local_network
from zbsolve.models.by_name import load
from zbsolve.util.errors import is_out_of_memory, one_line

from .dataflow import place
from .stage_rounds import TURNS, PassTimer, Sample, batches, rounds, stages_of

FAILURE_PREFIX = "failed: "  # begins the output of such a process if its model fails
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


if __name__ == "__main__":
    main(*sys.argv[1:])
