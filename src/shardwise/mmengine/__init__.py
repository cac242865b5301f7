"""MMEngine on shardwise: a model wrapper for `Runner` and a strategy for `FlexibleRunner`.

Importing this package registers, in MMEngine's registries, the wrapper as ``MMFullyShardedDataParallel`` (in the place
of MMEngine's own) and ``ShardwiseDataParallel``, and the strategy as ``ShardwiseStrategy``; and it lets any `Runner`
initialize, save and resume a model that is sharded. A config file does it by
``custom_imports = dict(imports=["shardwise.mmengine"])``.
"""

from .policies import FSDP_WRAP_POLICIES
from .processes import init_process_group
from .runner import prepare_runner
from .strategy import ShardwiseStrategy
from .wrapper import MMFullyShardedDataParallel

__all__ = [
    "FSDP_WRAP_POLICIES",
    "MMFullyShardedDataParallel",
    "ShardwiseStrategy",
    "init_process_group",
    "prepare_runner",
]
