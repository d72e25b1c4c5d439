"""The links between neighbouring ranks, measured through the executor's own messages: by message size, in one direction and
in both at once, and what computing loses meanwhile.

They are measured over torchrun's ranks where it started this process, else between two processes of this machine
(`python -m profiler.links FOLDER RANK TIMEOUT [BYTES BYTES]` is one of them).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from zbsolve.exec.program import Message
from zbsolve.exec.run.worker import end_with_parent, local_network
from zbsolve.exec.transport.clocks import clock_lead
from zbsolve.exec.transport.failure import RunFailed
from zbsolve.exec.transport.mailbox import Mailbox
from zbsolve.exec.transport.wires import Wires, receive_bytes, send_bytes
from zbsolve.layer import Link
from zbsolve.util.files import write_text
from zbsolve.util.machine import child_environment
from zbsolve.util.temporary import temporary_folder

from .collectives import Curve, Sizes, measured_collectives, measured_curves

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
REPEATS, WARMUPS = 20, 5
WIDTH = 256  # of the matrices that are multiplied meanwhile: some 100 µs on a core
Stamps = dict[str, int]


@dataclass(frozen=True)
class Pair:
    """Samples of two neighbouring ranks, µs. one: message bytes → from before the send to when the receiver goes on, in both
    directions, one message at a time. both: the same while a message goes the other way. alone, busy: a fixed piece of
    work without messages, and while the largest ones go both ways."""

    ranks: tuple[int, int]
    one: dict[int, list[float]]
    both: dict[int, list[float]]
    alone: list[float]
    busy: list[float]

    @property
    def link(self) -> Link:
        """Latency and bandwidth, one direction at a time."""
        return fit(self.one)

    def facts(self) -> dict[str, object]:
        """The fit, and by what factor the largest message takes longer against another one, and work while both are on their
        way."""
        largest = max(self.one)
        return {
            "ranks": list(self.ranks),
            **asdict(self.link),
            "both_ways": median(self.both[largest]) / median(self.one[largest]),
            "work_beside": median(self.busy) / median(self.alone),
        }


class Survey(NamedTuple):
    """What was measured between ranks. collectives: kind → samples, between all of `ranks` (see `measured_collectives`);
    curves: of each kind by group and bytes, where torchrun started the ranks."""

    pairs: list[Pair]
    ranks: int
    collectives: dict[str, list[float]]
    curves: list[Curve]


def slowest(pairs: list[Pair]) -> Pair:
    """The pair where the largest message takes longest: problems know one link, and the slowest is safe."""
    return max(pairs, key=lambda pair: median(pair.one[max(pair.one)]))


def samples_of(pairs: list[Pair]) -> dict[str, list[float]]:
    """Samples by name: `link/<bytes>` of the slowest pair, and every pair's under `<what> <rank>-<rank>`."""
    found = {f"link/{size}": row for size, row in slowest(pairs).one.items()}
    for pair in pairs:
        name = f"{pair.ranks[0]}-{pair.ranks[1]}"
        if len(pairs) > 1:
            found |= {f"link/{size} {name}": row for size, row in pair.one.items()}
        found |= {f"link/{size} both ways {name}": row for size, row in pair.both.items()}
        found |= {f"work alone {name}": pair.alone, f"work beside messages {name}": pair.busy}
    return found


def measure_links(timeout: float = 120.0, group: Any = None, sizes: Sizes | None = None) -> Survey:
    """The pairs of torchrun's ranks, and all of them together, where a process group is up (rank 0 calls this and the others
    `survey`); else, or where `group` is of one rank, a pair of processes that are started here. group: the pipeline's;
    None: all ranks. sizes: what a sharded vocabulary sends; None: it is not measured. Raises RunFailed where it takes longer
    than `timeout` seconds."""
    if dist.is_initialized() and (group is None or dist.get_world_size(group) > 1):
        found = survey(timeout, group, sizes)
        assert found is not None
        return found
    with temporary_folder("link") as folder:
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "profiler.links", str(folder), str(rank), str(timeout), *map(str, sizes or ())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=child_environment(),
            )
            for rank in range(2)
        ]
        try:
            _wait(children, timeout)
            rows, collectives = json.loads((folder / "survey").read_text(encoding="utf-8"))
            return Survey([_pair(row) for row in rows], len(children), collectives, [])
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.communicate()


