"""Schedules without proofs: the list scheduler and its annealed policies, building blocks and what is annealed from them."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .block_search import block_schedules as block_schedules
    from .building_block import BuildingBlock as BuildingBlock
    from .decoding import Decoded as Decoded
    from .decoding import DecodeRule as DecodeRule
    from .decoding import decode as decode
    from .decoding import to_schedule as to_schedule
    from .list_scheduler import Policy as Policy
    from .list_scheduler import deepest_first as deepest_first
    from .list_scheduler import list_schedule as list_schedule
    from .list_scheduler import schedule_by_start as schedule_by_start
    from .microbatch import MicrobatchGraph as MicrobatchGraph
    from .microbatch import microbatch_graph as microbatch_graph
    from .policy_annealing import improve_policies as improve_policies
    from .policy_annealing import starting_policies as starting_policies
    from .problem_arrays import ProblemArrays as ProblemArrays
    from .problem_arrays import arrays_of as arrays_of
    from .side_stream import with_side_streams as with_side_streams
    from .side_stream import without_side_streams as without_side_streams

# Numba is loaded with the first use of a name that needs it.
__getattr__, __dir__ = handing_on(
    __name__,
    {
        "block_search": "block_schedules",
        "building_block": "BuildingBlock",
        "decoding": "Decoded DecodeRule decode to_schedule",
        "list_scheduler": "Policy deepest_first list_schedule schedule_by_start",
        "microbatch": "MicrobatchGraph microbatch_graph",
        "policy_annealing": "improve_policies starting_policies",
        "problem_arrays": "ProblemArrays arrays_of",
        "side_stream": "with_side_streams without_side_streams",
    },
)
