"""A profile's tables and bars: layers with times and their spread, stages, links, copies, shards of a vocabulary.

The first row of a table is the header. All times have the same unit, and so have all bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ..features.slices import overheads, slice_times, timed_slices
from ..kinds import TABLE
from ..partition.layer import NO_LINK, Layer
from ..profile.doubtful import LONG_SPLIT, SHORT_SPLIT
from ..profile.profile import Profile
from ..util.columns import median_error
from ..util.text import BINARY, format_bytes, printable, time_unit
from .profile_meaning import PlainStage

# Columns that are shown if any layer has a value: title → field of `Layer`.
MORE = {"message": "message", "all-to-all": "all_to_all", "frozen": "frozen_bytes", "buffers": "buffer_bytes"}
DOMINATING = 1 / 3  # of the time of slices: from here on, their constant cost is more than half of their other time
AS_FORWARD = "= F"  # shown for a recompute X without a time of its own: see `Profile.problem`
TIMED = ("F", "B", "W", "BW", "X", "U")  # kinds of passes that a profile has times of, a column each
SIZED = {"until B": "held_until_B", "until W": "held_until_W", "from B": "held_from_B"}
SIZED |= {"transient": "transient", "parameters": "parameter_bytes", "output": "output_bytes"}
UNSURE = 0.05  # of a median: if half of its 95 % interval is wider, the time is marked
COLOURS = {"until B": TABLE["B"].colour, "until W": TABLE["W"].colour, "parameters": "#888"}


class Units(NamedTuple):
    """The unit of all times and the unit of all bytes."""

    time: str
    size: str

    def of_time(self, us: float) -> str:
        """µs in the unit, without its name."""
        return f"{us:,.1f}" if self.time == "µs" else _digits(us / 1e3)

    def of_bytes(self, size: float) -> str:
        """Bytes in the unit, without its name."""
        return f"{size:,.0f}" if self.size == "B" else _digits(size / BINARY[self.size])


IN_FULL = Units("µs", "B")


def _digits(value: float) -> str:
    """The value with three decimals; below 0.1 with three significant digits."""
    if not value:
        return "0"
    return f"{value:,.{2 - math.floor(math.log10(value)) if value < 0.1 else 3}f}"


def units_of(profile: Profile, stages: Sequence[PlainStage] = ()) -> Units:
    """The units of the largest time and the largest bytes of any layer, and of any of the stages."""
    times = [getattr(layer, kind) for layer in profile.layers for kind in TIMED]
    sizes = [getattr(layer, size) for layer in profile.layers for size in SIZED.values()]
    for stage in stages:
        times, sizes = [*times, stage.F, stage.BW, stage.split - stage.F], [*sizes, stage.held, stage.fixed, stage.moving]
    return Units(time_unit(max(times))[0], format_bytes(max(sizes)).split()[1])


def layer_rows(profile: Profile, units: Units) -> list[tuple[str, ...]]:
    """A header and a row for each layer, one for equal neighbours: times with their spread, host time, memory."""
    more = {title: field for title, field in MORE.items() if any(getattr(layer, field) for layer in profile.layers)}
    heads = (f"{title} {units.size if _is_size(field) else units.time}" for title, field in (SIZED | more).items())
    rows: list[tuple[str, ...]] = [("layer", *(f"{kind} {units.time}" for kind in TIMED), f"F host {units.time}", *heads)]
    for name, layer in _runs(profile):
        values = ((field, getattr(layer, field)) for field in (SIZED | more).values())
        sizes = (units.of_bytes(value) if _is_size(field) else units.of_time(value) for field, value in values)
        rows.append((name, *(_time(profile, layer, kind, units) for kind in TIMED), _host(profile, layer, units), *sizes))
    return rows


def _is_size(field: str) -> bool:
    return field in SIZED.values() or field.endswith("_bytes")


def _host(profile: Profile, layer: Layer, units: Units) -> str:
    """Time of the host in F: on a GPU measured, on a CPU the least it can be."""
    hosts = profile.facts.get("host_us")
    time = hosts.get(f"{layer.name}/F") if isinstance(hosts, dict) else None
    return units.of_time(time) if isinstance(time, float) else "–"


def _time(profile: Profile, layer: Layer, kind: str, units: Units) -> str:
    time = getattr(layer, kind)
    if kind == "X" and not time:
        return AS_FORWARD
    return units.of_time(time) + (f" ±{error:.0%}" if time and (error := _error(profile, layer, kind)) is not None else "")


def _error(profile: Profile, layer: Layer, kind: str) -> float | None:
    """Half of the 95 % interval of a layer's median time, relative to it; None with fewer than two samples."""
    samples = profile.samples.get(f"{layer.name}/{kind}", [])
    return median_error(samples) if len(samples) > 1 else None


