"""Megatron and Primus: `pp_rank_N.json` and config.json in a folder, as `--dump_pp_data` writes them (`pp_visualizer`).

Times are of CUDA events, in ms since the rank's own start of the step, in the order in which passes ran; waiting is between
passes. `total` is the time of the schedule function. `memory` is the maximum of reserved GiB so far, which says nothing
of activations. Files of older versions lack microbatches and chunks; then the order is Megatron's (see `in_groups`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...problem.placement import loop, single, vee
from ...util.errors import BadInput
from ...util.files import COUNT, checked, parse_json, read_text
from ...util.text import printable
from .recording import OWN, RanPass, RecordedStep, Recording

RANK_FILE, CONFIG = re.compile(r"pp_rank_(\d+)\.json"), "config.json"
FORMAT = "Primus pipeline events"
MS = 1e3  # µs
Places = list[tuple[int, int]]  # chunk and microbatch


class ConfigForm(msgspec.Struct):
    """The fields of config.json that are used here."""

    pp_size: COUNT
    num_mbs: COUNT
    vp_size: COUNT | None = None


class StepForm(msgspec.Struct):
    """One step of one rank."""

    fwd_start: list[float]
    fwd_end: list[float]
    bwd_start: list[float]
    bwd_end: list[float]
    wgrad_start: list[float] = []
    wgrad_end: list[float] = []
    fwd_minibatch: list[COUNT] = []
    fwd_chunk: list[COUNT] = []
    bwd_minibatch: list[COUNT] = []
    bwd_chunk: list[COUNT] = []
    wgrad_minibatch: list[COUNT] = []
    wgrad_chunk: list[COUNT] = []
    total: float | None = None
    memory: float | None = None


RankSteps = dict[str, StepForm]


def read(folder: Path) -> Recording:
    """The runs of all ranks. Raises BadInput naming file, rank, step and field."""
    config = checked(parse_json(read_text(folder / CONFIG), folder / CONFIG), ConfigForm, str(folder / CONFIG))
    chunks = config.vp_size or 1
    if not config.pp_size or not config.num_mbs:
        raise BadInput(f"{folder / CONFIG}: field 'pp_size' is {config.pp_size}, 'num_mbs' {config.num_mbs}: from 1 up")
    ranks = [_rank(folder, rank, config.pp_size) for rank in range(config.pp_size)]
    for rank, own in enumerate(ranks):
        if own.keys() != ranks[0].keys():
            odd = printable(min(own.keys() ^ ranks[0].keys()))
            raise BadInput(f"{folder}: rank {rank}: steps are mixed: step {odd} is in one of ranks 0 and {rank} alone")
    runs = [_steps_of(folder, rank, steps, config) for rank, steps in enumerate(ranks)]
    names = sorted(runs[0], key=lambda name: (len(name), name))
    placement = _placement([rank[names[-1]] for rank in runs] if names else [], chunks)
    stage_of = {(rank, placement[:stage].count(rank)): stage for stage, rank in enumerate(placement)}
    steps = []
    for name in names:
        ran = [(rank, *row) for rank, rows in enumerate(runs) for row in rows[name].passes]
        passes = (RanPass(k, stage_of[rank, c], m, rank, start * MS, end * MS) for rank, k, (c, m), start, end in ran)
        steps.append(RecordedStep(name, tuple(passes)))
    facts = {"backend": "Megatron", "ranks": config.pp_size}
    return Recording(str(folder), FORMAT, OWN, tuple(steps), {}, facts, _further(folder, config.pp_size))


def read_rank_alone(path: Path) -> Recording:
    """Raises BadInput: the file of one rank alone is not a step."""
    raise BadInput(f"{path}: one rank's file: name its folder, which holds those of all ranks and {CONFIG}")


def _rank(folder: Path, rank: int, ranks: int) -> RankSteps:
    path = folder / f"pp_rank_{rank}.json"
    if not path.is_file():
        raise BadInput(f"{folder}: rank {rank}: {path.name} is missing ({CONFIG} says pp_size {ranks})")
    return checked(parse_json(read_text(path), path), RankSteps, str(path))


def _further(folder: Path, ranks: int) -> tuple[str, ...]:
    """A line if there are files of more ranks than the pipeline has."""
    files = (RANK_FILE.fullmatch(path.name) for path in folder.iterdir())
    more = sorted(int(match[1]) for match in files if match and int(match[1]) >= ranks)
    them = f"rank {more[0]}" if len(more) == 1 else f"ranks {', '.join(map(str, more[:8]))}"
    return (f"the files of {them}: {CONFIG} says pp_size {ranks}",) if more else ()


def _steps_of(folder: Path, rank: int, steps: RankSteps, config: ConfigForm) -> dict[str, _RankStep]:
    path = folder / f"pp_rank_{rank}.json"
    return {
        printable(name): _RankStep(step, config.vp_size or 1, config, f"{path}: step {name}") for name, step in steps.items()
    }


class _RankStep:
    """A step in a rank's file. passes: (kind, chunk and microbatch, start, end in ms), not ordered."""

    def __init__(self, step: StepForm, chunks: int, config: ConfigForm, where: str) -> None:
        count = chunks * config.num_mbs
        split = len(step.wgrad_start) > 0
        self.has_chunks = bool(step.fwd_chunk)
        self.passes: list[tuple[str, tuple[int, int], float, float]] = []
        for field, kind in (("fwd", "F"), ("bwd", "B" if split else "BW"), *((("wgrad", "W"),) if split else ())):
            starts, ends = getattr(step, f"{field}_start"), getattr(step, f"{field}_end")
            if len(starts) != count or len(ends) != count:
                raise BadInput(
                    f"{where}: field '{field}_start' has {len(starts)} times and '{field}_end' {len(ends)}; "
                    f"{config.num_mbs} microbatches of {chunks} chunks make {count}"
                )
            places = self._places(step, field, chunks, config, where)
            late = next((i for i in range(1, count) if starts[i] < starts[i - 1]), None)
            if late is not None:
                raise BadInput(f"{where}: field '{field}_start'[{late}] is before the one before it: not in the order run")
            self.passes += [(kind, *row) for row in zip(places, starts, ends, strict=True)]

    @staticmethod
    def _places(step: StepForm, field: str, chunks: int, config: ConfigForm, where: str) -> Places:
        rows = {name: getattr(step, f"{field}_{name}") for name in ("minibatch", "chunk")}
        usual = in_groups(config.pp_size, chunks, config.num_mbs, backward=field != "fwd")
        if not rows["minibatch"] and not rows["chunk"] and (chunks == 1 or field != "wgrad"):
            return usual
        for name, row in rows.items():
            if len(row) != len(usual) and (row or name == "minibatch" or chunks > 1):
                raise BadInput(f"{where}: field '{field}_{name}' has {len(row)} values for {len(usual)} passes")
            limit = config.num_mbs if name == "minibatch" else chunks
            if row and max(row) >= limit:
                raise BadInput(f"{where}: field '{field}_{name}' has {max(row)}, and {CONFIG} says {limit} of them")
        return list(zip(rows["chunk"] or [0] * len(usual), rows["minibatch"], strict=True))

    def wait_at_the_loss(self, chunk: int) -> float:
        """ms between a forward of this chunk and its backward, at least."""
        ends = {place: end for kind, place, _, end in self.passes if kind == "F" and place[0] == chunk}
        return min(start - ends[place] for kind, place, start, _ in self.passes if kind in ("B", "BW") and place in ends)


def in_groups(ranks: int, chunks: int, microbatches: int, backward: bool) -> Places:
    """(chunk, microbatch) of a rank's passes in Megatron's order: for each group of `ranks` microbatches one chunk after the
    other; in backwards the last chunk first."""
    turn = range(chunks - 1, -1, -1) if backward else range(chunks)
    size = ranks if chunks > 1 else microbatches
    groups = [range(i, min(i + size, microbatches)) for i in range(0, microbatches, size)]
    return [(chunk, microbatch) for group in groups for chunk in turn for microbatch in group]


def _placement(ranks: Sequence[_RankStep], chunks: int) -> tuple[int, ...]:
    """Stage → rank. Files have only chunks. The stage with the loss is where a backward follows its forward soonest: it is
    on the last rank of a loop, and on the first rank of a vee."""
    if chunks == 1 or not ranks:
        return single(max(1, len(ranks)))
    first, last = (ranks[rank].wait_at_the_loss(chunks - 1) for rank in (0, -1))
    vees = chunks % 2 == 0 and ranks[0].has_chunks and first < last
    return (vee if vees else loop)(len(ranks), chunks)
