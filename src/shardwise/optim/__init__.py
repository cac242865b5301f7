"""Optimizers and sharded parameters."""

from .flat import FlatOptimizer, flat
from .repointing import repoint

__all__ = ["FlatOptimizer", "flat", "repoint"]
