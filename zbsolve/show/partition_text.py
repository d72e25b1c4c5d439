"""Partitions as text: how long each would take, and which layers the stages of one hold."""

from __future__ import annotations

from collections.abc import Sequence

from ..layer import layer_ranges
from ..partition.by_name import Partitioned
from ..partition.meshes import places
from ..partition.stage_costs import StageCosts
from ..util.text import aligned, counted, times_note


def partitions_as_text(costs: StageCosts, found: Sequence[Partitioned], source: str = "measured") -> str:
    """Every partition's estimate, its gain over the one named "equal", and whether it fits. source: where the times come
    from."""
    base = next(one for one in found if one.name == "equal").estimate
    submeshes = max(max(one.devices) for one in found) > 1
    layers = "layers a stage|its devices" if submeshes else "layers a stage"
    rows = [("partition", "estimate µs", "against equal", "slowest stage µs", "most bytes", f"  {layers}")]
    for one in found:
        rows.append(
            (
                one.name,
                f"{one.estimate:,.0f}",
                f"{one.estimate / base - 1:+.2%}",
                f"{max(one.times):,.1f}",
                f"{max(one.need):,}{' ' if costs.fits(one.need) else '!'}",
                "  " + _stage_layers(one),
            )
        )
    kind = "with parameters, states and min(m, stages left) microbatches" if costs.single else "with one microbatch"
    lines = aligned(rows, left=(0, -1))
    lines.append(f"estimate: Σ t + (m − 1) · max t for m = {costs.microbatches}; bytes: {kind}")
    if any(costs.all_to_alls):
        lines.append("all-to-alls are in that sum, and in the maximum where a rank's take longer than its work")
    if not all(costs.fits(one.need) for one in found):
        rooms = " or ".join(f"{room:,}" for room in dict.fromkeys(costs.limit or ()))
        lines.append(f"!: more than the {rooms} bytes that a rank has")
    if note := times_note(source):
        lines.append(note)
    return "\n".join(lines) + "\n"


def _stage_layers(one: Partitioned) -> str:
    """`5 4×6 5`; with submeshes `9|2`: nine layers on two devices."""
    if max(one.devices) == 1:
        return counted(one.layers)
    return counted([f"{n}|{d}" for n, d in zip(one.layers, one.devices, strict=True)])


def stages_as_text(costs: StageCosts, one: Partitioned, per_node: int | None = None) -> str:
    """Which layers each stage of a partition holds, where it is, how long it takes. per_node: devices of a node, where
    stages are on submeshes."""
    names = [layer.name for layer in costs.layers]
    if per_node is None:
        where = ["/".join(str(route[stage]) for route in costs.routes) for stage in range(costs.stages)]
    else:
        where = list(places(one.devices, per_node))
    apart = any(costs.all_to_alls)
    rank = "rank" if per_node is None else "submesh"
    rows: list[tuple[str, ...]] = [("stage", rank, "µs", *(("all-to-alls µs",) if apart else ()), "layers", "")]
    for stage, here in enumerate(layer_ranges(one.layers)):
        last = f" … {names[here.stop - 1]}" if len(here) > 1 else ""
        times = (f"{column[stage]:,.1f}" for column in (one.times, *((one.all_to_alls,) if apart else ())))
        rows.append((str(stage), where[stage], *times, str(len(here)), f" {names[here.start]}{last}"))
    return f"{one.name}:\n" + "\n".join(aligned(rows, left=(0, -1))) + "\n"
