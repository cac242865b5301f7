"""FullyShardedDataParallel: FairScale's wrapper, which shards parameters, gradients and optimizer state (ZeRO-3)."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..arguments import check_arguments, documented, to_float
from ..core.agreement import doing
from ..core.changing import changing
from ..core.context import FSDPCommContext
from ..core.device import in_backward, not_inference
from ..core.flat import FlatShards, FlatSlot
from ..core.group import ParamGroup
from ..core.hooks import Phase, Unit
from ..core.options import GroupPolicy
from ..core.parameter import owner_of
from ..core.place import Place
from ..core.root import set_unit
from ..core.tree import map_tensors
from ..grad import scale_to_norm
from ..sites import under
from .fsdp_arguments import ARGUMENTS
from .fsdp_norms import norm_of_gradients
from .fsdp_optimizer import gather_optimizer_state, shard_optimizer_state
from .fsdp_parameters import (
    INNER,
    check_parameters,
    check_same_model,
    clean,
    describe_runs,
    flat_runs,
    named_tensors,
    own_modules,
    own_parameters,
    restore_order,
    sync_from_first_rank,
)
from .fsdp_settings import Settings, device_of
from .fsdp_sharing import share_parameter
from .fsdp_weights import consolidate, describe_shards, finish_load, finish_state_dict, prepare_load, refuse_joined
from .ranks import (
    comm_of,
    compute_device_of,
    given_group,
    given_reduce_group,
    raise_on_all,
    ranks_of,
    reduce_comm_of,
)
from .testing import DummyProcessGroup


class TrainingState(Enum):
    """What an instance is doing."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()
    SUMMON_FULL_PARAMS = auto()


_STATES = {
    Phase.IDLE: TrainingState.IDLE,
    Phase.FORWARD: TrainingState.FORWARD,
    Phase.PRE_BACKWARD: TrainingState.BACKWARD_PRE,
    Phase.POST_BACKWARD: TrainingState.BACKWARD_POST,
}


