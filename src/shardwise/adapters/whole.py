"""Whole tensors in place of sharded ones, and sharded ones in place of whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.device import not_inference, shard_like
from ..core.tree import map_tensors


def gather_in(tree: Any, *, keeps: bool) -> Any:
    """``tree`` with sharded tensors made whole, on the host, if this rank keeps them; else as it is. A collective."""
    with not_inference():
        return map_tensors(tree, lambda tensor: gathered(tensor, keeps) if isinstance(tensor, DTensor) else tensor)


def gathered(tensor: torch.Tensor, keeps: bool) -> torch.Tensor:
    """``tensor``, whole on the host, if this rank keeps it; else as it is. A collective where it is sharded."""
    whole = tensor
    if isinstance(tensor, DTensor):
        # Offloaded shards are gathered on the device where the mesh communicates.
        whole = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
    return whole.cpu() if keeps else tensor


def cut(value: Any, parameter: torch.Tensor) -> Any:
    """This rank's part of ``value``, if that is a whole tensor of a sharded parameter's shape; else ``value``."""
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if isinstance(parameter, DTensor) and is_whole and value.ndim and value.shape == parameter.shape:
        return shard_like(value, parameter)
    return value


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of all param groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def cut_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict ``saved`` with this rank's parts in the place of whole tensors; ``saved`` is not changed, and its
    tensors, which may be mapped from a file, are copied."""
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    state = dict(saved["state"])
    with not_inference():
        # Not strict: `load_state_dict` reports groups that differ.
        for key, parameter in zip(keys, parameters_of(optimizer), strict=False):
            if key in state:
                state[key] = {name: _copied(cut(value, parameter), value) for name, value in state[key].items()}
    return {**saved, "state": state}


def _copied(part: Any, value: Any) -> Any:
    """``part`` of ``value``, in memory of its own."""
    return map_tensors(value, torch.clone) if part is value else part
