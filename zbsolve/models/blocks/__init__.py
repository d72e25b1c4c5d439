"""Building blocks of published decoders: their sizes, attention, experts, the block around them, and a model's two ends."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .decoder import Decoder as Decoder
    from .decoder import Scores as Scores
    from .decoder import Tokens as Tokens
    from .experts import Experts as Experts
    from .sizes import BlockSizes as BlockSizes
    from .sizes import LatentSizes as LatentSizes
    from .sizes import Routing as Routing

__getattr__, __dir__ = handing_on(__name__)
