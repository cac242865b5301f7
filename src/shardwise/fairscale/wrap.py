"""Wrap modules while a model is built, or by a policy afterwards."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import nn

Policy = Callable[..., bool]
Wrapper = Callable[..., nn.Module]

_ASKED = ("module", "recurse", "unwrapped_params", "module_is_root")
"""The arguments that `auto_wrap` passes to a policy; its other parameters are options."""


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Wrap modules with enough parameters outside of the modules that are wrapped already.

    A policy is any function that takes the first four arguments by these names.

    Args:
        module: the module in question.
        recurse: True asks whether to look at its children, False whether to wrap it.
        unwrapped_params: number of elements of its parameters; without those wrapped already if not ``recurse``.
        module_is_root: whether `auto_wrap` was called on it.
        min_num_params: elements from which on modules are looked into and wrapped.
        force_leaf_modules: classes of modules that are neither looked into nor wrapped; None for the attribute
            ``FORCE_LEAF_MODULES`` of this function, attention.
        exclude_wrap_modules: classes of modules that are not wrapped themselves; None for the attribute
            ``EXCLUDE_WRAP_MODULES`` of this function, containers without a forward.
        skip_params_check_for_root: whether the root is wrapped however few parameters are left to it.

    Returns:
        The answer.

    Raises:
        TypeError: if ``min_num_params`` is no number.
        ValueError: if it is NaN, which nothing compares with.
    """
    check_min_num_params(min_num_params)
    policy: Any = default_auto_wrap_policy
    leaves = policy.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = policy.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    is_large = unwrapped_params >= min_num_params
    if recurse:
        return is_large and not isinstance(module, tuple(leaves))
    return (is_large or (module_is_root and skip_params_check_for_root)) and not isinstance(module, tuple(excluded))


def check_min_num_params(number: Any, name: str = "min_num_params") -> None:
    """
    Args:
        number: of elements, from which on a policy wraps modules.
        name: of the argument.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is NaN.
    """
    if not isinstance(number, Real):
        raise TypeError(f"{name} must be a number, not {number!r}")
    if math.isnan(number):
        raise ValueError(f"{name}={number}: pass the number of elements from which on modules are wrapped")


# Attributes, because programs read and change them there.
default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
default_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """Wrap the modules that have an attribute ``wrapper_config``, a dict of arguments for their wrapper.

    Args:
        module: the module in question.
        recurse: True asks whether to look at its children (always), False whether to wrap it.
        unwrapped_params: makes no difference here.
        module_is_root: makes no difference here.

    Returns:
        The answer.
    """
    return recurse or hasattr(module, "wrapper_config")


class ConfigAutoWrap:
    """What `wrap` and `auto_wrap` wrap with, as long as the context is on; see `enable_wrap`.

    Attributes:
        in_autowrap_context: whether a context is on.
        wrapper_cls: class, or function, that gives the wrapped module.
        kwargs: its arguments.
        auto_wrap_policy: for `auto_wrap`.
        move_module_cuda_half: whether modules become half-precision ones on the accelerator before they are wrapped.
    """

    in_autowrap_context: ClassVar[bool] = False
    wrapper_cls: ClassVar[Wrapper | None] = None
    kwargs: Mapping[str, Any] = {}
    auto_wrap_policy: Policy | None = None
    move_module_cuda_half: ClassVar[bool] = False

    def __init__(self, auto_wrap_policy: Policy | None = None, **kwargs: Any):
        self.auto_wrap_policy = auto_wrap_policy
        self.kwargs = kwargs

    @staticmethod
    def enable_autowrap_context(auto_wrap_policy: Policy | None, kwargs: Mapping[str, Any]) -> None:
        """Turn the context on; an error leaves it as it was.

        Args:
            auto_wrap_policy: None for `default_auto_wrap_policy`.
            kwargs: ``wrapper_cls``, maybe ``move_module_cuda_half``, and the wrapper's arguments.

        Raises:
            NotImplementedError: if one is on already.
            TypeError: if ``wrapper_cls`` is missing or cannot be called, or the policy cannot.
        """
        if ConfigAutoWrap.in_autowrap_context:
            raise NotImplementedError(
                "enable_wrap inside of enable_wrap is not supported: leave the outer context first, or pass what "
                "differs to wrap and auto_wrap"
            )
        _check_policy(auto_wrap_policy)
        options = dict(kwargs)
        wrapper_cls = options.pop("wrapper_cls", None)
        if not callable(wrapper_cls):
            raise TypeError(
                f"enable_wrap(wrapper_cls={wrapper_cls!r}): pass the class to wrap modules with, such as "
                "FullyShardedDataParallel"
            )
        ConfigAutoWrap.move_module_cuda_half = bool(options.pop("move_module_cuda_half", False))
        ConfigAutoWrap.wrapper_cls = wrapper_cls
        ConfigAutoWrap.kwargs = options
        ConfigAutoWrap.auto_wrap_policy = default_auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy
        ConfigAutoWrap.in_autowrap_context = True

    @staticmethod
    def disable_autowrap_context() -> None:
        """Turn the context off."""
        ConfigAutoWrap.in_autowrap_context = False
        ConfigAutoWrap.move_module_cuda_half = False
        ConfigAutoWrap.wrapper_cls = None
        ConfigAutoWrap.kwargs = {}
        ConfigAutoWrap.auto_wrap_policy = None

    def __enter__(self) -> None:
        self.enable_autowrap_context(self.auto_wrap_policy, self.kwargs)

    def __exit__(self, *error: object) -> None:
        self.disable_autowrap_context()

    @staticmethod
    def recursive_wrap(
        module: nn.Module, auto_wrap_policy: Policy | None, module_is_root: bool, **kwargs: Any
    ) -> tuple[nn.Module, int]:
        """What `auto_wrap` does inside a context.

        Args:
            module: changed in place below.
            auto_wrap_policy: None for that of the context.
            module_is_root: what to tell the policy about ``module``.
            kwargs: arguments of the wrapper.

        Returns:
            ``module``, wrapped or not, and how many elements of its parameters are in wrapped modules.

        Raises:
            ValueError: if a module in it is wrapped already.
        """
        policy = ConfigAutoWrap.auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy
        assert policy is not None
        _refuse_wrapped(module, kwargs.get("wrapper_cls", ConfigAutoWrap.wrapper_cls))
        walk = _Walk(module, policy, kwargs)
        result = walk.visit(module, type(module).__name__, module_is_root)
        if walk.left:
            warnings.warn(
                f"auto_wrap: {', '.join(walk.left)} use parameters that modules outside of them use too; they stay "
                "with the module that contains all of these",
                stacklevel=3,
            )
        return result, sum(walk.sizes[parameter] for parameter in walk.wrapped)


