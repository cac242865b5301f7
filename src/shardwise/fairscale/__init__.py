"""FairScale's interfaces: change the import and keep the script."""

from ..grad_scaler import ShardedGradScaler
from .batch_norm import auto_wrap_bn
from .checkpoint_wrapper import checkpoint_wrapper
from .flat_parameter import FlatParameter
from .fsdp import FSDP, FullyShardedDataParallel, TrainingState, get_fsdp_instances
from .oss import OSS
from .sharded_ddp import ShardedDataParallel, ShardedDDP
from .testing import DummyProcessGroup
from .wrap import (
    ConfigAutoWrap,
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)

__all__ = [
    "FSDP",
    "OSS",
    "ConfigAutoWrap",
    "DummyProcessGroup",
    "FlatParameter",
    "FullyShardedDataParallel",
    "ShardedDDP",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "TrainingState",
    "auto_wrap",
    "auto_wrap_bn",
    "checkpoint_wrapper",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "get_fsdp_instances",
    "wrap",
]
