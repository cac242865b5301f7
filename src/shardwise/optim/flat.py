"""Optimizers on flat shards: parameters that lie one after the other are stepped as one tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch.optim import Optimizer

from ..arguments import check_flag
from ..core.device import step_without_hooks, trace_by, untraced, without_torch_function
from ..core.parameter import note_writes
from ..core.step import ELEMENTWISE
from .members import Member, local_gradients, members_of, refuse_repeated
from .pieces import Gradients, Piece
from .runs import Bundle, bundles_of

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

NOT_ELEMENTWISE: dict[str, str] = {
    "Adafactor": "its state is sums over rows and columns",
    "LBFGS": "its step is a line search over all parameters; use it as it is, on evenly sharded parameters",
    "Muon": "it orthogonalizes whole matrices; use it as it is, on the sharded parameters",
    "SparseAdam": "it takes sparse gradients, and shards have dense ones",
}
"""Optimizers of torch that do not step every element by itself (as those of `ELEMENTWISE` do), and why."""


def flat(
    optimizer_class: type[AnyOptimizer],
    params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]],
    *,
    elementwise: bool = False,
    **settings: Any,
) -> AnyOptimizer:
    """An optimizer that steps sharded parameters that lie one after the other as one flat tensor.

    Its updates are those of ``optimizer_class`` on the same parameters, and so are its param groups, its state and its
    state dict: a checkpoint of one is loaded by the other. Only `step` is another: a few operators for each unit in
    place of several for each parameter.

    Args:
        optimizer_class: of torch, or any other that steps every element by its own gradient and state alone.
        params: as ``optimizer_class`` takes them. Parameters that are not sharded are stepped one by one.
        elementwise: needed for a class that is not torch's own: the caller's word that it does so.
        settings: for ``optimizer_class``.

    Returns:
        An instance of a subclass of ``optimizer_class`` and of `FlatOptimizer`.

    Raises:
        TypeError: if ``optimizer_class`` is not a class of optimizers, or ``elementwise`` neither True nor False.
        ValueError: if it is not element-wise, or neither torch's own nor declared ``elementwise``; or for
            ``differentiable=True``; or naming a parameter that a param group has twice.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"optimizer_class must be a class of optimizers, not {optimizer_class!r}")
    check_flag("flat", "elementwise", elementwise)
    made = _flat_class(_checked(optimizer_class, elementwise))
    return cast(AnyOptimizer, made(params, **settings))


def _checked(optimizer_class: type[Optimizer], elementwise: bool) -> type[Optimizer]:
    if issubclass(optimizer_class, FlatOptimizer):
        return optimizer_class.optimizer_class
    for kind in optimizer_class.__mro__:
        if kind.__module__.startswith("torch.optim") and (reason := NOT_ELEMENTWISE.get(kind.__name__)):
            raise ValueError(f"{optimizer_class.__name__} cannot step flat shards: {reason}")
    if optimizer_class not in ELEMENTWISE and not elementwise:
        raise ValueError(
            f"it is not known whether {optimizer_class.__name__} steps every element by its own gradient and state "
            "alone: pass elementwise=True if it does (no norms of whole tensors, no factored state, no matrices)"
        )
    return optimizer_class


class _Own(NamedTuple):
    """What an optimizer has between steps."""

    parameters: list[Sequence[torch.Tensor]]
    """Of each param group."""
    states: Any
    flat_states: Any
    """What stands for ``states`` meanwhile."""


_flat_classes: dict[type[Optimizer], type[Optimizer]] = {}