class Bar(NamedTuple):
    """A bar in a row. what: its name. said: its number. left, width: relative to the row. unsure: its error (see UNSURE)."""

    what: str
    colour: str
    said: str
    left: float
    width: float
    unsure: bool = False


class BarRow(NamedTuple):
    """A layer (or equal neighbours) in the picture. times: bars of F, B and W, and below them of BW, which begins at the end
    of F. ratio: (B + W) / BW, or "". odd: that is far from 1. sizes: bars of what F keeps, and below them of parameters."""

    name: str
    times: tuple[list[Bar], list[Bar]]
    ratio: str
    odd: bool
    sizes: tuple[list[Bar], list[Bar]]


def bar_rows(profile: Profile, units: Units) -> list[BarRow]:
    """The picture's rows. All times have the same scale, and so have all bytes."""
    bars = []
    longest = max(each_layer.F + max(each_layer.B + each_layer.W, each_layer.BW) for each_layer in profile.layers) or 1.0
    largest = max(max(layer.held_until_B + layer.held_until_W, layer.parameter_bytes) for layer in profile.layers) or 1

    def time(layer: Layer, kind: str, begin: float) -> list[Bar]:
        text, us = _time(profile, layer, kind, units), getattr(layer, kind)
        unsure = (_error(profile, layer, kind) or 0.0) > UNSURE
        return [Bar(kind, TABLE[kind].colour, text, begin / longest, us / longest, unsure)] if us else []

    def size(layer: Layer, what: str, begin: int = 0) -> list[Bar]:
        held = getattr(layer, SIZED[what])
        return [Bar(what, COLOURS[what], units.of_bytes(held), begin / largest, held / largest)] if held else []

    for name, first in _runs(profile):
        apart = time(first, "F", 0.0) + time(first, "B", first.F) + time(first, "W", first.F + first.B)
        kept = size(first, "until B") + size(first, "until W", first.held_until_B)
        ratio = (first.B + first.W) / first.BW if first.BW else 0.0
        odd = bool(ratio) and not SHORT_SPLIT <= ratio <= LONG_SPLIT
        times, sizes = (apart, time(first, "BW", first.F)), (kept, size(first, "parameters"))
        bars.append(BarRow(name, times, f"{ratio:.3f}" if ratio else "", odd, sizes))
    return bars


def picture(profile: Profile, units: Units) -> dict[str, Any]:
    """The picture for the page's template: rows, legends, and the error from which bars are hatched, "" if none is."""
    rows = bar_rows(profile, units)
    unsure = any(bar.unsure for row in rows for line in row.times for bar in line)
    keys = [(TABLE[kind].colour, f"{kind} {TABLE[kind].words}") for kind in TIMED[:4]]
    kept = [(colour, what) for what, colour in COLOURS.items()]
    return {"bars": rows, "keys": keys, "kept": kept, "unsure": f"{UNSURE:.0%}" if unsure else ""}


