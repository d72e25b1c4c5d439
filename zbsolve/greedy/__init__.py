"""Schedules without proofs: the list scheduler and its annealed policies, building blocks and what is annealed from them."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .arrays.microbatch import MicrobatchGraph as MicrobatchGraph
    from .arrays.microbatch import microbatch_graph as microbatch_graph
    from .arrays.problem_arrays import ProblemArrays as ProblemArrays
    from .arrays.problem_arrays import arrays_of as arrays_of
    from .blocks.block_search import block_schedules as block_schedules
    from .blocks.building_block import BuildingBlock as BuildingBlock
    from .decoding import Decoded as Decoded
    from .decoding import DecodeRule as DecodeRule
    from .decoding import decode as decode
    from .decoding import to_schedule as to_schedule
    from .lists.list_scheduler import Policy as Policy
    from .lists.list_scheduler import deepest_first as deepest_first
    from .lists.list_scheduler import list_schedule as list_schedule
    from .lists.list_scheduler import schedule_by_start as schedule_by_start
    from .lists.policy_annealing import improve_policies as improve_policies
    from .lists.policy_annealing import starting_policies as starting_policies
    from .side_stream import with_side_streams as with_side_streams
    from .side_stream import without_side_streams as without_side_streams

# Numba is loaded with the first use of a name that needs it.
__getattr__, __dir__ = handing_on(__name__)
