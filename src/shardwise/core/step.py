"""What the engine does around the steps of all optimizers: it refuses those of replaced parameters, and lets the others
write sharded ones as fast as plain DTensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .device import (
    local_of,
    respec,
    spec_of,
    steps_are_hooked,
    trace_by,
    untraced,
    without_torch_function,
    wrap_at_offset,
    wrap_local,
)
from .errors import StateError
from .parameter import ShardedParameter, TracedParameter, name_of_replaced, owner_of

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
    step = _Step(optimizer, closure, is_traced)
    if not callable(closure):
        step.begin()
        return _Arguments(args, step), kwargs
    if "closure" in kwargs:
        return args, {**kwargs, "closure": step}
    return (args[0], step, *args[2:]), kwargs


class _Step:
    """One step of an optimizer, during which its sharded parameters with gradients are others.

    Each access of an attribute of a `ShardedParameter` is a call into Python, of which a step has many for each, and
    which `torch.compile` cannot trace; that they are written is noted beforehand. Over when nobody refers to it any
    more, as after an exception.

    Args:
        optimizer: that steps.
        closure: computes gradients within the step, with the parameters as they are.
        is_traced: whether `torch.compile` traces the step.
    """

    def __init__(self, optimizer: Optimizer, closure: Any, is_traced: bool):
        self._optimizer, self._closure, self._is_traced = optimizer, closure, is_traced
        steps_parts = type(optimizer) in ELEMENTWISE and not (is_traced or steps_are_hooked(optimizer, but=_guard))
        self._parts = _Parts(optimizer) if steps_parts else None
        self._plain: Sequence[torch.Tensor] = ()

    @untraced
    def __call__(self) -> Any:
        self.end()
        result = self._closure()
        self.begin()
        return result

    @untraced
    def begin(self) -> None:
        """The optimizer writes from now on."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        with without_torch_function():
            written = [one for one in parameters if type(one) is ShardedParameter and one.grad is not None]
            for owner in {id(owner): owner for one in written if (owner := owner_of(one)) is not None}.values():
                owner.note_write()
            self._plain = written if self._parts is None else self._parts.put(written)
        for parameter in self._plain:
            # torch dispatches no subclass as fast as its own.
            cast(Any, parameter).__class__ = TracedParameter if self._is_traced else DTensor
        for parameter in self._plain if self._is_traced else ():
            parameter.grad = wrap_at_offset(cast(torch.Tensor, parameter.grad))

    @untraced
    def end(self) -> None:
        """The optimizer wrote."""
        for parameter in self._plain:
            cast(Any, parameter).__class__ = ShardedParameter
        self._plain = ()
        if self._parts is not None:
            self._parts.take_back()

    __del__ = end


State = dict[str, Any]
"""Of one parameter, by name."""


class _Parts:
    """What an element-wise optimizer steps in place of sharded parameters: this rank's parts as plain tensors, whose
    operators take a third of the time of a `DTensor`'s. Its state belongs to the parameters all the same.

    Args:
        optimizer: whose param groups and state have the parts meanwhile.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._stepped: dict[torch.Tensor, tuple[torch.Tensor, State | None]] = {}
        """By part: its parameter, and what state it was given."""
        self._originals: tuple[list[list[torch.Tensor]], Any] | None = None

    def put(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Replace ``parameters``; gives those that have to be stepped as they are."""
        groups, states = self._optimizer.param_groups, self._optimizer.state
        if any(group.get("differentiable") for group in groups):
            return parameters
        parts: dict[int, torch.Tensor] = {}
        others: list[torch.Tensor] = []
        for parameter in parameters:
            state = states.get(parameter)
            if not _is_cut_alike(parameter, state):
                others.append(parameter)
                continue
            part = parts[id(parameter)] = local_of(parameter).detach()
            part.grad = local_of(cast(torch.Tensor, parameter.grad))
            own = None if state is None else {name: local_of(value) for name, value in state.items()}
            self._stepped[part] = parameter, own
        self._originals = [group["params"] for group in groups], states
        for group in groups:
            group["params"] = [parts.get(id(parameter), parameter) for parameter in group["params"]]
        given = {id(parameter) for parameter, _ in self._stepped.values()}
        self._optimizer.state = defaultdict(dict, {key: one for key, one in states.items() if id(key) not in given})
        for part, (_, own) in self._stepped.items():
            if own is not None:
                self._optimizer.state[part] = dict(own)
        return others

    def take_back(self) -> None:
        """Put the parameters back, with the state that their parts have."""
        if self._originals is None:
            return
        (lists, states), found = self._originals, self._optimizer.state
        for group, parameters in zip(self._optimizer.param_groups, lists, strict=True):
            group["params"] = parameters
        self._optimizer.state = states
        for key, state in found.items():
            if key not in self._stepped:
                states[key] = state
                continue
            parameter, given = self._stepped[key]
            own = states[parameter]
            for name in [name for name in own if name not in state]:
                del own[name]
            for name, value in state.items():
                if given is None or value is not given.get(name, _Parts):
                    own[name] = _as_state_of(parameter, key, value)
        self._stepped, self._originals = {}, None


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


def _as_state_of(parameter: torch.Tensor, part: torch.Tensor, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != part.shape:
        return value
    spec = spec_of(parameter)
    return wrap_local(value, spec if value.dtype == part.dtype else respec(spec, dtype=value.dtype))


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
