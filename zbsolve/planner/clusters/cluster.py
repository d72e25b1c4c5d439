"""`Cluster`: the numbers of a machine that a plan is made for, and its file."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

import msgspec

from ...layer import MIN_BANDWIDTH, Link
from ...util.errors import BadInput
from ...util.files import AMOUNT, COUNT, checked, read_one_of, write_document
from ...util.text import parse_bytes, parse_rate, parse_time

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
        known |= {name: parse_bytes(said, f"{where}: field '{name}'") for name, said in sizes.items()}
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


def _time(said: float | str, what: str) -> float:
    return parse_time(said, what) if isinstance(said, str) else said


def _rate(said: float | str, what: str) -> float:
    found = parse_rate(said, what) if isinstance(said, str) else said
    if found < MIN_BANDWIDTH:
        raise BadInput(f"{what} is {found:g}")
    return found


def _link(form: NetworkForm, where: str) -> Link:
    return Link(_time(form.latency, f"{where}: field 'latency'"), _rate(form.bandwidth, f"{where}: field 'bandwidth'"))
