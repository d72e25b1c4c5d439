"""The links between ranks that are neighbours, measured through the executor's own messages: by message size, one
direction and both at once, and what computing loses beside them.

Where torchrun started this process, over its ranks; else between two processes of this machine
(`python -m profiler.links FOLDER RANK TIMEOUT` is one of them).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from zbsolve.exec.comm import Links
from zbsolve.exec.failure import RunFailed
from zbsolve.exec.launch import child_environment
from zbsolve.exec.lower import Message
from zbsolve.exec.wires import Wires, clock_lead, receive_bytes, send_bytes
from zbsolve.exec.worker import end_with_parent, local_network
from zbsolve.files import write_text
from zbsolve.profile import Link

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
REPEATS, WARM = 20, 5
WIDTH = 256  # of the matrices that are multiplied beside messages: some 100 µs on a core
Stamps = dict[str, int]


@dataclass(frozen=True)
class Pair:
    """Samples of two neighbours, µs. one: message bytes → from before the send to when the receiver goes on, both
    directions, one message at a time; both: the same while a message goes the other way; alone, beside: a fixed piece of
    work without messages, and with the largest ones going both ways."""

    ranks: tuple[int, int]
    one: dict[int, list[float]]
    both: dict[int, list[float]]
    alone: list[float]
    beside: list[float]

    @property
    def link(self) -> Link:
        """Latency and bandwidth, one direction at a time."""
        return fit(self.one)

    def facts(self) -> dict[str, object]:
        """The fit, and how much longer the largest message takes with another one against it, and work beside both."""
        largest = max(self.one)
        return {
            "ranks": list(self.ranks),
            **asdict(self.link),
            "both_ways": median(self.both[largest]) / median(self.one[largest]),
            "work_beside": median(self.beside) / median(self.alone),
        }


def slowest(pairs: list[Pair]) -> Pair:
    """The pair that the largest message takes longest between: problems know one link, and the worst is safe."""
    return max(pairs, key=lambda pair: median(pair.one[max(pair.one)]))


def samples_of(pairs: list[Pair]) -> dict[str, list[float]]:
    """`link/<bytes>` of the slowest pair, and every pair's under `<what> <rank>-<rank>`."""
    found = {f"link/{size}": row for size, row in slowest(pairs).one.items()}
    for pair in pairs:
        name = f"{pair.ranks[0]}-{pair.ranks[1]}"
        if len(pairs) > 1:
            found |= {f"link/{size} {name}": row for size, row in pair.one.items()}
        found |= {f"link/{size} both ways {name}": row for size, row in pair.both.items()}
        found |= {f"work alone {name}": pair.alone, f"work beside messages {name}": pair.beside}
    return found


def measure_links(timeout: float = 120.0) -> list[Pair]:
    """Of torchrun's ranks where a process group is up (every rank calls `survey`, rank 0 through this); else of two
    processes started here. Raises RunFailed where it takes longer than `timeout` seconds."""
    if dist.is_initialized():
        pairs = survey(timeout)
        assert pairs is not None
        return pairs
    with tempfile.TemporaryDirectory(prefix="zbsolve-link-") as folder:
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "profiler.links", folder, str(rank), str(timeout)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=child_environment(),
            )
            for rank in range(2)
        ]
        try:
            _wait(children, timeout)
            return [_pair(row) for row in json.loads((Path(folder) / "pairs").read_text(encoding="utf-8"))]
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.communicate()


def fit(samples: dict[int, list[float]]) -> Link:
    """The line through the medians that is least wrong in relative terms; neither part is negative."""
    sizes = np.array(sorted(samples), float)
    times = np.array([median(samples[int(size)]) for size in sizes])
    slope, latency = np.polyfit(sizes, times, 1, w=1 / times)
    return Link(max(0.0, float(latency)), 1 / max(float(slope), 1e-9))


def survey(timeout: float) -> list[Pair] | None:
    """Every pair of neighbours in turn, the other ranks waiting. Every rank of the process group calls; rank 0 gets it."""
    plain = Wires.of()
    offset = clock_lead(plain)
    neighbours = [(low + way, low + 1 - way) for low in range(plain.size - 1) for way in range(2)]
    wires = plain.paired(None, torch.device("cpu"), dict.fromkeys(neighbours, len(SIZES) * (WARM + REPEATS)))
    found = []
    for low in range(wires.size - 1):
        dist.barrier()
        mine: dict[str, object] = {}
        if wires.rank in (low, low + 1):
            mine = _one_end(wires, 2 * low + 1 - wires.rank, offset, timeout)
        ends = [_collect(wires, rank, mine) for rank in (low, low + 1)]
        if wires.rank == 0:
            found.append(_joined((low, low + 1), ends))
    dist.barrier()
    wires.close()
    return found if wires.rank == 0 else None


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
    alone, beside = _work(wires, other, timeout)
    return {"one": one, "both": both, "alone": alone, "beside": beside}


