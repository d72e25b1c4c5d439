"""A message between two ranks of one machine: through memory that both map, and through gloo, in turn.

    python -m benchmarks.messages [--rounds 5] [-o benchmarks/results/messages.json]

Two processes with one thread each, the executor's own messages. `there`: from before the send to when the receiver has it,
one message at a time, µs; `host`: CPU time of both walking threads a message (send, post, take); `cpu`: of all threads of
both processes. `stream`: bytes a second of BURST messages sent at once, from the first send to the last one taken, GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.children import found_by
from zbsolve.bench import machine, versions
from zbsolve.exec.comm import Links
from zbsolve.exec.host import keep_freed_memory
from zbsolve.exec.lower import Message
from zbsolve.exec.wires import CPU, Wires
from zbsolve.exec.worker import end_with_parent, local_network

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
WARM, TURNS, BURST = 5, 20, 8


def links(wires: Wires, size: int, count: int) -> tuple[Links, list[Message], list[Message]]:
    """What this rank sends, and what it takes: so many messages of one size."""
    both = [
        [Message(f"{source}.{i}", f"{source}.{i}", source, 1 - source, source, 0, False) for i in range(count)]
        for source in (wires.rank, 1 - wires.rank)
    ]
    found = Links(wires, {1 - wires.rank: tuple(both[1])}, CPU, 60)
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


def child(folder: Path, rank: int, rounds: int) -> None:
    """One rank."""
    end_with_parent()
    local_network()
    keep_freed_memory()
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2, timeout=limit)
    plain = Wires.of()
    ways = {"gloo": plain, "memory": plain.paired(None, CPU, dict.fromkeys(((0, 1), (1, 0)), WARM + TURNS))}
    assert len(ways["memory"].pairs) == 2, "these two processes cannot share memory"
    found: dict[str, Any] = {name: {str(size): {"turns": [], "burst": []} for size in SIZES} for name in ways}
    for _ in range(rounds):
        for size in SIZES:
            for name, wires in ways.items():
                found[name][str(size)]["turns"] += in_turn(wires, size)
                found[name][str(size)]["burst"].append(at_once(wires, size))
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def start(rounds: int) -> list[dict[str, Any]]:
    """Both ranks as processes; what each found."""
    return found_by("benchmarks.messages", 2, 300, "--rounds", str(rounds))


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


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=2)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.child:
        child(Path(options.child[0]), int(options.child[1]), options.rounds)
    found = start(options.rounds)
    rows = summary(found)
    print(f"{'bytes':>10}  {'way':8}{'there µs':>10}{'host µs':>10}{'cpu µs':>10}{'stream GB/s':>13}")
    for row in rows:
        for name in ("gloo", "memory"):
            one = row[name]
            times = f"{one['there_us']:10.1f}{one['host_us']:10.1f}{one['cpu_us']:10.1f}"
            print(f"{row['bytes']:10}  {name:8}{times}{one['stream_gb_s']:13.3f}")
    if options.output:
        facts = {"turns": options.rounds * TURNS, "burst": BURST}
        body = {"benchmark": "messages", "machine": machine(), "versions": {**versions(), "torch": torch.__version__}}
        options.output.write_text(json.dumps({**body, **facts, "rows": rows}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
