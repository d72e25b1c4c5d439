"""Partitions as text: how long each would take, and which layers the stages of one hold."""

from __future__ import annotations

from collections.abc import Sequence

from ..layer import layer_ranges
from ..partition.by_name import Partitioned
from ..partition.stage_costs import StageCosts
from ..util.text import aligned, counted, times_note


def partitions_as_text(costs: StageCosts, found: Sequence[Partitioned], source: str = "measured") -> str:
    """How long every partition's busiest rank works, that against the one named "equal", and whether it fits. source: where
    the times come from."""
    busiest = [float((costs.shares @ one.times).max()) for one in found]
    base = next(work for one, work in zip(found, busiest, strict=True) if one.name == "equal")
    rows = [("partition", "busiest rank µs", "against equal", "most bytes", "  layers a stage")]
    for one, work in zip(found, busiest, strict=True):
        rows.append(
            (
                one.name,
                f"{work:,.1f}",
                f"{work / base - 1:+.2%}" if base else "–",
                f"{max(one.need):,}{' ' if costs.fits(one.need) else '!'}",
                "  " + counted(one.layers),
            )
        )
    kind = "with parameters, states and min(m, stages left) microbatches" if costs.single else "with one microbatch"
    lines = aligned(rows, left=(0, -1))
    lines.append(f"µs: of one microbatch; bytes: {kind}; m = {costs.microbatches}")
    if not all(costs.fits(one.need) for one in found):
        rooms = " or ".join(f"{room:,}" for room in dict.fromkeys(costs.limit or ()))
        lines.append(f"!: more than the {rooms} bytes that a rank has")
    if note := times_note(source):
        lines.append(note)
    return "\n".join(lines) + "\n"


def stages_as_text(costs: StageCosts, one: Partitioned) -> str:
    """Which layers each stage of a partition holds, where it is, how long it takes."""
    names = [layer.name for layer in costs.layers]
    where = ["/".join(str(route[stage]) for route in costs.routes) for stage in range(costs.stages)]
    apart = any(costs.all_to_alls)
    rows: list[tuple[str, ...]] = [("stage", "rank", "µs", *(("all-to-alls µs",) if apart else ()), "layers", "")]
    for stage, here in enumerate(layer_ranges(one.layers)):
        last = f" … {names[here.stop - 1]}" if len(here) > 1 else ""
        times = (f"{column[stage]:,.1f}" for column in (one.times, *((one.all_to_alls,) if apart else ())))
        rows.append((str(stage), where[stage], *times, str(len(here)), f" {names[here.start]}{last}"))
    return f"{one.name}:\n" + "\n".join(aligned(rows, left=(0, -1))) + "\n"
