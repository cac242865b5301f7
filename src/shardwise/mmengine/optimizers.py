"""Optimizer wrappers of MMEngine over sharded parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from mmengine.optim import AmpOptimWrapper, ApexOptimWrapper, BaseOptimWrapper, OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIMIZERS
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from ..adapters.whole import cut_state, cut_values
from ..adapters.wrapping import zero_what_waits
from ..core.step import ELEMENTWISE
from ..grad import clip_grad_norm_
from ..grad_scaler import sharded_scaler
from ..optim import flat, repoint

PREPARED = "_shardwise_prepared"

for _class in ELEMENTWISE:
    OPTIMIZERS.register_module(name=f"Flat{_class.__name__}", module=functools.partial(flat, _class), force=True)


def prepare_optim_wrapper(optim_wrapper: Any) -> None:
    """Make one optimizer wrapper, or several, clip, scale and load as sharded parameters need; once for each.

    Raises:
        TypeError: for an `ApexOptimWrapper` or a `ZeroRedundancyOptimizer`.
    """
    for wrapper in _wrappers_in(optim_wrapper):
        if isinstance(wrapper, ApexOptimWrapper):
            raise TypeError(
                "ApexOptimWrapper replaces the parameters by its own, which are not sharded: use AmpOptimWrapper"
            )
        # Of each wrapper, whatever its optimizer was in before.
        if isinstance(wrapper, OptimWrapper) and getattr(wrapper, "clip_func", None) is torch.nn.utils.clip_grad_norm_:
            # The same norm, by one collective instead of one for each parameter.
            wrapper.clip_func = clip_grad_norm_
        if isinstance(wrapper, AmpOptimWrapper):
            sharded_scaler(wrapper.loss_scaler)
        optimizer = getattr(wrapper, "optimizer", None)
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                "ZeroRedundancyOptimizer gives whole parameters to ranks, and these are sharded, with their state: "
                "name the class that is its optimizer_type as optimizer=dict(type=...)"
            )
        if isinstance(optimizer, Optimizer) and not getattr(optimizer, PREPARED, False):
            setattr(optimizer, PREPARED, True)
            repoint(optimizer)
            zero_what_waits(optimizer)
            _cut_own_state(optimizer)
            optimizer.register_load_state_dict_pre_hook(cut_state)


def _wrappers_in(optim_wrapper: Any) -> Iterator[BaseOptimWrapper]:
    if isinstance(optim_wrapper, OptimWrapperDict):
        yield from optim_wrapper.values()
    elif isinstance(optim_wrapper, BaseOptimWrapper):
        yield optim_wrapper


@torch.no_grad()
def _cut_own_state(optimizer: Optimizer) -> None:
    """Cut the state that was loaded before `cut_state` was registered."""
    for parameter, values in cut_values(optimizer, optimizer.state).items():
        optimizer.state[parameter].update(values)
