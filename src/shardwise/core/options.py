"""What users set for the parameters of a group: while training, and once for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from .buffer import ShardedBuffer
from .comm import Comm, StagedCollective
from .device import REDUCES_IN_DTYPE_OF_SHARDS
from .mesh import DataParallelMesh


def communicated_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Dtype that tensors of ``dtype`` are gathered or reduced in, where ``wanted`` is asked for."""
    return wanted if wanted is not None and dtype.is_floating_point else dtype


@dataclass
class GroupOptions:
    """What users may set on a group while training; the defaults are torch FSDP2's."""

    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    reduce_gradients: bool = True
    all_reduce_gradients: bool = True
    divide_factor: float | None = None
    divisors: tuple[float, float] | None = None
    """In place of ``divide_factor``: what gradients are divided by before and after they are summed."""
    force_sum: bool = False
    unshard_in_backward: bool = True
    keeps_memory: bool = False
    """Whether resharding leaves the gathered buffers their memory, which the next gather fills again."""
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    zeros_for_unused: bool = False
    custom_gather: StagedCollective | None = None
    custom_reduce_scatter: StagedCollective | None = None
    reduce_comm: Comm | None = None


@dataclass
class GroupPolicy:
    """What is fixed when a group is made.

    Args:
        precision: dtypes of gathered parameters and of reductions.
        offload: whether sharded parameters and gradients live on the host.
        pin_memory: whether they do so in pinned memory.
        reshard_to: mesh whose last axis is the smaller world to reshard to after forward, if not to the whole one.
    """

    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: bool = False
    pin_memory: bool = False
    reshard_to: DataParallelMesh | None = None

    def gather_dtype(self, shards: torch.dtype) -> torch.dtype:
        """Dtype that shards of dtype ``shards`` are gathered in."""
        return communicated_dtype(shards, self.precision.param_dtype)

    def reduce_dtype(self, shards: torch.dtype) -> torch.dtype | None:
        """Dtype that gradients of shards of dtype ``shards`` are reduced and accumulated in; None for their own."""
        return self.precision.reduce_dtype or (shards if REDUCES_IN_DTYPE_OF_SHARDS else None)

    def arriving_dtype(self, buffer: ShardedBuffer) -> torch.dtype | None:
        """Dtype that autograd gives gradients, if not that of the gathered parameters: from torch 2.15 on each is cast
        to that of the reduction before it is added to others, unless that is wider."""
        wanted, own = self.reduce_dtype(buffer.local.dtype), buffer.dtype
        if not REDUCES_IN_DTYPE_OF_SHARDS or wanted is None or not own.is_floating_point:
            return None
        return wanted if wanted != own and wanted.itemsize <= own.itemsize else None
