"""What a profile says: times with their spread, memory, links, layer by layer and stage by stage, and what they mean for a
schedule. As text and as a page that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .errors import BadInput
from .layer import beside, held
from .partition import balanced
from .profile import Profile
from .profile_rows import copy_rows, layer_rows, link_rows, pair_rows, ratio_line
from .show_style import format_time, printable
from .text import aligned, format_bytes, html_page, html_table

VOCABULARY = 1.1  # times the mean stage from which the last layer alone holds all others up
SMALL = 0.1


@dataclass(frozen=True, slots=True)
class StageCosts:
    """One stage: its layers (first, and one behind the last), µs of F, B, W and BW for one microbatch, bytes that F and B
    keep of one, bytes of parameters with gradients and optimizer state, bytes of messages and inside passes, µs of its
    message to the next (0: the last), µs of its all-to-all behind F, and of the one behind the backward."""

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
        """µs a microbatch with the backward split."""
        return self.F + self.B + self.W

    @property
    def fused(self) -> float:
        """µs a microbatch with a fused backward."""
        return self.F + self.BW


def stages(profile: Profile, ranks: int) -> tuple[StageCosts, ...]:
    """The split that `solve` makes with one stage a rank. Raises BadInput where there are fewer layers than ranks."""
    if ranks < 1:
        raise BadInput(f"ranks: at least 1 is needed, got {ranks}")
    counts = balanced([c.F + c.B + c.W for c in profile.layers], ranks)
    cuts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    rows = zip(cuts, cuts[1:], *beside(profile.layers, profile.states, profile.tied, counts, (range(ranks),)), strict=False)
    return tuple(_stage(profile, a, b, round(fixed), moving) for a, b, fixed, moving in rows)


def _stage(profile: Profile, first: int, end: int, fixed: int, moving: int) -> StageCosts:
    layers = profile.layers[first:end]
    f, b, w, bw = (sum(getattr(layer, kind) for layer in layers) for kind in ("F", "B", "W", "BW"))
    message = 0.0 if end == len(profile.layers) else profile.link.time(layers[-1].output_bytes)
    kept = sum(part[0] for part in held([layers]).values())
    return StageCosts(first, end, f, b, w, bw, kept, fixed, moving, message, sum(one.all_to_all for one in layers))


def meaning(profile: Profile, ranks: int, microbatches: int) -> list[str]:
    """Sentences: the bubble of 1F1B, the most that zero bubble could win, and what is in the way."""
    if microbatches < 1:
        raise BadInput(f"microbatches: at least 1 is needed, got {microbatches}")
    rows = stages(profile, ranks)
    said = [_bubble(rows, microbatches), *_balance(profile, rows), *_memory(profile, rows, microbatches), *_links(rows)]
    return [*said, *_all_to_alls(rows, microbatches)]


def _exposed(rows: Sequence[StageCosts], m: int) -> float:
    """µs that 1F1B waits for all-to-alls: of p microbatches in flight all but one on their way through p stages and back,
    and once more what fills and drains (derived, exact for equal stages and all-to-alls no longer than F: see
    tests/test_alltoall.py)."""
    p, mean = len(rows), sum(row.all_to_all for row in rows) / len(rows)
    return (m / p * (2 * p - 1) + 2 * (p - 1)) * mean


def _bubble(rows: Sequence[StageCosts], m: int) -> str:
    """1F1B by Σ t + (m − 1) · max t (2201.12023, section 5) with messages; nothing is below the busiest rank's work, nor
    below its all-to-alls."""
    fused = [row.fused for row in rows]
    step = sum(fused) + (m - 1) * max(fused) + 2 * sum(row.message for row in rows) + _exposed(rows, m)
    least = m * max(max(row.split, 2 * row.all_to_all) for row in rows)
    bubble = 1 - m * max(fused) / step if step else 0.0
    best = step / least - 1 if least else 0.0
    or_sent = " or all-to-alls" if any(row.all_to_all for row in rows) else ""
    win = f"can be {best:.1%} faster than that at most" if best > 0 else "cannot be faster than that: the split costs more"
    return (
        f"1F1B on {len(rows)} ranks with {m} microbatches takes about {format_time(step)}, {bubble:.1%} of it bubble; a "
        f"step without any, backward split, {win} ({format_time(least)}, the busiest rank's work{or_sent})."
    )


def _balance(profile: Profile, rows: Sequence[StageCosts]) -> list[str]:
    split = [row.split for row in rows]
    mean = sum(split) / len(rows)
    worst = max(range(len(rows)), key=lambda i: split[i])
    found = []
    if mean and split[worst] > (1 + SMALL) * mean:
        found.append(
            f"Stages are uneven: stage {worst} takes {split[worst] / mean:.2f} times the mean, and all other ranks wait "
            "for it."
        )
    last = profile.layers[-1]
    alone = last.F + last.B + last.W
    blocks = sorted(c.F + c.B + c.W for c in profile.layers[:-1])
    if blocks and mean and alone > VOCABULARY * mean:
        found.append(
            f"The output layer is the bottleneck: '{last.name}' alone takes {alone / mean:.2f} times the mean stage "
            f"({alone / max(blocks[len(blocks) // 2], 1e-9):.1f} times a middle layer). No split of layers helps; "
            "fewer ranks or an output layer split over ranks do."
        )
    return found


def _memory(profile: Profile, rows: Sequence[StageCosts], m: int) -> list[str]:
    p = len(rows)
    rest = [row.fixed + row.moving for row in rows]
    need = [rest[i] + min(p - i, m) * row.held for i, row in enumerate(rows)]
    most = max(range(p), key=lambda i: need[i])
    double = [rest[i] + min(2 * p - 1 - 2 * i, m) * row.held for i, row in enumerate(rows)]
    text = (
        f"1F1B needs {format_bytes(need[most])} on its fullest rank ({most}; {format_bytes(rows[most].fixed)} of it "
        f"parameters, gradients and optimizer state, {format_bytes(rows[most].moving)} messages and what passes take while "
        f"they run), a schedule with twice the microbatches in flight "
        f"{format_bytes(max(double))}"
    )
    if profile.capacity is None:
        return [f"{text}; how much the device has is not known."]
    room = format_bytes(profile.capacity)
    if max(rest) > profile.capacity:
        return [f"{text}. Memory is the bottleneck: all beside activations does not fit into {room} alone."]
    if need[most] > profile.capacity:
        return [f"{text}. Memory is the bottleneck: 1F1B does not fit into {room}; V-shaped placements or recompute may."]
    if max(double) > profile.capacity:
        return [
            f"{text}. Memory decides: of {room}, there is room for 1F1B and not for a bubble of zero at twice its memory."
        ]
    return [f"{text}; the device has {room}: memory is not the bottleneck."]


def _links(rows: Sequence[StageCosts]) -> list[str]:
    if len(rows) < 2:
        return []
    shares = [row.message / row.F if row.F else 0.0 for row in rows[:-1]]
    share, at = max(shares), shares.index(max(shares))
    what = "it must be hidden behind other microbatches" if share > SMALL else "small"
    return [f"The slowest message, from stage {at}, takes {share:.1%} of that stage's F: {what}."]


def _all_to_alls(rows: Sequence[StageCosts], m: int) -> list[str]:
    """What all-to-alls cost, where there are any."""
    worst = max(range(len(rows)), key=lambda i: rows[i].all_to_all)
    row = rows[worst]
    if not row.all_to_all:
        return []
    text = (
        f"All-to-alls take up to {format_time(2 * row.all_to_all)} a microbatch (stage {worst}); 1F1B waits about "
        f"{format_time(_exposed(rows, m))} for them"
    )
    if 2 * row.all_to_all > row.split:
        return [f"{text}. They take longer than the stage's work, so no schedule hides them all."]
    return [f"{text}, schedules that compute on other microbatches meanwhile do not."]


def stage_rows(profile: Profile, ranks: int) -> list[tuple[str, ...]]:
    """A header and a row a stage."""
    rows: list[tuple[str, ...]] = [
        (
            "stage",
            "layers",
            "F µs",
            "B µs",
            "W µs",
            "BW µs",
            "message µs",
            "one microbatch",
            "parameters, states",
            "messages, inside passes",
        )
    ]
    found = stages(profile, ranks)
    apart = any(row.all_to_all for row in found)
    rows[0] += ("all-to-all µs",) * apart
    for i, row in enumerate(found):
        names = f"{profile.layers[row.first].name} … {profile.layers[row.end - 1].name}"
        times = (f"{time:,.0f}" for time in (row.F, row.B, row.W, row.BW, row.message))
        sizes = (format_bytes(n) for n in (row.held, row.fixed, row.moving))
        rows.append((str(i), printable(names), *times, *sizes, *([f"{row.all_to_all:,.0f}"] if apart else [])))
    return rows


def _said(profile: Profile) -> list[str]:
    notes = profile.facts.get("warnings", [])
    return [f"WARNING: {printable(str(note))}" for note in notes] if isinstance(notes, list) else []


def banner(profile: Profile) -> list[str]:
    """That nothing was measured, where that is so, and what was assumed."""
    if profile.source == "measured":
        return []
    assumed = profile.facts.get("assumed")
    return [f"{printable(profile.source)}: no number here was measured", *([str(assumed)] if assumed else [])]


def table(profile: Profile, ranks: int | None = None, microbatches: int | None = None) -> str:
    """The profile as text; with `ranks` also its stages (microbatches: four a rank without) and what they mean."""
    lines = [*banner(profile), *aligned(layer_rows(profile)), ratio_line(profile), *_said(profile)]
    for rows in (pair_rows(profile), copy_rows(profile)):
        lines += ["", *aligned(rows)] if len(rows) > 1 else []
    if ranks is not None:
        lines += ["", *aligned(stage_rows(profile, ranks)), *meaning(profile, ranks, microbatches or 4 * ranks)]
    return "\n".join(lines) + "\n"


def page(profile: Profile, ranks: int, microbatches: int | None = None) -> str:
    """The report as one HTML page."""
    title = printable(f"Profile: {profile.title}")
    facts = ", ".join(
        f"{key} {profile.facts[key]}"
        for key in ("host", "processor", "device", "torch", "date", "states")
        if key in profile.facts
    )
    clocks = profile.facts.get("clock_mhz")
    if isinstance(clocks, list) and clocks:
        facts += f", clock {min(clocks):,} to {max(clocks):,} MHz"
    links = link_rows(profile)
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p class='estimate'>{escape(line)}</p>" for line in banner(profile)),
        f"<p>{escape(printable(facts))}</p>",
        *(f"<p class='warning'>{escape(line)}</p>" for line in _said(profile)),
        f"<h2>{ranks} ranks</h2>",
        *(f"<p>{escape(line)}</p>" for line in meaning(profile, ranks, microbatches or 4 * ranks)),
        html_table(stage_rows(profile, ranks)),
        "<h2>Layers</h2><p>µs a microbatch: medians, ± half a 95 % interval; X: recompute; U: the update, once a step."
        " F host: µs of the host in F, on a CPU the least that it can be.</p>",
        html_table(layer_rows(profile)),
        "<h2>Links</h2>",
        f"<p>{escape(ratio_line(profile))}</p>",
        html_table(links) if len(links) > 1 else "<p>No message was measured.</p>",
        *(html_table(rows) for rows in (pair_rows(profile), copy_rows(profile)) if len(rows) > 1),
    ]
    style = (
        "table{display:block;overflow-x:auto}td:first-child,th:first-child{text-align:left}"
        ".estimate{font-weight:600;color:#8a3b00}.warning{color:#8a3b00}"
    )
    return html_page(title, style, "".join(body))
