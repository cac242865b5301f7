"""ShardedDataParallel: data parallelism whose gradients go to the ranks that own the parameters (ZeRO-2 with OSS)."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..arguments import Argument, check_flags, documented, is_at_least, refuse_outside
from ..core.comm import Comm, comm_for
from ..core.device import (
    backward_number,
    get_base,
    in_backward,
    is_view,
    may_share_elements,
    not_inference,
    queue_end_of_backward,
    view_again,
)
from ..core.errors import StateError
from ..core.parameter import refuse_lazy
from ..core.step import parameters_of
from ..core.tree import map_tensors, tensors_requiring_grad
from ..core.weak import weakly
from ..core.whole import OwnerReducer, WholeBroadcast
from .oss import OSS
from .ranks import check_same_on_ranks, compute_device_of, describe, describe_settings, refuse_shards, refuse_sparse

ARGUMENTS = {
    "module": Argument("the model; every rank has all of it"),
    "sharded_optimizer": Argument("the `OSS`, or several, that own the model's parameters"),
    "process_group": Argument("the ranks; None for those of the optimizers, which any other group must equal"),
    "broadcast_buffers": Argument("whether every forward starts with the first rank's buffers on all ranks"),
    "sync_models_at_startup": Argument(
        "whether parameters and buffers are the first rank's on all ranks from now on; also checks that all ranks have "
        "the same parameters and settings"
    ),
    "reduce_buffer_size": Argument(
        "most elements of several small gradients that are reduced as one; 0 sends each by itself"
    ),
    "auto_refresh_trainable": Argument(
        "whether every forward checks if parameters were frozen, unfrozen, converted or added to an optimizer; "
        "otherwise call `refresh_trainable` after that"
    ),
    "reduce_fp16": Argument("whether gradients wider than 16 bits are reduced in float16, with buffers or without"),
    "warn_on_trainable_params_changed": Argument("whether to warn of such a change"),
}

_reducers: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The wrapper that reduces the gradient of a parameter, weakly: by two, each would take what the other is to reduce."""

_wrappers: weakref.WeakSet[ShardedDataParallel] = weakref.WeakSet()
"""All that there are."""


