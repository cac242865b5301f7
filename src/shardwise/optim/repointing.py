"""Optimizers whose parameters were replaced by sharded ones."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.device import local_of, shard_like, spec_of, wrap_local
from ..core.flat import refuse_flat
from ..core.parameter import name_of, owner_of
from ..core.replaced import successor_of
from ..core.slot import Slot
from ..core.step import parameters_of
from ..core.tree import tensors_in

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


@torch.no_grad()
def repoint(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Move an optimizer to the sharded parameters that replaced its own: by `fully_shard`, or when a state dict was
    loaded with ``assign=True``.

    Param groups keep their order and hyper-parameters. Existing state moves along: tensors of the parameter's shape
    are cut as the parameter is, others (step counts) stay as they are, with a warning if they are no numbers (LBFGS).
    Without this, such an optimizer would step tensors that no module uses any more.

    Args:
        optimizer: changed in place; parameters that were not replaced stay.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: if it is not an optimizer.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"repoint takes an optimizer, not {type(optimizer).__name__}")
    held = {*map(id, parameters_of(optimizer))}
    for group in optimizer.param_groups:
        refuse_flat(group["params"], "repoint")
        # In place: LBFGS, for one, keeps the list itself.
        group["params"][:] = [new for old in group["params"] for new in _repointed(optimizer, old, held)]
    return optimizer


def _repointed(optimizer: Optimizer, parameter: torch.Tensor, held: set[int]) -> list[torch.Tensor]:
    """What takes the place of ``parameter``: nothing if it has been tied to one of those that are ``held``, by ids."""
    sharded = successor_of(parameter)
    if sharded is None or sharded is parameter:
        return [parameter]
    state: dict[str, Any] | None = optimizer.state.pop(parameter, None)
    if id(sharded) in held:
        return []
    held.add(id(sharded))
    if state is not None:
        if not isinstance(parameter, DTensor):
            _warn_of_uncut(optimizer, state, parameter, sharded)
        optimizer.state[sharded] = {name: _cut(value, parameter, sharded) for name, value in state.items()}
    return [sharded]


def _warn_of_uncut(optimizer: Optimizer, state: dict[str, Any], parameter: torch.Tensor, sharded: torch.Tensor) -> None:
    """Warn of what ``optimizer`` cannot compute with beside a ``sharded`` parameter, if it does."""
    for key, value in state.items():
        for tensor in tensors_in(value):
            if tensor.numel() > 1 and not (tensor is value and tensor.shape == parameter.shape):
                warnings.warn(
                    f"repoint: state {key!r} that {type(optimizer).__name__} has for {name_of(sharded)} stays whole, "
                    f"since it is no tensor of the parameter's shape {(*parameter.shape,)}: if the next step fails by "
                    "it, call repoint before the first step, or make a new optimizer of the sharded parameters",
                    stacklevel=5,
                )
                return


def _cut(value: Any, original: torch.Tensor, sharded: torch.Tensor) -> Any:
    """A value of the state of ``original`` as state of ``sharded``."""
    if not isinstance(value, torch.Tensor) or value.shape != original.shape or not value.ndim:
        return value
    assert isinstance(sharded, DTensor)
    if not isinstance(value, DTensor):
        return shard_like(value, sharded)
    if value.device_mesh == sharded.device_mesh:
        return value.redistribute(placements=sharded.placements)
    # Another parallelism's, to whose local tensors data parallelism was added.
    slot = _slot_of(sharded)
    assert slot.parallel is not None
    own = local_of(value.redistribute(placements=slot.parallel.original.placements))
    return wrap_local(slot.chunk_of(own).to(local_of(sharded).device, copy=True), spec_of(sharded))


def _slot_of(sharded: torch.Tensor) -> Slot:
    owner = owner_of(sharded)
    assert owner is not None
    return next(slot for slot in owner.slots if slot.sharded is sharded)
