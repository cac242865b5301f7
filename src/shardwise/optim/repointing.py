"""Optimizers that were made before `fully_shard`."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.device import shard_like
from ..core.flat import refuse_flat
from ..core.parameter import successor_of

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


@torch.no_grad()
def repoint(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Move an optimizer that was made before `fully_shard` to the sharded parameters that replaced its own.

    Param groups keep their order and hyper-parameters. Existing state moves along: tensors of the parameter's shape
    are cut as the parameter is, others (step counts) stay as they are. Without this, such an optimizer would step
    tensors that no module uses any more.

    Args:
        optimizer: changed in place; parameters that were not replaced stay.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: if it is not an optimizer.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"repoint takes an optimizer, not {type(optimizer).__name__}")
    for group in optimizer.param_groups:
        refuse_flat(group["params"], "repoint")
        # In place: LBFGS, for one, keeps the list itself.
        group["params"][:] = [_repointed(optimizer, parameter) for parameter in group["params"]]
    return optimizer


def _repointed(optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    sharded = successor_of(parameter)
    if sharded is None:
        return parameter
    if parameter in optimizer.state:
        state: dict[str, Any] = optimizer.state.pop(parameter)
        optimizer.state[sharded] = {name: _cut(value, parameter, sharded) for name, value in state.items()}
    return sharded


def _cut(value: Any, original: torch.Tensor, sharded: torch.Tensor) -> Any:
    assert isinstance(sharded, DTensor)
    if isinstance(value, torch.Tensor) and value.shape == original.shape and value.ndim:
        return shard_like(value, sharded)
    return value
