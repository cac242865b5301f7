"""Parameters that sharded ones replaced, which others may hold still: which one counts instead, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .device import call_without_torch_function, get_data, untraced
from .errors import StateError
from .tree import tensors_in

_successors: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""From each original parameter that still exists, and each unsharded one, to the owner and index of its slot, so that
an optimizer over them is found. Weak on both sides."""


def remember_successor(original: torch.Tensor, owner: weakref.ref[Any], slot: int) -> None:
    """The sharded parameter of a slot is the one that counts, not ``original``."""
    _successors[original] = owner, slot


def owner_and_slot_of(original: torch.Tensor) -> tuple[Any, Any]:
    """Of the sharded parameter that counts instead of ``original``; None twice if there is none, or it is gone."""
    if (found := _successors.get(original)) is None or (owner := found[0]()) is None:
        return None, None
    return owner, owner.slots[found[1]]


def successor_of(original: torch.Tensor) -> nn.Parameter | None:
    """The sharded parameter that replaced ``original``, if one did and still exists."""
    _, slot = owner_and_slot_of(original)
    return None if slot is None else slot.sharded


def mark_replaced(parameter: torch.Tensor) -> None:
    """A sharded parameter is not its unit's any more: another one was loaded in its place."""
    parameter.__dict__["_shardwise_replaced"] = True


def name_of_replaced(parameter: torch.Tensor) -> str | None:
    """Name of a parameter that a sharded one replaced, "?" if that is gone but left a mark; None of any other."""
    _, slot = owner_and_slot_of(parameter)
    if slot is not None:
        name: str = slot.name
        return name
    return "?" if "_shardwise_replaced" in parameter.__dict__ else None


class ReplacedParameter(nn.Parameter):
    """A parameter that `fully_shard` replaced, as whoever still holds it sees it (an average, a module outside the
    tree): readable until its sharded successor was written, from when on its values are of the past."""

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.backward:
            _refuse_to_train(tensors_in(kwargs["inputs"]))
        if func.__name__ not in _WITHOUT_VALUES and (func.__name__ != "__get__" or func == get_data):
            for parameter in tensors_in((args, kwargs)):
                _refuse_outdated(parameter, func.__name__)
        return call_without_torch_function(func, types, args, kwargs or {})


METADATA_METHODS = frozenset(
    ("size", "dim", "stride", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "__len__")
)
"""Of a tensor; they tell its shape, strides or dtype."""

_WITHOUT_VALUES = METADATA_METHODS | {
    *("__repr__", "__hash__", "__set__", "is_contiguous", "register_hook", "requires_grad_"),
    *("data_ptr", "untyped_storage"),
}
"""What whoever still holds a replaced parameter may call at any time."""


def _refuse_outdated(parameter: torch.Tensor, operator: str) -> None:
    if type(parameter) is not ReplacedParameter:
        return
    owner, slot = owner_and_slot_of(parameter)
    if owner is not None and owner.written_since_wrapping:
        raise StateError(
            f"{operator} reads parameter {slot.name!r} as it was before fully_shard replaced it, and the "
            "sharded one has been written since: take the parameters from the model after fully_shard, or clone "
            "this one before if its old values are meant"
        )


def _refuse_to_train(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        if type(parameter) is ReplacedParameter and (name := name_of_replaced(parameter)) is not None:
            raise StateError(
                f"backward was asked for the gradient of parameter {name!r} as it was before fully_shard replaced it: "
                "take the parameters from the model after fully_shard"
            )


def retire(original: nn.Parameter) -> None:
    """Let a replaced parameter say so when its values are used though they are of the past, or when it is trained."""
    if original.requires_grad and original.is_leaf:
        original.register_post_accumulate_grad_hook(_refuse_gradient)
    if type(original) is nn.Parameter and not original.is_meta:
        original.__class__ = ReplacedParameter


def _refuse_gradient(parameter: torch.Tensor) -> None:
    if (name := name_of_replaced(parameter)) is None:
        return  # what replaced it is gone
    parameter.grad = None
    raise StateError(
        f"parameter {name!r} got a gradient as it was before fully_shard replaced it, "
        "so something outside its unit still uses it: tie parameters inside the modules that are wrapped, and take "
        "references to them after fully_shard"
    )
