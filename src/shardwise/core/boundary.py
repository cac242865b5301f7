"""What goes into a unit's forward and comes out of it: tensors by which autograd tells of the unit's backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from .device import (
    apply_function,
    apply_to_gradients,
    eager,
    get_base,
    has_tangent,
    in_forward_mode,
    in_transforms,
    is_made_since,
    is_view,
    may_share_elements,
    next_node,
    requires_grad_outside,
    take_history,
)
from .errors import StateError
from .tree import Additions, Replacement, all_tensors, is_flat, map_tensors, tensors_requiring_grad

if TYPE_CHECKING:
    from .hooks import Unit


_CHANGED_AND_REPEATED = (
    "forward of a unit of fully_shard changed a tensor in place that it was given several times, or with a view of it: "
    "each of them has an autograd history of its own there, so that gradients would be wrong: pass a clone, or add "
    "without changing it"
)


class Call:
    """One call of a module's forward: what it gets in the place of its arguments.

    Args:
        module: its id.
        args: positional ones.
        kwargs: others.
    """

    def __init__(self, module: int, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.module = module
        self._first_node = next_node()
        self._values = (*args, *kwargs.values()) if kwargs else args
        self._keywords = tuple(kwargs)
        self._is_flat = is_flat(self._values)
        self._replacements: list[Replacement] = []
        self._additions: Additions | None = None
        self._passed: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        """What was given, what takes its place, and the history of that."""
        self._histories: list[tuple[torch.Tensor, Any]] = []
        """What else the module gets, and the history of that."""

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module gets."""
        if not self._keywords:
            return self._values, {}
        count = len(self._values) - len(self._keywords)
        return self._values[:count], dict(zip(self._keywords, self._values[count:], strict=True))

    def got(self, tensor: torch.Tensor) -> bool:
        """Whether the module got it, without gradients, and left it as it was."""
        return any(one is tensor and one.grad_fn is history for one, history in self._histories)

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has a history, of which it has made the last step."""
        return is_made_since(tensor, self._first_node)

    def replace(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let it get ``function`` of each tensor in its arguments."""
        if self._is_flat:
            self._values = tuple([function(one) if isinstance(one, torch.Tensor) else one for one in self._values])
            return
        self._replacements.append(Replacement(function))
        self._values = self._replacements[-1].of(self._values)

    def announce_end(self, unit: Unit, forward_pass: int) -> Any:
        """Let it get what tells ``unit`` when backward has come to its arguments; gives the node that will, if one
        does."""
        inputs = tensors_requiring_grad(self._values)
        if not inputs:
            return None
        aliases = apply_function(_PostBackward, unit, forward_pass, *inputs)
        self._passed = [(old, new, new.grad_fn) for old, new in zip(inputs, aliases, strict=True)]
        left = iter(aliases)
        self.replace(lambda tensor: next(left) if tensor.requires_grad else tensor)
        return aliases[0].grad_fn

    def watch(self) -> None:
        """Note what it gets: what it adds to containers, and what it changes in place, are outputs."""
        passed_all = self._is_flat and len(self._passed) == len(self._values)
        if not passed_all:
            passed = {id(alias) for _, alias, _ in self._passed}
            others = (tensor for tensor in all_tensors(self._values) if id(tensor) not in passed)
            self._histories = [(tensor, tensor.grad_fn) for tensor in others]
        if not self._is_flat:
            self._additions = Additions(self._values)

    def leave(self, unit: Unit) -> None:
        """What forward changed in place in its arguments, tensors and containers, becomes the caller's.

        Raises:
            StateError: if that is a tensor that was given several times, or with a view of it.
        """
        if self._additions is not None:
            self._additions.replace(lambda output: announce_begin(unit, unit.lasting(output), self)[0])
        for replacement in reversed(self._replacements):
            replacement.give_back()
        for tensor, history in self._histories:
            if tensor.grad_fn is not history and not tensor.is_leaf:
                announce_begin(unit, tensor, self)
        # Versions do not tell: they also count changes without a history, and those that the caller's tensor saw too.
        for tensor, alias, history in self._passed:
            if alias.requires_grad and alias.grad_fn is not history:
                others = [one for one, other, _ in self._passed if other is not alias]
                if any(may_share_elements(tensor, one) for one in others):
                    raise StateError(_CHANGED_AND_REPEATED)
                announce_begin(unit, alias)
                take_history(tensor, alias)


