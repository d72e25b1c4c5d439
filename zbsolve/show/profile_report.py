"""A report of a profile, as text and as a page: its layers, links and stages, and what they mean for a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from ..partition.by_name import Partitioned
from ..partition.layer import layer_ranges
from ..partition.stage_costs import StageCosts
from ..profile.doubtful import doubts
from ..profile.profile import Profile
from ..util.text import aligned, counted, printable, times_note
from . import profile_rows as tables
from .pages import render
from .profile_meaning import meaning, stages
from .sentences import host_lines


def _warnings(profile: Profile) -> list[str]:
    return [f"WARNING: {note}" for note in doubts(profile)]


def banner(profile: Profile) -> list[str]:
    """Lines that say that nothing in the profile was measured, and what was assumed; none for a measured profile."""
    if profile.source == "measured":
        return []
    assumed = profile.facts.get("assumed")
    return [f"{printable(profile.source)}: no number here was measured", *([str(assumed)] if assumed else [])]


def profile_as_text(profile: Profile, ranks: int | None = None, microbatches: int | None = None) -> str:
    """The profile as text. With `ranks` also its stages and what they mean. microbatches: four a rank by default."""
    shares = () if ranks is None else stages(profile, ranks)
    units, below = tables.units_of(profile, shares), list[str]()
    if ranks is not None:
        below = [*aligned(tables.stage_rows(profile, shares, units)), *meaning(profile, ranks, microbatches or 4 * ranks)]
    lines = [
        *banner(profile),
        *aligned(tables.layer_rows(profile, units)),
        tables.ratio_line(profile),
        *host_lines(profile, ranks),
    ]
    lines += _warnings(profile)
    lines += [line] if (line := tables.overheads_line(profile)) else []
    for rows in tables.further_rows(profile, units):
        lines += ["", *aligned(rows)]
    return "\n".join([*lines, "", *below] if below else lines) + "\n"


def profile_as_page(profile: Profile, ranks: int, microbatches: int | None = None) -> str:
    """The report with `ranks` stages, as one HTML page that loads no other file. microbatches: four a rank by default."""
    shared = stages(profile, ranks)
    units = tables.units_of(profile, shared)
    return render(
        "profile.html",
        title=printable(f"Profile: {profile.title}"),
        banner=banner(profile),
        facts=printable(_facts(profile)),
        warnings=[*_warnings(profile), *filter(None, [tables.overheads_line(profile)])],
        units=units,
        **tables.picture(profile, units),
        ranks=ranks,
        meaning=[*meaning(profile, ranks, microbatches or 4 * ranks), *host_lines(profile, ranks)],
        stages=tables.stage_rows(profile, shared, units),
        layers=tables.layer_rows(profile, units),
        ratio=tables.ratio_line(profile),
        links=tables.link_rows(profile, units),
        others=tables.further_rows(profile, units),
    )


def _facts(profile: Profile) -> str:
    """Where and when it was measured, in a line."""
    known = ("host", "processor", "device", "torch", "date", "states")
    facts = ", ".join(f"{key} {profile.facts[key]}" for key in known if key in profile.facts)
    clocks = profile.facts.get("clock_mhz")
    if isinstance(clocks, list) and clocks:
        facts += f", clock {min(clocks):,} to {max(clocks):,} MHz"
    return facts


def partitions_as_text(
    costs: StageCosts, splits: Sequence[Partitioned], units: tables.Units = tables.IN_FULL, source: str = "measured"
) -> str:
    """A table of partitions: the work of the busiest rank, its difference to that of the partition "equal", and the most
    memory, marked where it does not fit. source: where the times come from."""
    busiest = [float((costs.shares @ partitioned.times).max()) for partitioned in splits]
    base = next(work for partitioned, work in zip(splits, busiest, strict=True) if partitioned.name == "equal")
    rows = [("partition", f"busiest rank {units.time}", "against equal", f"most {units.size}", "  layers a stage")]
    for partitioned, work in zip(splits, busiest, strict=True):
        rows.append(
            (
                partitioned.name,
                units.of_time(work),
                f"{work / base - 1:+.2%}" if base else "–",
                f"{units.of_bytes(max(partitioned.need))}{' ' if costs.fits(partitioned.need) else '!'}",
                "  " + counted(partitioned.layers),
            )
        )
    kind = "with parameters, states and min(m, stages left) microbatches" if costs.single else "with one microbatch"
    lines = aligned(rows, left=(0, -1))
    lines.append(f"{units.time}: of one microbatch; {units.size}: {kind}; m = {costs.microbatches}")
    if not all(costs.fits(partitioned.need) for partitioned in splits):
        rooms = " or ".join(map(units.of_bytes, dict.fromkeys(costs.limit or ())))
        lines.append(f"!: more than the {rooms} {units.size} that a rank has")
    if note := times_note(source):
        lines.append(note)
    return "\n".join(lines) + "\n"


def stages_as_text(costs: StageCosts, split: Partitioned, units: tables.Units = tables.IN_FULL) -> str:
    """A table of a partition's stages: the rank, the time and the layers of each."""
    names = [layer.name for layer in costs.layers]
    where = ["/".join(str(route[stage]) for route in costs.routes) for stage in range(costs.stages)]
    apart = any(costs.all_to_alls)
    heads = (units.time, *((f"all-to-alls {units.time}",) if apart else ()))
    rows: list[tuple[str, ...]] = [("stage", "rank", *heads, "layers", "")]
    for stage, here in enumerate(layer_ranges(split.layers)):
        last = f" … {names[here.stop - 1]}" if len(here) > 1 else ""
        times = (units.of_time(column[stage]) for column in (split.times, *((split.all_to_alls,) if apart else ())))
        rows.append((str(stage), where[stage], *times, str(len(here)), f" {names[here.start]}{last}"))
    return f"{split.name}:\n" + "\n".join(aligned(rows, left=(0, -1))) + "\n"
