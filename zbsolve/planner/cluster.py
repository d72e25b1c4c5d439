"""`Cluster`: the numbers of a machine that a plan is made for, its file, clusters by name, and links by a profile."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..layer import MIN_BANDWIDTH, Link
from ..profile.profile import ALL_REDUCE, CollectiveRow, Profile, collective_rows
from ..util.errors import BadInput
from ..util.files import AMOUNT, COUNT, checked, read_one_of, write_document
from ..util.text import did_you_mean, parse_bytes, parse_rate, parse_time

KIND = "cluster"
SOURCES = ("measured", "given", "estimated: ", "fitted: ")
Positive = Annotated[float, msgspec.Meta(gt=0, lt=2.0**62)]
LINKS = ("inside", "between", "copies")  # fields with latency and bandwidth
# An assumption, of the size of what was measured on A100, H100, MI210 and MI250: computing beside collectives took 18.9 %
# longer in the mean (arXiv 2507.03114). Nobody measured exchanges beside messages here.
CONTENTION = 1.2
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of devices, all alike, in µs, bytes and bytes a µs.

    name: for texts.
    source: where the numbers come from: "estimated: …", "fitted: …", "given" or "measured".
    peak: FLOP/s of a device, dense, in 16 bits.
    hbm: bytes a µs of its memory.
    memory: bytes of it.
    node: devices a node.
    inside: latency of a collective, and bandwidth of a device to others of its node.
    between: the same of groups that reach beyond a node; the bandwidth is a node's, which all its devices share.
    messages: bytes a µs of a node's messages between stages.
    efficiency: share of the peak that matrix products reach.
    launch: µs that a layer's forward takes beside (kernel launches and tails).
    traffic: bytes that elementwise work moves for each byte that the formula counts.
    host: µs a layer's forward takes at least, since the host launches it.
    constant: µs of a step beside all else.
    overlap: share of gradient exchange and gathers that runs beside computing.
    error: share by which steps are off, in the mean over the measured steps that constants were fitted to or held against;
        None: not measured.
    copies: latency of a copy between a device and host memory, and bandwidth each way while both run; None: not known, and
        no layout offloads.
    host_memory: bytes of it for a device's activations; None: no limit.
    contention: how many times as long an exchange of gradients takes where stages send messages beside it, from 1 up; where
        nothing is said, `CONTENTION`, which is assumed.
    """

    name: str
    source: str
    peak: float
    hbm: float
    memory: int
    node: int
    inside: Link
    between: Link
    messages: float
    efficiency: float
    launch: float
    traffic: float
    host: float
    constant: float
    overlap: float = 0.0
    error: float | None = None
    copies: Link | None = None
    host_memory: int | None = None
    contention: float = CONTENTION

    @property
    def title(self) -> str:
        """Its name, and where its numbers come from."""
        return f"{self.name} ({self.source})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a cluster file, whole or not at all; `-` is standard output."""
        write_document(path, KIND, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The fields of a cluster file."""
        body = asdict(self)
        for name in LINKS:
            link: Link | None = getattr(self, name)
            body[name] = link and {"latency": link.latency, "bandwidth": link.bytes_per_us}
        return body

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster file; `-` is standard input. Raises BadInput naming the field."""
        return cls.from_json(read_one_of(path, (KIND,))[1], str(path))

    @classmethod
    def from_json(cls, body: Any, where: str = KIND) -> Cluster:
        """The cluster that `to_json` gave, or that a person typed. Raises BadInput naming `where` and the field."""
        form = checked(body, ClusterForm, where)
        if not form.source.startswith(SOURCES):
            raise BadInput(f"{where}: field 'source' is '{form.source}', none of {', '.join(map(repr, SOURCES))}")
        known: dict[str, Any] = {field.name: getattr(form, field.name) for field in fields(cls)}
        known |= {name: _time(known[name], f"{where}: field '{name}'") for name in ("launch", "host", "constant")}
        known |= {name: _rate(known[name], f"{where}: field '{name}'") for name in ("hbm", "messages")}
        known |= {name: _link(known[name], f"{where}: {name}") for name in LINKS if known[name] is not None}
        sizes = {name: known[name] for name in ("memory", "host_memory") if known[name] is not None}
        known |= {name: parse_bytes(size, f"{where}: field '{name}'") for name, size in sizes.items()}
        for name in sizes:
            if not known[name]:
                raise BadInput(f"{where}: field '{name}' is 0")
        return cls(**known)


class NetworkForm(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Latency and bandwidth in a file."""

    latency: AMOUNT | str
    bandwidth: Positive | str


class ClusterForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A cluster in a file: times and bandwidths may have units."""

    name: str = "cluster"
    source: str = "given"
    peak: Positive
    hbm: Positive | str
    memory: COUNT | str
    node: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    inside: NetworkForm
    between: NetworkForm
    messages: Positive | str
    efficiency: Positive
    launch: AMOUNT | str
    traffic: AMOUNT
    host: AMOUNT | str
    constant: AMOUNT | str
    overlap: Share = 0.0
    error: AMOUNT | None = None
    copies: NetworkForm | None = None
    host_memory: COUNT | str | None = None
    contention: Annotated[float, msgspec.Meta(ge=1, lt=2.0**31)] = CONTENTION


def _time(value: float | str, what: str) -> float:
    return parse_time(value, what) if isinstance(value, str) else value


def _rate(value: float | str, what: str) -> float:
    rate = parse_rate(value, what) if isinstance(value, str) else value
    if rate < MIN_BANDWIDTH:
        raise BadInput(f"{what} is {rate:g}")
    return rate


def _link(form: NetworkForm, where: str) -> Link:
    return Link(_time(form.latency, f"{where}: field 'latency'"), _rate(form.bandwidth, f"{where}: field 'bandwidth'"))


# --- By name, from data sheets and assumed shares of them: all of it estimated ---


# Assumptions, not measurements: the priors of `fitting.fit`, which replaces them by what measured steps say.
EFFICIENCY = 0.75
TRAFFIC = 1.4
LAUNCH_US = 300.0  # some 30 kernels of a layer's forward, 10 µs each
HOST_US, CONSTANT_US, LATENCY_US = 1500.0, 50_000.0, 30.0
COPY_US = 10.0
HOST_BOTH_SHARE, HOST_MEMORY_SHARE = 0.65, 0.8  # of PCIe each way while both run, and of a node's memory, as profiles assume
INSIDE_SHARE, BETWEEN_SHARE = 0.6, 0.8  # of a data sheet's bandwidth that collectives reach
ASSUMED = (
    f"data sheet; assumed: matrix products at {EFFICIENCY:.0%} of peak, collectives at {INSIDE_SHARE:.0%} of the bandwidth "
    f"inside a node and {BETWEEN_SHARE:.0%} of it between nodes, {LATENCY_US:g} µs each; "
    f"copies at {HOST_BOTH_SHARE:.0%} of PCIe each way at once, {COPY_US:g} µs each, into a device's part of "
    f"{HOST_MEMORY_SHARE:.0%} of host memory"
)


def _node(name: str, sheet: str, numbers: Mapping[str, float | None]) -> Cluster:
    """Nodes of 8 devices, as is printed. numbers: tflops; hbm, GB/s of a device's memory; memory and host_memory, GB of 10⁹
    bytes, of a device and of a node's host (None: no limit); inside, between, pcie: GB/s in one direction, of a device
    to its node, of a node's network, of a device to host memory; error: see `Cluster`. sheet: where they are printed."""
    values = {what: number or 0.0 for what, number in numbers.items()}
    beyond, room = values["between"] * 1e3 * BETWEEN_SHARE, numbers["host_memory"]
    return Cluster(
        name,
        f"estimated: {ASSUMED}. {sheet}",
        peak=values["tflops"] * 1e12,
        hbm=values["hbm"] * 1e3,
        memory=int(values["memory"] * 1e9),
        node=8,
        inside=Link(LATENCY_US, values["inside"] * 1e3 * INSIDE_SHARE),
        between=Link(LATENCY_US, beyond),
        messages=beyond,
        efficiency=EFFICIENCY,
        launch=LAUNCH_US,
        traffic=TRAFFIC,
        host=HOST_US,
        constant=CONSTANT_US,
        error=numbers["error"],
        copies=Link(COPY_US, values["pcie"] * 1e3 * HOST_BOTH_SHARE),
        host_memory=None if room is None else int(room * 1e9 * HOST_MEMORY_SHARE / 8),
    )


def _clusters() -> Iterator[tuple[str, Cluster]]:
    text = resources.files(__package__).joinpath("clusters.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        name, sheet = row.pop("name"), row.pop("sheet")
        yield name, _node(name, sheet, {what: float(number) if number else None for what, number in row.items()})


CLUSTERS = dict(_clusters())


def cluster_of(said: Cluster | str | os.PathLike[str]) -> Cluster:
    """A cluster as it is, a preset's name, or a cluster file. Raises BadInput."""
    if isinstance(said, Cluster):
        return said
    name = os.fspath(said)
    known = name in CLUSTERS or not (Path(name).exists() or name.endswith(".json"))
    return cluster_by_name(name) if known else Cluster.load(name)


def cluster_by_name(name: str) -> Cluster:
    """A preset, from `name`. Raises BadInput with near names."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    raise BadInput(f"cluster '{name}': unknown{did_you_mean(name, CLUSTERS)} (clusters: {', '.join(CLUSTERS)}, or a file)")


# --- Measured links ---


def with_links_of(profile: Profile, cluster: Cluster, where: str = "profile") -> Cluster:
    """A cluster with the links that a profile's all-reduces tell.

    profile: the largest group inside a node and the largest one beyond it count.
    cluster: keeps its own link of a kind where there is no such group.
    where: what errors call the profile.

    An all-reduce of S bytes between n ranks is a ring: latency + 2 (n − 1) / n · S over the bandwidth (`layer_formulas`).
    Where groups reach beyond a node, messages have the bandwidth of the profile's slowest pair of neighbours, which is
    between nodes. Raises BadInput where no all-reduce was measured.
    """
    rows = [row for row in collective_rows(profile, where) if row.kind == ALL_REDUCE and row.ranks > 1]
    if not rows:
        raise BadInput(f"{where}: facts: 'collectives' has no {ALL_REDUCE} between several ranks")
    inside, between = ([row for row in rows if (row.nodes == 1) == same] for same in (True, False))
    changed, kinds = cluster, []
    if inside:
        changed = replace(changed, inside=_group_link(inside))
        kinds.append(f"inside nodes ({max(row.ranks for row in inside)} ranks)")
    if between:
        changed = replace(changed, between=_group_link(between), messages=profile.link.bytes_per_us)
        kinds.append(f"between nodes ({max(row.ranks for row in between)} ranks)")
    return replace(changed, error=None, source=f"estimated: links {' and '.join(kinds)} measured; else {cluster.source}")


def _group_link(rows: Sequence[CollectiveRow]) -> Link:
    row = max(rows, key=lambda curve: curve.ranks)
    return Link(row.latency, 2 * (row.ranks - 1) / row.ranks * row.bytes_per_us)
