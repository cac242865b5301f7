"""Sharded data-parallel training for PyTorch."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .core.context import FSDPCommContext
from .core.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .fully_shard import fully_shard
from .grad import clip_grad_norm_
from .optim import repoint
from .placements import Placements

__all__ = [
    "CPUOffloadPolicy",
    "FSDPCommContext",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Placements",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "register_fsdp_forward_method",
    "repoint",
    "share_comm_ctx",
]
