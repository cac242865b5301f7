"""The registered parameter: a DTensor, or a flat shard, that says so where it is used as if it were whole."""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from .device import (
    call_without_torch_function,
    complete,
    get_data,
    get_gradient,
    local_of,
    mark_parameter,
    set_data,
    set_gradient,
    set_local,
    shares_storage,
    spec_of,
    step_by_foreach,
    untraced,
    without_torch_function,
    wrap_at_offset,
    wrap_local,
)
from .errors import StateError
from .replaced import owner_and_slot_of
from .tree import tensors_in

if TYPE_CHECKING:
    from .shards import Shards


class OwnerReference(weakref.ref[Any]):
    """A weak reference that may hang on parameters: whoever pickles or copies them gets one to nothing."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reference_to_nothing, ()


def _reference_to_nothing() -> Any:
    return _nothing


def _nothing() -> None:
    pass


def refuse_lazy(what: str, tensor: torch.Tensor) -> None:
    """
    Raises:
        ValueError: if ``tensor``, which messages call ``what``, is that of a lazy module that has not run.
    """
    if is_lazy(tensor):
        raise ValueError(f"{what} has no shape yet: run the lazy modules once, or give them the size of their input")


class TracedParameter(DTensor):
    """The registered parameter while a compiled step of an optimizer writes it: a DTensor that can be traced."""

    def __tensor_flatten__(self) -> Any:
        """What the tracer copies, before it comes to the gradient."""
        gradient = self.grad
        if isinstance(gradient, DTensor) and gradient.storage_offset() != local_of(gradient).storage_offset():
            self.grad = wrap_at_offset(gradient)
        return cast(Any, super()).__tensor_flatten__()

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, flat: Any, size: Any, stride: Any) -> DTensor:
        """The tracer's copy: a wrapper as `wrap_local` makes them, not at the offset of its local tensor."""
        whole: DTensor = DTensor.__tensor_unflatten__(inner, flat, size, stride)
        return wrap_local(local_of(whole), spec_of(whole), cls, whole.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain DTensor, or parameter, with memory of its own."""
        with torch.no_grad():
            copied = self._as_plain(local_of(self).clone())
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the plain DTensor, or parameter, that it is for others."""
        return self._as_plain(local_of(self)).__reduce_ex__(protocol)

    def _as_plain(self, local: torch.Tensor) -> DTensor:
        plain = wrap_local(local, spec_of(self), requires_grad=self.requires_grad)
        if isinstance(self, nn.Parameter):
            mark_parameter(plain)
        return plain


class SteppedParameter(TracedParameter):
    """The registered parameter while an optimizer not of torch writes it: a DTensor whose data it may replace."""

    def detach(self) -> DTensor:
        """In the same memory. torch's own takes over the local tensor's offset: it can neither be copied, nor traced as
        a view of this one, which has none."""
        return wrap_local(local_of(self).detach(), spec_of(self), SteppedParameter)

    data = property(detach, lambda parameter, value: _replace_data(parameter, value))


class ShardedParameter(TracedParameter):
    """The registered parameter between uses: an ordinary DTensor that explains itself.

    It tells its group when something writes it, and replaces torch's message when it is mixed with plain tensors.
    Its only addition is a weak reference to its group.
    """

    # Read and dropped for each parameter in each step, for which the way through `__torch_function__` takes most of the
    # time of `zero_grad`.
    @property
    def grad(self) -> torch.Tensor | None:
        """As of any tensor."""
        with without_torch_function():
            return get_gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with without_torch_function():
            set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        with without_torch_function():
            set_gradient(self, None)

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (effect := _effects.get(func)) is None:
            effect = _effects[func] = _effect_of(func)
        if effect is _Effect.TRAINS and _registered_in(inputs := _inputs_of(kwargs)):
            return func(*args, **{**kwargs, "inputs": _leaves_of(inputs)})
        if effect is _Effect.WRITES:
            # Optimizers write parameter by parameter.
            alone = bool(args) and isinstance(args[0], ShardedParameter)
            for parameter in args[:1] if alone else _sharded_in((args[:1], kwargs)):
                if (owner := owner_of(parameter)) is not None:
                    owner.note_write()
        try:
            if effect is _Effect.REPLACES:
                return _replace_data(*args)
            result = call_without_torch_function(func, types, args, kwargs or {})
            if effect is _Effect.ALIASES:
                result.__class__ = cls  # writes through it are seen; `nn.Parameter` asks it of a subclass
                result.__dict__["_shardwise_owner"] = args[0].__dict__.get("_shardwise_owner")
                set_local(result, local_of(args[0]))  # whose version counter tells of writes to local tensors
            elif effect is _Effect.VIEWS and args and isinstance(args[0], ShardedParameter):
                _note_view(result, args[0])
            return result
        except RuntimeError as error:
            if func is torch.autograd.grad and (unused := _not_in_graph(error, args[1])):
                raise StateError(unused) from error
            sharded = _sharded_in((args, kwargs))
            if not _is_of_sharded(error, effect, sharded):
                raise
            if effect is _Effect.WRITES and (message := _writes_gathered(func.__name__, args[:1])) is not None:
                raise StateError(message) from error
            writes_sharded = bool(args) and bool(_sharded_in(args[0]))
            raise StateError(_used_while_sharded(func.__name__, writes_sharded, sharded)) from error


class FlatShard(nn.Parameter):
    """A registered parameter of several that are joined: a plain tensor that stands for those forward computes with
    where backward is asked for its gradient.

    Not of what is sharded by itself, whose class is the user's: each operator would take longer.
    """

    grad = ShardedParameter.grad

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.backward and _registered_in(inputs := _inputs_of(kwargs)):
            return func(*args, **{**kwargs, "inputs": _leaves_of(inputs)})
        try:
            return call_without_torch_function(func, types, args, kwargs or {})
        except RuntimeError as error:
            if func is torch.autograd.grad and (message := _not_in_graph(error, args[1])):
                raise StateError(message) from error
            raise


class ShardedView(DTensor):
    """A sharded parameter seen in another shape, such as its transpose: mixed with plain tensors it names that one."""

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = call_without_torch_function(func, types, args, kwargs or {})
        except RuntimeError as error:
            viewed = [one for one in map(_viewed_by, tensors_in((args, kwargs))) if one is not None]
            if not _is_of_sharded(error, _effect_of(func), viewed):
                raise
            raise StateError(_used_while_sharded(func.__name__, False, viewed)) from error
        # Of an alias too, or `nn.Parameter` refuses the type.
        if args and _effect_of(func) in (_Effect.VIEWS, _Effect.ALIASES):
            _note_view(result, _viewed_by(args[0]))
        return result

    __deepcopy__ = ShardedParameter.__deepcopy__
    __reduce_ex__ = ShardedParameter.__reduce_ex__
    _as_plain = ShardedParameter._as_plain


def _note_view(result: object, parameter: ShardedParameter | None) -> None:
    if parameter is not None and type(result) is DTensor:  # not the parameter itself, as from `contiguous`
        result.__class__ = ShardedView
        # Weak: who keeps the view of a dead parameter keeps no more than a DTensor's view does.
        result.__dict__["_shardwise_viewed"] = OwnerReference(parameter)


def _viewed_by(tensor: torch.Tensor) -> ShardedParameter | None:
    viewed: weakref.ref[Any] | None = tensor.__dict__.get("_shardwise_viewed")
    return viewed() if viewed is not None else None


for _kind in (TracedParameter, SteppedParameter, ShardedParameter, ShardedView, FlatShard):
    step_by_foreach(_kind)


class _Effect(Enum):
    """What a function of torch does to its first argument."""

    NONE = auto()
    WRITES = auto()
    ALIASES = auto()
    REPLACES = auto()
    VIEWS = auto()
    TRAINS = auto()
    """Leaves gradients at some of its arguments."""


_VIEWS = {
    *("t", "transpose", "swapaxes", "permute", "movedim", "view", "reshape", "flatten", "unflatten"),
    *("unsqueeze", "squeeze", "narrow", "select", "expand", "contiguous", "__getitem__"),
}
_TRANSPOSES = [getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")]

_effects: dict[Any, _Effect] = {}
"""Of the functions that were called, since names are looked at more slowly."""


def _effect_of(func: Any) -> _Effect:
    if func == torch.Tensor.detach or func == get_data:
        return _Effect.ALIASES
    if func == set_data:
        return _Effect.REPLACES
    if func is torch.autograd.backward:
        return _Effect.TRAINS
    name: str = func.__name__
    if name in _VIEWS or func in _TRANSPOSES:
        return _Effect.VIEWS
    if name == "requires_grad_" or name[-1] != "_":
        return _Effect.NONE
    writes = not name.endswith("__") or name.startswith("__i") or name == "__setitem__"
    return _Effect.WRITES if writes else _Effect.NONE


def _replace_data(parameter: DTensor, value: torch.Tensor) -> None:
    """``parameter.data = value``, which torch alone does to the wrapper of a DTensor and not to its local tensor."""
    if not isinstance(value, DTensor):
        raise StateError(_used_while_sharded("copy_", True, _sharded_in(parameter)))
    if (value.shape, value.device_mesh) != (parameter.shape, parameter.device_mesh):
        raise StateError(
            f"the data of a sharded parameter of shape {tuple(parameter.shape)} on {parameter.device_mesh} was "
            f"replaced by a DTensor of shape {tuple(value.shape)} on {value.device_mesh}"
        )
    value = cast(DTensor, value.detach()).redistribute(placements=parameter.placements)
    with without_torch_function():
        set_data(parameter, value)
        set_local(parameter, complete(local_of(value)), spec_of(value))
    if (owner := owner_of(parameter)) is not None:
        owner.note_write()


def _sharded_in(value: Any) -> list[ShardedParameter]:
    return [tensor for tensor in tensors_in(value) if isinstance(tensor, ShardedParameter)]


def _is_registered(value: Any) -> bool:
    """Whether it is the registered parameter of a slot, or was."""
    return isinstance(value, torch.Tensor) and "_shardwise_owner" in value.__dict__


def _registered_in(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if _is_registered(value)]


def _inputs_of(backward: dict[str, Any]) -> Sequence[Any]:
    """What a call of ``torch.autograd.backward``, of these arguments, is asked for the gradients of.

    Raises:
        TypeError: where torch has read them from an iterator, which then gives them to nobody else.
    """
    asked = backward["inputs"]
    if isinstance(asked, Iterator):  # torch 2.11 and 2.12, which also pass on a tensor by itself as it is
        raise TypeError("backward(inputs=...) of sharded parameters takes a list of them here, not an iterator")
    return [asked] if isinstance(asked, torch.Tensor) else list(asked or ())


def _leaves_of(inputs: Sequence[Any]) -> list[Any]:
    """Where a backward that is asked for gradients of ``inputs`` leaves them: for a registered parameter also at the
    unsharded ones that forward computes with, whose gradients are reduced."""
    owners = {owner for one in _registered_in(inputs) if (owner := owner_of(one)) is not None}
    faces: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for slot in chain(*(owner.slots for owner in owners), *(one.borrowed for one in borrowers if one not in owners)):
        faces[id(slot.sharded)] += slot.faces
    leaves: list[Any] = []
    for one in inputs:
        if _is_registered(one):
            # Edges, which have no class that would be asked again.
            own = faces.get(id(one)) or _faces_of_cut_anew(one)
            leaves += [get_gradient_edge(leaf) for leaf in (*own, one) if leaf is one or leaf.requires_grad]
        else:
            leaves.append(one)
    return leaves


def _faces_of_cut_anew(parameter: torch.Tensor) -> Sequence[torch.Tensor]:
    """The unsharded ones of a parameter that was resharded to a smaller world; none of one that was replaced."""
    _, slot = owner_and_slot_of(parameter)
    if slot is None or not isinstance(parameter, DTensor):
        return ()
    return slot.faces if spec_of(slot.sharded).mesh != spec_of(parameter).mesh else ()


def _is_of_sharded(error: RuntimeError, effect: _Effect, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether ``error`` is torch's where sharded ``parameters`` meet what only goes with unsharded ones: plain tensors,
    or DTensors of the parallelism of a unit."""
    text = str(error).partition("\n")[0]  # further lines tell what else was tried, and on which mesh
    if "mixed torch.Tensor and DTensor" in text:
        return True
    if effect is _Effect.WRITES:
        return False
    slots = chain(*(owner.slots for owner in map(owner_of, parameters) if owner is not None))
    parallels = [slot.parallel for slot in slots if slot.parallel is not None]
    return any(str(one.original.mesh) in text and str(one.sharded.mesh) in text for one in parallels)


def _used_while_sharded(operator: str, writes_sharded: bool, parameters: Sequence[ShardedParameter]) -> str:
    for parameter in parameters:
        if (owner := owner_of(parameter)) is None:
            continue
        name, unit = owner.name_of(parameter)
        if operator in ("copy_", "set_", "__setitem__") and writes_sharded:
            return (
                f"parameter {name!r} of unit {unit!r} is sharded, and a plain tensor cannot be written into it: "
                "load whole tensors by shardwise.load_full_state_dict(model, state_dict), or by torch's "
                "set_model_state_dict with StateDictOptions(full_state_dict=True), or shard the value by "
                "distribute_tensor first"
            )
        message = (
            f"parameter {name!r} was used outside the forward of its unit {unit!r}, where it is sharded: "
            f"call unshard() on the unit before, run the code inside its forward, or make the method that "
            f"does it a forward method by register_fsdp_forward_method(module, method_name)"
        )
        if owner.gives_unsharded():
            message = (
                f"the sharded parameter {name!r} was used while its unit {unit!r} is gathered, by what had it before, "
                "such as a module that was put into the model since fully_shard: replace and convert modules before, "
                "and take parameters inside forward from the modules that they are registered on, elsewhere their "
                "full_tensor()"
            )
        if operator[-1] == "_" and operator[-2:] != "__" and not writes_sharded:
            message += (
                f"; where {operator} updates a copy or an average that was made before fully_shard, make that after, "
                "from the sharded parameters, or read full_tensor()"
            )
        return message
    if any(parameter.__dict__.get("_shardwise_owner") is None for parameter in parameters):  # the tracer's copies
        return (
            "a sharded parameter was used in compiled code outside the forward of its unit, where it is sharded: call "
            "unshard() on the unit before, or compile code that runs inside its forward"
        )
    return "a sharded parameter, whose unit no longer exists, was mixed with plain tensors"


def _writes_gathered(operator: str, target: Any) -> str | None:
    """What is wrong where ``operator``, which is given a sharded parameter, writes to an unsharded one."""
    for one in tensors_in(target):
        owner, slot = owner_and_slot_of(one)
        if slot is not None and any(face is one for face in slot.faces):
            return (
                f"{operator} writes to parameter {slot.name!r} of unit {owner.unit_name!r} while it is gathered, and "
                "is given a sharded parameter: call reshard() on that unit before, and write to its sharded parameters"
            )
    return None


def _not_in_graph(error: RuntimeError, inputs: Sequence[Any]) -> str:
    """What is wrong where torch does not find ``inputs`` of `torch.autograd.grad` in the graph; empty if it means none
    that is sharded."""
    if "not have been used in the graph" not in str(error):
        return ""
    if (index := re.search(r"at index (\d+)", str(error))) is not None:  # torch 2.11 and 2.12 do not tell which
        inputs = inputs[int(index[1]) :][:1]
    parameters = _registered_in(inputs)
    names = [owner.name_of(one) for one in parameters if (owner := owner_of(one)) is not None]
    if not names:
        return ""
    named = ", ".join([f"{name!r} of unit {unit!r}" for name, unit in names[:3]] + ["…"] * (len(names) > 3))
    message = (
        f"torch.autograd.grad was asked for gradients of sharded parameters ({named}), which forward does not compute "
        "with: call backward() on the loss"
    )
    if any(isinstance(one, FlatShard) for one in parameters):
        return message
    return (
        f"{message}, or take gradients of what model.parameters() gives between forward and backward where "
        "fully_shard(..., reshard_after_forward=False) keeps the unsharded parameters"
    )


def owner_of(parameter: torch.Tensor) -> Shards | None:
    """The shards that a sharded parameter belongs to, while they exist."""
    reference: weakref.ref[Shards] | None = parameter.__dict__.get("_shardwise_owner")
    return reference() if reference is not None else None


def note_writes(parameters: Iterable[torch.Tensor]) -> None:
    """Those of ``parameters`` that are sharded are about to be written."""
    for owner in dict.fromkeys(map(owner_of, parameters)):
        if owner is not None:
            owner.note_write()


def name_of(parameter: torch.Tensor) -> str:
    """A parameter in messages: its name if it is sharded, else its shape."""
    if (owner := owner_of(parameter)) is not None:
        return f"parameter {owner.name_of(parameter)[0]!r}"
    return f"a parameter of shape {tuple(parameter.shape)}"


def local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient of a sharded parameter, cut as that is; all ranks call this.

    Raises:
        StateError: if the gradient is a plain tensor.
    """
    spec = spec_of(parameter)
    if not isinstance(gradient, DTensor):
        raise plain_gradient(parameter)
    if spec_of(gradient) is not spec and gradient.placements != spec.placements:
        gradient = gradient.redistribute(placements=spec.placements)
    return complete(local_of(gradient))


def plain_gradient(parameter: torch.Tensor) -> StateError:
    """What is raised where a sharded parameter has a plain tensor as its gradient."""
    return StateError(
        f"the gradient of {name_of(parameter)} is a plain tensor, and the parameter is sharded: assign a DTensor "
        "that is cut as the parameter is, as torch.distributed.tensor.distribute_tensor makes"
    )


def set_owner(parameter: torch.Tensor, owner: weakref.ref[Any]) -> None:
    """``parameter`` belongs to ``owner``."""
    parameter.__dict__["_shardwise_owner"] = owner


def marks_of(parameter: torch.Tensor) -> dict[str, Any]:
    """What users leave on a parameter ("no weight decay"), which goes along to those that take its place."""
    return {name: value for name, value in parameter.__dict__.items() if name[:1] != "_"}


def make_sharded_parameter(
    local: torch.Tensor, spec: Any, requires_grad: bool, owner: weakref.ref[Any]
) -> nn.Parameter:
    """A sharded parameter of ``owner`` around ``local``, placed as ``spec`` says."""
    parameter = mark_parameter(wrap_local(local, spec, ShardedParameter, requires_grad))
    parameter.__dict__["_shardwise_owner"] = owner
    return parameter


def alias_of(detached: DTensor, owner: weakref.ref[Any]) -> DTensor:
    """A detached sharded parameter as state dicts give it: one that can be saved, and whose writes are seen."""
    alias = wrap_local(local_of(detached), spec_of(detached), ShardedParameter)
    set_owner(alias, owner)
    return alias


def is_alias(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether ``tensor`` is a sharded one detached, as `torch.func.functional_call` may register it."""
    if isinstance(tensor, nn.Parameter) or not isinstance(tensor, DTensor) or tensor.requires_grad:
        return False
    local, own = local_of(tensor), local_of(parameter)
    return local.data_ptr() == own.data_ptr() and shares_storage(local, own)


def adopt_parameter(parameter: nn.Parameter, owner: weakref.ref[Any] | None) -> None:
    """Make an existing DTensor parameter a sharded one of ``owner``; None: of whose it is."""
    cast(Any, parameter).__class__ = ShardedParameter
    parameter.__dict__.pop("_shardwise_replaced", None)
    if owner is not None:
        set_owner(parameter, owner)


def release_class(parameters: Iterable[torch.Tensor]) -> None:
    """Make sharded parameters plain DTensors, for torch code that makes new parameters of the same type."""
    for parameter in parameters:
        if type(parameter) is ShardedParameter:
            cast(Any, parameter).__class__ = DTensor


borrowers: weakref.WeakSet[Shards] = weakref.WeakSet()
"""Those with slots whose sharded parameters are other slots', tied after both were sharded."""
