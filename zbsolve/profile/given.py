"""A profile with one layer for each stage from numbers that a user gives instead of a measurement."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from ..features.lengths import MICROBATCH, SEQUENCES
from ..partition.layer import NO_LINK, HostLink, Layer, Link
from ..util.errors import BadInput
from ..util.files import parse_json, read_text
from ..util.text import LARGEST, did_you_mean, has_unit, parse_bytes, parse_rate, parse_time
from .form import STATES, check_some_time, complete
from .profile import Profile


@dataclass(frozen=True, slots=True)
class Number:
    """A number that can be given for each stage. fields: of a `Layer`, one for each part of "A/B"; a single part is for the
    last field. parse: text → µs or bytes."""

    fields: tuple[str, ...]
    parse: Callable[[str, str], float]
    help: str


# For one stage and one microbatch each; the names of words NAME=VALUE, and of columns of a CSV file.
NUMBERS = {
    "F": Number(("F",), parse_time, "time of the forward"),
    "B": Number(("B",), parse_time, "time of the backward's input gradient"),
    "W": Number(("W",), parse_time, "time of the backward's weight gradient"),
    "BW": Number(("BW",), parse_time, "time of both in one pass, in place of B and W or beside them (default: B + W)"),
    "X": Number(("X",), parse_time, "time of making dropped activations again (default: F)"),
    "update": Number(("U",), parse_time, "time of the optimizer's update, once a step"),
    "all-to-all": Number(("all_to_all",), parse_time, "time of an all-to-all after F, and of one after the backward"),
    "comm": Number(("message",), parse_time, "time of the message to the next stage, and of the one back"),
    "activation": Number(
        ("held_until_B", "held_until_W"),
        parse_bytes,
        "bytes that F keeps: held until B ends / held until W ends, such as 1.2GiB/0.4GiB; one amount alone: until W ends",
    ),
    "held-from-B": Number(("held_from_B",), parse_bytes, "bytes that B keeps until W ends, beside what F keeps"),
    "transient": Number(("transient",), parse_bytes, "bytes that a pass takes only while it runs"),
    "parameters": Number(("parameter_bytes",), parse_bytes, "bytes of the parameters; states says what else they need"),
    "frozen": Number(("frozen_bytes",), parse_bytes, "bytes of the parameters that are not trained: they count once"),
    "buffers": Number(("buffer_bytes",), parse_bytes, "bytes of weights that are no parameters, such as those of 8 bits"),
    **{
        f"fixed-{kind}": Number((f"fixed_{kind}",), parse_time, f"time of {kind} that does not go with a microbatch's size")
        for kind in ("F", "B", "W", "BW")
    },
    "message-bytes": Number(("output_bytes",), parse_bytes, "bytes of the message to the next stage"),
}
NOTHING = re.compile(r"\s*0*\.?0*\s*")  # zero needs no unit
MAX_STAGES = 100_000
# For each rank, or for all ranks together.
RANK = {
    "ranks": "of the pipeline",
    "chunks": "stages a rank (default: 1)",
    "memory": "all that a rank has, such as 60GiB (default: no limit)",
    "states": "bytes of parameters, gradients and optimizer state for each byte of parameters: 4 for Adam all in one type, "
    "8 for Adam beside parameters of 16 bits",
    "sequences": "of the microbatch that the numbers are of (default: 1)",
    "model": "its name, for titles",
    "latency": "of a message, where message-bytes and bandwidth say its time",
    "bandwidth": "of the link between two ranks, such as 50GB/s or 400Gbit/s; without a unit: bytes a µs",
    "blocking": "yes: a rank computes nothing while it sends a message (default: no)",
    "shared": "rank: a rank's messages go one after the other through its card, each way; pair: those from one rank to "
    "another (default: as many at once as there are)",
    "sites": "numbers of ranks, such as 4+4: between two sites messages go one after the other, each way",
    "site-latency": "of a message between sites",
    "site-bandwidth": "of the link between two sites",
    "rank-factors": "how much longer each rank takes than its stages say: 1,1,1.3,…",
    "shard-latency": "of a gather in a data-parallel group over which parameters are sharded",
    "shard-bandwidth": "of its link (default: the pipeline's link)",
    "host-bandwidth": "of copies to host memory, and back where it differs: 25GB/s,22GB/s; needed for solve --offload",
    "host-bandwidth-both": "the same of each while both directions run at once (default: as alone)",
    "host-latency": "of a copy (default: 0)",
    "host-memory": "bytes of host memory that a node has for activations (default: no limit)",
    "host-ranks": "of the pipeline on a node (default: all)",
    "host-bus": "how many ranks share one bus, on which one copy runs at a time (default: each copies both ways at once)",
}
Words = Mapping[str, str | Sequence[str]]


def words_of(words: Sequence[str], given: Words) -> dict[str, str | Sequence[str]]:
    """Numbers by name: those `given`, and those in `words`: `NAME=VALUE`, a CSV file with a row for each stage, or a JSON
    object. Raises BadInput, also where a number is given twice."""
    numbers: dict[str, str | Sequence[str]] = dict(given)
    for word in words:
        name, equals, value = word.partition("=")
        number = equals and not os.path.exists(word)  # False also of a word that is too long for a path
        for key, cells in ({name: value} if number else _table(word)).items():
            if key.replace("_", "-") in numbers:
                raise BadInput(f"{key}: it is given twice{'' if number else f', also in {word}'}")
            numbers[key.replace("_", "-")] = cells
    return numbers


def _table(path: str) -> Words:
    """The numbers of a file. Raises BadInput."""
    if not path.endswith(".json"):
        return stage_columns(path)
    body = parse_json(read_text(path), path)
    if not isinstance(body, dict):
        raise BadInput(f"{path}: not a JSON object of numbers by their names")
    return {name: [str(cell) for cell in value] if isinstance(value, list) else str(value) for name, value in body.items()}


def stage_columns(path: str) -> dict[str, list[str]]:
    """Column → cells of a CSV file with a header of names in `NUMBERS`, or `name`. A unit in the header, as in `F (ms)`,
    holds for all cells. Raises BadInput."""
    text = read_text(path).lstrip("\r\n")
    mark = max(",;\t", key=text.partition("\n")[0].count)
    rows = [row for row in csv.reader(StringIO(text), delimiter=mark) if any(cell.strip() for cell in row)]
    if len(rows) < 2:
        raise BadInput(f"{path}: a header and a row a stage are needed")
    columns: dict[str, list[str]] = {}
    for at, title in enumerate(rows[0]):
        match = re.fullmatch(r"\s*([\w-]+)\s*(?:[(\[]\s*(.+?)\s*[)\]])?\s*", title)
        name = match[1].replace("_", "-") if match else title.strip()
        if match is None or (name not in NUMBERS and name != "name"):
            raise BadInput(f"{path}: column '{title.strip()[:40]}' is unknown (one of {', '.join(('name', *NUMBERS))})")
        if name in columns:
            raise BadInput(f"{path}: column '{name}' is there twice")
        for line, row in enumerate(rows[1:], 2):
            if len(row) != len(rows[0]):
                raise BadInput(f"{path}: line {line} has {len(row)} cells, not {len(rows[0])} as the header")
        cells = [row[at].strip() for row in rows[1:]]
        columns[name] = [f"{cell}{match[2]}" for cell in cells] if match[2] else cells
    return columns


def values(name: str, cells: str | Sequence[str], stages: int) -> list[dict[str, Any]]:
    """The numbers of each stage: field of a `Layer` → µs or bytes. cells: one value, several separated by commas or in a
    list, or `@stages.csv`; messages may leave out the last stage, which sends none. Raises BadInput."""
    number = NUMBERS[name]
    if isinstance(cells, str) and cells.startswith("@"):
        columns = stage_columns(cells[1:])
        if name not in columns:
            raise BadInput(f"{name} {cells}: the file has no column '{name}'")
        cells = columns[name]
    texts = [part.strip() for part in cells.split(",")] if isinstance(cells, str) else list(cells)
    if len(texts) == stages - 1 and name in ("comm", "message-bytes"):
        texts.append(texts[-1])
    if len(texts) not in (1, stages):
        raise BadInput(f"{name}: {len(texts)} values for {stages} stages: give one, or one a stage")
    parts = [text.split("/") for text in texts]
    if len({has_unit(part) for row in parts for part in row if not NOTHING.fullmatch(part)}) > 1:
        raise BadInput(f"{name}: some values have a unit and others have none: write it at each")
    fields = [_fields(name, number, row) for row in parts]
    return fields * stages if len(fields) == 1 else fields


def unit_note(words: Words) -> str:
    """A sentence if some times of stages have a unit and others have none; "" otherwise."""
    times = {name: text for name, text in words.items() if name in NUMBERS and NUMBERS[name].parse is parse_time}
    parts = {name: text.split(",") if isinstance(text, str) else text for name, text in times.items()}
    shown = {name: row[0] for name, row in parts.items() if not row[0].startswith("@") and not NOTHING.fullmatch(row[0])}
    bare = [f"{name} {text.strip()} µs" for name, text in shown.items() if not has_unit(text)]
    return f"a time without a unit counts in µs: {', '.join(bare)}" if 0 < len(bare) < len(shown) else ""


def _fields(name: str, number: Number, parts: Sequence[str]) -> dict[str, float]:
    if len(parts) > len(number.fields):
        raise BadInput(f"{name} '{'/'.join(parts)[:40]}': {len(number.fields)} of them at most")
    fields = number.fields[-len(parts) :]
    return {field: number.parse(part.strip(), f"{name}") for field, part in zip(fields, parts, strict=True)}


def given_profile(words: Words) -> Profile:
    """A profile with one layer for each stage, from numbers by name; its source is "given".

    words: those in RANK; those for each stage as in `values`; and `name`: the names of the layers. Raises BadInput.
    """
    if unknown := words.keys() - {*NUMBERS, *RANK, "name"}:
        known = *RANK, *NUMBERS
        raise BadInput(f"{min(unknown)[:40]}: unknown{did_you_mean(min(unknown), known)} (one of {', '.join(known)})")
    rank = {name: text if isinstance(text, str) else ",".join(text) for name, text in words.items() if name in RANK}
    ranks, chunks = _count(rank, "ranks", 0), _count(rank, "chunks", 1)
    states = _number("states", rank["states"]) if "states" in rank else None
    _check_enough(words, states)
    layers = _layers({name: text for name, text in words.items() if name not in RANK}, ranks * chunks)
    if (blocking := rank.get("blocking", "no").lower()) not in ("yes", "no", "true", "false"):
        raise BadInput(f"blocking '{blocking[:40]}': yes or no")
    link, sites = _link(rank, "", "comm" in words), _sites(rank, "comm" in words)
    link = replace(link, blocking=blocking in ("yes", "true"), shared=rank.get("shared", ""))
    shard_link = _link(rank, "shard-", False) if {"shard-latency", "shard-bandwidth"} & rank.keys() else None
    capacity = parse_bytes(rank["memory"], "memory") if "memory" in rank else None
    factors = _factors(rank["rank-factors"], ranks) if "rank-factors" in rank else ()
    facts, model = dict[str, Any]({"ranks": ranks, "chunks": chunks}), rank.get("model", "numbers")
    if "sequences" in rank:
        facts[MICROBATCH] = {SEQUENCES: _count(rank, "sequences", 1)}
    of_ranks: dict[str, Any] = {"rank_factors": factors, "shard_link": shard_link, "host": _host(rank), "site_link": sites}
    return Profile("given", model, layers, link, states or 0.0, capacity, facts, {}, **of_ranks)


def _layers(words: Words, stages: int) -> tuple[Layer, ...]:
    """A layer for each stage. Raises BadInput."""
    if not 1 <= stages <= MAX_STAGES:
        raise BadInput(f"stages: {stages}, not 1 to {MAX_STAGES}")
    costs: list[dict[str, Any]] = [{"name": f"stage{i}"} for i in range(stages)]
    for name, text in words.items():
        if name == "name" and len(text) != stages:
            raise BadInput(f"name: {len(text)} names for {stages} stages")
        parts: list[dict[str, Any]] = [{name: label} for label in text] if name == "name" else values(name, text, stages)
        for cost, more in zip(costs, parts, strict=True):
            cost.update(more)
    layers = tuple(complete(cost, i, f"stage {i}") for i, cost in enumerate(costs))
    check_some_time(layers, "numbers")
    return layers


def _check_enough(words: Mapping[str, Any], states: float | None) -> None:
    """Raise BadInput where a number is missing that has no default."""
    if "F" not in words:
        raise BadInput("F is needed: the time of the forward")
    if ("B" in words) != ("W" in words) or not {"B", "BW"} & words.keys():
        raise BadInput("B and W are needed, or BW alone: the times of the backward")
    if states is None and "parameters" in words:
        raise BadInput(f"states is needed with parameters: {STATES}")
    if states is not None and not 0 <= states < LARGEST:
        raise BadInput(f"states {states:g}: it is not a number from 0 up")


def _count(rank: Mapping[str, str], name: str, usual: int) -> int:
    text = rank.get(name, str(usual))
    if not text.isdecimal() or int(text[:9]) < 1:
        raise BadInput(f"{name} {text[:40]}: at least 1 is needed" if name in rank else f"{name} is needed")
    return int(text[:9])


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadInput(f"{name} '{text[:40]}': not a number") from None


def _factors(text: str, ranks: int) -> tuple[float, ...]:
    """By which factor each rank is slower. Raises BadInput."""
    factors = tuple(_number("rank-factors", part) for part in text.split(","))
    if len(factors) != ranks or not all(0 < factor < float("inf") for factor in factors):
        raise BadInput(f"rank-factors {text[:40]}: {ranks} numbers above 0 are needed, such as 1,1.3")
    return factors


def _link(rank: Mapping[str, str], of: str, timed: bool) -> Link:
    """The link with this latency and bandwidth; NO_LINK's where messages are given as times. of: the words' prefix."""
    latency, bandwidth = f"{of}latency", f"{of}bandwidth"
    whole = {bandwidth} if "shared" in rank else {latency, bandwidth}  # a shared link is not busy during the latency
    if timed and whole & rank.keys():
        raise BadInput("comm says how long messages take: leave out latency and bandwidth")
    return Link(
        parse_time(rank[latency], latency) if latency in rank else NO_LINK.latency,
        parse_rate(rank[bandwidth], bandwidth) if bandwidth in rank else NO_LINK.bytes_per_us,
    )


def _sites(rank: Mapping[str, str], timed: bool) -> Link | None:
    """The link between sites, if one is given. timed: messages are given as times. Raises BadInput."""
    names = {"sites", "site-latency", "site-bandwidth"} & rank.keys()
    if names and (timed or len(names) < 3):
        raise BadInput("sites: message-bytes, site-latency and site-bandwidth say how long messages take, not comm")
    return replace(_link(rank, "site-", False), shared=rank["sites"]) if names else None


def _host(rank: Mapping[str, str]) -> HostLink | None:
    """The link to host memory, if one is given. Raises BadInput."""
    words = {name: text for name, text in rank.items() if name.startswith("host-")}
    if not words:
        return None
    if "host-bandwidth" not in words:
        raise BadInput(f"{next(iter(words))}: host-bandwidth is needed too")
    rates = [_ways(name, words.get(name, words["host-bandwidth"])) for name in ("host-bandwidth", "host-bandwidth-both")]
    if any(both > alone for alone, both in zip(*rates, strict=True)):
        why = f"{words['host-bandwidth-both']} a direction is more than host-bandwidth {words['host-bandwidth']}"
        raise BadInput(f"host-bandwidth-both: {why}: a copy cannot be faster for one the other way")
    latency = parse_time(words.get("host-latency", 0.0), "host-latency")
    memory = parse_bytes(words["host-memory"], "host-memory") if "host-memory" in words else None
    ranks = _count(words, "host-ranks", 1) if "host-ranks" in words else None
    return HostLink(latency, *rates[0], *rates[1], memory, ranks, _count(words, "host-bus", 1) if "host-bus" in words else 0)


def _ways(option: str, text: str) -> tuple[float, float]:
    """Bytes per µs to the host and back. Raises BadInput."""
    parts = text.split(",")
    if len(parts) > 2:
        raise BadInput(f"{option} '{text[:40]}': one bandwidth, or two: to the host, and back")
    rates = [parse_rate(part, option) for part in parts]
    return rates[0], rates[-1]
