"""ParamGroup: parameters that are gathered, and whose gradients are reduced, together. It knows how, never when."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from .buffer import Collective, ShardedBuffer
from .comm import PACK_BELOW_BYTES, Comm, StagedCollective
from .device import (
    Lane,
    Waitable,
    add_each,
    label,
    local_of,
    make_spec,
    not_inference,
    post_accumulate_grad_hooks,
    run_tensor_hooks,
    set_local,
    without_torch_function,
    wrap_gradient,
)
from .errors import StateError, explain
from .gradient import GradientPlan, Reduction, Route, gradient_scale
from .layout import Layout, per_parameter
from .mesh import DataParallelMesh
from .model_parallel import ModelParallel, describe
from .parameter import Place, adopt_parameter, make_sharded_parameter, mark_replaced, owner_of, remember_successor


class ShardState(Enum):
    """Which face of its parameters a group has registered."""

    SHARDED = auto()
    RESHARDED = auto()
    """Cut over a smaller world, between forward and backward."""
    UNSHARDED = auto()


@dataclass
class ManagedParameter:
    """What `fully_shard` found out about one parameter.

    Args:
        value: the original parameter.
        name: full name, for messages.
        places: where it is registered (several for a tied parameter).
        dim: tensor dim that it is cut on.
    """

    value: nn.Parameter
    name: str
    places: list[Place]
    dim: int = 0

    @property
    def local(self) -> torch.Tensor:
        """What data parallelism shards: the parameter, or its local part under another parallelism."""
        return local_of(self.value) if isinstance(self.value, DTensor) else self.value.detach()


@dataclass(eq=False)
class Slot:
    """One parameter of a group: its place in a buffer and its two faces."""

    name: str
    places: list[Place]
    buffer: ShardedBuffer
    index: int
    sharded: nn.Parameter
    parallel: ModelParallel | None = None
    unsharded: nn.Parameter | None = None
    accumulated: torch.Tensor | None = None
    """Unsharded gradient in the reduction's dtype, summed over backward passes without synchronization."""


@dataclass
class GroupOptions:
    """What users may set on a group while training; the defaults are torch FSDP2's."""

    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    reduce_gradients: bool = True
    all_reduce_gradients: bool = True
    divide_factor: float | None = None
    force_sum: bool = False
    unshard_in_backward: bool = True
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    zeros_for_unused: bool = False
    custom_gather: StagedCollective | None = None
    custom_reduce_scatter: StagedCollective | None = None
    reduce_comm: Comm | None = None


@dataclass
class GroupPolicy:
    """What is fixed when a group is made.

    Args:
        precision: dtypes of gathered parameters and of reductions.
        offload: whether sharded parameters and gradients live on the host.
        pin_memory: whether they do so in pinned memory.
        reshard_to: mesh whose last axis is the smaller world to reshard to after forward, if not to the whole one.
    """

    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: bool = False
    pin_memory: bool = False
    reshard_to: DataParallelMesh | None = None


