"""What mmengine_config.py names: the data, the model and the metric. Nothing here knows of sharding."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from torch import Tensor, nn
from torch.utils.data import Dataset


@DATASETS.register_module()
class Spirals(Dataset[dict[str, Tensor]]):
    """Noisy points on the arms of a spiral, and to which arm each belongs."""

    def __init__(self, size: int, arms: int, seed: int):
        self.metainfo = {"arms": arms}
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(size) % arms
        radius = torch.rand(size, generator=generator)
        angle = 2 * math.pi * (self.labels / arms + radius / 2) + 0.1 * torch.randn(size, generator=generator)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"points": self.points[index], "labels": self.labels[index]}


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU())
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.out(self.layers(x))
        return result


@MODELS.register_module()
class SpiralClassifier(BaseModel):
    """Says to which arm of a spiral a point belongs."""

    def __init__(self, width: int, depth: int, arms: int, init_cfg: Any = None):
        super().__init__(init_cfg=init_cfg)
        self.stem = nn.Linear(2, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, arms)

    def forward(self, points: Tensor, labels: Tensor, mode: str = "tensor") -> Any:
        logits = self.head(self.blocks(self.stem(points)))
        if mode == "loss":
            return {"loss": F.cross_entropy(logits, labels)}
        if mode == "predict":
            return (logits.argmax(1) == labels).tolist()
        return logits


@METRICS.register_module()
class Accuracy(BaseMetric):
    """The share of points that are on the arm that the model says."""

    default_prefix = "spiral"

    def process(self, data_batch: Any, data_samples: list[bool]) -> None:
        self.results += data_samples

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        return {"accuracy": sum(results) / len(results)}
