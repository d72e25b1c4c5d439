"""`Case`: the inputs of a plan, and changes of one number in them, such as `nodes+1` or `between.bandwidth=2x`."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from ..util.errors import BadInput
from ..util.text import did_you_mean, parse_bytes
from .bounds.space_bounds import SpaceBounds
from .cluster import LINKS, Cluster
from .plan_file import Plan
from .profiled_model import Model
from .space import ALL, Only

SIZES = ("memory", "devices", "nodes", "batch")
# More of the former, or less of the latter, never makes a step longer: each time of a layer, message and exchange is
# monotonic in them. The peak of a device is not: where the host limits B, a higher peak gives a shorter W but a longer B.
MORE_IS_EASIER = (
    *("hbm", "inside.bandwidth", "between.bandwidth", "messages", "overlap"),
    *("copies.bandwidth", "host_memory"),
)
LESS_IS_EASIER = ("inside.latency", "between.latency", "traffic", "host", "constant", "copies.latency", "contention")
# Of these, numbers that times of layers depend on: slices share a layer's time by its part that is attention, in whole µs,
# so one of them may take longer where the layer takes less.
OF_LAYERS = {"hbm", "traffic", "host", "overlap", *(f"{link}.{x}" for link in LINKS[:2] for x in ("bandwidth", "latency"))}
CHANGE = re.compile(r"\s*([a-z._]+)\s*([=+-])\s*(\S+)\s*")


class Case(NamedTuple):
    """The inputs of a plan. devices: how many; batch: sequences in a step; memory: a device's bytes; only: its layouts."""

    model: Model
    devices: int
    batch: int
    cluster: Cluster
    memory: int
    only: Only = ALL


def case_of(plan: Plan) -> Case:
    """The inputs of this plan."""
    return Case(plan.shape, plan.devices, plan.batch, plan.cluster, plan.memory, plan.only)


def changed(case: Case, text: str) -> Case:
    """The case with one number changed: `NAME=VALUE`, `NAME=2x`, `NAME+VALUE`, `NAME-VALUE` or `NAME+10%`. Names: those of
    `SIZES` and of the cluster's numbers; units as in a cluster file. Raises BadInput naming the change."""
    match, where = CHANGE.fullmatch(text), f"change '{text[:40]}'"
    if match is None:
        raise BadInput(f"{where}: not like memory=96GiB, devices=72, nodes+1 or between.bandwidth=2x")
    name, sign, amount = match.groups()
    known = _numbers(case)
    if name not in known:
        raise BadInput(f"{where}: '{name}' is no number of a plan{did_you_mean(name, known)} ({', '.join(known)})")
    if name in SIZES:
        return _sized(case, name, _amount(known[name], sign, amount, parse_bytes if name == "memory" else int, where), where)
    body = _flat(case.cluster)
    if sign == "=" and not amount.endswith(("x", "%")):
        body[name] = _plain(amount)  # `Cluster.from_json` reads its units
    else:
        value = _amount(known[name], sign, amount, float, where)
        whole = isinstance(known[name], int) and (value.is_integer() or name == "host_memory")
        body[name] = int(value) if whole else value
    return case._replace(cluster=Cluster.from_json(_nested(body), where))


def no_harder(case: Case, other: Case, *, in_slices: bool = True) -> bool:
    """Whether every schedule of the other case is also one of this case, and takes no longer in it. in_slices: also those
    of layouts in slices."""
    same = case.model is other.model and (case.devices, case.batch, case.only) == (other.devices, other.batch, other.only)
    if not same or case.memory < other.memory:
        return False
    here, there = _flat(case.cluster), _flat(other.cluster)
    differ = {name for name in here if here[name] != there[name]} - {"name", "source", "error", "memory"}
    more, less = differ & {*MORE_IS_EASIER}, differ & {*LESS_IS_EASIER}
    easier = all(here[i] > there[i] for i in more) and all(here[i] < there[i] for i in less)
    return differ == more | less and easier and not (in_slices and differ & OF_LAYERS)


def carried_until(case: Case, other: Case, bounds: SpaceBounds) -> float:
    """µs up to which bounds of `case` hold for the other case too, which has these `bounds` itself: all do (∞) where nothing
    of it is harder; only those below all layouts in slices where these may be harder; else none (0)."""
    if no_harder(case, other):
        return inf
    in_slices = bounds.step[bounds.layout.slices > 1].min(initial=inf)
    return float(in_slices) if no_harder(case, other, in_slices=False) else 0.0


def _numbers(case: Case) -> dict[str, float]:
    """The numbers that can be changed, by name, with their values."""
    nodes = case.devices / case.cluster.node
    sizes = dict(zip(SIZES, (case.memory, case.devices, nodes, case.batch), strict=True))
    fixed = ("memory", "error")
    cluster = {name: value for name, value in _flat(case.cluster).items() if isinstance(value, (int, float))}
    return {**{name: value for name, value in cluster.items() if name not in fixed}, **sizes}


def _amount(old: float, sign: str, amount: str, parse: Callable[[str], float], where: str) -> float:
    factor, share = sign == "=" and amount.endswith("x"), sign != "=" and amount.endswith("%")
    try:
        number = float(amount[:-1]) if factor or share else parse(amount)
    except (BadInput, ValueError):
        raise BadInput(f"{where}: '{amount}' is no such number") from None
    if factor:
        return old * number
    by = old * number / 100 if share else number
    return by if sign == "=" else old + (by if sign == "+" else -by)


def _sized(case: Case, name: str, value: float, where: str) -> Case:
    """The case with another value of a name in `SIZES`. Raises BadInput where it is not a whole number from 1 up."""
    value = value * case.cluster.node if name == "nodes" else value
    field = "devices" if name == "nodes" else name
    whole = int(value) if name == "memory" else round(value)
    if whole < 1 or (name != "memory" and whole != value):
        raise BadInput(f"{where}: {field} would be {value:g}: a whole number from 1 up is needed")
    known: dict[str, Any] = {field: whole}
    return case._replace(**known)


def _flat(cluster: Cluster) -> dict[str, Any]:
    """The fields of a cluster in one level: those of links are named like `inside.latency`."""
    body = cluster.to_json()
    links = {f"{link}.{name}": value for link in LINKS for name, value in (body.pop(link) or {}).items()}
    return {**body, **links}


def _nested(body: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_flat`: the fields as in a cluster file."""
    links: dict[str, Any] = {}
    for name, value in body.items():
        link, _, field = name.partition(".")
        if field:
            links.setdefault(link, {})[field] = value
    return {**{name: value for name, value in body.items() if "." not in name}, **links}


def _plain(text: str) -> float | str:
    """The text as a number, or unchanged where it has a unit."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text
