"""`Cluster`: the numbers of a machine that a plan is made for; its file; clusters by name; and links from a profile."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from ..partition.layer import MIN_BANDWIDTH, Link
from ..profile.profile import ALL_REDUCE, CollectiveRow, Profile, collective_rows
from ..util.errors import BadInput
from ..util.files import AMOUNT, COUNT, checked, read_one_of, write_document
from ..util.text import did_you_mean, parse_bytes, parse_rate, parse_time

KIND = "cluster"
SOURCES = ("measured", "given", "estimated: ", "fitted: ")
Positive = Annotated[float, msgspec.Meta(gt=0, lt=2.0**62)]
LINKS = ("inside", "between", "copies")  # fields with latency and bandwidth
# An assumption, as large as a measured effect: on A100, H100, MI210 and MI250 computing beside collectives took 18.9 %
# longer on average (arXiv 2507.03114). Exchanges beside messages were not measured for zbsolve.
CONTENTION = 1.2
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal devices. Times are in µs, sizes in bytes, bandwidths in bytes per µs.

    name: for texts.
    source: where the numbers come from: "estimated: …", "fitted: …", "given" or "measured".
    peak: dense FLOP/s of a device in 16 bits.
    hbm: bytes per µs of a device's memory.
    memory: bytes of a device's memory.
    node: devices in a node.
    inside: latency of a collective inside a node, and bandwidth of a device to others of its node.
    between: the same for groups that span nodes; the bandwidth is that of a node, which all its devices share.
    messages: bytes per µs of a node's messages between stages.
    efficiency: share of the peak that matrix products reach.
    launch: µs added to each layer's forward (kernel launches and tails).
    traffic: bytes that elementwise work moves, for each byte that the formula counts.
    host: the least µs of a layer's forward, since the host launches its kernels.
    constant: µs added to each step.
    overlap: share of gradient exchange and gathers that runs beside computing.
    error: mean share by which predicted steps are off, over the measured steps that constants were fitted to or checked
        with; None: not measured.
    copies: latency of a copy between a device and host memory, and bandwidth each way while both run; None: not known, so
        no layout copies activations there.
    host_memory: bytes of host memory for the activations of a device; None: no limit.
    contention: factor, 1 or more, on an exchange of gradients while stages send messages; assumed: `CONTENTION`.
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
        """Write a cluster file: either all of it is written or nothing. `-` is standard output."""
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
        """The cluster with these fields, from `to_json` or typed by hand. Raises BadInput naming `where` and the field."""
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
    """A cluster in a file. Times, sizes and bandwidths may be text with units."""

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


# --- By name, estimated from data sheets and assumed shares of their numbers ---


# Assumptions, not measurements. They are the priors of `fitting.fit`, which replaces them by fits to measured steps.
EFFICIENCY = 0.75
TRAFFIC = 1.4
LAUNCH_US = 300.0  # about 30 kernels of a layer's forward, 10 µs each
HOST_US, CONSTANT_US, LATENCY_US = 1500.0, 50_000.0, 30.0
NODE = 8  # devices
COPY_US = 10.0
HOST_BOTH_SHARE, HOST_MEMORY_SHARE = 0.65, 0.8  # of PCIe each way while both run; of a node's memory (as in profiles)
INSIDE_SHARE, BETWEEN_SHARE = 0.6, 0.8  # shares of a data sheet's bandwidth that collectives reach
ASSUMED = (
    f"data sheet; assumed: matrix products at {EFFICIENCY:.0%} of peak, collectives at {INSIDE_SHARE:.0%} of the bandwidth "
    f"inside a node and {BETWEEN_SHARE:.0%} of it between nodes, {LATENCY_US:g} µs each; "
    f"copies at {HOST_BOTH_SHARE:.0%} of PCIe each way at once, {COPY_US:g} µs each, into a device's part of "
    f"{HOST_MEMORY_SHARE:.0%} of host memory"
)


def _node(name: str, sheet: str, numbers: Mapping[str, float | None]) -> Cluster:
    """A cluster of nodes of 8 devices from data sheets. numbers: tflops; hbm, GB/s of a device's memory; memory and
    host_memory, GB of 10⁹ bytes, of a device and of a node's host (None: no limit); inside, between, pcie: GB/s in one
    direction, of a device to its node, a node's network, a device to host memory; error: of `Cluster`. sheet: source."""
    values = {what: number or 0.0 for what, number in numbers.items()}
    beyond, room = values["between"] * 1e3 * BETWEEN_SHARE, numbers["host_memory"]
    return Cluster(
        name,
        f"estimated: {ASSUMED}. {sheet}",
        peak=values["tflops"] * 1e12,
        hbm=values["hbm"] * 1e3,
        memory=int(values["memory"] * 1e9),
        node=NODE,
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
        host_memory=None if room is None else int(room * 1e9 * HOST_MEMORY_SHARE / NODE),
    )


class Sheet(NamedTuple):
    """A row of `clusters.csv`. sheet: where its numbers are published; device: where those that only profiles need are:
    single, TFLOP/s in 32 bits; link and card, GB/s to a neighbour and to another node."""

    name: str
    sheet: str
    device: str
    numbers: Mapping[str, float | None]


def sheets() -> Iterator[Sheet]:
    """What the data sheets say of each device."""
    text = resources.files(__package__).joinpath("clusters.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        words = {what: row.pop(what) for what in ("name", "sheet", "device")}
        yield Sheet(**words, numbers={what: float(number) if number else None for what, number in row.items()})


CLUSTERS = {row.name: _node(row.name, row.sheet, row.numbers) for row in sheets()}


def cluster_of(said: Cluster | str | os.PathLike[str]) -> Cluster:
    """The cluster that `said` is, names as a preset, or gives the file of. Raises BadInput."""
    if isinstance(said, Cluster):
        return said
    name = os.fspath(said)
    known = name in CLUSTERS or not (Path(name).exists() or name.endswith(".json"))
    return cluster_by_name(name) if known else Cluster.load(name)


def cluster_by_name(name: str) -> Cluster:
    """The preset called `name`. Raises BadInput with similar names."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    raise BadInput(f"cluster '{name}': unknown{did_you_mean(name, CLUSTERS)} (clusters: {', '.join(CLUSTERS)}, or a file)")


# --- Measured links ---


def with_links_of(profile: Profile, cluster: Cluster, where: str = "profile") -> Cluster:
    """The cluster with links computed from the all-reduces of a profile.

    profile: its largest group inside a node and its largest group across nodes are used.
    cluster: its own link stays where the profile has no such group.
    where: the name of the profile in errors.

    An all-reduce of S bytes between n ranks is a ring: latency + 2 (n − 1) / n · S over the bandwidth (`layer_formulas`).
    Where a group spans nodes, messages get the bandwidth of the profile's slowest pair of neighbours, which is between
    nodes. Raises BadInput where no all-reduce was measured.
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
