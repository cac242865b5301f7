"""Small models that the tests train."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    """Linear layers whose sizes divide by few world sizes."""

    def __init__(self, sizes: Sequence[int] = (9, 17, 12, 5)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int = 16, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Decoder with learned positions; the head may be tied to the embedding."""

    def __init__(self, layers: int = 3, width: int = 16, vocabulary: int = 29, length: int = 8, tied: bool = False):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Convolutions with batch norm: buffers, and parameters of four dims."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in ((3, 6), (6, 5))
        )
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    """Adds what a layer makes of its input to that; has no parameters of its own."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class Stack(nn.Module):
    """Any layers that keep the width, between two linear layers of the root."""

    def __init__(self, layers: Sequence[nn.Module], width: int):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, stop_after: int | None = None) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers[:stop_after]:
            x = layer(x)
        return self.last(x)


def inputs_for(model: nn.Module, seed: int, batch: int = 4) -> torch.Tensor:
    """A batch that ``model`` takes, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Transformer):
        return torch.randint(0, model.embed.num_embeddings, (batch, 8), generator=generator)
    if isinstance(model, ConvNet):
        return torch.randn(batch, 3, 6, 6, generator=generator)
    return torch.randn(batch, model.layers[0].in_features, generator=generator)  # type: ignore[union-attr, index, arg-type]


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": MLP, "transformer": Transformer, "conv": ConvNet}


def build(name: str, seed: int = 1) -> nn.Module:
    """A model with the parameters that ``seed`` gives."""
    torch.manual_seed(seed)
    return MODELS[name]()


def wrap(model: nn.Module, verb: Callable[..., object], **options: object) -> nn.Module:
    """Apply ``verb`` to each layer and then to the root."""
    for layer in model.layers:  # type: ignore[union-attr]
        verb(layer, **options)
    verb(model, **options)
    return model
