"""A roofline's times compared with a GPU's, pass by pass, for the parts of large models, in bfloat16.

Each part is one layer that runs as in the profiler; the estimate counts the same passes under fake tensors. The shares in
`profiler/devices.py` are fitted to these measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from profiler.dataflow import fake_mode, quiet
from profiler.devices import DEVICES, Device, clock_of
from profiler.operation_costs import FusedNorms, PassOps, passes_of, total
from profiler.roofline import time_us
from profiler.stage_rounds import TURNS, PassTimer, rounds
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.choices import described
from zbsolve.models.blocks import BlockSizes, Decoder, Scores, Tokens
from zbsolve.models.losses import CrossEntropy
from zbsolve.models.presets import Block
from zbsolve.models.published_models import typed

from .harness import table

KINDS = ("F", "B", "W", "BW")
LATE = 0.7  # of a pass: what the host takes for it from which on it is host-bound (a round's first finds the device idle)
WARM_TURNS, TIMED_TURNS = 2, 8  # of each of TURNS, two microbatches each
Row = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """A layer. build: makes it. shape: of its input: (batch, length) are tokens, with a width they are vectors. loss:
    follows the layer, over so many classes; 0: none."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int = 0

    def stage(self, device: torch.device) -> Stage:
        """The layer as a separate stage, not the first one if it takes vectors."""
        with device:
            layer = typed(self.build, torch.bfloat16)
        return Stage([layer], int(len(self.shape) > 2), CrossEntropy() if self.classes else None)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Its input and the labels."""
        tokens = torch.zeros(self.shape[:2], dtype=torch.int64, device=device)
        labels = tokens.random_(self.classes) if self.classes else None
        if len(self.shape) == 2:
            return tokens.random_(8), labels
        return torch.randn(self.shape, dtype=torch.bfloat16, device=device, requires_grad=True), labels


def pieces(tiny: bool) -> list[Piece]:
    """The parts, at the sizes of published models, or as small as possible."""
    if tiny:
        sizes = BlockSizes(32, 4, 2, 8, 64)
        return [
            Piece("GPT block, width 32", partial(Block, 32, 4), (1, 16, 32)),
            Piece("Llama block, width 32", partial(Decoder, sizes, 16), (1, 16, 32)),
            Piece("head, 64 words", partial(Scores, 64, 32), (1, 16, 32), 64),
            Piece("embedding, 64 words", partial(Tokens, 64, 32), (1, 16)),
        ]
    llama = BlockSizes(4096, 32, 8, 128, 14_336)
    return [
        Piece("GPT block, width 2048", partial(Block, 2048, 16), (4, 1024, 2048)),
        Piece("GPT block, width 4096", partial(Block, 4096, 32), (2, 2048, 4096)),
        Piece("Llama block, width 4096", partial(Decoder, llama, 4096, 500_000.0), (1, 4096, 4096)),
        Piece("head, 128,256 words", partial(Scores, 128_256, 4096), (1, 4096, 4096), 128_256),
        Piece("embedding, 128,256 words", partial(Tokens, 128_256, 4096), (1, 4096)),
    ]


@table()
def gpu_roofline(device: Literal["cuda", "cpu"] = "cuda", tiny: bool = False) -> dict[str, Any]:
    """A row for each part and kind of pass: µs estimated and measured, their ratio, what the pass does, and whether the
    device waited for the host to launch it. clock_mhz: after each part. tiny: the smallest sizes, which show that it works,
    not how fast."""
    target = torch.device(device)
    card, clock = card_of(described(target)), clock_of(target)
    rows, clocks = [], []
    for piece in pieces(tiny):
        rows += compared(piece, target, card)
        clocks.append(clock())
    facts = {"device": described(target), "roofline": card.name, "torch": torch.__version__}
    return {**facts, "clock_mhz": [mhz for mhz in clocks if mhz is not None], "says": lines(rows), "rows": rows}


def card_of(name: str) -> Device:
    """The device whose data sheet is used for a card of this name; an H100 for any other."""
    return next((one for key, one in DEVICES.items() if key in name.lower()), DEVICES["h100"])


def compared(piece: Piece, device: torch.device, card: Device) -> list[Row]:
    """The rows of one part."""
    work, samples = operations(piece), sampled(piece, device)
    found = []
    for kind in KINDS:
        device_us, host_us = (median(column) for column in zip(*samples[kind], strict=True))
        estimated = time_us(work[kind], card)
        moved = sum(op.bytes for op in work[kind] if op.kind == "other")
        flops = {what: total([op for op in work[kind] if op.kind == what]) for what in ("matrix", "attention")}
        found.append(
            {
                "part": piece.name,
                "kind": kind,
                "estimated_us": round(estimated, 1),
                "measured_us": round(device_us, 1),
                "ratio": round(estimated / device_us, 3),
                "host_us": round(host_us, 1),
                "host_bound": host_us > LATE * device_us,
                "flops": flops,
                "bytes": moved,
                "kernels": len(work[kind]),
            }
        )
    return found


def operations(piece: Piece) -> PassOps:
    """The operations of its passes, counted under fake tensors."""
    cpu = torch.device("cpu")
    with fake_mode(), quiet(), FusedNorms():
        return passes_of(piece.stage(cpu), *piece.batch(cpu))


def sampled(piece: Piece, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """Kind → µs on the device and on the host, of passes run as the profiler runs them."""
    batch = piece.batch(device)
    turns = rounds([[piece.stage(device)]], lambda microbatch, step: batch, PassTimer(device))
    for _ in range(WARM_TURNS * len(TURNS)):
        next(turns)
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(TIMED_TURNS * len(TURNS)):
        for _, kind, device_us, host_us in next(turns):
            found.setdefault(kind, []).append((device_us, host_us))
    return found


def lines(rows: Sequence[Row]) -> list[str]:
    """The rows for people."""
    head = f"{'part':26} {'pass':4} {'estimated':>10} {'measured':>10} {'ratio':>6}"
    return [
        head,
        *(
            f"{row['part']:26} {row['kind']:4} {row['estimated_us']:10,.0f} {row['measured_us']:10,.0f} {row['ratio']:6.2f}"
            + (" (the host is late)" if row["host_bound"] else "")
            for row in rows
        ),
    ]