def _messages(source: int, destination: int, sizes: tuple[int, ...] = SIZES) -> list[Message]:
    """All that one end sends; `boundary` holds the size, and one more in the direction down, so that each direction
    agrees on shapes by itself: both start at once."""
    down = int(source > destination)
    keys = [(size, f"{size}.{i}.{source}") for size in sizes for i in range(WARM + REPEATS)]
    return [Message(key, key, source, destination, size + down, 0, False) for size, key in keys]


def _open(
    wires: Wires, other: int, timeout: float, sizes: tuple[int, ...] = SIZES
) -> tuple[Links, list[tuple[Message, Message]]]:
    """Messages out and back in turn, and the links that carry them."""
    mine, theirs = _messages(wires.rank, other, sizes), _messages(other, wires.rank, sizes)
    links = Links(wires, {other: tuple(theirs)}, torch.device("cpu"), timeout)
    links.begin({0: 0})
    return links, list(zip(mine, theirs, strict=True))


def _exchange(wires: Wires, other: int, offset: int, timeout: float, *, at_once: bool) -> dict[str, Stamps]:
    """Back and forth, one message at a time or both at once, receives posted before; stamps in ns of rank 0's clock."""
    links, messages = _open(wires, other, timeout)
    sent: Stamps = {}
    taken: Stamps = {}
    for out, back in messages:
        links.post(back)
        body = torch.zeros(out.boundary // 4)
        order = ("send", "take") if at_once or wires.rank < other else ("take", "send")
        for what in order:
            if what == "send":
                sent[out.before] = time.monotonic_ns() - offset
                links.send(out, body)
            else:
                links.take(back)
                taken[back.before] = time.monotonic_ns() - offset
    links.flush()
    return {"sent": sent, "taken": taken}


def _work(wires: Wires, other: int, timeout: float) -> tuple[list[float], list[float]]:
    """µs of a product of matrices, by itself and while the largest message goes each way."""
    links, messages = _open(wires, other, timeout, SIZES[-1:])
    matrix = torch.ones(WIDTH, WIDTH)
    alone, beside = [], []
    for out, back in messages:
        alone.append(_product(matrix))
        links.post(back)
        links.send(out, torch.zeros(out.boundary // 4))
        beside.append(_product(matrix))
        links.take(back)
    links.flush()
    return alone[WARM:], beside[WARM:]


def _product(matrix: torch.Tensor) -> float:
    start = time.monotonic_ns()
    matrix.mm(matrix)
    return (time.monotonic_ns() - start) / 1000


def _joined(ranks: tuple[int, int], ends: list[dict[str, object]]) -> Pair:
    """Both ends' stamps as times."""
    times = {way: {size: _times([end[way] for end in ends], ranks, size) for size in SIZES} for way in ("one", "both")}  # type: ignore[misc]
    work = {what: [us for end in ends for us in end[what]] for what in ("alone", "beside")}  # type: ignore[attr-defined]
    return Pair(ranks, times["one"], times["both"], work["alone"], work["beside"])


def _times(ends: list[dict[str, Stamps]], ranks: tuple[int, int], size: int) -> list[float]:
    return [
        (ends[1 - sender]["taken"][key] - ends[sender]["sent"][key]) / 1000
        for i in range(WARM, WARM + REPEATS)
        for sender in range(2)
        for key in [f"{size}.{i}.{ranks[sender]}"]
    ]


def _pair(row: dict[str, object]) -> Pair:
    """From JSON, whose keys are strings."""
    sizes = {way: {int(size): times for size, times in row[way].items()} for way in ("one", "both")}  # type: ignore[attr-defined]
    return Pair(tuple(row["ranks"]), sizes["one"], sizes["both"], row["alone"], row["beside"])  # type: ignore[arg-type]


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


def main(folder: Path, rank: int, timeout: float) -> None:
    """One end of the link."""
    end_with_parent()
    local_network()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=timeout)
    )
    pairs = survey(timeout)
    if pairs is not None:
        write_text(folder / "pairs", json.dumps([asdict(pair) for pair in pairs]))
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
