"""Tensors inside nested arguments and outputs."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from .device import parts_of


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``function`` of each tensor in it; depth first, in order.

    Looks into dicts, lists, tuples, named tuples, dataclasses and what is registered with torch's trees. What does not
    change stays the same object, and containers keep their type.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        if not value:
            return value
        items = {key: map_tensors(item, function) for key, item in value.items()}
        return value if _same(items.values(), value.values()) else _rebuilt_dict(value, items)
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(item, function) for item in value]
        if _same(parts, value):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        old = [getattr(value, name) for name in names]
        new = [map_tensors(item, function) for item in old]
        return value if _same(new, old) else _rebuilt_dataclass(value, dict(zip(names, new, strict=True)))
    if (registered := parts_of(value)) is not None:
        old, rebuild = registered
        new = [map_tensors(item, function) for item in old]
        return value if _same(new, old) else rebuild(new)
    return value


def _same(new: Any, old: Any) -> bool:
    return all(map(operator.is_, new, old))


def _rebuilt_dict(value: dict[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    # Subclasses (ordered dicts, model outputs that are also dataclasses) keep attributes beside their items.
    rebuilt = copy.copy(value)
    for key, item in items.items():
        rebuilt[key] = item
    return rebuilt


def _rebuilt_dataclass(value: Any, fields: dict[str, Any]) -> Any:
    # Not `dataclasses.replace`, which runs the constructor again.
    rebuilt = copy.copy(value)
    for name, item in fields.items():
        object.__setattr__(rebuilt, name, item)
    return rebuilt


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in nested dicts, lists and tuples, as arguments of operators are."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [found for item in value for found in tensors_in(item)]


def tensors_requiring_grad(value: Any) -> list[torch.Tensor]:
    """Tensors in ``value`` that require gradients, in the order of `map_tensors`."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    found: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(value, visit)
    return found


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


_PLAIN = (str, bytes, int, float, complex, bool, type(None), Enum, torch.dtype, torch.device, torch.layout, type)


def opaque_types(value: Any) -> list[type]:
    """Types of objects in ``value`` that may hold tensors which `map_tensors` does not find."""
    if isinstance(value, (*_PLAIN, torch.Tensor)):
        return []
    if isinstance(value, dict):
        return [found for item in value.values() for found in opaque_types(item)]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in opaque_types(item)]
    if dataclasses.is_dataclass(value):
        return [found for field in dataclasses.fields(value) for found in opaque_types(getattr(value, field.name))]
    if (registered := parts_of(value)) is not None:
        return [found for item in registered[0] for found in opaque_types(item)]
    return [type(value)]
