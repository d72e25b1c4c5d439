"""`Keeper`: takes what a microbatch keeps on a stage, so that it can be moved off the device.

Autograd saves tensors through `torch.autograd.graph.saved_tensors_hooks`; a graph split passes on what its F saved. Each
tensor is replaced by a `View` of a `Piece` of memory. Views with the same storage share a piece, so it moves once. A tensor
that others hold, too (a message in transit, the next stage), keeps its memory until they are done with it.
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
from ..base.values import PLAIN_TYPES, Away, Layout, is_dtensor, local, opened

ALIGNED = 64  # bytes: alignment of a piece in a host buffer
SMALL = 0.005  # a piece is not cut in two for a smaller share of the bytes to move than this
PACKED = 1 << 20  # bytes: a smaller copy does not reach two thirds of a link's rate
TOGETHER = 1 << 24  # bytes: a copy of this size suffices
WASTE = 2  # a free buffer may be at most this many times as large as needed
PAGE = 4096  # bytes


class Piece:
    """One storage that is kept. storage: on the device (None: moved to the host); base: the piece's first byte in it. moved:
    how many of its bytes, the first ones, go to the host. rest: the others, while the storage is away. place: where its
    bytes lie in the host buffer."""

    __slots__ = ("base", "device", "moved", "place", "rest", "size", "storage")

    def __init__(self, storage: Any, device: torch.device) -> None:
        self.storage, self.device = storage, device
        self.size = int(storage.nbytes())
        self.base, self.moved, self.place = 0, 0, 0
        self.rest: Tensor | None = None

    @property
    def small(self) -> bool:
        """Should it be copied together with others?"""
        return self.moved == self.size < PACKED

    def bytes_on_device(self) -> Tensor:
        """The storage as bytes, shape (size,)."""
        with torch.no_grad():
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage, 0, (self.size,), (1,))

    def leave(self) -> None:
        """Free the storage, once the bytes to move are in the host buffer."""
        if self.moved < self.size:
            self.rest = self.bytes_on_device()[self.moved :].clone()
        self.storage = None

    def come_back(self) -> Tensor:
        """Allocate the storage again. Returns the bytes that the host must fill in, shape (moved,)."""
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
        piece = self.piece
        if piece.storage is None:
            raise BadInput("what its F keeps is in host memory: its reload must come before")
        with torch.no_grad():
            made = torch.empty(0, dtype=self.dtype, device=piece.device)
            made.set_(piece.storage, self.offset + piece.base // made.itemsize, self.shape, self.stride)
            whole = made if self.layout is None else self.layout.whole(made)
        return whole.requires_grad_() if self.requires_grad else whole


class Keeper:
    """What one microbatch keeps on one stage. device: only its memory is moved. batch: is not moved. mark: makes an event
    after what is launched so far. pieces: by storage, until they move. made: the event after their computation, if any."""

    def __init__(self, device: torch.device, batch: Iterable[Tensor] = (), mark: Callable[[], Any] = lambda: None) -> None:
        self.device, self.mark = device, mark
        self.made: Any = None
        self.pieces: dict[int, Piece] = {}
        self._fixed = set[int]()
        self.fix(batch)

    def fix(self, tensors: Iterable[Tensor]) -> None:
        """These tensors, such as parameters and buffers, are not moved."""
        self._fixed.update(storage_key(local(tensor)) for tensor in tensors)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which the keeper takes what autograd saves."""
        with saved_tensors_hooks(self.keep, opened):
            yield
        self.made = self.mark()

    def keep(self, tensor: Tensor) -> Any:
        """A view of the tensor, or the tensor itself if it is not moved."""
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

    def chosen(self, share: float = 1.0) -> list[Piece]:
        """The pieces to move, with their `moved` and `place` set: this share of all bytes, in whole pieces except for at
        most one. From now on only their views keep them."""
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
    """Groups that are copied as one: a large piece, or small ones that are neighbours in the host buffer."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups and piece.small and groups[-1][0].small and piece.place + piece.moved - groups[-1][0].place <= TOGETHER:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def span_of(group: Sequence[Piece]) -> tuple[int, int]:
    """Where a group begins and ends in the host buffer."""
    return group[0].place, group[-1].place + group[-1].moved


def packed(group: Sequence[Piece], staging: Tensor) -> Tensor:
    """The bytes of small pieces, laid out as in the host buffer, in memory of the device. staging: shape (ALIGNED + bytes,);
    its first bytes fill the gaps between pieces."""
    begin, end = span_of(group)
    parts = []
    for piece, after in zip(group, [*(other.place for other in group[1:]), end], strict=True):
        parts += [piece.bytes_on_device(), staging[: after - piece.place - piece.moved]]
    return torch.cat(parts, out=staging[ALIGNED : ALIGNED + end - begin])


def come_back_together(group: Sequence[Piece]) -> Tensor:
    """Allocate the storage again, one for all small pieces. Returns the bytes that the host must fill in."""
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
    """One rank's host buffers. pinned: the device can copy from and to them. keeps: keep buffers that are not used, in
    `free`; else they are returned to the system. held: bytes that are in them now."""

    def __init__(self, pinned: bool, keeps: bool = True) -> None:
        self.pinned, self.keeps, self.held = pinned, keeps, 0
        self.free: list[Tensor] = []
        self._captured: dict[int, Tensor] = {}  # each replay of a CUDA graph copies there

    def make(self, count: int, size: int) -> None:
        """Make `count` buffers of `size` bytes in advance, unless free ones fit; pinned ones as one allocation, since torch
        rounds each pinned allocation up to a power of two. Raises BadInput where this machine lacks the memory."""
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
        # With inputs of another shape, buffers of the old shape are freed one by one. Not during a capture: torch records
        # an event when pinned memory is freed, here in the graph, and asking for that event fails.
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
        with without_modes():  # modes that count bytes must not see host memory
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
            except RuntimeError as error:
                raise BadInput(f"no host memory for a buffer of {format_bytes(size)}: {error}") from error