def further_rows(profile: Profile, units: Units) -> list[list[tuple[str, ...]]]:
    """The tables of what only some profiles have: slices, links, copies, a vocabulary."""
    tables = (rows(profile, units) for rows in (slice_rows, pair_rows, copy_rows, vocabulary_rows))
    return [rows for rows in tables if len(rows) > 1]


def stage_rows(profile: Profile, stages: Sequence[PlainStage], units: Units) -> list[tuple[str, ...]]:
    """A header and a row a stage."""
    timed = ("F", "B", "W", "BW", "message", *(("all_to_all",) if any(row.all_to_all for row in stages) else ()))
    sized = {"one microbatch": "held", "parameters, states": "fixed", "messages, inside passes": "moving"}
    heads = (f"{field.replace('_', '-')} {units.time}" for field in timed)
    rows: list[tuple[str, ...]] = [("stage", "layers", *heads, *(f"{title} {units.size}" for title in sized))]
    for i, row in enumerate(stages):
        names = _names(profile.layers[row.first], profile.layers[row.end - 1])
        times = (units.of_time(getattr(row, field)) for field in timed)
        rows.append((str(i), names, *times, *(units.of_bytes(getattr(row, field)) for field in sized.values())))
    return rows


def link_rows(profile: Profile, units: Units) -> list[tuple[str, ...]]:
    """A header and a row a message size that was measured."""
    sizes = sorted(int(key[5:]) for key in profile.samples if key.startswith("link/") and key[5:].isdecimal())
    rows: list[tuple[str, ...]] = [("message", units.time, f"fit {units.time}", "GB/s")]
    for size in sizes:
        time = float(np.median(profile.samples[f"link/{size}"]))
        measured = f"{units.of_time(time)} ±{median_error(profile.samples[f'link/{size}']):.0%}"
        rows.append((format_bytes(size), measured, units.of_time(profile.link.time(size)), f"{size / time / 1e3:.2f}"))
    return rows


SHARED = {
    "": "",
    "rank": "; those of a rank go one after the other, each way",
    "pair": "; those from one rank to another one after the other",
}


def ratio_line(profile: Profile) -> str:
    """(B + W) / BW, and the link as a line."""
    fused, split = (sum(sum(getattr(c, kind) for kind in kinds) for c in profile.layers) for kinds in (("BW",), ("B", "W")))
    ratio = f"(B + W) / BW {split / fused:.3f}; " if fused and split else ""
    link, sites = profile.link, profile.site_link
    blocking = "; the sender computes nothing meanwhile" if link.blocking else SHARED[link.shared]
    if sites is not None:
        speed = f"{sites.latency:.0f} µs and its bytes at {sites.bytes_per_us / 1e3:.2f} GB/s"
        blocking += f"; between sites of {sites.shared} ranks it takes {speed}, one after the other each way"
    if link.bytes_per_us == NO_LINK.bytes_per_us:
        what = "the times of the layers and nothing for their bytes" if any(c.message for c in profile.layers) else "no time"
        return f"{ratio}messages take {what}{blocking}"
    return f"{ratio}a message takes {link.latency:.0f} µs and its bytes at {link.bytes_per_us / 1e3:.2f} GB/s{blocking}"


def pair_rows(profile: Profile, units: Units) -> list[tuple[str, ...]]:
    """A header and a row for each pair of neighbouring ranks: latency, bandwidth, how many times as long the largest message
    takes while another goes the other way, and how many times as long compute work takes beside both."""
    rows: list[tuple[str, ...]] = [("ranks", f"latency {units.time}", "GB/s", "both ways at once", "work beside messages")]
    pairs = profile.facts.get("links")
    known = {"ranks", "latency", "bytes_per_us", "both_ways", "work_beside"}
    for pair in [p for p in pairs if isinstance(p, dict) and known <= p.keys()] if isinstance(pairs, list) else []:
        ranks = "–".join(map(str, pair["ranks"]))
        speed = (units.of_time(pair["latency"]), f"{pair['bytes_per_us'] / 1e3:.2f}")
        rows.append((ranks, *speed, *(f"{pair[what]:.2f} times" for what in ("both_ways", "work_beside"))))
    return rows


