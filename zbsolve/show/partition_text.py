"""Partitions as text: how long each would take, and which layers the stages of one hold."""

from __future__ import annotations

from collections.abc import Sequence

from ..layer import layer_ranges
from ..partition.by_name import Partitioned
from ..partition.meshes import places
from ..partition.stage_costs import StageCosts
from ..util.text import aligned, counted, times_note


def partitions_as_text(costs: StageCosts, found: Sequence[Partitioned], source: str = "measured") -> str:
    """How long every partition's busiest rank (or submesh) works, that against the one named "equal", and whether it fits.
    source: where the times come from."""
    submeshes = max(max(one.devices) for one in found) > 1
    busiest = [max(one.times) if submeshes else float((costs.shares @ one.times).max()) for one in found]
    base = next(work for one, work in zip(found, busiest, strict=True) if one.name == "equal")
    layers = "layers a stage|its devices" if submeshes else "layers a stage"
    busy = f"busiest {'submesh' if submeshes else 'rank'} µs"
    rows = [("partition", busy, "against equal", "most bytes", f"  {layers}")]
    for one, work in zip(found, busiest, strict=True):
        rows.append(
            (
                one.name,
                f"{work:,.1f}",
                f"{work / base - 1:+.2%}" if base else "–",
                f"{max(one.need):,}{' ' if costs.fits(one.need) else '!'}",
                "  " + _stage_layers(one),
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
