"""The links between neighbouring ranks, measured with the executor's own messages: by message size, in one direction and in
both at once, and how much they slow down computation.

They are measured between torchrun's ranks if it started this process, else between two processes on this machine
(`python -m profiler.links FOLDER RANK DEVICE` is one of them), which use two GPUs, or share one. On GPUs all times are
device times: a size's messages are launched while the device is busy, so that none waits for the host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from subprocess import DEVNULL, PIPE
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from zbsolve.exec.base.program import Message
from zbsolve.exec.choices import BACKENDS, device_of
from zbsolve.exec.device.rank_device import DeviceRows, Marks
from zbsolve.exec.run.host import device_environment, end_with_parent, local_network, together
from zbsolve.exec.transport.mailbox import Mailbox
from zbsolve.exec.transport.peers import clock_lead
from zbsolve.exec.transport.wires import Wires, passed
from zbsolve.partition.layer import Link
from zbsolve.util.errors import RunFailed
from zbsolve.util.files import temporary_folder, write_text

from .busy_process import processes
from .collectives import Curve, Ranks, Sizes, measured_collectives, measured_curves
from .stage_rounds import PassTimer, Sample

CPU = torch.device("cpu")
POLL_SECONDS = 0.001
GO = "go"  # the file whose creation starts two waiting processes
SHARED = "sockets of this machine, between processes that share one GPU: no NVLink"
Times = dict[int, list[float]]  # message bytes → samples, µs


class Lot(NamedTuple):
    """What is measured. sizes: of messages, bytes. width, dtype: of the matrices multiplied at the same time, some 100 µs on
    a core or on a GPU; head: number of products that outlast launching one size's messages."""

    sizes: tuple[int, ...]
    warmups: int
    repeats: int
    width: int
    dtype: torch.dtype = torch.float32
    head: int = 0


LOTS = {
    "cpu": Lot((1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22), 5, 20, 256),
    "cuda": Lot((1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25), 3, 10, 4096, torch.bfloat16, 40),
}


@dataclass(frozen=True)
class Pair:
    """Samples of two neighbouring ranks, µs. one: message bytes → half of the round-trip time of a message and an equally
    large answer. both: from before the send until the other rank's message, sent at the same time, has arrived, at both
    ends. alone, busy: a fixed computation without messages, and while the largest ones go both ways. over: the transport
    that messages used, if a cluster would not use it."""

    ranks: tuple[int, int]
    one: Times
    both: Times
    alone: list[float]
    busy: list[float]
    over: str = ""

    @property
    def link(self) -> Link:
        """Latency and bandwidth, one direction at a time."""
        return fit(self.one)

    def facts(self) -> dict[str, object]:
        """The fitted line, and the factors by which the largest message slows down when another goes the opposite way, and
        computation when both do."""
        largest = max(self.one)
        return {
            "ranks": list(self.ranks),
            **asdict(self.link),
            "both_ways": median(self.both[largest]) / median(self.one[largest]),
            "work_beside": median(self.busy) / median(self.alone),
            **({"over": self.over} if self.over else {}),
        }


class Survey(NamedTuple):
    """Measurements between ranks. collectives: kind → samples, between all of `ranks` (see `measured_collectives`); curves:
    for each kind by group and bytes, if torchrun started the ranks."""

    pairs: list[Pair]
    ranks: int
    collectives: dict[str, list[float]]
    curves: list[Curve]


def slowest(pairs: list[Pair]) -> Pair:
    """The pair where the largest message takes longest: problems have one link, and the slowest is the safe choice."""
    return max(pairs, key=lambda pair: median(pair.one[max(pair.one)]))


def samples_of(pairs: list[Pair]) -> dict[str, list[float]]:
    """Samples by name: `link/<bytes>` for the slowest pair, and every pair's as `<what> <rank>-<rank>`."""
    samples = {f"link/{size}": row for size, row in slowest(pairs).one.items()}
    for pair in pairs:
        name = f"{pair.ranks[0]}-{pair.ranks[1]}"
        if len(pairs) > 1:
            samples |= {f"link/{size} {name}": row for size, row in pair.one.items()}
        samples |= {f"link/{size} both ways {name}": row for size, row in pair.both.items()}
        samples |= {f"work alone {name}": pair.alone, f"work beside messages {name}": pair.busy}
    return samples


def over_sockets(pairs: list[Pair]) -> list[str]:
    """A warning for links with a transport that a cluster would not use."""
    backends = sorted({pair.over for pair in pairs if pair.over})
    return [f"links were measured over {name}: give those of your cluster to solve and plan" for name in backends]


class Ends(NamedTuple):
    """Two processes of this machine that measure the link between them when told to."""

    folder: Path
    processes: list[subprocess.Popen[bytes]]


