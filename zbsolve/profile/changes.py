"""How a model's costs changed: two profiles compared, and whether changes exceed the spread of their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import erfc, sqrt

import numpy as np

from ..partition.layer import Layer
from ..util.columns import quartiles
from ..util.errors import BadInput
from ..util.files import Fields
from .profile import Profile

KINDS = ("F", "B", "W", "BW", "X", "U", "all_to_all", "message")
HELD = ("held_until_B", "held_until_W", "held_from_B", "transient")
BYTES = (*HELD, "parameter_bytes", "frozen_bytes", "buffer_bytes", "output_bytes")
MIN_SAMPLES = 5  # on each side, to compare a change with the spread
CHANCE = 0.01  # how often a difference may be reported by chance, for one layer and kind


@dataclass(frozen=True, slots=True)
class Change:
    """One cost of one layer (or of all together, layer "") in both profiles: µs or bytes. `change`: new / old − 1, None from
    0. `beyond`: does it exceed the spread of the samples? None where there are too few samples to tell."""

    layer: str
    what: str
    old: float
    new: float
    change: float | None
    beyond: bool | None


@dataclass(frozen=True)
class Drift(Fields):
    """All changes: `layers` in the newer profile's order, `total` over all layers and of the link (for a message of the
    largest output), `bytes` where they differ. `only_old`, `only_new`: layers of only one profile."""

    layers: tuple[Change, ...]
    total: tuple[Change, ...]
    bytes: tuple[Change, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]

    def within(self, share: float) -> bool:
        """Have both the same layers, and does no time and no size differ by more than this share? Times within the spread of
        their samples count as equal; without samples the numbers count."""
        links = (change for change in self.total if change.what == "link")  # the other totals are sums over layers
        moved = (change for change in (*self.layers, *links, *self.bytes) if change.beyond is not False)
        far = any(change.change is None or abs(change.change) > share for change in moved)
        return not (far or self.only_old or self.only_new)


def drift(old: Profile, new: Profile) -> Drift:
    """What changed from `old` to `new`, for layers of the same name and turn.

    A change exceeds the spread where the middle halves of both samples do not overlap, and a rank-sum test (Mann and Whitney
    1947) gives such a difference a chance of less than 1 %. Raises BadInput where no layer is in both.
    """
    olds, news = _numbered(old), _numbered(new)
    both = {name: (olds[name], layer) for name, layer in news.items() if name in olds}
    if not both:
        raise BadInput("diff: the two profiles have no layer of the same name: they are of different models")
    kept, kept_new = _samples_of_equals(old), _samples_of_equals(new)
    rows, sizes, total = [], [], []
    for name, (before, after) in both.items():
        for kind in KINDS:
            times = getattr(before, kind), getattr(after, kind)
            if any(times):
                rows.append(_change(name, kind, *times, kept(before, kind), kept_new(after, kind)))
        for what in BYTES:
            amounts = getattr(before, what), getattr(after, what)
            if amounts[0] != amounts[1]:
                sizes.append(_change(name, what, *amounts, (), ()))
    for kind in KINDS:
        sums = [sum(getattr(pair[side], kind) for pair in both.values()) for side in (0, 1)]
        if any(sums):
            total.append(_change("", kind, sums[0], sums[1], (), ()))
    largest = max(after.output_bytes for _, after in both.values())
    total.append(_change("", "link", old.link.time(largest), new.link.time(largest), *_link_samples(old, new)))
    only_old, only_new = (tuple(name for name in own if name not in other) for own, other in ((olds, news), (news, olds)))
    return Drift(tuple(rows), tuple(total), tuple(sizes), only_old, only_new)


def _numbered(profile: Profile) -> dict[str, Layer]:
    """Layers by name; the second layer of a name gets its number appended."""
    layers: dict[str, Layer] = {}
    for layer in profile.layers:
        name, turn = layer.name, 2
        while name in layers:
            name, turn = f"{layer.name} ({turn})", turn + 1
        layers[name] = layer
    return layers


def _samples_of_equals(profile: Profile) -> Callable[[Layer, str], list[float]]:
    """(layer, kind) → samples of the layer and of equal ones, µs, since only some of several equal layers are measured."""
    names: dict[Layer, dict[str, None]] = {}
    for layer in profile.layers:
        names.setdefault(replace(layer, name=""), {})[layer.name] = None
    samples = profile.samples
    return lambda layer, kind: [us for name in names[replace(layer, name="")] for us in samples.get(f"{name}/{kind}", ())]


def _link_samples(old: Profile, new: Profile) -> tuple[list[float], list[float]]:
    """Samples of the largest message that both profiles measured."""
    sizes = [key for key in old.samples if key.startswith("link/") and key[5:].isdecimal() and key in new.samples]
    key = max(sizes, key=lambda size: int(size[5:]), default="")
    return old.samples.get(key, []), new.samples.get(key, [])


def _change(layer: str, what: str, old: float, new: float, before: Sequence[float], after: Sequence[float]) -> Change:
    return Change(layer, what, old, new, new / old - 1 if old else None, _beyond(before, after))


def _beyond(before: Sequence[float], after: Sequence[float]) -> bool | None:
    if min(len(before), len(after)) < MIN_SAMPLES:
        return None
    (low, high), (low2, high2) = quartiles(before), quartiles(after)
    return (high < low2 or high2 < low) and rank_sum(before, after) < CHANCE


def rank_sum(sample: Sequence[float], other: Sequence[float]) -> float:
    """The probability of samples that differ so much if both come from the same distribution: the two-sided rank-sum test,
    ties at their mean rank, by the normal approximation."""
    values = np.concatenate([sample, other])
    n, m = len(sample), len(other)
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    size = n + m
    variance = n * m / 12 * (size + 1 - float((count**3 - count).sum()) / (size * (size - 1)))
    if variance <= 0:
        return 1.0
    return erfc(abs(float(ranks[:n].sum()) - n * (size + 1) / 2) / sqrt(2 * variance))