@contextmanager
def enable_wrap(
    auto_wrap_policy: Policy | None = None, *, wrapper_cls: Wrapper, **wrapper_kwargs: Any
) -> Iterator[None]:
    """Inside of this context `wrap` and `auto_wrap` wrap modules; outside they return them as they are.

    Args:
        auto_wrap_policy: decides what `auto_wrap` wraps; None for `default_auto_wrap_policy`.
        wrapper_cls: class, or function, that takes a module and gives the wrapped one.
        wrapper_kwargs: its arguments. ``move_module_cuda_half=True`` is not one of them: every module is moved to the
            accelerator, where there is one, and to float16 before it is wrapped.

    Raises:
        NotImplementedError: inside of another such context.
        TypeError: if ``wrapper_cls`` or the policy cannot be called.
    """
    with ConfigAutoWrap(auto_wrap_policy, wrapper_cls=wrapper_cls, **wrapper_kwargs):
        yield


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module as the `enable_wrap` context around says; outside of one, return it as it is.

    Args:
        module: the module. An attribute ``wrapper_config`` of it, a dict, goes before the context's arguments.
        wrap_overrides: go before both. Either may have a ``wrapper_cls``.

    Returns:
        The wrapped module.

    Raises:
        TypeError: if ``wrapper_config`` is not a dict.
    """
    if not ConfigAutoWrap.in_autowrap_context:
        return module
    config = getattr(module, "wrapper_config", {})
    if not isinstance(config, Mapping):
        raise TypeError(
            f"{type(module).__name__}.wrapper_config must be a dict of arguments for its wrapper, not {config!r}"
        )
    options = {**ConfigAutoWrap.kwargs, **config, **wrap_overrides}
    wrapper_cls: Wrapper = options.pop("wrapper_cls", ConfigAutoWrap.wrapper_cls)
    if ConfigAutoWrap.move_module_cuda_half:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        module = module.to(accelerator).half()
    return wrapper_cls(module, **options)


def auto_wrap(module: nn.Module, auto_wrap_policy: Policy | None = None, **kwargs: Any) -> nn.Module:
    """Wrap those modules inside ``module``, and itself, that a policy chooses; outside of `enable_wrap`, none.

    Children are wrapped before the modules that contain them, in place. A module that is used in several places is
    wrapped once. One whose parameters are tied to those of a module outside of it is left, with a warning, to the
    first module chosen that contains both: one wrapper has to have all uses of a parameter.

    Args:
        module: the tree; nothing in it may be wrapped yet.
        auto_wrap_policy: None for that of the context.
        kwargs: options of the policy, such as ``min_num_params`` of `default_auto_wrap_policy`; what it does not take
            goes to the wrapper, as in `wrap`.

    Returns:
        ``module``, or its wrapper.

    Raises:
        TypeError: for an argument that neither the policy nor the wrapper takes, a ``module`` that is none, a policy
            that cannot be called.
        ValueError: if a module in it is wrapped already; the message names it.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"auto_wrap takes a module, not {type(module).__name__}")
    if not ConfigAutoWrap.in_autowrap_context:
        return module
    _check_policy(auto_wrap_policy)
    policy = ConfigAutoWrap.auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy
    assert policy is not None
    options = {name: kwargs.pop(name) for name in _options_of(policy) & kwargs.keys()}
    _check_taken(policy, kwargs.get("wrapper_cls", ConfigAutoWrap.wrapper_cls), kwargs)
    if options:
        policy = functools.partial(policy, **options)
    return ConfigAutoWrap.recursive_wrap(module, policy, module_is_root=True, **kwargs)[0]


