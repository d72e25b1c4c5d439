"""The format of a message, on which sender and receiver agree: the structure of a pytree, its constants and its tensors.

One message is one tensor on the wire: the tensor itself, or all tensors as bytes in one row. A message without tensors is
one byte, so that the pass that takes it still waits for the pass that makes it. Of a DTensor each coordinate sends its local
tensor; the receiving coordinate rebuilds the DTensor on its own submesh.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...util.errors import BadInput
from ..base.torch_private import TreeSpec, tree_flatten, tree_unflatten, treespec_dumps, treespec_loads
from ..base.values import PLAIN_TYPES, Layout, is_dtensor, local, tensors_of
from .wires import BYTES, CPU, Wires, losing

ALIGNMENT = 16  # bytes: a tensor of any dtype may begin there
FORMAT_BYTES = 1 << 14  # of a format as text, padded with blanks
PLAIN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # dtypes that backends send


@dataclass(frozen=True)
class TensorFormat:
    """One tensor of a message. trained: it requires a gradient, so a gradient comes back. layout: of the DTensor whose local
    tensor it is; None: a plain tensor."""

    shape: torch.Size
    dtype: torch.dtype
    trained: bool
    layout: Layout | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The strides of a contiguous tensor of this shape."""
        return torch.empty(self.shape, device="meta").stride()

    @cached_property
    def gradient(self) -> TensorFormat:
        """The format of its gradient."""
        return TensorFormat(self.shape, self.dtype, False, self.layout and self.layout.gradient)

    def dumped(self, mesh: DeviceMesh | None) -> list[Any]:
        """As plain values: sizes, dtype, whether it is trained, layout. Raises BadInput."""
        laid_out = self.layout and _layout_dumped(self.layout, mesh)
        return [*self.shape, str(self.dtype).removeprefix("torch."), self.trained, laid_out]

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype}{self.layout or ''}"


