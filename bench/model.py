"""The model that everything is measured on: a pre-norm transformer with 9 parameters per block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_WIDTH = 64
VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """Size of a model and of its batch on each rank.

    Args:
        blocks: number of transformer blocks.
        width: of the residual stream, a multiple of 64.
        batch: sequences per step and rank.
        length: tokens per sequence.
    """

    blocks: int
    width: int
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.blocks} blocks, width {self.width}, {self.batch}x{self.length} tokens per rank"

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layers: 8/3 of the model's, to a multiple of 64."""
        return 64 * round(8 * self.width / 3 / 64)

    @property
    def block_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of one block's 9 parameters."""
        return [tuple(parameter.shape) for parameter in _block_on_meta(self).parameters()]


def _block_on_meta(shape: Shape) -> Block:
    with torch.device("meta"):
        return Block(shape.width, shape.hidden)


class Block(nn.Module):
    """Attention and SwiGLU feed-forward, each behind an RMSNorm."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_feed_forward = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.value, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result are batch x length x width."""
        y = self.norm_attention(x)
        query, key, value = (
            layer(y).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm_feed_forward(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Transformer(nn.Module):
    """Byte-level language model without positions; the embedding, last norm and head belong to the root."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.hidden) for _ in range(shape.blocks))
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every next token: batch x length x vocabulary."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_tokens(shape: Shape) -> Tensor:
    """A batch, the same on every rank, so that all contenders have to report the same loss."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCABULARY, (shape.batch, shape.length), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy in nats per token of a task that needs no second batch: repeat the input."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
