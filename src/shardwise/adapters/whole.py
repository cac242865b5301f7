"""Whole tensors in place of sharded ones, and sharded ones in place of whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..checkpoint.objects import Path, is_sum, key_of, leaves
from ..checkpoint.optimizer_state import untold_state
from ..checkpoint.ranks import saving_ranks
from ..core.device import not_inference, shard_like
from ..core.errors import listed
from ..core.step import ELEMENTWISE, parameters_of
from ..core.tree import map_tensors, tensors_in


def gather_in(tree: Any, *, keeps: bool) -> Any:
    """``tree`` with sharded tensors made whole, on the host, if this rank keeps them; else as it is. A collective.

    Raises:
        ValueError: on all ranks, naming sharded tensors that some ranks lack, or have in other shapes or dtypes.
    """
    whole: dict[int, torch.Tensor] = {}
    with not_inference():
        found = _sharded_in(tree)
        # By names: ranks may have a dict's items in another order.
        for path in _agreed({path: [(one.shape, one.dtype) for one in tensors] for path, tensors in found.items()}):
            whole.update((id(tensor), gathered(tensor, keeps)) for tensor in found[path])
        return map_tensors(tree, lambda tensor: whole.get(id(tensor), tensor))


def _sharded_in(tree: Any) -> dict[Path, list[DTensor]]:
    """The sharded tensors of ``tree`` by where they are."""
    found: dict[Path, list[DTensor]] = {}
    for path, leaf in leaves(tree):
        if sharded := [tensor for tensor in tensors_in(leaf) if isinstance(tensor, DTensor)]:
            found.setdefault(path, []).extend(sharded)
    return found


def _agreed(own: dict[Path, list[tuple[Any, ...]]]) -> list[Path]:
    """The paths of sharded tensors, in the order of the first rank."""
    first, *others = saving_ranks().exchange(own)
    for rank, other in enumerate(others, 1):
        if differ := [path for path in {**first, **other} if first.get(path) != other.get(path)]:
            raise ValueError(
                f"rank 0 and rank {rank} save different sharded tensors as {listed(map(key_of, differ))}: each has a "
                "part of them, so give all ranks the same ones"
            )
    return [*first]


def gathered(tensor: torch.Tensor, keeps: bool) -> torch.Tensor:
    """``tensor``, whole on the host, if this rank keeps it; else as it is. A collective where it is sharded."""
    whole = tensor
    if isinstance(tensor, DTensor):
        # Offloaded shards are gathered on the device where the mesh communicates.
        whole = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
    return _of_own_size(whole.cpu()) if keeps else tensor


def _of_own_size(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, not as a view of more memory: `full_tensor` gives one of all ranks' parts with their padding, and a
    file has all of the memory that a view is of."""
    is_view = type(tensor) is torch.Tensor and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone() if is_view else tensor


def cut(value: Any, *likes: Any) -> Any:
    """This rank's part of ``value``, cut like the first sharded tensor of its shape in ``likes``; ``value`` itself if
    there is none, or if it is no whole tensor."""
    if _is_whole(value) and value.ndim:
        for like in likes:
            if isinstance(like, DTensor) and value.shape == like.shape and not is_sum(like):
                return shard_like(value, like)
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def cut_values(
    optimizer: Optimizer, whole: Mapping[torch.Tensor, Mapping[str, Any]]
) -> dict[torch.Tensor, dict[str, Any]]:
    """This rank's parts of an optimizer's state, by parameter, where that is whole tensors of sharded parameters."""
    items = ((value, parameter) for parameter, values in whole.items() for value in values.values())
    kept = untold_state(optimizer, ((value.shape, parameter) for value, parameter in items if _is_whole(value)))
    return {
        parameter: {name: cut(value, parameter, kept.get(parameter, {}).get(name)) for name, value in values.items()}
        for parameter, values in whole.items()
    }


@torch.no_grad()
def cut_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict ``saved`` with this rank's parts in the place of whole tensors; ``saved`` is not changed, and its
    tensors, which may be mapped from a file, are copied.

    Raises:
        ValueError: naming what has another shape than a sharded parameter, if ``optimizer`` is elementwise.
    """
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    state = dict(saved["state"])
    with not_inference():
        # Not strict: `load_state_dict` reports groups that differ.
        given = {one: key for key, one in zip(keys, parameters_of(optimizer), strict=False) if key in state}
        for parameter, key in given.items():
            _refuse_other_shapes(optimizer, key, state[key], parameter)
        for parameter, values in cut_values(optimizer, {one: state[key] for one, key in given.items()}).items():
            whole = state[given[parameter]]
            state[given[parameter]] = {name: _copied(value, whole[name]) for name, value in values.items()}
    return {**saved, "state": state}


def _refuse_other_shapes(optimizer: Optimizer, key: Any, values: Mapping[str, Any], parameter: torch.Tensor) -> None:
    if type(optimizer) not in ELEMENTWISE or not isinstance(parameter, DTensor):
        return
    for name, value in values.items():
        # Numbers such as those of steps may be tensors of any shape.
        if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != parameter.shape:
            raise ValueError(
                f"the state of {type(optimizer).__name__} does not fit: {name!r} of parameter {key!r} has shape "
                f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}"
            )


def _copied(part: Any, value: Any) -> Any:
    """``part`` of ``value``, in memory of its own."""
    return map_tensors(value, torch.clone) if part is value else part
