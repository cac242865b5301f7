"""Where modules have tensors registered, and replacing tensors there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from .core.device import share_hooks
from .core.module import FSDPModule, class_before_sharding
from .core.place import Place


@dataclass(frozen=True)
class Site:
    """A name under which a module has a parameter or a buffer."""

    module: nn.Module
    name: str
    is_buffer: bool = False

    def get(self) -> torch.Tensor:
        """What is registered now."""
        registered = (self.module._buffers if self.is_buffer else self.module._parameters)[self.name]
        assert registered is not None
        return registered

    def put(self, tensor: torch.Tensor) -> None:
        """Register ``tensor``."""
        if self.is_buffer:
            self.module._buffers[self.name] = tensor
        else:
            Place(self.module, self.name).put(tensor)  # type: ignore[arg-type]


def under(path: str, name: str) -> str:
    """The full name of what the module at ``path`` has as ``name``."""
    return f"{path}.{name}" if path else name


def sites_of(module: nn.Module) -> Iterator[Site]:
    """Where ``module`` itself has parameters and buffers."""
    yield from (Site(module, name) for name, value in module._parameters.items() if value is not None)
    yield from (Site(module, name, True) for name, value in module._buffers.items() if value is not None)


def sites_by_tensor(modules: Iterable[nn.Module]) -> dict[int, list[Site]]:
    """Where each of the parameters and buffers that ``modules`` themselves have is registered, by its id."""
    found: defaultdict[int, list[Site]] = defaultdict(list)
    for module in modules:
        for site in sites_of(module):
            found[id(site.get())].append(site)
    return dict(found)


@contextmanager
def before_sharding(modules: Iterable[nn.Module], tensors: list[tuple[Site, torch.Tensor]]) -> Iterator[None]:
    """Inside, ``modules`` have the classes that they had before `fully_shard`, and ``tensors`` (emptied, so that those
    go which are replaced inside) are registered."""
    classes = [(module, type(module)) for module in modules if isinstance(module, FSDPModule)]
    registered = [(site, site.get()) for site, _ in tensors]
    try:
        for module, kind in classes:
            cast(Any, module).__class__ = class_before_sharding(kind)
        while tensors:
            site, tensor = tensors.pop()
            site.put(tensor)
            del tensor
        yield
    finally:
        for site, tensor in registered:
            site.put(tensor)
        for module, kind in classes:
            module.__class__ = kind


def become(tensor: torch.Tensor, value: torch.Tensor, sites: Sequence[Site]) -> torch.Tensor:
    """Let ``tensor`` be what ``value`` is, as the same object where torch can do that: optimizers may hold it.

    Args:
        tensor: a parameter or buffer; keeps its class, attributes and hooks.
        value: a tensor or parameter, of which there is no other reference.
        sites: where ``tensor`` is registered.

    Returns:
        What is registered now: ``tensor``, or else ``value``.
    """
    value.__class__ = type(tensor)
    value.__dict__.update(tensor.__dict__)
    share_hooks(value, tensor)  # a swap leaves behind what makes autograd call them
    try:
        torch.utils.swap_tensors(tensor, value)
        return tensor
    except RuntimeError:  # a weak reference or an autograd graph holds one of them
        for site in sites:
            site.put(value)
        return value
