"""Copies of sharded models, for averages of them."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

from torch import nn

from ..core.module import FSDPModule, class_before_sharding
from ..core.root import unit_of

FORWARD_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def allow_copies(model: nn.Module) -> None:
    """Let `copy.deepcopy` of a unit give a plain module over DTensors of its own, as averages of the model need.

    Only on these instances: elsewhere a copy of a unit, which could not run, stays an error.
    """
    for module in model.modules():
        if unit_of(module) is not None:
            module.__dict__["__deepcopy__"] = functools.partial(_copy, weakref.ref(module))


def forbid_copies(model: nn.Module) -> None:
    """Undo `allow_copies`."""
    for module in model.modules():
        module.__dict__.pop("__deepcopy__", None)


def _copy(reference: weakref.ref[nn.Module], memo: dict[int, Any]) -> nn.Module:
    module = reference()
    assert module is not None
    # Inside of `init_weights` it has the class from before already.
    original = class_before_sharding(type(module)) if isinstance(module, FSDPModule) else type(module)
    twin = original.__new__(original)
    memo[id(module)] = twin
    state: dict[str, Any] = {**module.__getstate__()}
    for own in ("_shardwise_unit", "__deepcopy__", "init_weights"):
        state.pop(own, None)
    hooks = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
    own_hooks = {key for key, hook in hooks if is_own(hook)}
    for kind in FORWARD_HOOKS:
        state[kind] = type(state[kind])((key, value) for key, value in state[kind].items() if key not in own_hooks)
    twin.__setstate__(copy.deepcopy(state, memo))
    return twin


def is_own(hook: Any) -> bool:
    """Whether a hook is one of this library."""
    hook = getattr(hook, "hook", hook)
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "shardwise"
