"""What the engine does around the steps of all optimizers: it refuses those of replaced parameters, and lets the others
write sharded ones as plain tensors or DTensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .device import (
    local_of,
    plain_tensors_are_replicated,
    spec_of,
    steps_are_hooked,
    trace_by,
    untraced,
    without_torch_function,
    wrap_at_offset,
    wrap_local,
)
from .errors import StateError
from .parameter import ShardedParameter, SteppedParameter, TracedParameter, note_writes, plain_gradient
from .replaced import name_of_replaced

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Optimizers that step every element by its own gradient and state alone."""


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of all param groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_guard: list[Any] = []


def watch_steps() -> None:
    """Let `_before_step` run before every step of every optimizer, from now on."""
    if not _guard:
        _guard.append(register_optimizer_step_pre_hook(_before_step))


@untraced
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tracer = trace_by(None)
    try:
        _refuse_replaced(optimizer)
        if getattr(optimizer, "notes_writes", False) or not any(
            type(parameter) is ShardedParameter for parameter in parameters_of(optimizer)
        ):
            return None
        return _begin_step(optimizer, args, kwargs, is_traced=tracer is not None)
    finally:
        trace_by(tracer)


def _begin_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], is_traced: bool) -> Any:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    stand_in = None if is_traced else _stand_in_for(optimizer)
    step = _Step(optimizer, stand_in, closure, is_traced)
    args = args if stand_in is None else (stand_in, *args[1:])
    if not callable(closure):
        step.begin()
        return _Arguments(args, step), kwargs
    if "closure" in kwargs:
        return args, {**kwargs, "closure": step}
    return (args[0], step, *args[2:]), kwargs


_running: weakref.WeakSet[_Step] = weakref.WeakSet()
"""Steps that have changed the class of parameters."""


def end_steps() -> None:
    """No step runs now. One that seems to be running failed, and whoever caught its exception keeps it alive."""
    for step in list(_running):
        step.end()


class _Step:
    """One step of an optimizer, during which its sharded parameters with gradients are others.

    Each access to an attribute of a `ShardedParameter` calls into Python: a step makes many for each, and
    `torch.compile` cannot trace them. Instead, that they are written is noted beforehand. The step is over when nobody
    refers to it any more, as after an exception, or by `end_steps`.

    Args:
        optimizer: that steps.
        stand_in: steps this rank's parts in its stead, if anything does.
        closure: computes gradients within the step, with the parameters as they are.
        is_traced: whether `torch.compile` traces the step.
    """

    _plain: Sequence[torch.Tensor] = ()

    def __init__(self, optimizer: Optimizer, stand_in: Optimizer | None, closure: Any, is_traced: bool):
        self._optimizer, self._stand_in, self._closure, self._is_traced = optimizer, stand_in, closure, is_traced

    @untraced
    def __call__(self) -> Any:
        self.end()
        result = self._closure()
        tracer = trace_by(None)
        try:
            self.begin()
        finally:
            trace_by(tracer)
        return result

    @untraced
    def begin(self) -> None:
        """The optimizer writes from now on."""
        parameters = parameters_of(self._optimizer)
        with without_torch_function():
            written: Sequence[torch.Tensor] = [
                one for one in parameters if type(one) is ShardedParameter and one.grad is not None
            ]
            note_writes(written)
            if self._stand_in is not None:
                written = _give_parts(self._stand_in, self._optimizer, written)
        self._plain = written
        if written:
            _running.add(self)
        # torch dispatches no subclass as fast as its own.
        own: type[DTensor] = DTensor if type(self._optimizer).__module__.startswith("torch.optim") else SteppedParameter
        for parameter in written:
            cast(Any, parameter).__class__ = TracedParameter if self._is_traced else own
        # Others' optimizers may compile what they do to each parameter.
        for parameter in written if self._is_traced or own is SteppedParameter else ():
            parameter.grad = wrap_at_offset(cast(torch.Tensor, parameter.grad))

    @untraced
    def end(self) -> None:
        """The optimizer wrote."""
        _running.discard(self)
        for parameter in self._plain:
            cast(Any, parameter).__class__ = ShardedParameter
        self._plain = ()

    __del__ = end


State = dict[str, Any]
"""Of one parameter, by name."""


