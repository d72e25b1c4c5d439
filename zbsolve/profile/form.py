"""A profile in a file: saved by a program, or typed by a user, where only times are needed and units may be given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec

from ..features.cuts import without_kv_bytes
from ..features.slices import negative_slice
from ..features.vocabulary import ShardCosts, ShardPasses, VocabularyCosts
from ..partition.layer import NO_LINK, Given, HostLink, Layer, Line, Link, SliceExtra, Tied
from ..util.errors import BadInput, prefixed
from ..util.files import AMOUNT, COUNT
from ..util.text import parse_bytes, parse_rate, parse_time

ROUNDING = 1e-9
BACKWARD = ("B", "W", "BW")  # a layer needs B and W, or BW
SIZES = ("held_until_B", "held_until_W", "parameter_bytes", "output_bytes")  # fields of a layer that a file may leave out
RATES = ("bytes_per_us", "d2h", "h2d", "d2h_both", "h2d_both")
STATES = (
    "bytes of parameters, gradients and optimizer state for each byte of trained parameters (4: Adam, all of one type; 8: "
    "Adam beside parameters of 16 bits)"
)
TIME = AMOUNT | str  # a number of µs, or text with its unit
SIZE = COUNT | str  # the same of bytes
Sample = Annotated[float, msgspec.Meta(gt=-(2.0**62), lt=2.0**62)]
Factor = Annotated[float, msgspec.Meta(gt=0, lt=2.0**62)]


class GivenForm(NamedTuple):
    """A side input that a layer gives in a file."""

    name: str
    bytes: SIZE
    gradient: bool = True
    kept: SIZE = 0


IN_FILES: dict[Any, Any] = {
    float: TIME,
    float | None: TIME | None,
    int: SIZE,
    int | None: SIZE | None,
    Line: tuple[Sample, Sample],
    tuple[Given, ...]: tuple[GivenForm, ...],
}
MADE_OF: dict[Any, Any] = {}  # form → its dataclass


def _form(kind: type, **own: tuple[Any, ...]) -> Any:
    """The fields of a dataclass in a file. own: name → (type, default) for fields that differ there; (type,): required."""
    hints, columns = get_type_hints(kind), []
    for field in fields(kind):
        hint = hints[field.name]
        usual = (IN_FILES.get(hint, hint), *(() if field.default is MISSING else (field.default,)))
        columns.append((field.name, *own.get(field.name, usual)))
    form: Any = msgspec.defstruct(kind.__name__, columns, forbid_unknown_fields=True, frozen=True, kw_only=True)
    MADE_OF[form] = kind
    IN_FILES.update({kind: form, kind | None: form | None, tuple[kind, ...]: tuple[form, ...]})  # type: ignore[valid-type]
    return form


_form(SliceExtra, number=(COUNT,))
LayerForm: Any = _form(
    Layer,
    name=(str | None, None),
    **dict.fromkeys(BACKWARD, (TIME | None, None)),
    **dict.fromkeys(SIZES, (SIZE, 0)),
)
LinkForm = _form(Link, latency=(TIME, NO_LINK.latency), bytes_per_us=(TIME, NO_LINK.bytes_per_us))


# Only one bandwidth is needed.
_form(
    HostLink,
    latency=(TIME, 0.0),
    **dict.fromkeys(("h2d", "d2h_both", "h2d_both"), (TIME | None, None)),
    ranks=(COUNT | None, None),
    shared_bus=(COUNT, 0),
)
_form(ShardPasses, held=(SIZE, 0))
_form(ShardCosts, ranks=(COUNT,), parameter_bytes=(SIZE, 0), scaled=(Literal[""], ""))
_form(
    VocabularyCosts,
    source=(str, "given"),
    size=(COUNT,),
    statistic_bytes=(SIZE, 0),
    output=(COUNT,),
    embedding=(COUNT | None, None),
)


def profile_form(kind: type) -> Any:
    """The form of a profile (`kind`). Unknown fields are refused, since a misspelt one would count as left out."""
    factors = (tuple[Factor, ...], ())
    return _form(
        kind,
        source=(str, "given"),
        model=(str, "unnamed"),
        layers=(Annotated[tuple[LayerForm, ...], msgspec.Meta(min_length=1)],),
        link=(LinkForm, LinkForm()),
        states=(AMOUNT | None, None),
        capacity=(SIZE | None, None),
        facts=(dict[str, Any], {}),
        samples=(dict[str, list[Sample]], {}),
        rank_factors=factors,
        microbatch_factors=factors,
        tied=(tuple[tuple[SIZE, tuple[COUNT, ...]], ...], ()),
        gradients=(AMOUNT, 1.0),
    )


def layer_from(form: Any, where: str, index: int = 0) -> Layer:
    """A layer from its form. index: its number, for a name if it has none. Raises BadInput naming `where` and the field."""

    def gives(rows: Sequence[GivenForm], where: str) -> tuple[Given, ...]:
        def size(row: GivenForm, what: str) -> int:
            return int(read(getattr(row, what), int, f"{where}: {what} of '{row.name}'"))

        return tuple(Given(row.name, size(row, "bytes"), row.gradient, size(row, "kept")) for row in rows)

    return complete(fields_from(form, Layer, where, gives=gives), index, where)


def complete(costs: dict[str, Any], index: int, where: str) -> Layer:
    """A layer from its known fields; others are absent or None. With B and W but without BW, a fused backward takes B + W.
    With BW alone, B and W are 0. Raises BadInput naming `where`."""
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
    if "W" in known:
        known["fixed_BW"] = known.get("fixed_BW") or known.get("fixed_B", 0.0) + known.get("fixed_W", 0.0)
    for kind in ("F", *BACKWARD):
        if (fixed := known.get(f"fixed_{kind}", 0.0)) > {**known, **fused}.get(kind, 0.0) * (1 + ROUNDING):
            raise BadInput(f"{where}: field 'fixed_{kind}' is {fixed:g} µs, more than {kind} takes")
    kept = "what F keeps", known.get("held_until_B", 0) + known.get("held_until_W", 0)
    frozen = "all parameters ('parameter_bytes') have", known.get("parameter_bytes", 0)
    for name, (of, most) in (("frozen_bytes", frozen), ("output_kept", kept), ("input_unneeded", kept)):
        if known.get(name, 0) > most:
            raise BadInput(f"{where}: field '{name}' is {known[name]}, more than {of} ({most})")
    layer = Layer(**{"name": f"layer{index}", **dict.fromkeys(SIZES, 0), **split, **fused, **known})
    for field, why in (("slice_extra: ", negative_slice(layer)), ("", without_kv_bytes(layer))):
        if why:
            raise BadInput(f"{where}: {field}{why}")
    return layer


def check_some_time(layers: Sequence[Layer], where: str) -> None:
    """Raise BadInput where no pass takes time, with a split or with a fused backward."""
    for kinds in (("F", "B", "W"), ("F", "BW")):
        if not any(getattr(layer, kind) for layer in layers for kind in kinds):
            raise BadInput(f"{where}: fields {', '.join(map(repr, kinds))} of all layers are 0: nothing takes time")


def host_from(form: Any, where: str) -> HostLink | None:
    """The link to host memory, if there is one. Missing rates are those of the other direction, or of one direction alone.
    Raises BadInput naming the field."""
    if form is None:
        return None
    costs = fields_from(form, HostLink, where)
    for name, usual in (("h2d", "d2h"), ("d2h_both", "d2h"), ("h2d_both", "h2d")):
        costs[name] = costs[usual] if costs[name] is None else costs[name]
    return HostLink(**costs)


def vocabulary_from(layers: int, form: Any, where: str) -> VocabularyCosts | None:
    """The costs of a sharded vocabulary of so many layers, if they are given. Raises BadInput naming the field."""
    if form is not None:
        (costs := made_from(form, where)).check(layers)
        return costs
    return None


def fields_from(form: Any, kind: type, where: str, **inner: Callable[[Any, str], Any]) -> dict[str, Any]:
    """A form's fields as those of its dataclass: text parsed as a time, bytes or a rate, inner forms as their dataclasses.
    inner: field → the function that reads it instead. Raises BadInput naming `where` and the field."""
    values, hints = {}, get_type_hints(kind)
    for name, value in msgspec.structs.asdict(form).items():
        at = f"{where}: {name}"
        if name in inner:
            values[name] = inner[name](value, at)
        elif type(value) in MADE_OF:
            values[name] = made_from(value, at)
        elif isinstance(value, tuple) and value and type(value[0]) in MADE_OF:
            values[name] = tuple(made_from(row, f"{at}[{i}]", i) for i, row in enumerate(value))
        else:
            values[name] = read(value, "rate" if name in RATES else hints[name], f"{where}: field '{name}'")
    return values


def made_from(form: Any, where: str, index: int = 0) -> Any:
    """The dataclass of a form, filled. index: its number among several. Raises BadInput naming `where` and the field."""
    kind = MADE_OF[type(form)]
    if kind is Layer:
        return layer_from(form, where, index)
    with prefixed(where):
        return kind(**fields_from(form, kind, where))


def tied_from(form: Sequence[tuple[Any, tuple[int, ...]]], layers: Sequence[Layer], where: str) -> Tied:
    """Parameters that layers share. Raises BadInput naming `where`, also if a layer shares more bytes than it has."""
    where, shared = f"{where}: field 'tied'", [0] * len(layers)
    for size, group in form:
        if len({*group}) < 2 or max(group) >= len(layers):
            raise BadInput(f"{where} must list [bytes, [layers that hold them]], not {[size, [*group]]}")
        for i in {*group}:
            shared[i] += read(size, int, where)
            if shared[i] > layers[i].parameter_bytes:
                raise BadInput(f"{where}: layer {i} shares {shared[i]} bytes, and has {layers[i].parameter_bytes}")
    return tuple((read(size, int, where), group) for size, group in form)


def states_from(form: float | None, layers: Sequence[Layer], where: str) -> float:
    """The field `states` (see `STATES`); 0 without parameters. Raises BadInput where it is missing but needed."""
    if form is None and any(layer.parameter_bytes for layer in layers):
        raise BadInput(f"{where}: field 'states' is missing: {STATES}")
    return form or 0.0


def read(value: Any, hint: Any, what: str) -> Any:
    """A number or None as it is; text parsed as a time, bytes (hint int) or a bandwidth ("rate"). Raises BadInput."""
    if not isinstance(value, str) or hint is str:
        return value
    return (parse_rate if hint == "rate" else parse_bytes if hint in (int, int | None) else parse_time)(value, what)
