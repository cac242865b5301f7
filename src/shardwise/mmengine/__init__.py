"""MMEngine on shardwise: a model wrapper for `Runner` and a strategy for `FlexibleRunner`.

Importing this package registers, in MMEngine's registries, the wrapper as ``MMFullyShardedDataParallel`` (in the place
of MMEngine's own) and ``ShardwiseDataParallel``, the strategy as ``ShardwiseStrategy``, and the hook that lets a
`Runner` initialize, save and resume a sharded model; a config file does it by
``custom_imports = dict(imports=["shardwise.mmengine"])``.
"""

from .policies import FSDP_WRAP_POLICIES
from .processes import init_process_group
from .runner import ShardwiseHook, prepare_runner
from .strategy import ShardwiseStrategy
from .wrapper import MMFullyShardedDataParallel

__all__ = [
    "FSDP_WRAP_POLICIES",
    "MMFullyShardedDataParallel",
    "ShardwiseHook",
    "ShardwiseStrategy",
    "init_process_group",
    "prepare_runner",
]
