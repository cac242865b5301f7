"""A decoder-only transformer over bytes: RMSNorm, rotary positions, SwiGLU, tied or untied head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_WIDTH = 64


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a model; ``width`` is the size of the residual stream."""

    layers: int
    width: int
    tied: bool = True
    vocabulary: int = 256

    @property
    def heads(self) -> int:
        """Number of attention heads: one for every 64 channels, and at least one."""
        return max(1, self.width // HEAD_WIDTH)

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layers: 8/3 of the model's, rounded up to a multiple of 64."""
        return -(-8 * self.width // (3 * 64)) * 64


def rotary_tables(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each float32 of shape ``(length, head_width / 2)``."""
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, 10_000.0**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate ``x`` of shape ``(batch, heads, length, head_width)`` by its positions, in two halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions: ``(batch, length, width)`` to the same shape."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """SwiGLU: ``(batch, length, width)`` to the same shape."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm transformer layer, and one unit of sharding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.residual_scale = (2 * config.layers) ** -0.5
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights; those that write to the residual stream are smaller in deeper models."""
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        with torch.no_grad():
            self.attention.output.weight.mul_(self.residual_scale)
            self.feed_forward.down.weight.mul_(self.residual_scale)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Maps byte tokens, int64 of shape ``(batch, length)``, to logits ``(batch, length, vocabulary)``."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights outside the blocks."""
        self.norm.reset_parameters()
        nn.init.normal_(self.embedding.weight, std=self.config.width**-0.5)
        if not self.config.tied:
            nn.init.normal_(self.head.weight, std=self.config.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        cosines, sines = rotary_tables(tokens.shape[1], self.config.width // self.config.heads, tokens.device)
        # Tied weights are drawn as small as the head needs; the embedding is scaled back to unit variance.
        x = self.embedding(tokens) * self.config.width**0.5
        for block in self.blocks:
            x = block(x, cosines, sines)
        return self.head(self.norm(x))
