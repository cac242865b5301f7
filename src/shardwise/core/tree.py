"""Tensors inside nested arguments and outputs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any, TypeVar

import torch

from .device import annotated_like, parts_of

T = TypeVar("T")

_LEAVES = (str, bytes, int, float, complex, bool, type(None), Enum, torch.dtype, torch.device, torch.layout, type)
"""Types of values that have no tensors inside."""
MOST_PARTS = 1000
"""So many values `hidden_tensors` looks at, and gives up where there are more."""
_FLAT = {torch.Tensor, torch.nn.Parameter, str, int, float, bool, type(None)}


class Replacement:
    """Tensors inside nested values, replaced by what a function gives for each; see `map_tensors`.

    Args:
        function: of a tensor.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        self._function = function
        self._replaced: list[tuple[Any, Any]] = []
        """What was, and what takes its place."""
        self._met: dict[int, tuple[Any, Any]] = {}
        """Containers by their ids, and what takes their places or they themselves."""
        self._copies: list[_Copy] = []
        """Containers that code may change, the inner ones first."""

    def of(self, value: Any) -> Any:
        """``value`` with its tensors replaced."""
        if isinstance(value, torch.Tensor):
            # Each time that it is there, as FSDP2 does: the order in which autograd adds up its gradients may depend on
            # that (attention of a tensor to itself).
            new: Any = self._function(value)
        elif isinstance(value, tuple):
            parts = [*map(self.of, value)]
            new = value if _same(parts, value) else _rebuilt_tuple(value, parts)
        elif isinstance(value, _LEAVES):
            return value
        elif (met := self._met.get(id(value))) is not None:
            return met[1]
        else:
            self._met[id(value)] = value, value  # a container may contain itself
            new = self._of_parts(value)
            self._met[id(value)] = value, new
        if new is not value:
            self._replaced.append((value, new))
        return new

    def _of_parts(self, value: Any) -> Any:
        if (opened := _opened(value)) is None:
            return value
        old, rebuild = opened
        new = [*map(self.of, old)]
        if _same(new, old):
            return value
        copied = rebuild(new)
        self._copies.append(_Copy(value, copied))
        return copied

    def give_back(self) -> None:
        """What was since added to, replaced in and removed from the containers that took the places of others, now is
        so in those others. What else was done to these meanwhile stays."""
        if not self._copies:
            return
        origins = {id(new): old for old, new in self._replaced}
        for copied in self._copies:
            copied.give_back(lambda item: origins.get(id(item), item))


class _Copy:
    """A container that code may change, and what takes its place.

    Args:
        value: the container.
        copied: what takes its place, as it was made.
    """

    def __init__(self, value: Any, copied: Any):
        self._value, self._copied = value, copied
        self._is_registered = not isinstance(copied, (dict, list, deque)) and parts_of(copied) is not None
        self._parts: Any = dict(copied) if isinstance(copied, dict) else self._sequence()
        self._attributes = _attributes_of(copied)

    def _sequence(self) -> list[Any]:
        # What is registered may give its parts in containers that it makes for that.
        return all_tensors(self._copied) if self._is_registered else _sequence_in(self._copied)

    def give_back(self, given: Callable[[Any], Any]) -> None:
        """Do to the container what was done to its copy; ``given`` gives what stands there for an item of that."""
        old, copied = self._value, self._copied
        if isinstance(copied, dict):
            _give_items((old, old), copied, self._parts, given, operator.setitem, operator.delitem)
        elif [*map(id, parts := self._sequence())] != (before := [*map(id, self._parts)]):
            if self._is_registered:
                self._give_attributes(given)
                return
            if [*map(id, parts[: len(before)])] == before:
                parts = parts[len(before) :]
            else:
                old.clear()
            old.extend([*map(given, parts)])
        own, now = (old, _attributes_of(old)), _attributes_of(copied)
        _give_items(own, now, self._attributes, given, object.__setattr__, object.__delattr__)

    def _give_attributes(self, given: Callable[[Any], Any]) -> None:
        for name, item in _attributes_of(self._copied).items():
            if not (isinstance(item, _LEAVES) and item is self._attributes.get(name)):
                object.__setattr__(self._value, name, map_tensors(item, given))


