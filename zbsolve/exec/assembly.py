"""Makes a rank that is connected to the others and can run steps, from the part that it has built by itself."""

from __future__ import annotations

from typing import Any

from .base.part import Hooks, RankState
from .base.program import Program
from .connecting import Connecting, Given, Own
from .device.rank_device import DeviceRows, RankDevice
from .emulate import Board, EmulatedDevice
from .feed import ShapeNumbers
from .handlers import connect_parts
from .interpreter import Interpreter
from .own import own_stages
from .rank import RankRunner
from .reports import Reports, Table
from .transport.mailbox import Mailbox
from .transport.peers import Peers, clock_lead
from .transport.wires import Wires


def device_and_mailbox(peers: Peers, program: Program, given: Any, hooks: Hooks) -> tuple[RankDevice | None, Mailbox]:
    """The rank's GPU, or None, and its mailbox. given: an object with `device` and `mesh`."""
    gpu = None if given.device.type == "cpu" else RankDevice(given.device, peers, program.actions, hooks)
    mesh = None if given.mesh is None else given.mesh.whole
    rows = None if gpu is None else DeviceRows(peers.wires, gpu.device, gpu.marks)
    return gpu, Mailbox(peers.wires, program.incoming, given.device, peers.timeout.total_seconds(), mesh, rows)


def connected(own: Own, given: Given, wires: Wires, peers: Peers, hooks: Hooks) -> RankRunner:
    """Connect this rank to the others. wires: those without connections for pairs; `peers` have the paired ones. All ranks
    call this. Raises LostRank."""
    view, problem, program = own.view, own.view.step, own.program
    stages = own_stages(own, given)
    if given.emulate is not None:
        board = Board.shared(wires, view.passes)
        hooks.emulated = EmulatedDevice(given.emulate, view.rows, board, peers.timeout.total_seconds())
    parts = connect_parts(Connecting(own, given, stages, wires, peers, hooks))
    gpu, mailbox = device_and_mailbox(peers, program, given, hooks)
    table = Table.of(view.schedule, own.programs, given.emulate is not None, gpu is not None)
    return RankRunner(
        module=own.module,
        peers=peers,
        mailbox=mailbox,
        interpreter=Interpreter(program, RankState(stages, tuple(parts)), mailbox, hooks),
        reports=Reports(view, table, peers, clock_lead(wires)),
        gpu=gpu,
        shapes=ShapeNumbers(problem.routes, range(view.microbatches * problem.slices), wires.rank, wires.size, compared=2),
    )