def announce_begin(
    unit: Unit,
    output: Any,
    call: Call | None = None,
    hidden: Sequence[torch.Tensor] = (),
    *,
    marks_leaves: bool = True,
) -> tuple[Any, bool]:
    """``output``, of ``call``, that tells ``unit`` when backward comes to it, and whether any of its tensors will, or
    any of those ``hidden`` in it, if it shows none. Leaves in it are others then, unless that is not asked for."""
    tensors, takes_all = tensors_requiring_grad(output), not (in_transforms() or in_forward_mode())
    tensors = tensors or [*hidden]
    if not torch.is_grad_enabled():
        # It may have enabled them inside.
        tensors = [tensor for tensor in tensors if not (call is None or tensor.is_leaf or call.got(tensor))]
        takes_all = True
    for tensor in tensors:
        if tensor.is_leaf:
            takes_all = takes_all and not marks_leaves
            continue
        tensor.register_hook(unit.pre_backward_hook)
        # A hook on a view is lost when that, or what it is a view of, is modified in place.
        if is_view(tensor) and (base := get_base(tensor)) is not None and not base.is_leaf:
            # If it is not, backward may come to the base, which need not be of the unit, long after the unit.
            tensor.register_hook(_removing(base.register_hook(unit.pre_backward_hook)))
    if not takes_all:
        # Instead of hooks: one on a leaf would stay for ever, a transform's tensor takes none, and none sees a tangent.
        # One function for each tensor: to one for all autograd would give zeros where a tensor got no gradient, and so
        # gradients to what nothing used.
        def announce(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad and requires_grad_outside(tensor):
                tensors.append(tensor)
            elif not ((tensor.requires_grad and tensor.is_leaf) or has_tangent(tensor)):
                return tensor
            return apply_function(_PreBackward, unit, None, tensor)[0]  # type: ignore[no-any-return]

        output = map_tensors(output, announce)
    return output, bool(tensors)


def announce_derivative(unit: Unit, call: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``gradients`` that a backward gives, whose own backward tells ``unit`` that it begins for ``call``."""
    return apply_to_gradients(_PreBackward, unit, call, *gradients)  # type: ignore[no-any-return]


def _removing(handle: RemovableHandle) -> Callable[[torch.Tensor], None]:
    return lambda gradient: handle.remove()


class _Announcing(torch.autograd.Function):
    """Identity on tensors that tells a unit when backward reaches it, and of what: a forward pass, or a call.

    Also within the transforms of `torch.func`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(unit: Unit, what: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Not the tensors themselves: autograd forbids modifying those in place.
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.unit, ctx.what = inputs[:2]

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tangents


class _PostBackward(_Announcing):
    """On a unit's inputs: the unit's backward is complete.

    Of all nodes of the unit it was made first, and autograd runs the latest first, so everything that contributes
    gradients to the unit's parameters is done.
    """

    @staticmethod
    @eager
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.unit.post_backward(ctx.what, ctx)
        if torch.is_grad_enabled():
            # Where this backward ends that of its gradients begins.
            gradients = announce_derivative(ctx.unit, ctx, *ctx.unit.announce_around(*gradients))
        return (None, None, *gradients)


class _PreBackward(_Announcing):
    """On a unit's outputs, or on its inputs' gradients: the unit's backward, or that of its backward, begins."""

    @staticmethod
    @eager
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.unit.pre_backward(ctx.what)
        return (None, None, *gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Backward may come through the tangents alone.
        return announce_derivative(ctx.unit, ctx.what, *tangents)
