"""The columns of costs: numbers, or arrays over a table of layouts, in whole µs and bytes.

Bounds read these, and know no feature of a step: what a feature costs is in columns for passes of a rank, for a part of a
microbatch, for copies, and for exchanges. A feature's own file computes its columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...partition.layer import Layer, SliceExtra
from ...problem.tables import Bools, Ints
from ..layout import Many
from .layer_formulas import WEIGHT_BYTES, Held, Times, whole

KINDS = ("F", "B", "W", "BW", "attention_F", "attention_B")


class LayerCosts(NamedTuple):
    """Costs of a layer for one microbatch on one device, in whole µs and bytes. Fields have the names and meanings of a
    `Layer`; each is a number, or a column over a table of layouts. attention_F, attention_B, kv_bytes: 0 where microbatches
    are whole. extra_F, extra_B, extra_W: µs of each of its `parts` beyond its share."""

    F: Many
    B: Many
    W: Many
    BW: Many
    held_until_B: Many
    held_until_W: Many
    held_from_B: Many
    transient: Many
    parameter_bytes: Many
    output_bytes: Many
    output_kept: Many = 0
    input_unneeded: Many = 0
    attention_F: Many = 0.0
    attention_B: Many = 0.0
    kv_bytes: Many = 0
    extra_F: Many = 0
    extra_B: Many = 0
    extra_W: Many = 0
    parts: Many = 1

    @classmethod
    def of(cls, times: Times, held: Held, parameters: Many, sent: Many) -> LayerCosts:
        """The costs in whole µs and bytes. parameters: their number; sent: bytes of the output."""
        F, B, W = whole(times)
        sizes = [np.ceil(size) for size in (*held, WEIGHT_BYTES * parameters, sent)]
        return cls(F, B, W, B + W, *sizes)

    @property
    def least(self) -> Times:
        """Lower bounds, µs, on F, B and W for split and fused backwards: B is at most that of either, B + W the whole."""
        split = np.asarray(self.B) + self.W > 0
        B = np.where(split, np.minimum(self.B, self.BW), self.BW)
        return Times(np.asarray(self.F), B, np.minimum(self.W, self.BW - B))

    @property
    def all_parts(self) -> Times:
        """`least`, with what the parts of a microbatch take beyond their shares."""
        return Times(*(least + self.parts * more for least, more in zip(self.least, self.extra, strict=True)))

    @property
    def kept(self) -> Many:
        """Bytes kept between F and B."""
        return self.held_until_B + self.held_until_W

    @property
    def extra(self) -> Times:
        """µs of each part of a microbatch beyond its share."""
        return Times(self.extra_F, self.extra_B, self.extra_W)

    def layer(self, name: str) -> Layer:
        """The `Layer` with these costs, where the fields are numbers."""
        fields = (field for field in self._fields if not field.startswith("extra_") and field != "parts")
        values = ((field, getattr(self, field)) for field in fields)
        known: dict[str, Any] = {field: float(value) if field in KINDS else int(value) for field, value in values}
        F, B, W = ((float(more), 0.0) for more in self.extra)
        extra = SliceExtra(int(self.parts), F, B, W, (B[0] + W[0], 0.0)) if self.parts > 1 else None
        return Layer(name, **known, slice_extra=extra)


class Common(NamedTuple):
    """What every rank has beside its stages: passes S, which backwards wait for, and T, of each microbatch; zeros where it
    has nothing. S, T: of a microbatch, all parts. gap: the least µs of a part from the last block's forward to its backward:
    collectives and S. lookup: µs of a part's collectives before the first stage's F, and of those behind its B. states:
    bytes of parameters with gradients and optimizer states, rounded down; transient: bytes that a pass takes while it runs;
    held: bytes while the first microbatch's last S runs; pending: of a microbatch, that S leaves for T, rounded down."""

    S: Many
    T: Many
    gap: Many
    lookup: Many
    states: Many
    transient: Many
    held: Many
    pending: Many


