"""A profile in a file: what a program saved, and what a person types, where only times are needed and units may be said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec

from ..features.cuts import without_kv_bytes
from ..features.slices import negative_slice
from ..features.vocabulary import ShardCosts, ShardPasses, VocabularyCosts
from ..layer import MIN_BANDWIDTH, NO_LINK, Given, HostLink, Layer, Link, SliceExtra, Tied, side_values
from ..util.errors import BadInput
from ..util.files import AMOUNT, COUNT
from ..util.text import parse_bytes, parse_rate, parse_time

BACKWARD = ("B", "W", "BW")  # of which a layer needs B and W, or BW
NEEDED = "F"
STATES = (
    "bytes of parameters, gradients and optimizer state for each byte of trained parameters (4: Adam, all of one type; 8: "
    "Adam beside parameters of 16 bits)"
)
TIME = AMOUNT | str  # a number of µs, or text with its unit
SIZE = COUNT | str  # the same of bytes
Sample = Annotated[float, msgspec.Meta(gt=-(2.0**62), lt=2.0**62)]
Factor = Annotated[float, msgspec.Meta(gt=0, lt=2.0**62)]


class SliceExtraForm(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What slices take beyond their part in a file, µs: of each, and more for each slice before it."""

    number: COUNT
    F: tuple[Sample, Sample] = (0.0, 0.0)
    B: tuple[Sample, Sample] = (0.0, 0.0)
    W: tuple[Sample, Sample] = (0.0, 0.0)
    BW: tuple[Sample, Sample] = (0.0, 0.0)


class GivenForm(NamedTuple):
    """A side input that a layer gives in a file."""

    name: str
    bytes: SIZE
    gradient: bool = True


def _layer_form() -> Any:
    """The fields of a `Layer`; all but F may be left out."""
    kinds: dict[Any, Any] = {float: TIME, int: SIZE, SliceExtra | None: SliceExtraForm | None}
    kinds[tuple[Given, ...]] = tuple[GivenForm, ...]
    columns: list[Any] = []
    for field in fields(Layer):
        hint = get_type_hints(Layer)[field.name]
        default = 0 if field.default is MISSING else field.default
        if field.name in (*BACKWARD, "name"):
            columns.append((field.name, kinds.get(hint, hint) | None, None))
        else:
            columns.append((field.name, kinds.get(hint, hint), *(() if field.name == NEEDED else (default,))))
    return msgspec.defstruct("Layer", columns, forbid_unknown_fields=True, kw_only=True)


LayerForm = _layer_form()