def _check_policy(policy: Any) -> None:
    if policy is not None and (isinstance(policy, type) or not callable(policy)):
        raise TypeError(
            f"auto_wrap_policy={policy!r}: pass a function (module, recurse, unwrapped_params, module_is_root), or None"
        )


def _options_of(policy: Policy) -> set[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = _parameters_of(policy) or []
    return {parameter.name for parameter in parameters if parameter.kind in named} - set(_ASKED)


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # functions written in C may have no signature
        return None


def _check_taken(policy: Policy, wrapper_cls: Any, arguments: Mapping[str, Any]) -> None:
    # Checked before wrapping: if the policy chooses no module, nothing else notices a misspelled option.
    parameters = _parameters_of(wrapper_cls)
    if parameters is None or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    unknown = arguments.keys() - {parameter.name for parameter in parameters} - {"wrapper_cls"}
    if unknown:
        raise TypeError(
            f"auto_wrap got {', '.join(sorted(unknown))}, which neither the policy {_name_of(policy)} nor the wrapper "
            f"{_name_of(wrapper_cls)} takes"
        )


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _refuse_wrapped(root: nn.Module, wrapper_cls: Any) -> None:
    while isinstance(wrapper_cls, functools.partial):
        wrapper_cls = wrapper_cls.func
    if not isinstance(wrapper_cls, type):
        return
    for name, module in root.named_modules():
        if isinstance(module, wrapper_cls):
            where = f"module {name!r}" if name else "the module itself"
            raise ValueError(
                f"auto_wrap of {type(root).__name__}: {where} is wrapped in {wrapper_cls.__name__} already. Call "
                "auto_wrap once, before anything in the module is wrapped; to choose modules in several passes, give "
                "them an attribute wrapper_config and then use config_auto_wrap_policy"
            )


class _Walk:
    """One pass of `auto_wrap`. It holds no parameter, so that what a wrapper has sharded is freed at once.

    Args:
        root: of the tree.
        policy: asked about each module.
        options: of the wrapper.

    Attributes:
        sizes: elements of each parameter, by id.
        wrapped: ids of parameters that a wrapper has.
        left: names of modules that were chosen but share parameters with others.
    """

    def __init__(self, root: nn.Module, policy: Policy, options: Mapping[str, Any]):
        self._root, self._policy, self._options = root, policy, options
        self.sizes = {id(parameter): parameter.numel() for parameter in root.parameters()}
        self.wrapped: set[int] = set()
        self.left: list[str] = []
        self._results: dict[int, nn.Module] = {}
        self._paths: dict[int, Counter[int]] = {}
        self._count_paths(root)

    def _count_paths(self, module: nn.Module) -> Counter[int]:
        """From ``module``, the number of ways to each module and parameter below, by id."""
        if (known := self._paths.get(id(module))) is not None:
            return known
        paths = Counter([id(module), *(id(p) for p in module._parameters.values() if p is not None)])
        for child in module._modules.values():
            if child is not None:
                paths.update(self._count_paths(child))
        self._paths[id(module)] = paths
        return paths

    def visit(self, module: nn.Module, name: str, is_root: bool) -> nn.Module:
        """Wrap modules inside ``module``, and itself, as the policy says; return what takes its place."""
        if id(module) in self._results:
            return self._results[id(module)]
        result = module
        parameters = [key for key in self._paths[id(module)] if key in self.sizes]
        if self._asks(module, True, parameters, is_root):
            for key, child in list(module._modules.items()):
                if child is not None and (new := self.visit(child, f"{name}.{key}", False)) is not child:
                    setattr(module, key, new)
            parameters = [key for key in parameters if key not in self.wrapped]
            if self._asks(module, False, parameters, is_root):
                result = self._wrap(module, name, parameters)
        self._results[id(module)] = result
        return result

    def _asks(self, module: nn.Module, recurse: bool, parameters: list[int], is_root: bool) -> bool:
        number = sum(self.sizes[parameter] for parameter in parameters)
        return self._policy(module=module, recurse=recurse, unwrapped_params=number, module_is_root=is_root)

    def _wrap(self, module: nn.Module, name: str, parameters: list[int]) -> nn.Module:
        everywhere, here = self._paths[id(self._root)], self._paths[id(module)]
        if any(everywhere[key] != everywhere[id(module)] * here[key] for key in parameters):
            self.left.append(name)
            return module
        self.wrapped.update(parameters)
        return wrap(module, **self._options)
