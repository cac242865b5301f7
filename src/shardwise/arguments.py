"""What an adapter does with each argument of the interface it stands in for: one table for the code and the docs."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

AnyClass = TypeVar("AnyClass", bound=type)
P = ParamSpec("P")
R = TypeVar("R")


class Support(Enum):
    """What happens when an argument is passed."""

    SUPPORTED = "supported"
    ACCEPTED = "accepted with a warning"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument.

    Args:
        meaning: what it does; if it is not supported, why it cannot or need not do anything, and what to do instead.
        support: what happens when it is passed.
    """

    meaning: str
    support: Support = Support.SUPPORTED


Table = Mapping[str, Argument]


def check_arguments(function: Callable[..., Any], name: str, table: Table, given: Mapping[str, Any]) -> None:
    """Warn once of all arguments that have no effect, and refuse those that are not supported.

    Args:
        function: whose signature has the defaults; an argument that equals its default was not passed.
        name: for messages.
        table: of all its arguments.
        given: their values, by name, among others.

    Raises:
        ValueError: if one is passed that is refused.
        TypeError: naming a flag that `check_flags` does not take.
    """
    check_flags(function, name, given)
    parameters = inspect.signature(function).parameters
    own = {key: value for key, value in given.items() if key in table and key in parameters}
    passed = [key for key, value in own.items() if _differs(value, parameters[key].default)]
    for key in passed:
        if table[key].support is Support.REFUSED:
            raise ValueError(f"{name}({key}=...) is not supported: {table[key].meaning}")
    if idle := [key for key in passed if table[key].support is Support.ACCEPTED]:
        reasons = "; ".join(f"{key}: {table[key].meaning}" for key in idle)
        # Points at the caller of the constructor that called this.
        warnings.warn(f"{name}: arguments without effect: {reasons}", stacklevel=3)


def _differs(value: Any, default: Any) -> bool:
    return value is not default and bool(value != default)


def check_flags(function: Callable[..., Any], name: str, given: Mapping[str, Any]) -> None:
    """
    Args:
        function: in whose signature flags have True or False as the default.
        name: for messages.
        given: values of its arguments.

    Raises:
        TypeError: as of `check_flag`.
    """
    for key, parameter in inspect.signature(function).parameters.items():
        if isinstance(parameter.default, bool):
            check_flag(name, key, given.get(key))


def check_flag(name: str, key: str, value: object) -> None:
    """
    Raises:
        TypeError: naming a flag that is neither a bool, of NumPy too, nor an int or None: a string such as "False"
            counts as true.
    """
    # NumPy's is no int.
    if not (value is None or isinstance(value, int) or type(value).__name__ in ("bool", "bool_")):
        raise TypeError(f"{name}({key}={value!r}): pass True or False, not {type(value).__name__}")


def takes_flags(method: Callable[P, R]) -> Callable[P, R]:
    """``method``, which refuses what `check_flag` does for each parameter annotated as a bool."""
    signature = inspect.signature(method)
    flags = [name for name, parameter in signature.parameters.items() if parameter.annotation in (bool, "bool")]

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return method(*args, **kwargs)  # whose own error names it
        for name in flags:
            check_flag(method.__name__, name, given.get(name))
        return method(*args, **kwargs)

    return run


def check_state_dict(name: str, given: Mapping[Any, Any]) -> None:
    """
    Raises:
        ValueError: if what ``name`` is given is not an optimizer's state dict.
    """
    if not {"state", "param_groups"} <= given.keys():
        raise ValueError(
            f"{name} takes an optimizer's state dict, with 'state' and 'param_groups', and this has "
            f"{', '.join(map(repr, list(given)[:5])) or 'nothing'}"
        )


def is_whole_number(value: object) -> bool:
    """Whether ``value`` is an int, NumPy's too, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_at_least(least: float, value: Any) -> bool:
    """Whether ``value`` is a number, NumPy's too, and not below ``least``."""
    number: Any = value
    return isinstance(number, Real) and bool(value >= least)


def to_float(name: str, key: str, value: Any) -> float:
    """The argument ``key`` of ``name``, of which `float` makes a number: strings too, as torch takes them ("inf", and
    what YAML makes of 1e-3).

    Raises:
        TypeError, ValueError: naming it, as `float` raises them.
    """
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}({key}={value!r}): must be a number") from error


def documented(table: Table) -> Callable[[AnyClass], AnyClass]:
    """Append the arguments of ``table`` to the docstring of a class."""

    def append(cls: AnyClass) -> AnyClass:
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nArgs:\n{describe(table)}"
        return cls

    return append


def describe(table: Table) -> str:
    """A line for each argument."""
    lines = []
    for name, argument in table.items():
        note = "" if argument.support is Support.SUPPORTED else f" ({argument.support.value})"
        lines.append(f"    {name}{note}: {argument.meaning}")
    return "\n".join(lines)


def markdown(table: Table) -> str:
    """The table as the docs have it."""
    rows = [f"| `{name}` | {argument.support.value} | {argument.meaning} |\n" for name, argument in table.items()]
    return "| argument | | |\n| :--- | :--- | :--- |\n" + "".join(rows)


def refuse_outside(argument: str, group: Any) -> None:
    """
    Raises:
        ValueError: if ``group`` is what `new_group` gives to other processes than the group's.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{argument}: this process is not in the group; wrap only on its ranks")