@contextmanager
def ends(device: torch.device) -> Iterator[Callable[[], Ends]]:
    """A function that waits for the two ends of a link between devices of this kind, which live inside the block. They and
    MPS take some seconds to start, while the block continues."""
    sharers = 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # attaches this process to the GPU directly, before MPS shares it
        sharers = 2 // min(2, torch.cuda.device_count())
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:

        def start() -> Ends:
            folder = stack.enter_context(temporary_folder("link"))
            stack.enter_context(together(folder) if sharers > 1 else nullcontext())
            words = [(str(folder), str(rank), str(device_of(device.type, rank, share=True))) for rank in range(2)]
            places = [device_environment(rank, sharers) if device.type == "cuda" else {} for rank in range(2)]
            two = processes(__name__, [*zip(words, places, strict=True)], DEVNULL, PIPE)
            return Ends(folder, stack.enter_context(two))

        yield thread.submit(start).result


def measure_links(
    timeout: float = 120.0,
    group: Any = None,
    sizes: Sizes | None = None,
    device: torch.device = CPU,
    started: Callable[[], Ends] | None = None,
) -> Survey:
    """The pairs of torchrun's ranks, and all of them together, if a process group exists (rank 0 calls this and the others
    `survey`); else, or if `group` has one rank, a pair of processes. group: the pipeline's; None: all ranks. sizes: as
    `measured_collectives` takes them. device: this rank's. started: of `ends`; None: the processes are started here. Raises
    RunFailed if it takes longer than `timeout` seconds."""
    if with_others(group):
        seen = survey(timeout, device, group, sizes)
        assert seen is not None
        return seen
    with ends(device) if started is None else nullcontext(started) as wait:
        two = wait()
        write_text(two.folder / GO, json.dumps([timeout, sizes]))
        _wait(two.processes, timeout)
        return msgspec.json.decode((two.folder / "survey").read_bytes(), type=Survey)


def with_others(group: Any) -> bool:
    """Whether the group (None: the default one, if any) has other ranks to measure links with."""
    return dist.is_initialized() and (group is None or dist.get_world_size(group) > 1)


def fit(samples: dict[int, list[float]]) -> Link:
    """The line through the medians with the least relative errors; latency and slope are at least 0."""
    sizes = np.array(sorted(samples), float)
    times = np.array([median(samples[int(size)]) for size in sizes])
    slope, latency = np.polyfit(sizes, times, 1, w=1 / times)
    return Link(max(0.0, float(latency)), 1 / max(float(slope), 1e-9))


def survey(
    timeout: float, device: torch.device = CPU, group: Any = None, sizes: Sizes | None = None, *, curves: bool = True
) -> Survey | None:
    """Measure every pair of neighbouring ranks in turn, while the other ranks wait, and then all ranks together. Every rank
    of the process group (None: the default one) calls this; rank 0 determines the sizes and gets the results. device: this
    rank's. curves: whether all kinds of collectives are timed."""
    plain, lot = Wires.of(group, device), LOTS[device.type]
    ranks = Ranks(group, clock_lead(plain), device)
    directions = [(low + way, low + 1 - way) for low in range(plain.size - 1) for way in range(2)]
    wires = plain.paired(dict.fromkeys(directions, len(lot.sizes) * (lot.warmups + lot.repeats)))
    pairs = []
    for low in range(wires.size - 1):
        ranks.meet()
        times: dict[str, Any] = {}
        if wires.rank in (low, low + 1):
            times = _End(wires, 2 * low + 1 - wires.rank, device, timeout).measured()
        told = wires.told(times)
        if wires.rank == 0:
            pairs.append(_joined((low, low + 1), told[low], told[low + 1]))
    collectives = measured_collectives(ranks, sizes)
    by_group = measured_curves(ranks) if curves else []
    ranks.meet()
    wires.close()
    return Survey(pairs, wires.size, collectives, by_group) if wires.rank == 0 else None