def fit(samples: dict[int, list[float]]) -> Link:
    """The line through the medians with the least relative errors; neither latency nor slope is negative."""
    sizes = np.array(sorted(samples), float)
    times = np.array([median(samples[int(size)]) for size in sizes])
    slope, latency = np.polyfit(sizes, times, 1, w=1 / times)
    return Link(max(0.0, float(latency)), 1 / max(float(slope), 1e-9))


def survey(timeout: float, group: Any = None, sizes: Sizes | None = None, *, curves: bool = True) -> Survey | None:
    """Every pair of neighbouring ranks in turn, while the other ranks wait, and then all ranks together. Every rank of the
    process group calls this (None: the default one); rank 0 says the sizes and gets what was found. curves: whether all
    kinds of collectives are timed."""
    plain = Wires.of(group)
    offset = clock_lead(plain)
    directions = [(low + way, low + 1 - way) for low in range(plain.size - 1) for way in range(2)]
    wires = plain.paired(group, torch.device("cpu"), dict.fromkeys(directions, len(SIZES) * (WARMUPS + REPEATS)))
    found = []
    for low in range(wires.size - 1):
        dist.barrier(group)
        mine: dict[str, object] = {}
        if wires.rank in (low, low + 1):
            mine = _one_end(wires, 2 * low + 1 - wires.rank, offset, timeout)
        ends = [_collect(wires, rank, mine) for rank in (low, low + 1)]
        if wires.rank == 0:
            found.append(_joined((low, low + 1), ends))
    collectives = measured_collectives(group, offset, sizes)
    by_group = measured_curves(group, offset) if curves else []
    dist.barrier(group)
    wires.close()
    return Survey(found, wires.size, collectives, by_group) if wires.rank == 0 else None


def _collect(wires: Wires, rank: int, mine: dict[str, object]) -> dict[str, object]:
    """What `rank` measured, on rank 0."""
    if rank == wires.rank == 0:
        return mine
    if rank == wires.rank:
        send_bytes(wires, json.dumps(mine).encode(), 0)
    if wires.rank == 0:
        body: dict[str, object] = json.loads(receive_bytes(wires, rank))
        return body
    return {}


def _one_end(wires: Wires, other: int, offset: int, timeout: float) -> dict[str, object]:
    one = _exchange(wires, other, offset, timeout, at_once=False)
    both = _exchange(wires, other, offset, timeout, at_once=True)
    alone, busy = _work(wires, other, timeout)
    return {"one": one, "both": both, "alone": alone, "busy": busy}


def _messages(source: int, destination: int, sizes: tuple[int, ...] = SIZES) -> list[Message]:
    """All that one end sends. `boundary` holds the size, and one more in the direction down: so each direction agrees on
    shapes by itself, for both start at once."""
    down = int(source > destination)
    keys = [(size, f"{size}.{i}.{source}") for size in sizes for i in range(WARMUPS + REPEATS)]
    return [Message(key, key, source, destination, size + down, 0, False) for size, key in keys]


def _open(
    wires: Wires, other: int, timeout: float, sizes: tuple[int, ...] = SIZES
) -> tuple[Mailbox, list[tuple[Message, Message]]]:
    """The mailbox of this end, and messages out and back in turn."""
    mine, theirs = _messages(wires.rank, other, sizes), _messages(other, wires.rank, sizes)
    mailbox = Mailbox(wires, {other: tuple(theirs)}, torch.device("cpu"), timeout)
    mailbox.begin({0: 0})
    return mailbox, list(zip(mine, theirs, strict=True))


