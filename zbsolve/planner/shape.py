"""`Shape`: the sizes of a decoder-only transformer, and what its blocks compute and keep; and published shapes by name.
`name@sequence=8192,layers=40` is a published shape with changed sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from ..util.errors import BadInput
from ..util.text import did_you_mean
from .layout import FULL, NONE, SELECTIVE

MAX_SIZE = 32  # most sequences in a microbatch
MOVED_WHOLE = 22  # bytes that norms, dropouts and residuals move, per token and hidden unit (see `layer_formulas`)
FLOAT = 4  # bytes of a gradient where it is summed in 32 bits: the most of any engine, so plans for any engine count it


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model whose blocks are equal.

    name: for texts.
    layers: number of blocks.
    hidden: width of the hidden state.
    heads, kv_heads: number of heads of queries, and of keys and values.
    head_width: width of each head.
    inner: inner width of the MLP.
    sequence: tokens in a sequence.
    vocabulary: tokens in the vocabulary.
    gated: True: gate, up and down projections and no dropout (Llama); False: two projections, GELU and dropout (GPT).
    fused: whether attention keeps no scores (FlashAttention, 2205.14135).
    tied: whether embedding and head share their table.
    gradients: bytes of the gradient of one parameter.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    sequence: int
    vocabulary: int
    gated: bool = False
    fused: bool = False
    tied: bool = False
    gradients: int = FLOAT

    source: ClassVar[str] = "cost model"  # where the costs of its layers come from
    left_out: ClassVar[str] = ""  # the part of the space that is left out since its costs are not known, in words
    update_us: ClassVar[float | None] = None  # µs of the optimizer's update for each parameter; None: not measured

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_width", "inner", "sequence", "vocabulary", "gradients"):
            if getattr(self, name) < 1:
                raise BadInput(f"model {self.name}: {name} is {getattr(self, name)}: at least 1 is needed")

    @classmethod
    def gpt(cls, hidden: int, heads: int, layers: int, sequence: int = 2048, vocabulary: int = 51_200) -> Shape:
        """A GPT like the measured ones, whose attention keeps scores. vocabulary: Megatron's, padded, by default."""
        name = f"gpt-{hidden}x{layers}"
        return cls(name, layers, hidden, heads, heads, hidden // heads, 4 * hidden, sequence, vocabulary, tied=True)

    @property
    def state_parts(self) -> tuple[float, float, float]:
        """Bytes of weights (16 bits), gradients and optimizer states (Adam's, master copy) for each parameter."""
        return 2, self.gradients, 12

    @property
    def stages(self) -> int:
        """The most stages that a layout can have: one for the embedding, each block and the head."""
        return self.layers + 2

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads together."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """Width of the keys of all heads together, and of their values."""
        return self.kv_heads * self.head_width

    @property
    def matrices(self) -> int:
        """Parameters in the matrices of a block; 12 h² in a GPT."""
        attention = self.hidden * (2 * self.query_width + 2 * self.key_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.inner

    @property
    def table(self) -> int:
        """Parameters of the embedding; those of an untied head are as many."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All parameters except norms and biases."""
        return self.layers * self.matrices + (1 if self.tied else 2) * self.table

    @property
    def scores(self) -> int:
        """Attention scores per token, over all heads, that are written to memory; 0 where attention is fused."""
        return 0 if self.fused else self.heads * self.sequence

    @property
    def kept_whole(self) -> int:
        """Bytes per token that a block keeps on every tensor rank: inputs of norms and of both groups of projections, and
        masks of dropout. 10 h in a GPT (Korthikanti et al., 2205.05198, section 4.1)."""
        return (8 if self.gated else 10) * self.hidden

    @property
    def kept_split(self) -> int:
        """Bytes per token that a block keeps over all tensor ranks together, without scores: queries, keys, values, inputs
        of output projections in attention and MLP, and inner values of the MLP. 24 h in a GPT (2205.05198, section 4.2)."""
        return 4 * self.query_width + 4 * self.key_width + 2 * (3 if self.gated else 2) * self.inner

    @property
    def attention_flops(self) -> int:
        """FLOPs per token of a forward's scores and their products with values: 4 s h in a GPT."""
        return 4 * self.sequence * self.query_width

    @property
    def recomputes(self) -> tuple[int, ...]:
        """The kinds of recompute that differ. Where attention keeps no scores, selective equals none and is left out."""
        return (NONE, FULL) if self.fused else (NONE, SELECTIVE, FULL)

    def sizes(self, tp: int) -> range:
        """The possible sequences in a microbatch on `tp` tensor ranks; none where tp does not divide the heads."""
        return range(0) if self.heads % tp else range(1, MAX_SIZE + 1)

    def sequence_parallel(self, tp: int) -> tuple[int, ...]:
        """The possible values of `Layout.sequence` on `tp` tensor ranks."""
        return (0, 1) if tp > 1 else (0,)

    def flops(self, sequences: int) -> float:
        """Model FLOPs of a step over this many sequences, without recompute, as MFU counts them (2205.05198, appendix A)."""
        block = 2 * self.matrices + self.attention_flops
        return 3.0 * sequences * self.sequence * (self.layers * block + 2 * self.table)


# --- By name ---


def _llama(name: str, layers: int, hidden: int, heads: int, inner: int) -> Shape:
    """A Llama 3 of 2407.21783, Table 3, with 8,192 tokens and the 128,256 rows of the released vocabulary."""
    return Shape(name, layers, hidden, heads, 8, 128, inner, 8192, 128_256, gated=True, fused=True)


SHAPES = {
    shape.name: shape
    for shape in (
        replace(Shape.gpt(3072, 32, 30), name="gpt-3.6b"),  # vTrain's (2312.12391)
        replace(Shape.gpt(6144, 48, 40), name="gpt-18.4b"),
        replace(Shape.gpt(8192, 64, 48), name="gpt-39.1b"),
        replace(Shape.gpt(6144, 64, 48), name="gpt-22b"),  # Korthikanti et al. (2205.05198), Table 3
        replace(Shape.gpt(12_288, 96, 96), name="gpt-175b"),
        replace(Shape.gpt(20_480, 128, 105), name="gpt-530b"),
        replace(Shape.gpt(25_600, 160, 128), name="gpt-1t"),
        _llama("llama3-8b", 32, 4096, 32, 14_336),
        _llama("llama3-70b", 80, 8192, 64, 28_672),
        _llama("llama3-405b", 126, 16_384, 128, 53_248),
    )
}
CHANGED = tuple(field.name for field in fields(Shape) if field.type == "int")


def shape_by_name(spec: str, others: Sequence[str] = ()) -> Shape:
    """The shape of a published model.

    spec: its name, or `name@field=number,…`.
    others: names of models that are not shapes, for the error's list of similar names.

    Raises BadInput with similar names.
    """
    name, at, sizes = spec.partition("@")
    if name not in SHAPES:
        known = [*dict.fromkeys((*SHAPES, *others))]
        raise BadInput(f"model '{name[:40]}': unknown{did_you_mean(name, known, 3)} (models: {', '.join(known)})")
    changes: dict[str, Any] = {}
    for part in sizes.split(",") if at else ():
        what, _, number = (word.strip() for word in part.partition("="))
        if what not in CHANGED:
            raise BadInput(f"model '{spec[:60]}': '{part}' is none of {', '.join(f'{field}=N' for field in CHANGED)}")
        if what in changes:
            raise BadInput(f"model '{spec[:60]}': {what} is there twice")
        if not number.isdecimal():
            raise BadInput(f"model '{spec[:60]}': {what} is '{number}', no whole number")
        changes[what] = int(number)
    return replace(SHAPES[name], name=spec, **changes)
