"""The input of a step: each rank's microbatches, and a number for each of their shapes."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..util.errors import BadInput
from .base.part import shares_of_rows
from .base.values import PLAIN_TYPES, each_tensor, in_parts, leaves_of, tensors_of
from .transport.format import Format
from .transport.mailbox import Mailbox
from .transport.peers import Peers
from .transport.wires import STEP

Batch = Any  # a pytree of tensors, a list of microbatches, or a mapping from microbatches to them


def split_batch(
    batch: Batch,
    what: str,
    needed: Sequence[int],
    microbatches: Sequence[int],
    device: torch.device,
    rows: Sequence[int] | None = (),
) -> dict[int, Any]:
    """Microbatch → its tensors on `device`, for those that are `needed`.

    batch: a list of microbatches (or a tuple of as many similar tensors), a mapping from their numbers, or one batch: a
    pytree (a tensor, a tuple, a dict) whose tensors are split along dimension 0. rows: of each microbatch, in proportion;
    None: they may differ by one row; (): they are equal. Raises BadInput naming `what`.
    """
    count = len(microbatches)
    if not needed:
        return {}
    if batch is None:
        raise BadInput(f"{what}: needed here for microbatch {needed[0]}")
    if not in_microbatches(batch, count):
        batch = cut(batch, what, count, rows)
    if not isinstance(batch, Mapping):
        if len(batch) != count:
            raise BadInput(f"{what}: {len(batch)} microbatches, {count} are needed")
        batch = dict(zip(microbatches, batch, strict=True))
    missing = [m for m in needed if m not in batch]
    if missing:
        raise BadInput(f"{what}: microbatch {missing[0]} is needed here")
    if rows and len({first_tensor(batch[m]).shape[:1].numel() / rows[m] for m in needed}) > 1:
        counts = ", ".join(f"{first_tensor(batch[m]).shape[:1].numel()} of {rows[m]}" for m in needed)
        raise BadInput(f"{what}: the microbatches needed here have other rows than the schedule's sizes: {counts}")
    return {m: moved(batch[m], device) for m in needed}


def moved(value: Any, device: torch.device) -> Any:
    """A pytree with its tensors on `device`."""
    return each_tensor(value, lambda tensor: tensor if tensor.device == device else tensor.to(device))


def in_microbatches(batch: Batch, count: int | None = None) -> bool:
    """Is the batch already in microbatches? A list is, and so is a tuple of tensors with the same dtype and number of
    dimensions, as `tensor.chunk(4)` gives; it must have `count` of them, if given."""
    if isinstance(batch, tuple):
        tensors = [tensor for tensor in batch if isinstance(tensor, Tensor)]
        alike = len(batch) == len(tensors) and len({(tensor.dtype, tensor.dim()) for tensor in tensors}) == 1
        return alike and count in (None, len(batch))
    return isinstance(batch, list) or (isinstance(batch, Mapping) and all(isinstance(key, int) for key in batch))


def cut(batch: Any, what: str, count: int, rows: Sequence[int] | None) -> list[Any]:
    """The batch in `count` parts along dimension 0 of its tensors; other leaves are in every part. A part without rows gets
    the first row instead, which does not count (see `shares_of`). rows: see `split_batch`. Raises BadInput naming `what`."""
    return in_parts(batch, count, lambda leaf: _cut_leaf(leaf, what, count, rows))


def _cut_leaf(leaf: Tensor, what: str, count: int, rows: Sequence[int] | None) -> Sequence[Tensor]:
    if not leaf.dim() or not len(leaf):
        raise BadInput(f"{what}: {tuple(leaf.shape)} has no rows")
    if rows:
        if len(leaf) % sum(rows):
            raise BadInput(f"{what}: {tuple(leaf.shape)} does not make microbatches of {','.join(map(str, rows))} rows")
        return leaf.tensor_split([len(leaf) // sum(rows) * end for end in accumulate(rows)][:-1])
    if len(leaf) % count and rows is not None:
        raise BadInput(
            f"{what}: {tuple(leaf.shape)} does not split into {count} microbatches of equal size: pass uneven=True, or "
            "a list of microbatches, or leave such a batch out (drop_last=True of a DataLoader)"
        )
    return [part if len(part) else leaf[:1] for part in leaf.tensor_split(count)]


def shares_of(targets: Batch, needed: Sequence[int], count: int) -> dict[int, float]:
    """Microbatch → its number of rows divided by the mean number, so that every row has the same weight; {} if all are equal
    or none is `needed`. Raises BadInput where rows are not known."""
    if not needed or targets is None:
        return {}
    if not in_microbatches(targets, count):
        rows = [len(part) for part in first_tensor(targets).tensor_split(count)]
    elif len(targets) == count:
        rows = [len(first_tensor(targets[m])) for m in range(count)]
    else:
        raise BadInput(f"targets: {len(targets)} microbatches: uneven=True needs the rows of all {count}")
    return shares_of_rows(rows)


def agreed_shares(shares: Mapping[int, float], count: int, peers: Peers) -> dict[int, float]:
    """The shares on all ranks, from those that know them (others give {}): layers of any rank may add to the loss. All ranks
    call this. Raises LostRank."""
    own = torch.tensor([shares.get(m, 0.0) for m in range(count)], dtype=torch.float64)
    known: list[float] = peers.gathered(own, "shares of microbatches").amax(0).tolist()
    return dict(enumerate(known)) if any(known) else {}


def first_tensor(value: Any) -> Tensor:
    """The tensor whose rows are those of a batch. Raises BadInput."""
    tensor = next((leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)), None)
    if tensor is None:
        raise BadInput("a batch without a tensor has no rows")
    return tensor


NOT_COMPARED = (0, 0)  # in place of checksums
REFUSED = -1  # in place of a shape's number: the route's first rank refuses its batch


class ShapeNumbers:
    """Numbers for shapes of inputs. The first rank of a route of microbatches assigns them and sends them along the route,
    or sends that it refuses its batch. An input has another number under autocast, as layers then pass on other dtypes, and
    if other parameters of the first rank are trained, as other tensors then need gradients. routes: see `Problem.routes`.
    rank, size: of the pipeline's process group. compared: in how many steps the ranks of a route also compare their batches.
    """

    def __init__(
        self, routes: Sequence[Sequence[int]], microbatches: Sequence[int], rank: int, size: int, compared: int = 0
    ) -> None:
        chains = [(list(dict.fromkeys(route)), microbatches[i :: len(routes)]) for i, route in enumerate(routes)]
        here = [(STEP + i, *chain) for i, chain in enumerate(chains) if rank in chain[0]]
        self._routes = sorted(here, key=lambda entry: entry[1][0] != rank)  # first those where this rank need not wait
        self._rank, self._size, self.compared = rank, size, compared
        self._numbers: dict[Any, int] = {}
        self._before: dict[int, tuple[list[Any], Tensor]] = {}

    def agree(
        self, mailbox: Mailbox, inputs: Mapping[int, Any] | None, device: torch.device, given: Sequence[int] = NOT_COMPARED
    ) -> dict[int, int]:
        """Microbatch → the number of its input's shape, for microbatches that pass this rank; `REFUSED` if their first rank
        refuses its batch. inputs: None where this rank refuses its batch. given: the `checksum` of its inputs and of its
        targets; warns where one differs from the first rank's. Raises LostRank."""
        numbers: dict[int, int] = {}
        kind = device.type  # without autocast, outputs have their inputs' dtype
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        more = list(given) if self.compared else []
        self.compared -= bool(more)
        for tag, chain, passing in self._routes:
            place = chain.index(self._rank)
            if place:
                row = torch.empty(len(passing) + len(more), dtype=torch.int64)
                mailbox.ask(row, chain[place - 1], tag)
                self._compare(given, row[len(passing) :].tolist(), chain[0])
            elif inputs is None:
                row = torch.tensor([REFUSED] * len(passing) + more)
            else:
                now = autocast, tuple(mailbox.trained().values())
                row = self._say(tag, [(Format.of(inputs[m]), now) for m in passing])
                row = torch.cat([row, torch.tensor(more)]) if more else row
            if place < len(chain) - 1:
                mailbox.tell(row, chain[place + 1], tag)
            numbers |= zip(passing, row.tolist(), strict=False)
        return numbers

    def _compare(self, given: Sequence[int], first: Sequence[int], rank: int) -> None:
        for what, own, other in zip(("inputs", "targets"), given, first, strict=False):
            if own and other and own != other:
                text = f"rank {self._rank} was given other {what} than rank {rank}, so its batch may be another one"
                warnings.warn(f"{text}: give loaders one seed on all ranks, or None where {what} are not read", stacklevel=2)
                return

    def _say(self, tag: int, signs: list[Any]) -> Tensor:
        """Numbers that no other rank assigns; most often the same as in the step before."""
        before = self._before.get(tag)
        if before is None or before[0] != signs:
            numbers = [self._numbers.setdefault(sign, len(self._numbers) * self._size + self._rank) for sign in signs]
            before = self._before[tag] = signs, torch.tensor(numbers)
        return before[1]


def checksum(batch: Batch | None, count: int) -> int:
    """A checksum of a whole batch, the same for each form in which it is given; 0 without a batch, and for a mapping with
    fewer than `count` microbatches."""
    if batch is None or (isinstance(batch, Mapping) and in_microbatches(batch) and len(batch) < count):
        return 0
    crc = 1
    for tensor in tensors_of(batch):
        if type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_conj():
            row = tensor.detach().cpu().flatten().contiguous().view(torch.uint8)
            crc = zlib.crc32(row.numpy().tobytes(), crc)
    return crc


def step_seed(seed: int, step: int) -> int:
    """The seed of one step; microbatch m draws from this + m."""
    return (seed * 7_919 + step) * 65_537