@documented(ARGUMENTS)
class ShardedDataParallel(nn.Module):
    """Reduces every gradient to the one rank that owns its parameter, while backward goes on.

    After a backward pass a rank has the mean over ranks of the gradients of its own parameters, and no others. Passes
    without zeroing in between add up, with `no_sync` or without. A parameter that no rank used keeps the gradient it
    had; one that only some ranks used gets their sum divided by the number of all ranks. Of several wrappers of one
    parameter the one whose forward ran last reduces its gradient, or that was made since. Parameters of the optimizers
    that no wrapper's module has, such as those of a loss, are reduced with those of the wrapper that was made last.

    Clip with `OSS.clip_grad_norm`; scale with `ShardedGradScaler`. What the wrapper does not have itself is looked up
    in ``module``.

    Attributes:
        module: the wrapped model.
        device_type: that its parameters are on.
        is_multi_device_module: whether they are on several devices.

    Raises:
        TypeError: if ``module`` is not a module, ``sharded_optimizer`` not an `OSS` or several, or ``process_group``
            not a process group.
        ValueError: for a module on several types of devices, or with tensors that are sparse, sharded or have no shape
            yet, for optimizers of other ranks than ``process_group``'s or that disagree on a parameter's owner, if this
            process is not in that group, and if ranks have different parameters or settings.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: OSS | Sequence[OSS],
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ):
        given = dict(locals())
        super().__init__()
        check_flags(ShardedDataParallel.__init__, "ShardedDataParallel", given)
        if not isinstance(module, nn.Module):
            raise TypeError(f"ShardedDataParallel wraps a module, not {type(module).__name__}")
        if not is_at_least(0, reduce_buffer_size):
            raise ValueError(
                f"ShardedDataParallel(reduce_buffer_size={reduce_buffer_size!r}): must be 0 or more elements"
            )
        self._optimizers = _as_list(sharded_optimizer)
        self._group = _common_group(self._optimizers, process_group)
        devices = {parameter.device for parameter in module.parameters()}
        self.is_multi_device_module = len(devices) > 1
        self.module = module
        self._broadcasts_buffers, self._refreshes = broadcast_buffers, auto_refresh_trainable
        self._limit, self._half, self._warns = reduce_buffer_size, reduce_fp16, warn_on_trainable_params_changed
        self._unowned: set[str] = set()
        self._start()
        syncs = sync_models_at_startup and self._size > 1
        if syncs:  # before checks of each rank by itself, so that those fail on all ranks
            mine = self._described()
            device = compute_device_of(self._group, module)
            check_same_on_ranks("ShardedDataParallel", self._comm(device), mine, device)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            refuse_lazy(repr(name), tensor)
        parameters = ((repr(name), parameter) for name, parameter in module.named_parameters())
        refuse_shards("ShardedDataParallel", parameters, self._group)
        self.device_type = _only_type(module)
        if self._size > 1 and (syncs or broadcast_buffers):
            refuse_sparse([*module.named_parameters(), *module.named_buffers()])
        if syncs:
            tensors = [*module.parameters(), *module.buffers()]
            WholeBroadcast(tensors, [0] * len(tensors), self._comm).start()()
        self.refresh_trainable()

    def _start(self) -> None:
        """Set up what belongs to this process."""
        self._size = dist.get_world_size(self._group)
        self._gradient_hooks: GradientHooks | None = None
        self._keeps_local = self._has_run = False
        self._watched: list[tuple[str, torch.Tensor]] = []
        self._seen: list[tuple[bool, torch.dtype, torch.device]] = []
        self._dealt = 0
        self._lost: set[int] = set()
        self._inside: set[int] = set()
        self._is_new = True
        _wrappers.add(self)
        self._buffer_broadcast: tuple[list[torch.Tensor], WholeBroadcast] | None = None
        self._finish_buffers: Callable[[], None] | None = None

    def _comm(self, device: torch.device) -> Comm:
        return comm_for(self._group, device)

    # -- Forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run ``module``, prepared for a backward that reduces gradients."""
        recomputes = in_backward()
        if not recomputes:
            self._prepare()
        output = self.module(*inputs, **kwargs)
        if self._gradient_hooks is not None and not recomputes and torch.is_grad_enabled():
            output = self._gradient_hooks.announce(output)
        return output

    def _prepare(self) -> None:
        if self._gradient_hooks is not None:
            self._gradient_hooks.recover()
        if self._lost and torch.is_grad_enabled():
            self._lost.clear()
            self.refresh_trainable()
        elif self._refreshes:
            self._refresh_if_changed()
        reduces = self._size > 1 and torch.is_grad_enabled() and not self._keeps_local
        if self.training and (reduces or not self._has_run):
            self._refuse_differentiable_gradients()
            self._has_run = True
        self._wait_for_buffers()
        if self._broadcasts_buffers and not self._keeps_local:
            self._broadcast_buffers()

    def _refuse_differentiable_gradients(self) -> None:
        """
        Raises:
            StateError: naming a parameter whose gradient has a graph of its own. FairScale looks in the first training
                forward, also where nothing is reduced.
        """
        for name, parameter in self._watched:
            if parameter.requires_grad and (gradient := parameter.grad) is not None and gradient.requires_grad:
                raise StateError(
                    f"ShardedDataParallel: the gradient of parameter {name!r} requires a gradient, and would be "
                    "reduced without its graph: drop it by zero_grad(set_to_none=True) before forward, or detach it"
                )

    def _broadcast_buffers(self) -> None:
        buffers = list(self.module.buffers())
        if self._size == 1 or not buffers:
            return
        if self._buffer_broadcast is None or [*map(id, self._buffer_broadcast[0])] != [*map(id, buffers)]:
            self._buffer_broadcast = buffers, WholeBroadcast(buffers, [0] * len(buffers), self._comm)
        self._buffer_broadcast[1].start()()

    def sync_buffers(self, blocking: bool = False) -> None:
        """Give all ranks the first rank's buffers; a collective.

        Args:
            blocking: wait for them. Otherwise they arrive while the program goes on; the wrapper's next forward,
                `state_dict`, `load_state_dict` and conversions wait for them.
        """
        self._wait_for_buffers()
        buffers = list(self.module.buffers())
        if self._size == 1 or not buffers:
            return
        # Each by itself, so that they arrive in their own memory, also for those who never come to wait.
        finish = WholeBroadcast(buffers, [0] * len(buffers), self._comm, limit=0).start()
        if blocking or not all(buffer.is_contiguous() for buffer in buffers):
            finish()
        else:
            self._finish_buffers = finish

    def _wait_for_buffers(self) -> None:
        finish, self._finish_buffers = self._finish_buffers, None
        if finish is not None:
            finish()

    # -- Gradients

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep gradients on their ranks; the first one outside, or `reduce`, reduces the sum."""
        before = self._keeps_local
        self._set_keeps_local(True)
        try:
            yield
        finally:
            self._set_keeps_local(before)

    def _set_keeps_local(self, keeps_local: bool) -> None:
        self._keeps_local = keeps_local
        if self._gradient_hooks is not None:
            self._gradient_hooks.keeps_local = keeps_local

    def reduce(self) -> None:
        """Reduce the gradients of backward passes under `no_sync`, without another one; a collective.

        Raises:
            StateError: if there were none since gradients were last reduced.
        """
        if self._gradient_hooks is not None:
            self._gradient_hooks.reduce()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fill all gradients that are there, of the module and of what else is reduced, with zeros, or drop them.

        Args:
            set_to_none: whether to drop them; False by default, as in FairScale.
        """
        super().zero_grad(set_to_none)
        for _, parameter in self._watched:
            if id(parameter) not in self._inside and parameter.grad is not None:
                parameter.grad = None if set_to_none else parameter.grad.zero_()
        if self._gradient_hooks is not None:
            self._gradient_hooks.has_local = False

    def refresh_trainable(self) -> None:
        """Note that parameters were frozen, unfrozen, or added to an optimizer or to the module.

        Gradients that wait since backward passes under `no_sync` are still reduced, also those of parameters that were
        frozen since.
        """
        owners = self._ownership()
        self._watched = [(name, parameter) for name, parameter, _ in owners]
        self._seen, self._is_new = self._look(), False
        self._dealt = sum(optimizer.dealt for optimizer in self._optimizers)
        self._warn_of_unowned(owners)
        old, self._gradient_hooks = self._gradient_hooks, None
        waiting = {*map(id, old.reducer.parameters)} if old is not None and old.has_local else set()
        # Gradients are ready in about the reverse of the order in which parameters are used.
        chosen = [
            (name, parameter, owner)
            for name, parameter, owner in reversed(owners)
            if owner is not None
            and (parameter.requires_grad or id(parameter) in waiting)
            and id(parameter) not in self._lost
        ]
        if old is not None:
            old.remove()
        if self._size > 1 and chosen:
            names, parameters, ranks = zip(*chosen, strict=True)
            self._claim(parameters)
            comm = self._comm(parameters[0].device)
            reducer = OwnerReducer(parameters, names, ranks, comm, self._limit, self._half)
            self._gradient_hooks = GradientHooks(reducer, self._keeps_local, has_local=bool(waiting))

    def _claim(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let no other wrapper reduce the gradients of ``parameters``, until its next forward."""
        losers: dict[int, ShardedDataParallel] = {}
        for parameter in parameters:
            if (other := self._rival(parameter)) is not None:
                losers[id(other)] = other
            _reducers[parameter] = weakref.ref(self)
        for loser in losers.values():
            if loser._gradient_hooks is not None:
                loser._gradient_hooks.recover()
            loser._lost.update(map(id, parameters))
            loser.refresh_trainable()

    def _rival(self, parameter: torch.Tensor) -> ShardedDataParallel | None:
        """The other wrapper that reduces a gradient, if one does."""
        known = _reducers.get(parameter)
        other: ShardedDataParallel | None = known() if known is not None else None
        return None if other is self else other

    def _outside(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters of the optimizers that no wrapper's module has, and no other wrapper reduces, with names."""
        wrapped = {key for wrapper in _wrappers for key in wrapper._inside}
        found = {
            id(parameter): (name, parameter)
            for optimizer in self._optimizers
            for name, parameter in optimizer.named()
            # They go to a new wrapper, since the one before it may be about to go.
            if id(parameter) not in wrapped and (self._is_new or self._rival(parameter) is None)
        }
        return list(found.values())

    def _ownership(self) -> list[tuple[str, torch.Tensor, int | None]]:
        """Name, parameter and owner of each parameter of the module, None if no optimizer has it, and of those outside
        of it that are reduced too."""
        owners: dict[int, int] = {}
        inside = list(self.module.named_parameters())
        self._inside = {id(parameter) for _, parameter in inside}
        # They are used last, as parameters of a loss.
        named = [*inside, *self._outside()]
        names = {id(parameter): name for name, parameter in named}
        for optimizer in self._optimizers:
            for parameter, owner in optimizer.owners().items():
                if owners.setdefault(id(parameter), owner) != owner:
                    raise ValueError(
                        f"parameter {names.get(id(parameter), '(of no module)')!r} is in several optimizers, with "
                        f"owners {owners[id(parameter)]} and {owner}: give each parameter to one OSS"
                    )
        return [(name, parameter, owners.get(id(parameter))) for name, parameter in named]

    def _described(self) -> list[tuple[str, ...]]:
        """What has to be the same on all ranks; the place in the optimizers too, since values travel in that order."""
        stepped = [parameter for optimizer in self._optimizers for parameter in parameters_of(optimizer)]
        places = {id(parameter): place for place, parameter in enumerate(stepped)}
        described = [
            (name, describe(parameter), f"owner={owner}", f"place={places.get(id(parameter))}")
            for name, parameter, owner in self._ownership()
        ]
        settings = {
            "broadcast_buffers": bool(self._broadcasts_buffers),
            "reduce_buffer_size": self._limit,
            "reduce_fp16": bool(self._half),
        }
        buffers = [(name, describe(buffer)) for name, buffer in self.module.named_buffers()]
        return [*describe_settings(settings), *described, *buffers]

    def _look(self) -> list[tuple[bool, torch.dtype, torch.device]]:
        """What gradients are reduced by; methods of ``module`` itself change it too."""
        return [(parameter.requires_grad, parameter.dtype, parameter.device) for _, parameter in self._watched]

    def _refresh_if_changed(self) -> None:
        seen, dealt = self._look(), sum(optimizer.dealt for optimizer in self._optimizers)
        is_same = seen == self._seen and dealt == self._dealt
        if is_same and (self._gradient_hooks is None or self._gradient_hooks.are_there):
            return
        pairs = zip(self._watched, seen, self._seen, strict=True)
        names = [repr(name) for (name, _), now, before in pairs if now[0] is not before[0]]
        if self._warns and (names or dealt != self._dealt):
            warnings.warn(
                f"ShardedDataParallel: whether parameters are trained has changed for {', '.join(names) or 'none'}, or "
                "an optimizer got more of them; gradients are reduced accordingly from now on "
                "(warn_on_trainable_params_changed=False silences this)",
                stacklevel=4,
            )
        self.refresh_trainable()

    def _warn_of_unowned(self, owners: Sequence[tuple[str, torch.Tensor, int | None]]) -> None:
        names = [name for name, parameter, owner in owners if owner is None and parameter.requires_grad]
        new = [name for name in names if name not in self._unowned]
        self._unowned.update(new)
        if new:
            warnings.warn(
                f"ShardedDataParallel: no sharded optimizer has {', '.join(map(repr, new))}, so their gradients stay "
                "each rank's own: freeze them, or add them to an OSS",
                stacklevel=3,
            )

    # -- Module

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ShardedDataParallel:
        probe = torch.empty(0, device=next(self.module.parameters()).device)
        if (target := fn(probe).device.type) != self.device_type:
            raise ValueError(
                f"ShardedDataParallel cannot move from {self.device_type} to {target}, since its optimizer's state "
                "would stay: move the module before OSS and ShardedDataParallel are made"
            )
        self._wait_for_buffers()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.refresh_trainable()
        return self

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As of any module."""
        self._wait_for_buffers()
        return super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module."""
        self._wait_for_buffers()
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # while this is being made or unpickled
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        """
        Raises:
            TypeError: for a subgroup, which another process could not find again.
        """
        if self._group is not dist.group.WORLD:
            raise TypeError("ShardedDataParallel over a subgroup cannot be pickled, since process groups cannot")
        self._wait_for_buffers()
        here = ("_group", "_gradient_hooks", "_buffer_broadcast", "_finish_buffers", "_watched", "_lost", "_inside")
        return {name: value for name, value in self.__dict__.items() if name not in here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._group = _common_group(self._optimizers, None)
        self._start()
        self.refresh_trainable()


ShardedDDP = ShardedDataParallel


class GradientHooks:
    """Tells an `OwnerReducer` what autograd does. It decides when to reduce, never how.

    Nothing here keeps the model alive: parameters and autograd refer to it weakly.

    Args:
        reducer: of the parameters that are watched.
        keeps_local: whether backward passes leave gradients unreduced for now.
        has_local: whether unreduced gradients are waiting.
    """

    def __init__(self, reducer: OwnerReducer, keeps_local: bool, has_local: bool):
        self.reducer, self.keeps_local, self.has_local = reducer, keeps_local, has_local
        self._backward: int | None = None
        self._end_of_backward: Callable[[], Any] = lambda: None
        device = reducer.parameters[0].device
        # A leaf that gets a gradient when a backward starts from the model's outputs, whichever parameters it reaches.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._handles = [self._anchor.register_post_accumulate_grad_hook(weakly(self.announced))]
        self._nodes: list[tuple[torch.Tensor, Any]] = []
        owned = set(reducer.owned)
        before, after = weakly(self.before_accumulation), weakly(self.accumulated)
        for index, parameter in enumerate(reducer.parameters):
            if parameter.requires_grad:
                hook = functools.partial(after, index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
                if index in owned:
                    node = _node_of(parameter)
                    self._handles.append(node.register_prehook(functools.partial(before, index)))
                    self._nodes.append((parameter, node))

    @property
    def are_there(self) -> bool:
        """False once the model was converted to another dtype, or device, and maybe back: autograd then has new nodes.
        Asked of one parameter, since asking takes microseconds."""
        return not self._nodes or _node_of(self._nodes[0][0]) is self._nodes[0][1]

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def announce(self, output: Any) -> Any:
        """``output`` of the model, prepared so that a backward from it calls `begin` first."""
        if self.keeps_local:
            # Also where this rank's backward will touch no parameter, so that all ranks agree.
            self.has_local = True
        alike = _of_one_memory(tensors_requiring_grad(output))
        if not alike:
            return output
        announced = _Announce.apply(self._anchor, *(base for base, _ in alike))  # type: ignore[no-untyped-call]
        aliases = {
            id(tensor): alias if tensor is base else view_again(tensor, alias)
            for (base, tensors), alias in zip(alike, announced, strict=True)
            for tensor in tensors
        }
        return map_tensors(output, lambda tensor: aliases.get(id(tensor), tensor))

    def announced(self, anchor: torch.Tensor) -> None:
        """A backward has come to an output."""
        anchor.grad = None
        self.begin()

    def begin(self) -> None:
        """Note that a backward runs in this thread. Unless gradients stay local, it ends with a complete reduction.

        Raises:
            StateError: if it makes a graph, which reduced gradients would lose.
        """
        if torch.is_grad_enabled() and not self.keeps_local:
            raise StateError(
                "ShardedDataParallel: backward(create_graph=True) reached its parameters, whose gradients are reduced "
                "without their graph: take the gradients that a penalty is made of by torch.autograd.grad(outputs, "
                "inputs, create_graph=True), and call backward() on a loss that is made of them"
            )
        if self._backward is not None and self._end_of_backward() is None:  # that one failed
            self.recover()
        if self.keeps_local:
            self.has_local = True
        elif self._backward is None:
            self._backward = backward_number()
            self.reducer.begin()
            self._end_of_backward = queue_end_of_backward(self._end, weakly(self.put_back))

    def before_accumulation(self, index: int, _: tuple[torch.Tensor, ...]) -> None:
        """Autograd is about to add to an owned parameter's gradient."""
        if self.keeps_local:
            self.reducer.mix(index)
        else:
            self.reducer.set_aside(index)

    def accumulated(self, index: int, _: torch.Tensor) -> None:
        """Autograd has added to a parameter's gradient."""
        if self.keeps_local or self._backward is None:
            self.begin()
        # In a backward inside this one (reentrant checkpointing) more may be added to the same gradient.
        if self._backward == backward_number():
            self.reducer.ready(index)

    def _end(self) -> None:
        if self._backward is not None:
            self._backward, self.has_local = None, False
            self.reducer.finish()

    def recover(self) -> None:
        """Finish a backward that was aborted by an exception: other ranks wait for it."""
        if self._backward is not None:
            if self._end_of_backward() is not None:  # autograd has not dropped it yet
                self.reducer.put_back()
            self._backward, self.has_local = None, False
            self.reducer.abandon()

    def put_back(self, _: object) -> None:
        """Autograd has dropped what it was to call: if the backward has not ended, it failed."""
        if self._backward is not None:
            self.reducer.put_back()

    def reduce(self) -> None:
        """Reduce what backward passes left local.

        Raises:
            StateError: if there were none.
        """
        if not self.has_local:
            raise StateError(
                "ShardedDataParallel.reduce(): no gradients wait to be reduced; a backward pass outside of no_sync() "
                "reduces them by itself"
            )
        self.has_local = False
        self.reducer.finish()


def _node_of(parameter: torch.Tensor) -> Any:
    """Of the graph, that adds to the parameter's gradient."""
    with not_inference(), torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(parameter).node


def _of_one_memory(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Distinct tensors, each with itself, but those that share elements together with what they are views of.

    What is done in place to one of several aliases of one memory would change the values of all, and the gradients of
    that one only.
    """
    groups: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        base = get_base(tensor) if is_view(tensor) else None
        base = tensor if base is None or not base.requires_grad else base
        groups.setdefault(id(base), (base, []))[1].append(tensor)
    found: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for base, members in groups.values():
        if any(may_share_elements(one, other) for one, other in combinations(members, 2)):
            found.append((base, members))
        else:
            found += [(member, [member]) for member in members]
    return found


class _Announce(torch.autograd.Function):
    """Identity on a model's outputs whose backward gives the anchor a gradient before any parameter gets one."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.device = anchor.device
        # Not the outputs themselves: users may modify them in place.
        return tuple(tensor.detach() for tensor in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (torch.zeros((), device=ctx.device), *gradients)


def _as_list(optimizers: Any) -> list[OSS]:
    found = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in found:
        if not isinstance(optimizer, OSS):
            raise TypeError(
                f"ShardedDataParallel(sharded_optimizer=...): got a {type(optimizer).__name__}; gradients go where OSS "
                "keeps the optimizer state, so pass an OSS or a list of them"
            )
    if not found:
        raise TypeError("ShardedDataParallel(sharded_optimizer=[]): pass at least one OSS")
    return found


def _common_group(optimizers: Sequence[OSS], group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    chosen = optimizers[0].group if group is None else group
    refuse_outside("ShardedDataParallel(process_group=...)", chosen)
    if not isinstance(chosen, dist.ProcessGroup):
        raise TypeError(f"ShardedDataParallel(process_group=...): must be a process group, not {type(chosen).__name__}")
    ranks = dist.get_process_group_ranks(chosen)
    for optimizer in optimizers:
        if (others := dist.get_process_group_ranks(optimizer.group)) != ranks:
            raise ValueError(
                f"ShardedDataParallel reduces over ranks {ranks}, and an OSS deals its parameters to ranks {others}: "
                "pass the same process group to both"
            )
    return chosen


def _only_type(module: nn.Module) -> str:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"ShardedDataParallel: {name!r} is on the meta device, without values: materialize the module before "
                "OSS and ShardedDataParallel are made"
            )
    types = sorted({parameter.device.type for parameter in module.parameters()})
    if len(types) != 1:
        found = ", ".join(types) or "none"
        raise ValueError(f"ShardedDataParallel needs a module with parameters on one type of device, not on {found}")
    return types[0]
