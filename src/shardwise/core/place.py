"""Where parameters are registered on modules."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from .errors import StateError


class _Attributes:
    """The registry of a module that registers in its own way."""

    __slots__ = ("module",)

    def __init__(self, module: weakref.ref[nn.Module]):
        self.module = module

    def get(self, name: str) -> Any:
        module = self.module()
        return None if module is None else module._parameters.get(name)

    def __setitem__(self, name: str, parameter: Any) -> None:
        if (module := self.module()) is not None:
            setattr(module, name, parameter)


Registry = dict[str, Any] | _Attributes
"""Where a module's parameters are registered by name."""


class Place:
    """One name of one module under which a parameter is registered.

    Writing into the module's own dict of parameters avoids `nn.Module.__setattr__`'s checks, but not for modules
    that override it (recurrent ones keep a second list of their weights).
    """

    __slots__ = ("module", "name", "registry")

    def __init__(self, module: nn.Module, name: str):
        self.module = weakref.ref(module)
        self.name = name
        self.registry: Registry = module._parameters
        if type(module).__setattr__ is not nn.Module.__setattr__:
            self.registry = _Attributes(self.module)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and (self.module, self.name) == (other.module, other.name)

    __hash__ = None  # type: ignore[assignment]

    @property
    def exists(self) -> bool:
        """Whether its module does."""
        return self.module() is not None

    def get(self) -> nn.Parameter:
        """What is registered now on a module that exists.

        Raises:
            StateError: if nothing is.
        """
        module = self.module()
        assert module is not None
        if (parameter := module._parameters.get(self.name)) is None:
            raise StateError(
                f"{type(module).__name__} has lost its parameter {self.name!r} since fully_shard: remove parameters "
                "and register parametrizations before"
            )
        return parameter

    def give(self, tensor: torch.Tensor) -> None:
        """Let the name give ``tensor``, whatever is registered or is not."""
        module = self.module()
        if module is None:
            return
        if isinstance(self.registry, _Attributes) and isinstance(tensor, nn.Parameter):
            registered = module._parameters.pop(self.name, None)
            setattr(module, self.name, tensor)
            del module._parameters[self.name]
            if registered is not None:
                module._parameters[self.name] = registered
        module.__dict__[self.name] = tensor

    def withdraw(self) -> None:
        """The name gives what is registered again."""
        if (module := self.module()) is not None:
            module.__dict__.pop(self.name, None)

    def remove(self) -> None:
        """Register nothing."""
        if (module := self.module()) is not None:
            module._parameters.pop(self.name, None)

    def put(self, parameter: nn.Parameter) -> None:
        """Register ``parameter``."""
        self.registry[self.name] = parameter
