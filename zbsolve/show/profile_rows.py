"""A profile as rows of tables: layers with times and their spread, stages, links, copies, shards of a vocabulary.

The first row is the header.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..features.cuts import cuts_of
from ..features.slices import overheads, slice_times
from ..layer import NO_LINK, Layer
from ..profile.profile import Profile
from ..util.statistics import median_error
from ..util.text import format_bytes, printable
from .profile_meaning import stages

# Columns where there is any.
MORE = {"message µs": "message", "all-to-all µs": "all_to_all", "frozen": "frozen_bytes", "buffers": "buffer_bytes"}
DOMINATING = 1 / 3  # of the time of slices: what they take whatever their length is more than half of the rest
AS_FORWARD = "= F"  # the time of X where none is known: see `Profile.problem`
TIMED = ("F", "B", "W", "BW", "X", "U")  # what a profile has times of, a column each


def layer_rows(profile: Profile) -> list[tuple[str, ...]]:
    """A header and a row a layer, equal neighbours in one: times with spread, host time, memory."""
    head = (
        "layer",
        *(f"{kind} µs" for kind in TIMED),
        "F host µs",
        "until B",
        "until W",
        "from B",
        "transient",
        "parameters",
        "output",
    )
    more = {title: field for title, field in MORE.items() if any(getattr(layer, field) for layer in profile.layers)}
    rows: list[tuple[str, ...]] = [(*head, *more)]
    for first, last in _runs(profile):
        layer = profile.layers[first]
        name = printable(layer.name if first == last else f"{layer.name} … {profile.layers[last].name}")
        sizes = ("held_until_B", "held_until_W", "held_from_B", "transient", "parameter_bytes", "output_bytes")
        rows.append(
            (
                name,
                *(_time(profile, layer, kind) for kind in TIMED),
                _host(profile, layer),
                *(format_bytes(getattr(layer, size)) for size in sizes),
                *(_further(layer, field) for field in more.values()),
            )
        )
    return rows


def _further(layer: Layer, field: str) -> str:
    value = getattr(layer, field)
    return format_bytes(value) if field.endswith("_bytes") else f"{value:,.1f}"


def _host(profile: Profile, layer: Layer) -> str:
    """µs of the host in F: on a GPU measured, on a CPU the least it can be."""
    hosts = profile.facts.get("host_us")
    time = hosts.get(f"{layer.name}/F") if isinstance(hosts, dict) else None
    return f"{time:,.0f}" if isinstance(time, float) else "–"


def _time(profile: Profile, layer: Layer, kind: str) -> str:
    time = getattr(layer, kind)
    if kind == "X" and not time:
        return AS_FORWARD
    samples = profile.samples.get(f"{layer.name}/{kind}", [])
    return f"{time:,.1f}" + (f" ±{median_error(samples):.0%}" if time and len(samples) > 1 else "")


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


def link_rows(profile: Profile) -> list[tuple[str, ...]]:
    """A header and a row a message size that was measured."""
    sizes = sorted(int(key[5:]) for key in profile.samples if key.startswith("link/") and key[5:].isdecimal())
    rows: list[tuple[str, ...]] = [("message", "µs", "fit µs", "GB/s")]
    for size in sizes:
        time = float(np.median(profile.samples[f"link/{size}"]))
        measured = f"{time:,.1f} ±{median_error(profile.samples[f'link/{size}']):.0%}"
        rows.append((format_bytes(size), measured, f"{profile.link.time(size):,.1f}", f"{size / time / 1e3:.2f}"))
    return rows


def ratio_line(profile: Profile) -> str:
    """(B + W) / BW, and the link as a line."""
    fused, split = (sum(sum(getattr(c, kind) for kind in kinds) for c in profile.layers) for kinds in (("BW",), ("B", "W")))
    ratio = f"(B + W) / BW {split / fused:.3f}; " if fused and split else ""
    link, free = profile.link, replace(profile.link, blocking=False)
    blocking = "; the sender computes nothing meanwhile" if link.blocking else ""
    if free == NO_LINK:
        return f"{ratio}messages take the times of the layers and nothing for their bytes{blocking}"
    return f"{ratio}a message takes {link.latency:.0f} µs and its bytes at {link.bytes_per_us / 1e3:.2f} GB/s{blocking}"


def pair_rows(profile: Profile) -> list[tuple[str, ...]]:
    """A header and a row a pair of neighbours: how much longer the largest message takes while one goes the other way, and
    a fixed piece of work beside both."""
    rows: list[tuple[str, ...]] = [("ranks", "latency µs", "GB/s", "both ways at once", "work beside messages")]
    pairs = profile.facts.get("links")
    known = {"ranks", "latency", "bytes_per_us", "both_ways", "work_beside"}
    for one in [one for one in pairs if isinstance(one, dict) and known <= one.keys()] if isinstance(pairs, list) else []:
        ranks = "–".join(map(str, one["ranks"]))
        speed = (f"{one['latency']:,.0f}", f"{one['bytes_per_us'] / 1e3:.2f}")
        rows.append((ranks, *speed, *(f"{one[what]:.2f} times" for what in ("both_ways", "work_beside"))))
    return rows


def copy_rows(profile: Profile) -> list[tuple[str, ...]]:
    """A header and a row a size of host↔device copies that was measured: µs to the device and back, alone and beside
    compute."""
    rows: list[tuple[str, ...]] = [("copy", "to device µs", "beside compute", "to host µs", "beside compute")]
    sizes = sorted(int(key[4:]) for key in profile.samples if key.startswith("h2d/") and key[4:].isdecimal())
    for size in sizes:
        keys = (f"{way}/{size}{how}" for way in ("h2d", "d2h") for how in ("", " beside"))
        rows.append((format_bytes(size), *(f"{np.median(profile.samples[key]):,.1f}" for key in keys)))
    return rows


def vocabulary_rows(profile: Profile) -> list[tuple[str, ...]]:
    """A header and a row a number of ranks over which the vocabulary may be sharded: µs of S and T with one barrier
    and with two, what S keeps for T, parameters of a shard."""
    rows: list[tuple[str, ...]] = [
        ("vocabulary over", "S µs", "T µs", "two barriers: S µs", "T µs", "until T", "parameters")
    ]
    for row in () if profile.vocabulary is None else profile.vocabulary.shards:
        times = (f"{time:,.1f}" for time in (row.one.S, row.one.T, row.two.S, row.two.T))
        rows.append((f"{row.ranks} ranks", *times, format_bytes(row.one.held), format_bytes(row.parameter_bytes)))
    return rows


def slice_rows(profile: Profile) -> list[tuple[str, ...]]:
    """A header and a row a kind of layer whose slices were timed: µs of the first and the last, by the line through those
    that were, and how far these lie from it at the most; attention of a whole sequence, and its keys and values."""
    said = profile.facts.get("slices")
    lengths = said.get("lengths") if isinstance(said, dict) else None
    if not isinstance(said, dict) or not lengths:
        return [()]
    cuts = cuts_of([float(one) for one in lengths], profile.layers)
    head = (f"in {len(lengths)} slices", *(f"{kind} µs" for kind in TIMED[:4]), "attention F µs", "B µs", "keys and values")
    rows: list[tuple[str, ...]] = [head]
    for layer in profile.layers:
        if layer.name in (errors := said.get("line_errors", {})):
            times = ((slice_times([layer], kind, cuts), errors[layer.name][kind]) for kind in TIMED[:4])
            cells = (f"{row[0]:,} … {row[-1]:,} ±{error:.0%}" for row, error in times)
            attention = (f"{time:,.1f}" for time in (layer.attention_F, layer.attention_B))
            rows.append((printable(layer.name), *cells, *attention, format_bytes(layer.kv_bytes)))
    return rows


def overheads_line(profile: Profile) -> str:
    """What the slices that were timed take beside the whole sequence, and where what each takes whatever its length makes
    most of that, what helps; "" where none were timed."""
    said = profile.facts.get("slices")
    lengths = said.get("lengths") if isinstance(said, dict) else None
    if not lengths:
        return ""
    found = overheads(profile.layers, cuts_of([float(one) for one in lengths], profile.layers))
    if found is None:
        return ""
    dominate = ": these overheads dominate, fewer slices or longer sequences have less" if found.share >= DOMINATING else ""
    return (
        f"a sequence takes {found.ratio:.2f} times as long in {len(lengths)} slices as whole (F and BW of all layers); "
        f"{found.share:.0%} of that is what each slice takes whatever its length{dominate}"
    )


def _runs(profile: Profile) -> list[tuple[int, int]]:
    """First and last of neighbours that differ in nothing but their names."""
    runs: list[tuple[int, int]] = []
    for i, layer in enumerate(profile.layers):
        before = profile.layers[i - 1] if i else None
        same = before is not None and all(
            getattr(layer, name) == getattr(before, name) for name in layer.__dataclass_fields__ if name != "name"
        )
        if same:
            runs[-1] = runs[-1][0], i
        else:
            runs.append((i, i))
    return runs
