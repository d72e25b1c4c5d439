"""One program of forwards, on one rank that is connected to the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..backward.forward_stage import ForwardStage
from ..device.rank_device import RankDevice
from ..device.rows import DeviceRows
from ..feed import ShapeNumbers
from ..handlers.handler import Data, RankState, sum_of
from ..interpreter import Hooks, Interpreter
from ..lowering import lower
from ..program import Program
from ..slices.cutting import Cutting
from ..transport.format import Format
from ..transport.mailbox import Mailbox
from ..transport.wires import receive_bytes, receive_tensor, send_bytes, send_tensor
from .on_rank import OnRank


@dataclass(frozen=True, eq=False)
class ForwardRound:
    """The forwards of some microbatches in the order that the schedule gives them, with messages of their own. stages: this
    rank's, by number. cutting: how sequences are cut into slices. gpu: the device, where that is one."""

    stages: Mapping[int, ForwardStage]
    interpreter: Interpreter
    mailbox: Mailbox
    shapes: ShapeNumbers
    cutting: Cutting
    gpu: RankDevice | None = None

    @classmethod
    def of(cls, pipeline: OnRank, count: int, with_loss: bool) -> ForwardRound:
        """The round of `count` microbatches, at most as many as a step has, to their losses or to their outputs."""
        view, peers = pipeline.view.forwards(count), pipeline.peers
        program = lower(view, training=False)[view.ranks.index(pipeline.rank)]
        mesh = None if pipeline.mesh is None else pipeline.mesh.whole
        gpu = None
        if pipeline.device.type == "cuda":
            gpu = RankDevice(pipeline.device, peers, program.actions, pipeline.hooks)
        rows = None if gpu is None else DeviceRows(peers.wires, gpu.device, gpu.marks)
        mailbox = Mailbox(peers.wires, program.incoming, pipeline.device, peers.timeout.total_seconds(), mesh, rows)
        shard = pipeline.vocabulary_shard
        stages = {s: ForwardStage(one, with_loss, s == view.step.stages - 1) for s, one in pipeline.stages.items()}
        hooks = Hooks(announce=pipeline.hooks.announce, watch=pipeline.hooks.watch)
        parts = range(count * pipeline.cutting.count)
        shapes = ShapeNumbers(view.step.routes, parts, pipeline.rank, peers.wires.size)
        state = RankState(stages, vocabulary=None if shard is None else shard.for_forwards())
        interpreter = Interpreter(program, state, mailbox, hooks)
        interpreter.marks = None if gpu is None else gpu.marks
        return cls(stages, interpreter, mailbox, shapes, pipeline.cutting, gpu)

    @property
    def program(self) -> Program:
        """This rank's."""
        return self.interpreter.program

    def run(self, pipeline: OnRank, data: Data) -> None:
        """Run it on `data`. Raises RunFailed naming rank, pass and cause."""
        peers, interpreter = pipeline.peers, self.interpreter
        with peers.telling(f"pass {self.program.actions[0].name}"):
            self.mailbox.begin(self.shapes.agree(self.mailbox, data.inputs, pipeline.device))
        with peers.telling("end of the evaluation"), nullcontext() if self.gpu is None else self.gpu.guarded():
            record = interpreter.begin(data)
            if self.gpu is not None:
                self.gpu.marks.stream = torch.cuda.current_stream(self.gpu.device)
                self.gpu.begin(record, self.gpu.marks, 0)
            interpreter.run_all(self.program.actions)
            self.mailbox.flush()
            for _ in interpreter.ended():
                pass  # collectives that no pass here waits for
            if self.gpu is not None:
                self.gpu.finish(record, self.gpu.marks)
            if pipeline.sharding is not None:
                pipeline.sharding.close()
            interpreter.compare()

    @property
    def loss(self) -> float:
        """The sum of this rank's losses."""
        total = sum_of(self.interpreter.state.losses)
        return 0.0 if total is None else float(total)

    @property
    def outputs(self) -> dict[int, Any]:
        """Microbatch → what the last stage made of it here."""
        return self.cutting.joined({m: y for one in self.stages.values() for m, y in one.outputs.items()})

    def clear(self) -> None:
        """Keep nothing of the batch."""
        self.interpreter.begin(Data({}, {}))
        for one in self.stages.values():
            one.outputs.clear()


def handed_out(pipeline: OnRank, mine: Mapping[int, Any], owners: Sequence[int], takers: Sequence[int]) -> dict[int, Any]:
    """The outputs of all `owners`, on each of the `takers`. mine: this rank's, by microbatch. All of them call this, and
    others may. Raises LostRank."""
    wires, found, mesh = pipeline.peers.wires, dict(mine), None if pipeline.mesh is None else pipeline.mesh.whole
    for owner in owners:
        for other in (rank for rank in takers if rank != owner):
            if pipeline.rank == owner:
                send_bytes(wires, json.dumps(list(mine)).encode(), other)
                for y in mine.values():
                    form = Format.of(y)
                    send_bytes(wires, form.dumps(mesh), other)
                    send_tensor(wires, form.pack(y, pipeline.device), other)
            elif pipeline.rank == other:
                for m in json.loads(receive_bytes(wires, owner)):
                    form = Format.loads(receive_bytes(wires, owner), mesh)
                    row = form.buffer(pipeline.device)
                    receive_tensor(wires, row, owner)
                    found[m] = form.unpack(row)
    return found
