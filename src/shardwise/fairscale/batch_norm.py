"""Batch normalization inside of FullyShardedDataParallel: by itself, and in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from .fsdp import FullyShardedDataParallel
from .wrap import auto_wrap, config_auto_wrap_policy, enable_wrap

BATCH_NORMS: tuple[type[nn.Module], ...] = nn.SyncBatchNorm.__bases__
"""What all batch normalizations derive from, those of other libraries (apex) too."""


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: Any = None,
    fsdp_config: Mapping[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wrap every batch normalization in ``module`` in an instance of its own, in float32 whatever is around it.

    Args:
        module: changed in place.
        single_rank_pg: whether each rank keeps them whole; their gradients are then each rank's own.
        process_group: the ranks that share them, unless ``single_rank_pg``.
        fsdp_config: arguments of `FullyShardedDataParallel`, in place of the two before.
        wrap_it: whether to wrap now; False only sets ``wrapper_config``, for `config_auto_wrap_policy`.
        assert_on_collision: whether a normalization that has a ``wrapper_config`` already is an error; otherwise the
            new one replaces it.

    Returns:
        ``module``, or its wrapper if it is a batch normalization.

    Raises:
        ValueError: naming one that has a ``wrapper_config`` already; none is then changed.
    """
    config = dict(fsdp_config) if fsdp_config is not None else _default_config(single_rank_pg, process_group)
    found = {name: member for name, member in module.named_modules() if isinstance(member, BATCH_NORMS)}
    taken = [name for name, member in found.items() if hasattr(member, "wrapper_config")]
    if assert_on_collision and taken:
        raise ValueError(
            f"auto_wrap_bn: {taken[0] or type(module).__name__!r} has a wrapper_config of another policy already; pass "
            "assert_on_collision=False to replace it"
        )
    for member in found.values():
        setattr(member, "wrapper_config", config)  # noqa: B010  (nn.Module types its attributes)
    if not wrap_it:
        return module
    try:
        with enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel):
            return auto_wrap(module)
    finally:
        # It has served, and with a process group in it no module could be copied or pickled.
        for member in found.values():
            delattr(member, "wrapper_config")


def _default_config(single_rank_pg: bool, process_group: Any) -> dict[str, Any]:
    if single_rank_pg:
        own = [dist.get_rank()]
        process_group = dist.new_group(own, use_local_synchronization=True, group_desc="shardwise_batch_norm")
    return {
        "process_group": process_group,
        "mixed_precision": False,
        "flatten_parameters": False,
        # It would free few bytes; and activation checkpointing may run it again without a backward of its own.
        "reshard_after_forward": False,
    }
