"""Memory that nobody has filled yet is marked, so that it is recognised: by NaN, or a number that no layer begins with."""

from __future__ import annotations

import torch
from torch import Tensor

from .base.dtensors import PLAIN_TYPES, local

BYTE = 0xA5  # every byte of whole numbers and booleans


def mark_unset(tensor: Tensor) -> None:
    """Fill a tensor with what `is_unset` recognises. A tensor of a type of its own (not a DTensor) stays as it is."""
    here = local(tensor.detach())
    if type(here) not in PLAIN_TYPES:
        return
    if here.dtype is torch.bool:
        here.view(torch.uint8).fill_(BYTE)
    elif here.is_floating_point() or here.is_complex():
        here.fill_(float("nan"))
    else:
        here.fill_(_whole(here.dtype))


def is_unset(tensor: Tensor) -> bool:
    """Whether a number of the tensor is still what `mark_unset` wrote. Whole numbers of one byte may be so by chance: there
    all of them must be."""
    here = local(tensor.detach())
    if type(here) not in PLAIN_TYPES or here.is_meta or not here.numel():
        return False
    if here.dtype is torch.bool:
        return bool((here.view(torch.uint8) == BYTE).any())
    if here.is_floating_point() or here.is_complex():
        here = here.to(torch.float32) if here.dtype.itemsize == 1 else here
        return bool(here.isnan().any())
    same = here == _whole(here.dtype)
    return bool(same.all() if here.dtype.itemsize == 1 else same.any())


def _whole(dtype: torch.dtype) -> int:
    return int.from_bytes(bytes([BYTE] * dtype.itemsize), "little", signed=torch.iinfo(dtype).min < 0)
