"""Models with side inputs: an encoder-decoder whose decoder layers all take the encoder's output, a U-Net, towers that join,
and heads with losses of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zbsolve.exec import CrossEntropy, auxiliary_loss

WIDTH, WORDS, LONG, SHORT, ROWS = 16, 30, 6, 4, 2
BLOCKS = 3  # of encoder and decoder each


class Attention(nn.Module):
    """Of one head, of queries to another sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = nn.functional.scaled_dot_product_attention(self.query(x), self.key(memory), self.value(memory))
        result: Tensor = x + self.out(y)
        return result


class Start(nn.Module):
    """Embeds the encoder's words; the decoder's go to where the decoder begins."""

    gives = "words"

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.table(both[0]), both[1]


class EncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.dropout = Attention(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x)
        result: Tensor = x + self.dropout(torch.tanh(self.mlp(x)))
        return result


class Encoded(nn.Module):
    """The end of the encoder: from here on the decoder's words go along the row."""

    takes, gives = "words", ("memory", "gate")  # not in the order of their names, in which they travel

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        memory = self.norm(x)
        return words, memory, memory.mean(1, keepdim=True).sigmoid()


class DecoderBlock(EncoderBlock):
    takes = ("memory", "gate")

    def __init__(self) -> None:
        super().__init__()
        self.cross = Attention()

    def forward(self, x: Tensor, memory: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.cross(x, memory) * gate)


def encoder_decoder() -> Any:
    """Start, encoder blocks, their end, an embedding, decoder blocks, a head: 10 layers."""
    torch.manual_seed(0)
    decoder = [nn.Embedding(WORDS, WIDTH), *(DecoderBlock() for _ in range(BLOCKS)), nn.Linear(WIDTH, WORDS, bias=False)]
    words = torch.randint(WORDS, (ROWS, LONG)), torch.randint(WORDS, (ROWS, SHORT))
    layers = [Start(), *(EncoderBlock() for _ in range(BLOCKS)), Encoded(), *decoder]
    return layers, (words, torch.randint(WORDS, (ROWS, SHORT))), CrossEntropy()


class Down(nn.Module):
    """Halves the length; what came in skips to the way up."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.gives = f"skip{number}"
        self.inside, self.down = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 2, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.inside(x))
        return self.down(x), x


class Up(nn.Module):
    """Doubles the length, and takes what skipped."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.takes = (f"skip{number}",)
        self.up, self.inside = nn.ConvTranspose1d(WIDTH, WIDTH, 2, stride=2), nn.Conv1d(2 * WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.tanh(self.inside(torch.cat([self.up(x), skip], 1)))


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inside(x))


def u_net() -> Any:
    """Two layers in front, three down, three up: 8 layers, whose skips are 16, 8 and 4 long."""
    torch.manual_seed(0)
    layers = [Middle(), Middle(), *(Down(i) for i in range(3)), *(Up(i) for i in reversed(range(3)))]
    x = torch.randn(ROWS, WIDTH, 16)
    return layers, (x, torch.randn(ROWS, WIDTH, 16)), nn.functional.mse_loss


def u_net_in_front() -> Any:
    """Two layers more behind it."""
    layers, sample, loss = u_net()
    return [*layers, Middle(), Middle()], sample, loss


class Along(nn.Module):
    """A layer of the U-Net without side inputs: all skips go along, as a tuple."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        row, *skips = x if isinstance(x, tuple) else (x,)
        skips, taken = (skips[:-1], skips[-1:]) if isinstance(self.layer, Up) else (skips, [])
        y = self.layer(row, *taken)  # (for Dynamo of torch 2.11 `skips` is a tuple, without `pop`)
        y, *more = y if isinstance(y, tuple) else (y,)
        return (y, *skips, *more) if skips or more else y


def u_net_along() -> Any:
    """The same network, passing everything along."""
    layers, sample, loss = u_net()
    return [Along(layer) for layer in layers], sample, loss


class Pixels(nn.Module):
    """The image tower begins: of the batch it takes the image."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = self.inside(both[0])
        return result


class Seen(nn.Module):
    """The image tower ends: what it gives goes beside the row, its output nowhere."""

    gives = "image"

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> tuple[None, Tensor]:
        return None, self.norm(x)


class Words(nn.Module):
    """The text tower begins, with the batch's words."""

    begins = True

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = self.table(both[1])
        return result


class Joined(nn.Module):
    """Both towers, seen together."""

    takes = "image"

    def __init__(self) -> None:
        super().__init__()
        self.cross = Attention()

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        result: Tensor = self.cross(x, image)
        return result


def two_towers() -> Any:
    """An image tower of 4 layers, a text tower of 3, and 3 layers that join them: 10."""
    torch.manual_seed(0)
    image = [Pixels(), EncoderBlock(), EncoderBlock(), Seen()]
    text = [Words(), EncoderBlock(), EncoderBlock()]
    layers = [*image, *text, Joined(), Joined(), nn.Linear(WIDTH, WORDS, bias=False)]
    both = torch.randn(ROWS, LONG, WIDTH), torch.randint(WORDS, (ROWS, SHORT))
    return layers, (both, torch.randint(WORDS, (ROWS, SHORT))), CrossEntropy()


class Hidden(EncoderBlock):
    """Its output goes to the heads, the last one along the row."""

    gives = "hidden"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = super().forward(x)
        return x, x


class HeadBeside(nn.Module):
    """A head with a loss of its own, of the labels shifted by one."""

    takes = "targets"

    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = EncoderBlock(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        x = self.block(x)
        if targets is not None:
            auxiliary_loss(0.3 * CrossEntropy()(self.out(x)[:, :-1], targets[:, 1:]))
        return x


class MainHead(nn.Module):
    """It begins a row of its own, and of the batch takes nothing: so it waits for the trunk alone."""

    begins, takes = True, "hidden"

    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = EncoderBlock(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor, hidden: Tensor) -> Tensor:
        result: Tensor = self.out(self.block(hidden))
        return result


def two_heads() -> Any:
    """A trunk of 4 layers; a head that predicts one token further, a loss of its own; and the main head."""
    torch.manual_seed(0)
    layers = [nn.Embedding(WORDS, WIDTH), EncoderBlock(), EncoderBlock(), Hidden(), HeadBeside(), HeadBeside(), MainHead()]
    words = torch.randint(WORDS, (ROWS, LONG))
    return layers, (words, words.roll(-1, 1)), CrossEntropy()


class Spectrum(nn.Module):
    """Gives complex numbers; in a microbatch without them, None."""

    gives = "spectrum"

    def forward(self, given: Any) -> tuple[Tensor, Tensor | None]:
        x, there = given
        return x, torch.fft.rfft(x * x) if there else None


class Filtered(Middle):
    takes = "spectrum"

    def forward(self, x: Tensor, spectrum: Tensor | None) -> Tensor:  # type: ignore[override]
        return super().forward(x if spectrum is None else x + torch.fft.irfft(spectrum))


class Front(Middle):
    def forward(self, given: Any) -> Any:  # type: ignore[override]
        return super().forward(given[0]), given[1]


def spectra() -> Any:
    """7 layers; every other microbatch lacks the spectrum, of 9 complex numbers a row."""
    torch.manual_seed(0)
    x = torch.randn(4, ROWS, WIDTH, 16)
    layers = [Front(), Spectrum(), Filtered(), Middle(), Filtered(), Middle(), Middle()]
    return layers, lambda number, step: ([x[number % 4], number % 2 == 0], x[number % 4].roll(1, 0)), nn.functional.mse_loss
