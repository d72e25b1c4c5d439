"""What a profile means for a schedule: its stages, how much a zero-bubble schedule could save, and what limits that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..partition.layer import layer_ranges
from ..partition.stage_memory import StageMemory
from ..profile.named_steps import step_for
from ..profile.profile import Profile
from ..profile.step import Step
from ..schedule.timeline import Timeline
from ..systems.table import preset
from ..util.errors import BadInput
from ..util.text import counted, format_bytes, format_time, plural, time_unit

OUTPUT_LAYER_DOMINATES = 1.1  # times the mean stage: a longer last layer is the bottleneck in every split
NOTICEABLE = 0.1  # a share below this is called small
MAX_SHOWN = 16  # ranks whose work is shown one by one


@dataclass(frozen=True, slots=True)
class PlainStage:
    """One stage of a profile. first, end: its layers are `first` to `end` − 1. F, B, W, BW: µs for one microbatch. held:
    activation bytes of one microbatch. fixed: bytes of parameters, gradients and optimizer state. moving: bytes of messages
    and of temporary tensors in passes. message: µs of its message to the next stage (0: the last). all_to_all: µs of its
    all-to-all after F, and of the one after the backward."""

    first: int
    end: int
    F: float
    B: float
    W: float
    BW: float
    held: int
    fixed: int
    moving: int
    message: float
    all_to_all: float

    @property
    def split(self) -> float:
        """µs of a microbatch with B and W, or with BW where the profile has no B and W."""
        return self.F + (self.B + self.W or self.BW)

    @property
    def fused(self) -> float:
        """µs a microbatch with a fused backward."""
        return self.F + self.BW


def stages(profile: Profile, ranks: int) -> tuple[PlainStage, ...]:
    """The balanced split with one stage a rank. Raises BadInput where there are fewer layers than ranks."""
    if ranks > len(profile.layers):
        raise BadInput(f"ranks: {len(profile.layers)} layers do not make {ranks} stages")
    step = Step(ranks, 1, partition="balanced")
    counts, factors = step.counts(profile), step.costs(profile).factors.tolist()
    assert counts is not None
    memory = StageMemory(profile.layers, profile.states, profile.tied)
    rows = zip(layer_ranges(counts), factors, *memory.of_ranks(counts, step.routes), strict=True)
    return tuple(_stage(profile, memory, here, factor, round(fixed), moving) for here, factor, fixed, moving in rows)


def _stage(profile: Profile, memory: StageMemory, here: range, factor: float, fixed: int, moving: int) -> PlainStage:
    first, end = here.start, here.stop
    layers = profile.layers[first:end]
    f, b, w, bw = (factor * sum(getattr(layer, kind) for layer in layers) for kind in ("F", "B", "W", "BW"))
    message = 0.0 if end == len(profile.layers) else profile.link.message(layers[-1])
    kept = int(memory.kept(first, end))
    return PlainStage(first, end, f, b, w, bw, kept, fixed, moving, message, sum(layer.all_to_all for layer in layers))


def meaning(profile: Profile, ranks: int, microbatches: int) -> list[str]:
    """Sentences: the bubble of 1F1B, the most that zero bubble could save, and what limits that."""
    rows = stages(profile, ranks)
    today = _one_f_one_b(profile, ranks, microbatches)
    lines = [_bubble(rows, microbatches, today), *_balance(profile, rows), *_memory(profile, rows, microbatches, today)]
    if any(layer.all_to_all for layer in profile.layers):
        apart = replace(profile, layers=tuple(replace(layer, all_to_all=0.0) for layer in profile.layers))
        waits = today.makespan - _one_f_one_b(apart, ranks, microbatches).makespan
        return [*lines, *_links(rows, profile.link.blocking), _all_to_alls(rows, float(waits))]
    return [*lines, *_links(rows, profile.link.blocking)]


def rank_work(profile: Profile, ranks: int) -> dict[str, list[float]]:
    """Placement (with a stage a layer) → µs that each rank works for one microbatch."""
    chunks, work = len(profile.layers) // ranks, dict[str, list[float]]()
    for placement in {1: ("single",), 2: ("loop", "vee")}.get(chunks, (f"loop{chunks}",)):
        costs = Step(ranks, 1, placement, partition=(1,) * len(profile.layers)).costs(profile)
        work[placement] = (costs.shares @ (costs.factors * [layer.work for layer in profile.layers])).tolist()
    return work


def rank_work_lines(profile: Profile, ranks: int) -> list[str]:
    """`rank_work` in words, a line a placement, with how far the busiest rank is above the mean."""
    lines = []
    for placement, work in rank_work(profile, ranks).items():
        unit, show = time_unit(max(work))
        shown, worst = [show(us) for us in work], work.index(max(work))
        each = counted(shown)
        if len(each.split()) > MAX_SHOWN:
            each = f"{show(min(work))} to {show(max(work))}"
        above = max(work) * len(work) / sum(work) if any(work) else 1.0
        most = f"rank {worst} works {above:.3f} times the mean" if len(set(shown)) > 1 else "all work alike"
        lines.append(f"work of the ranks in a microbatch ({placement}), {unit}: {each}; {most}")
    return lines


def _one_f_one_b(profile: Profile, ranks: int, microbatches: int) -> Timeline:
    """1F1B on these ranks, without a memory limit."""
    step = step_for("1f1b", profile, Step(ranks, microbatches))
    return preset("1f1b", step.problem(replace(profile, capacity=None))).timeline()


def _bubble(rows: Sequence[PlainStage], m: int, today: Timeline) -> str:
    """The step time of 1F1B, and how far it is above the busiest rank's work (or all-to-alls, if longer)."""
    step = float(today.makespan)
    least = m * max(max(row.split, 2 * row.all_to_all) for row in rows)
    best = 1 - least / step if step else 0.0
    or_sent = " or all-to-alls" if any(row.all_to_all for row in rows) else ""
    split = ", backward split," if any(row.B or row.W for row in rows) else ""
    win = f"takes {best:.1%} less time than that at most" if best > 0 else "takes no less time: the split costs more"
    return (
        f"1F1B on {plural(rank=len(rows))} with {plural(microbatch=m)} takes {format_time(step)}, {today.bubble_rate:.1%} "
        f"of it bubble; a step without any{split} {win} ({format_time(least)}, the busiest rank's work{or_sent})."
    )