def _exchange(wires: Wires, other: int, offset: int, timeout: float, *, at_once: bool) -> dict[str, Stamps]:
    """Messages back and forth, one at a time or both at once, whose receives are posted before. Stamps in ns of rank 0's
    clock, by message."""
    mailbox, messages = _open(wires, other, timeout)
    sent: Stamps = {}
    taken: Stamps = {}
    for out, back in messages:
        mailbox.post(back)
        body = torch.zeros(out.boundary // 4)
        order = ("send", "take") if at_once or wires.rank < other else ("take", "send")
        for what in order:
            if what == "send":
                sent[out.before] = time.monotonic_ns() - offset
                mailbox.send(out, body)
            else:
                mailbox.take(back)
                taken[back.before] = time.monotonic_ns() - offset
    mailbox.flush()
    return {"sent": sent, "taken": taken}


def _work(wires: Wires, other: int, timeout: float) -> tuple[list[float], list[float]]:
    """µs of a product of matrices, by itself, and while the largest message goes each way."""
    mailbox, messages = _open(wires, other, timeout, SIZES[-1:])
    matrix = torch.ones(WIDTH, WIDTH)
    alone, busy = [], []
    for out, back in messages:
        alone.append(_product(matrix))
        mailbox.post(back)
        mailbox.send(out, torch.zeros(out.boundary // 4))
        busy.append(_product(matrix))
        mailbox.take(back)
    mailbox.flush()
    return alone[WARMUPS:], busy[WARMUPS:]


def _product(matrix: torch.Tensor) -> float:
    start = time.monotonic_ns()
    matrix.mm(matrix)
    return (time.monotonic_ns() - start) / 1000


def _joined(ranks: tuple[int, int], ends: list[dict[str, object]]) -> Pair:
    """A pair from both ends' stamps."""
    times = {way: {size: _times([end[way] for end in ends], ranks, size) for size in SIZES} for way in ("one", "both")}  # type: ignore[misc]
    work = {what: [us for end in ends for us in end[what]] for what in ("alone", "busy")}  # type: ignore[attr-defined]
    return Pair(ranks, times["one"], times["both"], work["alone"], work["busy"])


def _times(ends: list[dict[str, Stamps]], ranks: tuple[int, int], size: int) -> list[float]:
    return [
        (ends[1 - sender]["taken"][key] - ends[sender]["sent"][key]) / 1000
        for i in range(WARMUPS, WARMUPS + REPEATS)
        for sender in range(2)
        for key in [f"{size}.{i}.{ranks[sender]}"]
    ]


def _pair(row: dict[str, object]) -> Pair:
    """A pair from JSON, whose keys are strings."""
    sizes = {way: {int(size): times for size, times in row[way].items()} for way in ("one", "both")}  # type: ignore[attr-defined]
    return Pair(tuple(row["ranks"]), sizes["one"], sizes["both"], row["alone"], row["busy"])  # type: ignore[arg-type]


def _wait(children: list[subprocess.Popen[bytes]], timeout: float) -> None:
    until = time.monotonic() + timeout
    while any(child.poll() is None for child in children):
        failed = [child for child in children if child.poll()]
        if failed or time.monotonic() > until:
            break
        time.sleep(0.01)
    for rank, child in enumerate(children):
        if child.poll():
            lines = (child.stderr.read() if child.stderr else b"").decode(errors="replace").strip().splitlines()
            raise RunFailed(f"profile: process {rank} of the link failed: {lines[-1][:300] if lines else child.poll()}")
    if any(child.poll() is None for child in children):
        raise RunFailed(f"profile: the link was not measured within {timeout:g} s")


def main(folder: Path, rank: int, timeout: float, sizes: Sizes | None) -> None:
    """One end of the link."""
    end_with_parent()
    local_network()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=timeout)
    )
    found = survey(timeout, sizes=sizes, curves=False)
    if found is not None:
        write_text(folder / "survey", json.dumps([[asdict(pair) for pair in found.pairs], found.collectives]))
    os._exit(0)


if __name__ == "__main__":
    folder, rank, timeout, *sizes = sys.argv[1:]
    main(Path(folder), int(rank), float(timeout), (int(sizes[0]), int(sizes[1])) if sizes else None)
