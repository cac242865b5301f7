"""FSDPModule: the methods that a wrapped module gets, and how it becomes one."""

from __future__ import annotations

import functools
import math
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, NoReturn, cast

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from ..arguments import takes_flags
from .comm import (
    ProcessGroupMemory,
    StagedCollective,
    SymmetricMemoryGather,
    require_symmetric_memory,
    second_comm_of,
)
from .context import FSDPCommContext
from .device import StateForTorch, answer_pipelines, answer_replicate, eager, in_backward, is_watched, skipped
from .errors import StateError
from .group import ParamGroup, ShardState
from .hooks import Unit
from .iteration import GradientReductionHandle
from .options import GroupOptions
from .parameter import release_class
from .root import UNIT, set_unit, unit_of, units_of, units_within

_classes: dict[type, type] = {}
_TorchModule = torch_fsdp.FSDPModule
"""Bound now: who wants libraries to use shardwise puts our class in place of torch's in its module."""


class UnshardHandle(torch_fsdp.UnshardHandle):
    """What `FSDPModule.unshard` with ``async_op=True`` gives."""

    def __init__(self, unit: Unit):
        self._unit: Unit | None = unit

    @eager
    def wait(self) -> None:
        """Wait for the parameters and register them on the module."""
        unit, self._unit = self._unit, None
        if unit is None:
            return
        for group in unit.groups:
            group.wait_for_unshard()
            group.shards.watch()  # they stay gathered, whatever is written to the shards
        unit.watch_writes()


class _NotPickled:
    """A function that `copy.copy` calls, and pickles refuse."""

    def __init__(self, function: Callable[..., Any], unit: Unit):
        self._function, self._unit = function, unit

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"module {self._unit.name or 'root'!r} was sharded by fully_shard and cannot be pickled, as "
            "torch.save(model) would: save its state_dict(), which has this rank's shards, "
            "shardwise.full_state_dict(model), which has whole tensors, or a checkpoint by shardwise.save"
        )