class ParamGroup:
    """Some parameters of one mesh, their buffers (one per dtype), and the verbs on them.

    Takes parameters, not a module: an optimizer wrapper has no module.

    Args:
        parameters: what to manage; their registered places get the sharded parameters.
        mesh: ranks and strategy.
        policy: dtypes and memory.
    """

    def __init__(self, parameters: Sequence[ManagedParameter], mesh: DataParallelMesh, policy: GroupPolicy):
        self.mesh, self.policy = mesh, policy
        self.options = GroupOptions()
        self.name = ""
        self.state = ShardState.SHARDED
        self.slots: list[Slot] = []
        self._self = weakref.ref(self)
        self._buffers: list[ShardedBuffer] = []
        self._gather: tuple[Waitable | None, list[Callable[[], None]]] | None = None
        self._stale = True
        self._is_adopted = True
        self._versions: list[int] | None = None
        self._plans: dict[tuple[tuple[int, ...], torch.dtype, bool], GradientPlan] = {}
        by_dtype: dict[torch.dtype, list[ManagedParameter]] = defaultdict(list)
        for parameter in parameters:
            by_dtype[parameter.value.dtype].append(parameter)
        with torch.no_grad(), not_inference():
            for dtype, members in by_dtype.items():
                self._add_buffer(dtype, members)
        order = {id(parameter.places[0]): position for position, parameter in enumerate(parameters)}
        self.slots.sort(key=lambda slot: order[id(slot.places[0])])
        for index, parameter in enumerate(parameters):
            remember_successor(parameter.value, self._self, index)

    # -- Making and re-making the sharded parameters

    def _gather_dtype(self, dtype: torch.dtype) -> torch.dtype:
        wanted = self.policy.precision.param_dtype
        return wanted if wanted is not None and dtype.is_floating_point else dtype

    def _layout(self, shapes: Sequence[tuple[int, ...]], dims: Sequence[int], dtype: torch.dtype) -> Layout:
        size = self.mesh.shard.size
        small = PACK_BELOW_BYTES // self._gather_dtype(dtype).itemsize
        packed = [tensor.chunk_numel < small for tensor in per_parameter(shapes, dims, size).tensors]
        return per_parameter(shapes, dims, size, packed)

    def _new_local(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "meta":
            device = torch.device("cpu") if self.policy.offload else self.mesh.device
        pinned = self.policy.offload and self.policy.pin_memory and device.type == "cpu" and torch.cuda.is_available()
        return torch.zeros(layout.local_numel, dtype=dtype, device=device, pin_memory=pinned)

    def _add_buffer(self, dtype: torch.dtype, members: Sequence[ManagedParameter]) -> None:
        rank = self.mesh.shard.rank
        layout = self._layout([tuple(m.local.shape) for m in members], [m.dim for m in members], dtype)
        local = self._new_local(layout, dtype, members[0].value.device)
        buffer = ShardedBuffer(layout, local, self.mesh.shard, self._gather_dtype(dtype), self.mesh.device)
        self._buffers.append(buffer)
        for index, (member, tensor) in enumerate(zip(members, layout.tensors, strict=True)):
            view = buffer.local_view(index)
            if not member.value.is_meta:
                view.copy_(member.local.narrow(tensor.dim, tensor.start(rank), tensor.length(rank)))
            parallel = describe(member.name, member.value, tensor.dim, self.mesh)
            own = make_spec(self.mesh.mesh, self.mesh.placements(tensor.dim), member.value)
            spec = own if parallel is None else parallel.sharded
            sharded = make_sharded_parameter(view, spec, member.value.requires_grad, self._self)
            # Marks that users leave on parameters ("no weight decay") stay on them.
            sharded.__dict__.update({key: value for key, value in member.value.__dict__.items() if key[:1] != "_"})
            self.slots.append(Slot(member.name, member.places, buffer, index, sharded, parallel))
            for place in member.places:
                place.put(sharded)

    def adopt_registered(self, *, is_loading: bool = False) -> None:
        """Take over what is registered now, after torch code replaced or moved sharded parameters
        (`nn.Module.to`, `to_empty`, `load_state_dict(assign=True)`).

        Args:
            is_loading: more parameters of the unit may be replaced before its next use.

        Raises:
            StateError: naming a parameter that is not sharded, or tied to another since it was sharded.
        """
        assert self.state is ShardState.SHARDED
        self.mark_stale()
        self._is_adopted = True
        for buffer in list(self._buffers):
            slots = [slot for slot in self.slots if slot.buffer is buffer]
            registered = [_newest(slot) for slot in slots]
            self._check_registered(slots, registered)
            with without_torch_function():
                locals_ = [local_of(parameter) for parameter in registered]
                untouched = all(
                    new is slot.sharded
                    and local.data_ptr() == buffer.local_view(slot.index).data_ptr()
                    and local.dtype == buffer.local.dtype
                    and local.device == buffer.local.device
                    and not local.is_meta
                    for slot, new, local in zip(slots, registered, locals_, strict=True)
                )
            if not untouched:
                self._rebuild(buffer, slots, registered, locals_, is_loading)
            for slot, parameter in zip(slots, registered, strict=True):
                if parameter is not slot.sharded:
                    mark_replaced(slot.sharded)
                adopt_parameter(parameter, self._self)
                slot.sharded = parameter
                for place in slot.places:  # `assign=True` gives each name of a tied parameter a tensor of its own
                    place.put(parameter)

    def _check_registered(self, slots: Sequence[Slot], registered: Sequence[nn.Parameter]) -> None:
        for slot, parameter in zip(slots, registered, strict=True):
            if parameter is slot.sharded:
                continue
            if not isinstance(parameter, DTensor):
                raise StateError(
                    f"parameter {slot.name!r} of unit {self.name!r} was replaced by a {type(parameter).__name__} that "
                    "is not sharded: replace it before fully_shard, or write its values into the sharded one"
                )
            owner = owner_of(parameter)
            if owner is not None and owner.current(parameter):
                raise StateError(
                    f"parameter {slot.name!r} was tied to {owner.name_of(parameter)[0]!r} after both were sharded, and "
                    "each has a shard of its own: tie them before fully_shard"
                )

    def current(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is the sharded parameter of a slot."""
        return any(slot.sharded is parameter for slot in self.slots)

    def _rebuild(
        self,
        old: ShardedBuffer,
        slots: Sequence[Slot],
        registered: Sequence[nn.Parameter],
        locals_: Sequence[torch.Tensor],
        is_loading: bool,
    ) -> None:
        dtypes = {local.dtype for local in locals_}
        if len(dtypes) > 1 and is_loading:
            self._is_adopted = False  # the rest of the unit is loaded next
            return
        if len(dtypes) > 1:
            raise StateError(
                f"parameters of unit {self.name!r} that had one dtype now have {sorted(map(str, dtypes))}: "
                "convert all parameters of a unit alike"
            )
        dtype, tensors = dtypes.pop(), old.layout.tensors
        with torch.no_grad(), not_inference():
            layout = self._layout([tensor.shape for tensor in tensors], [tensor.dim for tensor in tensors], dtype)
            meta = any(local.is_meta for local in locals_)
            local = self._new_local(layout, dtype, torch.device("meta") if meta else self.mesh.device)
            buffer = ShardedBuffer(layout, local, old.comm, self._gather_dtype(dtype), self.mesh.device)
            for slot, parameter, value in zip(slots, registered, locals_, strict=True):
                view = buffer.local_view(slot.index)
                if meta and not value.is_meta:
                    continue  # half materialized: stays as it is until the rest is
                if not meta:
                    view.copy_(value)
                with without_torch_function():
                    set_local(parameter, view)
        if meta and not all(value.is_meta for value in locals_):
            return
        self._buffers[self._buffers.index(old)] = buffer
        old.free()
        for slot in slots:
            slot.buffer, slot.unsharded, slot.accumulated = buffer, None, None
        self._plans.clear()

    # -- Unsharding

    def mark_stale(self) -> None:
        """The sharded parameters may have changed: kept unsharded ones must be gathered again."""
        self._stale = True

    def name_of(self, parameter: torch.Tensor) -> tuple[str, str]:
        """Names of a sharded parameter and of its unit."""
        return next((slot.name for slot in self.slots if slot.sharded is parameter), "?"), self.name

    def manages(self, place: Place) -> bool:
        """Whether a parameter of this group is registered at ``place``."""
        return any(place in slot.places for slot in self.slots)

    def check_materialized(self) -> None:
        """
        Raises:
            StateError: naming the parameters that are still on the meta device.
        """
        if any(buffer.local.is_meta for buffer in self._buffers):
            names = [slot.name for slot in self.slots if slot.buffer.local.is_meta]
            raise StateError(
                f"unit {self.name!r}: parameters {', '.join(map(repr, names))} are still on the meta device, without "
                "values: before the first forward call model.to_empty(device=...) and initialize them, or load a "
                "checkpoint with assign=True"
            )

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are registered."""
        return self.state is ShardState.UNSHARDED

    @property
    def is_gathering(self) -> bool:
        """Whether a gather was started that nobody waited for."""
        return self._gather is not None

    def _needs_gather(self) -> bool:
        if not self.mesh.strategy.keeps_unsharded:
            return True
        return self._changed()

    def _changed(self) -> bool:
        """Whether the shards were written since they were gathered last."""
        return self._stale or (self._versions is not None and self._versions != self._written())

    def _written(self) -> list[int]:
        """Version counters of all that the shards can be written through."""
        with without_torch_function():
            shards = [slot.sharded for slot in self.slots]
            views = [*shards, *(local_of(shard) for shard in shards), *(buffer.local for buffer in self._buffers)]
        return [tensor._version for tensor in views]

    def unshard(self, lane: Lane) -> None:
        """Start gathering; does nothing if the parameters are gathered or on their way."""
        if self._gather is not None:
            return
        if not self._is_adopted:
            self.adopt_registered()
        if self.state is ShardState.UNSHARDED:
            if not self._changed():
                return
            # Kept since before the optimizer changed the shards.
            self.reshard()
        if not self._needs_gather():
            self._gather = None, []
            return
        self.check_materialized()
        with torch.no_grad(), label("FSDP::all_gather", self.name):
            outputs: list[torch.Tensor] = []
            inputs: list[torch.Tensor] = []
            finish: list[Callable[[], None]] = []
            for buffer in self._buffers:
                (more_outputs, more_inputs), done = self._start_gather(buffer)
                outputs += more_outputs
                inputs += more_inputs
                finish.append(done)
            ticket = lane.submit(lambda: self._issue_gather(outputs, inputs)) if inputs else None
            self._gather = ticket, finish

    def _gathers_by(self, buffer: ShardedBuffer) -> StagedCollective | None:
        staged = self.mesh.shard.size > 1 and not buffer.is_resharded
        return self.options.custom_gather if staged else None

    def _start_gather(self, buffer: ShardedBuffer) -> tuple[Collective, Callable[[], None]]:
        custom = self._gathers_by(buffer)
        return buffer.start_gather() if custom is None else buffer.start_staged_gather(custom.allocate)

    def _issue_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Sequence[Waitable]:
        first = self._buffers[0]
        if (custom := self._gathers_by(first)) is None:
            return first.gather_comm.all_gather(outputs, inputs)
        works = [
            custom(output_tensor=output, input_tensor=input_, group=first.comm.group, async_op=False)
            for output, input_ in zip(outputs, inputs, strict=True)
        ]
        return [work for work in works if work is not None]

    def wait_for_unshard(self) -> None:
        """Wait for the gather and register the unsharded parameters."""
        if self._gather is None:
            return
        ticket, finish = self._gather
        self._gather = None
        if ticket is not None:
            try:
                ticket.wait()
            except RuntimeError as error:
                explain(error, f"gathering the parameters of unit {self.name!r}")
                raise
        if finish:
            with torch.no_grad():
                for done in finish:
                    done()
            self._stale = False
            # Where parameters stay gathered; elsewhere the next use gathers again anyhow.
            keeps = self.mesh.strategy.keeps_unsharded or not self.options.reshard_after_forward
            self._versions = self._written() if keeps else None
        self._register_unsharded()

    def _register_unsharded(self) -> None:
        with without_torch_function():
            for slot in self.slots:
                requires_grad = slot.sharded.requires_grad
                if slot.unsharded is None:
                    slot.unsharded = self._make_unsharded(slot, requires_grad)
                elif slot.unsharded.requires_grad != requires_grad:
                    slot.unsharded.requires_grad_(requires_grad)
                for place in slot.places:
                    place.put(slot.unsharded)
        for buffer in self._buffers:
            buffer.drop_resharded()
        self.state = ShardState.UNSHARDED

    def _make_unsharded(self, slot: Slot, requires_grad: bool) -> nn.Parameter:
        with not_inference():
            value = slot.buffer.full_view(slot.index)
            if slot.parallel is not None:
                value = slot.parallel.unsharded(value)
            parameter = nn.Parameter(value, requires_grad=requires_grad)
        # An optimizer made while it is registered must not step it: the shards are what counts.
        remember_successor(parameter, self._self, self.slots.index(slot))
        return parameter

    def reshard(self, *, after_forward: bool = False) -> None:
        """Register the sharded parameters and free the gathered ones, unless the strategy keeps them.

        Args:
            after_forward: reshard to the smaller world, where the policy has one.
        """
        if self._gather is not None:
            self.wait_for_unshard()
        if after_forward and self.policy.reshard_to is not None and self.is_unsharded:
            self._reshard_to(self.policy.reshard_to)
            return
        if self.state is ShardState.SHARDED:
            return
        for slot in self.slots:
            for place in slot.places:
                place.put(slot.sharded)
        self.state = ShardState.SHARDED
        for buffer in self._buffers:
            buffer.drop_resharded()
            if not self.mesh.strategy.keeps_unsharded:
                buffer.free()

    def _reshard_to(self, smaller: DataParallelMesh) -> None:
        for buffer in self._buffers:
            slots = [slot for slot in self.slots if slot.buffer is buffer]
            if not buffer.can_reshard:
                shapes = [tensor.shape for tensor in buffer.layout.tensors]
                buffer.prepare_resharded(per_parameter(shapes, [0] * len(shapes), smaller.shard.size), smaller.shard)
            with torch.no_grad(), not_inference(), without_torch_function():
                views = buffer.reshard_to_smaller()
                for slot in slots:
                    assert slot.unsharded is not None
                    spec = make_spec(smaller.mesh, smaller.placements(0), slot.unsharded)
                    parameter = make_sharded_parameter(views[slot.index], spec, slot.sharded.requires_grad, self._self)
                    for place in slot.places:
                        place.put(parameter)
        self.state = ShardState.RESHARDED

    # -- Gradients

    def _reduce_dtype(self, gradient_dtype: torch.dtype) -> torch.dtype:
        wanted = self.policy.precision.reduce_dtype
        return wanted if wanted is not None and gradient_dtype.is_floating_point else gradient_dtype

    def accumulate(self) -> None:
        """Keep this backward's unsharded gradients for a later reduction, in the reduction's dtype."""
        for slot in self.slots:
            gradient = slot.unsharded.grad if slot.unsharded is not None else None
            if gradient is None:
                continue
            assert slot.unsharded is not None
            if slot.accumulated is not None:
                slot.accumulated += gradient
                slot.unsharded.grad = None
            elif gradient.dtype != (dtype := self._reduce_dtype(gradient.dtype)):
                slot.accumulated = gradient.to(dtype)
                slot.unsharded.grad = None

    def _trainable(self) -> list[Slot]:
        with without_torch_function():
            return [slot for slot in self.slots if slot.unsharded is not None and slot.sharded.requires_grad]

    def has_gradients(self) -> bool:
        """Whether an unsharded gradient waits for its reduction."""
        return any(
            slot.accumulated is not None or (slot.unsharded is not None and slot.unsharded.grad is not None)
            for slot in self.slots
        )

    def trains(self) -> bool:
        """Whether any parameter requires a gradient."""
        return bool(self._trainable())

    def kept(self, output: torch.Tensor) -> torch.Tensor:
        """``output``, or a copy if it is an unsharded parameter or a view of one, whose memory resharding frees."""
        own = local_of(output) if isinstance(output, DTensor) else output
        if self.mesh.strategy.keeps_unsharded or type(own) not in (torch.Tensor, nn.Parameter):
            return output
        freed = any(not buffer.is_identity and buffer.shares_memory(own) for buffer in self._buffers)
        return output.clone() if freed else output

    def drop_gradients(self) -> None:
        """Forget unsharded gradients."""
        for slot in self.slots:
            slot.accumulated = None
            if slot.unsharded is not None:
                slot.unsharded.grad = None
        for plan in self._plans.values():
            plan.partial = None

    def _take(self, slot: Slot) -> torch.Tensor | None:
        assert slot.unsharded is not None
        gradient, fresh = slot.accumulated, slot.unsharded.grad
        slot.accumulated = slot.unsharded.grad = None
        if gradient is None:
            gradient = fresh
        elif fresh is not None:
            gradient += fresh
        if gradient is None:
            return None
        if slot.parallel is not None:
            gradient = slot.parallel.local_gradient(gradient)
        if gradient.layout is not torch.strided:
            raise StateError(
                f"parameter {slot.name!r} got a {gradient.layout} gradient, which cannot be reduced to shards: "
                "use dense gradients (nn.Embedding(sparse=False))"
            )
        return gradient.contiguous()

    def take_gradients(self) -> list[tuple[list[Slot], list[torch.Tensor | None]]]:
        """Remove the unsharded gradients of the trainable parameters, those of one buffer together."""
        by_buffer: dict[int, tuple[list[Slot], list[torch.Tensor | None]]] = {}
        for slot in self._trainable():
            slots, gradients = by_buffer.setdefault(id(slot.buffer), ([], []))
            slots.append(slot)
            gradients.append(self._take(slot))
        return list(by_buffer.values())

    def reduce(self, slots: Sequence[Slot], gradients: list[torch.Tensor | None], lane: Lane) -> Reduction | None:
        """Start reducing unsharded ``gradients`` (emptied) of ``slots``; None if they are theirs already."""
        present = [gradient is not None for gradient in gradients]
        if self.options.zeros_for_unused:
            gradients = [
                self._zeros(s, s.buffer.dtype) if g is None else g for s, g in zip(slots, gradients, strict=True)
            ]
            present = [True] * len(slots)
        if self.mesh.size == 1 and self.options.all_reduce_hook is None:
            self._deliver_own(slots, gradients)
            return None
        dtypes = {gradient.dtype for gradient in gradients if gradient is not None}
        dtype = self._reduce_dtype(next(iter(dtypes), slots[0].buffer.dtype))
        filled: list[torch.Tensor] = []
        for slot, gradient in zip(slots, gradients, strict=True):
            if gradient is None:
                gradient = self._zeros(slot, next(iter(dtypes), dtype))
            filled.append(gradient if len(dtypes) <= 1 and slot.buffer.dtype != dtype else gradient.to(dtype))
        gradients.clear()
        plan = self._plan(slots, dtype)
        self._check_partial_sums(plan)
        replicate = self.mesh.replicate
        size = self.mesh.size // self.mesh.shard.size
        options = self.options
        route = Route(
            options.reduce_comm or self.mesh.shard,
            replicate,
            gradient_scale(dtype, self.mesh.shard.size, size, options.divide_factor, options.force_sum),
            stop_after_shard=bool(replicate) and not options.all_reduce_gradients,
            hook=options.all_reduce_hook,
            custom=options.custom_reduce_scatter,
        )
        return Reduction(
            plan,
            route,
            filled,
            present,
            lane,
            slots[0].buffer.local,
            lambda shards: self._deliver(slots, shards),
            self.name,
        )

    def _check_partial_sums(self, plan: GradientPlan) -> None:
        for other in self._plans.values():
            if other is not plan and other.partial is not None and other.dtype == plan.dtype:
                raise StateError(
                    f"unit {self.name!r}: other parameters require gradients now than in the backward whose sums still "
                    "wait for their all-reduce; change requires_grad only after a backward that all-reduces"
                )

    def _zeros(self, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(slot.buffer.layout.tensors[slot.index].shape, dtype=dtype, device=self.mesh.device)

    def _plan(self, slots: Sequence[Slot], dtype: torch.dtype) -> GradientPlan:
        shard = self.mesh.shard
        packs_all = shard.size == 1 or self.options.custom_reduce_scatter is not None
        # Not whether these gradients need a cast: accumulated ones do not, and their partial sums must find the plan.
        cast = slots[0].buffer.dtype != dtype
        key = (tuple(id(slot) for slot in slots), dtype, packs_all)
        if (plan := self._plans.get(key)) is None:
            tensors = [slot.buffer.layout.tensors[slot.index] for slot in slots]
            plan = self._plans[key] = GradientPlan(tensors, shard, dtype, cast, packs_all)
        return plan

    def _deliver_own(self, slots: Sequence[Slot], gradients: list[torch.Tensor | None]) -> None:
        """A world of one: the unsharded gradient is the shard, with the precision that a reduction would leave it."""
        factor, like = self.options.divide_factor, slots[0].buffer.local
        shards: list[torch.Tensor | None] = []
        for gradient in gradients:
            if gradient is not None:
                gradient = gradient.to(self._reduce_dtype(gradient.dtype))
                if factor not in (None, 1):
                    gradient.div_(factor)
                gradient = gradient.to(like.device, like.dtype)
            shards.append(gradient)
        gradients.clear()
        self._deliver(slots, shards)

    def _deliver(self, slots: Sequence[Slot], shards: Sequence[torch.Tensor | None]) -> None:
        """Add ``shards`` to the sharded parameters' gradients."""
        new: list[torch.Tensor] = []
        old: list[torch.Tensor] = []
        with torch.no_grad(), without_torch_function():
            for slot, shard in zip(slots, shards, strict=True):
                if shard is None:
                    continue
                reduced = run_tensor_hooks(slot.sharded, wrap_gradient(shard, slot.sharded))
                if (gradient := slot.sharded.grad) is None:
                    slot.sharded.grad = reduced
                else:
                    old.append(local_of(gradient))
                    new.append(local_of(reduced))
            if old:
                add_each(old, new)
            hooks = [
                (hook, slot.sharded)
                for slot, shard in zip(slots, shards, strict=True)
                if shard is not None
                for hook in post_accumulate_grad_hooks(slot.sharded)
            ]
        for hook, parameter in hooks:
            hook(parameter)


def _newest(slot: Slot) -> nn.Parameter:
    """What is registered for a slot: of a tied parameter, the one that was replaced last."""
    replaced = [value for place in slot.places if (value := place.get()) is not slot.sharded]
    return replaced[-1] if replaced else slot.sharded
