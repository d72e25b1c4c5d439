"""`Profile`: a model's costs on a machine, measured, estimated or given, and problems from it; measured collectives."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Annotated, Any

import msgspec

from ..features.vocabulary import VocabularyCosts
from ..layer import HostLink, Layer, Link, Tied, side_values, split_known
from ..problem import Problem
from ..problem_form import check_slowdowns
from ..step import Step
from ..tables import Slowdown
from ..util.errors import BadInput, prefixed
from ..util.files import checked, read_part_of, write_document
from .form import check_some_time, fields_from, host_from, profile_form, states_from, tied_from, vocabulary_from

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST = COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
)
FACT = "collectives"
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class CollectiveRow(msgspec.Struct, frozen=True):
    """A collective between `ranks` ranks on `nodes` nodes. For a tensor of n bytes, which every rank has in full before or
    after it, it takes latency + n / bytes_per_us µs."""

    kind: str
    ranks: Count
    nodes: Count
    latency: Annotated[float, msgspec.Meta(ge=0, lt=2.0**62)]
    bytes_per_us: Annotated[float, msgspec.Meta(gt=0, lt=2.0**62)]


class _Rows(msgspec.Struct):
    collectives: list[CollectiveRow]


def collective_rows(profile: Profile, where: str) -> list[CollectiveRow]:
    """The measured collectives. Raises BadInput naming `where` where there are none."""
    if not profile.facts.get(FACT):
        raise BadInput(f"{where}: facts: '{FACT}' is missing: profile under torchrun writes it")
    return checked({FACT: profile.facts[FACT]}, _Rows, f"{where}: facts").collectives


ROLES = 3  # of stages: the first, those in the middle, the last
PLACED = ("microbatches", "placement", "memory", "objective", "layers", "fused")  # positional, after ranks
OF_LAYERS = [field.name for field in fields(Layer)]
# Fields that are left out of files where they are empty, so that older versions read these files.
NEWER = {*OF_LAYERS[OF_LAYERS.index("message") :], "blocking", "shared", "frozen_bytes", "shard_link", "site_link", "host"}
NEWER |= {"microbatch_factors", "vocabulary", "slowdowns", "roles"}


@dataclass(frozen=True)
class Profile:
    """A model's layers and the links between ranks.

    source: where the costs come from: "measured", "given" (typed in), or "estimated: " with the method.
    model: its name.
    layers: their costs, in order.
    link: between two ranks.
    states: bytes of parameters, gradients and optimizer state for each byte of trained parameters (4 for Adam in one
        precision); frozen ones count once.
    capacity: bytes of a device; None: not known.
    facts: JSON values about the machine and the run.
    samples: every raw measurement, µs, by "<layer>/<kind>" or "link/<bytes>".
    rank_factors: by which factor each rank is slower than the layers say; (): all are equal.
    tied: (bytes, layer numbers) of each parameter that several layers hold: a rank with several of them holds it once.
    shard_link: between the ranks of a data-parallel group, for sharded parameters and replicas; None: not known, and the
        pipeline's is used.
    host: between a device and its node's host memory; None: not known, so nothing can be copied there.
    microbatch_factors: by which factor each microbatch is larger than the layers say, in times, bytes and messages; steps
        must have that many microbatches; (): all are equal. A run's factors are only of its times: its messages were
        measured themselves, and are not scaled (fact `messages_alike`).
    vocabulary: costs of output layer, loss and embedding sharded over all ranks; None: not known.
    site_link: between sites, which its `shared` describes; None: all ranks are at one site.
    gradients: bytes of a gradient for each byte of its parameter, while sharded parameters' gradients are not reduced yet: 2
        where 16 bits are summed in 32.
    slowdowns: kinds of passes that slow each other when they run at the same time on a rank; layers have the times of passes
        alone.
    roles: what the first stage, each one in the middle and the last take in addition to their layers; (): nothing.
    """

    source: str
    model: str
    layers: tuple[Layer, ...]
    link: Link
    states: float
    capacity: int | None
    facts: dict[str, Any]
    samples: dict[str, list[float]]
    rank_factors: tuple[float, ...] = ()
    tied: Tied = ()
    shard_link: Link | None = None
    host: HostLink | None = None
    microbatch_factors: tuple[float, ...] = ()
    vocabulary: VocabularyCosts | None = None
    gradients: float = 1.0
    site_link: Link | None = None
    slowdowns: tuple[Slowdown, ...] = ()
    roles: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        check_slowdowns(self.slowdowns)
        if self.site_link is not None and not self.site_link.shared[:1].isdigit():
            raise BadInput("field 'site_link': its 'shared' says of how many ranks sites are, such as 4+4")
        for name in ("link", "shard_link"):
            if (link := getattr(self, name)) is not None and link.shared[:1].isdigit():
                raise BadInput(f"field '{name}': sites are of 'site_link'")
        if len(self.roles) not in (0, ROLES):
            raise BadInput(f"field 'roles' has {len(self.roles)} rows, not 3: for the first stage, middle ones and the last")

    @property
    def fused_only(self) -> bool:
        """Is only the fused backward BW known? Then every step is fused."""
        return not split_known(self.layers)

    @property
    def title(self) -> str:
        """The model's name, and its source if it was not measured."""
        return self.model if self.source == "measured" else f"{self.model} ({self.source}, not measured)"

    def problem(self, step: Step | int | None = None, *placed: Any, **fields: Any) -> Problem:
        """The training step of this model.

        step: a `Step`; or the number of ranks, followed by microbatches and placement, and further fields of a step by name
        (`layers` is its partition: layers of each stage). Raises BadInput, Infeasible.
        """
        if isinstance(step, Step):
            return step.problem(self)
        words: dict[str, Any] = {**dict(zip(PLACED, placed, strict=False)), **fields}
        if len(placed) > len(PLACED):
            raise TypeError(f"problem() takes {', '.join(PLACED)} by position after ranks; name the others")
        if "layers" in words:
            words["partition"] = words.pop("layers")
        words |= {} if step is None else {"ranks": step}
        return Step(**words).problem(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a profile file atomically; `-` is standard output."""
        write_document(path, "profile", self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The fields of a profile file."""
        body = {name: value for name, value in asdict(self).items() if name != "gradients" or value != 1}
        parts = {name: for_older(value) for name, value in body.items() if name not in ("facts", "samples")}
        return {name: parts.get(name, value) for name, value in body.items() if value or name not in NEWER}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile file, or the profile in a plan; `-` is standard input. Raises BadInput naming the field."""
        return cls.from_json(read_part_of(path, "profile", ("plan",)), str(path))

    @classmethod
    def from_json(cls, body: Any, where: str = "profile") -> Profile:
        """The profile that `save` wrote, or that a user typed. Raises BadInput naming `where` and the field."""
        form = checked(body, FORM, where)
        with prefixed(where):
            values = fields_from(form, cls, where, host=host_from, vocabulary=partial(vocabulary_from, len(form.layers)))
            layers, source = values["layers"], form.source
            values |= {"states": states_from(form.states, layers, where), "tied": tied_from(form.tied, layers, where)}
            check_some_time(layers, where)
            if source not in ("measured", "given") and not source.startswith(("estimated: ", "given, ")):
                raise BadInput(f"field 'source' is '{source}', neither 'measured', 'given' nor 'estimated: …'")
            side_values([layer.names for layer in layers])
            return cls(**values)


FORM = profile_form(Profile)


def for_older(value: Any) -> Any:
    """A part of a profile's file without its empty fields of `NEWER`."""
    if isinstance(value, dict):
        return {name: for_older(inner) for name, inner in value.items() if inner or name not in NEWER}
    return [for_older(inner) for inner in value] if type(value) in (list, tuple) else value
