"""How far apart the ranks' clocks are. One machine has one clock."""

from __future__ import annotations

import socket
import time

import torch

from .wires import BYTES, Wires, receive_bytes, send_bytes


def _offset(wires: Wires, rounds: int = 20) -> int:
    """ns that this rank's monotonic clock is ahead of rank 0's, by the quickest of some round trips."""
    stamp = torch.zeros(1, dtype=torch.int64)
    best = (1 << 62, 0)
    for other in range(1, wires.size):
        for _ in range(rounds if wires.rank in (0, other) else 0):
            if wires.rank == 0:
                wires.wait(wires.receive(stamp, other, BYTES), other)
                stamp[0] = time.monotonic_ns()
                wires.wait(wires.send(stamp, other, BYTES), other)
                continue
            sent = time.monotonic_ns()
            wires.wait(wires.send(stamp, 0, BYTES), 0)
            wires.wait(wires.receive(stamp, 0, BYTES), 0)
            back = time.monotonic_ns()
            best = min(best, (back - sent, (back + sent) // 2 - int(stamp)))
    return best[1]


def clock_lead(wires: Wires) -> int:
    """ns that this rank's monotonic clock is ahead of rank 0's. Every rank calls this. Raises LostRank."""
    mine = _machine()
    if wires.rank:
        send_bytes(wires, mine.encode(), 0)
        alike = receive_bytes(wires, 0) == b"one"
    else:
        alike = {receive_bytes(wires, other).decode() for other in range(1, wires.size)} <= {mine}
        for other in range(1, wires.size):
            send_bytes(wires, b"one" if alike else b"several", other)
    return 0 if alike else _offset(wires)


def _machine() -> str:
    """A name of the running system: ranks that share it share its monotonic clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return socket.gethostname()
