"""`python -m benchmarks.messages`: a message between two ranks of one machine, through shared memory and through gloo.

Two processes with one thread each, the executor's own messages, both ways in turn. Shared memory is what both map. `there`:
from before the send to when the receiver has it, one message at a time, µs; `host`: CPU time of both walking threads a
message (send, post, take); `cpu`: of all threads of both processes. `stream`: bytes a second of BURST messages sent at once,
from the first send to the last one taken, GB/s.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch

from zbsolve.exec.base.program import Message
from zbsolve.exec.run.host import keep_freed_memory
from zbsolve.exec.transport.mailbox import Mailbox
from zbsolve.exec.transport.wires import CPU, Wires
from zbsolve.util.text import aligned

from .children import found_by
from .harness import Benchmark

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
WARM, TURNS, BURST = 5, 20, 8


def links(wires: Wires, size: int, count: int) -> tuple[Mailbox, list[Message], list[Message]]:
    """What this rank sends, and what it takes: so many messages of one size."""
    both = [
        [Message(f"{source}.{i}", f"{source}.{i}", source, 1 - source, source, 0, False) for i in range(count)]
        for source in (wires.rank, 1 - wires.rank)
    ]
    found = Mailbox(wires, {1 - wires.rank: tuple(both[1])}, CPU, 60)
    found.begin({0: size})
    return found, *both


def in_turn(wires: Wires, size: int) -> list[list[float]]:
    """Back and forth: half a round trip, CPU time of this thread and of this process for one message, µs."""
    one, mine, theirs = links(wires, size, WARM + TURNS)
    body, found = torch.ones(size // 4), []
    for out, back in zip(mine, theirs, strict=True):
        one.post(back)
        wall, own, cpu = time.perf_counter(), time.thread_time(), time.process_time()
        if wires.rank == 0:
            one.send(out, body)
            one.take(back)
        else:
            one.take(back)
            one.send(out, body)
        after = (time.perf_counter() - wall) / 2, time.thread_time() - own, time.process_time() - cpu
        found.append([round(1e6 * x, 1) for x in after])
    one.flush()
    return found[WARM:]


def at_once(wires: Wires, size: int) -> float:
    """From rank 0 to rank 1: seconds on rank 0 until rank 1 has said that it has them all; of two times the second."""
    body = torch.ones(size // 4)
    for _ in range(2):
        one, mine, theirs = links(wires, size, BURST)
        wires.control.barrier().wait()
        began = time.perf_counter()
        for out, back in zip(mine, theirs, strict=True):
            if wires.rank == 0:
                one.send(out, body)
            else:
                one.take(back)
        one.flush()
        wires.control.barrier().wait()
    return time.perf_counter() - began


def both_ways(rank: int, rounds: int) -> dict[str, Any]:
    """What each rank runs: the samples of every way and size."""
    keep_freed_memory()
    plain = Wires.of()
    ways = {"gloo": plain, "memory": plain.paired(dict.fromkeys(((0, 1), (1, 0)), WARM + TURNS))}
    assert len(ways["memory"].pairs) == 2, "these two processes cannot share memory"
    found: dict[str, Any] = {name: {str(size): {"turns": [], "burst": []} for size in SIZES} for name in ways}
    for _ in range(rounds):
        for size in SIZES:
            for name, wires in ways.items():
                found[name][str(size)]["turns"] += in_turn(wires, size)
                found[name][str(size)]["burst"].append(at_once(wires, size))
    return found


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a size: medians; host and cpu are sums over the two ranks, of one message."""
    rows = []
    for size in SIZES:
        row: dict[str, Any] = {"bytes": size}
        for name in found[0]:
            ends = [one[name][str(size)] for one in found]
            there, host, cpu = ([median(turn[i] for turn in end["turns"]) for end in ends] for i in range(3))
            row[name] = {
                "there_us": round(there[0], 1),
                "host_us": round(sum(host) / 2, 1),
                "cpu_us": round(sum(cpu) / 2, 1),
                "stream_gb_s": round(BURST * size / median(ends[0]["burst"]) / 1e9, 3),
            }
        rows.append(row)
    return rows


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The table as text."""
    cells = [("bytes", "way", "there µs", "host µs", "cpu µs", "stream GB/s")]
    for row in rows:
        for name in ("gloo", "memory"):
            times = (f"{row[name][what]:.1f}" for what in ("there_us", "host_us", "cpu_us"))
            cells.append((str(row["bytes"]), name, *times, f"{row[name]['stream_gb_s']:.3f}"))
    return aligned(cells, left=(1,))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians, printed at the end, and every sample of both ranks."""
    found = found_by(both_ways, 2, 300, rounds=options.rounds)
    rows = summary(found)
    print("\n".join(lines(rows)))
    return {"turns": options.rounds * TURNS, "burst": BURST, "rows": rows, "samples": found}


BENCHMARK = Benchmark("messages", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