def _sequence_in(value: Any) -> list[Any]:
    return [*value] if isinstance(value, (list, deque)) else []


def _attributes_of(value: Any) -> dict[str, Any]:
    if type(value) in (dict, list):  # most, of which there may be thousands
        return {}
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    # Some fields may lie in slots, beside others.
    own = {field.name: getattr(value, field.name) for field in fields if hasattr(value, field.name)}
    return {**own, **vars(value)} if hasattr(value, "__dict__") else own


def _give_items(
    own: tuple[Any, dict[Any, Any]],
    now: dict[Any, Any],
    before: dict[Any, Any],
    given: Callable[[Any], Any],
    set_: Callable[[Any, Any, Any], None],
    delete: Callable[[Any, Any], None],
) -> None:
    """Change an object, the first of ``own``, which has the items that are the second, as its copy has changed from
    ``before`` to ``now``, by ``set_`` and ``delete``; the order of items too."""
    old, held = own
    kept: dict[Any, Any] = {}
    if [*now][: len(before)] != [*before]:
        kept = {key: held[key] for key in before if key in held}
        for key in kept:
            delete(old, key)
    for key, item in now.items():
        if key not in before or item is not before[key]:
            set_(old, key, given(item))
        elif key in kept:
            set_(old, key, kept[key])


class Additions:
    """What code puts into the lists, deques, dicts and dataclasses that it is given.

    Args:
        value: the containers, nested.
    """

    def __init__(self, value: Any):
        self._containers: list[Any] = []
        self._known: dict[int, tuple[Any, Any]] = {}
        """What they contain and they themselves, by ids, and what takes their places: at first nothing else."""
        self._visit(value)

    def _visit(self, value: Any) -> None:
        if isinstance(value, _LEAVES) or id(value) in self._known:
            return
        self._known[id(value)] = value, value
        if isinstance(value, tuple):
            parts: Any = value
        elif isinstance(value, (dict, list, deque)) or dataclasses.is_dataclass(value):
            self._containers.append(value)
            parts = [part for _, part in (*_entries(value), *_attributes_of(value).items())]
        else:
            return
        for part in parts:
            self._visit(part)

    def replace(self, function: Callable[[Any], Any]) -> None:
        """Put what ``function`` gives in the place of everything that is new."""
        for container in self._containers:
            for key, item in _entries(container):
                if (new := self._of(item, function)) is not item:
                    container[key] = new
            for name, item in _attributes_of(container).items():
                if (new := self._of(item, function)) is not item:
                    object.__setattr__(container, name, new)

    def _of(self, item: Any, function: Callable[[Any], Any]) -> Any:
        if isinstance(item, _LEAVES):
            return item
        if id(item) not in self._known:
            new = function(item)
            self._known[id(item)] = item, new
            self._known[id(new)] = new, new
        return self._known[id(item)][1]


