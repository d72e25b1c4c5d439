"""Layers → stages: cuts by dynamic programming, named partitions, submeshes, files."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .by_name import Partitioned as Partitioned
    from .by_name import named_partitions as named_partitions
    from .by_name import partition_by_name as partition_by_name
    from .by_name import partitioned as partitioned
    from .cuts import balanced as balanced
    from .cuts import balanced_ranks as balanced_ranks
    from .cuts import equal as equal
    from .cuts import even as even
    from .file import Partition as Partition
    from .file import parse_partition as parse_partition
    from .meshes import mesh_partitions as mesh_partitions
    from .meshes import on_devices as on_devices
    from .stage_costs import StageCosts as StageCosts
    from .stage_costs import least_step as least_step
    from .stage_memory import StageMemory as StageMemory

__getattr__, __dir__ = handing_on(__name__)