class FSDPModule(_TorchModule):
    """What a module wrapped by `fully_shard` is beside its own class.

    A subclass of torch's ``FSDPModule``, so that libraries that look for that one find it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing through the wrapped class gives the original class: slicing a `ModuleList` does this."""
        return class_before_sharding(cls)(*args, **kwargs)

    @skipped  # as what it stands in front of: compiled by itself, a module begins with its hooks, and they break graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward; an exception leaves the unit as before it."""
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            _unit(self).leave_by_exception(cast(nn.Module, self), error)
            raise

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            f"module {_unit(self).name or 'root'!r} ({type(self).__name__}) is sharded and cannot be deep-copied: "
            "copy it before fully_shard, or build a second model and load this one's state dict"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For `copy.copy`, which gets what it always did; whoever pickles it gets an error."""
        made = super().__reduce_ex__(protocol)
        if isinstance(made, tuple) and any(one is type(self) for one in made[1]):  # a class may say how it is pickled
            made = _NotPickled(made[0], _unit(self)), *made[1:]
        return made

    def _get_fsdp_state(self) -> StateForTorch:  # type: ignore[override]
        unit = _unit(self)
        return StateForTorch(unit.settle_root(), unit.pre_forward, unit.post_forward)

    # -- Parameters

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of `nn.Module`; also of the sharded parameters where others are registered, as between forward and
        backward, and what backward passes without synchronization have added up: the next ones would add to it.

        An optimizer's ``zero_grad`` does not know of gradients that wait for their reduction, as in FSDP2.
        """
        cast(Any, super()).zero_grad(set_to_none)
        for group in _groups(self, recurse=True):
            group.gradients.zero()
            for slot in group.slots if group.state is not ShardState.SHARDED else ():
                if set_to_none:
                    slot.sharded.grad = None
                elif slot.sharded.grad is not None:
                    slot.sharded.grad.zero_()

    @eager
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own unit (not its children's) and register the unsharded parameters, until its forward
        is over. Where the strategy keeps them anyway, until its backward is, since pipeline schedules that take the
        gradients of weights apart look for those that are in the graph; what is written to them until then is lost,
        with a warning, as with ``reshard_after_forward=False``.

        Args:
            async_op: only start; the handle's ``wait``, or the module's forward, does the rest.

        Raises:
            StateError: if a parameter is still on the meta device.
        """
        unit = _unit(self)
        if is_watched():
            unit.show_ranges()
        context = unit.context
        unit.gather_as_asked()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        context.rest()  # the user gathers, and not a pass through the tree
        return None

    @eager
    def reshard(self) -> None:
        """Register the sharded parameters of this module's own unit and free the gathered ones; nothing inside a
        forward of it that keeps them."""
        unit = _unit(self)
        unit.reshard()
        if unit.has_context:
            unit.context.rest()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(args[0] if args else None, "__qualname__", "").startswith("Module.share_memory."):
            # torch ends the process when it asks a DTensor for its memory.
            raise StateError(
                f"module {_unit(self).title!r} is sharded, and share_memory() would share this rank's shards alone: "
                "let ranks be the processes that train it, and give others shardwise.full_state_dict(model)"
            )
        if _unit(self).is_converted:
            return super(_TorchModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        units = _units(self, recurse=True)
        for unit in units:
            for group in unit.groups:
                group.reshard()
                # `nn.Module._apply` makes parameters of the same type, which DTensor allows and ours do not.
                release_class(slot.sharded for slot in group.slots)
        is_done = False
        try:
            for unit in units:
                unit.is_converted = True
            # Past torch's own FSDPModule, which would look for its state.
            result = super(_TorchModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
            is_done = True
        finally:
            for unit in units:
                unit.is_converted = False
            whole = {*units_within(cast(nn.Module, self))} if is_done else set()
            for unit in units:
                for group in unit.groups:
                    group.adopt_registered(is_loading=unit not in whole)  # its other modules may be converted next
        return result

    # -- Iteration

    @eager
    def reset_iter_state(self) -> None:
        """Make the next iteration correct after an exception in forward, backward or a hook.

        Waits for communication under way, reshards, and drops all gradients of sharded parameters: of a backward that
        failed midway some were reduced already.

        To be called on all ranks, also where nothing failed: those may have parameters gathered still, which others
        have to gather again.

        Raises:
            RuntimeError: if this is not the outermost wrapped module.
        """
        context = _check_root(self, "reset_iter_state")
        context.reset()
        for group in context.groups:
            for slot in group.slots:
                slot.sharded.grad = None

    @takes_flags
    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether `finalize_backward` ends iterations, and no backward, whatever `set_is_last_backward` says.

        As in torch 2.15, where pipeline schedules reduce gradients by it; here with every version.

        Raises:
            RuntimeError: if this is not the outermost wrapped module, or backward runs.
        """
        _check_root(self, "set_manual_backward_finalization")
        if enabled != _unit(self).iteration.ends_by_hand and in_backward():
            raise StateError(f"set_manual_backward_finalization({enabled}) was called before backward was over")
        _unit(self).iteration.ends_by_hand = enabled

    @eager
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End an iteration after `set_manual_backward_finalization(True)`: reduce the gradients that its backward
        passes left, and reshard, as the settings of now say. Nothing before the first forward.

        Args:
            async_op: only start the reductions; the handle's ``wait`` does the rest, and has to be called before
                gradients are read and before the next forward.

        Raises:
            RuntimeError: if this is not the outermost wrapped module, no iteration is ended by hand, backward still
                runs, a handle was not waited for, or `set_requires_all_reduce(False)` would leave sums of some ranks.
        """
        _check_root(self, "finalize_backward")
        handle = GradientReductionHandle(_unit(self), _units(self, recurse=True))
        handle.start()
        if async_op:
            return handle
        handle.wait()
        return None

    @takes_flags
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the iteration's last micro-batch.

        Before the last one the order recorded for backward is kept, and strategies with partial or replicated gradients
        (ZeRO-1, DDP) do not reduce. Gradients that were reduced are there after every backward.
        """
        _ = _unit(self).context  # a root that is made later would bring another iteration
        _unit(self).iteration.is_last_backward = is_last_backward

    @takes_flags
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; if not, they add up unsharded, in ``reduce_dtype`` if that is set."""
        for options in _options(self, recurse):
            options.reduce_gradients = requires_gradient_sync
            options.all_reduce_gradients = requires_gradient_sync

    @takes_flags
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a (replicate, shard) mesh: whether backward also reduces over the replicating axis; if not, the
        reduce-scattered sums add up until it does."""
        for options in _options(self, recurse):
            options.all_reduce_gradients = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are resharded after forward.

        Raises:
            ValueError: if it is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}; "
                "a smaller world to reshard to is an argument of fully_shard"
            )
        for unit in _units(self, recurse):
            unit.reshards_unless_root = False
            for group in unit.groups:
                group.options.reshard_after_forward = reshard_after_forward
                group.policy.reshard_to = None

    @takes_flags
    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are resharded after backward; keeping them saves a gather while accumulating."""
        for options in _options(self, recurse):
            options.reshard_after_backward = reshard_after_backward

    @property
    def reshard_after_backward(self) -> bool:
        """The state that `set_reshard_after_backward` sets, of this module alone."""
        return all(options.reshard_after_backward for options in _unit(self).options)

    @reshard_after_backward.setter
    def reshard_after_backward(self, value: bool) -> None:
        self.set_reshard_after_backward(value, recurse=False)

    @property
    def reduce_grads(self) -> bool:
        """The state that `set_requires_gradient_sync` sets, of this module alone."""
        return all(options.reduce_gradients for options in _unit(self).options)

    @reduce_grads.setter
    def reduce_grads(self, value: bool) -> None:
        self.set_requires_gradient_sync(value, recurse=False)

    @takes_flags
    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether unsharded parameters keep their memory, and so their addresses, while they are sharded (a captured
        CUDA graph needs that); their values are gathered again all the same."""
        for options in _options(self, recurse):
            options.keeps_memory = keep

    # -- Schedule

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:  # type: ignore[override]
        """Modules to gather when this one starts its forward, in place of the one that ran next last time.

        Raises:
            ValueError: if one of them is not wrapped.
            TypeError: if it is no list.
        """
        units = _units_of(modules, "set_modules_to_forward_prefetch")
        _unit(self).choose_prefetched("forward", units)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:  # type: ignore[override]
        """Modules to gather when this one starts its backward, in place of the one that ran before it in forward.

        Raises:
            ValueError: if one of them is not wrapped.
            TypeError: if it is no list.
        """
        units = _units_of(modules, "set_modules_to_backward_prefetch")
        _unit(self).choose_prefetched("backward", units)

    @takes_flags
    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this unit's parameters are gathered for backward; those of an embedding need not be."""
        for options in _unit(self).options:
            options.unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Let the next forward's first gather start after ``event``, recorded behind the optimizer's step, instead of
        after all computation that is queued by then. The memory that it receives in is taken now. None changes
        nothing."""
        if event is None:
            return
        context = _unit(self).context
        context.gather_after(event, next((unit for unit in context.units if unit.is_root), _unit(self)))

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing to set: gathers are asynchronous, and the compute stream allocates for them, in any case."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be under way at once; each holds gradients of one unit, or of several small ones.

        The units of a context share the limit, so ``recurse`` makes no difference between them.

        Raises:
            TypeError: if it is not an int.
            ValueError: if it is below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, not {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, not {max_input_buffers}")
        contexts = {unit.context for unit in _units(self, recurse) if unit.has_context}
        for context in contexts or {_unit(self).context}:
            context.reductions.limit = max_input_buffers

    # -- Communication

    def set_custom_all_gather(self, comm: StagedCollective) -> None:  # type: ignore[override]
        """Gather this unit's parameters by ``comm``: it allocates the staging buffer and is called with
        ``output_tensor``, ``input_tensor`` (this rank's part of it), ``group`` and ``async_op``. Not those that are
        laid out without padding, in large worlds: parameters with fewer rows than ranks, which are summed over ranks.

        Raises:
            ValueError: if the unit has parameters on several meshes.
            TypeError: if it is no such object.
        """
        _check_collective("set_custom_all_gather", comm)
        _only_group(self, "set_custom_all_gather").custom_gather = comm

    def set_custom_reduce_scatter(self, comm: StagedCollective) -> None:  # type: ignore[override]
        """Reduce this unit's gradients by ``comm``: it allocates the buffers and is called with ``output_tensor``,
        ``input_tensor``, ``group`` and ``op``. Not those of the parameters that `set_custom_all_gather` excepts.

        Raises:
            ValueError: if the unit has parameters on several meshes.
            TypeError: if it is no such object.
        """
        _check_collective("set_custom_reduce_scatter", comm)
        _only_group(self, "set_custom_reduce_scatter").custom_reduce_scatter = comm

    @takes_flags
    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Stage this unit's collectives in the process group's own memory, where its backend has an allocator. A
        collective.

        Raises:
            ValueError: if a custom collective was set, which allocates by itself.
        """
        for group in _unit(self).groups:
            if group.mesh.shard.size == 1:
                continue  # nothing is gathered or scattered
            options = group.options
            for custom in (options.custom_gather, options.custom_reduce_scatter):
                if not isinstance(custom, ProcessGroupMemory | None):
                    raise ValueError(f"unit {_unit(self).title!r} has a custom collective, which allocates by itself")
            both = ProcessGroupMemory(group.mesh.shard.group, group.mesh.device) if enable else None
            options.custom_gather = options.custom_reduce_scatter = both

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Stage this unit's gathers in symmetric memory.

        Raises:
            ValueError: if the process group's backend has no symmetric memory, or nothing is gathered over ranks.
        """
        for group in _unit(self).groups:
            require_symmetric_memory(group.mesh.shard.group, group.mesh.device, backend, _unit(self).title)
            group.options.custom_gather = SymmetricMemoryGather(group.mesh.shard.group, group.mesh.device, backend)

    @takes_flags
    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce gradients over a communicator of their own, so that gathers need not wait for them. It is one for all
        models over the same process group; the first call is a collective."""
        for group in _groups(self, recurse):
            shard, has_own = group.mesh.shard, enable and group.mesh.shard.size > 1
            group.options.reduce_comm = second_comm_of(shard.group, group.mesh.device) if has_own else None

    @takes_flags
    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether a trainable parameter without a gradient on any rank gets zeros instead of None.

        Ranks that differ in what they use of a unit need no setting: those without a gradient contribute zeros. With
        ``reshard_after_forward=False`` too, their backward may also leave out other units that ran forward.
        """
        for options in _options(self, recurse):
            options.zeros_for_unused = reduce_scatter_unused_params

    # -- Arithmetic of the reduction

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of by the number of ranks.

        Raises:
            TypeError: if it is neither a number nor a tensor.
            ValueError: for a number that is not positive and finite, which of a tensor is asked when it is read, or a
                tensor of several.
        """
        if factor is not None and not isinstance(factor, (numbers.Real, torch.Tensor)):
            raise TypeError(f"the gradient divide factor must be a number, not {factor!r}")
        if isinstance(factor, torch.Tensor) and factor.numel() != 1:
            raise ValueError(f"the gradient divide factor must be one number, not a tensor of shape {(*factor.shape,)}")
        if isinstance(factor, numbers.Real) and not 0 < factor < math.inf:
            raise ValueError(f"the gradient divide factor must be positive and finite, not {factor!r}")
        for options in _unit(self).options:
            options.divide_factor = factor

    @takes_flags
    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce this unit's gradients by sums and divide separately, instead of by the backend's average."""
        for options in _unit(self).options:
            options.force_sum = enable

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Call ``hook`` with each reduced 1-D gradient buffer of this unit, after all reductions.

        Beside the gradients it holds one number for each parameter, zero where no rank had a gradient: scale or reduce
        the whole buffer, but take no norm of it.

        Raises:
            TypeError: if it is no function.
            ValueError: if the unit has parameters on several meshes, or a stream is given for a 2-D mesh.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"set_all_reduce_hook takes a function of a tensor, not {type(hook).__name__}")
        options, unit = _only_group(self, "set_all_reduce_hook"), _unit(self)
        if stream is not None and any(group.mesh.replicate for group in unit.groups):
            raise ValueError(f"unit {unit.title!r} all-reduces by itself: the hook runs in that stream")
        options.all_reduce_hook = _in_stream(hook, stream) if stream is not None else hook


# What a wrapped module's methods share; not methods, whose names the module's own class may have.


def _unit(module: FSDPModule) -> Unit:
    return cast(Unit, module.__dict__[UNIT])


def _units(module: FSDPModule, recurse: bool) -> list[Unit]:
    return units_of(cast(nn.Module, module)) if recurse else [_unit(module)]


def _groups(module: FSDPModule, recurse: bool) -> Iterator[ParamGroup]:
    for unit in _units(module, recurse):
        yield from unit.groups


def _options(module: FSDPModule, recurse: bool) -> Iterator[GroupOptions]:
    for unit in _units(module, recurse):
        yield from unit.options


def _check_root(module: FSDPModule, method: str) -> FSDPCommContext:
    unit, context = _unit(module), _unit(module).context
    if context.has_root and not unit.is_root and context.outermost is not unit.reference:
        roots = [other.name or "the outermost wrapped one" for other in context.units if other.is_root]
        raise StateError(f"{method}() was called on {unit.title!r}; call it on the root: {roots[0]}")
    return context


def _only_group(module: FSDPModule, method: str) -> GroupOptions:
    unit = _unit(module)
    if len(unit.groups) > 1:
        raise ValueError(f"{method}: unit {unit.title!r} has parameters on several meshes, which it cannot tell apart")
    return unit.options[0]


def _in_stream(hook: Callable[[torch.Tensor], None], stream: torch.cuda.Stream) -> Callable[[torch.Tensor], None]:
    streams = torch.get_device_module(stream.device)

    def run(tensor: torch.Tensor) -> None:
        current = streams.current_stream()
        stream.wait_stream(current)
        with streams.stream(stream):
            hook(tensor)
        current.wait_stream(stream)

    return run


def _check_collective(method: str, comm: object) -> None:
    if comm is not None and not (callable(comm) and hasattr(comm, "allocate")):
        raise TypeError(f"{method} takes an object that can be called and has allocate(), not {comm!r:.80}")


def _units_of(modules: Iterable[Any], asked_by: str) -> list[Unit]:
    if isinstance(modules, nn.Module) or not isinstance(modules, Iterable):
        raise TypeError(f"{asked_by} takes a list of modules, not {type(modules).__name__}")
    units = []
    for module in modules:
        if not isinstance(module, nn.Module) or (unit := unit_of(module)) is None:
            raise ValueError(f"{asked_by} takes modules wrapped by fully_shard, not {type(module).__name__}")
        units.append(unit)
    return units


def class_before_sharding(wrapped: type) -> type[nn.Module]:
    """The class that a unit's module was made of."""
    return cast(type[nn.Module], wrapped.__mro__[wrapped.__mro__.index(_TorchModule) + 1])


def wrapped_class(original: type) -> type:
    """The class that wrapped modules of class ``original`` get.

    Raises:
        TypeError: if that allows no subclass like this.
    """
    if original not in _classes:
        try:
            made = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
        except Exception as error:  # of a metaclass or `__init_subclass__`
            raise TypeError(
                f"fully_shard makes a subclass of {original.__name__}, without arguments, which failed: {error}"
            ) from error
        if not original.__module__.startswith("torch."):  # whose own modules torch.compile and torch.fx know by place
            # `str` of both is the same: transformers looks up by it which outputs a model's class records. Not before
            # it is made: a base may refuse two subclasses of one name.
            made.__module__, made.__qualname__ = original.__module__, original.__qualname__
        _classes[original] = made
    return _classes[original]


def become_fsdp_module(module: nn.Module, unit: Unit) -> None:
    """Give ``module`` its wrapped class, leftmost in its MRO, and its unit."""
    module.__class__ = wrapped_class(type(module))
    set_unit(module, unit)
    answer_pipelines(module, functools.partial(_finish_iteration, unit.reference))
    answer_replicate(module)


def _finish_iteration(reference: weakref.ref[Unit]) -> None:
    """For the pipeline schedules of torch before 2.15."""
    unit = reference()
    assert unit is not None
    units = units_of(*unit.modules)
    context = unit.context
    context.start_finishing(units)
    context.finish_iteration(units)


def function_of(owner: Any, name: str) -> Callable[..., Any]:
    """What ``owner.name(...)`` calls, as a function of ``owner`` and the arguments; stored on ``owner`` it does not
    keep that alive, as a bound method would."""
    bound = getattr(owner, name)
    if isinstance(bound, MethodType) and bound.__self__ is owner:
        return bound.__func__
    # Static, of the class, or set on the instance.
    return lambda _, /, *args, **kwargs: bound(*args, **kwargs)


_forward_methods: weakref.WeakKeyDictionary[Callable[..., Any], weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""What gathers around other methods than forward, and the module that it is for."""


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather and reshard around ``module.<method_name>`` as around its forward; nothing if it is not wrapped, or that
    is done already.

    Args:
        module: the wrapped module.
        method_name: a method that uses its parameters.

    Raises:
        ValueError: if the module has no such method.
    """
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is None:
        return
    if not (isinstance(method_name, str) and callable(getattr(module, method_name, None))):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r} to register as a forward method")
    bound, function = getattr(module, method_name), function_of(module, method_name)
    reference, is_method = weakref.ref(module), isinstance(bound, MethodType)
    inner = bound.__func__ if is_method else bound
    # What is no function may have no hash.
    if isinstance(inner, FunctionType) and inner in _forward_methods and _forward_methods[inner]() is module:
        return

    @functools.wraps(inner)
    def run(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        assert alive is not None
        return unit.run(alive, functools.partial(function, alive), args[is_method:], kwargs)

    # What was a method stays one, which Lightning's `mark_forward_method` asks for.
    module.__dict__[method_name] = MethodType(run, weakref.proxy(module)) if is_method else run
    _forward_methods[run] = reference


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several wrapped trees (pipeline stages, say) use one context: one set of streams, one order.

    Raises:
        ValueError: if one of them is not wrapped.
    """
    contexts = [unit.settle_root() for unit in _units_of(modules, "share_comm_ctx")]
    for other in contexts[1:]:
        contexts[0].take_over(other)