def copy_rows(profile: Profile, units: Units) -> list[tuple[str, ...]]:
    """A header and a row a measured size of copies: times to device and to host, each with idle and with busy compute."""
    rows: list[tuple[str, ...]] = [
        ("copy", f"to device {units.time}", "beside compute", f"to host {units.time}", "beside compute")
    ]
    sizes = sorted(int(key[4:]) for key in profile.samples if key.startswith("h2d/") and key[4:].isdecimal())
    for size in sizes:
        keys = (f"{way}/{size}{how}" for way in ("h2d", "d2h") for how in ("", " beside"))
        rows.append((format_bytes(size), *(units.of_time(float(np.median(profile.samples[key]))) for key in keys)))
    return rows


def vocabulary_rows(profile: Profile, units: Units) -> list[tuple[str, ...]]:
    """A header and a row for each number of ranks that the vocabulary may be sharded over: times of S and T with one barrier
    and with two, bytes that S keeps for T, parameter bytes of a shard."""
    heads = (f"{what} {units.time}" for what in ("S", "T", "two barriers: S", "T"))
    rows: list[tuple[str, ...]] = [("vocabulary over", *heads, f"until T {units.size}", f"parameters {units.size}")]
    for row in () if profile.vocabulary is None else profile.vocabulary.shards:
        times = map(units.of_time, (row.one.S, row.one.T, row.two.S, row.two.T))
        rows.append((f"{row.ranks} ranks", *times, *map(units.of_bytes, (row.one.held, row.parameter_bytes))))
    return rows


def slice_rows(profile: Profile, units: Units) -> list[tuple[str, ...]]:
    """A header and a row for each layer whose slices were timed: times of the first and the last slice by the fitted line,
    and the largest error of that line; the whole sequence's attention, and its keys and values."""
    if (timed := timed_slices(profile)) is None:
        return [()]
    cuts, errors = timed
    heads = (f"{what} {units.time}" for what in (*TIMED[:4], "attention F", "B"))
    rows: list[tuple[str, ...]] = [(f"in {len(cuts) - 1} slices", *heads, f"keys and values {units.size}")]
    for layer in profile.layers:
        if layer.name in errors:
            times = ((slice_times([layer], kind, cuts), errors[layer.name][kind]) for kind in TIMED[:4])
            cells = (f"{units.of_time(row[0])} … {units.of_time(row[-1])} ±{error:.0%}" for row, error in times)
            attention = map(units.of_time, (layer.attention_F, layer.attention_B))
            rows.append((printable(layer.name), *cells, *attention, units.of_bytes(layer.kv_bytes)))
    return rows


def overheads_line(profile: Profile) -> str:
    """The time of the measured slices relative to the whole sequence, and how much of it is their constant cost, with advice
    if that dominates; "" if no slices were timed."""
    timed = timed_slices(profile)
    extra = None if timed is None else overheads(profile.layers, timed[0])
    if timed is None or extra is None:
        return ""
    dominate = ": these overheads dominate, fewer slices or longer sequences have less" if extra.share >= DOMINATING else ""
    return (
        f"a sequence takes {extra.ratio:.2f} times as long in {len(timed[0]) - 1} slices as whole (F and BW of all layers); "
        f"{extra.share:.0%} of that is what each slice takes whatever its length{dominate}"
    )


def _runs(profile: Profile) -> list[tuple[str, Layer]]:
    """Groups of neighbouring layers that are equal but for their names: (names, first layer)."""
    groups = groupby(profile.layers, key=lambda layer: replace(layer, name=""))
    return [(_names(first, [first, *others][-1]), first) for _, (first, *others) in groups]


def _names(first: Layer, last: Layer) -> str:
    return printable(first.name if first is last else f"{first.name} … {last.name}")