def _entries(container: Any) -> list[tuple[Any, Any]]:
    return [*(container.items() if isinstance(container, dict) else enumerate(_sequence_in(container)))]


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``function`` of each tensor in it; depth first, in order.

    Looks into dicts, lists, tuples, named tuples, dataclasses and what is registered with torch's trees. What does not
    change stays the same object, containers keep their type, and one that is there several times stays one.
    """
    return function(value) if isinstance(value, torch.Tensor) else Replacement(function).of(value)


def _opened(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """What is in a container that is no tuple, and a function that makes one of other parts; None of anything else."""
    if isinstance(value, dict):
        return [*value.values()], lambda new: _rebuilt_dict(value, dict(zip(value, new, strict=True)))
    if isinstance(value, list):
        return [*value], lambda new: _rebuilt_list(value, new)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        parts = [getattr(value, name) for name in names]
        # Not `dataclasses.replace`, which runs the constructor again.
        return parts, lambda new: _copied_with(dict(zip(names, new, strict=True)), value, object.__setattr__)
    return parts_of(value)


def _same(new: Any, old: Any) -> bool:
    return all(map(operator.is_, new, old))


def _rebuilt_dict(value: dict[Any, Any], items: dict[Any, Any]) -> Any:
    # Subclasses (ordered dicts, model outputs that are also dataclasses) keep attributes beside their items.
    return items if type(value) is dict else _copied_with(items, value, operator.setitem)


def _copied_with(items: dict[Any, Any], value: Any, set_: Callable[[Any, Any, Any], None]) -> Any:
    copied = copy.copy(value)
    for key, item in items.items():
        set_(copied, key, item)
    return copied


def _rebuilt_list(value: list[Any], parts: list[Any]) -> list[Any]:
    if type(value) is list:
        return parts
    rebuilt = copy.copy(value)
    rebuilt[:] = parts
    return rebuilt


def _rebuilt_tuple(value: tuple[Any, ...], parts: list[Any]) -> Any:
    if type(value) is tuple or hasattr(value, "n_sequence_fields"):  # what operators return, such as `max`
        return type(value)(parts)
    # Not by its class, whose constructor may take other arguments.
    rebuilt = tuple.__new__(type(value), parts)
    if hasattr(value, "__dict__"):
        rebuilt.__dict__.update(vars(value))
    return rebuilt


def all_in(value: Any, kind: type[T]) -> list[T]:
    """Each ``kind`` in nested dicts, lists and tuples, as arguments of operators are."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [found for item in value for found in all_in(item, kind)]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in nested dicts, lists and tuples."""
    return all_in(value, torch.Tensor)


def tensors_requiring_grad(value: Any) -> list[torch.Tensor]:
    """Tensors in ``value`` that require gradients, in the order of `map_tensors`."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    return [tensor for tensor in all_tensors(value) if tensor.requires_grad]


def is_flat(value: Any) -> bool:
    """Whether ``value`` is a tuple, as most arguments are, with nothing in it that could contain other tensors."""
    return type(value) is tuple and _FLAT.issuperset(map(type, value))


def all_tensors(value: Any) -> list[torch.Tensor]:
    """Tensors in ``value``, in the order of `map_tensors`."""
    if is_flat(value):
        return [one for one in value if isinstance(one, torch.Tensor)]
    found: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, visit)
    return found


def casting(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that casts floating-point tensors to ``dtype``, and gives others as they are."""
    return lambda tensor: annotated_like(tensor.to(dtype), tensor) if tensor.is_floating_point() else tensor


def hidden_tensors(value: Any) -> list[torch.Tensor] | None:
    """Tensors in ``value``, also those in attributes of plain objects; None if there may be more, as in closures."""
    found: list[torch.Tensor] = []
    met: dict[int, Any] = {}
    left, count = [value], 0
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif not isinstance(item, _LEAVES) and id(item) not in met:
            met[id(item)] = item
            opened = ([*item], None) if isinstance(item, tuple) else _opened(item)
            parts = _own_values(item) if opened is None else opened[0]
            if parts is None or (count := count + len(parts)) > MOST_PARTS:
                return None
            left += parts
    return [*{id(one): one for one in found}.values()]


def _own_values(value: Any) -> list[Any] | None:
    """What attributes of a plain object hold, in its dict and in slots, without running code of its class; None of
    what may hold other things, as what can be called."""
    if callable(value) or isinstance(value, ModuleType):
        return None
    members = [one for base in type(value).__mro__ for one in vars(base).values()]
    slots = [one for one in members if isinstance(one, MemberDescriptorType)]
    has_dict = any(isinstance(one, GetSetDescriptorType) and one.__name__ == "__dict__" for one in members)
    if not (slots or has_dict):
        return None
    held = [*object.__getattribute__(value, "__dict__").values()] if has_dict else []
    for slot in slots:
        with contextlib.suppress(AttributeError):  # nothing is in it
            held.append(slot.__get__(value))
    return held


def opaque_types(value: Any) -> list[type]:
    """Types of objects in ``value`` that may hold tensors which `map_tensors` does not find."""
    if isinstance(value, (*_LEAVES, torch.Tensor)):
        return []
    opened = ([*value], None) if isinstance(value, tuple) else _opened(value)
    return [type(value)] if opened is None else [found for part in opened[0] for found in opaque_types(part)]
