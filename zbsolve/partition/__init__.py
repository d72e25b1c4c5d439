"""Partitions of layers into stages: cuts by dynamic programming, named partitions, submeshes, files."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .file import Partition as Partition
    from .file import mesh_partitions as mesh_partitions

__getattr__, __dir__ = handing_on(__name__)
