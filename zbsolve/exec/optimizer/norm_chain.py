"""The sum of one number a rank, passed from rank to rank by a thread of each, so that no rank waits before it must."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from threading import Event, Thread

import torch

from ..transport.failure import LostRank
from ..transport.wires import TOTAL, Wires, reason

NO_LIMIT = timedelta(days=365)  # a thread waits as long as its rank lives; the rank itself does not


class NormChain:
    """One sum over the ranks, such as the squared norm of all gradients.

    A thread takes the sum of the ranks before this one in `order`, adds this rank's number once that is given, and passes
    the result on. The last rank sends the whole to all. Every rank makes one a step.
    """

    def __init__(self, wires: Wires, order: Sequence[int]) -> None:
        self._wires = wires
        self._order = tuple(order)
        self._before: float | None = None
        self._mine = self._whole = 0.0
        self._given, self._done = Event(), Event()
        self._error = ""
        Thread(target=self._work, daemon=True).start()

    def give(self, mine: float) -> float:
        """This rank's number. Never waits. Returns the sum up to this rank, or the number alone where what the ranks before
        make is not here yet."""
        self._mine = mine
        self._given.set()
        return mine if self._before is None else self._before + mine

    def wait(self, timeout: float) -> float:
        """The sum of all, once it is here; added up in `order`, so it has the same bits on every rank. timeout: seconds.
        Raises LostRank."""
        error = self._error if self._done.wait(timeout) else f"nothing for {timeout:g} s"
        if error:
            place = self._order.index(self._wires.rank)
            peer = self._order[place - 1 if place and self._before is None else -1]
            raise LostRank(f"waiting for the gradients' norm from rank {peer}: {error}", peer)
        return self._whole

    def _work(self) -> None:
        order, place = self._order, self._order.index(self._wires.rank)
        try:
            before = self._receive(order[place - 1]) if place else 0.0
            self._before = before
            self._given.wait()
            total = before + self._mine
            if place + 1 < len(order):
                self._send(total, order[place + 1])
                total = self._receive(order[-1])
            else:
                for other in order[:-1]:
                    self._send(total, other)
            self._whole = total
        except Exception as error:
            self._error = reason(error)
        self._done.set()

    def _send(self, value: float, destination: int) -> None:
        self._wires.send(torch.tensor([value], dtype=torch.float64), destination, TOTAL).wait(NO_LIMIT)

    def _receive(self, source: int) -> float:
        cell = torch.zeros(1, dtype=torch.float64)
        self._wires.receive(cell, source, TOTAL).wait(NO_LIMIT)
        return float(cell)