def _balance(profile: Profile, rows: Sequence[PlainStage]) -> list[str]:
    """Sentences on uneven stages, and on an output layer that takes longer than a mean stage."""
    split = [row.split for row in rows]
    mean = sum(split) / len(rows)
    worst = max(range(len(rows)), key=lambda i: split[i])
    lines = []
    if mean and split[worst] > (1 + NOTICEABLE) * mean:
        lines.append(
            f"Stages are uneven: stage {worst} takes {split[worst] / mean:.2f} times the mean, and all other ranks wait "
            "for it."
        )
    last = profile.layers[-1]
    alone = last.work
    blocks = sorted(layer.work for layer in profile.layers[:-1])
    if blocks and mean and alone > OUTPUT_LAYER_DOMINATES * mean:
        lines.append(
            f"The output layer is the bottleneck: '{last.name}' alone takes {alone / mean:.2f} times the mean stage "
            f"({alone / max(blocks[len(blocks) // 2], 1e-9):.1f} times a middle layer). No split of layers helps; "
            "fewer ranks or an output layer split over ranks do."
        )
    return lines


def _memory(profile: Profile, rows: Sequence[PlainStage], m: int, today: Timeline) -> list[str]:
    """The memory that 1F1B needs, that twice its microbatches in flight need, and whether the device has it."""
    p = len(rows)
    always = [row.fixed + row.moving for row in rows]
    need = [constant + peak for constant, peak in zip(always, today.peak_bytes, strict=True)]
    most = max(range(p), key=lambda i: need[i])
    double = [always[i] + min(2 * p - 1 - 2 * i, m) * row.held for i, row in enumerate(rows)]
    text = (
        f"1F1B needs {format_bytes(need[most])} on its fullest rank (rank {most}; {format_bytes(rows[most].fixed)} of it "
        f"parameters, gradients and optimizer state, {format_bytes(rows[most].moving)} messages and what passes take while "
        f"they run), a schedule with twice the microbatches in flight "
        f"{format_bytes(max(double))}"
    )
    if profile.capacity is None:
        return [f"{text}; how much the device has is not known."]
    room = format_bytes(profile.capacity)
    if max(always) > profile.capacity:
        return [f"{text}. Memory is the bottleneck: all beside activations does not fit into {room} alone."]
    if need[most] > profile.capacity:
        return [f"{text}. Memory is the bottleneck: 1F1B does not fit into {room}; V-shaped placements or recompute may."]
    if max(double) > profile.capacity:
        return [
            f"{text}. Memory decides: of {room}, there is room for 1F1B and not for a bubble of zero at twice its memory."
        ]
    return [f"{text}; the device has {room}: memory is not the bottleneck."]


def _links(rows: Sequence[PlainStage], blocking: bool) -> list[str]:
    """The time of the slowest message relative to the F of its stage."""
    if len(rows) < 2:
        return []
    shares = [row.message / row.F if row.F else 0.0 for row in rows[:-1]]
    share, at = max(shares), shares.index(max(shares))
    what = "it must be hidden behind other microbatches" if share > NOTICEABLE else "small"
    what = "nothing hides it, since its sender computes nothing meanwhile" if blocking and share > NOTICEABLE else what
    return [f"The slowest message, from stage {at}, takes {share:.1%} of that stage's F: {what}."]


def _all_to_alls(rows: Sequence[PlainStage], waits: float) -> str:
    """The cost of all-to-alls. waits: µs by which they lengthen 1F1B."""
    worst = max(range(len(rows)), key=lambda i: rows[i].all_to_all)
    row = rows[worst]
    text = (
        f"All-to-alls take up to {format_time(2 * row.all_to_all)} a microbatch (stage {worst}); 1F1B waits "
        f"{format_time(waits)} for them"
    )
    if 2 * row.all_to_all > row.split:
        return f"{text}. They take longer than the stage's work, so no schedule hides them all."
    return f"{text}, schedules that compute on other microbatches meanwhile do not."
