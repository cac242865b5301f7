"""Lightning is installed under two names, `lightning` and `pytorch_lightning`, each with classes and registries of its
own. One implementation serves both: it has a class in each, and an instance joins the namespace that uses it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Namespace:
    """One of the names.

    Args:
        pytorch: package of the Trainer.
        fabric: package of Fabric.
    """

    pytorch: str
    fabric: str

    def of(self, part: str, module: str, name: str) -> Any:
        """``name`` in a module below the package of the Trainer ("pytorch") or of Fabric ("fabric")."""
        return getattr(importlib.import_module(f"{self.package(part)}.{module}"), name)

    def package(self, part: str) -> str:
        """The package of the Trainer ("pytorch") or of Fabric ("fabric")."""
        return self.pytorch if part == "pytorch" else self.fabric

    @property
    def tops(self) -> set[str]:
        """Top-level packages."""
        return {self.pytorch.partition(".")[0], self.fabric.partition(".")[0]}


NAMESPACES = (Namespace("lightning.pytorch", "lightning.fabric"), Namespace("pytorch_lightning", "lightning_fabric"))
REGISTRIES = {"pytorch": "StrategyRegistry", "fabric": "STRATEGY_REGISTRY"}
"""The name of the registry of strategies in each part."""


@cache
def installed_namespaces() -> tuple[Namespace, ...]:
    """The namespaces that can be imported; first the one that the program has imported, whose classes it derives from.

    Raises:
        ImportError: if there is none.
    """
    found = tuple(
        namespace
        for namespace in NAMESPACES
        if all(importlib.util.find_spec(top) is not None for top in namespace.tops)
    )
    if not found:
        raise ImportError("shardwise's strategies for Lightning need it: pip install 'lightning>=2.6'")
    return tuple(sorted(found, key=lambda namespace: namespace.pytorch not in sys.modules))


_FurtherBase: Any = object
"""Stands for Lightning's own strategy, which is a further base of each class."""


class InEachNamespace(_FurtherBase):  # type: ignore[misc]
    """Base of an implementation that has a class in each namespace.

    Its instances are made in the first namespace. Lightning gives a strategy its accelerator before anything else,
    whose class tells the namespace that the strategy is used in.
    """

    part: str
    """``"pytorch"`` for the Trainer, ``"fabric"`` for Fabric."""
    names: Sequence[str]
    """By which a program asks for the strategy."""
    namespace: Namespace
    _classes: Mapping[Namespace, Any]

    @property
    def accelerator(self) -> Any:
        """The accelerator that the strategy runs on, of the namespace that it is used in."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        self._join(namespace_of(accelerator) or self.namespace)
        self._accelerator = accelerator

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the class under its names."""
        for name in cls.names:
            strategy_registry.register(name, cls, "Fully sharded data-parallel training by shardwise", override=True)

    def _join(self, namespace: Namespace) -> None:
        """
        Raises:
            TypeError: if the strategy's class is a user's, derived from that of the other namespace.
        """
        if namespace is self.namespace:
            return
        if self._classes.get(self.namespace) is not type(self):
            raise TypeError(
                f"{type(self).__name__} derives from a class for {self.namespace.package(self.part)} and is used in "
                f"{namespace.package(self.part)}: derive it from {self._classes[namespace].__module__}."
                f"strategy_for({namespace.package(self.part)!r})"
            )
        # Both classes have the same implementation and the same attributes.
        self.__class__ = self._classes[namespace]


def namespace_of(value: object) -> Namespace | None:
    """The namespace that the class of ``value`` is from, or derives from."""
    for kind in type(value).__mro__:
        top = kind.__module__.partition(".")[0]
        for namespace in NAMESPACES:
            if top in namespace.tops:
                return namespace
    return None


def check_plugin(name: str, value: object, part: str, module: str, kind: str, instead: str = "") -> None:
    """Lightning passes over, or stumbles on, what is of no class of its own.

    Args:
        name: of the argument.
        value: None, or a plugin of any namespace.
        part: "pytorch" or "fabric".
        module: of the plugin's class, below the package of ``part``.
        kind: name of the class.
        instead: further advice.

    Raises:
        TypeError: if ``value`` is something else.
    """
    if value is None or any(isinstance(value, space.of(part, module, kind)) for space in installed_namespaces()):
        return
    package = installed_namespaces()[0].package(part)
    raise TypeError(f"{name} must be an instance of {package}.{module}.{kind}, not {value!r}{instead}")


class StrategyClasses:
    """A class of one implementation for each namespace, registered there.

    Args:
        name: of the classes.
        implementation: base of all.
        kinds: names of Lightning's own strategies, of which the classes are registered as subclasses.
    """

    def __init__(self, name: str, implementation: type[InEachNamespace], kinds: Sequence[str] = ()):
        part = implementation.part
        bases = {
            namespace: namespace.of(part, "strategies", "ParallelStrategy") for namespace in installed_namespaces()
        }
        self._classes: dict[Namespace, Any] = {}
        for namespace, base in bases.items():
            attributes = {
                "namespace": namespace,
                "_classes": self._classes,
                "__module__": implementation.__module__,
                "__doc__": implementation.__doc__,
            }
            self._classes[namespace] = type(base)(name, (implementation, base), attributes)
        for namespace, cls in self._classes.items():
            cls.register_strategies(namespace.of(part, "strategies", REGISTRIES[part]))
            for kind in kinds:
                namespace.of(part, "strategies", kind).register(cls)
            for other, base in bases.items():
                if other is not namespace:
                    base.register(cls)  # instances are made in any namespace

    @property
    def first(self) -> Any:
        """The class of the first of `installed_namespaces`."""
        return next(iter(self._classes.values()))

    def strategy_for(self, package: str) -> Any:
        """The class to derive from in a package: ``"lightning.pytorch"`` or ``"pytorch_lightning"`` for the Trainer,
        ``"lightning.fabric"`` or ``"lightning_fabric"`` for Fabric.

        Raises:
            ValueError: if there is no such package, or it is not installed.
        """
        for namespace, cls in self._classes.items():
            if package in {namespace.pytorch, namespace.fabric, *namespace.tops}:
                return cls
        known = ", ".join(namespace.package(cls.part) for namespace, cls in self._classes.items())
        raise ValueError(f"no strategy for {package!r}; there are those for {known}")
