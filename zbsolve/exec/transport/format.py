"""What a message looks like, which both of its ends agree on: the structure of a pytree, its constants and its tensors.

One message is one tensor on the wire: the tensor itself, or all of them as bytes in one row. A message without tensors is
one byte, so that the pass that takes it waits for the pass that makes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...util.errors import BadInput
from ..backward.values import tensors_of
from ..torch_private import TreeSpec, tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

ALIGNMENT = 16  # bytes: a tensor of any type may begin there
FORMAT_BYTES = 1 << 14  # of a format as text, with blanks behind it
PLAIN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # what backends send as it is


@dataclass(frozen=True)
class TensorFormat:
    """One tensor of a message. trained: it requires a gradient, so one comes back."""

    shape: torch.Size
    dtype: torch.dtype
    trained: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return self.shape.numel() * self.dtype.itemsize

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Those of a contiguous tensor."""
        return torch.empty(self.shape, device="meta").stride()

    def dumped(self) -> list[Any]:
        """As plain values: the sizes, the type, whether it is trained."""
        return [*self.shape, str(self.dtype).removeprefix("torch."), self.trained]

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Format:
    """What a message looks like. structure: of the pytree, as JSON (None: one tensor). leaves: of each leaf the format of
    its tensor, or a plain value."""

    structure: str | None
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> Format:
        """The format of a pytree of tensors and plain values. Raises BadInput for a structure that cannot be sent."""
        if isinstance(value, Tensor):
            return cls(None, (_tensor_format(value),))
        leaves, spec = tree_flatten(value)
        return cls(_dumped(spec), tuple(_tensor_format(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    @cached_property
    def gradient(self) -> Format:
        """The format of the gradients that come back: one for each tensor that requires one."""
        trained = [TensorFormat(leaf.shape, leaf.dtype, False) for leaf in self.tensors if leaf.trained]
        return Format(_dumped(tree_flatten(tuple(trained))[1]), tuple(trained))

    @cached_property
    def tensors(self) -> tuple[TensorFormat, ...]:
        """The formats of its tensors, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorFormat))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(leaf.nbytes for leaf in self.tensors)

    @cached_property
    def alone(self) -> TensorFormat | None:
        """Its one tensor, where that goes over the wire as it is."""
        first = self.tensors[0] if len(self.tensors) == 1 else None
        return first if first is not None and first.dtype in PLAIN and first.nbytes else None

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins in the row of bytes; and the length of the row."""
        found = [0]
        for leaf in self.tensors:
            found.append(found[-1] + -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT)
        return tuple(found)

    def buffer(self, device: torch.device) -> Tensor:
        """Memory for the tensor that comes over the wire."""
        if self.alone is not None:  # `empty_strided` takes half as long as `empty`
            return torch.empty_strided(self.alone.shape, self.alone.strides, dtype=self.alone.dtype, device=device)
        return torch.empty(max(self.offsets[-1], 1), dtype=torch.uint8, device=device)

    def pack(self, value: Any, device: torch.device) -> Tensor:
        """The tensor that goes over the wire. value: of this format."""
        tensors = tensors_of(value)
        if self.alone is not None:
            return tensors[0].detach().contiguous()
        row = self.buffer(device)
        for at, leaf, tensor in zip(self.offsets, self.tensors, tensors, strict=False):
            _part(row, at, leaf).copy_(tensor.detach())
        return row

    def unpack(self, row: Tensor) -> Any:
        """The value that `pack` packed. Its tensors say whether they require a gradient."""
        if self.alone is not None:
            parts = iter((row,))
        else:
            parts = iter([_part(row, at, leaf) for at, leaf in zip(self.offsets, self.tensors, strict=False)])
        leaves = [
            next(parts).requires_grad_(leaf.trained) if isinstance(leaf, TensorFormat) else leaf for leaf in self.leaves
        ]
        return leaves[0] if self.structure is None else tree_unflatten(leaves, self.spec)

    @cached_property
    def spec(self) -> TreeSpec:
        """The structure, as torch's pytrees know it."""
        found: TreeSpec = treespec_loads(self.structure or "")
        return found

    def dumps(self) -> bytes:
        """As JSON, `FORMAT_BYTES` long. Raises BadInput for more leaves than that can name."""
        leaves = [leaf.dumped() if isinstance(leaf, TensorFormat) else {"is": leaf} for leaf in self.leaves]
        text = json.dumps([self.structure, leaves]).encode()
        if len(text) > FORMAT_BYTES:
            raise BadInput(f"{len(self.leaves)} leaves are more than a message can have")
        return text.ljust(FORMAT_BYTES)

    @classmethod
    def loads(cls, text: bytes) -> Format:
        """What `dumps` gave."""
        structure, leaves = json.loads(text)
        return cls(structure, tuple(leaf["is"] if isinstance(leaf, dict) else _loaded(leaf) for leaf in leaves))

    def __str__(self) -> str:
        words = [str(leaf) if isinstance(leaf, TensorFormat) else repr(leaf) for leaf in self.leaves]
        return words[0] if self.structure is None else f"({', '.join(words)})"


def _tensor_format(tensor: Tensor) -> TensorFormat:
    return TensorFormat(tensor.shape, tensor.dtype, tensor.requires_grad)


def _loaded(leaf: Sequence[Any]) -> TensorFormat:
    *shape, dtype, trained = leaf
    return TensorFormat(torch.Size(shape), getattr(torch, dtype), trained)


def _part(row: Tensor, at: int, leaf: TensorFormat) -> Tensor:
    return row[at : at + leaf.nbytes].view(leaf.dtype).view(leaf.shape)


def _dumped(spec: TreeSpec) -> str:
    try:
        return treespec_dumps(spec)
    except NotImplementedError as error:
        raise BadInput(f"a structure that cannot be sent: {error}") from None
