"""All that one rank offloads: passes begin copies, and other passes wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ...util.errors import BadInput
from ..program import Action
from .copying import Copy, CopyStreams
from .host_pool import HostPool
from .keeper import Keeper, Piece, room_for
from .signals import Signals

Spot = tuple[int, int]  # stage, microbatch


@dataclass(slots=True)
class _Away:
    """What a microbatch keeps of a stage off the device: the pieces, and the host buffer, of `size` bytes, that they are
    in."""

    pieces: list[Piece]
    size: int
    buffer: Tensor | None = None


@dataclass(slots=True)
class _Begun:
    """A copy that is not settled. free: gives up the memory that it was from."""

    copy: Copy
    free: Callable[[], None] = field(default=lambda: None)


class Offload:
    """What one rank keeps in host memory. buffers: stage → how many microbatches may lie there at one time. timeout: seconds
    to wait for a copy. signals: where copies wait for those of other ranks. emulated: a device's clock keeps them in turn.

    Host memory that ranks share is given back to the system as soon as a microbatch has left it, for the next one may be
    another rank's. Elsewhere buffers are made at a stage's first offload, and stay.
    """

    def __init__(
        self,
        device: torch.device,
        buffers: Mapping[int, int],
        timeout: float,
        signals: Signals | None = None,
        emulated: bool = False,
    ) -> None:
        index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        self.device, self.signals = torch.device(device.type, index), signals
        self.timeout = timeout + 1.0  # beyond a signal's, which knows the rank that it waited for
        self.pool = HostPool(pinned=device.type == "cuda", keeps=signals is None)
        self._heard = None if emulated else signals
        self._copies = CopyStreams(device)
        self._missing = dict(buffers) if signals is None else {}
        self._keepers: dict[Spot, Keeper] = {}
        self._away: dict[Spot, _Away] = {}
        self._begun: dict[str, _Begun] = {}
        self._over: dict[str, Copy] = {}

    def begin(self) -> None:
        """A step begins."""
        self._over.clear()
        if self.signals is not None:
            self.signals.step += 1

    def keeper(self, action: Action, batch: Iterable[Tensor]) -> Keeper:
        """The keeper of what an F keeps. batch: what stays where it is."""
        made = self._keepers[action.stage, action.part] = Keeper(self.device, batch)
        return made

    def send_out(self, action: Action) -> None:
        """Begin to copy what F keeps to the host. It goes from the device with `settle`. Raises BadInput where the machine
        lacks memory."""
        spot = action.stage, action.part
        pieces = self._keepers.pop(spot).chosen(action.share)
        away = self._away[spot] = _Away(pieces, room_for(pieces))
        if count := self._missing.pop(action.stage, 0):
            self.pool.make(count, away.size)
        if self._heard is None:
            away.buffer = self.pool.take(away.size)
        self.pool.held += away.size
        copy = self._begin(action, partial(self._copy_out, away), None)
        self._begun[action.name] = _Begun(copy, partial(_leave, pieces))

    def bring_back(self, action: Action) -> None:
        """Take memory on the device, and begin to copy there what is in host memory. Raises BadInput where nothing is."""
        away = self._away.pop((action.stage, action.part), None)
        if away is None:
            raise BadInput("nothing is in host memory that it could bring back")
        targets = [(piece.come_back(), piece.place) for piece in away.pieces]
        over = None if self._heard is None else partial(_drop, away)
        copy = self._begin(action, partial(_copy_back, targets, away), over)
        self._begun[action.name] = _Begun(copy, partial(self._give_back, away))

    def settle(self, name: str, sure: bool = True) -> None:
        """From here on the copy of pass `name` is done, and the memory that it was from is free. sure: also where that must
        be waited for. Raises TimeoutError, and what the copy raised."""
        begun = self._begun.get(name)
        if begun is None or not (sure or begun.copy.done.is_set()):
            return
        self._copies.join(begun.copy, self.timeout)
        begun.free()
        self._over[name] = self._begun.pop(name).copy

    def ended(self, name: str) -> int:
        """When the copy of pass `name` was done, monotonic ns. Waits for it. Raises as `settle`."""
        self.settle(name)
        return self._copies.end(self._over[name], self.timeout)

    def _begin(self, action: Action, work: Callable[[], None], over: Callable[[], None] | None) -> Copy:
        """Begin a copy that waits for other ranks' and tells them."""
        signals = self._heard
        if signals is None:
            return self._copies.begin(action.stream, work, over)
        step = signals.step

        def heard() -> None:
            for name in action.hears:
                signals.hear(name, step)
            work()

        def told() -> None:
            if over is not None:
                over()
            signals.tell(action.name, step)

        return self._copies.begin(action.stream, heard, told)

    def _copy_out(self, away: _Away) -> None:
        if away.buffer is None:
            away.buffer = self.pool.take(away.size)
        for one in away.pieces:
            away.buffer[one.place : one.place + one.moved].copy_(one.bytes_on_device()[: one.moved], non_blocking=True)

    def _give_back(self, away: _Away) -> None:
        self.pool.held -= away.size
        if away.buffer is not None:
            self.pool.give_back(away.buffer)


def _copy_back(targets: list[tuple[Tensor, int]], away: _Away) -> None:
    assert away.buffer is not None
    for target, place in targets:
        target.copy_(away.buffer[place : place + len(target)], non_blocking=True)


def _drop(away: _Away) -> None:
    away.buffer = None


def _leave(pieces: list[Piece]) -> None:
    for one in pieces:
        one.leave()
