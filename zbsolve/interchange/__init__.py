"""Other engines: one file each, for what is written for it and read from it."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .torch_csv import TorchOrder as TorchOrder
    from .torch_csv import torch_order as torch_order

__getattr__, __dir__ = handing_on(
    __name__,
    {
        "torch_csv": "TorchOrder torch_order",
    },
)
