"""Policies, in any of the forms that people write them in, that choose the modules which become units."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ..core.root import CONTAINERS

Policy = Callable[..., bool] | Iterable[type[nn.Module]]
"""Chooses modules: a function of torch's or FairScale's form (module, recurse, number of parameters), a function of
the module alone, or classes of modules."""

ASKED = ("module", "recurse", "unwrapped_params", "nonwrapped_numel", "module_is_root")
"""The arguments that a policy is called with, by torch's and FairScale's names; its other parameters are options."""


def chooser(policy: Policy, name: str = "a policy") -> Callable[..., bool]:
    """``policy`` in the form that `shardwise.fairscale.auto_wrap` calls.

    Args:
        policy: chooses modules.
        name: of the argument, for errors.

    Raises:
        TypeError: if it is neither a function nor classes of modules.
        ValueError: for the class of a container, which nobody calls.
    """
    # A module can be called too, but not about modules: its class was meant.
    if callable(policy) and not isinstance(policy, (type, nn.Module)):
        return functools.partial(_ask, policy)
    classes = (policy,) if isinstance(policy, type) else tuple(policy) if isinstance(policy, Iterable) else ()
    # Policies are asked more than once, and an iterator has its classes only the first time.
    is_lasting = bool(classes) and not isinstance(policy, Iterator)
    if not is_lasting or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in classes):
        raise TypeError(f"{name} must be a function of a module or a set of module classes, not {policy!r}")
    for kind in classes:
        if issubclass(kind, CONTAINERS) and kind.forward is nn.Module.forward:
            raise ValueError(
                f"{name} chooses {kind.__name__}, which has no forward, so that nothing would tell when to gather "
                "its parameters: choose the classes of the modules in it"
            )

    def is_one_of_them(module: nn.Module, recurse: bool, **_: object) -> bool:
        return recurse or isinstance(module, classes)

    return is_one_of_them


def _ask(
    policy: Callable[..., Any], module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool
) -> bool:
    known = dict(zip(ASKED, (module, recurse, unwrapped_params, unwrapped_params, module_is_root), strict=True))
    parameters = inspect.signature(policy).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return bool(policy(**known))
    if "recurse" in parameters:
        return bool(policy(**{name: value for name, value in known.items() if name in parameters}))
    required = [p for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if len(required) == 1:
        return recurse or bool(policy(module))
    return bool(policy(module, recurse, unwrapped_params))
