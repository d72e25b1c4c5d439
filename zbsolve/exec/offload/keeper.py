"""What a microbatch keeps on a stage, in the hands of one who may take it off the device.

Autograd saves tensors through `torch.autograd.graph.saved_tensors_hooks`, and a graph split gives what its F saved. Of each
tensor a `View` stays, which names a piece of memory. Views that share a storage share the piece, so it moves once. Nothing
is taken from others: who holds the tensor itself (a message on its way, the next stage) keeps its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...util.errors import BadInput
from ...util.machine import free_memory
from ...util.text import format_bytes
from ..base.torch_private import storage_key, without_modes
from ..base.values import PLAIN_TYPES, Away, Layout, each_tensor, is_dtensor, local, opened

ALIGNED = 64  # bytes: where a piece begins in a host buffer
SMALL = 0.005  # a share of the bytes to move that is not worth cutting a piece in two for
PACKED = 1 << 20  # bytes: a copy of fewer does not reach two thirds of a link's rate
TOGETHER = 1 << 24  # bytes: a copy of so many does
WASTE = 2  # a free buffer serves for a need that is not smaller than this part of it
PAGE = 4096  # bytes


class Piece:
    """One storage that is kept. storage: on the device (None: it is not there); base: its first byte in there. moved: how
    many of its bytes go to the host, from the first on. rest: the others, while those are there. place: where they lie in
    the host buffer."""

    __slots__ = ("base", "device", "moved", "place", "rest", "size", "storage")

    def __init__(self, storage: Any, device: torch.device) -> None:
        self.storage, self.device = storage, device
        self.size = int(storage.nbytes())
        self.base, self.moved, self.place = 0, 0, 0
        self.rest: Tensor | None = None

    @property
    def small(self) -> bool:
        """Is it worth being copied together with others?"""
        return self.moved == self.size < PACKED

    def bytes_on_device(self) -> Tensor:
        """The storage as bytes, shape (size,)."""
        with torch.no_grad():
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage, 0, (self.size,), (1,))

    def leave(self) -> None:
        """The bytes to move are in the host buffer: give up the storage."""
        if self.moved < self.size:
            self.rest = self.bytes_on_device()[self.moved :].clone()
        self.storage = None

    def come_back(self) -> Tensor:
        """Take memory on the device again. The bytes that the host has to fill in, shape (moved,)."""
        whole = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        if self.rest is not None:
            whole[self.moved :].copy_(self.rest)
            self.rest = None
        self.storage = whole.untyped_storage()
        return whole[: self.moved]


class View(Away):
    """A tensor as a part of a piece. layout: of a DTensor."""

    __slots__ = ("dtype", "layout", "offset", "piece", "requires_grad", "shape", "stride")

    def __init__(self, piece: Piece, part: Tensor, tensor: Tensor) -> None:
        self.piece, self.dtype, self.offset = piece, part.dtype, part.storage_offset()
        self.shape, self.stride = part.shape, part.stride()
        self.requires_grad = tensor.requires_grad
        self.layout = Layout.strided(tensor) if is_dtensor(tensor) else None

    def tensor(self) -> Tensor:
        """The tensor, without a graph. Raises BadInput where it is in host memory."""
        piece = self.piece
        if piece.storage is None:
            raise BadInput("what its F keeps is in host memory: its reload must come before")
        with torch.no_grad():
            made = torch.empty(0, dtype=self.dtype, device=piece.device)
            made.set_(piece.storage, self.offset + piece.base // made.itemsize, self.shape, self.stride)
            whole = made if self.layout is None else self.layout.whole(made)
        return whole.requires_grad_() if self.requires_grad else whole


class Keeper:
    """What one microbatch keeps on one stage. device: only memory there is moved. batch: stays there. mark: makes an event
    of what is launched so far. pieces: by their storage, until they move. made: the event behind what made them, if any."""

    def __init__(self, device: torch.device, batch: Iterable[Tensor] = (), mark: Callable[[], Any] = lambda: None) -> None:
        self.device, self.mark = device, mark
        self.made: Any = None
        self.pieces: dict[int, Piece] = {}
        self._fixed = set[int]()
        self.fix(batch)

    def fix(self, tensors: Iterable[Tensor]) -> None:
        """These stay where they are, such as parameters and buffers."""
        self._fixed.update(storage_key(local(tensor)) for tensor in tensors)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves inside is kept here."""
        with saved_tensors_hooks(self.keep, opened):
            yield
        self.made = self.mark()

    def keep(self, tensor: Tensor) -> Any:
        """A view of the tensor; the tensor itself where it is not moved."""
        if type(tensor) not in PLAIN_TYPES and not is_dtensor(tensor):
            return tensor
        part = local(tensor)
        if type(part) not in PLAIN_TYPES or part.layout is not torch.strided or part.is_conj() or part.is_neg():
            return tensor
        key = storage_key(part)
        if part.device != self.device or key in self._fixed or not part.untyped_storage().nbytes():
            return tensor
        piece = self.pieces.get(key)
        if piece is None:
            piece = self.pieces[key] = Piece(part.untyped_storage(), self.device)
        return View(piece, part, tensor)

    def keep_all(self, value: Any) -> Any:
        """A pytree with views of its tensors."""
        return each_tensor(value, self.keep)

    def chosen(self, share: float = 1.0) -> list[Piece]:
        """The pieces to move, which say how much of them: of all bytes the share, in whole pieces but for one at most. They
        are no longer kept here, but by their views alone."""
        pieces, self.pieces = sorted(self.pieces.values(), key=lambda p: -p.size), {}
        total = sum(piece.size for piece in pieces)
        left = round(total * share)
        for piece in pieces:
            if piece.size <= left:
                piece.moved = piece.size
                left -= piece.size
        whole = [piece for piece in pieces if not piece.moved]
        if whole and left > SMALL * total:
            whole[-1].moved = left
        moving, at = sorted((piece for piece in pieces if piece.moved), key=lambda p: p.small), 0
        for piece in moving:
            piece.place = at
            at += -(-piece.moved // ALIGNED) * ALIGNED
        return moving


def in_groups(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """What is copied as one: a large piece, or small ones that lie side by side in the host buffer."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups and piece.small and groups[-1][0].small and piece.place + piece.moved - groups[-1][0].place <= TOGETHER:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def span_of(group: Sequence[Piece]) -> tuple[int, int]:
    """Where a group begins in the host buffer, and where it ends."""
    return group[0].place, group[-1].place + group[-1].moved


def packed(group: Sequence[Piece], staging: Tensor) -> Tensor:
    """The bytes of small pieces as the host buffer has them, copied into memory on the device. staging: shape (ALIGNED +
    bytes,); its first bytes fill what lies between pieces."""
    begin, end = span_of(group)
    parts = []
    for piece, after in zip(group, [*(other.place for other in group[1:]), end], strict=True):
        parts += [piece.bytes_on_device(), staging[: after - piece.place - piece.moved]]
    return torch.cat(parts, out=staging[ALIGNED : ALIGNED + end - begin])


def come_back_together(group: Sequence[Piece]) -> Tensor:
    """Take memory on the device again, one piece of it for all small ones. The bytes that the host has to fill in."""
    if len(group) == 1:
        return group[0].come_back()
    begin, end = span_of(group)
    whole = torch.empty(end - begin, dtype=torch.uint8, device=group[0].device)
    for piece in group:
        piece.storage, piece.base = whole.untyped_storage(), piece.place - begin
    return whole


def room_for(pieces: Iterable[Piece]) -> int:
    """Bytes of a host buffer for these pieces."""
    return max((-(-(piece.place + piece.moved) // ALIGNED) * ALIGNED for piece in pieces), default=0)


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
        missing = count - sum(self._serves(tensor, size) for tensor in self.free)
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
        buffer = self._taken(size)
        if self._capturing:
            self._captured[buffer.data_ptr()] = buffer
        return buffer

    def _taken(self, size: int) -> Tensor:
        fitting = [tensor for tensor in self.free if self._serves(tensor, size)]
        if fitting:
            buffer = min(fitting, key=len)
            self.free = [tensor for tensor in self.free if tensor is not buffer]
            return buffer
        # Inputs of another shape came: the buffers of the old one go, one by one. Not while a graph is captured, where a
        # step may keep more: torch marks the end of pinned memory by an event, here the graph's, and asking for that fails.
        if self.free and not self._capturing:
            largest = max(self.free, key=len)
            self.free = [tensor for tensor in self.free if tensor is not largest]
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
