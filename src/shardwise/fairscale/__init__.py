"""FairScale's sharded training on shardwise's engine: change the import, keep the script."""

from ..grad_scaler import ShardedGradScaler
from .oss import OSS
from .sharded_ddp import ShardedDataParallel, ShardedDDP

__all__ = ["OSS", "ShardedDDP", "ShardedDataParallel", "ShardedGradScaler"]