@dataclass(frozen=True)
class Format:
    """The format of a message. structure: of the pytree, as JSON (None: a single tensor). leaves: for each leaf the format
    of its tensor, or a plain value."""

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
        """The format of the gradients that come back: one for each tensor that requires a gradient."""
        trained = [leaf.gradient for leaf in self.tensors if leaf.trained]
        return Format(_dumped(tree_flatten(tuple(trained))[1]), tuple(trained))

    def lacks(self, other: Format) -> bool:
        """Is it `other` with some tensors missing?"""
        pairs = zip(self.leaves, other.leaves, strict=False)
        return self.structure == other.structure and all(a is None or a == b for a, b in pairs)

    def only(self, there: Sequence[int]) -> Format:
        """The format without missing tensors. there: for each leaf, whether it is present."""
        return Format(self.structure, tuple(leaf if some else None for leaf, some in zip(self.leaves, there, strict=True)))

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
        """The message's only tensor, if that can go over the wire as it is; else None."""
        first = self.tensors[0] if len(self.tensors) == 1 else None
        return first if first is not None and first.dtype in PLAIN and first.nbytes else None

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first byte of each tensor in the row of bytes, and the length of the row."""
        ends = [0]
        for leaf in self.tensors:
            ends.append(ends[-1] + -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT)
        return tuple(ends)

    def buffer(self, device: torch.device) -> Tensor:
        """Memory to receive a message of this format into."""
        if self.alone is not None:  # `empty_strided` takes half as long as `empty`
            return torch.empty_strided(self.alone.shape, self.alone.strides, dtype=self.alone.dtype, device=device)
        return torch.empty(max(self.offsets[-1], 1), dtype=torch.uint8, device=device)

    def pack(self, value: Any, device: torch.device) -> Tensor:
        """The tensor to send for `value`, which has this format."""
        tensors = [local(tensor) for tensor in tensors_of(value)]
        if self.alone is not None:
            return tensors[0].detach().contiguous()
        row = self.buffer(device)
        for at, leaf, tensor in zip(self.offsets, self.tensors, tensors, strict=False):
            _part(row, at, leaf).copy_(tensor.detach())
        return row

    def completed(self, value: Iterable[Tensor | None], device: torch.device) -> list[Tensor]:
        """Gradients, with zeros in place of those that are None in `value`."""
        pairs = zip(value, self.tensors, strict=True)
        return [torch.zeros(f.shape, dtype=f.dtype, device=device) if given is None else given for given, f in pairs]

    def unpack(self, row: Tensor) -> Any:
        """The value that `pack` packed. Its tensors require gradients as before. Each has memory of its own, so that a
        tensor that is kept does not keep the whole row."""
        if self.alone is not None:
            return self.filled((_whole(row, self.alone),))
        parts = zip(self.offsets, self.tensors, strict=False)
        return self.filled([_whole(_part(row, at, leaf).clone(), leaf) for at, leaf in parts])

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """The pytree of this format with these tensors, in order."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorFormat) else leaf for leaf in self.leaves]
        return leaves[0] if self.structure is None else tree_unflatten(leaves, self.spec)

    @cached_property
    def spec(self) -> TreeSpec:
        """The structure, as torch's pytree functions take it."""
        return treespec_loads(self.structure or "")

    def text(self, mesh: DeviceMesh | None = None) -> bytes:
        """As JSON. mesh: the pipeline's. Raises BadInput for a DTensor that cannot be rebuilt at the other end."""
        leaves = [leaf.dumped(mesh) if isinstance(leaf, TensorFormat) else {"is": leaf} for leaf in self.leaves]
        return json.dumps([self.structure, leaves]).encode()

    def dumps(self, mesh: DeviceMesh | None = None) -> bytes:
        """The text, padded to `FORMAT_BYTES`. Raises BadInput, also where it is longer."""
        text = self.text(mesh)
        if len(text) > FORMAT_BYTES:
            raise BadInput(f"{len(self.leaves)} leaves are more than a message can have")
        return text.ljust(FORMAT_BYTES)

    @classmethod
    def loads(cls, text: bytes, mesh: DeviceMesh | None = None) -> Format:
        """Read what `text` or `dumps` wrote, on a rank at another place of the mesh."""
        structure, leaves = json.loads(text)
        return cls(structure, tuple(leaf["is"] if isinstance(leaf, dict) else _loaded(leaf, mesh) for leaf in leaves))

    def __str__(self) -> str:
        words = [str(leaf) if isinstance(leaf, TensorFormat) else repr(leaf) for leaf in self.leaves]
        return words[0] if self.structure is None else _shown(tree_unflatten(words, self.spec))


def send_value(wires: Wires, value: Any, destination: int, mesh: DeviceMesh | None = None) -> None:
    """Send a pytree outside of a step, through host memory. mesh: the pipeline's. Raises BadInput, LostRank."""
    for work, _ in begin_value(wires, value, destination, mesh):
        wires.wait(work, destination)


def begin_value(
    wires: Wires, value: Any, destination: int, mesh: DeviceMesh | None = None, tag: int = BYTES
) -> list[tuple[Any, Tensor]]:
    """Start sending. Returns (work handle, memory to keep until it is done) for each part."""
    form = Format.of(value)
    text = torch.frombuffer(bytearray(form.text(mesh)), dtype=torch.uint8)
    rows = [torch.tensor([len(text)]), text, *([form.pack(value, CPU).cpu()] if form.tensors else [])]
    with losing(destination):
        return [(wires.control.send([row], destination, tag), row) for row in rows]


def receive_value(
    wires: Wires,
    source: int,
    device: torch.device = CPU,
    mesh: DeviceMesh | None = None,
    tag: int = BYTES,
    timeout: timedelta | None = None,
) -> Any:
    """What `send_value` sent, on `device`. Raises LostRank."""

    def received(row: Tensor) -> Tensor:
        with losing(source):
            work = wires.control.recv([row], source, tag)
        wires.wait(work, source, timeout)
        return row

    text = received(torch.empty(int(received(torch.zeros(1, dtype=torch.int64))), dtype=torch.uint8))
    form = Format.loads(text.numpy().tobytes(), mesh)
    row = form.buffer(CPU)
    return form.unpack((received(row) if form.tensors else row).to(device))