def _flat_class(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    if optimizer_class not in _flat_classes:
        body = {"optimizer_class": optimizer_class, "__module__": __name__, "__doc__": optimizer_class.__doc__}
        _flat_classes[optimizer_class] = type(f"Flat{optimizer_class.__name__}", (FlatOptimizer, optimizer_class), body)
    return _flat_classes[optimizer_class]


def _blank(optimizer_class: type[Optimizer]) -> Optimizer:
    made = _flat_class(optimizer_class)
    return made.__new__(made)


class FlatOptimizer(Optimizer):
    """Base of all optimizers made by `flat`.

    Between steps it is an ordinary optimizer over the parameters. Its ``state`` holds views of flat tensors; what
    replaces them there is used by the next step. While it steps, the param groups hold flat tensors.
    """

    optimizer_class: ClassVar[type[Optimizer]]
    """The class whose step this is."""
    notes_writes: ClassVar = True
    """Its step itself tells the owners of parameters that it writes them."""
    _own: _Own | None = None
    """While it steps, or if that was interrupted."""
    _steps = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._start_anew()

    def _start_anew(self) -> None:
        self._groups: list[_Group] = []
        self._values: list[Any] = []  # of the state, as the last step left it
        self._tracer: Any = None  # of `torch.compile`, while it is at work

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (self.optimizer_class,), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in super().__getstate__().items()
            if name not in ("_groups", "_own", "_steps", "_tracer", "_values")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start_anew()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own.

        Raises:
            ValueError: for ``differentiable=True``, and for a parameter that the group has twice.
        """
        self._put_back_what_is_left()
        super().add_param_group(param_group)
        try:
            if self.param_groups[-1].get("differentiable"):
                raise ValueError("differentiable=True: flat shards have no history; use the optimizer as it is")
            refuse_repeated(self.param_groups[-1]["params"])
        except ValueError:
            del self.param_groups[-1]
            raise

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own."""
        tracer, defaults = trace_by(None), self.defaults
        # One by one: torch's operators on many tensors take no plain ones beside sharded ones.
        self.defaults = {**defaults, "foreach": False, "fused": False}
        try:
            self._put_back_what_is_left()
            with without_torch_function():
                super().zero_grad(set_to_none)
        finally:
            self.defaults = defaults
            trace_by(tracer)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own."""
        self._put_back_what_is_left()
        super().load_state_dict(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As the optimizer's own."""
        self._put_back_what_is_left()
        return super().state_dict(*args, **kwargs)

    @untraced
    def step(self, *arguments: Any, **settings: Any) -> Any:
        """One update; `torch.compile` of it compiles what is done to the flat tensors.

        Args:
            arguments: a closure that computes the loss and the gradients again, if there is one. Hooks see it as it is
                given: here, or by its name.
            settings: for the optimizer.

        Returns:
            What the closure gave.
        """
        tracer = trace_by(None)
        outer, self._tracer = self._tracer, tracer
        try:
            return _hooked_update(self, *arguments, **settings)
        finally:
            self._tracer = outer
            trace_by(tracer)

    def _update(self, closure: Callable[[], Any] | None = None, **settings: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = self._traced(closure)
        self._put_back()
        self._steps = True
        try:
            self._put_flat()
            self._traced(step_without_hooks(self.optimizer_class), self, **settings)
        finally:
            self._steps = False
            self._put_back()
        return loss

    def _traced(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trace_by(self._tracer)
        try:
            return function(*args, **kwargs)
        finally:
            trace_by(None)

    def _put_flat(self) -> None:
        parameters, states = [group["params"] for group in self.param_groups], self.state
        flat_states: defaultdict[Any, Any] = defaultdict(dict)
        self._own = _Own(parameters, states, flat_states)
        if len(parameters) != len(self._groups):
            self._groups = [_Group() for _ in parameters]
        with torch.no_grad(), without_torch_function():
            values = _values_in(states)
            untouched = len(values) == len(self._values) and all(map(is_, values, self._values))
            for group, members in zip(self._groups, parameters, strict=True):
                group.prepare(members, states, untouched)
            for state_of, state in states.items():
                if not isinstance(state_of, torch.Tensor):
                    flat_states[state_of] = state
            for group in self._groups:
                group.begin(states, flat_states)
        for settings, group in zip(self.param_groups, self._groups, strict=True):
            settings["params"] = group.tensors
        self.state = flat_states

    def _put_back_what_is_left(self) -> None:
        """`_put_back`, unless it is the step itself that asks."""
        if not self._steps:
            self._put_back()

    def _put_back(self) -> None:
        """Undo `_put_flat`; what an exception interrupted of either, once more."""
        if self._own is None:
            return
        parameters, states, flat_states = self._own
        if self.state is not states:
            flat_states = self.state  # a step may replace it
        self.state = states
        for settings, members in zip(self.param_groups, parameters, strict=True):
            settings["params"] = members
        with torch.no_grad(), without_torch_function():
            for state_of, state in flat_states.items():
                if not isinstance(state_of, torch.Tensor):
                    states[state_of] = state
            for group in self._groups:
                group.end(flat_states, states)
        self._values = _values_in(states)
        self._own = None


_hooked_update = Optimizer.profile_hook_step(FlatOptimizer._update)


def _values_in(states: Mapping[Any, Any]) -> list[Any]:
    try:
        return [*chain.from_iterable(map(dict.values, states.values()))]
    except TypeError:  # user code keeps something other than dicts there
        return [*chain.from_iterable(state.values() for state in states.values() if isinstance(state, dict))]


class _Group:
    """One param group: its bundles of runs, and parameters that are whole."""

    def __init__(self) -> None:
        self._parameters: list[torch.Tensor] = []
        self._members: list[Member] = []
        self._bundles: list[Bundle] = []
        self._pieces: list[Piece] = []
        self._whole: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        """What is stepped."""

    def prepare(self, parameters: Sequence[torch.Tensor], states: Any, untouched: bool) -> None:
        """Take this step's gradients, and everything that was changed since the last step.

        Args:
            parameters: of the param group.
            states: of the optimizer.
            untouched: whether nothing was replaced there since the last step.
        """
        same = len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))
        gradients = local_gradients(self._members) if same else None
        if gradients is None:
            self._members, self._whole = members_of(parameters)
            self._parameters, self._bundles = list(parameters), bundles_of(self._members)
            gradients = local_gradients(self._members)
            assert gradients is not None
        found = Gradients(gradients)
        for bundle in self._bundles:
            bundle.prepare(found, states, untouched)
        self._pieces = [piece for bundle in self._bundles for piece in bundle.pieces]
        self.tensors = [piece.flat for piece in self._pieces] + self._whole

    def begin(self, states: Any, flat_states: dict[Any, Any]) -> None:
        """Give what is stepped its values and gradients, put its state into ``flat_states``, and tell the owners."""
        for piece in self._pieces:
            piece.begin()
            if piece.state or piece.members[0].state is not None:
                flat_states[piece.flat] = piece.state
            note_writes(piece.anchors)
        for tensor in self._whole:
            if tensor in states:
                flat_states[tensor] = states[tensor]

    def end(self, flat_states: dict[Any, Any], states: Any) -> None:
        """Give the parameters the values and the state that the step made."""
        for piece in self._pieces:
            piece.end()
        stepped = [piece for piece in self._pieces if piece.flat in flat_states]
        # State is gathered in the order of its keys, which must be the same on all ranks.
        new = [member for piece in stepped if piece.is_new for member in piece.members]
        for member in sorted(new, key=lambda member: member.index):
            states.setdefault(member.parameter, {})
        for piece in stepped:
            piece.state = flat_states[piece.flat]
            piece.publish()
        for tensor in self._whole:
            if tensor in flat_states:
                states[tensor] = flat_states[tensor]
