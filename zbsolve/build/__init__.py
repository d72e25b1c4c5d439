"""Builders: the one place where edges between passes are written. `pipeline` makes the plain step; each of the others takes
a Problem and returns a Problem, so they compose.

Numbers "a stage" are one for all stages, or shape (stages,); numbers "a rank" likewise. Times are whole µs."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .attention_balance import Handing as Handing
    from .attention_costs import AttentionExchange as AttentionExchange
    from .attention_exchange import with_attention_exchange as with_attention_exchange
    from .joined import with_fused_backward as with_fused_backward
    from .joined import with_joined as with_joined
    from .links import with_cards as with_cards
    from .links import with_links as with_links
    from .links import without_links as without_links
    from .mixing import mixed as mixed
    from .offload import Host as Host
    from .offload import with_offload as with_offload
    from .plain import pipeline as pipeline
    from .plain import with_all_to_all as with_all_to_all
    from .recompute import with_recompute as with_recompute
    from .restage import restaged as restaged
    from .sharded import with_sharding as with_sharding
    from .sides import SideInput as SideInput
    from .sides import with_side_inputs as with_side_inputs
    from .slices import with_slices as with_slices
    from .untrained import without_backward as without_backward
    from .updates import with_exchange as with_exchange
    from .updates import with_updates as with_updates
    from .vocabulary import Vocabulary as Vocabulary
    from .vocabulary import with_vocabulary as with_vocabulary
    from .work import Work as Work
    from .work import with_work as with_work

__getattr__, __dir__ = handing_on(__name__)
