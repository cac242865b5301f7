"""Policies that choose the modules which become units, by name in a registry."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from mmengine.config.lazy import LazyAttr, LazyObject
from mmengine.registry import FUNCTIONS, Registry
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from ..adapters.policies import ASKED
from ..fairscale.wrap import check_min_num_params, default_auto_wrap_policy

Policy = Callable[..., bool]

FSDP_WRAP_POLICIES = Registry("fsdp wrap policy")
"""Policies by name, for ``auto_wrap_policy="name"`` or ``dict(type="name", ...)``. One of your own:

    @FSDP_WRAP_POLICIES.register_module()
    def wide_layers(module, recurse, unwrapped_params, min_width=1024):
        return recurse or getattr(module, "out_features", 0) >= min_width

It is asked first with ``recurse=True``, whether to look at the children of ``module``, then with ``recurse=False``,
whether to make it a unit; ``unwrapped_params`` (or ``nonwrapped_numel``) is the number of elements of its parameters,
without those in units already if not ``recurse``.
"""

CLASS_OPTIONS = ("module_classes", "transformer_layer_cls")
"""Options whose values are classes of modules, which a config file names by strings."""

EXEMPT_OPTIONS = ("force_leaf_modules", "exclude_wrap_modules")
"""The same, of those that may be None."""


def module_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_classes: Iterable[type]) -> bool:
    """Make modules of some classes units.

    Args:
        module: the module in question.
        recurse: True asks whether to look at its children (always), False whether to make it a unit.
        unwrapped_params: makes no difference here.
        module_classes: classes, subclasses of which count too. In a config file names of classes of the model's
            modules, with the Python module before them or without.
    """
    return recurse or isinstance(module, tuple(module_classes))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, transformer_layer_cls: Iterable[type]
) -> bool:
    """`module_wrap_policy` with torch's name for the classes."""
    return module_wrap_policy(module, recurse, unwrapped_params, transformer_layer_cls)


for _name in ("size_based_auto_wrap_policy", "default_auto_wrap_policy"):
    FSDP_WRAP_POLICIES.register_module(name=_name, module=default_auto_wrap_policy)
FSDP_WRAP_POLICIES.register_module(module=module_wrap_policy)
FSDP_WRAP_POLICIES.register_module(module=transformer_auto_wrap_policy)


def find_policy(name: str, given: Any, model: nn.Module) -> Policy | None:
    """The policy that an argument means.

    Args:
        name: of the argument.
        given: None, a name, a dict with ``type`` and options, or a function.
        model: where to look up classes that are given by name.

    Raises:
        TypeError: if it is none of these, a registered entry cannot be called, or ``min_num_params`` is no number.
        ValueError: for an unknown name, a dict without ``type`` or with other options than the policy has, a class
            that no module of ``model`` has, a ``min_num_params`` that is NaN.
    """
    if given is None:
        return None
    if isinstance(given, str):
        found = _registered(name, given)
        _check_options(name, found, {})
        return found
    if isinstance(given, Mapping):
        options = dict(given)
        if "type" not in options:
            raise ValueError(f"{name} is a dict without 'type', {given!r}: name a policy, dict(type=..., options)")
        kind = options.pop("type")
        policy = _registered(name, kind) if isinstance(kind, str) else find_policy(name, kind, model)
        if policy is None:
            raise TypeError(f"{name}['type'] should be the name of a policy or a function, but is None")
        _check_options(name, policy, options)
        if policy in (default_auto_wrap_policy, size_based_auto_wrap_policy) and "min_num_params" in options:
            check_min_num_params(options["min_num_params"], f"{name}['min_num_params']")
        keys = [key for key in CLASS_OPTIONS if key in options]
        keys += [key for key in EXEMPT_OPTIONS if options.get(key) is not None]
        classes = {key: _classes(f"{name}[{key!r}]", options[key], model) for key in keys}
        return functools.partial(policy, **{**options, **classes})
    if isinstance(given, (type, nn.Module)) or not callable(given):
        raise TypeError(
            f"{name} should be None, a str (a name in FSDP_WRAP_POLICIES), a dict with 'type' and options, or a "
            f"callable, but has type {type(given).__name__}: {given!r}"
        )
    return given  # type: ignore[no-any-return]


def imported(items: Iterable[Any]) -> list[Any]:
    """The classes among ``items`` themselves, where a config file imports them: MMEngine leaves those in a list."""
    return [item.build() if isinstance(item, (LazyAttr, LazyObject)) else item for item in items]


def registered_function(name: str) -> Any:
    """The function that ``name`` is registered as in FUNCTIONS, or is the full name of; None if there is none."""
    # It raises for what cannot be a name, the empty string.
    with FUNCTIONS.switch_scope_and_registry(None), suppress(RuntimeError):
        return FUNCTIONS.get(name)
    return None


def _registered(name: str, policy: str) -> Policy:
    found = FSDP_WRAP_POLICIES.module_dict.get(policy)
    if found is None:
        # Where MMEngine 0.10 looks; it also knows full names, such as torch.distributed.fsdp.wrap's.
        found = registered_function(policy)
    if found is None:
        known = ", ".join(sorted(FSDP_WRAP_POLICIES.module_dict))
        raise ValueError(
            f"{name}={policy!r} is not registered: FSDP_WRAP_POLICIES has {known}; register a function of your own by "
            "@FSDP_WRAP_POLICIES.register_module()"
        )
    if isinstance(found, type) or not callable(found):
        raise TypeError(
            f"{name}={policy!r} is registered as a {type(found).__name__}, {found!r}, and should be a callable "
            "(module, recurse, unwrapped_params)"
        )
    return found  # type: ignore[no-any-return]


def _check_options(name: str, policy: Policy, options: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: for options that ``policy`` does not take, or needs and does not get.
    """
    parameters = inspect.signature(policy).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        takes = [parameter.name for parameter in parameters if parameter.name not in ASKED]
        if unknown := [key for key in options if key not in takes]:
            raise ValueError(
                f"{name} has {', '.join(map(repr, unknown))}; its type takes {', '.join(takes) or 'nothing'}"
            )
    by_name = any(parameter.name == "recurse" for parameter in parameters)
    needs = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if by_name and (missing := [key for key in needs if key not in ASKED and key not in options]):
        raise ValueError(
            f"{name} lacks {', '.join(map(repr, missing))}: name a policy with options, dict(type=..., ...)"
        )


def _classes(name: str, given: Any, model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Classes of modules from classes and names."""
    items = [given] if isinstance(given, (str, type)) else given
    if not isinstance(items, Iterable):
        raise TypeError(f"{name} should be classes of modules or their names, but has type {type(given).__name__}")
    known = {kind for module in model.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    found: list[type[nn.Module]] = []
    for item in imported(items):
        if isinstance(item, str):
            fitting = [kind for kind in known if item in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")]
            if not fitting:
                own = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
                raise ValueError(f"{name}: no module of {type(model).__name__} is a {item!r}; they are {own}")
            found += fitting
        elif isinstance(item, type) and issubclass(item, nn.Module):
            found.append(item)
        else:
            raise TypeError(f"{name} should be classes of modules or their names, but has {item!r}")
    return tuple(found)
