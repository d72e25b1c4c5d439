"""Keys and values that slices leave on a stage for later slices, and their gradients (SlimPipe, arXiv 2504.14519)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...models.losses import exact
from ...models.slicing import AttentionRule, running_slice
from ...util.errors import BadInput
from ..base.torch_private import saving_hooked
from .attention import Chunk, attend

RUNS_AGAIN = "slices: a layer runs again in the backward (a checkpoint): recompute by the schedule instead"


@dataclass(frozen=True, slots=True)
class SliceRun:
    """A forward of slice `number` of a microbatch. offset: its first token's position. calls: the attention calls so far."""

    store: SliceStore
    microbatch: int
    number: int
    offset: int
    calls: list[None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See `Slicing`."""
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
        chunks = self.store.chunks(self.microbatch, len(self.calls))
        self.calls.append(None)
        if self.number and self.number - 1 not in chunks:
            where = f"slice {self.number} of microbatch {self.microbatch}"
            raise BadInput(f"slices: {where} runs, but slice {self.number - 1} has not run, or is gone")
        if self.number in chunks:  # recomputed: the same values, in memory that the layer holds anyway
            chunks[self.number].key, chunks[self.number].value = _kept(key), _kept(value)
        else:
            chunks[self.number] = Chunk(self.offset, _kept(key), _kept(value), rule.documents)
        y = attend(query, key, value, chunks, self.number, rule, lambda: self.store.helper)
        if not torch.is_grad_enabled() and rule.window is not None:  # without a backward, drop keys that no later slice sees
            first = chunks[self.number].end - rule.window + 1
            for number in [i for i, chunk in chunks.items() if chunk.end <= first and i != self.number]:
                del chunks[number]
        return y


class _Backward:
    """A backward that runs. No layer may run forward in it: its keys would be taken for another slice's. Raises BadInput."""

    @property
    def offset(self) -> int:
        raise BadInput(RUNS_AGAIN)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        raise BadInput(RUNS_AGAIN)


class SliceStore:
    """What one stage holds for microbatches in `count` slices each. Each F of a slice runs in `forward`, in the order of
    slices; an X too, at any time before its backward. Each backward runs in `backward`, the last slice first. Passes of
    other microbatches may come in between. A slice's keys are held until its own backward has run, their gradients (in
    float32 or float64) from the microbatch's first backward on. Forwards without gradients hold nothing after the last
    slice. helper: an `exec.attention.Helping`, if another rank computes attention for the current pass."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.helper: Any = None
        self._calls: int | None = None
        self._held: dict[tuple[int, int], dict[int, Chunk]] = {}

    def chunks(self, microbatch: int, call: int) -> dict[int, Chunk]:
        """Slice → its chunk at this call of attention. The mapping may be changed."""
        return self._held.setdefault((microbatch, call), {})

    @contextmanager
    def forward(self, microbatch: int, number: int, offset: int) -> Iterator[None]:
        """Run the forward of a slice inside, or recompute it. offset: the position of its first token. Raises BadInput
        where the slice before has not run, and where slices call attention a different number of times."""
        run = SliceRun(self, microbatch, number, offset, [])
        with running_slice(run):
            yield
        if self._calls is None:
            self._calls = len(run.calls)
        if len(run.calls) != self._calls:
            raise BadInput(
                f"slices: slice {number} of microbatch {microbatch} calls sliced_attention {len(run.calls)} times, "
                f"another called it {self._calls} times"
            )
        if not torch.is_grad_enabled() and number == self.count - 1:
            self.drop(microbatch)

    @contextmanager
    def backward(self, microbatch: int, number: int) -> Iterator[None]:
        """Run the backward of a slice inside (B, or BW); it frees the slice's keys. It must go through the layers even where
        the given gradient is 0, since the gradients of later slices enter there. Raises BadInput where it did not, and where
        the backward of a later slice has not run."""
        held = [chunks for (m, _), chunks in self._held.items() if m == microbatch]
        if any(other > number for chunks in held for other in chunks):
            raise BadInput(f"slices: the backward of slice {number} of microbatch {microbatch} runs before a later one's")
        with running_slice(_Backward()):
            yield
        left = [chunk for chunks in held if (chunk := chunks.pop(number, None)) is not None]
        if number == 0:
            self.drop(microbatch)
        if any(chunk.gradients for chunk in left):
            raise BadInput(f"slices: gradients of slice {number} of microbatch {microbatch} were not taken by its backward")

    def drop(self, microbatch: int) -> None:
        """Drop a microbatch, such as one whose step failed."""
        for key in [k for k in self._held if k[0] == microbatch]:
            del self._held[key]


def _kept(tensor: Tensor) -> Tensor:
    """The tensor without a graph. If recompute or offload frees the larger storage that it is part of, a copy."""
    plain = tensor.detach()
    part = plain.untyped_storage().nbytes() > plain.numel() * plain.element_size()
    return plain.clone() if part and saving_hooked() else plain


def gradient_bytes(key: Tensor) -> int:
    """Bytes of the gradient of such keys or values, in the dtype of its sum."""
    return key.numel() * exact(key.dtype).itemsize