@dataclass
class _End:
    """One end of a link to rank `other`. lot: what this device measures."""

    wires: Wires
    other: int
    device: torch.device
    timeout: float

    def __post_init__(self) -> None:
        self.lot = LOTS[self.device.type]

    def measured(self) -> dict[str, Any]:
        """This end's share of a Pair, and its device."""
        alternate, both = (self.exchanged(at_once=way) for way in (False, True))
        alone, busy = self.worked()
        place = str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else ""
        trips = {size: [us / 2 for us in row] for size, row in alternate.items()} if self.wires.rank < self.other else {}
        return {"one": trips, "both": both, "alone": alone, "busy": busy, "place": place}

    def exchanged(self, *, at_once: bool) -> Times:
        """µs of messages and answers, one at a time or both at once. The lower rank sends first."""
        mailbox, messages = self._open(self.lot.sizes)
        timer, product = PassTimer(self.device), self._product()
        first = at_once or self.wires.rank < self.other
        for size, pairs in messages.items():
            body = torch.zeros(pairs[0][0].boundary // 4, device=self.device)
            for _ in range(self.lot.head):
                product()
            for out, back in pairs:
                mailbox.post(back)
                steps = [partial(mailbox.send, out, body), partial(mailbox.take, back)]
                timer.run(size, "", lambda calls: [call() for call in calls], steps if first else steps[::-1])
        samples: Times = {}
        for size, _, us, _ in self._drained(mailbox, timer):
            samples.setdefault(size, []).append(us)
        return {size: row[self.lot.warmups :] for size, row in samples.items()}

    def worked(self) -> tuple[list[float], list[float]]:
        """µs of a matrix product, by itself, and while the largest message goes in each direction."""
        mailbox, messages = self._open(self.lot.sizes[-1:])
        timer, product = PassTimer(self.device), self._product()
        (pairs,) = messages.values()
        body = torch.zeros(pairs[0][0].boundary // 4, device=self.device)
        for out, back in pairs:
            timer.run(0, "alone", product)
            mailbox.post(back)
            mailbox.send(out, body)
            timer.run(0, "busy", product)
            mailbox.take(back)
        rows = self._drained(mailbox, timer)
        alone, busy = ([us for _, kind, us, _ in rows if kind == wanted] for wanted in ("alone", "busy"))
        return alone[self.lot.warmups :], busy[self.lot.warmups :]

    def _drained(self, mailbox: Mailbox, timer: PassTimer) -> list[Sample]:
        """The samples, once all messages are complete. Raises RunFailed if they never are."""
        mailbox.flush()
        if self.device.type == "cuda":
            try:
                passed(self.device, timedelta(seconds=self.timeout))
            except TimeoutError as error:
                raise RunFailed(f"profile: messages with rank {self.other} are not done: {error}") from None
        return timer.drain()

    def _product(self) -> Callable[[], Any]:
        matrix = torch.ones(self.lot.width, self.lot.width, dtype=self.lot.dtype, device=self.device)
        return lambda: matrix.mm(matrix)

    def _open(self, sizes: tuple[int, ...]) -> tuple[Mailbox, dict[int, list[tuple[Message, Message]]]]:
        """This end's mailbox, and for each size pairs of a message and its answer."""
        outgoing = self._messages(self.wires.rank, self.other, sizes)
        theirs = self._messages(self.other, self.wires.rank, sizes)
        rows = None if self.device.type == "cpu" else DeviceRows(self.wires, self.device, Marks(self.device))
        incoming = {self.other: tuple(message for row in theirs.values() for message in row)}
        mailbox = Mailbox(self.wires, incoming, self.device, self.timeout, rows=rows)
        mailbox.begin({0: 0})
        return mailbox, {size: list(zip(outgoing[size], theirs[size], strict=True)) for size in sizes}

    def _messages(self, source: int, destination: int, sizes: tuple[int, ...]) -> dict[int, list[Message]]:
        """All messages that one end sends. `boundary` encodes the size, plus one towards the lower rank: so each direction
        negotiates shapes separately, since both start at once."""
        down = int(source > destination)

        def message(size: int, i: int) -> Message:
            key = f"{size}.{i}.{source}"
            return Message(key, key, source, destination, size + down, 0, False)

        return {size: [message(size, i) for i in range(self.lot.warmups + self.lot.repeats)] for size in sizes}


def _joined(ranks: tuple[int, int], low: dict[str, Any], high: dict[str, Any]) -> Pair:
    """A pair from the results of both ends, whose keys are strings, as in JSON."""
    both = {int(size): [*row, *high["both"][size]] for size, row in low["both"].items()}
    trips = {int(size): row for size, row in low["one"].items()}
    shared = SHARED if low["place"] and low["place"] == high["place"] else ""
    return Pair(ranks, trips, both, low["alone"] + high["alone"], low["busy"] + high["busy"], shared)


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


def main(folder: Path, rank: int, device: torch.device) -> None:
    """One end of the link: starts when the file GO exists."""
    end_with_parent()
    local_network()
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
    while not (folder / GO).exists():
        time.sleep(POLL_SECONDS)
    timeout, sizes = json.loads((folder / GO).read_text(encoding="utf-8"))
    limit, store = timedelta(seconds=timeout), f"file://{folder / 'store'}"
    dist.init_process_group(BACKENDS[device.type], init_method=store, rank=rank, world_size=2, timeout=limit)
    result = survey(timeout, device, sizes=sizes and tuple(sizes), curves=False)
    if result is not None:
        write_text(folder / "survey", msgspec.json.encode(result).decode())
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), torch.device(sys.argv[3]))