def _shown(value: Any) -> str:
    """A pytree of words as text, with the keys of its dicts."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_shown(part)}" for name, part in value.items()) + "}"
    return f"({', '.join(map(_shown, value))})" if isinstance(value, list | tuple) else str(value)


def _tensor_format(tensor: Tensor) -> TensorFormat:
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "sparse"
        raise BadInput(f"makes a {kind} tensor, which cannot be sent: hand on a dense one, or the tensors in it")
    if type(tensor) in PLAIN_TYPES or not is_dtensor(tensor):
        return TensorFormat(tensor.shape, tensor.dtype, tensor.requires_grad)
    return TensorFormat(local(tensor).shape, tensor.dtype, tensor.requires_grad, Layout.of(tensor))


def _whole(part: Tensor, leaf: TensorFormat) -> Tensor:
    """The received tensor, or the DTensor of which it is this rank's local part."""
    return (part if leaf.layout is None else leaf.layout.whole(part)).requires_grad_(leaf.trained)


def _loaded(leaf: Sequence[Any], mesh: DeviceMesh | None) -> TensorFormat:
    *shape, dtype, trained, laid_out = leaf
    layout = None if laid_out is None else _layout_loaded(laid_out, mesh)
    return TensorFormat(torch.Size(shape), getattr(torch, dtype), trained, layout)


def _part(row: Tensor, at: int, leaf: TensorFormat) -> Tensor:
    return row[at : at + leaf.nbytes].view(leaf.dtype).view(leaf.shape)


def _dumped(spec: TreeSpec) -> str:
    try:
        return treespec_dumps(spec)
    except NotImplementedError as error:
        why = re.split(r" because|\. Please", str(error))[0]
        raise BadInput(f"a structure that cannot be sent: {why}: hand on tuples, lists and dicts") from None


def _layout_dumped(layout: Layout, whole: DeviceMesh | None) -> list[Any]:
    """As plain values. whole: the pipeline's mesh. Raises BadInput where another rank could not rebuild it there."""
    names = tuple(layout.mesh.mesh_dim_names or ())
    if whole is None:
        raise BadInput("makes a DTensor, which only a Pipeline with a mesh can send")
    if not names or _submesh(whole, names) != layout.mesh:
        raise BadInput(f"makes a DTensor on a mesh {names or 'without names'}, which is no submesh of the pipeline's")
    return [list(names), [_words(placement) for placement in layout.placements], list(layout.shape or ())]


def _layout_loaded(values: Sequence[Any], whole: DeviceMesh | None) -> Layout:
    """Read what `_layout_dumped` wrote, on this rank's submesh."""
    names, placements, shape = values
    assert whole is not None
    mesh = _submesh(whole, names)
    assert mesh is not None
    known = _placements()
    return Layout(mesh, tuple(known[name][0](*given) for name, *given in placements), torch.Size(shape))


def _submesh(whole: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    try:
        return whole[tuple(names)]
    except (KeyError, RuntimeError):
        return None


def _placements() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Name of a kind of placement → its class, and the names of its arguments."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return {"shard": (Shard, ("dim",)), "replicate": (Replicate, ()), "partial": (Partial, ("reduce_op",))}


def _words(placement: Any) -> list[Any]:
    """A placement as plain values. Raises BadInput for one of a kind that is not torch's Shard, Replicate or Partial."""
    for name, (kind, fields) in _placements().items():
        if type(placement) is kind:
            return [name, *(getattr(placement, field) for field in fields)]
    raise BadInput(f"makes a DTensor placed as {placement}, which cannot be sent")
