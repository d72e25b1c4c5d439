"""Messages between ranks, and how ranks tell each other why they stop."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .failure import LostRank as LostRank
    from .failure import RunFailed as RunFailed
    from .mailbox import Mailbox as Mailbox
    from .peers import Peers as Peers
    from .wires import Wires as Wires

__getattr__, __dir__ = handing_on(
    __name__, {"failure": "LostRank RunFailed", "mailbox": "Mailbox", "peers": "Peers", "wires": "Wires"}
)