@documented(ARGUMENTS)
class FullyShardedDataParallel(Settings):
    """Holds the parameters of a module in shards and brings them together while it computes.

    Wrap from the inside out; then make the optimizer, whose parameters are 1-D tensors of this rank's elements (what
    is not joined keeps its shape in a world of one rank). At construction all ranks get the first rank's parameters and
    buffers. Everything that needs whole parameters is a collective: `state_dict`, `load_state_dict`,
    `summon_full_params`, `apply`.

    Attributes:
        rank: of this process in ``process_group``.
        world_size: ranks of ``process_group``.

    Raises:
        ValueError: for parameters that cannot be sharded so, or settings that exclude each other, and on all ranks if
            these have different ones.
        TypeError: for an argument of a wrong type.
        RuntimeError: if there is no process group.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        process_group_reduce_scatter: Any = None,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: torch.device | None = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: torch.device | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
    ):
        check_arguments(FullyShardedDataParallel.__init__, "FullyShardedDataParallel", ARGUMENTS, locals())
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"FullyShardedDataParallel wraps a module, not {type(module).__name__}")
        group = given_group(process_group)
        self.rank, self.world_size = group.rank(), group.size()
        self._reshards, self._disable_reshard_on_root = reshard_after_forward, disable_reshard_on_root
        self._fp32_reduce_scatter = fp32_reduce_scatter
        self._choose_dtypes(mixed_precision, compute_dtype, buffer_dtype)
        self.flatten_parameters, self.bucket_cap_mb = flatten_parameters, bucket_cap_mb
        self.move_params_to_cpu = bool(move_params_to_cpu or cpu_offload)
        self.move_grads_to_cpu = self.move_params_to_cpu if move_grads_to_cpu is None else move_grads_to_cpu
        self.compute_device = device_of("compute_device", compute_device, compute_device_of(group, module))
        default = torch.device("cpu") if self.move_params_to_cpu else self.compute_device
        self.state_dict_device = device_of("state_dict_device", state_dict_device, default)
        self.no_broadcast_optim_state, self.verbose = bool(no_broadcast_optim_state), verbose
        self.clear_autocast_cache, self.force_input_to_fp32 = clear_autocast_cache, force_input_to_fp32
        self.state_dict_on_rank_0_only, self.allow_reset_parameters = state_dict_on_rank_0_only, allow_reset_parameters
        self._reduce_group = given_reduce_group(process_group_reduce_scatter)
        self._check_settings()
        self._choose_divisors(gradient_predivide_factor)
        check_same_model(named := named_tensors(module), self._shared_settings(), group, self.compute_device)
        own = own_parameters(module)
        check_parameters(module, own, mixed_precision, self.compute_dtype)
        sync_from_first_rank(named, group, self.compute_device)
        self._modules[INNER] = module
        self._appended: list[nn.Parameter] = []
        self._names = {path: tuple(member._parameters) for path, member in own_modules(module)}
        self._runs = describe_runs(own, flatten_parameters)
        self._register_hooks()
        values = dict(own)
        self._start(group, [values[one] for run in self._runs for one in run.members])

    # -- Construction

    def _register_hooks(self) -> None:
        self.register_forward_pre_hook(_is_called)
        self.register_state_dict_post_hook(finish_state_dict)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(prepare_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(finish_load)  # type: ignore[no-untyped-call]
        for path in {path for run in self._runs if run.is_joined for one in run.members for path, _ in one.places}:
            self.module.get_submodule(path).register_state_dict_pre_hook(refuse_joined)

    def _start(self, group: Any, values: Sequence[nn.Parameter] | None) -> None:
        """Set up what belongs to this process; ``values`` are whole parameters, in the order of the runs' members, or
        None if shards are registered already."""
        self._process_group = group
        self._summons = self._gives_local = self._has_cast_buffers = False
        runs = flat_runs(self._runs, self, self.module, values)
        precision = self._precision()
        ranks = ranks_of(group, self.compute_device)
        policy = GroupPolicy(precision, offload=self.move_params_to_cpu, pin_memory=True)
        groups = [ParamGroup(FlatShards(runs, ranks, policy))] if runs else []
        self._own = groups[0] if groups else None
        for own in groups:
            cast(FlatShards, own.shards).holder = weakref.ref(self)
            own.options.reshard_after_forward = self._reshards
            own.options.reduce_comm = reduce_comm_of(self._reduce_group, ranks.shard, self.compute_device)
            own.options.divisors = self._divisors
        kept_by_root = self._reshards and self.disable_reshard_on_root
        set_unit(self, FairScaleUnit([self], groups, self.compute_device, precision, kept_by_root))

    def _own_slots(self) -> list[FlatSlot]:
        """The slot of each run of this instance, in order."""
        return cast(list[FlatSlot], list(self._own.slots)) if self._own is not None else []

    def _flat_slots(self) -> list[FlatSlot]:
        """`_own_slots`, and those of the instances that it shares parameters with."""
        return [cast(FlatSlot, slot) for group in self._unit.groups for slot in group.slots]

    @property
    def module(self) -> Any:
        """The wrapped module."""
        return self._modules[INNER]

    @property
    def params(self) -> list[nn.Parameter]:
        """This rank's parts of the parameters that this instance gathers: its own ones, then those it shares."""
        return [*self.non_shared_params(), *self._appended]

    def non_shared_params(self) -> list[nn.Parameter]:
        """Those of ``params`` that no other instance has: the joined one of each kind, or each by itself."""
        return [slot.sharded for slot in self._own_slots()]

    @property
    def numel_padded_per_param(self) -> list[int]:
        """Elements at the end of each of `non_shared_params` that belong to no parameter."""
        return [slot.padding for slot in self._own_slots()]

    @property
    def buffer_size(self) -> int:
        """Elements of this instance's own parameters when they are whole."""
        return sum(slot.total for slot in self._own_slots())

    @property
    def has_full_params(self) -> bool:
        """Whether the parameters are whole now: while it computes, in `summon_full_params`, and where they are kept
        after forward."""
        return self._summons or (self._own is not None and self._own.is_unsharded)

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Use a parameter that another instance has sharded; both then gather together, from the first of their
        forwards to the last.

        Args:
            p: of the other instance, whether it is registered in this one's module too or used through the other's;
                neither instance flattens its parameters.

        Raises:
            ValueError: if it is not such a parameter, or this instance has run already, or has no parameter of its own.
            TypeError: if it is no parameter at all.
        """
        share_parameter(p, self)

    # -- Running

    @property
    def training_state(self) -> TrainingState:
        """What this instance is doing."""
        return TrainingState.SUMMON_FULL_PARAMS if self._summons else _STATES[self._unit.phase]

    def assert_state(self, state: TrainingState | Collection[TrainingState]) -> None:
        """
        Raises:
            ValueError: if `training_state` is not ``state``, or none of them.
            TypeError: if ``state`` is neither a `TrainingState` nor a collection of some.
        """
        states = state if isinstance(state, Collection) else [state]
        if not all(isinstance(one, TrainingState) for one in states):
            raise TypeError(f"assert_state takes a TrainingState, or a collection of some, not {state!r}")
        if self.training_state not in states:
            raise ValueError(
                f"{self._title()} is expected to be in states {list(states)} here, and its current state is "
                f"{self.training_state}"
            )

    def _check_idle(self) -> None:
        """
        Raises:
            ValueError: unless the instance is idle.
        """
        self._leave_failed_backward()
        self.assert_state(TrainingState.IDLE)

    def _leave_failed_backward(self) -> None:
        """Clear what a backward pass that raised has left, before the next forward builds on it."""
        if self._unit.has_context and not in_backward():
            self._unit.context.recover_from_aborted_backward()

    def _check_local(self) -> None:
        """
        Raises:
            ValueError: inside `summon_full_params`.
        """
        if self._summons:
            raise ValueError(f"{self._title()}: parameters are whole inside summon_full_params; leave it first")

    def _title(self) -> str:
        name = f" {self._unit.name!r}" if self._unit.name else ""
        return f"FullyShardedDataParallel({type(self.module).__name__}){name}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with whole parameters."""
        # Ends a `load_state_dict` that raised, if it was called on a module around this one that is not wrapped.
        self._leave_loading()
        if self._summons:
            raise ValueError(
                f"{self._title()}: forward cannot run inside summon_full_params, whose parameters are not those that "
                "are trained; leave it first"
            )
        if not self._has_cast_buffers:
            self._cast_buffers()
        if self.force_input_to_fp32 and not self.mixed_precision:
            args, kwargs = map_tensors((args, kwargs), _widened)
        outputs = self._unit.run(self, self.module, args, kwargs)
        if self.clear_autocast_cache:
            torch.clear_autocast_cache()
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add gradients up unsharded; the first one outside reduces the sum.

        Raises:
            ValueError: if the instance is not idle.
        """
        self._check_idle()
        options = [instance._own.options for instance in get_fsdp_instances(self) if instance._own is not None]
        with changing(options, "reduce_gradients", False):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.nn.Module.zero_grad`; also drops what backward passes under `no_sync` have added up.

        An optimizer's ``zero_grad`` drops that too where it sets gradients to None, not where it fills them with zeros.

        Args:
            set_to_none: whether to drop gradients instead of filling them with zeros.
        """
        super().zero_grad(set_to_none)
        for instance in get_fsdp_instances(self):
            for slot in instance._own_slots():
                slot.drop_gradient()

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide gradients by ``pre`` before they are summed over ranks and by ``post`` after.

        Args:
            pre: about the square root of ``world_size``, unless it is set.
            post: ``world_size / pre``, unless it is set.
            recursive: whether to set them for the instances inside too.

        Raises:
            ValueError: if the instance is not idle, or a factor is not above 0.
            TypeError: if a factor is no number.
        """
        self._check_idle()
        for instance in get_fsdp_instances(self) if recursive else [self]:
            instance._divide_by(pre, post)

    # -- Whole parameters

    @contextlib.contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Whole parameters in the dtype of the shards, under their own names; a collective.

        A rank keeps what it writes into its own part of them; what it freezes, all have to. Forward and backward cannot
        run inside.

        Args:
            recurse: whether to include the instances inside.
            volatile: whether to drop what is written.

        Raises:
            ValueError: if an instance is not idle; at the end, if a parameter was removed, or replaced by one of
                another shape, or if some of those that are joined were frozen and others were not.
        """
        with contextlib.ExitStack() as stack:
            for instance in get_fsdp_instances(self) if recurse else [self]:
                stack.enter_context(instance._summoned(volatile))
            yield

    @contextlib.contextmanager
    def _summoned(self, volatile: bool) -> Iterator[None]:
        opened = self._summon(volatile)
        try:
            yield
        finally:
            self._dismiss(opened, volatile)

    def _summon(self, volatile: bool, is_loading: bool = False) -> list[FlatShards]:
        self._check_idle()
        opened = []
        for group in self._unit.groups:
            shards = group.shards
            assert isinstance(shards, FlatShards)
            if not shards.is_summoned:
                group.reshard()
                group.adopt_registered()
                shards.summon(volatile=volatile, is_loading=is_loading)
                opened.append(shards)
        if opened:
            restore_order(self.module, self._names)
        self._summons = True
        return opened

    def _dismiss(self, opened: Sequence[FlatShards], volatile: bool) -> None:
        self._summons = False
        for shards in opened:
            shards.dismiss(keep_changes=not volatile)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """`torch.nn.Module.apply` with whole parameters, one instance's at a time; a collective."""
        with self._summoned(volatile=False):
            super().apply(fn)
        return self

    def reset_parameters(self) -> None:
        """Call the wrapped module's ``reset_parameters`` with whole parameters; a collective.

        Raises:
            RuntimeError: unless ``allow_reset_parameters``.
        """
        if not self.allow_reset_parameters:
            raise RuntimeError(
                f"{self._title()}: reset_parameters after wrapping gives every rank other numbers unless their random "
                "state agrees; pass allow_reset_parameters=True if it does, or initialize before wrapping"
            )
        with self.summon_full_params():
            self.module.reset_parameters()

    # -- State

    @doing("gathering the state dict")
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole parameters and buffers under the names that the model has without wrappers, as
        `torch.nn.Module.state_dict`; a collective. Floating-point values are in the dtype of the shards: float32,
        unless the model is in half precision."""
        if self._summons or self._gives_local:
            return super().state_dict(*args, **kwargs)
        with self._summoned(volatile=True):
            return super().state_dict(*args, **kwargs)

    @doing("loading a state dict")
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` of this model, wrapped or not, gave; a collective. Every rank passes all of it.

        Args:
            state_dict: names to whole tensors; not changed.
            strict: whether missing and unexpected names are errors.
            assign: has no meaning for shards, which are copied into.

        Raises:
            ValueError: for ``assign=True``.
            TypeError: for anything that is not a mapping.
            RuntimeError: on all ranks, for names or shapes that do not fit on one, by the names of the model without
                wrappers.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict takes a state dict, names to tensors, not {type(state_dict).__name__}")
        if assign:
            raise ValueError("load_state_dict(assign=True): a rank keeps a part of each tensor only; leave assign out")
        given: Any = OrderedDict(state_dict)
        if (metadata := getattr(state_dict, "_metadata", None)) is not None:
            given._metadata = {
                name: metadata[clean(name)] for name, _ in self.named_modules() if clean(name) in metadata
            }
        loaded, failure, is_collective = None, None, not (self._summons or self._gives_local)
        try:
            loaded = super().load_state_dict(given, strict)
        except RuntimeError as error:  # torch's, after it has loaded what fits
            failure = error
        finally:
            for instance in get_fsdp_instances(self):
                instance._leave_loading()
        if is_collective:
            raise_on_all(failure, "load_state_dict", self.process_group, self.compute_device)
        elif failure is not None:
            raise failure
        return loaded

    def _enter_loading(self, messages: list[str]) -> None:
        """Prepare for a state dict to be loaded; ``messages`` collects what goes wrong."""
        is_ready = self._summons or self._gives_local
        self._loading = messages, None if is_ready else self._summon(volatile=False, is_loading=True)

    def _leave_loading(self) -> None:
        if (loading := self.__dict__.pop("_loading", None)) is None:
            return
        messages, opened = loading
        messages[:] = [clean(message) for message in messages]
        if opened is not None:
            self._dismiss(opened, volatile=False)

    def _locally(self) -> contextlib.AbstractContextManager[None]:
        return changing(get_fsdp_instances(self), "_gives_local", True)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's shards, padded to equal sizes, and all buffers; loads at the same world size only. Forward and
        backward may run meanwhile.

        Raises:
            ValueError: inside `summon_full_params`.
        """
        for instance in get_fsdp_instances(self):
            instance._check_local()
        with self._locally():  # a subclass may have made its `state_dict` this method
            return FullyShardedDataParallel.state_dict(self, *args, **kwargs)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load what `local_state_dict` of the same rank gave.

        Raises:
            ValueError: if an instance is not idle.
            RuntimeError: for names or shapes that do not fit.
        """
        instances = get_fsdp_instances(self)
        for instance in instances:
            instance._check_local()
            instance._check_idle()
        for group in (group for instance in instances for group in instance._unit.groups):
            group.reshard()
        with self._locally():
            return FullyShardedDataParallel.load_state_dict(self, state_dict, strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """What `consolidate_shard_weights` needs beside the `local_state_dict` of each rank: ``param_metadata``, a dict
        for each instance, and ``buffer_names``."""
        return describe_shards(self, get_fsdp_instances(self))

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: list[dict[str, torch.Tensor]],
        shard_metadata: list[dict[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, torch.Tensor]:
        """Whole weights from all ranks' shards, without processes.

        Args:
            shard_weights: `local_state_dict` of each rank, in order; not changed.
            shard_metadata: `local_metadata_dict` of each rank.
            with_module_buffers: whether the first rank's buffers are given too.
            strict: whether a parameter that is described and not there is an error; otherwise it is left out.

        Raises:
            ValueError: if there is not one description for each rank, or none.
            KeyError: naming what is missing.
        """
        return consolidate(shard_weights, shard_metadata, with_module_buffers, strict)

    # -- Optimizer

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """Parameters that have a gradient."""
        return [parameter for parameter in self.parameters() if parameter.grad is not None]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``; a collective.

        Args:
            max_norm: in the unit of the gradients.
            norm_type: order of the norm; ``inf`` for the largest absolute value.

        Returns:
            The norm before scaling, 0-dim, the same on all ranks.

        Raises:
            ValueError: if the instance is not idle, or inside another one.
            TypeError, ValueError: if ``max_norm`` or ``norm_type`` is no number.
        """
        max_norm = to_float("clip_grad_norm_", "max_norm", max_norm)
        norm_type = to_float("clip_grad_norm_", "norm_type", norm_type)
        self._check_idle()
        if self._unit.has_context and not self._unit.is_root:
            raise ValueError(f"{self._title()}: call clip_grad_norm_ on the outermost instance")
        slots = [slot for instance in get_fsdp_instances(self) for slot in instance._own_slots()]
        everyone = comm_of(self.process_group, self.compute_device)
        norm = norm_of_gradients(slots, everyone, self.compute_device, norm_type)
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        scale_to_norm(gradients, norm, max_norm)
        return norm.cpu() if self.move_grads_to_cpu else norm

    @doing("gathering the optimizer's state")
    def gather_full_optim_state_dict(self, optim: Optimizer, recipient_rank: int | None = 0) -> dict[str, Any] | None:
        """State of ``optim``, as if it trained the model without wrappers; a collective, which changes nothing.

        Args:
            optim: over parameters of this module; elementwise, so that its state can be cut like parameters. Anything
                that has ``param_groups`` and ``state_dict``, of which further entries are kept.
            recipient_rank: rank in ``process_group`` that gets the result; None for all.

        Returns:
            What `Optimizer.state_dict` gives, tensors on the host, numbered as ``parameters()`` of the model without
            wrappers, its param groups kept; None on other ranks. Instances with ``no_broadcast_optim_state`` that are
            spread over several ranks are left out.

        Raises:
            ValueError: for a parameter that is not of this module, param groups in another order than `parameters`,
                state that is not elementwise, or no such rank.
            TypeError: for what is no optimizer.
        """
        if recipient_rank is not None and recipient_rank not in range(self.world_size):
            raise ValueError(
                f"recipient_rank={recipient_rank!r}: the process group has ranks 0 to {self.world_size - 1}; None "
                "is for all"
            )
        state = gather_optimizer_state(self, get_fsdp_instances(self), optim, recipient_rank)
        return state if recipient_rank in (None, self.rank) else None

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of the state of an optimizer of the model without wrappers.

        Args:
            full_optim_state_dict: as `gather_full_optim_state_dict` gives it, ours or FairScale's, at any world size,
                or the ``state_dict()`` of an optimizer of the plain model, whose param groups have its parameters in
                the order of ``parameters()``; not changed.

        Returns:
            What ``load_state_dict`` of an optimizer over this module's parameters takes: each of its param groups has
            them in the order of `parameters`.

        Raises:
            ValueError: if it has more parameters, splits parameters that are joined here, is no state dict of an
                optimizer, or FairScale gathered it from a model wrapped otherwise, as far as the numbers of parameters
                tell.
            TypeError: for anything that is not a mapping, as what `gather_full_optim_state_dict` gives where it is not
                received.
        """
        return shard_optimizer_state(self, get_fsdp_instances(self), full_optim_state_dict)

    # -- Module

    def _cast_buffers(self) -> None:
        """Cast and move buffers, as FairScale does before a forward."""
        self._has_cast_buffers = True
        with not_inference():
            for _, module in own_modules(self.module):
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        dtype = self.buffer_dtype if buffer.is_floating_point() else buffer.dtype
                        module._buffers[name] = buffer.to(self.compute_device, dtype)

    def _check_parameters(self) -> None:
        """
        Raises:
            ValueError: naming a parameter that is not sharded, or sharded by another instance and not shared with it.
        """
        for path, module in own_modules(self.module):
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                label, owner = under(path, name), owner_of(parameter)
                if owner is None:
                    raise ValueError(
                        f"{self._title()}: parameter {label!r} was registered after wrapping, so its gradients would "
                        "stay this rank's own: register it before"
                    )
                if not owner.manages(Place(module, name)):
                    raise ValueError(
                        f"{self._title()}: parameter {label!r} is sharded by another instance: call "
                        "append_shared_param with it before the first forward"
                    )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As `torch.nn.Module.named_parameters`, without the names of wrappers."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield clean(name), parameter

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if INNER not in self.__dict__.get("_modules", {}):  # while this is being made or unpickled
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        self._check_idle()
        if self._own is not None:
            self._own.reshard()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._has_cast_buffers = False
        if self._own is not None:
            self._own.adopt_registered()
        if not self.mixed_precision:
            # Without parameters of its own it has buffers all the same.
            like = fn(torch.empty(0, dtype=self.compute_dtype)) if self._own is None else self._own.slots[0].sharded
            follows = self.buffer_dtype == self.compute_dtype
            self._compute_dtype, self._buffer_dtype = like.dtype, like.dtype if follows else self.buffer_dtype
        return self

    def extra_repr(self) -> str:
        """Settings; all of them if ``verbose``."""
        names = SETTINGS if self.verbose else SETTINGS[:3]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but process groups, and what belongs to this process. Whole parameters, as between forward and
        backward, go along, and are dropped where it is loaded.

        Raises:
            TypeError: for an instance that uses a parameter of another one.
            ValueError: inside `summon_full_params`.
        """
        self._check_local()
        if self._appended:
            raise TypeError(f"{self._title()} uses a parameter of another instance, so it cannot be pickled")
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_PROCESS}
        if isinstance(self._reduce_group, str):
            state["_reduce_group"] = self._reduce_group
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied.process_group, copied.process_group_reduce_scatter = self.process_group, self._reduce_group
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._reduce_group = given_reduce_group(state.get("_reduce_group"))
        for _, parameter in self.named_parameters(recurse=False):
            # Out of memory that is shared with the process that sent it.
            parameter.data = parameter.data.clone()
        self._start(DummyProcessGroup(self.rank, self.world_size), None)