def _stand_in_for(optimizer: Optimizer) -> Optimizer | None:
    """A copy of an element-wise optimizer to step this rank's parts of sharded parameters as plain tensors, whose
    operators take a third of the time of a `DTensor`'s; the optimizer itself has its parameters throughout, whatever
    fails. None of another optimizer, and where somebody would see the copy."""
    if type(optimizer) not in ELEMENTWISE or steps_are_hooked(optimizer, but=_guard):
        return None
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    stand_in = type(optimizer).__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    return stand_in


def _give_parts(
    stand_in: Optimizer, optimizer: Optimizer, parameters: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Let ``stand_in`` step parts in place of ``parameters``; gives those that have to be stepped as they are."""
    states, given = optimizer.state, _States(optimizer.state)
    parts: dict[int, torch.Tensor] = {}
    others: list[torch.Tensor] = []
    for parameter in parameters:
        state = states.get(parameter)
        if not _is_cut_alike(parameter, state):
            _refuse_plain_gradient(parameter)
            others.append(parameter)
        elif id(parameter) not in parts:
            part = parts[id(parameter)] = local_of(parameter).detach()
            gradient = local_of(cast(torch.Tensor, parameter.grad))
            if gradient.dtype != part.dtype:
                part.grad_dtype = None  # any
            part.grad = gradient
            own = {name: local_of(value) for name, value in state.items()} if state else {}
            given[part] = _StateOfPart(own, part, parameter, states)
    groups = [
        {**group, "params": [parts.get(id(parameter), parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    stand_in.__dict__.update({**optimizer.__dict__, "param_groups": groups, "state": given})
    return others


class _States(dict[torch.Tensor, Any]):
    """States of parts; of everything else those of the optimizer.

    Args:
        states: of the optimizer, by parameter.
    """

    __slots__ = ("_states",)

    def __init__(self, states: Any):
        self._states = states

    def __missing__(self, parameter: torch.Tensor) -> Any:
        return self._states[parameter]


class _StateOfPart(State):
    """State of a part; what is set becomes the parameter's.

    Args:
        state: of the part.
        part: this rank's.
        parameter: the sharded one.
        states: of its optimizer.
    """

    __slots__ = ("_parameter", "_part", "_states")

    def __init__(self, state: State, part: torch.Tensor, parameter: torch.Tensor, states: Any):
        super().__init__(state)
        self._part, self._parameter, self._states = part, parameter, states

    def __setitem__(self, name: str, value: Any) -> None:
        if self.get(name, self) is value:
            return
        super().__setitem__(name, value)
        if isinstance(value, torch.Tensor) and value.shape == self._part.shape:
            value = wrap_local(value, spec_of(self._parameter))
        self._states[self._parameter][name] = value


def _is_cut_alike(parameter: torch.Tensor, state: State | None) -> bool:
    """Whether gradient and state of a sharded parameter are cut as it is, but for single numbers."""
    spec = spec_of(parameter)
    for value in (parameter.grad, *(state or {}).values()):
        if isinstance(value, DTensor):
            if spec_of(value) is not spec and spec_of(value).placements != spec.placements:
                return False
        elif isinstance(value, torch.Tensor) and value.ndim > 0:
            return False
    return parameter.ndim > 0


def _refuse_plain_gradient(parameter: torch.Tensor) -> None:
    """torch mixes no plain tensor with a `DTensor`, but for single numbers and where it is told to take it for one."""
    gradient = cast(torch.Tensor, parameter.grad)
    if not isinstance(gradient, DTensor) and gradient.numel() > 1 and not plain_tensors_are_replicated():
        raise plain_gradient(parameter)


class _Arguments(tuple[Any, ...]):
    """Arguments of a step, which lives as long as they do; a hook after it would not run after an exception."""

    def __new__(cls, arguments: Iterable[Any], step: _Step) -> _Arguments:
        made = super().__new__(cls, arguments)
        made.step = step
        return made

    step: _Step


def _refuse_replaced(optimizer: Optimizer) -> None:
    """An optimizer that holds a replaced parameter would train a tensor that no module uses, in silence."""
    for parameter in parameters_of(optimizer):
        if type(parameter) is ShardedParameter and "_shardwise_replaced" not in parameter.__dict__:
            continue
        if (name := name_of_replaced(parameter)) is not None:
            raise StateError(
                f"{type(optimizer).__name__} holds parameter {name!r} as it was before fully_shard or a loaded state "
                "dict replaced it, or unsharded, so its step would change nothing that lasts: call "
                "shardwise.repoint(optimizer), or make the optimizer after fully_shard and outside of forward"
            )
