"""Sharded data-parallel training for PyTorch."""

import contextlib

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .checkpoint import (
    CheckpointError,
    CorruptFileError,
    full_state_dict,
    latest,
    load,
    load_full_state_dict,
    load_safetensors,
    save,
    save_safetensors,
    wait,
)
from .core.context import FSDPCommContext
from .core.iteration import GradientReductionHandle
from .core.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .ema import EMA
from .fully_shard import fully_shard
from .grad import clip_grad_norm_
from .init import init_on_meta, materialize
from .optim import repoint
from .placements import Placements

with contextlib.suppress(ImportError):  # not in every version of torch
    from torch.distributed.fsdp import DataParallelMeshDims as DataParallelMeshDims

__all__ = [
    "EMA",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CorruptFileError",
    "FSDPCommContext",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Placements",
    "UnshardHandle",
    "clip_grad_norm_",
    "full_state_dict",
    "fully_shard",
    "init_on_meta",
    "latest",
    "load",
    "load_full_state_dict",
    "load_safetensors",
    "materialize",
    "register_fsdp_forward_method",
    "repoint",
    "save",
    "save_safetensors",
    "share_comm_ctx",
    "wait",
]
