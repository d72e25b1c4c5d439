"""`Offload`: what one rank keeps in host memory. Passes O and R start copies, and later passes wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...util.errors import BadInput
from ..base.handler import Handler, side_work_of
from ..base.part import Part
from ..base.program import Action, Program
from ..base.torch_private import without_modes
from ..base.values import tensors_of
from ..connecting import Connecting
from ..device.copying import Copy, Launched, SideWork
from ..transport.peers import Signals, shared_cells
from .keeper import ALIGNED, TOGETHER, HostPool, Keeper, Piece, come_back_together, in_groups, packed, room_for, span_of

Spot = tuple[int, int]  # stage, microbatch


@dataclass(slots=True)
class _Away:
    """What a microbatch keeps of a stage in host memory since pass `name`: the pieces, and the host buffer of `size` bytes
    that they are in. coming: its reload has started."""

    name: str
    pieces: list[Piece]
    size: int
    buffer: Tensor | None = None
    coming: bool = False


class Offload(Part):
    """What one rank keeps in host memory. buffers: stage → how many microbatches may be there at one time. timeout: seconds
    to wait for a copy. shared: copies wait for those of other ranks. signals: how they do so, unless devices are emulated.
    moved: bytes copied to the host in this step. side: the copies, on CUDA streams or by threads.

    Host memory that ranks share returns to the system as soon as a microbatch has left it, since another rank's may be next.
    Otherwise buffers are allocated at a stage's first offload, and kept. So the host of a GPU never waits here, and
    a CUDA graph can capture any step after the first.
    """

    name = "offload"

    def __init__(
        self,
        device: torch.device,
        buffers: Mapping[int, int],
        timeout: float,
        signals: Signals | None = None,
        shared: bool = False,
    ) -> None:
        self.signals = signals
        launched = device.type == "cuda" and signals is None
        self.no_capture = "" if launched else "copies wait for those of other ranks on the host"
        self.side = SideWork(device, timeout + 1.0, launched)  # later than a signal, whose error names the rank
        self.device, self.moved = self.side.device, 0
        self.pool = HostPool(pinned=device.type == "cuda", keeps=not shared)
        self._staging: dict[str, Tensor] = {}  # on the device, by copy stream
        self._read: dict[int, Any] = {}  # host buffer → event after the last copy from it
        self._missing = {} if shared else dict(buffers)
        self._keepers: dict[Spot, Keeper] = {}
        self._away: dict[Spot, _Away] = {}

    @classmethod
    def of(cls, c: Connecting) -> Offload | None:
        """The part of a rank that offloads; else None. All ranks call this."""
        shared = any(action.hears for program in c.own.programs for action in program.actions)
        signals = _signals(c) if shared and c.hooks.emulated is None else None  # an emulated device has a clock for that
        buffers = buffers_of(c.own.program)
        return cls(c.device, buffers, c.peers.timeout.total_seconds(), signals, shared) if buffers else None

    def begin(self, data: Any = None) -> None:
        if self.side.launched:  # work of a failed step still uses memory
            for name in list(self.side.begun):
                self.side.settle(name)
        self._read.clear()  # these copies are done; a graph must not wait for their events
        self.side.begin_step(self.marks)
        self.moved = 0
        if self.signals is not None:
            self.signals.step += 1

    def keeper(self, action: Action, data: Any) -> Keeper | None:
        """The keeper of what an F keeps, if an O follows. The batch is not offloaded."""
        if "O" not in action.companions:
            return None
        batch = tensors_of([data.inputs.get(action.part), data.targets.get(action.part)])
        made = self._keepers[action.stage, action.part] = Keeper(self.device, batch, self.side.copies.mark)
        return made

    def send_out(self, action: Action) -> None:
        """Start to copy what F keeps to the host, after the pass that computed it, and after the last read of the host
        buffer. `settle` frees it on the device. Raises BadInput where the machine lacks memory."""
        spot, stream = (action.stage, action.part), action.stream
        keeper = self._keepers.pop(spot)
        pieces = keeper.chosen(action.share)
        away = self._away[spot] = _Away(action.name, pieces, room_for(pieces))
        if count := self._missing.pop(action.stage, 0):
            self.pool.make(count, away.size)
        if self.signals is None:
            away.buffer = self.pool.take(away.size)
        self.pool.held += away.size
        self.moved += sum(piece.moved for piece in pieces)
        groups, behind = self._groups(away), [self.side.copies.mark() if keeper.made is None else keeper.made]
        if any(len(group) > 1 for group in groups) and stream not in self._staging:
            with without_modes():  # kept for all steps; no activation
                self._staging[stream] = torch.empty(ALIGNED + TOGETHER, dtype=torch.uint8, device=self.device)
            behind.append(self.side.copies.mark())  # earlier users of this memory may not be done
        if away.buffer is not None and (read := self._read.pop(away.buffer.data_ptr(), None)) is not None:
            behind.append(read)
        work = partial(self._copy_out, away, groups, self._staging.get(stream))
        self._begin(action, work, lambda: deque(map(Piece.leave, pieces), 0), behind)

    def bring_back(self, action: Action) -> None:
        """Allocate memory on the device, and start to copy to it what is in host memory, after everything that the compute
        stream has launched, as that may use the memory. Raises BadInput where nothing is in host memory."""
        spot = action.stage, action.part
        away = self._away.get(spot)
        if away is None or away.coming:
            raise BadInput("nothing is in host memory that it could bring back")
        away.coming = True
        self.side.settle(away.name)
        targets = [(come_back_together(group), group[0].place) for group in self._groups(away)]
        work, behind = partial(_copy_back, targets, away), [self.side.copies.mark()]
        copy = self._begin(action, work, partial(self._give_back, spot), behind, partial(setattr, away, "buffer", None))
        if isinstance(copy, Launched) and away.buffer is not None:
            self._read[away.buffer.data_ptr()] = copy.over

    def host_bytes(self) -> int:
        return self.pool.held

    def forget(self) -> None:
        """A launch has failed, or a capture: none of its copies has run."""
        for spot in list(self._away):
            self._give_back(spot)
        for rows in (self._keepers, self.side.begun, self.side.done, self._read):
            rows.clear()

    def _groups(self, away: _Away) -> list[list[Piece]]:
        """The pieces in groups that are copied as one. A thread copies each piece alone, which then has its own memory."""
        return in_groups(away.pieces) if self.side.launched else [[piece] for piece in away.pieces]

    def _begin(
        self,
        action: Action,
        work: Callable[[], None],
        over: Callable[[], Any],
        behind: Sequence[Any],
        done: Callable[[], None] = lambda: None,
    ) -> Copy | Launched:
        """Start a copy, which waits for copies of other ranks and signals its end to them. done: called by the thread when
        the copy is done. Other arguments: see `SideWork.start`."""
        signals, side = self.signals, self.side
        if signals is None:
            return side.start(action.name, action.stream, work, over, behind)
        step = signals.step

        def heard() -> None:
            for name in action.hears:
                signals.hear(name, step)
            work()

        def told() -> None:
            done()
            signals.tell(action.name, step)

        return side.start(action.name, action.stream, heard, over, behind, told)

    def _copy_out(self, away: _Away, groups: Sequence[list[Piece]], staging: Tensor | None) -> None:
        if away.buffer is None:
            away.buffer = self.pool.take(away.size)
        for group in groups:
            (first, *more), (begin, end) = group, span_of(group)
            part = first.bytes_on_device()[: first.moved] if staging is None or not more else packed(group, staging)
            away.buffer[begin:end].copy_(part, non_blocking=True)

    def _give_back(self, spot: Spot) -> None:
        away = self._away.pop(spot)
        self.pool.held -= away.size
        if away.buffer is not None:
            self.pool.give_back(away.buffer)


def buffers_of(program: Program) -> dict[int, int]:
    """Stage → how many of its microbatches are in host memory at most, if any."""
    most, now, stage_of = dict[int, int](), dict[int, int](), dict[str, int]()
    for action in program.actions:
        for awaited in action.awaits:
            if awaited.kind == "R" and awaited.sure:
                now[stage_of[awaited.name]] -= 1
        stage_of[action.name] = action.stage
        if action.kind == "O":
            now[action.stage] = now.get(action.stage, 0) + 1
            most[action.stage] = max(most.get(action.stage, 0), now[action.stage])
    return most


def _signals(c: Connecting) -> Signals:
    """What copies of several ranks wait for each other with. All ranks call this."""
    problem = c.problem
    ranks = dict(zip(problem.names, problem.passes.rank.tolist(), strict=True))
    cells = shared_cells(c.wires, (len(problem.names),), "offload: copies wait for those of other ranks")
    return Signals(cells, problem.index, ranks, c.peers.timeout.total_seconds())


def _copy_back(targets: list[tuple[Tensor, int]], away: _Away) -> None:
    assert away.buffer is not None
    for target, place in targets:
        target.copy_(away.buffer[place : place + len(target)], non_blocking=True)


_SIDE = {"in_parts": True, "alone": True, **side_work_of(Offload)}
HANDLERS = {
    "O": Handler(lambda state, action, _: state.part(Offload).send_out(action), orders=("F O R",), **_SIDE),
    "R": Handler(lambda state, action, _: state.part(Offload).bring_back(action), orders=("O", "R X|B|BW"), **_SIDE),
}
