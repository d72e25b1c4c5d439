"""All that one rank offloads: passes begin copies, and other passes wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...util.errors import BadInput
from ..program import Action
from .copying import Copy, CopyStreams
from .host_pool import HostPool
from .keeper import Keeper, Piece, room_for

Spot = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True, slots=True)
class _Away:
    """What a microbatch keeps of a stage off the device: the pieces, and the host buffer, of `size` bytes, that they are
    in."""

    pieces: list[Piece]
    buffer: Tensor
    size: int


class Offload:
    """What one rank keeps in host memory. buffers: stage → how many microbatches may lie there at one time. timeout: seconds
    to wait for a copy."""

    def __init__(self, device: torch.device, buffers: Mapping[int, int], timeout: float) -> None:
        self.device, self.timeout = device, timeout
        self.pool = HostPool(pinned=device.type == "cuda")
        self._copies = CopyStreams(device)
        self._missing = dict(buffers)
        self._keepers: dict[Spot, Keeper] = {}
        self._away: dict[Spot, _Away] = {}
        self._begun: dict[str, tuple[Copy, Callable[[], None]]] = {}
        self._over: dict[str, Copy] = {}

    def begin(self) -> None:
        """A step begins."""
        self._over.clear()

    def keeper(self, action: Action, batch: Iterable[Tensor]) -> Keeper:
        """The keeper of what an F keeps. batch: what stays where it is."""
        made = self._keepers[action.stage, action.microbatch] = Keeper(self.device, batch)
        return made

    def send_out(self, action: Action) -> None:
        """Begin to copy what F keeps to the host. It goes from the device with `settle`. Raises BadInput where the machine
        lacks memory."""
        spot = action.stage, action.microbatch
        pieces = self._keepers.pop(spot).chosen(action.share)
        size = room_for(pieces)
        if count := self._missing.pop(action.stage, 0):
            self.pool.make(count, size)
        away = self._away[spot] = _Away(pieces, self.pool.take(size), size)
        work = partial(_copy_out, pieces, away.buffer)
        self._begun[action.name] = self._copies.begin(action.stream, work), partial(_leave, pieces)

    def bring_back(self, action: Action) -> None:
        """Take memory on the device, and begin to copy there what is in host memory. Raises BadInput where nothing is."""
        away = self._away.pop((action.stage, action.microbatch), None)
        if away is None:
            raise BadInput("nothing is in host memory that it could bring back")
        work = partial(_copy_back, [(piece.come_back(), piece.place) for piece in away.pieces], away.buffer)
        self._begun[action.name] = (
            self._copies.begin(action.stream, work),
            partial(self.pool.give_back, away.buffer, away.size),
        )

    def settle(self, name: str) -> None:
        """From here on the copy of pass `name` is done, and the memory that it was from is free. Raises TimeoutError."""
        copy, free = self._begun.pop(name)
        self._copies.join(copy, self.timeout)
        free()
        self._over[name] = copy

    def ended(self, name: str) -> int:
        """When the copy of pass `name` was done, monotonic ns. Waits for it. Raises TimeoutError."""
        if name in self._begun:
            self.settle(name)
        return self._copies.end(self._over[name], self.timeout)


def _copy_out(pieces: list[Piece], buffer: Tensor) -> None:
    for one in pieces:
        buffer[one.place : one.place + one.moved].copy_(one.bytes_on_device()[: one.moved], non_blocking=True)


def _copy_back(targets: list[tuple[Tensor, int]], buffer: Tensor) -> None:
    for target, place in targets:
        target.copy_(buffer[place : place + len(target)], non_blocking=True)


def _leave(pieces: list[Piece]) -> None:
    for one in pieces:
        one.leave()