class LinkForm(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A link in a file."""

    latency: TIME = NO_LINK.latency
    bytes_per_us: TIME = NO_LINK.bytes_per_us
    blocking: bool = False
    shared: str = ""


class HostForm(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Copies to and from host memory in a file; only one bandwidth is needed."""

    d2h: TIME
    h2d: TIME | None = None
    d2h_both: TIME | None = None
    h2d_both: TIME | None = None
    latency: TIME = 0.0
    memory: SIZE | None = None
    ranks: COUNT | None = None
    shared_bus: COUNT = 0


class ShardPassesForm(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """S and T of a shard in a file."""

    S: TIME
    T: TIME
    held: SIZE = 0
    transient: SIZE = 0
    merge: TIME = 0.0


class ShardForm(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A vocabulary in so many parts in a file."""

    ranks: COUNT
    one: ShardPassesForm
    two: ShardPassesForm
    parameter_bytes: SIZE = 0
    frozen_bytes: SIZE = 0
    lookup: TIME = 0.0
    broadcast: TIME | None = None
    reduce: TIME | None = None
    statistics: TIME | None = None
    scaled: Literal[""] = ""


class VocabularyForm(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a sharded vocabulary costs in a file."""

    size: COUNT
    hidden_bytes: SIZE
    output: COUNT
    output_rest: LayerForm  # type: ignore[valid-type]
    shards: list[ShardForm]
    source: str = "given"
    statistic_bytes: SIZE = 0
    embedding: COUNT | None = None
    embedding_rest: LayerForm | None = None  # type: ignore[valid-type]
    tied: bool = False


class ProfileForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A profile in a file: a misspelt field must not pass for one that was left out."""

    source: str = "given"
    model: str = "unnamed"
    layers: Annotated[list[LayerForm], msgspec.Meta(min_length=1)]  # type: ignore[valid-type]
    link: LinkForm = LinkForm()
    states: AMOUNT | None = None
    capacity: SIZE | None = None
    facts: dict[str, Any] = {}
    samples: dict[str, list[Sample]] = {}
    rank_factors: list[Factor] = []
    tied: list[tuple[SIZE, list[COUNT]]] = []
    shard_link: LinkForm | None = None
    site_link: LinkForm | None = None
    host: HostForm | None = None
    microbatch_factors: list[Factor] = []
    vocabulary: VocabularyForm | None = None
    gradients: AMOUNT = 1.0


def layer_from(form: Any, where: str, index: int = 0) -> Layer:
    """A layer from its form; index: its number, for a name where it has none. Raises BadInput naming `where` and the
    field."""
    return complete(_fields(form, Layer, where, slice_extra=_slice_extra_from, gives=_gives_from), index, where)


def _gives_from(rows: Sequence[GivenForm], where: str) -> tuple[Given, ...]:
    return tuple(Given(one.name, _read(one.bytes, int, f"{where}: bytes of '{one.name}'"), one.gradient) for one in rows)


def _slice_extra_from(form: SliceExtraForm | None, where: str) -> SliceExtra | None:
    """What slices take, where that was measured. Raises BadInput naming `where`."""
    if form is None:
        return None
    try:
        return SliceExtra(**msgspec.structs.asdict(form))
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def complete(costs: dict[str, Any], index: int, where: str) -> Layer:
    """A layer from those of its fields that are known; others are absent or None. B and W without BW: a fused backward takes
    as long as both. BW alone: B and W are 0, and nothing else is known. Raises BadInput naming `where`."""
    known = {name: value for name, value in costs.items() if value is not None}
    missing = [name for name in ("B", "W") if name not in known]
    if len(missing) == 1 or (missing and "BW" not in known):
        raise BadInput(f"{where}: field '{missing[0]}' is missing: give B and W, or BW alone")
    split = {} if not missing else {"B": 0.0, "W": 0.0}
    backward = known.get("BW" if "B" in missing else "B", 0.0)
    for name, of, most in (("attention_F", "F", known.get("F", 0.0)), ("attention_B", "the backward", backward)):
        if known.get(name, 0.0) > most:
            raise BadInput(f"{where}: field '{name}' is {known[name]:g} µs, more than {of} takes ({most:g} µs)")
    fused = {} if "BW" in known else {"BW": known["B"] + known["W"]}
    if known.get("frozen_bytes", 0) > known.get("parameter_bytes", 0):
        raise BadInput(
            f"{where}: field 'frozen_bytes' is {known['frozen_bytes']}, more than all parameters ('parameter_bytes') have"
        )
    sizes = dict.fromkeys(("held_until_B", "held_until_W", "parameter_bytes", "output_bytes"), 0)
    layer = Layer(**{"name": f"layer{index}", **sizes, **split, **fused, **known})
    if why := negative_slice(layer):
        raise BadInput(f"{where}: slice_extra: {why}")
    if why := without_kv_bytes(layer):
        raise BadInput(f"{where}: {why}")
    return layer


def check_some_time(layers: Sequence[Layer], where: str) -> None:
    """Raise BadInput where no pass takes time, with a split or with a fused backward."""
    for kinds in (("F", "B", "W"), ("F", "BW")):
        if not any(getattr(layer, kind) for layer in layers for kind in kinds):
            raise BadInput(f"{where}: fields {', '.join(map(repr, kinds))} of all layers are 0: nothing takes time")


def check_sides(layers: Sequence[Layer], where: str) -> None:
    """Raise BadInput where layers give and take side inputs that do not fit each other."""
    try:
        side_values([(tuple(one.name for one in layer.gives), layer.takes) for layer in layers])
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def link_from(form: LinkForm, where: str) -> Link:
    """The link. Raises BadInput naming `where` and the field."""
    latency = parse_time(form.latency, f"{where}: link: field 'latency'") if isinstance(form.latency, str) else form.latency
    rate = form.bytes_per_us
    rate = parse_rate(rate, f"{where}: link: field 'bytes_per_us'") if isinstance(rate, str) else rate
    if rate < MIN_BANDWIDTH:
        raise BadInput(f"{where}: link: field 'bytes_per_us' is {rate:g}")
    try:
        return Link(latency, rate, form.blocking, form.shared)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def host_from(form: HostForm | None, where: str) -> HostLink | None:
    """The link to host memory, where there is one; what is not said of a way is as on the other, and alone. Raises BadInput
    naming `where` and the field."""
    if form is None:
        return None

    def rate(name: str, otherwise: float = 0.0) -> float:
        said = getattr(form, name)
        if said is None:
            return otherwise
        return parse_rate(said, f"{where}: host: field '{name}'") if isinstance(said, str) else said

    down = rate("d2h")
    up = rate("h2d", down)
    both = rate("d2h_both", down), rate("h2d_both", up)
    latency = _read(form.latency, float, f"{where}: host: field 'latency'")
    memory = size_from(form.memory, f"{where}: host: field 'memory'")
    try:
        return HostLink(latency, down, up, *both, memory, form.ranks, form.shared_bus)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def vocabulary_from(form: VocabularyForm | None, layers: int, where: str) -> VocabularyCosts | None:
    """What a sharded vocabulary costs, where that is known. Raises BadInput naming `where` and the field."""
    if form is None:
        return None
    where = f"{where}: vocabulary"
    rests = {name: getattr(form, name) for name in ("output_rest", "embedding_rest")}
    known = {f.name: getattr(form, f.name) for f in fields(VocabularyCosts) if f.name not in (*rests, "shards")}
    known |= {name: _read(known[name], int, f"{where}: field '{name}'") for name in ("hidden_bytes", "statistic_bytes")}
    known |= {name: None if one is None else layer_from(one, f"{where}: {name}") for name, one in rests.items()}
    shards = tuple(_shard_from(row, f"{where}: shards[{i}]") for i, row in enumerate(form.shards))
    try:
        found = VocabularyCosts(**known, shards=shards)
        found.check(layers)
    except BadInput as error:
        raise BadInput(f"{where.removesuffix('vocabulary')}{error}") from None
    return found


def _shard_from(form: ShardForm, where: str) -> ShardCosts:
    return ShardCosts(**_fields(form, ShardCosts, where, one=_passes_from, two=_passes_from))


def _passes_from(form: ShardPassesForm, where: str) -> ShardPasses:
    return ShardPasses(**_fields(form, ShardPasses, where))


def _fields(form: Any, kind: type, where: str, **inner: Callable[[Any, str], Any]) -> dict[str, Any]:
    """A form's fields as those of a dataclass; text says a time or bytes. inner: what reads a field that is a form."""
    found, hints = {}, get_type_hints(kind)
    for name, value in msgspec.structs.asdict(form).items():
        place = f"{where}: field '{name}'"
        found[name] = inner[name](value, f"{where}: {name}") if name in inner else _read(value, hints[name], place)
    return found


def tied_from(form: Sequence[tuple[Any, list[int]]], layers: int, where: str) -> Tied:
    """What layers share. Raises BadInput naming `where`."""
    for size, group in form:
        if len({*group}) < 2 or max(group) >= layers:
            raise BadInput(f"{where}: field 'tied' must list [bytes, [layers that hold them]], not {[size, group]}")
    return tuple((_read(size, int, f"{where}: field 'tied'"), tuple(group)) for size, group in form)


def size_from(form: Any, what: str) -> int | None:
    """Bytes, or None where nothing is known. Raises BadInput naming `what`."""
    return None if form is None else _read(form, int, what)


def states_from(form: float | None, layers: Sequence[Layer], where: str) -> float:
    """Bytes of parameters, gradients and optimizer state for each byte of parameters: no matter without parameters. Raises
    BadInput where they are needed."""
    if form is None and any(layer.parameter_bytes for layer in layers):
        raise BadInput(f"{where}: field 'states' is missing: {STATES}")
    return form or 0.0


def _read(value: Any, hint: Any, what: str) -> Any:
    """A number as it is; text as the time or the bytes that it says."""
    if not isinstance(value, str) or hint is str:
        return value
    return parse_bytes(value, what) if hint is int else parse_time(value, what)
