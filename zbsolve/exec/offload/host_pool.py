"""Host memory for what is offloaded: buffers that are taken, given back and taken again."""

from __future__ import annotations

import torch
from torch import Tensor

from ...util.errors import BadInput
from ...util.machine import free_memory
from ...util.text import format_bytes
from ..base.torch_private import without_modes

WASTE = 2  # a free buffer serves for a need that is not smaller than this part of it
PAGE = 4096  # bytes


class HostPool:
    """One rank's buffers. pinned: the device copies from and to them by itself. keeps: those that are free, in `free`; else
    the system gets them. held: bytes of what lies in them now."""

    def __init__(self, pinned: bool, keeps: bool = True) -> None:
        self.pinned, self.keeps, self.held = pinned, keeps, 0
        self.free: list[Tensor] = []
        self._captured: dict[int, Tensor] = {}  # a CUDA graph copies there whenever it is replayed

    def make(self, count: int, size: int) -> None:
        """Make `count` buffers of `size` bytes ahead of their use, as far as free ones do not serve; pinned ones in one go,
        since torch rounds each that it pins up to a power of two. Raises BadInput where this machine lacks the memory."""
        missing = count - sum(self._serves(one, size) for one in self.free)
        free = free_memory()
        if free is not None and missing * size > free:
            need, has = format_bytes(missing * size), format_bytes(free)
            raise BadInput(f"{count} host buffers of {format_bytes(size)} need {need}, but this machine has {has} free")
        if not self.pinned or missing < 2:
            self.free += [self._made(size) for _ in range(missing)]
            return
        room = -(-size // PAGE) * PAGE
        whole = self._made(missing * room)
        with without_modes():
            self.free += [whole[at : at + size] for at in range(0, len(whole), room)]

    def take(self, size: int) -> Tensor:
        """A buffer of at least `size` bytes, shape (bytes,)."""
        found = self._taken(size)
        if self._capturing:
            self._captured[found.data_ptr()] = found
        return found

    def _taken(self, size: int) -> Tensor:
        fitting = [one for one in self.free if self._serves(one, size)]
        if fitting:
            found = min(fitting, key=len)
            self.free = [one for one in self.free if one is not found]
            return found
        # Inputs of another shape came: the buffers of the old one go, one by one. Not while a graph is captured, where a
        # step may keep more: torch marks the end of pinned memory by an event, here the graph's, and asking for that fails.
        if self.free and not self._capturing:
            largest = max(self.free, key=len)
            self.free = [one for one in self.free if one is not largest]
        return self._made(size)

    def give_back(self, buffer: Tensor) -> None:
        """The buffer is free again."""
        if self.keeps:
            self.free.append(buffer)

    @property
    def _capturing(self) -> bool:
        return self.pinned and torch.cuda.is_current_stream_capturing()

    def _serves(self, buffer: Tensor, size: int) -> bool:
        return size <= len(buffer) <= max(size, WASTE * size)

    def _made(self, size: int) -> Tensor:
        with without_modes():  # who counts the device's bytes does not count these
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
            except RuntimeError as error:
                raise BadInput(f"no host memory for a buffer of {format_bytes(size)}: {error}") from error
