"""What the engine does around the steps of all optimizers: it refuses those of replaced parameters, and lets the others
write sharded ones as fast as plain DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .device import trace_by, untraced, without_torch_function, wrap_at_offset
from .errors import StateError
from .parameter import ShardedParameter, TracedParameter, name_of_replaced, owner_of

_guard: list[Any] = []


def watch_steps() -> None:
    """Do it from now on."""
    if not _guard:
        _guard.append(register_optimizer_step_pre_hook(_before_step))


@untraced
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tracer = trace_by(None)
    try:
        _refuse_replaced(optimizer)
        if getattr(optimizer, "notes_writes", False):
            return None
        return _begin_step(optimizer, args, kwargs, is_traced=tracer is not None)
    finally:
        trace_by(tracer)


def _begin_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], is_traced: bool) -> Any:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    step = _Step([parameter for group in optimizer.param_groups for parameter in group["params"]], closure, is_traced)
    if not callable(closure):
        step.begin()
        return _Arguments(args, step), kwargs
    if "closure" in kwargs:
        return args, {**kwargs, "closure": step}
    return (args[0], step, *args[2:]), kwargs


class _Step:
    """What an optimizer does to its parameters: those with gradients are plain DTensors meanwhile.

    Of a `ShardedParameter` each access of an attribute is a call into Python, of which a step has many for each, and
    which `torch.compile` cannot trace; that they are written is noted beforehand. Over when nobody refers to it any
    more, as after an exception.

    Args:
        parameters: of the optimizer.
        closure: computes gradients within the step, with the parameters as they are.
        is_traced: whether `torch.compile` traces the step.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], closure: Any, is_traced: bool):
        self._parameters, self._closure, self._is_traced = parameters, closure, is_traced
        self._written: Sequence[torch.Tensor] = ()

    @untraced
    def __call__(self) -> Any:
        self.end()
        result = self._closure()
        self.begin()
        return result

    @untraced
    def begin(self) -> None:
        """The optimizer writes from now on."""
        with without_torch_function():
            sharded = [one for one in self._parameters if type(one) is ShardedParameter and one.grad is not None]
        for owner in {id(owner): owner for one in sharded if (owner := owner_of(one)) is not None}.values():
            owner.note_write()
        for parameter in sharded:
            # torch dispatches no subclass as fast as its own.
            cast(Any, parameter).__class__ = TracedParameter if self._is_traced else DTensor
        for parameter in sharded if self._is_traced else ():
            parameter.grad = wrap_at_offset(cast(torch.Tensor, parameter.grad))
        self._written = sharded

    @untraced
    def end(self) -> None:
        """The optimizer wrote."""
        for parameter in self._written:
            cast(Any, parameter).__class__ = ShardedParameter
        self._written = ()

    __del__ = end


class _Arguments(tuple[Any, ...]):
    """Arguments of a step, which lives as long as they do; a hook after it would not run after an exception."""

    def __new__(cls, arguments: Iterable[Any], step: _Step) -> _Arguments:
        made = super().__new__(cls, arguments)
        made.step = step
        return made

    step: _Step


def _refuse_replaced(optimizer: Optimizer) -> None:
    """An optimizer that holds a replaced parameter would train a tensor that no module uses, in silence."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter) is ShardedParameter and "_shardwise_replaced" not in parameter.__dict__:
                continue
            if (name := name_of_replaced(parameter)) is not None:
                raise StateError(
                    f"{type(optimizer).__name__} holds parameter {name!r} as it was before "
                    "fully_shard replaced it, or unsharded, so its step would change nothing that lasts: call "
                    "shardwise.repoint(optimizer), or make the optimizer after fully_shard and outside of forward"
                )
