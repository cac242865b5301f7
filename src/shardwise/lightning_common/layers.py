"""Plugins that replace layers, as ``Trainer(sync_batchnorm=True)`` does, in a model that may have units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn

from ..core.module import wrapped_class
from ..core.root import unit_of


def change_layers(model: nn.Module, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """``change(model)``, which may replace modules by others that have the same parameters.

    Replaced modules stay in the model, and take class, settings and buffers of their replacements: units gather
    parameters into the modules that they were made of.
    """
    before = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    changed = change(model)
    for parent, name, old in before:
        new = parent._modules.get(name)
        if old is not None and new is not None and new is not old and _has_same_parameters(old, new):
            _become(old, new)
            parent._modules[name] = old
    return changed


def _has_same_parameters(old: nn.Module, new: nn.Module) -> bool:
    names = old._parameters.keys()
    return names == new._parameters.keys() and all(getattr(old, name) is getattr(new, name) for name in names)


def _become(old: nn.Module, new: nn.Module) -> None:
    kind = type(new)
    cast(Any, old).__class__ = kind if unit_of(old) is None else wrapped_class(kind)
    kept = vars(nn.Module()).keys() | old._parameters.keys()  # hooks, and the dicts that units write into
    vars(old).update({name: value for name, value in vars(new).items() if name not in kept})
    old._buffers.update(new._buffers)
