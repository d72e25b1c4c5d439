"""All that one rank offloads: passes begin copies, and other passes wait for them. Its handlers are those of O and R."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...tables import Ints
from ...util.errors import BadInput
from ..base.handler import Graph, Handler, side_work_of
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
    """What a microbatch keeps of a stage off the device since pass `name`: the pieces, and the host buffer, of `size` bytes,
    that they are in. coming: its reload has begun."""

    name: str
    pieces: list[Piece]
    size: int
    buffer: Tensor | None = None
    coming: bool = False


class Offload(Part):
    """What one rank keeps in host memory. buffers: stage → how many microbatches may lie there at one time. timeout: seconds
    to wait for a copy. shared: copies wait for those of other ranks. signals: by which, unless a device is emulated.
    moved: bytes that went to the host in this step. side: the copies, launched as they begin or done by threads.

    Host memory that ranks share goes back to the system as soon as a microbatch has left it, for the next one may be another
    rank's. Elsewhere buffers are made at a stage's first offload, and stay: then nothing here waits on a GPU's host, and a
    CUDA graph can capture a step behind the first one.
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
        self.side = SideWork(device, timeout + 1.0, launched)  # beyond a signal's time, which knows the rank it waited for
        self.device, self.moved = self.side.device, 0
        self.pool = HostPool(pinned=device.type == "cuda", keeps=not shared)
        self._staging: dict[str, Tensor] = {}  # on the device, by copy stream
        self._read: dict[int, Any] = {}  # host buffer → the event behind the last copy from it
        self._missing = {} if shared else dict(buffers)
        self._keepers: dict[Spot, Keeper] = {}
        self._away: dict[Spot, _Away] = {}

    @classmethod
    def of(cls, c: Connecting) -> Offload | None:
        """The part of a rank, where passes of it offload. All ranks call this."""
        shared = any(action.hears for program in c.own.programs for action in program.actions)
        signals = _signals(c) if shared and c.hooks.emulated is None else None  # an emulated device waits by its clock
        buffers = buffers_of(c.own.program)
        return cls(c.device, buffers, c.peers.timeout.total_seconds(), signals, shared) if buffers else None

    def begin(self, data: Any = None) -> None:
        if self.side.launched:  # what a step that failed has left still uses memory
            for name in list(self.side.begun):
                self.side.settle(name)
        self._read.clear()  # computing is behind the copies of the last step; a graph knows nothing of those
        self.side.begin_step(self.marks)
        self.moved = 0
        if self.signals is not None:
            self.signals.step += 1

    def keeper(self, action: Action, data: Any) -> Keeper | None:
        """The keeper of what an F keeps, where an O follows. The batch stays where it is."""
        if "O" not in action.companions:
            return None
        batch = tensors_of([data.inputs.get(action.part), data.targets.get(action.part)])
        made = self._keepers[action.stage, action.part] = Keeper(self.device, batch, self.side.copies.mark)
        return made

    def send_out(self, action: Action) -> None:
        """Begin to copy what F keeps to the host, behind the pass that made it, and what read the host buffer last. It goes
        from the device with `settle`. Raises BadInput where the machine lacks memory."""
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
            with without_modes():  # it stays for good, and is no activation
                self._staging[stream] = torch.empty(ALIGNED + TOGETHER, dtype=torch.uint8, device=self.device)
            behind.append(self.side.copies.mark())  # who had this memory before may still use it
        if away.buffer is not None and (read := self._read.pop(away.buffer.data_ptr(), None)) is not None:
            behind.append(read)
        work = partial(self._copy_out, away, groups, self._staging.get(stream))
        self._begin(action, work, lambda: deque(map(Piece.leave, pieces), 0), behind)

    def bring_back(self, action: Action) -> None:
        """Take memory on the device, and begin to copy there what is in host memory: behind all that computing has launched,
        which may have used that memory. Raises BadInput where nothing is in host memory."""
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
        """A step that nothing was to run of yet breaks off: a graph was to hold its copies."""
        for spot in list(self._away):
            self._give_back(spot)
        for rows in (self._keepers, self.side.begun, self.side.done, self._read):
            rows.clear()

    def _groups(self, away: _Away) -> list[list[Piece]]:
        """What is copied as one. Where a thread copies, each piece is, and has memory of its own when it is back."""
        return in_groups(away.pieces) if self.side.launched else [[piece] for piece in away.pieces]

    def _begin(
        self,
        action: Action,
        work: Callable[[], None],
        over: Callable[[], Any],
        behind: Sequence[Any],
        done: Callable[[], None] = lambda: None,
    ) -> Copy | Launched:
        """Begin a copy, which waits for other ranks' and tells them. done: where it does, called when it is really done; the
        rest as `SideWork.start` takes it."""
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
    """Stage → how many microbatches of it are in host memory at one time, where some are."""
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
    """What copies of several ranks tell each other. All ranks call this."""
    problem = c.problem
    ranks = dict(zip(problem.names, problem.passes.rank.tolist(), strict=True))
    cells = shared_cells(c.wires, (len(problem.names),), "offload: copies wait for those of other ranks")
    return Signals(cells, problem.index, ranks, c.peers.timeout.total_seconds())


def _copy_back(targets: list[tuple[Tensor, int]], away: _Away) -> None:
    assert away.buffer is not None
    for target, place in targets:
        target.copy_(away.buffer[place : place + len(target)], non_blocking=True)


def _check_offload(graph: Graph, rows: Ints) -> None:
    """An O is behind its F, and its R behind it, on the same rank."""
    for row, offload in graph.each(rows):
        graph.check_order(offload, graph.need("F", offload), row, graph.need("R", offload), alone=True)


def _check_reload(graph: Graph, rows: Ints) -> None:
    """An R is before the first pass that uses what its F keeps: X, or else B or BW."""
    for row, reload in graph.each(rows):
        graph.need("O", reload)
        first = next((kind for kind in ("X", "B", "BW") if graph.row(kind, reload) is not None), "B")
        graph.check_order(reload, row, graph.need(first, reload), alone=True)


_SIDE = {"sliced": True, **side_work_of(Offload)}
HANDLERS = {
    "O": Handler(lambda state, action, _: state.part(Offload).send_out(action), _check_offload, does="offload", **_SIDE),
    "R": Handler(lambda state, action, _: state.part(Offload).bring_back(action), _check_reload, does="reload", **_SIDE),
}