class ModelCosts(NamedTuple):
    """Costs of all layers. first: embedding; last: head; states: bytes of states for each byte of a rank's parameters;
    shared: bytes of the parameter that first and last layer share, 0: none. on_stages: 1, or 0 where the work of first and
    last layer is in `common`, on every rank; then common_bytes are those of a rank's common parameters, and rest_kept those
    that the rest of the last layer keeps from F to B."""

    first: LayerCosts
    block: LayerCosts
    last: LayerCosts
    states: Many
    shared: Many
    on_stages: Many
    common: Common
    common_bytes: Many
    rest_kept: Many


class Part(NamedTuple):
    """Lower bounds for a part of a microbatch, whole µs. F, B: of a block, embedding: of its F, for every part; sent: of its
    message. chain: of the last part, which takes longest, through all layers and back; late_F, late_B: of its F and B of a
    block. Where microbatches are whole these are the times of the passes."""

    F: Many
    B: Many
    embedding: Many
    sent: Many
    chain: Many
    late_F: Many
    late_B: Many


class Kept(NamedTuple):
    """Lower bounds on bytes of one microbatch. moment: of a block, that its rank holds at one moment; stays: of a block, on
    the device from F to B (where only some stages copy: in a stage that does not). head_moment, head_stays: the same for the
    head. copied: of a block whose stage copies all, 0: none does. pending: of a block, from B to W."""

    moment: Many
    stays: Many
    head_moment: Many
    head_stays: Many
    copied: Many
    pending: Many


class Copies(NamedTuple):
    """Copies of one microbatch to the host and back, whole µs. some: whether only some stages of a rank copy. out, back:
    lower bounds for a block whose stage copies; chain: a lower bound between the last stage's F and B; most: an upper bound
    on all copies one after the other, 0 where there are none."""

    some: Many
    out: Many
    back: Many
    chain: Many
    most: Many


class Exchanges(NamedTuple):
    """The exchange of gradients and parameters over replicas, whole µs. block: of a block's share of its stage's C or RS,
    rounded down, as is table: of the embedding's and of the head's, 0 where these are not on stages. least: a lower bound on
    the C or RS of any stage with passes that take time, and of what all ranks have. last: a lower bound on what follows the
    first stage's last B. most: an upper bound on all exchanges one after the other. before, table_before: of a block's share
    of its stage's AG, and of the embedding's and of the head's, before its first F; 0 where there are none."""

    block: Many
    table: Many
    least: Many
    last: Many
    most: Many
    before: Many
    table_before: Many


class Costs(NamedTuple):
    """Costs with one column for each field and one row for each layout. blocks: the number of blocks of the model.

    block, embedding, head: µs of passes; 0 for embedding and head where their work is in `common`. sent: µs of a message.
    states: bytes of a block's parameters with gradients and optimizer states, rounded down; table_states: the same for the
    embedding, and for the head. tied: whether these share one table. kept: bytes of a microbatch that a block and the head
    keep from F to B. transient: bytes that a pass takes while it runs; waiting: bytes of messages at an end of a stage.
    common: of every rank beside its stages. parts: of each microbatch, whose passes and messages count all parts; part: the
    least costs of one. copies: to and from host memory. exchange: over replicas, at the ends of the step. from_F, from_B:
    bytes that a block also holds from its stage's first F, and from its first B, if `states` does not count them. away: the
    most bytes of activations that a rank may have in host memory.
    """

    blocks: int
    block: Times
    embedding: Times
    head: Times
    sent: Ints
    states: Ints
    table_states: Ints
    tied: bool
    kept: Kept
    transient: Ints
    waiting: Ints
    common: Common
    parts: Ints
    part: Part
    copies: Copies
    exchange: Exchanges
    from_F: Ints
    from_B: Ints
    away: Ints

    @property
    def stays(self) -> Bools:
        """[layout]: whether all that stages keep stays on devices."""
        return np.asarray(self.copies.most) == 0

    @property
    def share_away(self) -> Any:
        """[layout]: the share of activations that is copied to host memory: all, or half where some copy, or each a part."""
        return np.where(self.stays, 0.0, np.where(self.copies.some | (self.kept.stays > 0), 0.5, 1.0))