SETTINGS = (
    *("world_size", "flatten_parameters", "mixed_precision", "rank", "reshard_after_forward", "compute_dtype"),
    *("buffer_dtype", "fp32_reduce_scatter", "compute_device", "move_params_to_cpu", "move_grads_to_cpu"),
    *("bucket_cap_mb", "clear_autocast_cache", "force_input_to_fp32"),
)
"""Attributes that are printed: the first three always, the others if ``verbose``."""

_OF_THIS_PROCESS = {"_process_group", "_reduce_group", "_own", "_loading", "_shardwise_unit"}

FSDP = FullyShardedDataParallel


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """Instances in ``mod``, itself among them, outer ones first.

    Args:
        mod: any module.
        skip_empty: leave out those without parameters of their own.
    """
    found = [member for member in mod.modules() if isinstance(member, FullyShardedDataParallel)]
    return [instance for instance in found if not skip_empty or instance._own is not None]


class FairScaleUnit(Unit):
    """A unit whose tree has names without wrappers, and casts inputs where precision changes, and buffers."""

    def become_root(self) -> FSDPCommContext:
        context = super().become_root()
        for unit in context.units:
            unit.rename(clean(unit.name))
            for slot in (slot for group in unit.groups for slot in group.slots):
                slot.name = clean(slot.name)
        for module in self.modules:
            _choose_casts(module, None)
            for instance in get_fsdp_instances(module):
                instance._check_parameters()
                instance._cast_buffers()
        return context


def _choose_casts(module: nn.Module, outer: torch.dtype | None) -> None:
    """Instances of low precision cast their inputs, unless the instance around them computes in the same dtype."""
    if isinstance(module, FullyShardedDataParallel):
        unit, dtype = module._unit, module.compute_dtype
        unit.precision = replace(unit.precision, cast_forward_inputs=module.mixed_precision and outer != dtype)
        outer = dtype
    for child in module.children():
        _choose_casts(child, outer)


def _is_called(instance: nn.Module, args: Any) -> None:
    """Does nothing: torch's transformer layers call the modules in them if any has a hook. Without gradients they would
    take parameters out of them instead, which are shards there."""


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
